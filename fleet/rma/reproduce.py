"""List commands that test a failed part again, with Rackproof and with NVIDIA's tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fleet.report.formatting import shell_word
from fleet.report.measure_again import measure_again
from fleet.rma.parts import GPU, FailedPart
from schemas.catalogue import BENCHMARKS
from schemas.plans import LOCAL_RUN, Plan, PlannedHost
from schemas.scopes import Scope

SINGLE_GPU_BENCHMARKS = frozenset({"gemm", "memory", "host_copy", "integrity", "stress", "digest"})
"""Benchmarks that are repeated on the failed GPU alone. All other benchmarks are repeated on all GPUs of the host.

On one GPU, the benchmark `digest` does not test copies to other GPUs.
"""
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
AGENT_BIN = "/opt/rackproof/bin"
"""Default directory of the agent's programs. The inventory variable rackproof_prefix can change it. The plan does not have this
variable, so the commands use the default."""


def reproduce_commands(
    part: FailedPart, identifiers: Mapping[str, str], planned: PlannedHost | None, plan: Plan
) -> list[dict[str, str]]:
    """Return the commands. Each has the keys `purpose`, `where` (the machine to run it on) and `command`."""
    host = shell_word(part.host)
    gpus = len(planned.devices) if planned else 0
    count = f" --gpus {gpus}" if gpus and planned and planned.device == GPU else ""
    again = measure_again(plan)
    if plan.begun_by == LOCAL_RUN:
        commands = [_command("acceptance test of this machine, with the same profile", part.host, again)]
    else:
        commands = [
            _command("acceptance test of all hosts, with the same profile", "control node, in the checkout", again),
            _command("acceptance test of this host alone, without comparisons and launches with other hosts",
                  "control node, in the checkout", f"{again} --limit {host}"),
        ]  # fmt: skip
    commands += [
        _command("check of health and counters in a few seconds (replace /opt/rackproof if rackproof_prefix is set)", part.host,
              f"sudo {AGENT_BIN}/rackproof doctor{count}"),
    ]  # fmt: skip
    # The UUID selects the GPU; if the driver reported none, or something else in its place, the NVML index does.
    uuid, index = identifiers.get("uuid", ""), Scope.parse(part.scope).get(GPU)
    gpu = uuid if _UUID.fullmatch(uuid) else index
    benchmarks = _failed_benchmarks(part)
    if part.kind == GPU:
        single_gpu = [name for name in benchmarks if name in SINGLE_GPU_BENCHMARKS]
        multi_gpu = [name for name in benchmarks if name not in SINGLE_GPU_BENCHMARKS]
        if single_gpu:
            # NVML numbers GPUs by PCI address. CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA do the same, so that the index is right.
            environment = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={shell_word(gpu)}"
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
                    "the failed benchmarks that use all GPUs of the host",
                    part.host,
                    _benchmark_command(max(gpus, 1), multi_gpu),
                )
            )
        commands += [
            _command("state of the GPU", part.host, f"nvidia-smi -q -i {shell_word(gpu)}"),
            _command("NVIDIA's diagnostics (first stop all processes that use the GPU)", part.host,
                  f"dcgmi diag -r 3 -i {shell_word(index)}"),
            _command("log for NVIDIA support (not contained in this RMA package)", part.host, "sudo nvidia-bug-report.sh"),
        ]  # fmt: skip
    return commands


def _benchmark_command(count: int, benchmarks: Sequence[str]) -> str:
    """Return the command that runs the benchmarks on `count` GPUs. It uses the agent's Python, in which torch is installed."""
    launch = f"{AGENT_BIN}/python -m torch.distributed.run --standalone --nproc-per-node={count}"
    return f"{launch} -m agent.benchmarks --only {' '.join(benchmarks)}"


def _failed_benchmarks(part: FailedPart) -> list[str]:
    """Return the failed benchmarks in the order of the catalogue. A rate that drifted in a soak is a failure too."""
    names = {verdict.name.removeprefix("drift.").split(".")[0] for verdict in part.findings}
    return [name for name in BENCHMARKS if name in names]


def _command(purpose: str, where: str, command: str) -> dict[str, str]:
    return {"purpose": purpose, "where": where, "command": command}
