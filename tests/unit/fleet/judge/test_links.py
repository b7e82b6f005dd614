"""The readings of a host show to which switch port each of its network ports is cabled.

The names of the switch and of its port in these readings are compared with the names that an operator wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fleet.judge.wiring.links import PortLink, host_links, port_name, same_name, switch_keys
from schemas.records import Metric, Snapshot
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1")
Readings = Mapping[str, Mapping[str, Any]]


def link(**fields: Any) -> PortLink:
    default = {"host": "h1", "scope": "nic=eth0", "slot": "s", "names": frozenset({"eth0"}), "is_fastest": True}
    return PortLink(**{**default, **fields})


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("leaf01", "LEAF01", True),
        ("leaf01", "leaf02", False),
        ("leaf01.example.com", "leaf01", True),
        ("leaf01", "leaf01.example.com", True),
        ("leaf01.example.com", "leaf01.example.org", False),
        ("leaf01.Example.com", "leaf01.example.com", True),
        ("", "", False),
        ("leaf01", "", False),
    ],
)
def test_names_of_switches_are_equal_regardless_of_case_and_of_a_domain_that_only_one_name_has(
    first: str, second: str, is_same: bool
) -> None:
    assert same_name(first, second) is is_same
    assert same_name(second, first) is is_same


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Leaf01.example.com", ("leaf01", "leaf01examplecom")),
        ("leaf01", ("leaf01",)),
        ("0xAB:cd-ef 12", ("0xab:cd-ef 12", "abcdef12")),
        ("", ()),
    ],
)
def test_keys_of_a_switch_are_its_name_without_the_domain_and_its_name_without_separators(
    name: str, keys: tuple[str, ...]
) -> None:
    assert switch_keys(name) == keys


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ("nic=ens8", "ens8"),
        ("hca=mlx5_0,port=1", "mlx5_0"),
        ("hca=mlx5_0,port=2", "mlx5_0/2"),
        ("hca=mlx5_0", "mlx5_0"),
    ],
)
def test_port_has_the_name_that_manifests_use(scope: str, name: str) -> None:
    assert port_name(scope) == name
    assert link(scope=scope).name == name


@pytest.mark.parametrize(
    ("fields", "end", "kind"),
    [
        ({"switch": "leaf", "switch_id": "ab", "port": "swp1"}, "leaf swp1", "network"),
        ({"switch_id": "ab", "port": "swp1", "label": "swp1"}, "ab swp1", "network"),
        ({"switch_id": "ab", "port": "swp1", "label": "1/1"}, "ab swp1 (1/1)", "network"),
        ({"switch_id": "ab", "label": "1/1", "scope": "hca=mlx5_0,port=1"}, "ab (unnamed port) (1/1)", "infiniband"),
        ({"switch_id": "ab"}, "ab (unnamed port)", "network"),
    ],
)
def test_other_end_is_named_by_its_switch_and_port_and_label(fields: dict[str, str], end: str, kind: str) -> None:
    assert link(**fields).end == end
    assert link(**fields).kind == kind


@pytest.mark.parametrize(
    ("fields", "parts", "ports"),
    [
        ({}, ("nic=eth0",), ("nic=eth0",)),
        ({"adapter": "mlx5_0"}, ("nic=eth0", "hca=mlx5_0"), ("nic=eth0",)),
        ({"adapter": "mlx5_0", "adapter_port": "2"}, ("nic=eth0", "hca=mlx5_0"), ("nic=eth0", "hca=mlx5_0,port=2")),
        ({"adapter_port": "2"}, ("nic=eth0",), ("nic=eth0",)),
    ],
)
def test_interface_of_an_adapter_also_has_the_scope_of_the_adapter(
    fields: dict[str, str], parts: tuple[str, ...], ports: tuple[str, ...]
) -> None:
    assert (link(**fields).parts, link(**fields).ports) == (parts, ports)
    assert link(**fields).own_end == "NIC eth0 of h1"


@pytest.mark.parametrize(
    ("fields", "switch", "port", "is_at"),
    [
        ({"switch": "leaf", "port": "Swp1"}, "LEAF.example.com", "swp1", True),
        ({"switch": "leaf", "port": "swp1"}, "leaf", "swp2", False),
        ({"switch": "leaf", "port": "swp1", "label": "1/1"}, "leaf", "1/1", True),
        ({"switch": "leaf", "port": "swp1"}, "spine", "swp1", False),
        ({"switch": "leaf"}, "leaf", "", False),
        ({"switch": "leaf", "switch_id": "0xab:cd", "port": "swp1"}, "AB-CD", "swp1", True),
    ],
)
def test_switch_is_recognised_by_its_name_or_id_and_its_port_by_name_or_label(
    fields: dict[str, str], switch: str, port: str, is_at: bool
) -> None:
    assert link(**fields).is_at(switch, port) is is_at


@pytest.mark.parametrize(
    ("sent", "label", "wanted", "is_comparable"),
    [
        ("swp1", "", "swp1", True),
        ("swp1", "", "7", True),
        ("7", "", "8", True),
        ("7", "", "swp1", False),
        ("7", "swp7", "swp1", True),
        ("aa:bb:cc:dd:ee:ff", "", "swp1", False),
        ("aa:bb:cc:dd:ee:ff", "", "aa-bb-cc-dd-ee-00", True),
        ("aa:bb:cc:dd:ee:ff", "", "7", False),
        ("", "swp1", "swp1", False),  # the switch sends no name of its port, only a label
    ],
)
def test_address_or_number_without_a_label_is_comparable_only_with_the_same_form(
    sent: str, label: str, wanted: str, is_comparable: bool
) -> None:
    """A name is comparable with every form. An address or number with a label is, too."""
    assert link(port=sent, label=label).names_port_as(wanted) is is_comparable


def links_of(*snapshots: Readings, absent: Mapping[str, str] | None = None) -> dict[str, PortLink]:
    """Return the links of a host by scope.

    `absent`: scope -> status and reason, for each port for which the last snapshot has no `network.switch_id`.
    """
    shots = []
    for at, readings in enumerate(snapshots):
        metrics = [Metric(name=name, unit="1", values=values) for name, values in readings.items()]
        if absent and at == len(snapshots) - 1:
            metrics = [item for item in metrics if item.name != "network.switch_id"]
            known = readings.get("network.switch_id", {})
            metrics.append(Metric(name="network.switch_id", unit="1", values=known, absent=absent))
        shots.append(
            Snapshot(
                stage="benchmark", phase="before", at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1, metrics=tuple(metrics)
            )
        )
    links = host_links(host_view(PLAN, snapshots=tuple(shots)))
    assert (links.host, links.has_record) == ("h1", True)
    assert [item.scope for item in links.links] == sorted(item.scope for item in links.links)
    return {item.scope: item for item in links.links}


IB = "hca=mlx5_0,port=1"
ETHERNET: Readings = {
    "network.switch_id": {"nic=eth0": "aa:01", "nic=eth1": "aa:02"},
    "network.switch": {"nic=eth0": "leaf01"},
    "network.switch_port": {"nic=eth0": "swp1"},
    "network.switch_port_label": {"nic=eth0": "1/1"},
    "network.speed": {"nic=eth0": 5e10, "nic=eth1": 2.5e10},
    "network.carrier": {"nic=eth0": True, "nic=eth1": False},
    "network.pci_address": {"nic=eth0": "0000:1B:00.0"},
}


def test_host_without_readings_of_a_switch_has_no_links() -> None:
    assert links_of({"network.speed": {"nic=eth0": 1e9}}) == {}


def test_link_has_all_readings_of_its_port() -> None:
    links = links_of(ETHERNET)
    first, second = links["nic=eth0"], links["nic=eth1"]
    assert (first.switch_id, first.switch, first.port, first.label) == ("aa:01", "leaf01", "swp1", "1/1")
    assert (second.switch_id, second.switch, second.port, second.label) == ("aa:02", "", "", "")
    assert (first.slot, second.slot) == ("0000:1b:00.0", "nic=eth1")
    assert (first.names, second.names) == ({"eth0", "0000:1b:00.0"}, {"eth1"})
    assert (first.is_fastest, second.is_fastest) == (True, False)
    assert (first.has_link, second.has_link) == (True, False)
    assert {
        (item.adapter, item.adapter_port, item.reason, item.has_changed, item.is_expected) for item in links.values()
    } == {("", "", "", False, True)}


def test_ports_count_as_fastest_and_linked_if_their_rates_and_states_are_unknown() -> None:
    links = links_of(
        {"network.switch_id": {"nic=eth0": "a", "nic=eth1": "b"}, "network.speed": {"nic=eth1": "unknown"}}
    )
    assert {(item.is_fastest, item.has_link) for item in links.values()} == {(True, True)}


def test_infiniband_port_is_named_by_adapter_and_number() -> None:
    readings: Readings = {
        "infiniband.switch_id": {IB: "aa", "hca=mlx5_1,port=2": "bb"},
        "infiniband.hca.pci_address": {"hca=mlx5_0": "0000:1b:00.0", "hca=mlx5_1": "0000:2b:00.0"},
        "infiniband.rate": {IB: 5e10, "hca=mlx5_1,port=2": 5e10},
        "infiniband.phys_state": {IB: "LinkUp", "hca=mlx5_1,port=2": "Polling"},
    }
    links = links_of(readings)
    first, second = links[IB], links["hca=mlx5_1,port=2"]
    assert (first.slot, second.slot) == ("0000:1b:00.0 port 1", "0000:2b:00.0 port 2")
    assert first.names == {"mlx5_0/1", "mlx5_0", "0000:1b:00.0"}
    assert second.names == {"mlx5_1/2"}
    assert (first.has_link, second.has_link) == (True, False)


def test_interface_of_a_roce_port_has_the_names_of_its_adapter() -> None:
    links = links_of({**ETHERNET, "infiniband.interface": {"hca=mlx5_0,port=1": "eth0", "hca=mlx5_1,port=2": "eth1"}})
    first, second = links["nic=eth0"], links["nic=eth1"]
    assert (first.adapter, first.adapter_port, second.adapter, second.adapter_port) == ("mlx5_0", "1", "mlx5_1", "2")
    assert (first.names, second.names) == ({"eth0", "0000:1b:00.0", "mlx5_0"}, {"eth1", "mlx5_1/2"})


@pytest.mark.parametrize(
    ("why", "reason", "is_expected"),
    [
        ("error: no LLDP", "no LLDP", True),
        ("unsupported: no lldpd", "no lldpd", False),
        ("skipped: unsupported: x", "unsupported: x", True),
    ],
)
def test_port_whose_switch_was_not_read_has_the_reason(why: str, reason: str, is_expected: bool) -> None:
    links = links_of({"network.switch_id": {"nic=eth0": "a"}}, absent={"nic=eth1": why})
    assert (links["nic=eth1"].switch_id, links["nic=eth1"].reason, links["nic=eth1"].is_expected) == (
        "",
        reason,
        is_expected,
    )
    assert links["nic=eth0"].reason == ""
    assert list(links_of({}, absent={"nic=eth1": why})) == ["nic=eth1"]


def test_link_keeps_the_last_value_of_each_reading() -> None:
    first: Readings = {"network.switch_id": {"nic=eth0": "a"}, "network.switch_port": {"nic=eth0": "swp1"}}
    last: Readings = {"network.switch_id": {"nic=eth0": "a"}, "network.switch_port": {"nic=eth0": "swp2"}}
    assert links_of(first, last)["nic=eth0"].port == "swp2"
    known = links_of(first, {}, absent={"nic=eth0": "error: no LLDP"})["nic=eth0"]
    assert (known.switch_id, known.reason, known.port) == ("a", "", "swp1")


def test_switch_that_changed_during_the_run_is_unknown() -> None:
    def at(switch: str) -> Readings:
        return {"network.switch_id": {"nic=eth0": switch, "nic=eth1": "same"}}

    links = links_of(at("a"), at("b"), at("a"))  # the reason names each switch once
    changed = links["nic=eth0"]
    assert (changed.switch_id, changed.has_changed) == ("", True)
    assert changed.reason == "the switch changed during the run: a, then b"
    assert not links["nic=eth1"].has_changed
