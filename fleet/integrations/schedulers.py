"""Slurm and Kubernetes: who uses a node, how it stands, and that it gets no new jobs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from schemas.errors import RunError

KINDS = ("slurm", "kubernetes")
ANSWER_S = 60.0
OURS = "rackproof:"
MARK = "rackproof/drained-by"
"""Annotation of a node that we cordoned."""
CORDONED = "cordoned"
"""Why a node takes no new pods, where nobody left a mark."""
_HEALTHY = ("IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "RESERVED")
_TAKEN = re.compile(r"DOWN|FAIL|ERROR|INVALID|REBOOT")
"""Flags beside them by which somebody, or Slurm itself, took the node out of use."""


@dataclass(frozen=True)
class Node:
    """How a node stands with its scheduler."""

    drained: str = ""
    """Why it takes no new jobs since it is drained; empty where it is not."""
    amiss: str = ""
    """Why it is not in order, whoever says so: then it is not ours to drain, nor to bring back."""


class Scheduler(Protocol):
    """What is asked of a scheduler about one node. Each raises RunError where it cannot be had."""

    def users(self, node: str) -> list[str]:
        """The jobs on it."""

    def look(self, node: str) -> Node:
        """How it stands."""

    def drain(self, node: str, run_id: str) -> None:
        """Lets it take no new jobs."""

    def resume(self, node: str, run_id: str) -> None:
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

    def look(self, node: str) -> Node:
        """From `State=IDLE+DRAIN … Reason=replaced PSU [root@2026-11-21T04:00:00] Comment=…`.

        A node that takes jobs although a reason stands there was judged by somebody: it is not in order either.
        """
        told = _ask(self._words, "scontrol", "show", "node", node, "-o")
        found = re.search(r"(?:^|\s)State=(\S+)", told)
        if found is None:
            raise RunError(f"scontrol tells no state of node {node}: {told.strip()[:200]}")
        state = found.group(1)
        given = re.search(r"\sReason=(.*?)(?:\s\[[^\]]*@[^\]]*\]|\s\w+=|\s*$)", told)
        reason = given.group(1).strip() if given else ""
        reason = "" if reason in ("(null)", "none") else reason
        base, *flags = state.split("+")
        healthy = base.rstrip("*~#!%$@^-") in _HEALTHY and not any(map(_TAKEN.search, flags))
        drained = (reason or "no reason given") if "DRAIN" in state else ""
        judged = bool(reason) and not drained and not reason.startswith(OURS)
        return Node(drained, "" if healthy and not judged else f"{state}: {reason or 'no reason given'}")

    def drain(self, node: str, run_id: str) -> None:
        """Jobs that run go on."""
        _ask(self._words, "scontrol", "update", f"nodename={node}", "state=drain", f"reason={ours(run_id)}")

    def resume(self, node: str, run_id: str) -> None:
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

    def look(self, node: str) -> Node:
        """By whom it was cordoned."""
        told = _json(self._words, "kubectl", "get", "node", node, "-o", "json")
        if not told.get("spec", {}).get("unschedulable"):
            return Node()
        return Node(str(told.get("metadata", {}).get("annotations", {}).get(MARK) or CORDONED))

    def drain(self, node: str, run_id: str) -> None:
        """And leaves a mark that says for what, on what we cordoned only: what is only marked somebody else may cordon later."""
        try:
            _ask(self._words, "kubectl", "cordon", node)
        except RunError:
            with suppress(RunError):
                self._unmark(node)
            raise
        try:
            self._mark(node, run_id)
        except RunError:  # it was not cordoned a moment ago, and nobody would know that it was us
            _ask(self._words, "kubectl", "uncordon", node)
            raise

    def resume(self, node: str, run_id: str) -> None:
        """Takes the mark away first: left on a node that takes pods, it would make the next cordon ours."""
        self._unmark(node)
        try:
            _ask(self._words, "kubectl", "uncordon", node)
        except RunError:
            with suppress(RunError):
                self._mark(node, run_id)
            raise

    def _mark(self, node: str, run_id: str) -> None:
        _ask(self._words, "kubectl", "annotate", "--overwrite", "node", node, f"{MARK}={ours(run_id)}")

    def _unmark(self, node: str) -> None:
        _ask(self._words, "kubectl", "annotate", "node", node, f"{MARK}-")


def ours(run_id: str) -> str:
    """The reason by which we know what we drained: no blank in it, so that no shell on the way divides it."""
    return f"{OURS}{run_id}"


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
