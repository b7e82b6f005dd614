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
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fleet import lock
from fleet.errors import RunError, UsageError
from schemas import documents
from schemas.locks import born, exclusive

DRAINED, GUARD = "drained.json", "drained.lock"
KINDS = ("slurm", "kubernetes")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
ANSWER_S, LOOK_S, GUARD_S = 60.0, 5.0, 0.5
MARK = "rackproof/drained-by"
"""Annotation of a node that we cordoned."""


class Scheduler(Protocol):
    """What is asked of a scheduler about one node. Each raises RunError where it cannot be had."""

    def users(self, node: str) -> list[str]:
        """The jobs on it."""

    def drained(self, node: str) -> str:
        """Why it takes no new jobs; empty where it does."""

    def drain(self, node: str, run_id: str) -> None:
        """Lets it take no new jobs."""

    def resume(self, node: str) -> None:
        """Lets it take jobs again."""


class Slurm:
    """squeue and scontrol."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def users(self, node: str) -> list[str]:
        """Jobs that are allocated the node, whatever their state."""
        listed = _ask(self._words, "squeue", "-h", "-w", node, "-o", "%i:%u:%T")
        return [
            "Slurm job {} of {} ({})".format(*[*line.split(":"), "?", "?"][:3])
            for line in map(str.strip, listed.splitlines())
            if line and not line.endswith(":PENDING")
        ]

    def drained(self, node: str) -> str:
        """The reason that Slurm shows: `State=IDLE+DRAIN … Reason=replaced PSU [root@2026-11-21T04:00:00] Comment=…`."""
        told = _ask(self._words, "scontrol", "show", "node", node, "-o")
        state = re.search(r"(?:^|\s)State=(\S+)", told)
        if state is None:
            raise RunError(f"scontrol tells no state of node {node}: {told.strip()[:200]}")
        reason = re.search(r"\sReason=(.*?)(?:\s\[[^\]]*@[^\]]*\]|\s\w+=|\s*$)", told)
        return (reason.group(1).strip() if reason else "no reason given") if "DRAIN" in state.group(1) else ""

    def drain(self, node: str, run_id: str) -> None:
        """Jobs that run go on."""
        _ask(self._words, "scontrol", "update", f"nodename={node}", "state=drain", f"reason={ours(run_id)}")

    def resume(self, node: str) -> None:
        """Back to work."""
        _ask(self._words, "scontrol", "update", f"nodename={node}", "state=resume")


class Kubernetes:
    """kubectl: cordon and uncordon. Pods that run go on."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def users(self, node: str) -> list[str]:
        """Pods on the node that asked for GPUs and have not ended."""
        which = f"--field-selector=spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
        pods = _json(self._words, "kubectl", "get", "pods", "--all-namespaces", which, "-o", "json")
        found = []
        for pod in pods.get("items", []):
            asked = sorted(_gpus(pod.get("spec", {})))
            if asked:
                where = pod.get("metadata", {})
                found.append(f"pod {where.get('namespace', '?')}/{where.get('name', '?')} asks for {', '.join(asked)}")
        return found

    def drained(self, node: str) -> str:
        """By whom it was cordoned."""
        told = _json(self._words, "kubectl", "get", "node", node, "-o", "json")
        if not told.get("spec", {}).get("unschedulable"):
            return ""
        return str(told.get("metadata", {}).get("annotations", {}).get(MARK) or "cordoned")

    def drain(self, node: str, run_id: str) -> None:
        """With a mark that says for what."""
        _ask(self._words, "kubectl", "annotate", "--overwrite", "node", node, f"{MARK}={ours(run_id)}")
        _ask(self._words, "kubectl", "cordon", node)

    def resume(self, node: str) -> None:
        """And takes the mark away."""
        _ask(self._words, "kubectl", "uncordon", node)
        _ask(self._words, "kubectl", "annotate", "node", node, f"{MARK}-")


def ours(run_id: str) -> str:
    """The reason by which we know what we drained: no blank in it, so that no shell on the way divides it."""
    return f"rackproof:{run_id}"


def scheduler(kind: str, words: Sequence[str]) -> Scheduler:
    """The scheduler of that kind; `words` come before each of its commands."""
    return Slurm(words) if kind == "slurm" else Kubernetes(words)


def _gpus(spec: Mapping[str, Any]) -> set[str]:
    """`8 nvidia.com/gpu` for each of the resources of NVIDIA's that a pod's containers ask for."""
    found = set()
    for container in [*spec.get("containers", []), *spec.get("initContainers", [])]:
        resources = container.get("resources", {})
        asked = {**resources.get("requests", {}), **resources.get("limits", {})}
        found |= {
            f"{count} {name}" for name, count in asked.items() if name.startswith("nvidia.com/") and str(count) != "0"
        }
    return found


def _ask(words: Sequence[str], *command: str) -> str:
    """What the command says. Raises RunError where it fails, is not there or does not answer."""
    try:
        done = subprocess.run(
            [*words, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} did not answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise RunError(
            f"{[*words, *command][0]}: {error.strerror}: install it, or set rackproof_scheduler_command"
        ) from None
    if done.returncode:
        raise RunError(
            f"{command[0]} ends with {done.returncode}: {' '.join(done.stderr.split())[:300] or 'it says nothing'}"
        )
    return done.stdout


def _json(words: Sequence[str], *command: str) -> dict[str, Any]:
    try:
        found = json.loads(_ask(words, *command))
    except (ValueError, RecursionError):
        raise RunError(f"{command[0]} does not answer in JSON") from None
    if not isinstance(found, dict):
        raise RunError(f"{command[0]} does not answer with an object")
    return found


# --- the run's part in it


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
    """Drains what is not drained; host -> why it could not be."""
    asked, failed, run_id = scheduler(kind, words), dict[str, str](), directory.name
    for host, node in nodes.items():
        try:
            why = asked.drained(node)
            if why in ("", ours(run_id)):
                _note(directory, kind, words, {host: node})
                if not why:
                    asked.drain(node, run_id)
        except RunError as error:
            failed[host] = f"it could not be drained: {error}"
    return failed


def _note(directory: Path, kind: str, words: Sequence[str], nodes: Mapping[str, str]) -> None:
    """Writes down what is drained, and for which playbook, before it is; the first starts who gives it back."""
    with exclusive(directory / GUARD):
        there = _noted(directory)
        pid = lock.playbook() or os.getppid()
        by = {"pid": pid, "born": born(pid)}
        first = there.get("by") != by
        documents.write(
            directory / DRAINED,
            {"kind": kind, "words": list(words), "by": by, "nodes": {**there.get("nodes", {}), **nodes}},
        )
    if first:
        _start_guard(directory)


def _noted(directory: Path) -> dict[str, Any]:
    try:
        found = documents.parse((directory / DRAINED).read_text(encoding="utf-8"), source=DRAINED)
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict) or found.get("kind") not in KINDS:
        raise RunError(f"{directory / DRAINED} is not what we wrote: give the nodes back by hand, and remove it")
    return found


def _start_guard(directory: Path) -> None:
    """A process of its own session, which nothing that ends the playbook reaches."""
    program = str(Path(__file__).parents[1] / "rackproof.py")
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
        if asked.drained(node) == ours(run_id):
            asked.resume(node)
    except RunError as error:
        return f"node {node} was drained by us and is not given back: {error}"
    return ""


def give_back(directory: Path) -> list[str]:
    """Resumes all that this run drained; lines for people of what could not be."""
    return _give_back(directory, list(_noted(directory).get("nodes", {})))


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
    return give_back(directory) if _noted(directory).get("by") == by else []


# --- the verb


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds scheduler to the command."""
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
    """Carries the verb out."""
    if not options.run_dir.is_dir():
        raise UsageError(f"{options.run_dir}: no such directory")
    if options.what == "resume":
        problems = guard(options.run_dir) if options.when_over else give_back(options.run_dir)
        print("\n".join(problems), end="\n" if problems else "")
        return 1 if problems else 0
    if options.kind is None:
        raise UsageError(f"--kind is missing: one of {', '.join(KINDS)}")
    nodes = documents.parse(sys.stdin.read(), source="standard input")
    if not isinstance(nodes, dict) or not all(
        isinstance(node, str) and NAME.fullmatch(node) for node in nodes.values()
    ):
        raise UsageError(
            'standard input: give {"host": "its name with the scheduler"}; letters, digits, ., _ and - only'
        )
    busy = take(options.run_dir, options.kind, options.words, nodes, drain=options.what == "drain", wait_s=options.wait)
    if options.json:
        print(json.dumps(busy))
    else:
        print("\n".join(f"{host}: {why}" for host, why in busy.items()) or "none of them is in use")
    return 0
