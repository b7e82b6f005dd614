"""Ask Slurm or Kubernetes whether hosts are in use, drain them for a run, and resume them after the run.

A node is listed in `drained.json` of the run directory before it is drained. A background process waits until the playbook
exits for any reason, then resumes the nodes. The command `rackproof scheduler resume` resumes them at once. A node is resumed
only if it still has the drain reason that this run gave it, and is not out of service for another reason.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleet.integrations.schedulers import CORDONED, KINDS, OURS, Scheduler, drain_reason, scheduler_client
from fleet.records import run_lock
from schemas import documents
from schemas.errors import RunError
from schemas.locks import OLD_START_TIME, exclusive, process_start_time

DRAINED, GUARD, NOTES = "drained.json", "drained.lock", "scheduler.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
POLL_S, GUARD_S = 5.0, 0.5
"""Seconds between two checks for jobs on the drained nodes, and between two checks whether the playbook has exited."""
_MAX_JOBS = 3
"""A message names at most this many jobs of a node."""
BACKOFF_S = (2.0, 10.0, 30.0)
"""Seconds to wait before the second, third and fourth attempt to resume the nodes."""


def drain_or_ask(
    directory: Path, kind: str, words: Sequence[str], nodes: Mapping[str, str], *, drain: bool, wait_s: float
) -> dict[str, str]:
    """Return the hosts that cannot be measured now: host -> why it is in use or could not be drained.

    Drained hosts that stay in use are resumed.

    Args:
        directory: the run directory.
        kind, words: scheduler, and the words that precede its commands, as for `scheduler_client`.
        nodes: host -> name of its node in the scheduler.
        drain: drain the nodes first.
        wait_s: how long to wait for the jobs on drained nodes to finish; without `drain` there is no wait.
    """
    client, busy = scheduler_client(kind, words), dict[str, str]()
    if drain:
        busy |= _drain(directory, kind, words, nodes)
    deadline = time.monotonic() + (wait_s if drain else 0.0)
    pending = [host for host in nodes if host not in busy]
    while True:
        in_use = {host: reason for host in pending if (reason := _reason_in_use(client, nodes[host]))}
        pending = list(in_use)
        if not pending or time.monotonic() >= deadline:
            break
        time.sleep(min(POLL_S, max(0.1, deadline - time.monotonic())))
    _resume_nodes(directory, list(in_use))
    return {**busy, **in_use}


def _reason_in_use(client: Scheduler, node: str) -> str:
    """Return the jobs on a node, as text; empty if it has none. If the scheduler does not answer, the node counts as in use."""
    try:
        jobs = client.jobs(node)
        return "; ".join([*jobs[:_MAX_JOBS], *([f"{len(jobs) - _MAX_JOBS} more"] if len(jobs) > _MAX_JOBS else [])])
    except RunError as error:
        return f"the scheduler cannot be asked: {error}"


def _drain(directory: Path, kind: str, words: Sequence[str], nodes: Mapping[str, str]) -> dict[str, str]:
    """Drain the nodes that are in service and not drained yet. Return host -> why it cannot be measured.

    A host that an earlier run left drained is measured. A note on it is written to `scheduler.json`.
    """
    client, failed, notes, run_id = scheduler_client(kind, words), dict[str, str](), dict[str, str](), directory.name
    for host, node in nodes.items():
        try:
            state = client.node_state(node)
            if state.drain_reason not in ("", drain_reason(run_id)):
                _check_other_run(directory, host, state.drain_reason, failed, notes)
            elif state.unhealthy_reason and not state.drain_reason:
                failed[host] = f"node {node} was taken out of service by others ({state.unhealthy_reason})"
            else:
                _record_drain(directory, kind, words, {host: node})
                if not state.drain_reason:
                    client.drain(node, run_id)
        except RunError as error:
            failed[host] = f"node {node} could not be drained: {error}"
    if notes or (directory / NOTES).exists():
        documents.write(directory / NOTES, notes)
    return failed


def _check_other_run(directory: Path, host: str, reason: str, failed: dict[str, str], notes: dict[str, str]) -> None:
    """Add an entry to `failed` or `notes` if another run of Rackproof drained the host.

    If that run may be active, the entry is in `failed`. If it has ended without resuming the host, the host is measured and the
    entry is in `notes`. A host that an administrator drained is measured, without an entry.
    """
    run_id = reason.removeprefix(OURS)
    if not reason.startswith(OURS) or not NAME.fullmatch(run_id):
        return
    owner = run_lock.holder(directory.parent / run_id)
    if owner and owner.is_running() is not False:
        failed[host] = f"run {run_id} drained this host and is locked by {owner.who()} since {owner.since}"
    else:
        notes[host] = (
            f"run {run_id} drained this host and ended without resuming it: it is measured and stays drained; to resume it: "
            f"rackproof scheduler resume --run-dir {directory.parent / run_id}"
        )


def _record_drain(directory: Path, kind: str, words: Sequence[str], nodes: Mapping[str, str]) -> None:
    """Record nodes in `drained.json` before they are drained.

    In the first call of a playbook, also start the background process.
    """
    with exclusive(directory / GUARD):
        record = _drain_record(directory)
        pid = run_lock.playbook() or os.getppid()
        by = {"pid": pid, "start_time": process_start_time(pid)}
        is_first = record.get("by") != by
        documents.write(
            directory / DRAINED,
            {"kind": kind, "words": list(words), "by": by, "nodes": {**record.get("nodes", {}), **nodes}},
        )
    if is_first:
        _start_guard(directory)


def _drain_record(directory: Path) -> dict[str, Any]:
    """Return the content of `drained.json`; empty if it does not exist.

    Raises:
        RunError: the file cannot be read, or does not have the form in which Rackproof writes it. The `words` of such a file
            (they precede each command of the scheduler, such as `sudo`) must not be executed.
    """
    path = directory / DRAINED
    try:
        text = path.read_bytes().replace(OLD_START_TIME, b'"start_time":')
        document = documents.parse(text, source=DRAINED)
    except FileNotFoundError:
        return {}
    except (OSError, documents.DocumentError) as error:
        raise RunError(f"{path} cannot be read ({error}): resume the nodes by hand, and remove the file") from None
    if not _is_ours(document):
        raise RunError(f"{path} was not written by Rackproof: resume the nodes by hand, and remove the file")
    return dict(document)


def _is_ours(document: object) -> bool:
    keys = {"kind", "words", "by", "nodes"}
    if not isinstance(document, dict) or set(document) != keys or document["kind"] not in KINDS:
        return False
    words, by, nodes = document["words"], document["by"], document["nodes"]
    return (
        isinstance(words, list)
        and all(isinstance(word, str) for word in words)
        and isinstance(by, dict)
        and isinstance(by.get("pid"), int)
        and isinstance(by.get("start_time"), str)
        and are_nodes(nodes)
    )


def are_nodes(document: object) -> bool:
    """Return whether a document maps hosts to valid node names."""
    return isinstance(document, dict) and all(
        isinstance(node, str) and NAME.fullmatch(node) for node in document.values()
    )


def _start_guard(directory: Path) -> None:
    """Start the background process in a session of its own, so that a signal to the playbook (Ctrl+C) does not end it."""
    program = str(Path(__file__).parents[2] / "rackproof")
    command = [sys.executable, program, "scheduler", "resume", "--when-finished", f"--run-dir={directory}"]
    log = (os.POSIX_SPAWN_OPEN, 1, str(directory / "drained.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[no_input, log, (os.POSIX_SPAWN_DUP2, 1, 2)], setsid=True
    )


def _resume_nodes(directory: Path, hosts: Sequence[str]) -> list[str]:
    """Resume those of the hosts that this run drained; return a line for each that could not be resumed."""
    problems = []
    with exclusive(directory / GUARD):
        record = _drain_record(directory)
        nodes = dict(record.get("nodes", {}))
        for host in hosts if nodes else ():
            if host in nodes:
                client = scheduler_client(record["kind"], record["words"])
                problem = _resume(client, nodes[host], directory.name)
                if problem:
                    problems.append(f"{host}: {problem}")
                else:
                    del nodes[host]
        if nodes:
            documents.write(directory / DRAINED, {**record, "nodes": nodes})
        elif record:
            (directory / DRAINED).unlink()
    return problems


def _resume(client: Scheduler, node: str, run_id: str) -> str:
    """Resume a node if it still has the drain reason of this run.

    Return why it could not be resumed; empty if nothing is left to do.
    """
    try:
        state = client.node_state(node)
        if state.drain_reason == CORDONED:  # by others, or by this run if it was killed before it added the annotation
            return (
                f"node {node} is cordoned, but not annotated by Rackproof: uncordon it by hand unless an administrator "
                "cordoned it"
            )
        if state.drain_reason == drain_reason(run_id):
            if state.unhealthy_reason:
                return f"Rackproof drained node {node}, which is now out of service ({state.unhealthy_reason}): it stays drained"
            client.resume(node, run_id)
    except RunError as error:
        return f"Rackproof drained node {node} and could not resume it: {error}"
    return ""


def resume_all(directory: Path) -> list[str]:
    """Resume every node that this run drained; return a line for each that could not be resumed."""
    return _resume_nodes(directory, list(_drain_record(directory).get("nodes", {})))


def resume_with_retries(directory: Path) -> list[str]:
    """Resume every node that this run drained, with retries; return a line for each that could not be resumed.

    The list is empty if this run has drained no node. It is also empty if a later playbook has continued the run and drained
    nodes: that playbook needs the nodes, so no further attempt is made to resume them.
    """
    by, problems = _drain_record(directory).get("by"), list[str]()
    for wait in (0.0, *BACKOFF_S):
        time.sleep(wait)
        if not by or _drain_record(directory).get("by") != by:
            return []
        problems = resume_all(directory)
        if not problems:
            break
    return problems


def resume_left_over(directory: Path) -> list[str]:
    """Resume the nodes that an exited playbook left drained; return a line for each that could not be resumed."""
    try:
        by = _drain_record(directory).get("by")
        return resume_with_retries(directory) if by and process_start_time(by["pid"]) != by["start_time"] else []
    except RunError as error:
        return [str(error)]


def still_drained(directory: Path) -> list[str]:
    """Return the hosts that this run drained and has not resumed.

    If `drained.json` is unreadable, return one text that says so.
    """
    try:
        return list(_drain_record(directory).get("nodes", {}))
    except RunError:
        return [f"the hosts in {DRAINED}, which cannot be read"]


def notes(directory: Path) -> list[str]:
    """Return the notes in `scheduler.json`: a line for each host that another, finished run left drained."""
    try:
        document = documents.parse((directory / NOTES).read_bytes(), source=NOTES)
    except (OSError, documents.DocumentError):
        return []
    return [f"{host}: {why}" for host, why in document.items()] if isinstance(document, dict) else []


def guard(directory: Path) -> list[str]:
    """Wait until the playbook that drained the nodes exits or SIGTERM arrives, then resume the nodes.

    If a later playbook has resumed the run, leave the nodes to the background process of that playbook. Return a line for each
    node that could not be resumed.
    """
    by = _drain_record(directory).get("by")

    def stop_waiting(number: int, frame: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, stop_waiting)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(SystemExit):
        while by and process_start_time(by["pid"]) == by["start_time"] and _drain_record(directory).get("by") == by:
            time.sleep(GUARD_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return resume_with_retries(directory) if _drain_record(directory).get("by") == by else []
