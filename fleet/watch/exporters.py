"""Get the state of the stages from the hosts: scrape the Prometheus exporter of each host over plain HTTP.

The responses are not trusted: their time and size are limited, and only well-formed samples are used.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from schemas.stages import STATES

DEADLINE_S = 3.0
"""Maximum duration of the scrape of one exporter."""
MAX_PAGE_BYTES = 4_000_000
CONCURRENT_SCRAPES = 16
MAX_HOSTS_PER_S = 20.0
"""Maximum average number of exporters to scrape in a second."""
INTERVAL_S = 5.0
"""Minimum time between two scrapes of the same exporter."""
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(r"(rackproof_(?:run|stage)_[a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+)$")


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """The state of one stage on a host, as its exporter reports it."""

    state: str
    at: float
    """When the exporter was scraped, by the local clock, in seconds since 1970."""
    progress: float | None = None
    """Share of the stage that is done, from 0 to 1; None if not reported."""
    remaining_s: float | None = None
    """Seconds from the agent's last update of the metrics to the deadline of the stage, both by the host's clock; None if the
    stage is not running, or if not reported."""
    expected_s: float | None = None
    """Seconds from the same update to the expected end of the stage; None if the stage is not running, or if not reported."""
    benchmark: str = ""
    """The benchmark that the largest number of ranks runs; empty if the stage is not running, or if not reported."""


class Exporters:
    """The last reports of the exporters, which a background thread scrapes by default."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        """Nothing is scraped until `set_hosts` is called."""
        self._run_dir, self._run_id = run_dir, run_id
        self._lock = threading.Lock()
        self._stage_reports: dict[str, dict[str, StageReport]] = {}
        self._problems: dict[str, str] = {}
        self._hosts: frozenset[str] = frozenset()
        self._targets_path = ""
        self._started = False

    def stage_reports(self, host: str) -> Mapping[str, StageReport]:
        """Return stage -> its state in the last successful scrape of the host's exporter; empty if there was no such scrape."""
        with self._lock:
            return self._stage_reports.get(host, {})

    def problems(self) -> dict[str, str]:
        """Return host -> why the last scrape of its exporter failed, for the hosts of the last call of `set_hosts`."""
        with self._lock:
            return {host: problem for host, problem in self._problems.items() if host in self._hosts}

    def set_hosts(self, hosts: Collection[str], targets: str, *, background: bool = True) -> None:
        """Set the hosts to scrape.

        Args:
            hosts: names of the hosts.
            targets: path of the file with the exporters' addresses; empty: `prometheus/RUN_ID.json` beside the run directory.
            background: if true, return at once; a thread scrapes the hosts repeatedly. If false, scrape them once, then return.
        """
        with self._lock:
            self._hosts, self._targets_path = frozenset(hosts), targets
        if not background:
            self._scrape_all()
        elif not self._started and hosts:
            self._started = True
            threading.Thread(target=self._scrape_forever, name="exporters", daemon=True).start()

    def _scrape_forever(self) -> None:
        while True:
            scraped = self._scrape_all()
            time.sleep(max(INTERVAL_S, scraped / MAX_HOSTS_PER_S))

    def _scrape_all(self) -> int:
        """Scrape all hosts whose exporter has a known address; return their number."""
        with self._lock:
            hosts = self._hosts
        all_addresses = self._addresses() if hosts else {}
        addresses = {host: all_addresses[host] for host in hosts if host in all_addresses}
        if addresses:
            with ThreadPoolExecutor(CONCURRENT_SCRAPES, "exporter") as pool:
                list(pool.map(lambda item: self._scrape(*item), addresses.items()))
        with self._lock:
            self._problems |= dict.fromkeys(hosts - addresses.keys(), "the address of its exporter is unknown")
        return len(addresses)

    def _scrape(self, host: str, address: str) -> None:
        reports: dict[str, StageReport] = {}
        try:
            reports = parse_page(fetch(address), self._run_id, time.time())
            problem = "" if reports else "its exporter reports nothing about this run"
        except (OSError, ValueError, OverflowError) as error:
            problem = f"its exporter at {address}: {error.strerror or error if isinstance(error, OSError) else error}"
        with self._lock:
            self._stage_reports[host] = reports or self._stage_reports.get(host, {})
            self._problems[host] = problem
            if not problem:
                del self._problems[host]

    def _addresses(self) -> dict[str, str]:
        """Return host -> ADDRESS:PORT of its exporter, from the file that the role `monitoring` writes for Prometheus."""
        name = f"{self._run_id}.json"
        path = Path(self._targets_path or self._run_dir.parent / "prometheus" / name)
        addresses = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            for group in json.loads(path.read_text(encoding="utf-8")):
                if group["labels"].get("run_id") == self._run_id:
                    addresses[str(group["labels"]["host"])] = str(group["targets"][0])
        return addresses


def fetch(address: str) -> str:
    """Return the metrics page of an exporter.

    Raises:
        OSError: the exporter cannot be reached, or does not finish within DEADLINE_S.
        ValueError: the response is not plain HTTP, has a status other than 200, or is larger than MAX_PAGE_BYTES.
    """
    deadline = time.monotonic() + DEADLINE_S
    host, _, port = address.rpartition(":")
    host, answer = host.strip("[]"), bytearray()
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        request = f"GET /metrics HTTP/1.0\r\nHost: {address}\r\nAccept: text/plain\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode("ascii"))
        while len(answer) <= MAX_PAGE_BYTES:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            received = connection.recv(65536)
            if not received:
                break
            answer += received
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
    header, _, page = bytes(answer).partition(b"\r\n\r\n")
    status_line = header.split(b" ", 2)
    if len(status_line) < 2 or not status_line[0].startswith(b"HTTP/1."):
        raise ValueError("not a plain HTTP response")
    if status_line[1] != b"200":
        raise ValueError("requires a password" if status_line[1] == b"401" else "HTTP error")
    if len(answer) > MAX_PAGE_BYTES:
        raise ValueError("response too large")
    return page.decode("utf-8", "replace")


def parse_page(page: str, run_id: str, at: float) -> dict[str, StageReport]:
    """Return stage -> its state in a metrics page; empty if the page is not about this run.

    `at` is the time of the scrape in seconds since 1970.
    """
    samples = list(_samples(page))
    runs = [labels.get("run_id") for name, labels, _ in samples if name == "rackproof_run_info"]
    if runs != [run_id]:
        return {}
    values = {(name, labels.get("stage", "")): value for name, labels, value in samples}
    updated = values.get(("rackproof_run_updated_timestamp_seconds", ""))
    reports = {}
    for name, labels, value in samples:
        stage, state = labels.get("stage", ""), labels.get("state", "")
        if name != "rackproof_stage_state" or value != 1 or state not in STATES:
            continue
        ends = {
            key: values.get((f"rackproof_stage_{key}_timestamp_seconds", stage)) for key in ("deadline", "expected_end")
        }
        progress = values.get(("rackproof_stage_progress_ratio", stage))
        is_running = state == "running"
        left_s = {
            key: end - updated if is_running and end is not None and updated is not None else None
            for key, end in ends.items()
        }
        reports[stage] = StageReport(
            state=state,
            at=at,
            progress=min(1.0, max(0.0, progress)) if progress is not None else None,
            remaining_s=left_s["deadline"],
            expected_s=left_s["expected_end"],
            benchmark=_main_benchmark(samples, stage) if is_running else "",
        )
    return reports


def _main_benchmark(samples: list[tuple[str, dict[str, str], float]], stage: str) -> str:
    """Return the benchmark that the largest number of ranks runs; empty if not reported."""
    rank_counts: Counter[str] = Counter()
    for name, labels, value in samples:
        if name == "rackproof_stage_ranks" and labels.get("stage") == stage:
            rank_counts[labels.get("benchmark", "")[:64]] += int(min(value, 1e6))
    return rank_counts.most_common(1)[0][0] if rank_counts else ""


def _samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each finite sample."""
    for line in page.split("\n"):
        if not line.startswith(("rackproof_run_", "rackproof_stage_")) or len(line) > 4096:
            continue
        match = _SAMPLE.match(line)
        with contextlib.suppress(ValueError):
            if match and math.isfinite(value := float(match[3])):
                yield match[1], dict(_LABEL.findall(match[2] or "")), value
