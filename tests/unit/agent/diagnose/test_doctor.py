"""Test `rackproof doctor` on this machine (without a GPU) and with fake collectors, and the health check for Slurm."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from agent.diagnose import doctor
from collectors.base import HOST_LABELS, Family
from collectors.xid import XidCollector
from fleet.judge.criteria import read_packs
from fleet.report.formatting import ACTIONS as LABELS
from schemas.reports import ACTIONS
from tests import ROOT
from tests.accepted import Done, rackproof


def run(*arguments: str) -> Done:
    return rackproof("doctor", "--seconds", "0", *arguments)


class FixedCollector:
    """A collector with fixed readings. Its arguments: NAME=VALUE for the host, NAME={GPU: VALUE} for GPUs; `__` means a dot."""

    name = "fixed"

    def __init__(self, **values: object) -> None:
        self._values = values

    def collect(self) -> list[Family]:
        families = []
        for name, value in self._values.items():
            family = Family(name=name.replace("__", "."), unit="1", help="Help")
            for gpu, reading in value.items() if isinstance(value, dict) else [((), value)]:
                family.add({"gpu": gpu} if gpu else HOST_LABELS, reading)
            families.append(family)
        return families


def test_missing_expected_gpus_are_a_finding() -> None:
    done = run("--gpus", "8")
    assert done.returncode == 1, done.stderr
    assert "gpu.count: found 0, wanted = 8 [gpu-count]" in done.stdout
    assert "checks passed" in done.stdout.splitlines()[-1]


def test_exit_code_is_2_without_an_expected_gpu_count() -> None:
    done = run("--json")
    document = json.loads(done.stdout)
    assert done.returncode == 2
    assert any(doctor.NO_GPU_COUNT in item["reason"] for item in document["not_reported"])
    assert document["host"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus 0: give the number of GPUs, 1 to 128"),
        (["--gpus", "eight"], "invalid int value: 'eight'"),
        (["--criteria", "h200"], "unknown criteria pack h200"),
        (["--criteria", "/nowhere.yml"], "/nowhere.yml: No such file or directory"),
        (["--seconds", "-1"], "--seconds -1: give 0 to 3600 seconds"),
    ],
)
def test_wrong_command_line_exits_64(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 64
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_findings_are_sorted_by_severity_and_exclude_idle_links() -> None:
    collector = FixedCollector(
        gpu__count=1,
        gpu__pci_count=1,
        gpu__name={"0": "NVIDIA H200"},
        gpu__serial={"0": "165"},
        gpu__ecc__enabled={"0": False},
        gpu__remapped_rows__failed={"0": True},
        gpu__pcie__generation={"0": 1},
    )
    diagnosis = doctor.examine([collector], read_packs([]), host="h1", gpu_count=None, wait_s=0)
    assert [(item.action, item.criterion, item.serial) for item in diagnosis.findings] == [
        ("rma", "row-remap-failed", "165"),
        ("configure", "ecc-enabled", "165"),
    ]
    idle_links = [item for item in diagnosis.not_reported if item.criterion == "pcie-generation"]
    assert [item.reason.endswith(doctor.IDLE_REASON) for item in idle_links] == [True]
    assert diagnosis.exit_code == 1
    lines = doctor.table(diagnosis).splitlines()
    rows = [line.split()[0] for line in lines[lines.index("FAILED") + 1 : lines.index("FAILED") + 3]]
    assert rows == ["rma", "configure"]


def test_finding_in_the_kernel_log_says_that_only_a_reboot_clears_it(tmp_path: Path) -> None:
    """The last message withdraws the reset. The finding still asks for a reset, because XID 119 stays in the kernel log."""
    messages = (
        "NVRM: Xid (PCI:0000:5d:00): 119, pid=1234, name=python, Timeout after 6s of waiting for RPC response from GPU3 GSP!",
        "NVRM: Xid (PCI:0000:5d:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        "NVRM: Xid (PCI:0000:5d:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    )
    (tmp_path / "kmsg").write_text("".join(f"6,{at},{at}000000,-;{text}\n" for at, text in enumerate(messages, 1)))
    collector = XidCollector(tmp_path / "kmsg")
    diagnosis = doctor.examine([collector], read_packs([]), host="h1", gpu_count=8, wait_s=0)
    (finding,) = (item for item in diagnosis.findings if item.name.startswith("xid."))
    assert (finding.criterion, finding.action) == ("xid-119", "reset_gpu")
    assert finding.reason.endswith("only a reboot clears it")
    assert "only a reboot clears it" in doctor.table(diagnosis)


def test_labels_of_actions_are_complete_and_sorted_by_severity() -> None:
    assert tuple(LABELS) == ACTIONS


def test_drain_reason_is_ascii_and_its_numbers_stay_readable() -> None:
    """rackproof-health passes only ASCII to scontrol, so it replaces other characters."""
    summary = runpy.run_path(str(ROOT / "deploy" / "slurm" / "rackproof-health"))["_summary"]
    finding = {"action": "rma", "scope": "gpu=1", "serial": "165", "name": "x"}
    text = summary([{**finding, "reason": "found −12\u202f345 µs, wanted ≥ 93 °C “now”"}])
    assert text == "rackproof: rma: gpu=1 165: x: found -12345 us, wanted >= 93 C ?now?"


def run_hook(
    directory: Path, doctor: str, settings: str = "", scontrol: str = "", python: str = "", context: str = ""
) -> Done:
    """Run rackproof-health with other settings than those in /etc, and programs in `directory` for doctor and scontrol.

    Args:
        python: text of a program in place of the agent's Python; empty: the Python of the tests.
        context: the hook of Slurm, as in the variable SLURM_SCRIPT_CONTEXT.
    """
    path = directory / "slurm-health.conf"
    text = f"# Settings\n RACKPROOF = {directory}/rackproof \nSCONTROL={directory}/scontrol\n{settings}\n"
    path.write_text(text, errors="surrogateescape")
    hook = (ROOT / "deploy/slurm/rackproof-health").read_text(encoding="utf-8")
    programs = {"rackproof": doctor, "scontrol": scontrol, "python": python}
    programs["hook"] = hook.replace("/etc/rackproof/slurm-health.conf", str(path))
    for name, program in programs.items():
        if program:
            (directory / name).write_text(program, encoding="utf-8")
            (directory / name).chmod(0o755)
    if not python:
        (directory / "python").symlink_to(sys.executable)
    environment = {"SLURM_SCRIPT_CONTEXT": context, "SLURMD_NODENAME": "node1"}  # slurmd runs its hooks without PATH
    return subprocess.run([directory / "hook"], env=environment, capture_output=True, text=True, check=False)


def doctor_with(*findings: dict[str, str]) -> str:
    """Return a program that prints these findings, as doctor does, and exits with 1."""
    return f"#!/bin/sh\necho '{json.dumps({'findings': findings})}'\nexit 1\n"


FAULT = {"action": "rma", "scope": "gpu=1", "serial": "165", "name": "x", "reason": "y"}


@pytest.mark.parametrize(
    ("doctor", "settings"),
    [
        ("echo '{\"findings\": []}'; exit 1", ""),
        ("echo '[]'; exit 1", ""),
        ("echo '{\"findings\": [{}]}'; exit 1", ""),
        ("echo Traceback >&2; exit 1", ""),
        ("exit 127", ""),
        ("true", "TIMEOUT=soon"),
        ("true", "\udcff"),
    ],
    ids=[
        *("no finding", "not an object", "finding without fields", "traceback", "exit code 127", "invalid setting"),
        "settings that are not UTF-8",
    ],
)
def test_health_check_does_not_drain_a_node_if_doctor_or_the_settings_are_broken(
    tmp_path: Path, doctor: str, settings: str
) -> None:
    done = run_hook(tmp_path, f"#!/bin/sh\n{doctor}\n", settings, context="prolog_slurmd")
    assert done.returncode == 0
    assert "rackproof-health: not checked: " in done.stderr


@pytest.mark.parametrize(
    "python",
    ["#!/nowhere\n", *(f"#!/bin/sh\nexit {code}\n" for code in (1, 2, 126, 127)), "#!/bin/sh\nkill -SEGV $$\n"],
    ids=["missing", "exit code 1, as of a syntax error", "2", "126", "127", "crash"],
)
@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd", "health_check"])
def test_health_check_whose_python_does_not_start_is_logged_and_does_not_drain_the_node(
    tmp_path: Path, python: str, context: str
) -> None:
    done = run_hook(tmp_path, doctor_with(FAULT), python=python, context=context)
    assert done.returncode == 0
    assert f"rackproof-health: not checked: {tmp_path}/python {tmp_path}/hook exits with " in done.stderr


@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd", "health_check"])
@pytest.mark.parametrize(
    ("scontrol", "logged"),
    [
        ("#!/bin/sh\ntrue\n", ""),
        ("#!/bin/sh\necho State=IDLE+DRAIN\n", ""),
        (
            "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n",
            "was not drained: scontrol update exits with 1: Unable to contact slurm controller",
        ),
        ("", "was not drained: [Errno 2] No such file or directory"),
    ],
    ids=["drained", "already drained", "controller not reachable", "scontrol not installed"],
)
def test_health_check_logs_a_fault_and_a_failure_to_drain_the_node(
    tmp_path: Path, scontrol: str, logged: str, context: str
) -> None:
    done = run_hook(tmp_path, doctor_with(FAULT), scontrol=scontrol, context=context)
    assert done.returncode == (1 if context == "prolog_slurmd" else 0)
    assert "fault on node1: rackproof: rma: gpu=1 165: x: y" in done.stderr
    assert ("was not drained" in done.stderr) == bool(logged)
    assert logged in done.stderr


SETTING = {"action": "configure", "scope": "gpu=2", "serial": "166", "name": "gpu.mig.enabled", "reason": "found true"}
SCONTROL = '#!/bin/sh\n[ "$1" = show ] || echo "$@" >>"$(dirname "$0")/calls"\n'


@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd", "health_check"])
def test_health_check_logs_a_setting_and_does_not_drain_the_node(tmp_path: Path, context: str) -> None:
    done = run_hook(tmp_path, doctor_with(SETTING, SETTING), scontrol=SCONTROL, context=context)
    assert (done.returncode, (tmp_path / "calls").exists()) == (0, False)
    line = "because it is a setting: rackproof: configure: gpu=2 166: gpu.mig.enabled: found true (and 1 more)"
    assert line in done.stderr


@pytest.mark.parametrize(
    ("findings", "reason"),
    [
        ([FAULT, SETTING], "Reason=rackproof: rma: gpu=1 165: x: y\n"),
        (
            [{"action": "configure", "scope": "host", "name": "gpu.count", "reason": "found 7, wanted = 8"}],
            "Reason=rackproof: configure: gpu.count: found 7, wanted = 8\n",
        ),
        (
            [{**FAULT, "action": "none"}, {**FAULT, "action": "monitor"}],
            "Reason=rackproof: none: gpu=1 165: x: y (and 1 more)\n",
        ),
    ],
    ids=["a fault beside a setting", "a missing GPU with the action configure", "actions none and monitor"],
)
def test_health_check_drains_a_node_with_findings_that_are_no_settings(
    tmp_path: Path, findings: list[dict[str, str]], reason: str
) -> None:
    done = run_hook(tmp_path, doctor_with(*findings), scontrol=SCONTROL, context="prolog_slurmd")
    assert done.returncode == 1
    assert (tmp_path / "calls").read_text().endswith(reason)


@pytest.mark.parametrize(
    ("criteria", "options"),
    [
        ("", ""),
        ("/etc/rackproof/site.yml", "--criteria=/etc/rackproof/site.yml "),
        ("no-vulnerabilities, /a b.yml", "--criteria=no-vulnerabilities --criteria=/a b.yml "),
    ],
)
def test_health_check_gives_its_packs_to_doctor(tmp_path: Path, criteria: str, options: str) -> None:
    doctor = '#!/bin/sh\necho "$* " >"$(dirname "$0")/options"\necho "{}"\n'
    assert run_hook(tmp_path, doctor, f"GPUS=8\nCRITERIA={criteria}").returncode == 0
    assert (tmp_path / "options").read_text() == f"doctor --json --seconds 0.5 --gpus 8 {options}\n"


def test_lowered_clocks_mig_and_power_limits_are_settings() -> None:
    names = ("gpu.clock.lowered", "gpu.mig.enabled", "gpu.power_limit_lowered")
    judging = [item for pack in read_packs([]) for item in pack.criteria if item.name in names]
    assert {item.name for item in judging} == {*names}
    assert {(item.action, item.severity) for item in judging} == {("configure", "critical")}
