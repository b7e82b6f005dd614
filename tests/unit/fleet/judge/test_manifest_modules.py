"""Verdicts on the modules (transceivers or cable ends) that a manifest lists.

A module may be in the ordered port or another port, replaced, not read, or not ordered.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet.cli.cables import module_rows
from fleet.inventory.manifest_file import read_manifest
from fleet.judge.host_inventory import host_inventory
from fleet.judge.host_view import HostView
from fleet.judge.manifest import judge_manifest
from schemas.errors import UsageError
from schemas.plans import Part
from schemas.records import Metric
from schemas.reports import FAIL, INCONCLUSIVE, PASS
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan, pack

SERIAL = "optics.module.serial"
FIRST, SECOND, NIC = "hca=mlx5_0,port=1", "hca=mlx5_1,port=1", "nic=eth0,port=1"
NO_MODULE = "unsupported: no module"
Ports = dict[str, str]
"""Scope of a port -> serial of its module; `status: reason` if the serial was not read."""


def modules(ports: Ports) -> list[Metric]:
    """Return the readings of the modules of a host, and of the adapters that have the ports."""
    absent = {scope: text for scope, text in ports.items() if ": " in text}
    values = {scope: text for scope, text in ports.items() if scope not in absent}
    addresses = {"hca=mlx5_0": "0000:1a:00.0", "hca=mlx5_1": "0000:3a:00.0"}
    return [
        Metric(name=SERIAL, unit="1", values=values, absent=absent),
        Metric(name="infiniband.hca.pci_address", unit="1", values=addresses),
        Metric(name="infiniband.interface", unit="1", values={FIRST: "ens1np0"}),
    ]


def line(serial: str, slot: str = "", host: str = "h1") -> Part:
    return Part(host=host, kind="module", serial=serial, slot=slot, origin="order.csv line 2")


def judged(parts: list[Part], *hosts: Ports) -> list[tuple[str, str, str, str]]:
    """Return host, scope, verdict and reason of each verdict. `hosts`: the ports of h1, then those of h2."""
    plan = replace(one_figure_plan("h1", "h2"), manifest=tuple(parts))
    views = [
        HostView(plan, host, host_evidence(plan, host.name, *(modules(ports) if ports else ())), [pack()])
        for host, ports in zip(plan.hosts, (*hosts, {}), strict=False)
    ]
    return [(item.host, item.scope, item.verdict, item.reason) for item in judge_manifest(plan, views)]


@pytest.mark.parametrize("slot", ["mlx5_0", "mlx5_0/1", "ens1np0", "0000:1a:00.0", ""])
def test_module_in_its_port_passes_under_any_name_of_the_port(slot: str) -> None:
    verdicts = judged([line("mt26-01", slot), line("X2", "mlx5_1")], {FIRST: "MT26-01", SECOND: "X2"})
    assert [(scope, verdict) for _, scope, verdict, _ in verdicts] == [(FIRST, PASS), (SECOND, PASS)]


def test_verdict_on_a_swapped_module_names_the_ordered_and_the_actual_port() -> None:
    verdicts = judged([line("X1", "mlx5_0"), line("X2", "mlx5_1")], {FIRST: "X2", SECOND: "X1"})
    assert [(scope, verdict) for _, scope, verdict, _ in verdicts] == [(SECOND, FAIL), (FIRST, FAIL)]
    assert verdicts[0][3].startswith("ordered for h1 slot mlx5_0, found in slot 0000:3a:00.0 (also named mlx5_1")


def test_verdict_on_a_replaced_module_names_its_replacement() -> None:
    verdicts = judged([line("X1", "mlx5_0")], {FIRST: "Z9"})
    assert verdicts == [
        ("h1", FIRST, FAIL, "ordered for h1 slot mlx5_0, found on no host; Z9 is in that slot instead"),
        ("h1", FIRST, FAIL, "found, but no line of the manifest names it"),
    ]


def test_module_in_its_ordered_port_is_not_named_as_a_replacement() -> None:
    """X2 was ordered for the second port, which has Z9 instead. Y1 is in the first port as ordered, so Y1 replaces nothing."""
    missing = judged([line("X2", "mlx5_1"), line("Y1", "mlx5_0")], {FIRST: "Y1", SECOND: "Z9"})[0]
    assert missing == ("h1", SECOND, FAIL, "ordered for h1 slot mlx5_1, found on no host; Z9 is in that slot instead")


def test_module_in_another_host_fails_on_both_hosts() -> None:
    verdicts = judged([line("X1", "mlx5_0"), line("X2", "mlx5_0", "h2")], {FIRST: "X2"}, {FIRST: "X1"})
    assert [(host, verdict) for host, _, verdict, _ in verdicts] == [
        ("h1", FAIL), ("h2", FAIL), ("h2", FAIL), ("h1", FAIL),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ports", "reason"),
    [
        ({FIRST: NO_MODULE}, "adapter mlx5_0, port 1 does not report its module (unsupported: no module)"),
        (
            {FIRST: "error: ethtool: timed out"},
            "adapter mlx5_0, port 1 does not report its module (error: ethtool: timed out)",
        ),
        ({SECOND: "X2"}, "the host did not report the module at port mlx5_0"),
        ({}, "the host did not report any module"),
    ],
)
def test_unread_module_is_inconclusive_with_the_reason(ports: Ports, reason: str) -> None:
    ((_, _, verdict, text), *others) = judged([line("X1", "mlx5_0"), *([line("X2")] if SECOND in ports else [])], ports)
    assert verdict == INCONCLUSIVE
    assert reason in text
    assert [item[2] for item in others] == [PASS] * len(others)


def test_module_that_is_listed_without_a_slot_is_missing_only_if_every_port_reports_a_serial() -> None:
    assert judged([line("X1")], {FIRST: "X2", SECOND: NO_MODULE})[0][2] == INCONCLUSIVE
    assert judged([line("X1")], {FIRST: "X2", SECOND: "X3"})[0][2] == FAIL


def test_both_ends_of_a_splitter_cable_may_be_ordered_with_one_serial() -> None:
    lines = [line("S1", "mlx5_0"), line("S1", "mlx5_0", "h2")]
    assert [item[2] for item in judged(lines, {FIRST: "S1"}, {FIRST: "S1"})] == [PASS, PASS]
    missing = judged(lines, {FIRST: "S1"}, {FIRST: "Z9"})
    assert [(host, verdict) for host, _, verdict, _ in missing] == [("h1", PASS), ("h2", FAIL), ("h2", FAIL)]


def test_unordered_module_of_an_ethernet_port_fails_only_if_the_manifest_lists_modules_of_ethernet_ports() -> None:
    ports = {FIRST: "X1", NIC: "E1"}
    assert [item[2] for item in judged([line("X1", "mlx5_0")], ports)] == [PASS]
    both = judged([line("X1", "mlx5_0"), line("E1", "eth0")], {**ports, "nic=eth1,port=1": "E2"})
    assert [(scope, verdict) for _, scope, verdict, _ in both] == [
        (FIRST, PASS),
        (NIC, PASS),
        ("nic=eth1,port=1", FAIL),
    ]


def test_modules_are_not_judged_if_the_manifest_has_none() -> None:
    gpu = Part(host="h1", kind="gpu", serial="h1-0", origin="order.csv line 2")
    assert [item[2] for item in judged([gpu], {FIRST: "X1"}) if item[1] == FIRST] == []


def read(tmp_path: Path, *lines: str) -> list[tuple[str, str, str]]:
    path = tmp_path / "order.csv"
    path.write_text("\n".join(["host,kind,slot,serial,port,switch,switch_port", *lines]))
    return [(part.kind, part.slot, part.serial) for part in read_manifest(str(path), ["h1", "h2"])]


def test_manifest_file_may_list_modules_and_cables(tmp_path: Path) -> None:
    lines = ("h1,module,mlx5_0/1,MT2601VS00002,,,", "h1,link,,,mlx5_0,leaf1,1/1", "h1,module,1A:00.0,00AB 12,,,")
    assert read(tmp_path, *lines) == [
        ("module", "mlx5_0/1", "MT2601VS00002"), ("link", "mlx5_0", ""), ("module", "0000:1a:00.0", "00AB 12"),
    ]  # fmt: skip
    assert len(read(tmp_path, "h1,module,mlx5_0,S1,,,", "h2,module,mlx5_0,S1,,,")) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("h1,module,mlx5_0,S1,,,", "h1,module,mlx5_0,S2,,,"), "slot mlx5_0 of h1 already holds serial S1"),
        (("h1,module,,S1,,,", "h2,module,,S1,,,"), "serial S1 is listed twice"),
        (("h1,module,mlx5_0,1E+12,,,",), "was rounded by a spreadsheet"),
        (("h1,module,mlx5_0,<b>,,,",), "is not a valid serial of a module"),
        (("h1,module,mlx5_0,S1,,leaf1,",), "switch must be empty for a part"),
    ],
)
def test_invalid_line_for_a_module_is_refused(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, *lines)


def test_lines_that_rackproof_writes_for_modules_can_be_read_as_a_manifest(tmp_path: Path) -> None:
    ports = {FIRST: "MT2601VS00002", SECOND: "=cmd()", NIC: "E 1", "nic=eth1,port=1": NO_MODULE,
             "nic=eth2,port=1": "error: ethtool: timed out"}  # fmt: skip
    plan = one_figure_plan("h1")
    view = HostView(plan, plan.hosts[0], host_evidence(plan, "h1", *modules(ports)), [pack()])
    rows, missing = module_rows([host_inventory(view)])
    assert rows == [("h1", "module", "mlx5_0", "MT2601VS00002"), ("h1", "module", "eth0", "E 1")]
    assert ["is not valid in a manifest" in missing[0], "timed out" in missing[1]] == [True, True]
    parts = [("module", slot, serial) for _, _, slot, serial in rows]
    assert read(tmp_path, *(f"{host},{kind},{slot},{serial},,," for host, kind, slot, serial in rows)) == parts
