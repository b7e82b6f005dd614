"""The verb with which a GPU host is watched: export."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile

import collectors
from agent.exporter.exporter import COMPATIBLE_NAMES, Source, registry, serve
from agent.exporter.run_metrics import RunSource
from agent.exporter.sampler import MAX_HZ, MAX_WINDOW_S, SAMPLE_HZ, WINDOW_S, GpuSampler
from agent.exporter.web import FRESH_S
from agent.exporter.web_config import WebConfig, WebConfigError, read_web_config
from agent.run import background, lease
from schemas import documents

USAGE = 64
MOST_PORT = 65535
WRITE_S = 15.0
MOST_S = 3600.0
STATE = Path("/var/lib/rackproof")


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds export to the command."""
    export = verbs.add_parser(
        "export",
        help="serve the collectors to Prometheus, or write them for node_exporter",
        epilog="example: rackproof export --listen 10.0.12.1 --port 9836 --web-config /etc/rackproof/web.config.yml",
    )
    export.add_argument("--listen", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    export.add_argument("--port", type=int, default=9836, help="port to listen on (default: 9836)")
    export.add_argument("--web-config", type=Path, metavar="FILE", help="TLS and users, as Prometheus' web.config.yml")
    export.add_argument("--gpus", default="", help="NVML indices to look at, comma between them (default: all)")
    export.add_argument(
        "--compat",
        choices=sorted(COMPATIBLE_NAMES),
        help="add the names of another exporter: dcgm, for dashboards made for it",
    )
    export.add_argument(
        "--state",
        type=Path,
        default=STATE,
        metavar="DIRECTORY",
        help=f"Rackproof's own on this host, to tell of the run that goes on (default: {STATE})",
    )
    export.add_argument(
        "--sample-hz",
        type=float,
        default=SAMPLE_HZ,
        help=f"samples of each GPU in a second; 0: none, and NVML is closed between scrapes (default: {SAMPLE_HZ:g})",
    )
    export.add_argument(
        "--window",
        type=float,
        default=WINDOW_S,
        help=f"seconds that lowest, mean and highest are of: more than between two scrapes (default: {WINDOW_S:g})",
    )
    export.add_argument(
        "--textfile", type=Path, metavar="FILE.prom", help="write this file for node_exporter instead of listening"
    )
    export.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="between two looks at the hardware: who scrapes more often is given the same page again "
        f"(default: {FRESH_S:g}), and between two --textfile writes (default: {WRITE_S:g})",
    )
    export.add_argument("--detach", type=Path, metavar="DIRECTORY", help="return at once; process id and log go there")
    export.add_argument(
        "--for-run",
        action="store_true",
        help="end when the run that has this host by its lease in --state is over, and nobody asks any more",
    )
    export.set_defaults(call=_export)


def _export(options: argparse.Namespace) -> int:
    wrong = _wrong(options)
    if wrong:
        return _complain(wrong)
    gpus = [int(index) for index in options.gpus.split(",")] if options.gpus else None
    try:
        web = read_web_config(options.web_config) if options.web_config else WebConfig()
        web.context()  # a wrong certificate is told here, and not in the log of a process in the background
    except WebConfigError as error:
        return _complain(str(error))
    if options.detach:
        arguments = _without_detach(sys.argv)
        until = "writing" if options.textfile else "listening"
        print(background.start(arguments, options.detach, "exporter", until=until))
        return 0
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    sampling = bool(options.sample_hz)
    watched = collectors.build_collectors(gpus, keep_nvml_open=sampling)
    sources: list[Source] = [RunSource(options.state)]
    sources += [GpuSampler(gpus, options.sample_hz, options.window)] if sampling else []
    if options.textfile:
        return _write(registry(watched, options.compat, sources), options.textfile, options.every or WRITE_S, ended)
    try:
        server = serve(watched, options.listen, options.port, web, options.compat, sources, options.every or FRESH_S)
    except OSError as error:
        return _complain(_not_listening(options, error))
    with server:
        print(f"listening on {server.scheme}://{options.listen}:{server.port}/metrics", file=sys.stderr, flush=True)
        background.notify_systemd()
        deserted = Deserted(options.state)
        while not ended.wait(FRESH_S):  # a signal that comes just before a wait without end would not end that
            if options.for_run and deserted.now(time.monotonic() - server.last_request):
                print("ended: the run is over, and nobody asks", file=sys.stderr, flush=True)
                break
    return 0


class Deserted:
    """Whether the run of an exporter is over and nobody ended it: its host had left, or the control node died."""

    def __init__(self, state: Path) -> None:
        self._state, self._had = state, False

    def now(self, unasked_s: float) -> bool:
        """Whether a run had the host and none has it any more (docs/resume.md), and nobody has asked for so long."""
        try:
            has = lease.held_by_other(self._state, "") is not None
        except (OSError, documents.DocumentError):
            return False  # it cannot be told
        self._had |= has
        return self._had and not has and unasked_s > lease.IDLE_S


def _not_listening(options: argparse.Namespace, error: OSError) -> str:
    """Whether it is the address or the port, and what to do."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        why = error.strerror if isinstance(error, socket.gaierror) else "this host has no such address"
        return (
            f"cannot listen on --listen {options.listen}: {why}; give an address of this host, such as 127.0.0.1, "
            "in a playbook rackproof_exporter_listen"
        )
    return (
        f"cannot listen on {options.listen} port {options.port}: {os.strerror(error.errno or 0)}; "
        "choose another --port, in a playbook rackproof_exporter_port"
    )


def _wrong(options: argparse.Namespace) -> str:
    """What is wrong with the command line, or nothing."""
    if not 0 <= options.port <= MOST_PORT:
        return f"--port {options.port}: a port is 0 to {MOST_PORT}; 0 lets the system choose"
    unknown = [part for part in options.gpus.split(",") if options.gpus and not part.isdigit()]
    if unknown:
        return (
            f"--gpus {options.gpus}: {unknown[0]!r} is no NVML index; give numbers with commas between them, e.g. 0,1"
        )
    if options.textfile and options.textfile.suffix != ".prom":
        return f"--textfile {options.textfile}: node_exporter reads files that end in .prom"
    if options.textfile and not options.textfile.absolute().parent.is_dir():
        return f"--textfile {options.textfile}: its directory does not exist; make it, or name node_exporter's own"
    if options.every is not None and not 1 <= options.every <= MOST_S:
        return f"--every {options.every:g}: give 1 second or more, {MOST_S:g} at most"
    if options.sample_hz and not 1 <= options.sample_hz <= MAX_HZ:
        return f"--sample-hz {options.sample_hz:g}: give 1 to {MAX_HZ:g}, or 0 for none"
    if not 1 <= options.window <= MAX_WINDOW_S:
        return f"--window {options.window:g}: give 1 to {MAX_WINDOW_S:g} seconds"
    return ""


def _without_detach(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--detach" and not argument.startswith("--detach="):
            kept.append(argument)
        skip = argument == "--detach"
    return kept


def _write(readings: CollectorRegistry, path: Path, every_s: float, ended: threading.Event) -> int:
    """Writes the file, whole or not at all, until it is ended; then removes it: what it says would no longer be true."""
    print(f"writing {path} every {every_s:g} s", file=sys.stderr, flush=True)
    background.notify_systemd()
    try:
        while True:
            write_to_textfile(str(path), readings)
            if ended.wait(every_s):
                return 0
    finally:
        path.unlink(missing_ok=True)


def _complain(message: str) -> int:
    print(f"rackproof: {message}", file=sys.stderr)
    return USAGE
