"""Test how GPUs are identified: by serial, and by UUID if several GPUs of a host share the serial of their board."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fleet.judge.duplicates import DuplicateSerials
from fleet.judge.evidence import Evidence
from fleet.judge.gpu_identity import identities, identity_text, shared_serials
from schemas.records import Gpu
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan


def gpus(*parts: tuple[str, str]) -> list[Gpu]:
    """Return the GPUs of a host from their serials and UUIDs."""
    return [
        Gpu(index=index, serial=serial, uuid=uuid, name="NVIDIA GB200", pci_bus_id=f"0008:{index:02x}:00.0")
        for index, (serial, uuid) in enumerate(parts)
    ]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([("S1", "U1"), ("S2", "U2")], ["S1", "S2"]),
        ([("S1", "U1"), ("S1", "U2"), ("S2", "U3"), ("S2", "U4")], ["U1", "U2", "U3", "U4"]),
        ([("S1", "U1"), ("S1", "U2"), ("S1", "U3"), ("S1", "U4")], ["U1", "U2", "U3", "U4"]),
        ([("S1", "U1"), ("S1", "U2"), ("S3", "U3")], ["U1", "U2", "S3"]),
        ([("S1", "U1"), ("S1", "U1")], ["S1", "S1"]),  # one GPU that is listed twice, or a forged record
        ([("S1", ""), ("S1", "")], ["S1", "S1"]),
        ([("S1", "U1"), ("S1", "")], ["S1", "S1"]),
        ([(" S1 ", "U1"), ("S1", " U2 ")], ["U1", "U2"]),
        ([("", "U1"), (" ", "U2"), ("0", "U3"), ("000", "")], ["U1", "U2", "U3", ""]),
    ],
)
def test_gpus_that_share_a_serial_are_identified_by_their_uuids(
    parts: list[tuple[str, str]], expected: list[str]
) -> None:
    assert list(identities(gpus(*parts)).values()) == expected


def test_uuid_identifies_a_gpu_that_is_listed_alone_if_its_serial_is_known_to_be_shared() -> None:
    board = gpus(("S1", "U1"), ("S1", "U2"))
    assert identities(board[1:]) == {"gpu=1": "S1"}
    assert identities(board[1:], shared_serials(board)) == {"gpu=1": "U2"}


def test_text_of_an_identity_states_whether_it_is_a_serial_or_a_uuid() -> None:
    first, second, zeros, none = gpus(("S1", "U1"), ("S1", "U2"), ("000", "U3"), ("", ""))
    assert identity_text(first, ()) == "serial S1"
    assert [identity_text(gpu, {"S1"}) for gpu in (second, zeros, none)] == ["UUID U2", "UUID U3", "an unknown serial"]


def test_judge_finds_duplicates_on_each_host_with_two_gpus_of_one_identity() -> None:
    generator = random.Random(1)  # noqa: S311
    plan = one_figure_plan(gpu_count=4)
    for _ in range(300):
        parts = [(generator.choice(("", "S1", "S2")), generator.choice(("U1", "U2", "U3", "U4"))) for _ in range(4)]
        record = host_evidence(plan, "h1", gpus=tuple(gpus(*parts))).records[0]
        known = DuplicateSerials()
        known.add("h1", Evidence(records=(record,)))
        if max(Counter(identities(record.gpus).values()).values()) > 1:
            assert known.hosts() == {"h1"}, parts


def test_identities_of_a_healthy_host_are_its_serials() -> None:
    known = [builders.gpu("h1", index) for index in range(8)]
    assert list(identities(known).values()) == [gpu.serial for gpu in known]
