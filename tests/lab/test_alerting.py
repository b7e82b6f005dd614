"""Test alerting with a real exporter, Prometheus and Alertmanager: faults fire alerts within two scrapes, repairs resolve them.

Only the GPUs and the kernel log are fake: `rackproof export` reads a fake /dev/kmsg and a fake NVML. The fake NVML takes its
readings from a scenario file, which the tests change.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes import nvml
from tests.lab import processes
from tests.lab.machine import requirements_missing
from tests.lab.prometheus import Alertmanager, Prometheus, free_port, write_config

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rackproof.rules.yml"
SCRAPE_S = 1.0
MAX_DELAY_S = 3 * SCRAPE_S + 1.0
"""Longest time from a fault to its alert, in seconds: two scrapes, one evaluation of the rules, and 1 s for a busy machine."""
BOOT = "5,0,0,-;Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP\n"


def wait(event: str, get: Callable[[], Any], timeout: float) -> Any:
    """Call `get` until it returns a true value, and return this value. `event` names what is awaited, for the failure message."""
    deadline = time.monotonic() + timeout
    while not (value := get()):
        assert time.monotonic() < deadline, f"did not happen within {timeout} s: {event}"
        time.sleep(0.1)
    return value


@dataclass
class Site:
    """A monitored host."""

    directory: Path
    port: int
    library: Path
    prometheus: Prometheus
    alertmanager: Alertmanager
    started: list[subprocess.Popen[str]]
    exporter: subprocess.Popen[str] | None = None

    def scenario(self, *lines: str) -> None:
        """Set the readings of the GPUs to those of a healthy host, overridden by these lines of a scenario."""
        nvml.write(self.directory / "scenario", "healthy-h200x4", *lines)

    def log(self, *messages: str) -> None:
        """Append messages to the kernel log."""
        uptime = int(float(Path("/proc/uptime").read_text().split()[0]) * 1e6)
        with (self.directory / "kmsg").open("a") as log:
            log.writelines(f"4,{number},{uptime},-;{text}\n" for number, text in enumerate(messages, 1))

    def boot(self) -> None:
        """Simulate a boot: start a new kernel log and the exporter."""
        if self.exporter:
            processes.end_all([self.exporter])
        (self.directory / "kmsg").write_text(BOOT)
        inside = f'mount --bind {self.directory / "kmsg"} /dev/kmsg && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", inside, "sh", sys.executable, ROOT / "rackproof", "export"]
        scenario = nvml.environment(self.library, self.directory / "scenario")
        self.exporter = start(
            [*command, "--port", str(self.port), "--every=1"], self.directory / "exporter.log", scenario
        )
        self.started.append(self.exporter)

    def firing(self, *names: str) -> list[dict[str, Any]]:
        """Return the firing alerts with these names."""
        return [alert for alert in self.alertmanager.firing() if alert["labels"]["alertname"] in names]


def start(command: list[Any], log: Path, more: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command that writes its output to `log`; `more` is added to its environment."""
    with log.open("w") as stream:
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            text=True,
            env=processes.environment(more),
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    assert not requirements_missing(), requirements_missing()
    assert shutil.which("prometheus-alertmanager"), "install the Debian package prometheus-alertmanager"
    directory = tmp_path_factory.mktemp("site")
    ports = [free_port() for _ in range(3)]
    exporter, prometheus, alertmanager = (f"127.0.0.1:{port}" for port in ports)
    target = {"targets": [exporter], "labels": {"host": "h1", "rack": "r1", "run_id": "lab"}}
    (directory / "targets.json").write_text(json.dumps([target]))
    write_config(
        directory / "prometheus.yml",
        directory / "targets.json",
        f"{SCRAPE_S:g}s",
        job="rackproof",
        rules=[RULES],
        alertmanagers=[alertmanager],
    )
    options = [f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"]
    new_site = Site(
        directory=directory,
        port=ports[0],
        library=nvml.build(directory / "nvml"),
        prometheus=Prometheus(url=f"http://{prometheus}", log=directory / "prometheus.log", run=processes.run),
        alertmanager=Alertmanager(url=f"http://{alertmanager}", run=processes.run),
        started=[],
    )
    try:
        new_site.scenario()
        new_site.boot()
        new_site.started.append(start(Alertmanager.command(directory, alertmanager), directory / "alertmanager.log"))
        server = start(["prometheus", *options, f"--web.listen-address={prometheus}"], directory / "prometheus.log")
        new_site.started.append(server)
        new_site.prometheus.wait_ready(server)
        new_site.prometheus.wait_for("rackproof_gpu_ecc_uncorrectable_volatile_total == 0", timeout=20, at_least=4)
        yield new_site
    finally:
        processes.end_all(new_site.started)


def test_every_rule_is_loaded_and_evaluated(site: Site) -> None:
    file_rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]

    def evaluated() -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{site.prometheus.url}/api/v1/rules", timeout=10) as answer:
            rules = [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    rules = wait("every rule is evaluated", evaluated, 20)
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    names = sorted(rule.get("alert") or rule["record"] for rule in file_rules)
    assert sorted(rule["name"] for rule in rules) == names


def test_no_gpu_alert_fires_on_a_healthy_host(site: Site) -> None:
    site.prometheus.wait_for(f"count_over_time(up[{5 * SCRAPE_S:g}s]) >= 4", timeout=20)
    assert [alert["labels"] for alert in site.alertmanager.firing() if "gpu" in alert["labels"]] == []
    assert site.firing("RackproofFatalXid", "RackproofGpuGone", "RackproofExporterDown") == []


def reset(site: Site) -> None:
    """Reset the GPUs: their readings are again those of a healthy host."""
    site.scenario()


def reboot(site: Site) -> None:
    site.boot()


def part(gpu: int) -> dict[str, str]:
    """Return the labels that identify a GPU of the scenario."""
    return {"serial": f"165000000000{gpu}", "slot": f"0000:00:0{6 + gpu}.0"}


# Name of a fault -> function that injects it, function that repairs it, labels and summary of its alert.
FAULTS: dict[str, tuple[Callable[[Site], None], Callable[[Site], None], dict[str, str], str]] = {
    "ecc": (
        lambda site: site.scenario("gpu.2.TotalEccErrors.1.0=2"),
        reset,
        {"alertname": "RackproofGpuEccUncorrectable", "gpu": "2", "action": "reset_gpu", **part(2)},
        "h1: GPU 2 has uncorrectable memory errors",
    ),
    "thermal": (
        lambda site: site.scenario("gpu.1.CurrentClocksEventReasons=0x48", "gpu.1.CurrentClocksThrottleReasons=0x48"),
        reset,
        {
            "alertname": "RackproofGpuThermalSlowdown",
            "gpu": "1",
            "reason": "hw_thermal",
            "action": "inspect_hardware",
            **part(1),
        },
        "h1: GPU 1 is throttled by heat",
    ),
    "xid": (
        lambda site: site.log("NVRM: Xid (PCI:0000:00:08): 79, pid='<unknown>', GPU has fallen off the bus."),
        reboot,
        {
            "alertname": "RackproofFatalXid",
            "xid": "79",
            "pci": "0000:00:08.0",
            "criterion": "xid-79",
            "action": "reboot",
            "gpu": "2",
            **part(2),
        },
        "h1: XID 79 of the GPU at 0000:00:08.0",
    ),
    "lost": (
        lambda site: site.scenario("gpu.3.*=!15"),
        reset,
        {"alertname": "RackproofGpuGone", "action": "reboot", "gpu": "3", **part(3)},
        "h1: the GPU in slot 0000:00:09.0 is missing",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fires_an_alert_within_two_scrapes_and_repair_resolves_the_alert(site: Site, fault: str) -> None:
    inject, heal, labels, summary = FAULTS[fault]
    name = labels["alertname"]
    assert site.firing(name) == []
    began = time.time()
    inject(site)
    alerts = wait(f"{name} fires", lambda: site.firing(name), 15)
    assert datetime.fromisoformat(alerts[0]["startsAt"].replace("Z", "+00:00")).timestamp() - began < MAX_DELAY_S
    texts = alerts[0]["labels"] | {"summary": alerts[0]["annotations"]["summary"]}
    wanted = {**labels, "summary": summary, "severity": "critical", "host": "h1", "rack": "r1", "run_id": "lab"}
    assert {key: texts[key] for key in wanted} == wanted
    command = f"rackproof rma runs/lab --host h1 --serial {labels['serial']} --reason {name}"
    assert alerts[0]["annotations"]["rma"] == command
    assert alerts[0]["annotations"]["runbook_url"].endswith(f"#{name.lower()}")
    assert len(alerts) == 1
    heal(site)
    wait(f"{name} resolves", lambda: not site.firing(name), 15)
