"""How to measure a finding again: with Rackproof, and with the tools that a vendor knows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from fleet.rma.parts import GPU, Part
from schemas.catalogue import BENCHMARKS
from schemas.plans import Plan, PlannedHost

ALONE = frozenset({"gemm", "memory", "host_copy", "integrity", "stress", "digest"})
"""Benchmarks that one GPU does without its siblings."""


def again(part: Part, own: Mapping[str, str], planned: PlannedHost | None, plan: Plan) -> list[dict[str, str]]:
    """Commands, each with what it is for and where it runs."""
    host = shlex.quote(part.host)
    gpus = len(planned.devices) if planned else 0
    count = f" --gpus {gpus}" if gpus and planned and planned.device == GPU else ""
    found = [
        _told("the host again, by the whole acceptance; judged as this run was", "control node, in the checkout",
              f"ansible-playbook -i INVENTORY playbooks/acceptance.yml --limit {host}"
              f" -e rackproof_profile={shlex.quote(plan.profile)}"),
        _told("health and counters, in seconds", part.host, f"sudo rackproof doctor{count}"),
    ]  # fmt: skip
    # A uuid that nobody told is no argument of a command.
    uuid = own.get("uuid", "")
    gpu = uuid if uuid.startswith("GPU-") else part.place.partition("=")[2]
    benchmarks = _benchmarks(part)
    if part.kind == GPU:
        alone, together = (
            [name for name in benchmarks if name in ALONE],
            [name for name in benchmarks if name not in ALONE],
        )
        if alone:
            command = f"CUDA_VISIBLE_DEVICES={shlex.quote(gpu)} torchrun --nproc-per-node=1 -m agent.benchmarks --only"
            found.append(
                _told("the benchmarks that it failed, on this GPU alone", part.host, f"{command} {' '.join(alone)}")
            )
        if together:
            command = f"torchrun --nproc-per-node={max(gpus, 1)} -m agent.benchmarks --only {' '.join(together)}"
            found.append(_told("those that need its siblings", part.host, command))
        found += [
            _told("state by NVIDIA's own tool", part.host, f"nvidia-smi -q -i {shlex.quote(gpu)}"),
            _told("NVIDIA's own diagnosis (stop the workload first)", part.host,
                  f"dcgmi diag -r 3 -i {shlex.quote(part.place.partition('=')[2])}"),
            _told("the log that NVIDIA asks for; it is not part of this package", part.host, "sudo nvidia-bug-report.sh"),
        ]  # fmt: skip
    return found


def _benchmarks(part: Part) -> list[str]:
    """The benchmarks whose figures failed, in the catalogue's order; what a soak drifted is of the same ones."""
    names = {verdict.name.removeprefix("drift.").split(".")[0] for verdict in part.findings}
    return [name for name in BENCHMARKS if name in names]


def _told(purpose: str, where: str, command: str) -> dict[str, str]:
    return {"purpose": purpose, "where": where, "command": command}
