"""The verb `export`: serve this host's readings to Prometheus."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.common import fail, print_progress, print_started
from agent.exporter.defaults import COMPATIBLE, FRESH_S, MAX_HZ, MAX_WINDOW_S, SAMPLE_HZ, WINDOW_S
from agent.exporter.web_config import WebConfig, WebConfigError, read_web_config
from agent.run import background, lease
from agent.run.lease import STATE
from schemas import documents

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from agent.exporter.exporter import Source

MAX_PORT = 65535
WRITE_S = 15.0
MAX_INTERVAL_S = 3600.0


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add export to the command."""
    parser = verbs.add_parser(
        "export",
        help="serve this host's readings to Prometheus, or write them to a file for node_exporter",
        epilog="example: rackproof export --listen 10.0.12.1 --port 9836 --web-config /etc/rackproof/web.config.yml",
    )
    parser.add_argument("--listen", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=9836, help="port to listen on (default: 9836)")
    parser.add_argument(
        "--web-config",
        type=Path,
        metavar="FILE",
        help="file with TLS settings and users, in the format of Prometheus' web.config.yml",
    )
    parser.add_argument("--gpus", default="", help="comma-separated NVML indices of the GPUs to read (default: all)")
    parser.add_argument(
        "--compat",
        action="append",
        default=[],
        choices=COMPATIBLE,
        help="also export metrics under other names. dcgm: the names of dcgm-exporter, for its dashboards; 1.0: the names that "
        "renamed metrics had in Rackproof 1.0 (this value will be removed in the next release). May be given twice",
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=STATE,
        metavar="DIRECTORY",
        help="Rackproof's state directory on this host. If its file runs/live.json describes a run, the progress and the figures "
        f"of the run are exported too (default: {STATE})",
    )
    parser.add_argument(
        "--sample-hz",
        type=float,
        default=SAMPLE_HZ,
        help="number of samples that are taken of each GPU per second. With 0 no samples are taken, and NVML is closed between "
        f"scrapes (default: {SAMPLE_HZ:g})",
    )
    parser.add_argument(
        "--window",
        type=float,
        default=WINDOW_S,
        help="length in seconds of the time window over which minimum, mean and maximum of the samples are exported. Make it "
        "longer than the scrape interval plus --every: a scraped page may be --every seconds old, and with a shorter window some "
        f"samples are in no scrape (default: {WINDOW_S:g})",
    )
    parser.add_argument(
        "--textfile", type=Path, metavar="FILE.prom", help="write this file for node_exporter instead of listening"
    )
    parser.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help=f"minimum time between two readings of the hardware; scrapes in between get a cached page (default: {FRESH_S:g}). "
        f"With --textfile: how often the file is written (default: {WRITE_S:g})",
    )
    parser.add_argument(
        "--detach",
        type=Path,
        metavar="DIRECTORY",
        help="run in the background and return when the exporter is ready; write process id and log to this directory",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="with --detach: print a JSON object with the process id, and whether this command started the exporter",
    )
    parser.add_argument(
        "--for-run",
        action="store_true",
        help="exit when no run holds this host any more (according to the lease in --state) and the last scrape is more than 15 "
        "minutes ago",
    )
    parser.set_defaults(call=_export)


def _export(options: argparse.Namespace) -> int:
    if problem := _usage_problem(options):
        return fail(problem)
    gpus = [int(index) for index in options.gpus.split(",")] if options.gpus else None
    try:
        web = read_web_config(options.web_config) if options.web_config else WebConfig()
        web.context()  # report a wrong certificate here, not in the log of the background process
    except WebConfigError as error:
        return fail(str(error))
    if options.detach:
        arguments = _without_detach(sys.argv)
        started = background.start(arguments, options.detach, "exporter", wait_until_ready=True)
        print_started(started, as_json=options.json)
        return 0
    return _serve(options, gpus, web)


def _serve(options: argparse.Namespace, gpus: Sequence[int] | None, web: WebConfig) -> int:
    """Serve the page, or write the file, until the process is terminated or the run has finished."""
    # Imported here, because importing them takes longer than the rest of `rackproof export --detach`, which does not need them.
    from agent.exporter.exporter import registry, serve
    from agent.exporter.run_metrics import RunSource
    from agent.exporter.sampler import GpuSampler
    from collectors.table import build_collectors

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    sampling = bool(options.sample_hz)
    readers = build_collectors(gpus, identity=True, keep_nvml_open=sampling)
    sources: list[Source] = [RunSource(options.state)]
    sources += [GpuSampler(gpus, options.sample_hz, options.window)] if sampling else []
    if options.textfile:
        metrics = registry(readers, options.compat, sources)
        return _write_textfile(metrics, options.textfile, options.every or WRITE_S, ended)
    try:
        server = serve(readers, options.listen, options.port, web, options.compat, sources, options.every or FRESH_S)
    except OSError as error:
        return fail(_listen_problem(options, error))
    with server:
        address = f"[{options.listen}]" if ":" in options.listen else options.listen
        print_progress(f"listening on {server.scheme}://{address}:{server.port}/metrics")
        background.notify_ready()
        end_of_run = EndOfRun(options.state)
        while not ended.wait(FRESH_S):  # with a time-out, because Python may run a signal's handler only after the wait
            if options.for_run and end_of_run.is_reached(time.monotonic() - server.last_request):
                print_progress("run finished, no scrapes; exiting")
                break
    return 0


class EndOfRun:
    """Detects the end of a run, so that the exporter exits even if the control node has crashed and never stops the exporter."""

    def __init__(self, state: Path) -> None:
        self._state, self._had_run = state, False

    def is_reached(self, idle_s: float) -> bool:
        """Return whether a run has ended and the last scrape is more than `lease.IDLE_S` ago.

        A run has ended if a run held the host at an earlier call and no run holds it now (docs/resume.md defines holding a host).

        Args:
            idle_s: seconds since the last scrape.
        """
        try:
            has_run = lease.held_by_other(self._state, "") is not None
        except (OSError, documents.DocumentError):
            return False  # whether a run holds the host is unknown
        self._had_run |= has_run
        return self._had_run and not has_run and idle_s > lease.IDLE_S


def _listen_problem(options: argparse.Namespace, error: OSError) -> str:
    """Return an error message for an address or a port that is not available."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        reason = error.strerror if isinstance(error, socket.gaierror) else "this host has no such address"
        return (
            f"cannot listen on --listen {options.listen}: {reason}; give an address of this host, such as 127.0.0.1 "
            "(in a playbook: rackproof_exporter_listen)"
        )
    return (
        f"cannot listen on {options.listen} port {options.port}: {os.strerror(error.errno or 0)}; "
        "choose another port with --port (in a playbook: rackproof_exporter_port)"
    )


def _usage_problem(options: argparse.Namespace) -> str:
    """Return an error message for the first invalid option; empty if all are valid."""
    if not 0 <= options.port <= MAX_PORT:
        return f"--port {options.port}: not a port; give 1 to {MAX_PORT}, or 0 to let the system choose"
    invalid = [part for part in options.gpus.split(",") if options.gpus and not part.isdecimal()]
    if invalid:
        return f"--gpus {options.gpus}: {invalid[0]!r} is not an NVML index; give comma-separated numbers, such as 0,1"
    if options.textfile and options.textfile.suffix != ".prom":
        return f"--textfile {options.textfile}: node_exporter reads files that end in .prom"
    if options.textfile and not options.textfile.absolute().parent.is_dir():
        return (
            f"--textfile {options.textfile}: its directory does not exist; create it, or use node_exporter's directory"
        )
    if options.textfile and options.for_run:
        return "--for-run exits after the last scrape, but --textfile serves no scrapes: leave out one of the two"
    if options.every is not None and not 1 <= options.every <= MAX_INTERVAL_S:
        return f"--every {options.every:g}: give 1 to {MAX_INTERVAL_S:g} seconds"
    if options.sample_hz and not 1 <= options.sample_hz <= MAX_HZ:
        return f"--sample-hz {options.sample_hz:g}: give 1 to {MAX_HZ:g}, or 0 for none"
    if not 1 <= options.window <= MAX_WINDOW_S:
        return f"--window {options.window:g}: give 1 to {MAX_WINDOW_S:g} seconds"
    return ""


def _without_detach(arguments: Sequence[str]) -> list[str]:
    """Return the command line without --detach and its value."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--detach" and not argument.startswith("--detach="):
            kept.append(argument)
        skip = argument == "--detach"
    return kept


def _write_textfile(metrics: CollectorRegistry, path: Path, interval_s: float, ended: threading.Event) -> int:
    """Write the file atomically every `interval_s` until terminated; then remove it, so that no old values are scraped."""
    from prometheus_client import write_to_textfile

    print_progress(f"writing {path} every {interval_s:g} s")
    background.notify_ready()
    try:
        while True:
            write_to_textfile(str(path), metrics)
            if ended.wait(interval_s):
                return 0
    finally:
        path.unlink(missing_ok=True)
