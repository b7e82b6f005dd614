"""The context in which a benchmark that uses torch runs on one rank: its device, timing and collectives."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.rank_context import RankContext
from agent.benchmarks.runtime.timing import Timing
from agent.gang.heartbeat import describe_error

NO_KERNELS = "no kernel image is available"
"""Part of CUDA's message if a library has no kernels for a GPU. The GPU may be healthy."""


@dataclass(kw_only=True)
class Context(RankContext, Timing):
    """One rank of a launch whose benchmarks use torch."""

    store: Store = field(default_factory=HashStore)

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum of the value over all ranks."""
        number = torch.tensor([value], dtype=torch.float64, device=self.device)
        with self.heartbeat.in_collective():
            dist.all_reduce(number)
            return float(number)

    def min_max_over_ranks(self, code: int) -> tuple[int, int]:
        """Return the smallest and the largest `code` over all ranks; they are equal if all ranks agree."""
        ends = torch.tensor([code, -code], dtype=torch.int64, device=self.device)
        with self.heartbeat.in_collective():
            dist.all_reduce(ends, dist.ReduceOp.MIN)
            return int(ends[0]), -int(ends[1])

    def software_versions(self) -> dict[str, str]:
        """Return the version of torch; of CUDA, if torch was built with it; of NCCL, cuDNN and cuBLAS, if torch finds a GPU."""
        versions = {"torch": str(torch.__version__)}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            versions["nccl"] = ".".join(map(str, version))
            versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
            if version := _cublas_version(Path("/proc/self/maps")):
                versions["cublas"] = version
        return versions

    def device_error(self) -> str:
        """Return why the device can no longer be used; empty if it can. After some CUDA errors, every later CUDA call fails."""
        try:
            torch.zeros(1, device=self.device).add_(1)
            self.synchronize()  # has a time-out; reading the tensor would wait forever if a kernel hangs
        except (RuntimeError, TimeoutError) as error:
            if NO_KERNELS in str(error):
                self.is_software_unfit = True
                return (
                    f"torch {torch.__version__} has no kernels for this GPU of compute capability "
                    f"{'.'.join(map(str, torch.cuda.get_device_capability(self.device)))}, only for "
                    f"{', '.join(torch.cuda.get_arch_list())}: install a build of torch for this GPU"
                )
            return f"the device was lost: {describe_error(error)}"
        return ""

    def release_memory(self) -> None:
        """Release the memory of the benchmark that has ended, on the host and on the device."""
        super().release_memory()
        if self.kind == "gpu":
            torch.cuda.empty_cache()


@cache
def _cublas_version(maps: Path) -> str:
    """Return the version of the cuBLAS that this process has loaded; empty if it has none, or if cuBLAS reports no version.

    torch has no function for this. The version of CUDA does not determine it: packages and containers may replace only cuBLAS.

    Args:
        maps: path of the list of mapped files, `/proc/self/maps`.
    """
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    path = next((line[line.index("/") :] for line in lines if "/libcublas.so" in line), "")
    number, numbers = ctypes.c_int(), []
    try:
        for part in range(3):  # major, minor, patch
            if not path or ctypes.CDLL(path).cublasGetProperty(part, ctypes.byref(number)):
                return ""
            numbers.append(str(number.value))
    except (OSError, AttributeError):
        return ""
    return ".".join(numbers)


def cuda_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream of the device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def join_process_group(context: Context) -> None:
    """Form the process group of all ranks: NCCL on GPUs, gloo on CPUs."""
    arguments: dict[str, Any] = {
        "store": PrefixStore("group", context.store),
        "rank": context.rank,
        "world_size": context.world_size,
        "timeout": timedelta(seconds=context.timeout_s),
    }
    if context.device.type == "cuda":
        os.environ.setdefault(*nccl_log.NO_GRAPH_MIXING)
        nccl_log.enable(context.work / f"nccl.rank{context.rank}.log")
        dist.init_process_group("nccl", device_id=context.device, **arguments)
    else:
        dist.init_process_group("gloo", **arguments)
    context.sum_over_ranks(1.0)
    context.heartbeat.joined = True
