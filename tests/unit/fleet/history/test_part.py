"""The history of parts other than GPUs: a chassis, a serial in two slots of a host, and a part whose causes have no serial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.history.answer import Answer
from fleet.history.database import History
from fleet.history.part import part_answer
from fleet.history.rows import HostRows, Row
from fleet.history.store import add_run
from schemas.baselines import SIMULATED
from tests.histories import FleetHistory

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
        # In runs 0 and 2, HOST has this row. For simplicity, the rows of all hosts contain the same row of HOST.
        hosts = [
            replace(host, tests=(*host.tests, {**copies, "failed": number == 0})) if number in (0, 2) else host
            for host in rows.hosts
        ]
        add_run(tmp_path, replace(rows, causes=(cause,) if number == 0 else (), hosts=tuple(hosts)))
    history = History(tmp_path, SIMULATED)
    ((_, third),) = history.rows("select began, run from runs order by began limit 1 offset 2")
    (repair,) = sections(part_answer(history, HOST))["repairs"]
    assert (repair["run"], repair["text"][:17]) == (third, "slow-copy is gone")
