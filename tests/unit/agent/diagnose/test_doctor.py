"""`rackproof doctor` on this machine, which has no GPU, and its table of a host that has."""

from __future__ import annotations

import json
import runpy

import pytest

from agent.diagnose import doctor
from collectors.base import HOST, Family
from fleet.judge.criteria import read_packs
from fleet.report.formatting import ACTIONS as LABELS
from schemas.reports import ACTIONS
from tests import ROOT
from tests.accepted import Done, rackproof


def run(*arguments: str) -> Done:
    return rackproof("doctor", "--seconds", "0", *arguments)


class Fixed:
    """A host of which only this is known."""

    name = "fixed"

    def __init__(self, **values: object) -> None:
        self._values = values

    def collect(self) -> list[Family]:
        result = []
        for name, value in self._values.items():
            family = Family(name=name.replace("__", "."), unit="1", help="Help")
            for labels, one in value.items() if isinstance(value, dict) else [((), value)]:
                family.add({"gpu": labels} if labels else HOST, one)
            result.append(family)
        return result


def test_missing_requested_gpus_are_a_finding() -> None:
    done = run("--gpus", "8")
    assert done.returncode == 1, done.stderr
    assert "gpu.count: found 0, wanted = 8 [gpu-count]" in done.stdout
    assert "checks passed" in done.stdout.splitlines()[-1]


def test_no_gpu_and_none_requested_is_no_success() -> None:
    done = run("--json")
    document = json.loads(done.stdout)
    assert done.returncode == 2
    assert any(doctor.NOT_SAID in item["reason"] for item in document["untold"])
    assert document["host"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "0"], "--gpus 0: give the number of GPUs, 1 to 128"),
        (["--gpus", "eight"], "invalid int value: 'eight'"),
        (["--criteria", "h200"], "unknown criteria pack h200"),
        (["--criteria", "/nowhere.yml"], "/nowhere.yml: No such file or directory"),
        (["--seconds", "-1"], "--seconds -1: give 0 to 3600 seconds"),
    ],
)
def test_a_wrong_command_line_is_usage(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 64
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_findings_come_gravest_first_and_a_sleeping_link_is_none() -> None:
    host = Fixed(
        gpu__count=1,
        gpu__pci_count=1,
        gpu__name={"0": "NVIDIA H200"},
        gpu__serial={"0": "165"},
        gpu__ecc__enabled={"0": False},
        gpu__remapped_rows__failed={"0": True},
        gpu__pcie__generation={"0": 1},
    )
    result = doctor.examine([host], read_packs([]), host="h1", gpu_count=None, wait_s=0)
    assert [(item.action, item.criterion, item.serial) for item in result.findings] == [
        ("rma", "row-remap-failed", "165"),
        ("reset_gpu", "ecc-enabled", "165"),
    ]
    asleep = [item for item in result.untold if item.criterion == "pcie-generation"]
    assert [item.reason.endswith(doctor.AT_IDLE) for item in asleep] == [True]
    assert result.exit_code == 1
    lines = doctor.table(result).splitlines()
    rows = [line.split()[0] for line in lines[lines.index("FOUND") + 1 : lines.index("FOUND") + 3]]
    assert rows == ["rma", "reset"]


def test_every_action_has_its_rank_and_its_words() -> None:
    assert tuple(LABELS) == ACTIONS


def test_the_reason_of_a_drained_node_keeps_its_figures() -> None:
    """scontrol takes ASCII."""
    reason = runpy.run_path(str(ROOT / "deploy" / "slurm" / "rackproof-health"))["_reason"]
    finding = {"action": "rma", "scope": "gpu=1", "serial": "165", "name": "x"}
    result = reason([{**finding, "reason": "found −12\u202f345 µs, wanted ≥ 93 °C “now”"}])
    assert result == "rackproof: rma: gpu=1 165: x: found -12345 us, wanted >= 93 C ?now?"
