"""List commands that reproduce a finding, with Rackproof and with vendor tools."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from fleet.rma.parts import GPU, Part
from schemas.catalogue import BENCHMARKS
from schemas.plans import Plan, PlannedHost
from schemas.scopes import Scope
from schemas.stages import SOAK

ALONE = frozenset({"gemm", "memory", "host_copy", "integrity", "stress", "digest"})
"""Benchmarks that run on a single GPU."""
BIN = "/opt/rackproof/bin"
"""Default install directory of the agent on a host; the plan does not hold the inventory's own value."""


def reproduce_commands(
    part: Part, own: Mapping[str, str], planned: PlannedHost | None, plan: Plan
) -> list[dict[str, str]]:
    """Return the commands, each with its purpose and where it runs."""
    host = shlex.quote(part.host)
    gpus = len(planned.devices) if planned else 0
    count = f" --gpus {gpus}" if gpus and planned and planned.device == GPU else ""
    playbook = "burnin" if any(stage.name == SOAK for stage in plan.stages) else "acceptance"
    play = f"ansible-playbook -i INVENTORY playbooks/{playbook}.yml -e rackproof_profile={shlex.quote(plan.profile)}"
    commands = [
        _command("with all hosts, judged as in this run", "control node, in the checkout", play),
        _command("this host alone: the run stays incomplete, without comparison or launches with other hosts",
              "control node, in the checkout", f"{play} --limit {host}"),
        _command("health and counters, in seconds (adjust the path if rackproof_prefix is set)", part.host,
              f"sudo {BIN}/rackproof doctor{count}"),
    ]  # fmt: skip
    # A UUID that the driver did not report cannot be an argument.
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
            commands.append(
                _command("the failed benchmarks, on this GPU alone", part.host, f"{chosen} {_ranks(1, alone)}")
            )
        if together:
            commands.append(
                _command("the failed benchmarks that need several GPUs", part.host, _ranks(max(gpus, 1), together))
            )
        commands += [
            _command("state from nvidia-smi", part.host, f"nvidia-smi -q -i {shlex.quote(gpu)}"),
            _command("NVIDIA's diagnostics (stop the workload first)", part.host,
                  f"dcgmi diag -r 3 -i {shlex.quote(index)}"),
            _command("the log that NVIDIA support asks for; it is not in this package", part.host, "sudo nvidia-bug-report.sh"),
        ]  # fmt: skip
    return commands


def _ranks(count: int, benchmarks: Sequence[str]) -> str:
    """Return the command for the agent's benchmarks, run by its own Python, which has torch and the agent."""
    launch = f"{BIN}/python -m torch.distributed.run --standalone --nproc-per-node={count}"
    return f"{launch} -m agent.benchmarks --only {' '.join(benchmarks)}"


def _benchmarks(part: Part) -> list[str]:
    """Return the benchmarks whose figures failed, or drifted in a soak, in the catalogue's order."""
    names = {verdict.name.removeprefix("drift.").split(".")[0] for verdict in part.findings}
    return [name for name in BENCHMARKS if name in names]


def _command(purpose: str, where: str, command: str) -> dict[str, str]:
    return {"purpose": purpose, "where": where, "command": command}
