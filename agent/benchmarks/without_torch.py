"""Start the ranks of a stage whose benchmarks need no torch: `python -m agent.benchmarks.without_torch FILE REQUEST`.

This module replaces torchrun, which `rendezvous.py` runs for the other stages. The first host opens a key-value store, and each
host forks its ranks. If a rank fails, the other ranks of its host are ended. FILE has the same parameters as for `rendezvous.py`
(address of the store, name of the launch, number of this host), and says which ranks run on this host. REQUEST has the benchmarks
and their settings, and the names of the hosts.

`python -m agent.benchmarks.without_torch --rank REQUEST` runs one of these ranks. Its environment variables say which one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from agent.benchmarks.local_runner import run_local
from agent.benchmarks.rank import rank_fields, redirect_output, run_to_end
from agent.benchmarks.runtime import host_cpu
from agent.benchmarks.runtime.key_store import KeyServer, KeyStore
from agent.benchmarks.runtime.rank_context import RankContext
from agent.gang.heartbeat import rank_heartbeat
from agent.gang.protocol import GangError
from agent.gang.transport import listen
from agent.launch import guard

MODULE = "agent.benchmarks.without_torch"
OPEN_S = 600.0
"""Seconds for which a rank tries to connect to the store, because the first host may open it late. torchrun waits equally long
(TIMEOUT in rendezvous.py)."""
POLL_S = 0.1
STORE = "RACKPROOF_STORE"
"""Environment variable of a rank: path of FILE."""


def main() -> int:
    """Start the ranks of this host, or, with `--rank`, run one of them; return the exit code."""
    first, request = sys.argv[1:]
    if first == "--rank":
        return _run_rank(Path(request))
    path = Path(first)
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    listener = None
    if config["rank"] == 0:
        try:
            listener = listen(config["address"], config["port"], config["admitted"], purpose="the ranks' rendezvous")
        except GangError as error:
            sys.stderr.write(f"rackproof: {error}\n")
            return 1
        config["port"] = listener.getsockname()[1]
        path.write_text(json.dumps(config), encoding="utf-8")
    guards = {_start_rank(config, path, request, local_rank) for local_rank in range(config["ranks"])}
    if listener:  # after the forks: a fork while another thread runs may copy a lock that is held
        serving = KeyServer(config["name"]).serve(listener)
        threading.Thread(target=lambda: asyncio.run(serving), name="store", daemon=True).start()
    code = _wait_for_ranks(guards)
    # If a rank of the first host failed, the launcher of that host ends at once, without waiting for the other hosts.
    if config["hosts"] > 1 and (not code or config["rank"]):
        with contextlib.suppress(RuntimeError):  # the first host has ended early; its supervisor reports why
            _leave(config, json.loads(Path(request).read_text(encoding="utf-8")))
    return code


def _start_rank(config: dict[str, Any], path: Path, request: str, local_rank: int) -> int:
    """Fork the guard of a rank; return its process id. The guard forks the rank and watches it (agent/launch/guard.py)."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become_guard(config, path, request, local_rank)
    return child


def _become_guard(config: dict[str, Any], path: Path, request: str, local_rank: int) -> NoReturn:
    os.environ |= {
        "RANK": str(config["first_rank"] + local_rank),
        "WORLD_SIZE": str(config["world_size"]),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(config["ranks"]),
        "GROUP_RANK": str(config["rank"]),
        STORE: str(path),
    }
    code: object = 1
    try:
        sys.argv = [guard.__file__, MODULE, "--rank", request]
        runpy.run_path(guard.__file__, run_name="__main__")
    except SystemExit as error:
        code = error.code
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _wait_for_ranks(guards: set[int]) -> int:
    """Wait until all ranks have ended. If one fails, end the others. Return the exit code of this launcher."""
    code = 0
    while guards:
        child, status = os.wait()
        guards.discard(child)
        if os.waitstatus_to_exitcode(status) and not code:
            code = 1
            for other in guards:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    return code


def _leave(config: dict[str, Any], request: dict[str, Any]) -> None:
    """Record in the store that this host's ranks have ended. The first host then waits for the other hosts, which use its store.

    It waits at most `collective_timeout_s` seconds, and then logs the names of the hosts whose ranks have not ended.
    """
    store = KeyStore(config["address"], config["port"], config["name"], limit_s=0)
    store.set(f"launcher/{config['rank']}", "left")
    if config["rank"]:
        return
    limit_s = request["collective_timeout_s"]
    deadline, waiting = time.monotonic() + limit_s, list(range(1, config["hosts"]))
    while waiting and time.monotonic() < deadline:
        time.sleep(POLL_S)
        waiting = [host for host in waiting if not store.check([f"launcher/{host}"])]
    if waiting:
        names = ", ".join(request["members"][host] for host in waiting)
        sys.stderr.write(f"rackproof: the ranks of {names} did not end within {limit_s:g} s after those of this host\n")


def _run_rank(request_path: Path) -> int:
    """Run the requested benchmarks on this rank; return 0 even if a benchmark fails, because the record has the reason."""
    try:
        config = json.loads(Path(os.environ[STORE]).read_text(encoding="utf-8"))
        request = json.loads(request_path.read_text(encoding="utf-8"))
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if cpus := request.get("cpus"):
            host_cpu.pin_to_cpus(int(cpus), int(os.environ["LOCAL_RANK"]))
        store = KeyStore(config["address"], config["port"], config["name"], limit_s=OPEN_S)
        context = RankContext(store=store, **rank_fields(request, request_path.parent, rank, world_size))
        redirect_output(context)
        run_to_end(context, lambda: run_local(context, request["benchmarks"]))
    except Exception as error:  # recorded, then raised again
        rank_heartbeat().record_exception(error)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
