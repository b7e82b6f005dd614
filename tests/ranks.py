"""Ranks in the environment that torchrun gives them, forked from one process that has torch: importing it costs each rank two
seconds of a processor. That torchrun itself starts them is seen by those tests that start it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import TCPStore

PATIENCE_S = 120
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        f"agent.benchmarks.{name}"
        for name in ("collective", "digest", "gemm", "memory", "pairs", "straggler", "training")
    ]
)


@dataclass(frozen=True)
class Ranks:
    """Some that were started together."""

    processes: list[BaseProcess]
    printed: Path
    store: TCPStore | None = None
    """What torchrun would keep for them."""

    def end(self) -> list[int | None]:
        """Waits for all of them; their exit codes."""
        for process in self.processes:
            process.join(PATIENCE_S)
            if process.exitcode is None:
                process.kill()
        return [process.exitcode for process in self.processes]


def start(module: str, *arguments: str, work: Path, ranks: int = 2, hosts: Sequence[str] = (".",)) -> Ranks:
    """Starts `ranks` of `module` in each directory of `hosts` below `work`; what they print is in `work`/printed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "WORLD_SIZE": len(hosts) * ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    seats = [(node, local) for node in range(len(hosts)) for local in range(ranks)]
    started = [
        _fork(
            module,
            arguments,
            work / hosts[node],
            work,
            common,
            GROUP_RANK=node,
            LOCAL_RANK=local,
            RANK=node * ranks + local,
        )
        for node, local in seats
    ]
    return Ranks(started, work / "printed", store)


def alone(module: str, *arguments: str, work: Path) -> Ranks:
    """Starts one that no launcher placed."""
    return Ranks([_fork(module, arguments, work, work, {})], work / "printed")


def _fork(
    module: str, arguments: Sequence[str], place: Path, work: Path, common: Mapping[str, object], **seat: int
) -> BaseProcess:
    environment = {name: str(value) for name, value in {**common, **seat}.items()}
    process = _forks.Process(target=_become, args=(module, list(arguments), environment, place, work), daemon=True)
    process.start()
    return process


def _become(module: str, arguments: list[str], environment: dict[str, str], place: Path, work: Path) -> None:
    os.setsid()  # as torchrun does: the kernel may share processors out by session
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    torch.set_num_threads(1)  # OpenMP read its variable when torch was imported
    os.chdir(place)
    log = os.open(work / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
