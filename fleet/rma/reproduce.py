"""How to measure a finding again: with Rackproof, and with the tools that a vendor knows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from fleet.rma.parts import GPU, Part
from schemas.catalogue import BENCHMARKS
from schemas.plans import Plan, PlannedHost
from schemas.scopes import Scope
from schemas.timeline import SOAK

ALONE = frozenset({"gemm", "memory", "host_copy", "integrity", "stress", "digest"})
"""Benchmarks that one GPU does without its siblings."""
BIN = "/opt/rackproof/bin"
"""Where the role puts the agent on a host, unless the inventory says otherwise; no plan has it."""


def again(part: Part, own: Mapping[str, str], planned: PlannedHost | None, plan: Plan) -> list[dict[str, str]]:
    """Commands, each with what it is for and where it runs."""
    host = shlex.quote(part.host)
    gpus = len(planned.devices) if planned else 0
    count = f" --gpus {gpus}" if gpus and planned and planned.device == GPU else ""
    playbook = "burnin" if any(stage.name == SOAK for stage in plan.stages) else "acceptance"
    play = f"ansible-playbook -i INVENTORY playbooks/{playbook}.yml -e rackproof_profile={shlex.quote(plan.profile)}"
    found = [
        _told("with all hosts, judged as this run was", "control node, in the checkout", play),
        _told("this host alone: the run is then incomplete, and nothing is held against the other hosts or measured with them",
              "control node, in the checkout", f"{play} --limit {host}"),
        _told("health and counters, in seconds (where rackproof_prefix is another directory, by its bin)", part.host,
              f"sudo {BIN}/rackproof doctor{count}"),
    ]  # fmt: skip
    # A uuid that nobody told is no argument of a command.
    uuid, index = own.get("uuid", ""), Scope.parse(part.place).get(GPU)
    gpu = uuid if uuid.startswith("GPU-") else index
    benchmarks = _benchmarks(part)
    if part.kind == GPU:
        alone, together = (
            [name for name in benchmarks if name in ALONE],
            [name for name in benchmarks if name not in ALONE],
        )
        if alone:
            # NVML numbers GPUs by PCI address; CUDA must do the same for an index to mean one part.
            chosen = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={shlex.quote(gpu)}"
            found.append(
                _told("the benchmarks that it failed, on this GPU alone", part.host, f"{chosen} {_ranks(1, alone)}")
            )
        if together:
            found.append(_told("those that need its siblings", part.host, _ranks(max(gpus, 1), together)))
        found += [
            _told("state by NVIDIA's own tool", part.host, f"nvidia-smi -q -i {shlex.quote(gpu)}"),
            _told("NVIDIA's own diagnosis (stop the workload first)", part.host,
                  f"dcgmi diag -r 3 -i {shlex.quote(index)}"),
            _told("the log that NVIDIA asks for; it is not part of this package", part.host, "sudo nvidia-bug-report.sh"),
        ]  # fmt: skip
    return found


def _ranks(count: int, benchmarks: Sequence[str]) -> str:
    """The agent's benchmarks by its own Python, which has torch and the agent in whatever directory it is started."""
    launch = f"{BIN}/python -m torch.distributed.run --standalone --nproc-per-node={count}"
    return f"{launch} -m agent.benchmarks --only {' '.join(benchmarks)}"


def _benchmarks(part: Part) -> list[str]:
    """The benchmarks whose figures failed, in the catalogue's order; what a soak drifted is of the same ones."""
    names = {verdict.name.removeprefix("drift.").split(".")[0] for verdict in part.findings}
    return [name for name in BENCHMARKS if name in names]


def _told(purpose: str, where: str, command: str) -> dict[str, str]:
    return {"purpose": purpose, "where": where, "command": command}
