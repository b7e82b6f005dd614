"""The verb `scheduler`: asks Slurm or Kubernetes whether hosts are in use, drains them for a run, and gives them back.

What is drained stands in `drained.json` of the run directory before it is drained. A process that waits for the end of the
playbook gives it back, however the playbook ends; so does `scheduler resume`. Only what this run drained is given back, and
only while it still is as we left it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleet.integrations.schedulers import CORDONED, KINDS, OURS, Scheduler, ours, scheduler
from fleet.records import run_lock
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.locks import born, exclusive
from schemas.run_directory import PLAN

DRAINED, GUARD, NOTES = "drained.json", "drained.lock", "scheduler.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
LOOK_S, GUARD_S = 5.0, 0.5
BACKOFF_S = (2.0, 10.0, 30.0)
"""Before each further attempt at what could not be given back."""


def take(
    directory: Path, kind: str, words: Sequence[str], nodes: Mapping[str, str], *, drain: bool, wait_s: float
) -> dict[str, str]:
    """Host -> why it is in use, of those that are; the others are drained where that is asked for.

    Args:
        directory: of the run.
        nodes: host -> its name with the scheduler.
        drain: before anything else.
        wait_s: for which the jobs of drained hosts are waited for.
    """
    asked, busy = scheduler(kind, words), dict[str, str]()
    if drain:
        busy |= _drain(directory, kind, words, nodes)
    ends = time.monotonic() + (wait_s if drain else 0.0)
    pending = [host for host in nodes if host not in busy]
    while True:
        found = {host: why for host in pending if (why := _why(asked, nodes[host]))}
        pending = list(found)
        if not pending or time.monotonic() >= ends:
            break
        time.sleep(min(LOOK_S, max(0.1, ends - time.monotonic())))
    _give_back(directory, list(found))
    return {**busy, **found}


def _why(asked: Scheduler, node: str) -> str:
    """Who uses it. That it cannot be told is a reason too: absence is no permission."""
    try:
        return "; ".join(asked.users(node)[:3])
    except RunError as error:
        return f"the scheduler cannot be asked: {error}"


def _drain(directory: Path, kind: str, words: Sequence[str], nodes: Mapping[str, str]) -> dict[str, str]:
    """Drains what is in order and not drained; host -> why it could not be, or whose it is."""
    asked, failed, notes, run_id = scheduler(kind, words), dict[str, str](), dict[str, str](), directory.name
    for host, node in nodes.items():
        try:
            seen = asked.look(node)
            if seen.drained not in ("", ours(run_id)):
                _of_another(directory, host, seen.drained, failed, notes)
            elif seen.amiss and not seen.drained:
                failed[host] = f"node {node} was taken out of use by others ({seen.amiss})"
            else:
                _note(directory, kind, words, {host: node})
                if not seen.drained:
                    asked.drain(node, run_id)
        except RunError as error:
            failed[host] = f"it could not be drained: {error}"
    if notes or (directory / NOTES).exists():
        documents.write(directory / NOTES, notes)
    return failed


def _of_another(directory: Path, host: str, why: str, failed: dict[str, str], notes: dict[str, str]) -> None:
    """What others drained is measured; what another run of ours drained is in use, or was forgotten, which is told."""
    run_id = why.removeprefix(OURS)
    if not why.startswith(OURS) or not NAME.fullmatch(run_id):
        return
    by = run_lock.holder(directory.parent / run_id)
    if by and by.lives() is not False:
        failed[host] = f"run {run_id} drained it, and is carried out by {by.who()} since {by.since}"
    else:
        notes[host] = (
            f"run {run_id} drained it, is not carried out here any more and has not given it back: it is measured and stays "
            f"drained; rackproof scheduler resume --run-dir {directory.parent / run_id}"
        )


def _note(directory: Path, kind: str, words: Sequence[str], nodes: Mapping[str, str]) -> None:
    """Writes down what is drained, and for which playbook, before it is; the first starts who gives it back."""
    with exclusive(directory / GUARD):
        there = _noted(directory)
        pid = run_lock.playbook() or os.getppid()
        by = {"pid": pid, "born": born(pid)}
        first = there.get("by") != by
        documents.write(
            directory / DRAINED,
            {"kind": kind, "words": list(words), "by": by, "nodes": {**there.get("nodes", {}), **nodes}},
        )
    if first:
        _start_guard(directory)


def _noted(directory: Path) -> dict[str, Any]:
    """What is drained. Raises RunError where the file is not as we write it: its words would be carried out."""
    path = directory / DRAINED
    try:
        found = documents.parse(path.read_bytes(), source=DRAINED)
    except FileNotFoundError:
        return {}
    except (OSError, documents.DocumentError) as error:
        raise RunError(f"{path} cannot be read ({error}): give the nodes back by hand, and remove it") from None
    if not _is_ours(found):
        raise RunError(f"{path} is not what we wrote: give the nodes back by hand, and remove it")
    return dict(found)


def _is_ours(found: object) -> bool:
    if not isinstance(found, dict) or set(found) != {"kind", "words", "by", "nodes"} or found["kind"] not in KINDS:
        return False
    words, by, nodes = found["words"], found["by"], found["nodes"]
    return (
        isinstance(words, list)
        and all(isinstance(word, str) for word in words)
        and isinstance(by, dict)
        and isinstance(by.get("pid"), int)
        and isinstance(by.get("born"), str)
        and _are_nodes(nodes)
    )


def _are_nodes(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(node, str) and NAME.fullmatch(node) for node in found.values())


def _start_guard(directory: Path) -> None:
    """A process of its own session, which nothing that ends the playbook reaches."""
    program = str(Path(__file__).parents[2] / "rackproof")
    command = [sys.executable, program, "scheduler", "resume", "--when-over", f"--run-dir={directory}"]
    log = (os.POSIX_SPAWN_OPEN, 1, str(directory / "drained.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[nothing, log, (os.POSIX_SPAWN_DUP2, 1, 2)], setsid=True
    )


def _give_back(directory: Path, hosts: Sequence[str]) -> list[str]:
    """Resumes those of these hosts that we drained; lines for people of what could not be."""
    said = []
    with exclusive(directory / GUARD):
        there = _noted(directory)
        nodes = dict(there.get("nodes", {}))
        for host in hosts if nodes else ():
            if host in nodes:
                problem = _resume(scheduler(there["kind"], there["words"]), nodes[host], directory.name)
                if problem:
                    said.append(f"{host}: {problem}")
                else:
                    del nodes[host]
        if nodes:
            documents.write(directory / DRAINED, {**there, "nodes": nodes})
        elif there:
            (directory / DRAINED).unlink()
    return said


def _resume(asked: Scheduler, node: str, run_id: str) -> str:
    """Nothing where it takes jobs again, or somebody else drained it meanwhile; else why not."""
    try:
        seen = asked.look(node)
        if seen.drained == CORDONED:  # by somebody else, or we were ended between the two steps
            return f"node {node} is cordoned without our mark: uncordon it by hand where nobody else needs it so"
        if seen.drained == ours(run_id):
            if seen.amiss:
                return f"node {node} was drained by us and is out of use meanwhile ({seen.amiss}): it is left so"
            asked.resume(node, run_id)
    except RunError as error:
        return f"node {node} was drained by us and is not given back: {error}"
    return ""


def give_back(directory: Path) -> list[str]:
    """Resumes all that this run drained; lines for people of what could not be."""
    return _give_back(directory, list(_noted(directory).get("nodes", {})))


def keep_giving_back(directory: Path) -> list[str]:
    """The same, several times where it cannot be done, unless another playbook took the run up meanwhile."""
    by, said = _noted(directory).get("by"), list[str]()
    for wait in (0.0, *BACKOFF_S):
        time.sleep(wait)
        if not by or _noted(directory).get("by") != by:
            return []
        said = give_back(directory)
        if not said:
            break
    return said


def left_over(directory: Path) -> list[str]:
    """Gives back what a playbook that is over left drained; lines for people of what could not be."""
    try:
        by = _noted(directory).get("by")
        return keep_giving_back(directory) if by and born(by["pid"]) != by["born"] else []
    except RunError as error:
        return [str(error)]


def still_drained(directory: Path) -> list[str]:
    """The hosts that this run drained and did not give back yet."""
    try:
        return list(_noted(directory).get("nodes", {}))
    except RunError:
        return [f"those of {DRAINED}, which cannot be read"]


def notes(directory: Path) -> list[str]:
    """Lines for people of nodes that an earlier run left drained."""
    try:
        found = documents.parse((directory / NOTES).read_bytes(), source=NOTES)
    except (OSError, documents.DocumentError):
        return []
    return [f"{host}: {why}" for host, why in found.items()] if isinstance(found, dict) else []


def guard(directory: Path) -> list[str]:
    """Waits for the end of the playbook that drained, and gives back, unless another took the run up meanwhile."""
    by = _noted(directory).get("by")

    def told_to_end(number: int, frame: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, told_to_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(SystemExit):
        while by and born(by["pid"]) == by["born"] and _noted(directory).get("by") == by:
            time.sleep(GUARD_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return keep_giving_back(directory) if _noted(directory).get("by") == by else []


# --- the verb


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add scheduler to the command."""
    verb = verbs.add_parser(
        "scheduler",
        help="ask Slurm or Kubernetes whether hosts are in use, drain them for a run, and give back what the run drained",
        epilog='example: echo \'{"r12-h01": "node-r12-1"}\' | rackproof scheduler ask --kind slurm --run-dir runs/r1 --json. '
        "Exit codes: 0 done, 1 resume: something could not be given back.",
    )
    verb.add_argument("what", choices=["ask", "drain", "resume"], help="drain: drain, wait, and ask")
    verb.add_argument("--run-dir", type=Path, required=True, help="directory of the run on the control node")
    verb.add_argument(
        "--kind", choices=KINDS, help="ask, drain: who is asked; host -> node is read as JSON from standard input"
    )
    verb.add_argument(
        "--word", action="append", default=[], dest="words", help="a word before each command, such as sudo"
    )
    verb.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="drain: for the jobs to end (default: 0)"
    )
    verb.add_argument("--when-over", action="store_true", help="resume: once the playbook that drained is over")
    verb.add_argument("--json", action="store_true", help="print host -> why it is in use as JSON")
    return verb


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    known = any((options.run_dir / name).exists() for name in (PLAN, DRAINED))
    if not options.run_dir.is_dir() or (options.what == "resume" and not known):
        why = "no plan.json there" if options.run_dir.is_dir() else "no such directory"
        raise RunError(f"{options.run_dir}: {why}: give the directory of a run, which has a plan.json")
    if options.what == "resume":
        problems = guard(options.run_dir) if options.when_over else give_back(options.run_dir)
        print("\n".join(problems), end="\n" if problems else "")
        return 1 if problems else 0
    if options.kind is None:
        raise UsageError(f"--kind is missing: one of {', '.join(KINDS)}")
    try:
        nodes = documents.parse(sys.stdin.buffer.read(), source="standard input")
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    if not _are_nodes(nodes):
        raise UsageError(
            'standard input: give {"host": "its name with the scheduler"}; letters, digits, ., _ and - only'
        )
    busy = take(options.run_dir, options.kind, options.words, nodes, drain=options.what == "drain", wait_s=options.wait)
    if options.what == "drain":
        print("".join(f"{line}\n" for line in notes(options.run_dir)), end="", file=sys.stderr)
    if options.json:
        print(json.dumps(busy))
    else:
        print("\n".join(f"{host}: {why}" for host, why in busy.items()) or "none of them is in use")
    return 0
