"""`rackproof sign`: sign a reported run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fleet.progress import progress_bar
from fleet.quantities import counted
from fleet.records.load import require_run
from fleet.report.formatting import clean, status
from fleet.report.judge_run import judge_report
from fleet.signature import signing
from fleet.signature.rejudged import Rules
from schemas.reports import FleetReport


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add sign to the command."""
    verb = verbs.add_parser(
        "sign",
        help="sign a reported run with an SSH key: write SHA256SUMS, SHA256SUMS.sig and signed.json into the run directory",
        description="Judges the run again. If report.json and its views (report.html and other formats) match the records, "
        "writes SHA256SUMS with the SHA-256 of each file of the run, and signs it with ssh-keygen -Y sign -n rackproof. "
        "signed.json lists the files that are not signed, and why.",
        epilog="example: rackproof sign runs/rack12 --key ~/.ssh/id_ed25519. Exit codes: 0 signed, whatever the decision; "
        "2 there is no report, the report or one of its views does not match the records, a file changed meanwhile or is "
        "partly written, or the key cannot be used; 75 the run is in progress.",
    )
    verb.add_argument("run_dir", type=Path, help="directory of the run")
    verb.add_argument(
        "--key",
        type=Path,
        required=True,
        help="file with the private key, or with a public key whose private key is in an SSH agent",
    )
    add_rules(verb, "as given to rackproof report")
    verb.add_argument(
        "--json", action="store_true", help="print run id, mark, decision, number of signed files and notes as JSON"
    )
    verb.set_defaults(call=call)


def add_rules(verb: argparse.ArgumentParser, which: str) -> None:
    """Add the options that name criteria and waivers in addition to those of the plan."""
    verb.add_argument("--criteria", action="append", default=[], help=f"a pack (name or .yml file), {which}")
    verb.add_argument("--waivers", action="append", default=[], help=f"a waiver file, {which}")


def rules_of(options: argparse.Namespace) -> Rules:
    """Return the criteria and waivers that the options name."""
    return Rules(criteria=tuple(options.criteria), waivers=tuple(options.waivers))


def _judge(run_dir: Path, criteria: Sequence[str], waivers: Sequence[str]) -> FleetReport:
    with progress_bar(sys.stderr):  # the bar must end before ssh-keygen asks for a passphrase
        return judge_report(run_dir, criteria, waivers)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    require_run(options.run_dir)
    report, count, notes = signing.sign(options.run_dir, options.key.expanduser(), rules_of(options), _judge)
    if options.json:
        document = {"run_id": report.run_id, "mark": report.mark, "decision": report.decision, "files": count}
        print(json.dumps({**document, "notes": notes}))
        return 0
    print(
        f"signed: run {clean(report.run_id)}, {status(report)}, {counted(count, 'file')}: {options.run_dir / 'SHA256SUMS.sig'}"
    )
    for text in notes:
        print(f"- {clean(text)}")
    return 0
