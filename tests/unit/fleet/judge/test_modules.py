"""A failed verdict on a port names the transceiver module at the port.

If an Ethernet interface is a port of a RoCE adapter, a failure of its link is attributed to the adapter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.host_view import HostView
from fleet.judge.modules import with_module
from schemas.records import Metric, Snapshot, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PORT, SECOND_PORT, NIC_PORT = "hca=mlx5_0,port=1", "hca=mlx5_0,port=2", "nic=eth4,port=1"
PLAN = one_figure_plan("h1")
INTERFACES = {"hca=mlx5_1,port=1": "eth5", PORT: "eth4"}
"""Port of an adapter -> name of its Ethernet interface."""
WHOLE = {"vendor": "ACME", "part_number": "AC-400", "serial": "X1"}
"""Identity of a module that reports all of its fields."""
TEXT = "module ACME AC-400, serial X1"


def view_of(*snapshots: dict[str, dict[str, Value]]) -> HostView:
    """Return a host with these readings in its snapshots: name -> scope -> value."""
    taken = tuple(
        Snapshot(
            stage="benchmark",
            phase="before" if not number else "after",
            at=builders.WHEN,
            duration_s=0.1,
            metrics=tuple(Metric(name=name, unit="1", values=values) for name, values in readings.items()),
        )
        for number, readings in enumerate(snapshots)
    )
    return host_view(PLAN, snapshots=taken)


def modules(**at: dict[str, str]) -> dict[str, dict[str, Value]]:
    """Return the readings of modules. `at`: `port` (PORT), `second` (SECOND_PORT) or `nic` (NIC_PORT) -> identity of a module."""
    ports = {"port": PORT, "second": SECOND_PORT, "nic": NIC_PORT}
    return {
        f"optics.module.{key}": {ports[port]: known[key] for port, known in at.items() if key in known} for key in WHOLE
    }


def failed(scope: str = PORT, name: str = "port.symbol_errors", **over: Any) -> Verdict:
    default = {"host": "h1", "scope": scope, "serial": "", "name": name, "verdict": FAIL, "criterion": "c"}
    return Verdict(**{**default, "reason": "found 5", "detail": "too many", **over})


@pytest.mark.parametrize(
    "verdict",
    [
        failed(verdict=PASS),
        failed(verdict=PASS, name="gpu.nvlink.errors"),
        failed(verdict=INCONCLUSIVE),
        failed(name="gpu.nvlink.errors"),
        failed(scope="hca=mlx5_9,port=1"),
        failed(scope="host", name="network.rx_errors"),
        failed(scope=SECOND_PORT),
    ],
)
def test_verdict_is_unchanged_unless_it_fails_a_port_with_a_module(verdict: Verdict) -> None:
    assert with_module(view_of(modules(port=WHOLE)), verdict) == verdict


@pytest.mark.parametrize(
    ("scope", "name"),
    [(PORT, "port.symbol_errors"), (f"{PORT},lane=2", "optics.rx_power"), ("hca=mlx5_0", "infiniband.hca.errors")],
)
def test_module_at_the_port_of_an_adapter_is_added_to_reason_and_detail(scope: str, name: str) -> None:
    """A scope without a port stands for port 1."""
    verdict = with_module(view_of(modules(port=WHOLE, second={"serial": "X2"})), failed(scope, name))
    assert (verdict.reason, verdict.detail) == (f"found 5; {TEXT}", f"too many; {TEXT}")
    assert verdict.part == ""


def test_second_port_has_its_own_module() -> None:
    verdict = with_module(view_of(modules(port=WHOLE, second={"serial": "X2"})), failed(SECOND_PORT, detail=""))
    assert (verdict.reason, verdict.detail) == ("found 5; module serial X2", "module serial X2")


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"vendor": "ACME"}, "module ACME"),
        ({"part_number": "AC-400"}, "module AC-400"),
        ({"vendor": "ACME", "serial": "X1"}, "module ACME, serial X1"),
        ({"serial": "X1"}, "module serial X1"),
    ],
)
def test_module_is_described_by_what_it_reports(known: dict[str, str], text: str) -> None:
    assert with_module(view_of(modules(port=known)), failed()).detail == f"too many; {text}"


def test_module_of_the_last_snapshot_is_named_if_a_module_was_replaced() -> None:
    view = view_of(modules(port=WHOLE), modules(port={**WHOLE, "serial": "X9"}))
    assert with_module(view, failed()).detail == "too many; module ACME AC-400, serial X9"


@pytest.mark.parametrize(
    ("at", "interfaces", "text"),
    [
        ({"nic": WHOLE, "port": {"serial": "X2"}}, INTERFACES, TEXT),
        ({"port": WHOLE}, INTERFACES, TEXT),
        ({"nic": WHOLE}, {}, TEXT),
        ({"port": WHOLE}, {}, ""),
        ({"port": WHOLE}, {PORT: "eth40"}, ""),
    ],
)
def test_module_is_looked_up_for_the_interface_and_then_for_its_adapter_port(
    at: dict[str, dict[str, str]], interfaces: dict[str, Value], text: str
) -> None:
    view = view_of({"infiniband.interface": interfaces, **modules(**at)})
    verdict = with_module(view, failed("nic=eth4", "network.speed"))
    assert verdict.reason == "; ".join(filter(None, ("found 5", text)))


@pytest.mark.parametrize(
    ("verdict", "interfaces", "part"),
    [
        (failed("nic=eth4", "network.rx_errors"), INTERFACES, "hca=mlx5_0"),
        (failed("nic=eth4", "network.duplex", part="nic=eth4"), INTERFACES, "nic=eth4"),
        (failed("nic=eth4", "network.lldp_port"), INTERFACES, ""),  # the link works: it leads to another switch
        (failed("nic=eth4", "network.rx_errors"), {}, ""),
        (failed(PORT, "network.rx_errors"), INTERFACES, ""),
    ],
)
def test_bad_link_of_an_interface_is_attributed_to_its_adapter_unless_the_verdict_names_a_part(
    verdict: Verdict, interfaces: dict[str, Value], part: str
) -> None:
    view = view_of({"infiniband.interface": interfaces})
    assert with_module(view, verdict) == replace(verdict, part=part)
