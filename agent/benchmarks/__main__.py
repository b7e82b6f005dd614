"""Run the benchmarks. Each process is one rank: `torchrun --nproc-per-node=4 -m agent.benchmarks --epochs 5 --batch-size 128`.

`mpirun -np 4 python -m agent.benchmarks` and srun work too."""

from __future__ import annotations

import gc
import sys

from agent.placement import torch_env

# The import of torch takes seconds, so wrong variables of the launcher are reported before it.
if __name__ == "__main__":
    torch_env.prepare_environment(sys.argv[1:])
    gc.disable()  # garbage collection would take an eighth of torch's import time, and would free nothing

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

from agent.benchmarks.rank import rank_fields, redirect_output, run_to_end
from agent.benchmarks.runner import STORE_ERRORS, run_all
from agent.benchmarks.runtime import host_cpu
from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error, rank_heartbeat
from schemas.catalogue import BENCHMARKS
from schemas.records import ERROR

STARTED = time.monotonic()


def main() -> int:
    """Run the requested benchmarks on this rank.

    Under a supervisor (the agent's process that launches the ranks and passes --request), returns 0 even if a benchmark fails,
    because the host's record has the reason. Without a supervisor, returns 1 if an observation of this rank is an error.
    """
    options = _parser().parse_args()
    try:
        return _run(options)
    except Exception as error:  # recorded, then raised again
        rank_heartbeat().record_exception(error)
        raise


def _run(options: argparse.Namespace) -> int:
    store, rank, world_size = connect_store()
    request, work = _read_request(options, store, rank)
    if cpus := request.get("cpus"):  # before torch and NCCL start threads: new threads inherit the CPU affinity
        host_cpu.pin_to_cpus(int(cpus), int(os.environ.get("LOCAL_RANK", "0")))
    context = create_context(request, work, store, rank, world_size)
    if options.request:
        redirect_output(context)
    run_to_end(context, lambda: run_all(context, request["benchmarks"], take_device(context, request)))
    if options.request:
        return 0
    _wait_for_all_ranks(context)
    if context.local_rank == 0:
        _print_results(work, keep=options.results is not None)
    return 1 if any(item.status == ERROR for item in context.observations) else 0


def take_device(context: Context, request: Mapping[str, Any]) -> str:
    """Make this rank's device the current CUDA device; return why the device cannot be measured, or an empty string."""
    if context.kind == "cpu":
        return ""
    count = torch.cuda.device_count()
    if count <= context.local_rank:
        cause = (
            ""
            if torch.version.cuda
            else f"; torch {torch.__version__} was built without CUDA: install a build for CUDA"
        )
        return f"CUDA shows {count} devices: none is left for {context.device_scope}{cause}"
    try:
        torch.cuda.set_device(context.device)
        uuid = _device_uuid(torch.cuda.get_device_properties(context.device))
    except RuntimeError as error:
        return f"the device cannot be used: {describe_error(error)}"
    index = context.devices[context.local_rank]
    planned = request.get("uuids", {}).get(str(index), "").lower()
    if uuid and planned and uuid != planned:
        # CUDA can skip a GPU that NVML still lists. Each later GPU would then be reported under the wrong serial.
        return f"{context.device} has the UUID {uuid}, but NVML's GPU {index} has the UUID {planned}"
    return context.device_error()


def _device_uuid(properties: Any) -> str:
    """Return the device's UUID as NVML spells it, but in lower case; empty if this torch does not report it."""
    match = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(getattr(properties, "uuid", "")).lower())
    return f"gpu-{match[0]}" if match else ""


def connect_store() -> tuple[Store, int, int]:
    """Return the launcher's store, this process's rank and the world size; without a launcher: a local store, 0 and 1."""
    if "RANK" not in os.environ:
        return HashStore(), 0, 1
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=60)))
    # Any process that reaches the store can write to it. Under a supervisor, a secret prefix makes the keys hard to guess.
    return PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", "rackproof"), store), rank, world_size


def _wait_for_all_ranks(context: Context) -> None:
    """Record that this rank has finished. Local rank 0 also waits for all ranks, at most `context.timeout_s`.

    After this, local rank 0 prints the results of its host and, without --results, removes the work directory. Without the wait,
    results of the other ranks could be missing. Without torchrun, the process of rank 0 also serves the store, so it must not end
    before the ranks of all hosts have finished.
    """
    if context.world_size == 1:
        return
    context.store.set(f"left/{context.rank}", "")
    if context.local_rank == 0:
        with contextlib.suppress(*STORE_ERRORS):
            ranks = [f"left/{rank}" for rank in range(context.world_size)]
            context.store.wait(ranks, timedelta(seconds=context.timeout_s))


def _read_request(options: argparse.Namespace, store: Store, rank: int) -> tuple[dict[str, Any], Path]:
    """Return the request (what to run) and the work directory, from the supervisor's request or the command line."""
    if options.request:
        return json.loads(options.request.read_text(encoding="utf-8")), options.request.parent
    gpu = torch.cuda.is_available()
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
        "benchmarks": _select_benchmarks(options, gpu, verbose=rank == 0),
    }, work


def _select_benchmarks(options: argparse.Namespace, gpu: bool, *, verbose: bool) -> dict[str, dict[str, Any]]:
    """Return the benchmarks that the command line asks for, with their settings."""
    given = {"epochs": options.epochs, "batch_size": options.batch_size}
    selected: dict[str, dict[str, Any]] = {}
    for name in options.only or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        if (options.validation_only and benchmark.trains) or (not gpu and benchmark.cpu_settings is None):
            continue
        selected[name] = {} if gpu else dict(benchmark.cpu_settings or {})
        if "epochs" in benchmark.settings:
            selected[name] |= {key: value for key, value in given.items() if value is not None}
    skipped = [name for name in options.only or () if name not in selected]
    if skipped and verbose:
        print(
            f"skipped: {', '.join(skipped)} (they need a GPU, or --validation-only leaves them out)",
            file=sys.stderr,
        )
    return selected


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="torchrun … -m agent.benchmarks", description=__doc__)
    parser.add_argument(
        "--request", type=Path, help="the supervisor's request file; all other options are then ignored"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), metavar="BENCHMARK", help="run only these")
    parser.add_argument("--validation-only", action="store_true", help="run everything except the trainings")
    parser.add_argument("--epochs", type=_positive, help="number of epochs of each training")
    parser.add_argument("--batch-size", type=_positive, help="number of images per rank and training step")
    parser.add_argument("--results", type=Path, help="directory for the results, rank<N>.json (default: print only)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def create_context(request: Mapping[str, Any], work: Path, store: Store, rank: int, world_size: int) -> Context:
    """Return this rank's context, from the request and the launcher's variables."""
    fields = rank_fields(request, work, rank, world_size, launched=STARTED)
    device = torch.device("cuda", fields["local_rank"]) if request["device"] == "gpu" else torch.device("cpu")
    return Context(device=device, store=store, **fields)


def _print_results(work: Path, *, keep: bool) -> None:
    """Print what this host's ranks observed, then remove the work directory unless `keep` is set."""
    paths = [path for path in work.glob("rank*.json") if path.stem.removeprefix("rank").isdigit()]
    for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
        for item in json.loads(path.read_text(encoding="utf-8"))["observations"]:
            params = " ".join(f"{key}={value}" for key, value in item.get("params", {}).items())
            result = f"{item['value']} {item['unit']}" if "value" in item else f"{item['status']}: {item['reason']}"
            print(f"{item['scope']:<14} {item['name']:<34} {result:<28} {params}")
    if not keep:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    if torch.cuda._is_in_bad_fork():  # the launcher used CUDA before it forked, so CUDA works only after an exec
        os.execv(sys.executable, [sys.executable, "-m", "agent.benchmarks", *sys.argv[1:]])  # noqa: S606 - a list, no shell
    gc.freeze()
    gc.enable()
    exit_code = main()
    # All files are written. If threads of torch still run when Python exits, they can abort the process (seen with gloo on
    # a busy host), which would look like a lost rank.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
