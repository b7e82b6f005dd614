"""Query a running Prometheus or Alertmanager, and write their configurations."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .machine import LabError

Run = Callable[..., subprocess.CompletedProcess[str]]
READY_SECONDS = 15.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus server."""

    url: str
    log: Path
    run: Run
    """Function that runs a command in a namespace from which the server is reachable."""

    def query(self, promql: str) -> list[dict[str, Any]]:
        """Return an instant vector: for each series a dictionary with `metric` (labels) and `value` (time, value as text)."""
        return self._parsed(self._ask(promql, check=True).stdout)

    def wait_for(self, promql: str, timeout: float = 30, at_least: int = 1) -> list[dict[str, Any]]:
        """Return the result of a query once it has at least `at_least` series. Raise LabError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while len(samples := self.query(promql)) < at_least:
            if time.monotonic() > deadline:
                raise LabError(
                    f"{promql} has {len(samples)} series after {timeout} s, fewer than {at_least}: {samples}"
                )
            time.sleep(POLL_SECONDS)
        return samples

    def wait_ready(self, server: subprocess.Popen[str]) -> None:
        """Wait until the server answers queries. Raise LabError if it exits, or after READY_SECONDS."""
        deadline = time.monotonic() + READY_SECONDS
        while self._ask("vector(1)", check=False).returncode:
            if server.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"Prometheus does not answer at {self.url}; its log:\n{self.log.read_text()[-4000:]}")
            time.sleep(POLL_SECONDS)

    def _ask(self, promql: str, *, check: bool) -> subprocess.CompletedProcess[str]:
        return self.run(["promtool", "query", "instant", "--format=json", self.url, promql], check=check, timeout=15)

    @staticmethod
    def _parsed(answer: str) -> list[dict[str, Any]]:
        samples = json.loads(answer)
        if not all(isinstance(series, dict) for series in samples):
            raise LabError(
                f"the query returned {answer.strip()}, which is not a list of series: wrap a scalar in vector()"
            )
        return list(samples)


def free_port() -> int:
    """Return an unused TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def write_config(
    path: Path,
    targets_glob: Path,
    scrape_interval: str,
    *,
    job: str = "lab",
    rules: Sequence[Path] = (),
    alertmanagers: Sequence[str] = (),
) -> None:
    """Write a configuration with one job, whose targets and labels are in the files that match `targets_glob`."""
    scraped = {
        "job_name": job,
        "file_sd_configs": [{"files": [str(targets_glob.absolute())], "refresh_interval": scrape_interval}],
    }
    intervals = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), scrape_interval)
    document: dict[str, Any] = {"global": intervals, "scrape_configs": [scraped]}
    if rules:
        document["rule_files"] = [str(rule.absolute()) for rule in rules]
    if alertmanagers:
        document["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]}
    path.write_text(yaml.safe_dump(document))


@dataclass(frozen=True)
class Alertmanager:
    """A running Alertmanager, queried with amtool."""

    url: str
    run: Run

    @staticmethod
    def command(directory: Path, address: str) -> list[str]:
        """Write a configuration whose receiver does nothing, and return the command that starts an Alertmanager with it."""
        config = directory / "alertmanager.yml"
        config.write_text(yaml.safe_dump({"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]}))
        return [
            "prometheus-alertmanager",
            f"--config.file={config}",
            f"--storage.path={directory / 'alertmanager'}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
        ]

    def firing(self) -> list[dict[str, Any]]:
        """Return the firing alerts, with labels and annotations."""
        command = ["amtool", f"--alertmanager.url={self.url}", "alert", "query", "--output=json"]
        answer = self.run(command, check=True, timeout=15).stdout
        return list(json.loads(answer) or [])
