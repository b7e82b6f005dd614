"""Test one run over real SSH with faults outside the GPUs: memory modules, driver versions, and parts that BMCs report.

GPUs, SMBIOS tables and BMCs are fakes; the libraries and collectors that read them are real. Slow, full, hanging and corrupt file
systems are tested by `make test-storage`.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import documents
from tests import ROOT
from tests.fakes import bmc, dmi, nvml
from tests.lab.agent_install import install_agent
from tests.lab.fault_injection import IDLE_WITHOUT_TORCH, inject_fault
from tests.lab.kill_points import ANSIBLE_OUTPUT, Attempt
from tests.lab.lab import Lab

HEALTHY, PLAIN, OLD, LOST, SWAPPED = (f"node{number}" for number in range(1, 6))
"""Healthy hosts with and without a BMC, a host with an old driver and an empty memory slot, and two whose BMCs report faults."""
HOSTS = (HEALTHY, PLAIN, OLD, LOST, SWAPPED)
EMPTY_SLOT = "P1-DIMMC1"
OLD_DRIVER, DRIVER = "550.54.14", "580.159.04"
SCENARIO, BMC_PORT = "/etc/nvml.conf", 8443
PROFILE = {
    "schema": "rackproof.profile/1",
    "summary": "one short benchmark, during which a BMC changes",
    "device": "cpu",
    "processes_per_host": 1,
    "stages": {
        "benchmark": {
            "deadline_s": 90,
            "collective_timeout_s": 30,
            "benchmarks": {"verbs": {"seconds": 2}},
        }
    },
}


def serials(host: str) -> tuple[str, str]:
    """Return the serials of the two GPUs of a host."""
    number = HOSTS.index(host)
    return f"165{number}422000001", f"165{number}422000002"


def mockup(host: str, gpus: tuple[str, ...]) -> bmc.Resources:
    """Return a healthy BMC that reports these GPUs."""
    resources = bmc.old_schema()
    for number, serial in enumerate(gpus, 1):
        resources[f"{bmc.V1}/Systems/1/Processors/GPU{number}"]["SerialNumber"] = serial
    resources[f"{bmc.V1}/Systems/1"]["SerialNumber"] = f"S{host}X1"
    return resources


@dataclass(frozen=True)
class Rack:
    """The finished run."""

    run: Path
    output: str

    def report(self) -> dict[str, Any]:
        document: dict[str, Any] = documents.read(self.run / "report.json", "report", max_bytes=50_000_000)
        return document


def prepare(lab: Lab, library: Path) -> None:
    """Give each host a fake NVML and an SMBIOS table."""
    for host in HOSTS:
        driver = OLD_DRIVER if host == OLD else DRIVER
        lines = [f"include={nvml.scenario('healthy-h200x4')}", "Count=2", f"DriverVersion={driver}"]
        for index, serial in enumerate(serials(host)):
            uuid = f"GPU-{HOSTS.index(host)}{index}b7e0c5-2d93-4f68-ba10-5c8e96f3d702"
            lines += [f"gpu.{index}.Serial={serial}", f"gpu.{index}.UUID={uuid}"]
        lab.put(host, SCENARIO, "\n".join(lines) + "\n")
        write(lab, host, f"/usr/lib/{nvml.LIBRARY}", library.read_bytes())
        setting = f"SetEnv RACKPROOF_NVML_SCENARIO={SCENARIO}"
        lab.on(host, "sh", "-c", f"echo '{setting}' >>/etc/ssh/sshd_config; kill -HUP $(pgrep -o sshd)")
        # The memory modules of a virtual machine are not read, and this machine may be one.
        physical = "sed 's/ hypervisor//' /proc/cpuinfo >/run/cpuinfo && mount --bind /run/cpuinfo /proc/cpuinfo"
        lab.on(host, "sh", "-c", physical)
        lab.on(host, "sh", "-c", f"mount -t tmpfs tmpfs /sys/firmware && mkdir -p {Path('/', dmi.TABLE).parent}")
        slots = dmi.slots()
        write(lab, host, f"/{dmi.TABLE}", dmi.table(dmi.without(slots, EMPTY_SLOT) if host == OLD else slots))


def write(lab: Lab, host: str, path: str, content: bytes) -> None:
    lab.on(host, "sh", "-c", f"base64 -d >{path}", stdin=base64.b64encode(content).decode())


def serve(lab: Lab, directory: Path, host: str, certificate: Path) -> str:
    """Serve the mock-up of a host's BMC on the control node with sushy-tools; return its address once it answers."""
    address = f"127.0.0.1:{BMC_PORT + HOSTS.index(host)}"
    port = address.partition(":")[2]
    program = Path(sys.executable).with_name("sushy-static")
    command = [program, "--mockup-files", directory / "redfish" / "v1", "--interface", "127.0.0.1", "--port", port]
    lab.popen(
        [*command, "--ssl-certificate", certificate, "--ssl-key", certificate.with_suffix(".key")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    probe = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
    deadline = time.monotonic() + 30
    while lab.run([sys.executable, "-c", probe], check=False).returncode:
        assert time.monotonic() < deadline, f"the BMC of {host} does not answer"
        time.sleep(0.2)
    return address


def play(lab: Lab, directory: Path, accounts: dict[str, dict[str, str]]) -> Attempt:
    (directory / "profile.yml").write_text(yaml.safe_dump(PROFILE))
    group = {
        "rackproof_profile": str(directory / "profile.yml"),
        "rackproof_criteria": ["uniformity", "no-vulnerabilities"],
        "rackproof_gang": "none",
        "rackproof_rack": "rack1",
        "rackproof_python": sys.executable,
        "rackproof_system_torch": True,
        "rackproof_minimum_free_bytes": 100_000_000,
        "rackproof_runs_directory": str(directory / "runs"),
        "nvidia_driver_state": "ignored",
    }
    inventory = lab.inventory(accounts, group)
    command = [
        Path(sys.executable).with_name("ansible-playbook"),
        "-i",
        inventory,
        ROOT / "playbooks" / "acceptance.yml",
    ]
    process = lab.popen(
        [*command, "-e", "rackproof_run_id=parts"],
        cwd=ROOT, env=ANSIBLE_OUTPUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Attempt(process, "parts")


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory, agent_archive: Path) -> Iterator[Rack]:
    """Accept the rack. During the benchmark, the BMC of host LOST reports that a power supply lost its input."""
    directory = tmp_path_factory.mktemp("parts")
    (directory / "runs").mkdir()
    certificate = bmc.make_certificate(directory)
    reported = {HEALTHY: serials(HEALTHY), LOST: serials(LOST), SWAPPED: (serials(SWAPPED)[0], "1659999999999")}
    with Lab(directory / "lab", hosts=len(HOSTS)) as lab:
        install_agent(lab, agent_archive)
        for host in HOSTS:
            inject_fault(lab, host, IDLE_WITHOUT_TORCH)
        prepare(lab, nvml.build(directory / "nvml") / nvml.LIBRARY)
        accounts = {}
        for host, gpus in reported.items():
            bmc.write_mockup(mockup(host, gpus), directory / host)
            account = {"user": bmc.USER, "password": bmc.PASSWORD, "ca": str(certificate)}
            account["address"] = serve(lab, directory / host, host, certificate)
            accounts[host] = {f"rackproof_bmc_{name}": value for name, value in account.items()}
        attempt = play(lab, directory, accounts)
        assert attempt.reached("benchmark : Run the benchmarks"), attempt.lines[-20:]
        resources = mockup(LOST, reported[LOST])
        resources[bmc.SEL]["Members"].append(bmc.entry(2, "Power Supply 2 AC lost", "Critical"))
        resources[bmc.SEL]["Members@odata.count"] = 2
        bmc.write_mockup(bmc.lost_supply(resources), directory / LOST)
        output = attempt.end()
        print(output[-6000:])
        yield Rack(directory / "runs" / "parts", output)


def test_report_has_exactly_one_cause_with_part_and_action_for_each_fault(rack: Rack) -> None:
    causes = {(cause["host"], cause["part"], cause["problem"], cause["action"]) for cause in rack.report()["causes"]}
    assert causes == {
        (OLD, f"dimm={EMPTY_SLOT}", "memory-module-missing", "reseat"),
        (OLD, "host", "vulnerability.driver", "configure"),
        (LOST, "psu=Power_Supply_Bay_2", "bmc-part", "inspect_hardware"),
        (LOST, "log=1.SEL", "bmc-event", "inspect_hardware"),
        (SWAPPED, "gpu=1", "bmc-serial", "inspect_hardware"),
    }


def test_hosts_without_a_fault_are_accepted(rack: Rack) -> None:
    decisions = {host["name"]: host["decision"] for host in rack.report()["hosts"]}
    assert decisions == {HEALTHY: "accepted", PLAIN: "accepted", OLD: "rejected", LOST: "rejected", SWAPPED: "rejected"}


def test_no_credential_is_in_a_file_of_the_run_or_in_the_output(rack: Rack) -> None:
    written = b"".join(path.read_bytes() for path in rack.run.rglob("*") if path.is_file()) + rack.output.encode()
    assert b"Power Supply 2 AC lost" in written
    assert [canary for canary in (bmc.USER, bmc.PASSWORD) if canary.encode() in written] == []
