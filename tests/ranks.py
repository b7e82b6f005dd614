"""Start ranks as forks of one process that has imported torch, without torchrun.

This saves each rank the two seconds of CPU time that the import takes. Other tests start a real torchrun.
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

from schemas.catalogue import BENCHMARKS

TIMEOUT_S = 120
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        f"agent.benchmarks.{BENCHMARKS[name].group}.{name}"
        for name in ("collective", "digest", "gemm", "memory", "pairs", "straggler", "training")
    ]
)


@dataclass(frozen=True)
class Ranks:
    """Ranks that were started together."""

    processes: list[BaseProcess]
    output: Path
    store: TCPStore | None = None
    """The store through which the ranks find one another, in place of torchrun's store; None for a rank of `start_alone`.

    This process serves the store as long as this object exists."""

    def wait(self) -> list[int | None]:
        """Wait until every rank has exited; kill a rank that does not exit within TIMEOUT_S seconds.

        Returns:
            The exit code of each rank. A killed rank has a negative code, or None if it has not yet ended.
        """
        for process in self.processes:
            process.join(TIMEOUT_S)
            if process.exitcode is None:
                process.kill()
        return [process.exitcode for process in self.processes]


def start(module: str, *arguments: str, work: Path, ranks: int = 2, hosts: Sequence[str] = (".",)) -> Ranks:
    """Start `ranks` ranks for each name in `hosts`. Each rank runs `module` with the variables that torchrun would set.

    All ranks run on this machine. The ranks of a host run in the directory `work`/HOST. All output goes to `work`/output.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "WORLD_SIZE": len(hosts) * ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    processes = [
        _fork(
            module,
            arguments,
            work / host,
            work,
            common,
            GROUP_RANK=node,
            LOCAL_RANK=local_rank,
            RANK=node * ranks + local_rank,
        )
        for node, host in enumerate(hosts)
        for local_rank in range(ranks)
    ]
    return Ranks(processes, work / "output", store)


def start_alone(module: str, *arguments: str, work: Path, **environment: str) -> Ranks:
    """Start one rank that runs `module` in the directory `work`. It gets the variables `environment`, but none of torchrun's."""
    return Ranks([_fork(module, arguments, work, work, environment)], work / "output")


def _fork(
    module: str, arguments: Sequence[str], directory: Path, work: Path, common: Mapping[str, object], **placement: int
) -> BaseProcess:
    environment = {name: str(value) for name, value in {**common, **placement}.items()}
    process = _forks.Process(target=_run, args=(module, list(arguments), environment, directory, work), daemon=True)
    process.start()
    return process


def _run(module: str, arguments: list[str], environment: dict[str, str], directory: Path, work: Path) -> None:
    os.setsid()  # as torchrun does: Linux may divide CPU time among sessions (autogroup), so each rank needs its own
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    torch.set_num_threads(1)  # OMP_NUM_THREADS is set too late: OpenMP read it when torch was imported
    os.chdir(directory)
    log = os.open(work / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
