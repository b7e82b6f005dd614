"""One rank. Started by torchrun: `torchrun --nproc-per-node=4 -m agent.benchmarks --epochs 5 --batch-size 128`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agent.benchmarks import collective, gemm, memory_copy, training
from agent.benchmarks.context import Context, failed, join
from schemas.catalogue import BENCHMARKS, expand, settings
from schemas.records import SKIPPED

RUN: Mapping[str, Callable[[Context, dict[str, Any]], None]] = {
    "gemm": gemm.run,
    "memory_copy": memory_copy.run,
    "collective": collective.run,
    "training": training.run,
}

FOR_A_CPU: Mapping[str, Mapping[str, Any]] = {
    "gemm": {"size": 512},
    "memory_copy": {"size_bytes": 1 << 24},
    "collective": {"sizes_bytes": [8, 1 << 16, 1 << 20]},
    "training": {"max_steps": 20},
}
"""Sizes fit for trying the command line on a machine without GPUs."""


def main() -> int:
    """Runs the requested benchmarks on this rank; 0 where it got to the end, whatever the figures."""
    request, work = _request(_arguments().parse_args())
    context = _context(request, work)
    if "--request" in sys.argv:
        _own_log(context)
    try:
        context.phase("join")
        join(context, float(request["collective_timeout_s"]))
        _run_all(context, request["benchmarks"])
        context.phase("leave")
        dist.destroy_process_group()
    except Exception as error:
        context.phase(f"failed: {failed(error)[1]}"[:500], 1)
        raise
    finally:
        context.save()
    context.phase("end", 0)
    if "--request" not in sys.argv and context.rank == 0:
        for seen in context.observations:
            params = " ".join(f"{key}={value}" for key, value in seen.params.items())
            print(f"{seen.name} {params}: {seen.value if seen.reason == '' else seen.reason} {seen.unit}")
    return 0


def _run_all(context: Context, benchmarks: Mapping[str, dict[str, Any]]) -> None:
    broken = ""
    for name, chosen in benchmarks.items():
        if broken:
            _fill(context, name, chosen, SKIPPED, f"the process group broke in {broken}")
            continue
        try:
            RUN[name](context, settings(name, chosen))
        except Exception as error:  # noqa: BLE001 - a benchmark that fails is a result; the next one still runs
            status, reason = failed(error)
            print(f"{name}: {reason}", file=sys.stderr)  # the rank's log
            if BENCHMARKS[name].needs_peers or name == "training":
                broken = name
            _fill(context, name, chosen, status, reason)
        context.save()


def _fill(context: Context, name: str, chosen: dict[str, Any], status: str, reason: str) -> None:
    """Says why, for every output that the benchmark owes and has not made."""
    units = {output.name: output.unit for output in BENCHMARKS[name].outputs}
    for item in expand(context.stage, name, chosen):
        scope = context.device_scope if item.scope == "device" else context.world_scope
        if item.scope == "world" and not context.speaks_for_world:
            continue
        made = any(
            seen.name == item.name and seen.scope == scope and item.params.items() <= seen.params.items()
            for seen in context.observations
        )
        if not made:
            unit = units.get(item.name, "1")
            context.absent(item.name, unit=unit, scope=scope, status=status, reason=reason, **item.params)


def _request(arguments: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """What to do: the supervisor's request, or the command line's."""
    if arguments.request:
        return json.loads(arguments.request.read_text(encoding="utf-8")), arguments.request.parent
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    names = [name for name in BENCHMARKS if not (arguments.validation_only and name == "training")]
    gpu = torch.cuda.is_available()
    benchmarks = {
        name: {} if gpu else dict(FOR_A_CPU[name]) for name in names if not arguments.only or name in arguments.only
    }
    if "training" in benchmarks:
        over = {"epochs": arguments.epochs, "batch_size": arguments.batch_size}
        benchmarks["training"] |= {key: value for key, value in over.items() if value is not None}
    work = Path(arguments.results)
    work.mkdir(parents=True, exist_ok=True)
    return {
        "stage": "benchmark",
        "world_scope": "host",
        "device": "gpu" if gpu else "cpu",
        "devices": list(range(local)),
        "collective_timeout_s": 120,
        "benchmarks": benchmarks,
    }, work


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchrun … -m agent.benchmarks", description=__doc__)
    parser.add_argument("--request", type=Path, help="the supervisor's request; leaves the other options out")
    parser.add_argument("--only", nargs="+", choices=sorted(RUN), help="these benchmarks only")
    parser.add_argument("--validation-only", action="store_true", help="everything but the training")
    parser.add_argument("--epochs", type=int, help="epochs of the training")
    parser.add_argument("--batch-size", type=int, help="images a rank and step in the training")
    parser.add_argument("--results", default="results", help="directory for rank<N>.json (default: results)")
    return parser


def _context(request: Mapping[str, Any], work: Path) -> Context:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    index = request["devices"][local_rank]
    return Context(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=local_rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=torch.device("cuda", local_rank) if request["device"] == "gpu" else torch.device("cpu"),
        stage=request["stage"],
        device_scope=f"{request['device']}={index}",
        world_scope=request["world_scope"],
        work=work,
    )


def _own_log(context: Context) -> None:
    """Gives each rank a log of its own, beneath Python, so that NCCL's lines are in it too."""
    log = os.open(context.work / f"rank{context.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    sys.exit(main())
