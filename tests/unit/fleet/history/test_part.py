"""The history of a part: its slots, its replacements, a chassis, a serial in two slots of a host, causes without a serial.

A healthy part whose index or name changes was neither moved nor replaced.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fleet.history import tables
from fleet.history.answer import Answer
from fleet.history.database import History
from fleet.history.part import part_answer
from fleet.history.rows import HostRows, Row, RunRows, run_rows
from fleet.history.store import add_run, merge_runs
from fleet.records.load import load
from fleet.report.run_report import report_of
from schemas.baselines import SIMULATED
from tests import fleets
from tests.histories import FleetHistory
from tests.simulated import Document, on_boards, simulate, with_serials

CHASSIS, HOST, BOND = "S-r00-h00", "r00-h00", "aa:bb"
Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def store_runs(directory: Path, change: Callable[[int, HostRows], HostRows], months: int = 3) -> History:
    """Return a history of runs. `change` gets the number of a run and the rows of a host, and returns the rows to store."""
    for number, rows in enumerate(FleetHistory(racks=6, hosts=3, gpus=3, months=months).runs()):
        hosts = [change(number, host) for host in rows.hosts]
        add_run(directory, replace(rows, causes=(), hosts=tuple(hosts)))
    return History(directory, SIMULATED)


def sections(answer: Answer) -> Rows:
    return {section.name: section.rows for section in answer.sections}


def test_renamed_host_is_found_by_its_chassis_serial_under_both_names(tmp_path: Path) -> None:
    def rename(number: int, host: HostRows) -> HostRows:
        def renamed(rows: Sequence[Row]) -> tuple[Row, ...]:
            return tuple({**row, "host": "new"} if row["host"] == HOST and number == 2 else row for row in rows)

        return replace(host, parts=renamed(host.parts), figures=renamed(host.figures), tests=renamed(host.tests))

    history = store_runs(tmp_path, rename)
    by_serial, by_name = (sections(part_answer(history, name)) for name in (CHASSIS, HOST))
    assert [(row["host"], row["part"], row["runs"]) for row in by_serial["places"]] == [
        (HOST, "host", 2),
        ("new", "host", 1),
    ]
    assert {row["runs"] for row in by_serial["figures"]} == {3}
    assert {row["runs"] for row in by_name["figures"]} == {2}


def test_serial_that_two_slots_of_a_host_share_has_one_place(tmp_path: Path) -> None:
    """The two ports of an adapter have the same serial, and so do the two interfaces of a bond."""

    def bond(_: int, host: HostRows) -> HostRows:
        ports = [{**host.parts[0], "part": "NIC", "slot": f"nic={name}", "serial": BOND} for name in ("eth0", "eth1")]
        return replace(host, parts=(*host.parts, *ports)) if host.parts[0]["host"] == HOST else host

    answer = part_answer(store_runs(tmp_path, bond), BOND)
    rows = sections(answer)
    assert [(row["slot"], row["runs"]) for row in rows["places"]] == [("nic=eth0 and nic=eth1", 3)]
    assert (rows["repairs"], answer.notes) == ([], [])


def test_serial_of_a_nic_finds_the_causes_of_its_slot(tmp_path: Path) -> None:
    """Causes of parts other than GPUs have a host and a slot, but no serial."""
    fleet = FleetHistory(racks=6, hosts=3, gpus=3, months=1)
    (rows,) = fleet.runs()
    first, *others = rows.hosts
    port = {**first.parts[0], "part": "NIC", "slot": "nic=eth0", "serial": BOND}
    cause = {"host": HOST, "rack": "r00", "slot": "nic=eth0,port=1", "serial": "", "problem": "link-errors", "title": "",
             "action": "recable", "severity": "critical", "confidence": "certain", "waived": False}  # fmt: skip
    hosts = (replace(first, parts=(*first.parts, port)), *others)
    add_run(tmp_path, replace(rows, causes=(cause,), hosts=hosts))
    answer = part_answer(History(tmp_path, SIMULATED), BOND)
    assert [row["problem"] for row in sections(answer)["causes"]] == ["link-errors"]


def test_problem_is_gone_only_in_a_run_that_measured_what_had_failed(tmp_path: Path) -> None:
    cause = {"host": HOST, "rack": "r00", "slot": "", "serial": "", "problem": "slow-copy", "title": "", "action": "rma",
             "severity": "critical", "confidence": "certain", "waived": False}  # fmt: skip
    for number, rows in enumerate(FleetHistory(racks=6, hosts=3, gpus=3, months=4).runs()):
        copies = {"host": HOST, "stage": "benchmark", "benchmark": "peer_copy", "measured": True, "seconds": 1.0}
        # Runs 0 and 2 measured the copies of HOST. For simplicity, this row of HOST is added to the rows of every host.
        hosts = [
            replace(host, tests=(*host.tests, {**copies, "failed": number == 0})) if number in (0, 2) else host
            for host in rows.hosts
        ]
        add_run(tmp_path, replace(rows, causes=(cause,) if number == 0 else (), hosts=tuple(hosts)))
    history = History(tmp_path, SIMULATED)
    ((_, third),) = history.rows("select began, run from runs order by began limit 1 offset 2")
    (repair,) = sections(part_answer(history, HOST))["repairs"]
    assert (repair["run"], repair["text"][:17]) == (third, "slow-copy is gone")


SERIAL, ADDRESS, UUID = "SIM0000010{}", "0000:{:02}:00.0", "GPU-51400000-0000-4000-8000-00000001000{}"
"""Templates for serial, PCI address and UUID of the GPUs of r01-h02. GPU 0 has the PCI address 0000:06:00.0."""


@cache
def simulated_rows(day: int, fault: str | None, change: Callable[[Document], None]) -> RunRows:
    """Return the rows of the run `r1` on day 1, `r2` on day 2 and so on. Each run is simulated and judged only once.

    Only the memory is judged, because these tests use no decisions and no causes.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = simulate(Path(temporary) / f"r{day}", *([fault] if fault else []), day=day, change=change)
        run = load(directory)
        rows = run_rows(run, report_of(run, fleets.packs_about("memory")))
        return replace(rows, hosts=tuple(rows.hosts))  # read the records now, before they are deleted


def simulated_history(tmp_path: Path, *runs: tuple[str | None, Callable[[Document], None]]) -> History:
    """Return a history of one run a day, each with a fault (None: without one) and a change of its records."""
    for day, (fault, change) in enumerate(runs, 1):
        add_run(tmp_path / "history", simulated_rows(day, fault, change))
    return History(tmp_path / "history", SIMULATED)


def places(answer: Answer) -> list[tuple[str, str, int]]:
    return [(row["host"], row["slot"], row["runs"]) for row in sections(answer)["places"]]


def repairs(answer: Answer) -> list[tuple[str, str]]:
    """Return run and text of each replacement. Problems that are gone are left out."""
    rows = sections(answer)["repairs"]
    return [(row["run"], row["text"]) for row in rows if "another part" in row["text"]]


def same(_: Document) -> None:
    """Change nothing."""


@pytest.mark.parametrize(("change", "name"), [(same, SERIAL), (on_boards, UUID)], ids=["own serials", "shared serials"])
def test_gpus_beside_a_lost_gpu_neither_moved_nor_were_replaced(
    tmp_path: Path, change: Callable[[Document], None], name: str
) -> None:
    """In the second run, GPU 0 is lost; in the third run, GPU 2."""
    faults = (None, "missing_gpu:r01-h02:0", "missing_gpu:r01-h02:2", None)
    history = simulated_history(tmp_path, *((fault, change) for fault in faults))
    for gpu in range(4):
        answer = part_answer(history, name.format(gpu))
        runs = 3 if gpu in (0, 2) else 4
        assert (places(answer), repairs(answer)) == ([("r01-h02", ADDRESS.format(6 + gpu), runs)], [])
        assert max(row["runs"] for row in sections(answer)["figures"]) == runs


def test_replaced_gpu_is_reported_with_the_new_serial_at_its_address(tmp_path: Path) -> None:
    other = with_serials(lambda serial: "NEW" if serial == SERIAL.format(1) else serial)
    history = simulated_history(tmp_path, (None, same), ("missing_gpu:r01-h02:0", same), (None, other))
    address = ADDRESS.format(7)
    assert repairs(part_answer(history, SERIAL.format(1))) == [("r3", f"r01-h02 {address} has another part: NEW")]
    assert places(part_answer(history, "NEW")) == [("r01-h02", address, 1)]
    assert [repairs(part_answer(history, SERIAL.format(gpu))) for gpu in (0, 2, 3)] == [[], [], []]


def test_gpus_that_changed_places_moved_and_were_not_replaced(tmp_path: Path) -> None:
    exchanged = {SERIAL.format(1): SERIAL.format(3), SERIAL.format(3): SERIAL.format(1)}
    swap = with_serials(lambda serial: exchanged.get(serial, serial))
    history = simulated_history(tmp_path, (None, same), (None, swap))
    for gpu, other in ((1, 3), (3, 1)):
        answer = part_answer(history, SERIAL.format(gpu))
        slots = [ADDRESS.format(6 + gpu), ADDRESS.format(6 + other)]
        assert (places(answer), repairs(answer)) == ([("r01-h02", slot, 1) for slot in slots], [])


def test_any_gpu_is_found_by_its_uuid_with_its_figures(tmp_path: Path) -> None:
    history = simulated_history(tmp_path, (None, same))
    by_serial, by_uuid = (sections(part_answer(history, name.format(2))) for name in (SERIAL, UUID))
    assert by_serial["places"] == by_uuid["places"]
    for rows in (by_serial["figures"], by_uuid["figures"]):
        for row in rows:
            row.pop("percentile")  # type: ignore[attr-defined]  # a sum whose last digit depends on the order of threads
    assert by_serial["figures"] == by_uuid["figures"] != []


def test_disks_whose_names_were_exchanged_at_a_boot_were_not_replaced(tmp_path: Path) -> None:
    def disks(number: int, host: HostRows) -> HostRows:
        names = ("nvme0n1", "nvme1n1") if number != 1 else ("nvme1n1", "nvme0n1")
        serials = ("D1", "D2") if number < 3 else ("D1", "D3")  # run 3: D2 was replaced
        rows = [
            {**host.parts[0], "part": "disk", "slot": f"disk={name}", "serial": serial}
            for name, serial in zip(names, serials, strict=True)
        ]
        return replace(host, parts=(*host.parts, *rows)) if host.parts[0]["host"] == HOST else host

    history = store_runs(tmp_path, disks, months=5)
    assert repairs(part_answer(history, "D1")) == []
    assert [text for _, text in repairs(part_answer(history, "D2"))] == [f"{HOST} disk=nvme1n1 has another part: D3"]


def test_change_of_the_mac_address_of_a_bond_is_no_replacement(tmp_path: Path) -> None:
    def bond(number: int, host: HostRows) -> HostRows:
        address = "aa:01" if number < 2 else "aa:02"
        ports = [
            {**host.parts[0], "part": "NIC", "slot": f"nic={name}", "serial": address} for name in ("eth0", "eth1")
        ]
        return replace(host, parts=(*host.parts, *ports)) if host.parts[0]["host"] == HOST else host

    history = store_runs(tmp_path, bond)
    assert [repairs(part_answer(history, address)) for address in ("aa:01", "aa:02")] == [[], []]


def test_histories_without_addresses_stay_readable_and_are_merged_with_newer_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of Rackproof wrote `parts` without the columns `address` and `uuid`."""
    runs = [simulated_rows(day, None, same) for day in range(1, 5)]
    for table in (tables.INPUT, tables.COLUMNS):
        older = {name: kind for name, kind in table["parts"].items() if name not in tables.LATER_COLUMNS["parts"]}
        monkeypatch.setitem(table, "parts", older)  # type: ignore[arg-type]
    for run in runs[:2]:
        add_run(tmp_path / "history", run)
    monkeypatch.undo()
    before = part_answer(History(tmp_path / "history", SIMULATED), SERIAL.format(2))
    assert (places(before), repairs(before)) == ([("r01-h02", "gpu=2", 2)], [])
    for run in runs[2:]:
        add_run(tmp_path / "history", run)
    for _ in range(2):  # before and after the merge
        answer = part_answer(History(tmp_path / "history", SIMULATED), SERIAL.format(2))
        assert (places(answer), repairs(answer)) == ([("r01-h02", ADDRESS.format(8), 4)], [])
        merge_runs(tmp_path / "history", SIMULATED)
