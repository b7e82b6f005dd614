"""One rank. Started by torchrun: `torchrun --nproc-per-node=4 -m agent.benchmarks --epochs 5 --batch-size 128`, by
`mpirun -np 4 python -m agent.benchmarks` or by srun likewise."""

from __future__ import annotations

import gc
import sys

from agent.placement import torch_env

if (
    __name__ == "__main__"
):  # before torch, which takes seconds: what is wrong with the launcher's variables is told at once
    torch_env.check(sys.argv[1:])
    gc.disable()  # looking for garbage in what torch makes of itself takes an eighth of the time, and there is none

import argparse
import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from agent.benchmarks.runner import NOT_THERE, device_lost, run_all
from agent.benchmarks.runtime import host_cpu
from agent.benchmarks.runtime.context import Context, failed
from agent.gang.heartbeat import LAUNCHED, heart
from schemas.catalogue import BENCHMARKS
from schemas.records import ERROR

BEGAN = time.monotonic()
FOR_A_CPU: Mapping[str, Mapping[str, Any]] = {
    "gemm": {"dtypes": ["fp32", "bf16"], "size": 512},
    "memory": {"size_bytes": 1 << 24},
    "integrity": {"most_bytes": 1 << 26},
    "stress": {"size": 256, "seconds": 1.0, "settle_seconds": 0.2},
    "digest": {"size": 256, "seconds": 0.5},
    "collective": {"sizes_bytes": [8, 1 << 16, 1 << 20]},
    "training": {"networks": ["convnet"], "max_steps": 20},
    "fashion_mnist": {"epochs": 1, "max_steps": 20},
    "scaling": {"max_steps": 20},
    "variants": {"variants": ["fp32"], "batch_sizes": [16], "compiled_variants": [], "steps": 3},
    "model_parallel": {"width": 128, "batch_size": 32},
    "transformer": {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "batch_size": 2},
    "overlap": {"size": 256, "size_bytes": 1 << 20},
    "dataloader": {"workers": [1], "batch_size": 64},
    "straggler": {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "batch_size": 4, "seconds": 0.5},
}
"""Sizes fit for trying the command line on a machine without GPUs."""
NO_CPU = ("host_copy", "peer_copy")
"""Between a CPU and itself there is nothing to copy."""


def main() -> int:
    """Runs the requested benchmarks on this rank.

    Returns 0 where it got to the end, whatever the figures; started by hand, 1 where one of them is an error.
    """
    options = _arguments().parse_args()
    store, rank, world_size = _meeting_place()
    request, work = _request(options, store, rank)
    if cpus := request.get("cpus"):  # before torch and NCCL start threads, which inherit it
        host_cpu.confine(int(cpus), int(os.environ.get("LOCAL_RANK", "0")))
    context = _context(request, work, store, rank, world_size)
    if options.request:
        _own_log(context)
    try:
        run_all(context, request["benchmarks"], _take_device(context, request))
        context.save()
        context.begin("end")
        context.meet()  # torchrun ends every rank of the host as soon as one has ended badly
    except Exception as error:  # told, then raised again
        context.heart.fail(str(error))
        context.phase(f"failed: {failed(error)[1]}"[:500], 1)
        context.save()
        raise
    context.phase("end", 0)
    if options.request:
        return 0
    _part(context)
    if context.local_rank == 0:
        _show(work, keep=options.results is not None)
    return 1 if any(seen.status == ERROR for seen in context.observations) else 0


def _take_device(context: Context, request: Mapping[str, Any]) -> str:
    """Makes this rank's device the current one; returns why it cannot be measured, or an empty string."""
    if context.kind == "cpu":
        return ""
    count = torch.cuda.device_count()
    if count <= context.local_rank:
        return f"CUDA shows {count} devices: none is left for {context.device_scope}"
    try:
        torch.cuda.set_device(context.device)
        found = _uuid(torch.cuda.get_device_properties(context.device))
    except RuntimeError as error:
        return f"the device cannot be used: {failed(error)[1]}"
    planned = request.get("uuids", {}).get(str(context.devices[context.local_rank]), "").lower()
    if found and planned and found != planned:
        # CUDA leaves out a GPU that NVML still counts, and every later one would be measured under another's serial.
        return f"{context.device} is {found}, and not {planned} that NVML has at this index"
    return device_lost(context)


def _uuid(properties: Any) -> str:
    """The device's UUID as NVML spells it; empty where this torch does not tell."""
    found = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(getattr(properties, "uuid", "")).lower())
    return f"gpu-{found[0]}" if found else ""


def _meeting_place() -> tuple[Store, int, int]:
    """The store that torchrun keeps for its ranks; without torchrun this process is alone."""
    if "RANK" not in os.environ:
        return HashStore(), 0, 1
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=60)))
    # Whoever reaches the store can write to it: nobody else knows the name that the supervisors gave this launch.
    return PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", "rackproof"), store), rank, world_size


def _part(context: Context) -> None:
    """Who takes away its host's files waits until nobody writes any; so does rank 0, which may keep the store."""
    if context.world_size == 1:
        return
    context.store.set(f"left/{context.rank}", "")
    if context.local_rank == 0:
        with contextlib.suppress(*NOT_THERE):
            ranks = [f"left/{rank}" for rank in range(context.world_size)]
            context.store.wait(ranks, timedelta(seconds=context.timeout_s))


def _request(options: argparse.Namespace, store: Store, rank: int) -> tuple[dict[str, Any], Path]:
    """What to do: the supervisor's request, or the command line's."""
    if options.request:
        return json.loads(options.request.read_text(encoding="utf-8")), options.request.parent
    gpu = torch.cuda.is_available()
    names = [name for name in options.only or BENCHMARKS if not (options.validation_only and BENCHMARKS[name].trains)]
    if not gpu:
        names = [name for name in names if name not in NO_CPU]
    left_out = [name for name in options.only or () if name not in names]
    if left_out and rank == 0:
        print(f"left out: {', '.join(left_out)} (it needs a GPU, or trains)", file=sys.stderr)
    benchmarks: dict[str, dict[str, Any]] = {name: {} if gpu else dict(FOR_A_CPU.get(name, {})) for name in names}
    over = {"epochs": options.epochs, "batch_size": options.batch_size}
    for name in benchmarks:
        if "epochs" in BENCHMARKS[name].settings:
            benchmarks[name] |= {key: value for key, value in over.items() if value is not None}
    if rank == 0:
        store.set("work", str(options.results.absolute() if options.results else tempfile.mkdtemp(prefix="rackproof-")))
    work = Path(store.get("work").decode())
    work.mkdir(parents=True, exist_ok=True)
    return {
        "stage": "benchmark",
        "world_scope": "host",
        "device": "gpu" if gpu else "cpu",
        "devices": list(range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))),
        "collective_timeout_s": 120,
        "benchmarks": benchmarks,
    }, work


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="torchrun … -m agent.benchmarks", description=__doc__)
    parser.add_argument("--request", type=Path, help="the supervisor's request; leaves the other options out")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(BENCHMARKS), metavar="BENCHMARK", help="these benchmarks only"
    )
    parser.add_argument("--validation-only", action="store_true", help="everything but the training")
    parser.add_argument("--epochs", type=_positive, help="epochs of the training")
    parser.add_argument("--batch-size", type=_positive, help="images a rank and step in the training")
    parser.add_argument("--results", type=Path, help="directory to keep rank<N>.json in (default: not kept)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def _context(request: Mapping[str, Any], work: Path, store: Store, rank: int, world_size: int) -> Context:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Context(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=torch.device("cuda", local_rank) if request["device"] == "gpu" else torch.device("cpu"),
        stage=request["stage"],
        kind=request["device"],
        devices=tuple(request["devices"]),
        world_scope=request["world_scope"],
        work=work,
        store=store,
        node=int(os.environ.get("GROUP_RANK", "0")),
        timeout_s=float(request["collective_timeout_s"]),
        heart=heart(),
        launched=float(os.environ.get(LAUNCHED, BEGAN)),
    )


def _show(work: Path, *, keep: bool) -> None:
    """Prints what this host's ranks found, for the one who started them by hand."""
    paths = sorted(work.glob("rank*.json"), key=lambda path: (len(path.name), path.name))
    for path in paths:
        if path.name.endswith(".state.json"):
            continue
        for seen in json.loads(path.read_text(encoding="utf-8"))["observations"]:
            params = " ".join(f"{key}={value}" for key, value in seen.get("params", {}).items())
            found = f"{seen['value']} {seen['unit']}" if "value" in seen else f"{seen['status']}: {seen['reason']}"
            print(f"{seen['scope']:<14} {seen['name']:<34} {found:<28} {params}")
    if not keep:
        shutil.rmtree(work, ignore_errors=True)


def _own_log(context: Context) -> None:
    """Gives each rank a log of its own, beneath Python, so that NCCL's lines are in it too."""
    log = os.open(context.work / f"rank{context.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    if torch.cuda._is_in_bad_fork():  # the launcher used CUDA before it forked: only another program can use it then
        os.execv(sys.executable, [sys.executable, "-m", "agent.benchmarks", *sys.argv[1:]])  # noqa: S606 - a list, no shell
    gc.freeze()
    gc.enable()
    ended = main()
    # Everything is written. Threads of torch that are still at work when Python takes itself down abort the process (seen
    # with gloo on a busy host), which would read as a rank that was lost.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
