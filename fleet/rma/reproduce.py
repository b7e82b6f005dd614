"""List commands that reproduce a finding, with Rackproof and with vendor tools."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from fleet.rma.parts import GPU, FailedPart
from schemas.catalogue import BENCHMARKS
from schemas.plans import Plan, PlannedHost
from schemas.scopes import Scope
from schemas.stages import SOAK

SINGLE_GPU_BENCHMARKS = frozenset({"gemm", "memory", "host_copy", "integrity", "stress", "digest"})
"""Benchmarks that are repeated on the failed GPU alone; `digest` then copies nothing to other GPUs. All other benchmarks are
repeated on all GPUs of the host."""
AGENT_BIN = "/opt/rackproof/bin"
"""Default directory of the agent's programs. An inventory can change it with rackproof_prefix, which the plan does not record."""


def reproduce_commands(
    part: FailedPart, identifiers: Mapping[str, str], planned: PlannedHost | None, plan: Plan
) -> list[dict[str, str]]:
    """Return the commands, each with its purpose and where to run it."""
    host = shlex.quote(part.host)
    gpus = len(planned.devices) if planned else 0
    count = f" --gpus {gpus}" if gpus and planned and planned.device == GPU else ""
    playbook = "burnin" if any(stage.name == SOAK for stage in plan.stages) else "acceptance"
    playbook_command = (
        f"ansible-playbook -i INVENTORY playbooks/{playbook}.yml -e rackproof_profile={shlex.quote(plan.profile)}"
    )
    commands = [
        _command("with all hosts, judged as in this run", "control node, in the checkout", playbook_command),
        _command("this host alone: it is not compared or launched with other hosts, so the run stays incomplete",
              "control node, in the checkout", f"{playbook_command} --limit {host}"),
        _command("health and counters, in a few seconds (adjust the path if rackproof_prefix is set)", part.host,
              f"sudo {AGENT_BIN}/rackproof doctor{count}"),
    ]  # fmt: skip
    # If the driver reported no UUID, the index selects the GPU.
    uuid, index = identifiers.get("uuid", ""), Scope.parse(part.scope).get(GPU)
    gpu = uuid if uuid.startswith("GPU-") else index
    benchmarks = _failed_benchmarks(part)
    if part.kind == GPU:
        single_gpu = [name for name in benchmarks if name in SINGLE_GPU_BENCHMARKS]
        multi_gpu = [name for name in benchmarks if name not in SINGLE_GPU_BENCHMARKS]
        if single_gpu:
            # NVML numbers GPUs by PCI address; this setting makes CUDA do the same.
            environment = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={shlex.quote(gpu)}"
            commands.append(
                _command(
                    "the failed benchmarks, on this GPU alone",
                    part.host,
                    f"{environment} {_benchmark_command(1, single_gpu)}",
                )
            )
        if multi_gpu:
            commands.append(
                _command(
                    "the other failed benchmarks, on all GPUs of the host",
                    part.host,
                    _benchmark_command(max(gpus, 1), multi_gpu),
                )
            )
        commands += [
            _command("state from nvidia-smi", part.host, f"nvidia-smi -q -i {shlex.quote(gpu)}"),
            _command("NVIDIA's diagnostics (stop the workload first)", part.host,
                  f"dcgmi diag -r 3 -i {shlex.quote(index)}"),
            _command("the log that NVIDIA support asks for; it is not in this package", part.host, "sudo nvidia-bug-report.sh"),
        ]  # fmt: skip
    return commands


def _benchmark_command(count: int, benchmarks: Sequence[str]) -> str:
    """Return the command that runs benchmarks with the Python of the agent, which has torch."""
    launch = f"{AGENT_BIN}/python -m torch.distributed.run --standalone --nproc-per-node={count}"
    return f"{launch} -m agent.benchmarks --only {' '.join(benchmarks)}"


def _failed_benchmarks(part: FailedPart) -> list[str]:
    """Return the benchmarks whose figures failed, or drifted in a soak, in the order of the catalogue."""
    names = {verdict.name.removeprefix("drift.").split(".")[0] for verdict in part.findings}
    return [name for name in BENCHMARKS if name in names]


def _command(purpose: str, where: str, command: str) -> dict[str, str]:
    return {"purpose": purpose, "where": where, "command": command}
