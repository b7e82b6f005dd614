"""Run the revalidation playbook from a timer.

The date becomes a part of the run id, and the exit code depends on the decision.
"""

from __future__ import annotations

import argparse
import json
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
from fleet.report.judge_run import EXIT_CODES
from schemas import documents
from schemas.errors import HELD, RunError, UsageError
from schemas.reports import INCOMPLETE
from schemas.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
MAX_RUN_ID = 64 - len("-1405")
"""Maximum length of a run id without the time of day. schemas/record.schema.json allows 64 characters with the time of day."""
NOT_UPDATED = (
    "ansible-pull could not update the checkout, so nothing was measured: its output is in the log of the control node"
)
NOTIFIED = "notified.json"
"""File in which the role `notify` records that it has handled a report, even if sending has failed."""


def revalidate(options: argparse.Namespace) -> int:
    """Run the playbook and return the exit code of the decision on the run.

    If the playbook sent no notification, or one that does not name the nodes that stay drained, run `notify.yml`. Also run it if
    the playbook wrote no report. If the run is accepted but nodes stay drained, return the exit code of an incomplete run.

    Do nothing and return HELD if another process has locked the run. Do the same if a run that began in the same minute was
    already accepted or rejected, because the new run would get the same id.
    """
    if options.active:
        return _is_active(options.runs)
    directory = _directory(options)
    run_id = directory.name
    arguments = [argument for source in options.inventory for argument in ("-i", _inventory(source))]
    playbook_options = [
        "-e",
        f"rackproof_run_id={run_id}",
        "-e",
        f"rackproof_runs_directory={options.runs.absolute()}",
        *options.options,
    ]
    if options.not_updated:
        _notify(directory, [*arguments, *playbook_options], failure=NOT_UPDATED)
        raise RunError(NOT_UPDATED)
    if locked := _locked_by(directory):
        print(f"rackproof: {locked}: nothing was done", file=sys.stderr)
        return HELD
    if _is_decided(directory):
        print(
            f"rackproof: nothing was done: run {run_id}, which was started in this minute, was already accepted or "
            "rejected: start again in the next minute",
            file=sys.stderr,
        )
        return HELD
    playbook = ROOT / "playbooks" / "revalidate.yml"
    if not playbook.exists():
        raise UsageError(f"{playbook} is missing: run this in a checkout of Rackproof, which has the playbooks")
    previous_report = _report_time_ns(directory)
    code = _play(playbook, [*arguments, *playbook_options])
    problems = scheduler.resume_left_over(directory)
    for line in (*problems, *scheduler.notes(directory)):
        print(f"rackproof: {line}", file=sys.stderr)
    if _report_time_ns(directory) == previous_report:
        return _without_report(directory, [*arguments, *playbook_options], code)
    if not _is_notified(directory, scheduler.still_drained(directory) if problems else []):
        _notify(directory, [*arguments, *playbook_options])
    report, plan = read(directory)
    outcome, _ = state(report, plan)
    print(f"rackproof: run {run_id}: {outcome}: {RunDirectory(directory).page}", file=sys.stderr)
    if problems:
        print(
            f"rackproof: STILL DRAINED in the scheduler: rackproof scheduler resume --run-dir {directory}",
            file=sys.stderr,
        )
    return EXIT_CODES[str(report["decision"])] or (EXIT_CODES[INCOMPLETE] if problems else 0)


def _is_active(runs: Path) -> int:
    """Return 0 if a run is active, otherwise 1. A run must end with the version of the checkout with which it began."""
    owner = run_lock.running(runs.absolute())
    if owner is None:
        return 1
    print(
        f"rackproof: the checkout is not updated, because run {owner.run_id} is locked by {owner.who()} since {owner.since}",
        file=sys.stderr,
    )
    return 0


def _inventory(source: str) -> str:
    """Return the absolute path of an inventory, because ansible-playbook runs in the directory of the checkout.

    A list of hosts instead of a path (`h1,h2`: it has a comma) is returned unchanged.
    """
    if "," in source:
        return source
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise UsageError(
            f"-i {source}: no such file or directory: give a path relative to {Path.cwd()}, or an absolute one"
        )
    return str(path)


def _directory(options: argparse.Namespace) -> Path:
    """Return the directory of the run to start or to resume.

    This is the directory of the newest run with the given name and date. If that run was accepted or rejected and is not locked,
    a new run is started instead, and its id also has the time of day.
    """
    # Timers start by local time. The UTC date may be the same for the runs of two local days.
    now = datetime.now(UTC).astimezone()
    run_id = f"{options.name}-{now.strftime(options.date)}"
    directory: Path = options.runs.absolute() / run_id
    if not scheduler.NAME.fullmatch(run_id):
        raise UsageError(
            f"run id {run_id!r}: it must begin with a letter or digit, and have only letters, digits, '.', '_' and '-': "
            "change --name or --date"
        )
    if len(run_id) > MAX_RUN_ID:
        raise UsageError(
            f"run id {run_id!r} has {len(run_id)} characters, at most {MAX_RUN_ID} are allowed (the id of a "
            "second run on the same date also has the time of day): give a shorter --name or --date"
        )
    last = _newest_run(directory)
    if _locked_by(last) or not _is_decided(last):
        return last
    new = directory.with_name(f"{run_id}-{now:%H%M}")
    if new != last:
        print(f"rackproof: run {last.name} was already accepted or rejected: starting run {new.name}", file=sys.stderr)
    return new


def _newest_run(directory: Path) -> Path:
    """Return the newest run with the name and date of `directory`.

    This is the run with the latest time of day in its id, or `directory` if no run has a time of day.
    """
    return max(directory.parent.glob(f"{directory.name}-[0-2][0-9][0-5][0-9]"), default=directory)


def _is_decided(directory: Path) -> bool:
    """Return whether the run was accepted or rejected. Such a run is complete: if it were resumed, nothing would be measured."""
    try:
        return str(read(directory)[0]["decision"]) != INCOMPLETE
    except RunError:
        return False


def _locked_by(directory: Path) -> str:
    """Return a message that names the process that has locked the run; empty unless that process is certainly running."""
    owner = run_lock.holder(directory)
    return f"run {owner.run_id} is locked by {owner.who()} since {owner.since}" if owner and owner.is_running() else ""


def _report_time_ns(directory: Path) -> int:
    """Return when the report was written, in ns since 1970; 0 if there is no report."""
    try:
        return RunDirectory(directory).report.stat().st_mtime_ns
    except OSError:
        return 0


def _is_notified(directory: Path, drained: Collection[str]) -> bool:
    """Return whether the role `notify` has handled this report, with a notification that names all hosts in `drained`."""
    path = directory / NOTIFIED
    try:
        notification = documents.parse(path.read_bytes(), source=NOTIFIED)
        is_newer = path.stat().st_mtime_ns >= _report_time_ns(directory)
        return is_newer and set(drained) <= set(notification.get("drained", ()))
    except (OSError, AttributeError, TypeError, documents.DocumentError):
        return False


def _notify(directory: Path, arguments: list[str], failure: str = "") -> None:
    """Send the notification about a run. `failure`: why the run has no report; empty if it has one."""
    variables = {"_rackproof_notify_run": str(directory), "_rackproof_notify_failure": failure}
    _play(ROOT / "playbooks" / "notify.yml", [*arguments, "-e", json.dumps(variables)])


def _without_report(directory: Path, arguments: list[str], code: int) -> int:
    if locked := _locked_by(directory):
        print(f"rackproof: {locked}: nothing was done", file=sys.stderr)
        return HELD
    _notify(
        directory, arguments, failure=f"the playbook exited with {code}: its output is in the log of the control node"
    )
    raise RunError(
        f"the playbook exited with {code} and wrote no report: see its output above, and resume run {directory.name}"
    )


def _play(playbook: Path, arguments: list[str]) -> int:
    """Run a playbook and return its exit code. SIGTERM and SIGHUP to this process interrupt the playbook.

    If the playbook exits before its play "Give the hosts back", the background process of `scheduler.py` resumes the drained
    nodes.
    """
    program = shutil.which("ansible-playbook", path=Path(sys.executable).parent) or shutil.which("ansible-playbook")
    if program is None:
        raise UsageError("ansible-playbook is not on PATH: install rackproof[control], or run `make dev`")
    environment = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **os.environ}
    process = subprocess.Popen([program, *arguments, str(playbook)], cwd=ROOT, env=environment)

    def interrupt(number: int, frame: object) -> None:
        process.send_signal(signal.SIGINT)

    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the playbook directly
    try:
        return process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
