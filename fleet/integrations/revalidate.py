"""The verb `revalidate`, which a timer starts: runs the playbook under a run id of the date, and exits by the decision."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

from fleet.integrations import scheduler
from fleet.integrations.notification import read, state
from fleet.records import run_lock
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.reports import ACCEPTED, INCOMPLETE, REJECTED
from schemas.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
EXIT = {ACCEPTED: 0, REJECTED: 1, INCOMPLETE: 2}
HELD = 75
END_S = 60.0
MOST = 64 - len("-1405")
"""Characters of a run id (`run_id` of schemas/record.schema.json) that leave room for the time of day."""
TOLD = "notified.json"


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add revalidate to the command."""
    verb = verbs.add_parser(
        "revalidate",
        help="run playbooks/revalidate.yml under a run id of the date; exits 0, 1 or 2 as report does, 75 where it is under way",
        epilog="example: rackproof revalidate -i inventory/rack12 --name rack12 -- -e rackproof_budget_s=300",
    )
    verb.add_argument(
        "-i", "--inventory", action="append", required=True, help="as for ansible-playbook; may be repeated"
    )
    verb.add_argument("--name", default="revalidate", help="the run id begins so (default: revalidate)")
    verb.add_argument(
        "--date",
        default="%Y%m%d",
        help="and ends so, of now in UTC, as strftime writes it (default: %(default)s)".replace("%Y%m%d", "%%Y%%m%%d"),
    )
    verb.add_argument(
        "--runs", type=Path, default=ROOT / "runs", help="directory of the runs (default: runs beside the playbooks)"
    )
    verb.add_argument("options", nargs="*", help="after --: options of ansible-playbook")
    return verb


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    directory = _directory(options)
    run_id = directory.name
    if told := _held(directory):
        print(f"rackproof: {told}: nothing was done", file=sys.stderr)
        return HELD
    if _done(directory):
        print(f"rackproof: run {run_id} is reported already, this minute: nothing was done", file=sys.stderr)
        return HELD
    playbook = ROOT / "playbooks" / "revalidate.yml"
    if not playbook.exists():
        raise UsageError(f"{playbook} is missing: run this in a checkout, where the playbooks are")
    before = _stamp(directory)
    arguments = [argument for source in options.inventory for argument in ("-i", _inventory(source))]
    given = [
        "-e",
        f"rackproof_run_id={run_id}",
        "-e",
        f"rackproof_runs_directory={options.runs.absolute()}",
        *options.options,
    ]
    code = _play(playbook, [*arguments, *given])
    left = scheduler.left_over(directory)
    for line in (*left, *scheduler.notes(directory)):
        print(f"rackproof: {line}", file=sys.stderr)
    if _stamp(directory) == before:
        return _without_report(directory, code)
    if not _told_since(directory, scheduler.still_drained(directory) if left else []):
        _play(ROOT / "playbooks" / "notify.yml", [*arguments, *given, "-e", f"_rackproof_notify_run={directory}"])
    report, plan = read(directory)
    found, _ = state(report, plan)
    print(f"rackproof: run {run_id}: {found}: {RunDirectory(directory).page}", file=sys.stderr)
    if left:
        print(
            f"rackproof: NOT GIVEN BACK to the scheduler: rackproof scheduler resume --run-dir {directory}",
            file=sys.stderr,
        )
    return EXIT[str(report["decision"])] or (EXIT[INCOMPLETE] if left else 0)


def _inventory(source: str) -> str:
    """An inventory as the playbook finds it, which is started in the checkout; hosts with a comma between them are no path."""
    if "," in source:
        return source
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise UsageError(f"-i {source}: no such file or directory: give it as it lies from {Path.cwd()}, or whole")
    return str(path)


def _directory(options: argparse.Namespace) -> Path:
    """Of the newest run of this date; once that was accepted or rejected, of another with the time of day besides."""
    now = datetime.now(UTC)
    try:
        run_id = f"{options.name}-{now.strftime(options.date)}"
    except ValueError as error:
        raise UsageError(f"--date {options.date!r}: {error}: give a format of strftime, such as %Y%m%d") from None
    directory: Path = options.runs.absolute() / run_id
    if not scheduler.NAME.fullmatch(run_id):
        raise UsageError(
            f"run id {run_id!r}: --name and --date give letters, digits, '.', '_' and '-' only, and begin with a letter or digit"
        )
    if len(run_id) > MOST:
        raise UsageError(
            f"run id {run_id!r} has {len(run_id)} characters, {MOST} at most, as a second run of the date adds its time of "
            "day: give a shorter --name or --date"
        )
    last = _last(directory)
    if _held(last) or not _done(last):
        return last
    new = directory.with_name(f"{run_id}-{now:%H%M}")
    print(f"rackproof: run {last.name} is reported already: this is run {new.name}", file=sys.stderr)
    return new


def _last(directory: Path) -> Path:
    """The newest run of the date: the later ones have the time of day besides."""
    return max(directory.parent.glob(f"{directory.name}-[0-2][0-9][0-5][0-9]"), default=directory)


def _done(directory: Path) -> bool:
    """Whether it was accepted or rejected: to carry it out again would measure nothing. An incomplete one goes on."""
    try:
        return str(read(directory)[0]["decision"]) != INCOMPLETE
    except RunError:
        return False


def _held(directory: Path) -> str:
    """Who carries the run out now; nothing where nobody does."""
    by = run_lock.holder(directory)
    return f"run {by.run_id} is locked by {by.who()} since {by.since}" if by and by.lives() else ""


def _stamp(directory: Path) -> int:
    """When the report was written; 0 for none."""
    try:
        return RunDirectory(directory).report.stat().st_mtime_ns
    except OSError:
        return 0


def _told_since(directory: Path, drained: Collection[str]) -> bool:
    """Whether somebody was told of this report and of what stays drained, or that nobody is to be told."""
    try:
        told = documents.parse((directory / TOLD).read_bytes(), source=TOLD)
        return (directory / TOLD).stat().st_mtime_ns >= _stamp(directory) and set(drained) <= set(
            told.get("drained", ())
        )
    except (OSError, AttributeError, TypeError, documents.DocumentError):
        return False


def _without_report(directory: Path, code: int) -> int:
    if told := _held(directory):
        print(f"rackproof: {told}: nothing was done", file=sys.stderr)
        return HELD
    raise RunError(
        f"the playbook ended with {code} and without a report: see what it says above, and resume run {directory.name}"
    )


def _play(playbook: Path, arguments: list[str]) -> int:
    """Runs a playbook to its end. When this process is told to end, so is the playbook, and what was drained is given back."""
    program = shutil.which("ansible-playbook", path=Path(sys.executable).parent) or shutil.which("ansible-playbook")
    if program is None:
        raise UsageError("ansible-playbook is not on PATH: install rackproof[control], or run `make dev`")
    environment = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **os.environ}
    process = subprocess.Popen([program, *arguments, str(playbook)], cwd=ROOT, env=environment)

    def end(number: int, frame: object) -> None:
        process.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal it has had it itself
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
