"""Collectives of a launch whose hosts share one NVLink domain, with and without NVLink between the hosts (multi-node NVLink).

A process reads NCCL_MNNVL_ENABLE only once, when it first uses NCCL. Therefore each rank starts a new process (`mnnvl_rank`) for
each of the two measurements. If the inventory does not put all hosts of the launch into one domain, nothing is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.benchmarks.collectives.collective import all_transports
from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.agreement import log
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.host_rank import read_request
from schemas.benchmarks.communication import bus_factor
from schemas.records import ERROR

COMMAND = (sys.executable, "-m", "agent.benchmarks.collectives.mnnvl_rank")
LIMIT_S = 120.0
"""Time limit of one measurement, including the start of Python, torch and NCCL. The measurement itself takes a few seconds."""
POLL_S = 0.05
END_S = 5.0
"""Time to wait for a killed process to end."""
MAX_OUTPUT = 1 << 20
"""Only the last MAX_OUTPUT characters of a log and the first MAX_OUTPUT bytes of a process's output are used."""
Results = list[dict[str, Any]]


class MeasurementError(Exception):
    """The process of a rank returned no result; the message says why."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report two bandwidths (`mnnvl.busbw`, B/s) for each operation and size, and their ratio `mnnvl.speedup`.

    The first bandwidth (parameter `mnnvl`: true) is measured with the transport that NCCL chooses. The second (false) is measured
    with NCCL_MNNVL_ENABLE=0, which prevents NVLink between the hosts. The ratio is the first divided by the second.

    If an operation gives wrong elements on any rank, their number over all ranks (`mnnvl.wrong_elements`) is reported, and the
    bandwidth is reported as an error.
    """
    if context.kind != "gpu" or not read_request(context).get("nvlink_domain"):
        return
    rates: dict[bool, dict[tuple[str, int], float]] = {}
    for enabled in (True, False):
        context.set_phase(f"mnnvl: {'as NCCL chooses' if enabled else 'without NVLink between the hosts'}")
        rates[enabled] = _measure(context, settings, enabled=enabled)
    for (op, size), rate in rates[True].items():
        if other := rates[False].get((op, size)):
            figures: Any = {"mnnvl.speedup": (rate / other, "1")}
            context.report_world(figures, op=op, size_bytes=size, world_size=context.world_size)


def _measure(context: Context, settings: Mapping[str, Any], *, enabled: bool) -> dict[tuple[str, int], float]:
    """Measure on all ranks and report; return (operation, size) -> busbw.

    Results with wrong elements are left out. If the measurement failed on any rank, the result is empty on all ranks.
    """
    log_path = context.work / f"mnnvl{int(enabled)}.rank{context.rank}.log"
    results: Results = []
    problem = ""
    try:
        results = _run_rank(context, settings, log_path, enabled=enabled)
    except (MeasurementError, OSError) as error:  # reported below, after the ranks have exchanged their problems
        problem = str(error) or type(error).__name__
    if problems := _problems_of_ranks(context, problem, f"mnnvl{int(enabled)}/problem"):
        _report_absent(context, settings, problems, enabled=enabled)
        return {}
    text = log_path.read_text(errors="replace")[-MAX_OUTPUT:] if log_path.exists() else ""
    transport = all_transports(context, nccl_log.parse_transport(text), f"mnnvl{int(enabled)}") or "unknown"
    rates = {}
    for item in results:
        params = {"op": item["op"], "size_bytes": item["size_bytes"], "mnnvl": enabled, "transport": transport}
        if item["wrong"]:
            log(f"rank {context.rank}: {item['wrong']} wrong elements: {params}")
        if wrong := int(context.sum_over_ranks(item["wrong"])):
            if context.is_reporting_rank:
                invalid = {"mnnvl.busbw": "B/s"}
                context.report_wrong_data(
                    "mnnvl.wrong_elements", wrong, invalid=invalid, scope=context.world_scope,
                    **params, world_size=context.world_size,
                )  # fmt: skip
            continue
        rate = item["moved"] / item["seconds"] * bus_factor(item["op"], context.world_size)
        rates[item["op"], item["size_bytes"]] = rate
        context.report_world({"mnnvl.busbw": (rate, "B/s")}, **params, world_size=context.world_size)
    return rates


def _problems_of_ranks(context: Context, own: str, key: str) -> str:
    """Return the problem of the first rank with a problem, and how many more ranks have problems; empty if no rank has any.

    The ranks exchange their problems in the store of the launch under `key`. Only local rank 0 of each host reports, so without
    the exchange a problem of any other rank would be lost.
    """
    context.store.set(f"{key}/{context.rank}", own)
    if context.min_max_over_ranks(int(not own))[0]:  # also a barrier: afterwards every rank has set its key
        return ""
    texts = {rank: context.store.get(f"{key}/{rank}").decode() for rank in range(context.world_size)}
    (first, text), *others = [(rank, text) for rank, text in texts.items() if text]
    return f"rank {first}: {text}" + (f" (and {len(others)} more)" if others else "")


def _report_absent(context: Context, settings: Mapping[str, Any], reason: str, *, enabled: bool) -> None:
    for op in settings["ops"] if context.is_reporting_rank else ():
        for size in settings["sizes_bytes"]:
            context.report_absent(
                "mnnvl.busbw", unit="B/s", scope=context.world_scope, status=ERROR, reason=reason,
                op=op, size_bytes=size, mnnvl=enabled, world_size=context.world_size,
            )  # fmt: skip


def _run_rank(context: Context, settings: Mapping[str, Any], log_path: Path, *, enabled: bool) -> Results:
    """Run the process that measures for this rank, and return its results. Raises MeasurementError or OSError."""
    request = {
        "rank": context.rank, "world_size": context.world_size, "device": context.local_rank,
        "ops": settings["ops"], "sizes_bytes": settings["sizes_bytes"], "timeout_s": LIMIT_S,
    }  # fmt: skip
    environment = {
        **os.environ,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH",
        "NCCL_DEBUG_FILE": str(log_path),
    }
    if not enabled:
        environment["NCCL_MNNVL_ENABLE"] = "0"
    key, deadline = f"mnnvl/{int(enabled)}/id", time.monotonic() + LIMIT_S
    with tempfile.TemporaryFile() as stdout:
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.DEVNULL, env=environment
        )
        try:
            _send(process, request)
            return _wait(context, process, stdout.fileno(), key, deadline)
        finally:
            process.kill()
            if process.stdin:
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver is abandoned
                process.wait(END_S)


def _wait(context: Context, process: subprocess.Popen[bytes], output: int, key: str, deadline: float) -> Results:
    """Pass the communicator's ID from rank 0's process to the other ranks' processes; return this rank's results."""
    shared = False
    while time.monotonic() < deadline:
        context.heartbeat.record_progress()
        has_ended, answer = process.poll() is not None, _answer(output)
        if not shared and context.rank == 0 and "id" in answer:
            context.store.set(key, answer["id"])
            shared = True
        elif not shared and context.rank and context.store.check([key]):
            _send(process, {"id": context.store.get(key).decode()})
            shared = True
        if "error" in answer:
            raise MeasurementError(str(answer["error"]))
        if has_ended:
            return _checked(answer, process.returncode)
        time.sleep(POLL_S)
    raise MeasurementError(f"no result within {LIMIT_S:g} s")


def _send(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    """Write a message to the process. If the process has ended, do nothing: `_wait` reports its exit code."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            line = f"{json.dumps(message)}\n".encode()
            os.write(process.stdin.fileno(), line)  # unbuffered, so there is nothing to flush


def _answer(file: int) -> dict[str, Any]:
    """Return the objects that the process has written so far, merged into one."""
    answer: dict[str, Any] = {}
    output = os.pread(file, MAX_OUTPUT, 0)  # os.read would also move the position at which the child process writes
    for item in _objects(output.decode(errors="replace")):
        answer |= item
    return answer


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            with suppress(ValueError):
                yield json.loads(line)


def _checked(answer: Mapping[str, Any], code: int) -> Results:
    results: Results = answer.get("results", [])
    if code or not results:
        raise MeasurementError(f"the process ended with exit code {code} and {len(results)} results")
    return results
