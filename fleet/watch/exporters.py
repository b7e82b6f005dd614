"""Scrape the exporters on the hosts for the state of the running stage, over plain HTTP as Prometheus does.

Answers are not trusted: time and size are limited, and only well-formed samples are used.
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

DEADLINE_S = 3.0
MOST_BYTES = 4_000_000
AT_ONCE = 16
HOSTS_PER_S = 20.0
"""Maximum scrape rate over all exporters; each is scraped at most every EVERY_S."""
EVERY_S = 5.0
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(r"(rackproof_(?:run|stage)_[a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+)$")
_STATES = ("planned", "running", "finished", "failed", "deadline", "silent")


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What an exporter reports on one stage of this run."""

    state: str
    at: float
    """When it was scraped, by the local clock."""
    progress: float | None = None
    remaining_s: float | None = None
    """Seconds until the deadline, by the host's clock."""
    benchmark: str = ""
    """The benchmark that most ranks run."""


class Exporters:
    """Scrapes the exporters, in the background by default."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self._run_dir, self._run_id = run_dir, run_id
        self._lock = threading.Lock()
        self._told: dict[str, dict[str, StageReport]] = {}
        self._problems: dict[str, str] = {}
        self._wanted: frozenset[str] = frozenset()
        self._targets_path = ""
        self._begun = False

    def told(self, host: str) -> Mapping[str, StageReport]:
        """Return stage -> its last report."""
        with self._lock:
            return self._told.get(host, {})

    def problems(self) -> dict[str, str]:
        """Return host -> why its last scrape failed."""
        with self._lock:
            return {host: why for host, why in self._problems.items() if host in self._wanted}

    def want(self, hosts: Collection[str], targets: str, *, background: bool = True) -> None:
        """Set the hosts to scrape. `targets` is the file of addresses, if it is not in its usual place."""
        with self._lock:
            self._wanted, self._targets_path = frozenset(hosts), targets
        if not background:
            self._ask_all()
        elif not self._begun and hosts:
            self._begun = True
            threading.Thread(target=self._go_on, name="exporters", daemon=True).start()

    def _go_on(self) -> None:
        while True:
            asked = self._ask_all()
            time.sleep(max(EVERY_S, asked / HOSTS_PER_S))

    def _ask_all(self) -> int:
        with self._lock:
            wanted = self._wanted
        status = self._targets() if wanted else {}
        asked = {host: status[host] for host in wanted if host in status}
        if asked:
            with ThreadPoolExecutor(AT_ONCE, "exporter") as pool:
                list(pool.map(lambda item: self._ask(*item), asked.items()))
        with self._lock:
            self._problems |= dict.fromkeys(wanted - asked.keys(), "the address of its exporter is unknown")
        return len(asked)

    def _ask(self, host: str, address: str) -> None:
        stage_report: dict[str, StageReport] = {}
        try:
            stage_report = stages(fetch(address), self._run_id, time.time())
            problem = "" if stage_report else "its exporter reports nothing about this run"
        except (OSError, ValueError, OverflowError) as error:
            problem = f"its exporter at {address}: {error.strerror or error if isinstance(error, OSError) else error}"
        with self._lock:
            self._told[host] = stage_report or self._told.get(host, {})
            self._problems[host] = problem
            if not problem:
                del self._problems[host]

    def _targets(self) -> dict[str, str]:
        """Return host -> address and port, from the file that the monitoring role writes for Prometheus."""
        name = f"{self._run_id}.json"
        path = Path(self._targets_path or self._run_dir.parent / "prometheus" / name)
        parsed = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            for group in json.loads(path.read_text(encoding="utf-8")):
                if group["labels"].get("run_id") == self._run_id:
                    parsed[str(group["labels"]["host"])] = str(group["targets"][0])
        return parsed


def fetch(address: str) -> str:
    """Return the metrics page of an exporter.

    Raises:
        OSError: it cannot be reached, or takes too long.
        ValueError: the answer is not a metrics page over plain HTTP.
    """
    ends = time.monotonic() + DEADLINE_S
    host, _, port = address.rpartition(":")
    host, body = host.strip("[]"), bytearray()
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        request = f"GET /metrics HTTP/1.0\r\nHost: {address}\r\nAccept: text/plain\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode("ascii"))
        while len(body) <= MOST_BYTES:
            connection.settimeout(max(0.01, ends - time.monotonic()))
            part = connection.recv(65536)
            if not part:
                break
            body += part
            if time.monotonic() > ends:
                raise TimeoutError("timed out")
    head, _, page = bytes(body).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise ValueError("does not speak plain HTTP")
    if words[1] != b"200":
        raise ValueError("asks for a password" if words[1] == b"401" else "answers with an error")
    if len(body) > MOST_BYTES:
        raise ValueError("its page is too large")
    return page.decode("utf-8", "replace")


def stages(page: str, run_id: str, at: float) -> dict[str, StageReport]:
    """Return stage -> its report; empty if the page is of another run."""
    samples = list(_samples(page))
    runs = [labels.get("run_id") for name, labels, _ in samples if name == "rackproof_run_info"]
    if runs != [run_id]:
        return {}
    values = {(name, labels.get("stage", "")): value for name, labels, value in samples}
    updated = values.get(("rackproof_run_updated_timestamp_seconds", ""))
    parsed = {}
    for name, labels, value in samples:
        stage, state = labels.get("stage", ""), labels.get("state", "")
        if name != "rackproof_stage_state" or value != 1 or state not in _STATES:
            continue
        deadline = values.get(("rackproof_stage_deadline_timestamp_seconds", stage))
        progress = values.get(("rackproof_stage_progress_ratio", stage))
        running = state == "running"
        parsed[stage] = StageReport(
            state=state,
            at=at,
            progress=min(1.0, max(0.0, progress)) if progress is not None else None,
            remaining_s=deadline - updated if running and deadline is not None and updated is not None else None,
            benchmark=_doing(samples, stage) if running else "",
        )
    return parsed


def _doing(samples: list[tuple[str, dict[str, str], float]], stage: str) -> str:
    at: Counter[str] = Counter()
    for name, labels, value in samples:
        if name == "rackproof_stage_ranks" and labels.get("stage") == stage:
            at[labels.get("benchmark", "")[:64]] += int(min(value, 1e6))
    return at.most_common(1)[0][0] if at else ""


def _samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in page.split("\n"):
        if not line.startswith(("rackproof_run_", "rackproof_stage_")) or len(line) > 4096:
            continue
        parsed = _SAMPLE.match(line)
        with contextlib.suppress(ValueError):
            if parsed and math.isfinite(value := float(parsed[3])):
                yield parsed[1], dict(_LABEL.findall(parsed[2] or "")), value
