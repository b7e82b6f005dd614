"""Clients for Slurm and Kubernetes. They list the jobs on a node, read its state, drain it and resume it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from schemas.errors import RunError

KINDS = ("slurm", "kubernetes")
ANSWER_S = 60.0
"""Seconds within which a command of the scheduler must answer."""
OURS = "rackproof:"
"""Prefix of the drain reasons that Rackproof gives; the run id follows."""
MARK = "rackproof/drained-by"
"""Annotation of a Kubernetes node that a run cordoned; its value is the drain reason."""
CORDONED = "cordoned"
"""`Node.drain_reason` of a Kubernetes node that is cordoned but does not have the annotation MARK."""
_DRA_DRIVER = "gpu.nvidia.com"
"""Name of NVIDIA's driver for dynamic resource allocation. Its driver for NVLink domains has another name."""
_HEALTHY = ("IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "RESERVED")
_OUT_OF_SERVICE = re.compile(r"DOWN|FAIL|ERROR|INVALID|REBOOT")
"""Flags in a Slurm state, such as `FAIL` in `IDLE+FAIL`. They show that the node is out of service."""
_ALLOCATED = re.compile(r"ALLOCATED|MIXED|COMPLETING")
"""States and flags of a Slurm node that has jobs."""


@dataclass(frozen=True)
class Node:
    """The state of a node."""

    drain_reason: str = ""
    """Why the node is drained; empty if it is not drained."""
    unhealthy_reason: str = ""
    """Why the node is out of service, apart from a drain; empty if there is no such reason, and always with Kubernetes. If there
    is a reason, Rackproof neither drains nor resumes the node."""


class Scheduler(Protocol):
    """The operations that Rackproof needs from a scheduler. Every method raises RunError if a command of the scheduler fails."""

    def jobs(self, node: str) -> list[str]:
        """Return the jobs on a node, each as text for people."""

    def node_state(self, node: str) -> Node:
        """Return the state of a node."""

    def drain(self, node: str, run_id: str) -> None:
        """Stop a node from taking new jobs."""

    def resume(self, node: str, run_id: str) -> None:
        """Let a node take jobs again."""


class Slurm:
    """Slurm, through squeue and scontrol."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def jobs(self, node: str) -> list[str]:
        """Return the jobs that squeue lists for the node, without pending jobs, which do not use the node yet.

        Slurm may hide jobs from this account (PrivateData). So if squeue lists none, but Slurm reports the node as allocated, the
        list has a text that says so.
        """
        output = _ask(self._words, "squeue", "-h", "-w", node, "--all", "-o", "%i:%u:%T")
        jobs = [
            "Slurm job {} of {} ({})".format(*[*line.split(":"), "?", "?"][:3])
            for line in map(str.strip, output.splitlines())
            if line and not line.endswith(":PENDING")
        ]
        return jobs or self._hidden_jobs(node)

    def _hidden_jobs(self, node: str) -> list[str]:
        """Return a text if Slurm reports a node as allocated; otherwise an empty list."""
        output, state = self._show(node)
        cpus_match = re.search(r"\sCPUAlloc=(\d+)", output)
        cpus = int(cpus_match.group(1)) if cpus_match else 0
        if not cpus and not _ALLOCATED.search(state):
            return []
        return [f"Slurm jobs that this account may not see (state {state}, {cpus} CPUs allocated)"]

    def _show(self, node: str) -> tuple[str, str]:
        """Return the output of `scontrol show node`, and the state in it."""
        output = _ask(self._words, "scontrol", "show", "node", node, "-o")
        state_match = re.search(r"(?:^|\s)State=(\S+)", output)
        if state_match is None:
            raise RunError(f"scontrol reports no state of node {node}: {output.strip()[:200]}")
        return output, state_match.group(1)

    def node_state(self, node: str) -> Node:
        """Return the state of a node, from the output of scontrol.

        An example of the output is `State=IDLE+DRAIN … Reason=replaced PSU [root@2026-11-21T04:00:00] Comment=…`. A node that is
        not drained may have a reason too. Unless Rackproof gave the reason, the node counts as out of service.
        """
        output, state = self._show(node)
        reason_match = re.search(r"\sReason=(.*?)(?:\s\[[^\]]*@[^\]]*\]|\s\w+=|\s*$)", output)
        reason = reason_match.group(1).strip() if reason_match else ""
        reason = "" if reason in ("(null)", "none") else reason
        base, *flags = state.split("+")
        healthy = base.rstrip("*~#!%$@^-") in _HEALTHY and not any(map(_OUT_OF_SERVICE.search, flags))
        drain_reason = (reason or "no reason given") if "DRAIN" in state else ""
        flagged = bool(reason) and not drain_reason and not reason.startswith(OURS)
        return Node(drain_reason, "" if healthy and not flagged else f"{state}: {reason or 'no reason given'}")

    def drain(self, node: str, run_id: str) -> None:
        """Drain a node; its running jobs continue."""
        _ask(self._words, "scontrol", "update", f"nodename={node}", "state=drain", f"reason={drain_reason(run_id)}")

    def resume(self, node: str, run_id: str) -> None:
        """Return a node to service."""
        _ask(self._words, "scontrol", "update", f"nodename={node}", "state=resume")


class Kubernetes:
    """Kubernetes, through kubectl: drain means cordon, so running pods continue."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def jobs(self, node: str) -> list[str]:
        """Return the pods on a node that requested or claimed GPUs and have not finished."""
        selector = f"--field-selector=spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
        pods = _json(self._words, "kubectl", "get", "pods", "--all-namespaces", selector, "-o", "json")
        jobs, claims = [], dict[str, dict[str, str]]()
        for pod in pods.get("items", []):
            metadata = pod.get("metadata", {})
            namespace, name = metadata.get("namespace", "?"), metadata.get("name", "?")
            if requested := sorted(_gpus(pod.get("spec", {}))):
                jobs.append(f"pod {namespace}/{name} requests {', '.join(requested)}")
            claims.setdefault(namespace, {}).update(dict.fromkeys(_claim_names(pod), name))
        for namespace, pod_of in claims.items():
            for claim, gpus in self._claimed_gpus(namespace, [*pod_of]) if pod_of else ():
                jobs.append(f"pod {namespace}/{pod_of[claim]} claims GPUs ({gpus}, resource claim {claim})")
        return jobs

    def _claimed_gpus(self, namespace: str, claims: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield the resource claims (dynamic resource allocation) that have GPUs, each with its number of GPUs.

        Only these claims are requested: the list of all claims in the cluster would be large, and each node needs an answer.
        """
        answer = _json(self._words, "kubectl", "get", "resourceclaims", "--namespace", namespace, "-o", "json", *claims)
        for claim in answer.get("items", [answer]):  # for one name, kubectl prints the claim itself
            devices = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
            # A pod with adminAccess only monitors the device, which other pods can still use.
            if gpus := sum(each.get("driver") == _DRA_DRIVER and not each.get("adminAccess") for each in devices):
                yield claim.get("metadata", {}).get("name", "?"), gpus

    def node_state(self, node: str) -> Node:
        """Return the state of a node. If it is cordoned, the drain reason is its annotation MARK, or CORDONED without one."""
        document = _json(self._words, "kubectl", "get", "node", node, "-o", "json")
        if not document.get("spec", {}).get("unschedulable"):
            return Node()
        return Node(str(document.get("metadata", {}).get("annotations", {}).get(MARK) or CORDONED))

    def drain(self, node: str, run_id: str) -> None:
        """Cordon a node, then add the annotation that names the run.

        In the reverse order, a failed cordon could leave the annotation behind, and Rackproof would take a later cordon by others
        for its own.
        """
        try:
            _ask(self._words, "kubectl", "cordon", node)
        except RunError:
            with suppress(RunError):
                self._unmark(node)
            raise
        try:
            self._mark(node, run_id)
        except RunError:  # undo the cordon: without the annotation, nothing shows that Rackproof made it
            _ask(self._words, "kubectl", "uncordon", node)
            raise

    def resume(self, node: str, run_id: str) -> None:
        """Remove the annotation, then uncordon the node.

        If an annotation were left, Rackproof would take the next cordon for its own.
        """
        self._unmark(node)
        try:
            _ask(self._words, "kubectl", "uncordon", node)
        except RunError:
            with suppress(RunError):
                self._mark(node, run_id)
            raise

    def _mark(self, node: str, run_id: str) -> None:
        _ask(self._words, "kubectl", "annotate", "--overwrite", "node", node, f"{MARK}={drain_reason(run_id)}")

    def _unmark(self, node: str) -> None:
        _ask(self._words, "kubectl", "annotate", "node", node, f"{MARK}-")


def drain_reason(run_id: str) -> str:
    """Return the drain reason that identifies a run: `rackproof:RUN_ID`. It has no space, so no shell splits it."""
    return f"{OURS}{run_id}"


def scheduler_client(kind: str, words: Sequence[str]) -> Scheduler:
    """Return the client for a scheduler. `words`, such as `sudo`, are put before each command of the scheduler."""
    return Slurm(words) if kind == "slurm" else Kubernetes(words)


def _gpus(spec: Mapping[str, Any]) -> set[str]:
    """Return the NVIDIA resources that the containers of a pod request, each with its number: `8 nvidia.com/gpu`."""
    requested = set()
    for container in [*spec.get("containers", []), *spec.get("initContainers", [])]:
        resources = container.get("resources", {})
        counts = {**resources.get("requests", {}), **resources.get("limits", {})}
        requested |= {
            f"{count} {name}" for name, count in counts.items() if name.startswith("nvidia.com/") and str(count) != "0"
        }
    return requested


def _claim_names(pod: Mapping[str, Any]) -> list[str]:
    """Return the names of the resource claims of a pod. The status has those that Kubernetes made from a template."""
    spec, status = pod.get("spec", {}), pod.get("status", {})
    references = [*spec.get("resourceClaims", []), *status.get("resourceClaimStatuses", [])]
    return list(dict.fromkeys(name for reference in references if (name := reference.get("resourceClaimName"))))


def _ask(words: Sequence[str], *command: str) -> str:
    """Return the output of a command. Raise RunError if it fails, is missing or does not answer."""
    try:
        process = subprocess.run(
            [*words, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
            # Variables such as SQUEUE_USERS and SQUEUE_STATES limit the jobs that squeue lists.
            env={name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")},
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} did not answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise RunError(
            f"{[*words, *command][0]}: {error.strerror}: install it, or set rackproof_scheduler_command"
        ) from None
    if process.returncode:
        raise RunError(
            f"{command[0]} exited with {process.returncode}: {' '.join(process.stderr.split())[:300] or 'no error message'}"
        )
    return process.stdout


def _json(words: Sequence[str], *command: str) -> dict[str, Any]:
    try:
        document = json.loads(_ask(words, *command))
    except (ValueError, RecursionError):
        raise RunError(f"{command[0]}: the answer is not JSON") from None
    if not isinstance(document, dict):
        raise RunError(f"{command[0]}: the answer is not a JSON object")
    return document
