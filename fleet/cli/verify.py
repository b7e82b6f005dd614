"""`rackproof verify`: verify a signed run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fleet.cli.sign import add_rules, rules_of
from fleet.progress import progress_bar
from fleet.quantities import counted
from fleet.records.load import require_run
from fleet.report.formatting import clean
from fleet.report.judge_run import judge_report
from fleet.signature import signing
from schemas.errors import UsageError

MOST_LINES = 20
RESULTS = {
    signing.VALID: "the signature is valid",
    signing.CHANGED: "the signed run is NOT VALID",
    signing.UNCONFIRMED: "the signature is valid, but judging again could not confirm the report",
}


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add verify to the command."""
    verb = verbs.add_parser(
        "verify",
        help="check a signed run: its files are unchanged, its signer is allowed, and judging its records gives the same report",
        epilog="example: rackproof verify runs/rack12 --allowed-signers signers. "
        "Exit codes: 0 the signature is valid; 1 a file was changed, "
        "added or removed, the signer is not allowed, or judging the records gives another report; 2 the run is not "
        "signed, or it cannot be judged the same way here because packs or Rackproof changed.",
    )
    verb.add_argument("run_dir", type=Path, help="directory of the run")
    verb.add_argument(
        "--allowed-signers",
        type=Path,
        required=True,
        help='allowed signers, in the format of ssh-keygen(1): IDENTITY namespaces="rackproof" KEYTYPE KEY',
    )
    verb.add_argument("--signer", help="accept only this signer: an IDENTITY in the allowed signers")
    verb.add_argument("--no-judge", action="store_true", help="check only hashes and signature")
    add_rules(
        verb,
        "needed only if a pack or waiver file of the signer has another path here; then give every pack and waiver file",
    )
    verb.add_argument("--json", action="store_true", help="print the result as JSON")
    verb.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.no_judge and (given := "--criteria" if options.criteria else "--waivers" if options.waivers else ""):
        raise UsageError(f"{given} has no effect with --no-judge: leave out one of the two")
    require_run(options.run_dir)
    with progress_bar(sys.stderr):
        result = signing.verify(
            options.run_dir,
            options.allowed_signers.expanduser(),
            None if options.no_judge else judge_report,
            identity=options.signer,
            rules=rules_of(options) if options.criteria or options.waivers else None,
        )
    statement = result.statement
    if options.json:
        about = {key: statement.get(key, "") for key in ("run_id", "mark", "decision", "status", "signed_at")}
        document = {"code": result.code, "signer": result.signer, **about, "files": result.files}
        print(json.dumps({**document, "problems": result.problems, "notes": result.notes}, indent=1))
        return result.code
    if statement:
        unchanged = f"{counted(result.files, 'file')} unchanged since the run was signed at {statement['signed_at']}"
        print(f"run {statement['run_id']}: {statement['status']}, {unchanged}")
    if result.signer:
        print(f"signed by {clean(result.signer)}")
    for texts, stream in ((result.notes, sys.stdout), (result.problems, sys.stderr)):
        for text in texts[:MOST_LINES]:
            print(f"- {clean(text)}", file=stream)
        if len(texts) > MOST_LINES:
            print(f"… and {len(texts) - MOST_LINES} more (--json)", file=stream)
    print(RESULTS[result.code], file=sys.stderr if result.code else sys.stdout)
    return result.code
