"""`rackproof sign` and `rackproof verify`: arguments to calls."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fleet.records.load import refuse_no_run
from fleet.report.formatting import clean, status
from fleet.signature import signing
from fleet.signature.rejudged import Judge, Rules

_SHOWN = 20
_WORDS = {signing.HOLDS: "holds", signing.BROKEN: "DOES NOT HOLD", signing.UNSURE: "holds, but was not judged alike"}


def add_sign(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add sign to the command."""
    verb = verbs.add_parser(
        "sign",
        help="sign a reported run with an SSH key: SHA256SUMS, SHA256SUMS.sig and signed.json in its directory",
        description="Judges the run again, and where report.json and its views are what the records give, takes a SHA-256 of "
        "every file (signed.json says what is left out, and why) and signs the sums by ssh-keygen -Y sign -n rackproof.",
        epilog="example: rackproof sign runs/rack12 --key ~/.ssh/id_ed25519. Exit codes: 0 signed, whatever was decided; "
        "2 no report, one that the records do not give, a view of it that it does not give, a file that changed meanwhile or was "
        "left half written, or a key that cannot be used; 75 the run goes on.",
    )
    verb.add_argument("run_dir", type=Path, help="directory of the run")
    verb.add_argument(
        "--key", type=Path, required=True, help="private key; or a public one whose private half is in an agent"
    )
    _rules(verb, "as rackproof report was given it")
    verb.add_argument("--json", action="store_true", help="print what was signed as JSON")
    return verb


def add_verify(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add verify to the command."""
    verb = verbs.add_parser(
        "verify",
        help="whether a signed run is what was signed, by whom, and whether its records give its report",
        epilog="example: rackproof verify runs/rack12 --allowed-signers signers. Exit codes: 0 it holds; 1 a file was changed, "
        "added or removed, the signature is not of an allowed signer, or the records give another report or view; 2 it is not "
        "signed, or its judgement cannot be repeated here, as packs or Rackproof changed since and judge otherwise.",
    )
    verb.add_argument("run_dir", type=Path, help="directory of the run")
    verb.add_argument(
        "--allowed-signers",
        type=Path,
        required=True,
        help='who may sign, as ssh-keygen(1) has it: IDENTITY namespaces="rackproof" KEYTYPE KEY',
    )
    verb.add_argument("--signer", help="it must be signed by this identity of that file")
    verb.add_argument("--no-judge", action="store_true", help="hashes and signature alone")
    _rules(verb, "where those that the signer named lie elsewhere here; then name all of them")
    verb.add_argument("--json", action="store_true", help="print what was found as JSON")
    return verb


def _rules(verb: argparse.ArgumentParser, about: str) -> None:
    verb.add_argument("--criteria", action="append", default=[], help=f"a pack, a name or a .yml file, {about}")
    verb.add_argument("--waivers", action="append", default=[], help=f"a file of waivers, {about}")


def _given(options: argparse.Namespace) -> Rules:
    return Rules(criteria=tuple(options.criteria), waivers=tuple(options.waivers))


def sign(options: argparse.Namespace, judge: Judge) -> int:
    """Run the verb."""
    refuse_no_run(options.run_dir)
    report, count, notes = signing.sign(options.run_dir, options.key.expanduser(), _given(options), judge)
    if options.json:
        told = {"run_id": report.run_id, "mark": report.mark, "decision": report.decision, "files": count}
        print(json.dumps({**told, "notes": notes}))
    else:
        print(
            f"signed: run {clean(report.run_id)}, {status(report)}, {count} files: {options.run_dir / 'SHA256SUMS.sig'}"
        )
        for text in notes:
            print(f"- {clean(text)}")
    return 0


def verify(options: argparse.Namespace, judge: Judge) -> int:
    """Run the verb."""
    refuse_no_run(options.run_dir)
    found = signing.verify(
        options.run_dir,
        options.allowed_signers.expanduser(),
        None if options.no_judge else judge,
        identity=options.signer,
        rules=_given(options) if options.criteria or options.waivers else None,
    )
    if options.json:
        about = {key: found.statement.get(key, "") for key in ("run_id", "mark", "decision", "status", "signed_at")}
        told = {"code": found.code, "signer": found.signer, **about, "files": found.files}
        print(json.dumps({**told, "problems": found.problems, "notes": found.notes}, indent=1))
        return found.code
    if found.statement:
        said = found.statement
        print(f"run {said['run_id']}: {said['status']}, {found.files} files as they were signed at {said['signed_at']}")
    if found.signer:
        print(f"signed by {clean(found.signer)}")
    for text in found.notes[:_SHOWN]:
        print(f"- {clean(text)}")
    for text in found.problems[:_SHOWN]:
        print(f"- {clean(text)}", file=sys.stderr)
    if len(found.problems) > _SHOWN:
        print(f"… and {len(found.problems) - _SHOWN} more (--json)", file=sys.stderr)
    print(f"the signature {_WORDS[found.code]}", file=sys.stderr if found.code else sys.stdout)
    return found.code
