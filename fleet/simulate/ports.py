"""Make the readings of the RDMA ports of a simulated host, and the figures that the benchmark `verbs` measures for the ports.

A simulated host has one InfiniBand port for each GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fleet.judge.port_coverage import BEST, SHARE, PortFigure, planned_figures
from fleet.simulate import assumptions
from fleet.simulate.cabling import adapter_scope
from fleet.simulate.gpu_data import json_numbers, values_by_level
from fleet.simulate.template import Greatest, Placeholder, Slot
from schemas.benchmarks.communication import SMALL_MESSAGE_BYTES
from schemas.catalogue import settings
from schemas.plans import Plan, PlannedHost
from schemas.readings import READINGS
from schemas.records import MEASURED
from schemas.scopes import Scope
from schemas.stages import GANG
from schemas.tournament import select_rounds

Doc = dict[str, Any]
VERBS = "verbs"
MTU_B = 4096
"""MTU of the ports, in bytes."""
_UNITS = {"bandwidth": "B/s", "rate_ratio": "1", "mtu": "B", "latency": "s", "message_rate": "1/s"}
_ERRORS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors")


def port_rate(host: PlannedHost) -> float:
    """Return the data rate of each port of the host, in B/s."""
    return (host.fabric_gbps or assumptions.DEFAULT_FABRIC_GBPS) * 1e9 / 8


def port_metrics(host: PlannedHost, devices: int) -> Iterator[Doc]:
    """Yield the readings of the ports of a host with `devices` GPUs."""
    values: Mapping[str, Any] = {
        "link_layer": "InfiniBand", "state": "ACTIVE", "phys_state": "LinkUp", "active": True, "unmanaged": False,
        "rate": port_rate(host), "width": 4, "narrowed": False, **dict.fromkeys(_ERRORS, 0),
    }  # fmt: skip
    scopes = [adapter_scope(rail) for rail in range(devices)]
    for name, value in values.items():
        yield _metric(f"infiniband.{name}", dict.fromkeys(scopes, value))
    yield _metric("infiniband.port_count", {"host": devices})
    guids = {f"hca=mlx5_{rail}": Placeholder("port_guid", f'"5140:0001:%s:{rail:04x}"') for rail in range(devices)}
    yield _metric("infiniband.hca.node_guid", guids)


def port_values(number: int) -> dict[str, str]:
    """Return placeholder -> its text, for the host at position `number` in the plan."""
    return {"port_guid": f"{number:04x}"}


def _metric(name: str, values: Mapping[str, Any]) -> Doc:
    return {"name": name, "unit": READINGS[name].unit, "values": dict(values)}


def verbs_seconds(plan: Plan, stage: str) -> float:
    """Return the seconds that `verbs` takes in a stage.

    In the stage `gang`, `verbs` tests pairs of hosts in rounds: return the seconds of the gang with the most rounds. In any other
    stage, each host tests its ports one after the other: return the seconds of the host with the most ports.
    """
    chosen = settings(VERBS, plan.stage(stage).benchmarks[VERBS])
    in_gang = stage == GANG
    tests = {(figure.test, *figure.params.items()) for figure in planned_figures(chosen, chosen["sharings"])}
    runs = [name for name, *params in tests for _ in range(2 if in_gang and ("direction", "one_way") in params else 1)]
    transfers = sum(name != "verbs.latency" for name in runs)
    seconds = transfers * chosen["seconds"] + len(runs) * assumptions.PERFTEST_SETUP_S
    if not in_gang:
        return float(seconds * max(len(host.devices) for host in plan.hosts))
    rounds = max((len(select_rounds(len(hosts), int(chosen["rounds"]))) for hosts in plan.gangs().values()), default=0)
    return float(seconds * rounds)


def port_observations(plan: Plan, host: PlannedHost, stage: str, partners: int, later_partners: int) -> Iterator[Doc]:
    """Yield the figures of the ports of a host in a stage, as the benchmark `verbs` reports them.

    Args:
        plan: plan of the run.
        host: the host.
        stage: the stage.
        partners: number of hosts with which the host is paired in the stage `gang`. The partners are numbered from 0.
        later_partners: number of partners that come after `host` in the gang; they have the first numbers. The first host of
            a pair reports the latency and message rate of the pair.
    """
    planned = plan.stage(stage).benchmarks
    if VERBS not in planned:
        return
    chosen = settings(VERBS, planned[VERBS])
    if stage != GANG:
        for rail in range(len(host.devices)):
            for figure in planned_figures(chosen, ("alone",)):
                yield _observation(host, chosen, stage, figure, rail, adapter_scope(rail))
        return
    for partner in range(partners):
        for rail in range(len(host.devices)):
            scope = Placeholder(f"port_partner{partner}", f'"{adapter_scope(rail)},partner=%s"')
            for figure in planned_figures(chosen, chosen["sharings"]):
                if partner < later_partners or figure.is_of_both_hosts:
                    yield _observation(host, chosen, stage, figure, rail, scope, partner)
    shares = [each for each in planned_figures(chosen, chosen["sharings"]) if _is_share(each)]
    for rail in range(len(host.devices)) if shares and partners else ():
        groups = tuple(_group(share, rail, partner) for share in shares for partner in range(partners))
        best = Greatest(texts=_texts(host, shares[0], in_gang=True), groups=groups)
        yield {
            "name": BEST,
            "scope": adapter_scope(rail),
            "stage": stage,
            "unit": "1",
            "status": MEASURED,
            "params": {"rail": rail, "partners": partners},
            "**": best,
        }


def _is_share(figure: PortFigure) -> bool:
    return figure.name == "verbs.rate_ratio" and SHARE.items() <= figure.params.items()


def _group(figure: PortFigure, rail: int, partner: int | str) -> str:
    """Return the group of a figure (see `template.Slot`). A fault slows all figures of a group by the same factor."""
    return f"{figure.test}/{rail}/{partner}/{sorted(figure.params.items())}"


def _observation(
    host: PlannedHost,
    chosen: Mapping[str, Any],
    stage: str,
    figure: PortFigure,
    rail: int,
    scope: Any,
    partner: int | str = "",
) -> Doc:
    kind, in_gang = figure.name.removeprefix(f"{VERBS}."), stage == GANG
    size = chosen["size_bytes"] if figure.test == "verbs.bandwidth" else SMALL_MESSAGE_BYTES
    numa = 2 * rail // len(host.devices)
    params = {
        "sharing": figure.params["sharing"],
        "rail": rail,
        "size_bytes": size,
        **{key: value for key, value in figure.params.items() if key != "sharing"},
        "mtu": MTU_B,
        "gid_type": "IB",
        "gid_index": 0,
        "numa_node": str(numa),
        "pci_path": f"pci0000:{16 + 8 * rail:02x}/0000:{16 + 8 * rail:02x}:01.0/0000:{17 + 8 * rail:02x}:00.0",
    }
    slot = Slot(texts=_texts(host, figure, in_gang=in_gang), group=_group(figure, rail, partner))
    value = {"value": float(MTU_B)} if kind == "mtu" else {"**": slot}
    head = {"name": figure.name, "scope": scope, "stage": stage, "unit": _UNITS[kind], "status": MEASURED}
    return {**head, "params": params, **value}


def _texts(host: PlannedHost, figure: PortFigure, *, in_gang: bool) -> Sequence[str]:
    """Return the texts of the slot for a figure: the JSON member `value` at each level (see `template.Slot`)."""
    kind = figure.name.removeprefix(f"{VERBS}.")
    if kind in ("latency", "message_rate"):
        median, deviation = (assumptions.PAIR_FIGURES if in_gang else assumptions.PORT_FIGURES)[kind]
        return _value_texts(median, deviation)
    share, deviation = assumptions.PAIR_SHARE if in_gang else assumptions.PORT_SHARE
    ways = 2 if figure.params["direction"] == "both_ways" else 1
    return _value_texts(share, deviation, port_rate(host) * ways if kind == "bandwidth" else 1.0)


@lru_cache(maxsize=64)
def _value_texts(median: float, deviation: float, factor: float = 1.0) -> tuple[str, ...]:
    """Return the JSON member `value` at each level, for a value that is multiplied by `factor`.

    `deviation` is the greatest distance from the median, as a share of the median. The standard deviation is a third of that
    distance.
    """
    spread = [median, median * (1 - deviation), median * (1 + deviation), median * deviation / 3]
    return tuple(f'"value":{text}' for text in json_numbers(value * factor for value in values_by_level(spread)))


def update_best(document: Doc) -> None:
    """Compute the figure BEST of each port again, after `verbs.rate_ratio` of a port was changed in the gang record `document`.

    BEST is the greatest `verbs.rate_ratio` of the port over all partners, in the test with the parameters SHARE.
    """
    shares: dict[str, list[float]] = {}
    for item in document["observations"]:
        if item["name"] == "verbs.rate_ratio" and SHARE.items() <= item["params"].items():
            labels = Scope.parse(item["scope"]).labels
            if "partner" in labels:
                shares.setdefault(f"hca={labels['hca']},port={labels['port']}", []).append(item["value"])
    for item in document["observations"]:
        if item["name"] == BEST and item["scope"] in shares:
            item["value"] = max(shares[item["scope"]])
