"""Boundary conditions of `judge_manifest`, which compares the parts of hosts with the manifest (the list of ordered parts).

`test_manifest.py` tests manifest files, verdicts, the report and the command.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.host_inventory import host_inventory
from fleet.judge.host_view import HostView
from fleet.judge.manifest import judge_manifest, manifest_summary
from schemas.plans import Part, Plan
from schemas.records import Metric
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan, pack, reading

GUID, MAC = "0c42:a103:0065:8b2e", "0c:42:a1:65:8b:2e"
HCA, LAYER = "infiniband.hca.node_guid", "infiniband.link_layer"


def ordered_part(serial: str, kind: str = "nic", **over: Any) -> Part:
    return Part(**{"host": "h1", "kind": kind, "serial": serial, "origin": "order.csv line 2", **over})


def ordered_plan(*parts: Part, gpu_count: int = 1) -> Plan:
    return replace(one_figure_plan("h1", "h2", gpu_count=gpu_count), manifest=parts)


def judged(plan: Plan, *metrics: Metric, **over: Any) -> list[Verdict]:
    first, second = plan.hosts
    views = [
        HostView(plan, first, host_evidence(plan, "h1", *metrics, **over), [pack()]),
        HostView(plan, second, host_evidence(plan, "h2"), [pack()]),
    ]
    return judge_manifest(plan, views)


def summarize(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    return [(item.name, item.scope, item.verdict) for item in verdicts]


def guid_reading(value: str = GUID, name: str = "a") -> Metric:
    return reading(value, name=HCA, scope=f"hca={name}")


def link_layer_reading(value: str, port: str = "1", name: str = "a", absent: str = "") -> Metric:
    return reading(value, name=LAYER, scope=f"hca={name},port={port}", absent=absent)


ORDERED = ordered_part("ffff:0000:0000:0001")


@pytest.mark.parametrize(
    ("ports", "fails"),
    [
        ([], True), ([link_layer_reading("Ethernet")], False), ([link_layer_reading("InfiniBand")], True),
        ([link_layer_reading("Ethernet"), link_layer_reading("InfiniBand", "2")], True),
        ([link_layer_reading("", absent="error: x")], True), ([link_layer_reading("Ethernet", name="b")], True),
        ([link_layer_reading("Ethernet", name="ab")], True),
        ([link_layer_reading("Ethernet"), link_layer_reading("", "2", absent="error: x")], False),
    ],
)  # fmt: skip
def test_adapter_that_was_not_ordered_fails_unless_it_is_for_ethernet(ports: list[Metric], fails: bool) -> None:
    """An adapter is for Ethernet if a port reports Ethernet and no port reports InfiniBand."""
    guids = Metric(name=HCA, unit="1", values={"hca=ordered": ORDERED.serial, "hca=a": GUID})
    link_layers = Metric(
        name=LAYER, unit="1", values={key: value for port in ports for key, value in port.values.items()},
        absent={key: value for port in ports for key, value in port.absent.items()},
    )  # fmt: skip
    verdicts = judged(ordered_plan(ORDERED), guids, link_layers)
    assert summarize(verdicts) == [(HCA, "hca=ordered", PASS)] + ([(HCA, "hca=a", FAIL)] if fails else [])
    for item in verdicts[1:]:
        assert (item.criterion, item.serial, item.action) == ("manifest-extra", GUID, "inspect_hardware")
        assert item.source == "manifest: order.csv"


def test_mac_address_matches_the_guid_made_from_it() -> None:
    for serial, verdict in ((MAC, PASS), ("0c:42:a1:65:8b:2f", INCONCLUSIVE)):
        assert judged(ordered_plan(ordered_part(serial)), guid_reading())[0].verdict == verdict
    assert (
        judged(ordered_plan(ordered_part("0c:42:a1:65:8b:2e")), guid_reading("0c42:a104:0065:8b2e"))[0].verdict != PASS
    )


def test_ordered_gpu_is_found_if_its_serial_has_another_notation() -> None:
    assert summarize(judged(ordered_plan(ordered_part("H1-0", "gpu"))))[:1] == [("gpu.serial", "gpu=0", PASS)]


@pytest.mark.parametrize(
    ("counts", "gpus", "why"),
    [
        ({}, (), "1 GPU of the host does not report a serial"),
        ({"gpu.count": 2}, (), "2 GPUs of the host do not report a serial"),
        ({"gpu.count": 0}, (), ""), ({"gpu.count": 0, "gpu.pci_count": 1}, (), "1 GPU of the host does not report a serial"),
        ({"gpu.count": 1}, ("x",), ""),
        ({"gpu.count": 1, "gpu.pci_count": 2}, ("x",), "1 GPU of the host does not report a serial"),
        ({}, ("x",), ""), ({}, ("x", ""), "1 GPU of the host does not report a serial"), ({"gpu.count": "many"}, ("x",), ""),
    ],
)  # fmt: skip
def test_ordered_gpu_is_missing_only_if_every_gpu_of_the_host_reports_a_serial(
    counts: dict[str, Any], gpus: tuple[str, ...], why: str
) -> None:
    present = tuple(replace(builders.gpu("h1", at), serial=serial) for at, serial in enumerate(gpus))
    metrics = [reading(value, name=name, scope="host") for name, value in counts.items()]
    (verdict, *_) = judged(ordered_plan(ordered_part("lost", "gpu")), *metrics, gpus=present)
    assert (verdict.verdict, verdict.scope) == (INCONCLUSIVE if why else FAIL, "host")
    assert verdict.reason == f"ordered for h1{': ' + why if why else ', found on no host'}"


def test_location_of_a_misplaced_part_is_named() -> None:
    plan = ordered_plan(ordered_part("h1-0", "gpu", slot="1"), ordered_part("h2-0", "gpu"))
    verdicts = judged(plan)
    assert [(item.host, item.scope, item.verdict, item.reason) for item in verdicts] == [
        ("h1", "gpu=0", FAIL, "ordered for h1 slot 1, found in slot 0000:00:00.0 (also named 0)"),
        ("h1", "host", FAIL, "ordered for h1, found in h2 gpu=0"), ("h2", "gpu=0", FAIL, "ordered for h1, found in h2 gpu=0"),
    ]  # fmt: skip
    assert all(item.basis == "policy" and item.source == "manifest: order.csv line 2" for item in verdicts)
    assert manifest_summary(plan, verdicts) == "0 of 2 parts as ordered"
    good = judged(ordered_plan(ordered_part("h1-0", "gpu", slot="0")))
    assert [(item.verdict, item.reason, item.source, item.action) for item in good[:1]] == [
        (PASS, "found where it was ordered: h1 slot 0", "manifest: order.csv", "none")
    ]
    one_part = ordered_plan(ordered_part("h1-0", "gpu"))
    assert manifest_summary(one_part, good) == "1 of 1 parts as ordered; 1 part that was not ordered"
    assert (
        manifest_summary(replace(plan, rehearsal=True), verdicts)
        == manifest_summary(replace(plan, manifest=()), verdicts)
        == ""
    )
    assert judged(replace(plan, rehearsal=True)) == judged(replace(plan, manifest=())) == []


def test_ordered_adapter_is_not_reported_as_missing_if_the_guid_of_an_adapter_cannot_be_read() -> None:
    plan = ordered_plan(ordered_part("ffff:0000:0000:0001"))
    for value, absent, why in ((None, "error: x", "hca=a does not report its GUID"), (GUID, "", ""), ("", "", "")):
        observed = reading(value, name=HCA, scope="hca=a", absent=absent)
        (verdict, *_) = judged(plan, observed)
        assert verdict.reason == f"ordered for h1{': ' + why if why else ', found on no host'}"
    without_readings = host_inventory(HostView(plan, plan.hosts[0], host_evidence(plan), [pack()]))
    assert without_readings.unknown == {
        "gpu.serial": "",
        HCA: "the host did not report the GUID of any NIC",
        "network.address": "the host did not report the MAC address of any NIC",
        "optics.module.serial": "the host did not report any module: ethtool or mlxlink is missing, or the host has no port",
    }
    none = HostView(plan, plan.hosts[0], replace(host_evidence(plan), records=()), [pack()])
    assert set(host_inventory(none).unknown.values()) == {"the host left no record"}
