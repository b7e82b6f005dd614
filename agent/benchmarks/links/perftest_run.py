"""Run perftest as a child process, with a deadline."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agent.benchmarks.links.perftest import LATENCY_PROGRAM, MAX_OUTPUT, PROGRAMS, failure_reason
from agent.benchmarks.links.rdma_ports import ROCE, RdmaPort
from schemas.benchmarks.communication import SMALL_MESSAGE_BYTES

POLL_S = 0.02
LISTEN_S = 15.0
"""Time limit for a server to listen after its start. Before it listens, it opens the adapter and allocates memory."""
MARGIN_S = 20.0
"""Time that a test may take in addition to `seconds`, to connect and to end."""
HELP_S = 10.0
"""Time limit of `--help`."""
END_S = 5.0
"""How long to wait for a process that was killed."""
LATENCY_ITERATIONS = 1000
LISTEN_STATE = "0A"
"""TCP_LISTEN in /proc/net/tcp."""
Progress = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class VerbsTest:
    """One test between two ports."""

    figure: str
    """What the test measures: `bandwidth`, `latency` or `message_rate`."""
    op: str = "write"
    direction: str = "one_way"
    """`one_way` or `both_ways`."""
    memory: str = "host"
    """`host` or `gpu`: where the buffers of the messages are."""
    size_bytes: int = SMALL_MESSAGE_BYTES
    seconds: int = 1

    @property
    def program(self) -> str:
        """Return the name of the program that measures the figure."""
        return LATENCY_PROGRAM if self.figure == "latency" else PROGRAMS[self.op]

    @property
    def has_two_directions(self) -> bool:
        """Return whether two hosts run the test twice, with each host once as the client (only for one-way bandwidth)."""
        return self.figure == "bandwidth" and self.direction == "one_way"

    @property
    def limit_s(self) -> float:
        """Return the time limit in seconds. A test that takes longer counts as failed."""
        return self.seconds + MARGIN_S

    def arguments(self, port: RdmaPort, tcp_port: int, gpu: Sequence[str] = (), server: str = "") -> list[str]:
        """Return the arguments of perftest for one side of the test, the server or the client.

        Args:
            port: the RDMA port of this side.
            tcp_port: the TCP port on which the server listens. Both sides exchange the parameters of their queue pairs over it.
            gpu: the options for GPU memory, from `Installation.gpu_options`.
            server: the server's address if this side is the client; empty if this side is the server.
        """
        arguments = ["-F", "-d", port.hca, "-i", str(port.number), "-p", str(tcp_port), "-s", str(self.size_bytes)]
        if port.link_layer == ROCE:
            arguments += ["-x", str(port.gid_index)]
        if port.pkey_index:
            arguments.append(f"--pkey_index={port.pkey_index}")
        if port.service_level:
            arguments.append(f"--sl={port.service_level}")
        if port.traffic_class:
            arguments.append(f"--tclass={port.traffic_class}")
        if self.figure == "latency":
            arguments += ["-n", str(LATENCY_ITERATIONS)]
        else:
            arguments += ["-D", str(self.seconds), "--report_gbits"]
        if self.direction == "both_ways":
            arguments.append("-b")
        return [*arguments, *gpu, *([server] if server else [])]


class Installation:
    """The perftest programs of this host, and their options for GPU memory."""

    def __init__(self) -> None:
        self.paths = {name: shutil.which(name) for name in (*PROGRAMS.values(), LATENCY_PROGRAM)}
        self._help: str | None = None

    def path(self, program: str) -> str | None:
        """Return the path of a program; None if it is not installed."""
        return self.paths.get(program)

    def gpu_options(self, address: str, root: Path = Path("/")) -> list[str] | str:
        """Return the options for the memory of the GPU at this PCI address, or text that says why GPU memory cannot be used."""
        if self._help is None:
            self._help = _help_text(self.path(PROGRAMS["write"]))
        if "--use_cuda_bus_id" not in self._help:
            return "perftest is not built for CUDA: build it with CUDA_H_PATH to measure transfers from GPU memory"
        options = [f"--use_cuda_bus_id={address}"]
        if any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")):
            return options
        if "--use_cuda_dmabuf" in self._help:
            return [*options, "--use_cuda_dmabuf"]
        return (
            "the kernel module nvidia_peermem is not loaded, and perftest is built without dmabuf: load nvidia_peermem"
        )


def _help_text(program: str | None) -> str:
    if program is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, timeout=HELP_S, check=False
        )
        return (done.stdout + done.stderr)[:MAX_OUTPUT].decode(errors="replace")
    return ""


class PerftestRun:
    """The process of one side of a test, the server or the client."""

    def __init__(self, command: Sequence[str], port: RdmaPort) -> None:
        """Start the command, and restrict it to the processors near the port.

        Processors that this process may not use are left out. If none is left, the command is not restricted.

        Raises:
            OSError: the command could not be started, or could not use the port.
        """
        if port.device_problem:
            raise OSError(port.device_problem)
        with contextlib.ExitStack() as files:
            self._stdout, self._stderr = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._stdout, stderr=self._stderr
            )
            self._files = files.pop_all()
        # With the processors near the adapter, the memory of the test is on the adapter's NUMA node.
        with contextlib.suppress(OSError):  # the test works on other processors, too
            if wanted := set(port.cpus) & os.sched_getaffinity(0):
                os.sched_setaffinity(self._process.pid, wanted)

    @property
    def is_running(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def failure(self) -> str:
        """Return why the process failed; empty if it succeeded or still runs."""
        code = self._process.returncode
        return failure_reason(code, self.stdout(), _read(self._stderr)) if code else ""

    def stdout(self) -> str:
        """Return what the process has printed to stdout."""
        return _read(self._stdout)

    def end(self) -> None:
        """Kill the process if it runs, and free its files. A process that hangs in the driver is abandoned."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._files.close()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode(errors="replace")


def wait_until_listening(servers: Mapping[str, tuple[PerftestRun, int]], progress: Progress) -> dict[str, str]:
    """Wait until each server listens on its TCP port, at most LISTEN_S.

    Return key -> problem for each server that has ended or does not listen.
    """
    deadline, problems = time.monotonic() + LISTEN_S, {}
    waiting = dict(servers)
    while waiting and time.monotonic() < deadline:
        listening = _listening_ports()
        for key, (run, tcp_port) in list(waiting.items()):
            if tcp_port in listening:
                del waiting[key]
            elif not run.is_running:
                problems[key] = run.failure() or "the server ended before the client connected"
                del waiting[key]
        progress()
        time.sleep(POLL_S)
    return problems | dict.fromkeys(waiting, f"the server did not listen within {LISTEN_S:g} s")


def finish(runs: Mapping[str, PerftestRun], limit_s: float, progress: Progress) -> dict[str, str]:
    """Wait up to `limit_s` for the runs; return for each key why its run failed, or an empty text if the run succeeded.

    A run that exceeds the limit counts as failed but is not killed: the caller must call its `end`.
    """
    deadline = time.monotonic() + limit_s
    while any(run.is_running for run in runs.values()) and time.monotonic() < deadline:
        progress()
        time.sleep(POLL_S)
    late = f"no result within {limit_s:g} s"
    return {key: late if run.is_running else run.failure() for key, run in runs.items()}


def free_tcp_port() -> int:
    """Return a TCP port that no process uses at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _listening_ports() -> set[int]:
    """Return the TCP ports on which processes of this network namespace listen."""
    ports = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if len(fields) > 3 and fields[3] == LISTEN_STATE:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
