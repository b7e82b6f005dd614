"""Test manifests of GPUs that report the serial of their board: two GPUs have one serial on GB200 and GB300, four on an A16."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.inventory.manifest_file import read_manifest
from fleet.judge.evidence import Evidence
from schemas.errors import UsageError
from schemas.reports import FAIL
from tests import builders
from tests.unit.fleet.judge.test_manifest import gpu_line, manifest_verdicts, not_passing, ordered_plan

LINES = [gpu_line("h1", index, serial="S1", slot=str(index)) for index in range(2)]


def found(present: Collection[int] = (0, 1), host: str = "h1") -> list[tuple[str, str, str, str]]:
    """Return what does not pass if `host` has these GPUs of the ordered board, and its other GPUs are of another board."""
    plan = ordered_plan([*LINES, *(gpu_line("h2", index) for index in range(2))])
    evidence = builders.evidence(plan)
    (record,) = evidence[host].records
    gpus = tuple(replace(gpu, serial="S1" if gpu.index in present else f"S{gpu.index + 2}") for gpu in record.gpus)
    return not_passing(manifest_verdicts(plan, {**evidence, host: Evidence(records=(replace(record, gpus=gpus),))}))


@pytest.mark.parametrize("slots", [("0", "1"), ("0008:01:00.0", "0009:01:00.0"), ("0", "1", "2", "3")])
def test_gpus_of_one_board_may_be_ordered_with_one_serial_in_several_slots(
    tmp_path: Path, slots: tuple[str, ...]
) -> None:
    path = tmp_path / "order.csv"
    path.write_text("host,kind,slot,serial\n" + "".join(f"h1,gpu,{slot},1650123000456\n" for slot in slots))
    assert [part.slot for part in read_manifest(str(path), ["h1"])] == list(slots)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("h1,gpu,0,S1", "h2,gpu,1,S1"), "serial S1 is listed twice"),
        (("h1,gpu,0,S1", "h1,gpu,,S1"), "serial S1 is listed twice"),
        (("h1,gpu,,S1", "h1,gpu,1,S1"), "serial S1 is listed twice"),
        (("h1,gpu,0,S1", "h1,gpu,1,S1", "h2,gpu,2,S1"), "line 4: serial S1 is listed twice"),
        (("h1,gpu,0,S1", "h1,gpu,0,S1"), "slot 0 of h1 already holds serial S1"),
        (("h1,nic,eth0,aabbccddeeff", "h1,nic,eth1,aabbccddeeff"), "is listed twice"),
    ],
)
def test_serial_in_two_places_that_are_not_slots_of_one_board_is_refused(
    tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "order.csv"
    path.write_text("\n".join(("host,kind,slot,serial", *lines)))
    with pytest.raises(UsageError, match=message):
        read_manifest(str(path), ["h1", "h2"])


def test_board_with_all_its_gpus_in_their_slots_passes() -> None:
    assert found() == []


@pytest.mark.parametrize("gpu", [0, 1])
def test_missing_gpu_of_a_board_fails_although_the_other_has_its_serial(gpu: int) -> None:
    assert {(host, verdict) for host, _, verdict, _ in found(present={1 - gpu})} == {("h1", FAIL)}
    assert f"ordered for h1 slot {gpu}, found on no host" in {reason for *_, reason in found(present={1 - gpu})}


def test_board_in_another_host_fails() -> None:
    assert {(host, verdict) for host, _, verdict, _ in found(host="h2")} >= {("h1", FAIL), ("h2", FAIL)}
