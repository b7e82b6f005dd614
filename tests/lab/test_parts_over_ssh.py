"""Test one run over real SSH with these faults: a missing memory module, an old driver, parts that BMCs report as faulty or
exchanged, a benchmark that fails, and an unreachable host. No secret may be in an output, log, result or command line.

The NVML library, the SMBIOS tables and the BMCs are fakes; the collectors that read them are real. Slow, full, hanging and
corrupt file systems are tested by `make test-storage`.
"""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml

from schemas import documents
from tests import ROOT
from tests.fakes import bmc, dmi, nvml
from tests.lab import processes
from tests.lab.agent_install import install_agent
from tests.lab.fault_injection import IDLE_WITHOUT_TORCH, inject_fault
from tests.lab.kill_points import ANSIBLE_OUTPUT, DIRECTORY, STATE, Attempt
from tests.lab.lab import Lab

HEALTHY, PLAIN, OLD, LOST, SWAPPED, UNREACHABLE = (f"node{number}" for number in range(1, 7))
"""HEALTHY: has a BMC and no fault. PLAIN: has no BMC and no fault. OLD: has an old driver, an empty memory slot and a failing
benchmark. LOST: its BMC reports a power supply without input. SWAPPED: its BMC reports another serial for a GPU than NVML.
UNREACHABLE: its link is cut."""
HOSTS = (HEALTHY, PLAIN, OLD, LOST, SWAPPED)
GANG = (HEALTHY, PLAIN, UNREACHABLE)
EMPTY_SLOT = "P1-DIMMC1"
OLD_DRIVER, DRIVER = "550.54.14", "580.159.04"
SCENARIO, BMC_PORT = "/etc/nvml.conf", 8443
PROFILE = {
    "schema": "rackproof.profile/1",
    "summary": "short benchmarks, during which a BMC reports a fault",
    "device": "cpu",
    "processes_per_host": 1,
    "stages": {
        "benchmark": {
            "deadline_s": 90,
            "collective_timeout_s": 30,
            "benchmarks": {"verbs": {"seconds": 2}, "local_storage": {"seconds": 0.1}},
        },
        "gang": {"deadline_s": 90, "collective_timeout_s": 30, "benchmarks": {"verbs": {}}},
    },
}
FAILING_BENCHMARK = """
def broken(*arguments):
    raise RuntimeError("fio: Input/output error")

local_storage._measure = broken
"""
WEB_CONFIG = "/etc/rackproof/web.config.yml"
PASSWORD = f"canary-{secrets.token_hex(4)}"


def serials(host: str) -> tuple[str, str]:
    """Return the serials of the two GPUs of a host."""
    number = HOSTS.index(host)
    return f"165{number}422000001", f"165{number}422000002"


def mockup(host: str, gpus: tuple[str, ...]) -> bmc.Resources:
    """Return the Redfish resources of a healthy BMC that reports GPUs with these serials."""
    resources = bmc.old_schema()
    for number, serial in enumerate(gpus, 1):
        resources[f"{bmc.V1}/Systems/1/Processors/GPU{number}"]["SerialNumber"] = serial
    resources[f"{bmc.V1}/Systems/1"]["SerialNumber"] = f"S{host}X1"
    return resources


@dataclass(frozen=True)
class Rack:
    """The lab, run directory and output of the finished run."""

    lab: Lab
    run: Path
    output: str
    password_hash: str
    """The secret in the file WEB_CONFIG of each host."""
    arguments: set[str]
    """Command lines of all processes during the run."""

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
        # Hide the CPU flag `hypervisor`: on a host with this flag, the collector reads no memory modules.
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


def play(lab: Lab, directory: Path, accounts: dict[str, dict[str, Any]]) -> Attempt:
    (directory / "profile.yml").write_text(yaml.safe_dump(PROFILE))
    group = {
        "rackproof_profile": str(directory / "profile.yml"),
        "rackproof_criteria": ["uniformity", "no-vulnerabilities"],
        "rackproof_rack": "rack1",
        "rackproof_fabric_interface": "eth0",
        "rackproof_exporter_web_config": WEB_CONFIG,
        "ansible_become_password": PASSWORD,
        "rackproof_python": sys.executable,
        "rackproof_system_torch": True,
        "rackproof_minimum_free_bytes": 100_000_000,
        "rackproof_runs_directory": str(directory / "runs"),
        "nvidia_driver_state": "ignored",
    }
    others: dict[str, dict[str, Any]] = {
        host: {"rackproof_rack": "rack2", "rackproof_gang": "none"} for host in HOSTS if host not in GANG
    }
    others[OLD]["rackproof_local_storage"] = [DIRECTORY]
    inventory = lab.inventory({host: accounts.get(host, {}) | others.get(host, {}) for host in HOSTS}, group)
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
    """Run an acceptance of the rack. During the stage `benchmark`, the BMC of host LOST starts to report a power
    supply without input.
    """
    directory = tmp_path_factory.mktemp("parts")
    (directory / "runs").mkdir()
    certificate = bmc.make_certificate(directory)
    reported = {HEALTHY: serials(HEALTHY), LOST: serials(LOST), SWAPPED: (serials(SWAPPED)[0], "1659999999999")}
    password_hash = bcrypt.hashpw(b"canary", bcrypt.gensalt(4)).decode()
    with Lab(directory / "lab", hosts=len((*HOSTS, UNREACHABLE))) as lab:
        install_agent(lab, agent_archive)
        for host in HOSTS:
            inject_fault(lab, host, IDLE_WITHOUT_TORCH + FAILING_BENCHMARK * (host == OLD))
            lab.put(host, WEB_CONFIG, f"basic_auth_users:\n  prometheus: {password_hash}\n", mode=0o600)
        lab.cut(UNREACHABLE)
        prepare(lab, nvml.build(directory / "nvml") / nvml.LIBRARY)
        accounts = {}
        for host, gpus in reported.items():
            bmc.write_mockup(mockup(host, gpus), directory / host)
            account = {"user": bmc.USER, "password": bmc.PASSWORD, "ca": str(certificate)}
            account["address"] = serve(lab, directory / host, host, certificate)
            accounts[host] = {f"rackproof_bmc_{name}": value for name, value in account.items()}
        with processes.sample_command_lines() as arguments:
            attempt = play(lab, directory, accounts)
            assert attempt.reached("benchmark : Run the benchmarks"), attempt.lines[-20:]
            resources = mockup(LOST, reported[LOST])
            resources[bmc.SEL]["Members"].append(bmc.entry(2, "Power Supply 2 AC lost", "Critical"))
            resources[bmc.SEL]["Members@odata.count"] = 2
            bmc.write_mockup(bmc.lost_supply(resources), directory / LOST)
            output = attempt.end()
        print(output[-6000:])
        yield Rack(lab, directory / "runs" / "parts", output, password_hash, arguments)


def test_causes_in_the_report_are_exactly_the_injected_faults(rack: Rack) -> None:
    causes = {
        (cause["host"], cause["part"], cause["problem"], cause.get("action")) for cause in rack.report()["causes"]
    }
    assert causes == {
        (OLD, f"dimm={EMPTY_SLOT}", "memory-module-missing", "reseat"),
        (OLD, "host", "vulnerability.driver", "configure"),
        # The BMC reports the power supply twice: as the state of the part, and as an entry of its event log.
        (LOST, "psu=Power_Supply_Bay_2", "bmc-part", "inspect_hardware"),
        (LOST, "log=1.SEL", "bmc-event", "inspect_hardware"),
        (SWAPPED, "gpu=1", "bmc-serial", "inspect_hardware"),
        (OLD, "host", "not-verified", None),  # the failing benchmark
        (UNREACHABLE, "host", "no-record", None),
    }


def test_hosts_without_a_fault_are_accepted(rack: Rack) -> None:
    decisions = {host["name"]: host["decision"] for host in rack.report()["hosts"]}
    assert decisions == {
        **dict.fromkeys((HEALTHY, PLAIN), "accepted"),
        **dict.fromkeys((OLD, LOST, SWAPPED), "rejected"),
        UNREACHABLE: "incomplete",
    }


def inconclusive(report: dict[str, Any], host: str) -> dict[str, set[str]]:
    """Return name of a metric -> reasons of its inconclusive verdicts on a host."""
    reasons: dict[str, set[str]] = {}
    for verdict in report["verdicts"]:
        if (verdict["host"], verdict["verdict"]) == (host, "inconclusive"):
            reasons.setdefault(verdict["name"], set()).add(verdict["reason"])
    return reasons


def test_failing_benchmark_is_reported_with_its_host_and_reason(rack: Rack) -> None:
    reasons = inconclusive(rack.report(), OLD)
    print(*reasons)
    assert {"local_storage.bandwidth", "local_storage.latency"} <= reasons.keys()
    assert {name.partition(".")[0] for name in reasons} == {"local_storage", "benchmark"}
    assert set.union(*reasons.values()) == {"error: RuntimeError: fio: Input/output error"}


def test_unreachable_host_is_reported_and_its_gang_finishes_without_the_host(rack: Rack) -> None:
    report = rack.report()
    assert inconclusive(report, UNREACHABLE).keys() == {"record"}
    lost = next(host for host in report["hosts"] if host["name"] == UNREACHABLE)
    assert any("unreachable at Preflight" in event for event in lost["events"])
    assert not inconclusive(report, HEALTHY)
    for host in (HEALTHY, PLAIN):
        (launch,) = documents.read(rack.run / "gangs" / "rack1" / f"{host}.json", "record")["launches"]
        assert (launch["outcome"], launch["members"]) == ("finished", [HEALTHY, PLAIN])


def test_no_bmc_credential_is_in_a_file_of_the_run_or_in_the_output(rack: Rack) -> None:
    written = b"".join(path.read_bytes() for path in rack.run.rglob("*") if path.is_file()) + rack.output.encode()
    assert b"Power Supply 2 AC lost" in written
    assert [canary for canary in (bmc.USER, bmc.PASSWORD) if canary.encode() in written] == []


def test_no_log_or_result_or_command_line_has_a_secret(rack: Rack) -> None:
    """The secrets are the password hash in web.config.yml, `ansible_become_password` in the inventory, and the nonce of the run
    (key of its message authentication codes).
    """
    assert any("--web-config" in line and WEB_CONFIG in line for line in rack.arguments)
    assert any("agent.benchmarks" in line for line in rack.arguments)
    nonce = json.loads((rack.run / "plan.json").read_text())["nonce"]
    visible = "\n".join([rack.output, *rack.arguments])
    for secret in (nonce, rack.password_hash, PASSWORD):
        assert secret not in visible
    written = ["grep", "-rlaF", "-e", rack.password_hash, "-e", PASSWORD]
    assert subprocess.run([*written, rack.run], capture_output=True, check=False).stdout == b""
    directories = ("/var", "/opt/rackproof", "/tmp", "/etc", "/root")
    since = ("-xdev", "-type", "f", "-cnewer", "/etc/hostname")  # since the host booted
    run = f"{STATE}/runs/parts"
    for host in HOSTS:
        matches = rack.lab.on(host, "find", *directories, *since, "-exec", *written, "{}", "+", check=False).stdout
        assert matches.split() == [WEB_CONFIG]
        logs = ("grep", "-rlaF", nonce, f"{run}/logs", f"{run}/work", f"{STATE}/exporter")
        assert rack.lab.on(host, *logs, check=False).stdout == ""
