"""Name the module (transceiver or cable end) in each failed verdict on a port: the module is the part to reseat or replace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fleet.judge.host_view import HostView
from schemas.reports import FAIL, Verdict
from schemas.scopes import Scope

OF_PORTS = ("optics.", "port.", "infiniband.", "network.")
"""Prefixes of readings of ports."""
OF_LINK = tuple(
    f"network.{name}" for name in ("rx_", "tx_", "carrier", "operstate", "speed", "duplex", "half_duplex", "mtu")
)
"""Prefixes of readings of the link of an Ethernet interface."""
_IDENTITY = ("optics.module.vendor", "optics.module.part_number", "optics.module.serial")
_INTERFACE = "infiniband.interface"


def with_module(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If it fails a port, add the known vendor, part number and serial of the module at the port.

    If an Ethernet interface is a port of a RoCE adapter, a failed reading of its link is attributed to the adapter. The adapter
    reports the same link, and one bad link must not be reported as two causes.
    """
    if verdict.verdict != FAIL or not verdict.name.startswith(OF_PORTS):
        return verdict
    ports = list(_ports(view, verdict.scope))
    adapter = Scope.parse(ports[-1]).device if ports else ""
    if verdict.name.startswith(OF_LINK) and not verdict.part and adapter != Scope.parse(verdict.scope).device:
        verdict = replace(verdict, part=adapter)
    module = next(filter(None, (_module_at(view, port) for port in ports)), "")
    if not module:
        return verdict
    detail = "; ".join(filter(None, (verdict.detail, module)))
    return replace(verdict, reason=f"{verdict.reason}; {module}", detail=detail)


def _ports(view: HostView, scope: str) -> Iterator[str]:
    """Yield the scopes that readings of the port's module may have. An Ethernet interface may also be a port of an adapter."""
    labels = Scope.parse(scope).labels
    if "hca" in labels:
        yield f"hca={labels['hca']},port={labels.get('port', '1')}"
    elif "nic" in labels:
        yield f"nic={labels['nic']},port=1"
        for _, metric in view.observations.metrics.get(_INTERFACE, ()):
            yield from (port for port, interface in metric.values.items() if interface == labels["nic"])


def _module_at(view: HostView, port: str) -> str:
    """Return text such as `module ACME AC-400, serial X1`; empty if nothing is known. Later readings replace earlier ones."""
    known: dict[str, str] = {}
    for name in _IDENTITY:
        for _, metric in view.observations.metrics.get(name, ()):
            if port in metric.values:
                known[name] = str(metric.values[port])
    vendor, number, serial = (known.get(name, "") for name in _IDENTITY)
    kind = " ".join(filter(None, (vendor, number)))
    texts = [kind, f"serial {serial}" if serial else ""]
    return f"module {', '.join(filter(None, texts))}" if kind or serial else ""
