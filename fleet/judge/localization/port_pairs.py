"""The pair matrix of RDMA ports (the measurements between every two hosts, on each rail), measured below NCCL.

Two facts are known about ports, but not about GPUs: the rate of each port in loopback, and the switch at the other end of its
cable. So a slow port can be distinguished from a slow cable, and a slow switch from many slow ports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.localization.gang_pairs import GangPairs, switch_scope
from fleet.judge.localization.launches import Attempt
from fleet.judge.localization.matrix import GPU, NIC, RAIL, SWITCH, End, PairKind, Suspect
from fleet.judge.port_coverage import BEST, SHARE, port_of
from fleet.judge.wiring.links import host_links
from schemas.records import MEASURED, Observation, Value
from schemas.reports import FAIL, PASS, Verdict
from schemas.scopes import HOST, Scope, pci_address
from schemas.stages import GANG

CABLE = "cable"
ALONE = "verbs.rate_ratio"
"""Figure: bandwidth of a port as a share of the rate that the port and its PCIe links allow. This module uses its
values in loopback (from the port to itself). Of its observations between hosts it uses only the parameter `pcie_rate`."""
NEAREST, ADDRESS = "pcie.nearest_nics", "infiniband.hca.pci_address"
FABRIC_PARTS = (RAIL, SWITCH)
"""Kinds of parts that several hosts share."""


class VerbsPairs(GangPairs):
    """The pairs of RDMA ports: a matrix like that of GPUs, but measured below NCCL. An end is a port."""

    benchmark = "verbs"
    is_one_way = True

    def __init__(self, attempt: Attempt, views: Mapping[str, HostView], verdicts: Sequence[Verdict]) -> None:
        self._scopes: dict[End, str] = {}
        super().__init__(attempt, views, verdicts, collective_slow=False)
        ends = {} if self._only_gross_faults else self._scopes
        failing = {(item.host, item.scope) for item in verdicts if item.name == ALONE and item.verdict == FAIL}
        self._failed_alone = {end: NIC for end, scope in ends.items() if (end[0], scope) in failing}
        self._normal_alone = {end for end in ends if end not in self._failed_alone and self._share_alone(end)}
        self._below_rate = {(item.host, item.scope) for item in verdicts if item.name == BEST and item.verdict == FAIL}
        """Host and scope of each port that is slow with every partner."""
        self._names: dict[str, str] = {}
        """ID of a switch -> its name."""

    def _shares_links(self) -> bool:
        return not all(view.plan.judges_ports(view.host) for view in self._members.values())

    def _is_compared(self, observation: Observation) -> bool:
        """Return whether the observation has the settings SHARE. A setting that it does not state counts as equal."""
        return all(observation.params.get(key, value) == value for key, value in SHARE.items())

    def _rail(self, view: HostView, observation: Observation) -> int | None:
        """Return the rail that the observation names; None if it names no rail or no adapter."""
        rail, scope = observation.params.get("rail"), Scope.parse(observation.scope)
        if type(rail) is not int or not scope.get("hca"):
            return None
        self._scopes[(view.host.name, rail)] = f"hca={scope.get('hca')},port={scope.get('port')}"
        return rail

    def _scope_of_end(self, view: HostView, rail: int) -> str:
        return self._scopes.get((view.host.name, rail), self._scope)

    def _switches(self) -> Mapping[End, str]:
        switches: dict[End, str] = {}
        for host, view in self._members.items() if self._pairs else ():
            links = [link for link in host_links(view).links if link.switch_id]
            by_name = {name: link for link in links for name in link.names}
            for (of_host, rail), scope in self._scopes.items():
                labels = Scope.parse(scope).labels
                name = f"{labels.get('hca')}/{labels.get('port')}"
                link = by_name.get(name) or (by_name.get(labels.get("hca", "")) if labels.get("port") == "1" else None)
                if of_host == host and link:
                    switches[(host, rail)] = link.switch_id
                    self._names[link.switch_id] = link.switch_name
        return switches

    def switches_of_gpus(self) -> Mapping[End, str]:
        """Return end of a pair of GPUs -> the switch of the adapters that the GPU is likely to use, if it is the same for all."""
        at_adapter: dict[tuple[str, str], set[str]] = defaultdict(set)
        for end, switch in self._switches().items():
            at_adapter[end[0], Scope.parse(self._scopes[end]).device].add(switch)
        switches: dict[End, str] = {}
        for host, view in self._members.items() if at_adapter else ():
            for rail in range(len(view.host.scopes)):
                adapters = self.adapters_of_gpu(host, rail)
                of_gpu = {switch for adapter in adapters for switch in at_adapter.get((host, adapter), ())}
                if len(of_gpu) == 1:
                    (switches[host, rail],) = of_gpu
        return switches

    def ports_of_gpus(self, verdicts: Iterable[Verdict]) -> Mapping[End, str]:
        """Return end of a pair of GPUs -> what the pairs of ports show about it. No GPU takes part in the exchange between ports.

        NIC: the adapter of the GPU is slow, and not its host, rail or switch. GPU: the adapter is normal, so that a slow end is
        not due to it. Empty: the host, rail, switch or path of the adapter is slow. Ends without measured adapters are left out.

        Args:
            verdicts: the verdicts on these ports.
        """
        measured = {(host, pair.rail) for pair in self._pairs for host in (pair.a, pair.b)}
        findings = {(end[0], Scope.parse(self._scopes[end]).device): GPU for end in measured & self._scopes.keys()}
        findings |= {(end[0], Scope.parse(self._scopes[end]).device): NIC for end in self._failed_alone}
        for item in verdicts:
            if item.verdict != PASS:
                is_adapter = Scope.parse(item.part_scope).device_kind == "hca"
                findings[item.host, Scope.parse(item.scope).device] = NIC if is_adapter else ""
        whole_host = (HOST, self._scope)
        ends: dict[End, str] = {}
        for host in {host for host, _ in findings}:
            for rail in range(len(self._members[host].host.scopes)):
                parts = (*whole_host, *self.adapters_of_gpu(host, rail))
                of_end = {findings[host, part] for part in parts if (host, part) in findings}
                if of_end:
                    ends[host, rail] = next(kind for kind in (NIC, "", GPU) if kind in of_end)
        return ends

    def adapters_of_gpu(self, host: str, rail: int) -> set[str]:
        """Return the scopes of the adapters that the GPU of a rail is likely to use, such as `hca=mlx5_2`.

        These are the adapters nearest to the GPU. If several are equally near, or none is known, it is the one whose port has the
        number of the rail, if there is one.
        """
        view = self._members[host]
        gpu = view.host.scopes[rail] if rail < len(view.host.scopes) else ""
        nearest = {
            address for item in view.observations[NEAREST] if item.scope == gpu for address in _words(item.value)
        }
        known = {item.scope for item in view.observations[ADDRESS] if pci_address(str(item.value)) in nearest}
        by_number = {Scope.parse(scope).device for end, scope in self._scopes.items() if end == (host, rail)}
        return known & by_number or known or by_number

    def _least_speeds(self) -> Mapping[PairKind, float]:
        """Return kind of pair -> the lowest bandwidth of a healthy pair in B/s.

        It is a share of the lowest rate among the ports of all pairs of the kind. If PCIe limits a port to less than its
        rate, the rate over PCIe is used instead (parameter `pcie_rate`).
        """
        rates: dict[End, float] = {}
        for (host, rail), scope in self._scopes.items():
            values = [
                metric.values for _, metric in self._members[host].observations.metrics.get("infiniband.rate", ())
            ]
            known = [float(rate) for each in values if isinstance(rate := each.get(scope), int | float)]
            rates[host, rail] = min([max(known, default=0.0), *self._pcie_rates(host, scope)])
        share = self._least_share(BEST)
        least: dict[PairKind, float] = {}
        for pair in self._pairs:
            rate = share * min(rates.get((pair.a, pair.rail), 0.0), rates.get((pair.b, pair.rail), 0.0))
            least[pair.kind] = min(least.get(pair.kind, rate), rate)
        return least

    def _pcie_rates(self, host: str, scope: str) -> Iterator[float]:
        """Yield the rates in B/s that PCIe allows to a port in its tests with other hosts, if below the port's rate."""
        for item in self._members[host].observations[ALONE]:
            limit = item.params.get("pcie_rate")
            is_of_port = item.stage == GANG and port_of(item.scope) == scope
            if is_of_port and self._is_compared(item) and isinstance(limit, int | float):
                yield float(limit)

    def _least_share(self, name: str) -> float:
        return least_share(next(iter(self._members.values())), name)

    def _kind_name(self, suspect: Suspect) -> str:
        """Return `cable` for a port that is slow with every partner, but not in loopback; otherwise the kind of the suspect."""
        if suspect.kind == NIC and 0.0 < self._least_share(ALONE) <= self._share_alone(_end_of(suspect)):
            return CABLE
        return super()._kind_name(suspect)

    def _share_alone(self, end: End) -> float:
        """Return the lowest bandwidth of a port in loopback, as a share of the port's rate; 0 if not measured."""
        host, rail = end
        view = self._members[host]
        scope = self._scope_of_end(view, rail)
        shares = (
            item.value
            for item in view.observations[ALONE]
            if item.scope == scope and item.stage != GANG and item.status == MEASURED and self._is_compared(item)
        )
        return min((float(share) for share in shares if isinstance(share, int | float)), default=0.0)

    def _fails(self, suspect: Suspect) -> bool:
        """Return whether the hosts of the suspect get the verdict FAIL.

        The hosts at a rail or switch also get FAIL if one of the ports there is slow with every partner.
        """
        if suspect.kind in FABRIC_PARTS and self._ends_below_rate(suspect):
            return True
        return super()._fails(suspect)

    def _ends_below_rate(self, suspect: Suspect) -> bool:
        return any(
            (host, scope) in self._below_rate
            for (host, rail), scope in self._scopes.items()
            if rail in suspect.rails and host in (suspect.hosts or self._members)
        )

    def _is_reported(self, suspect: Suspect) -> bool:
        return super()._is_reported(suspect) or self._fails(suspect)

    def _suspect_verdicts(self, suspect: Suspect) -> Iterator[Verdict]:
        """Yield the verdicts on a suspect: one for each host; for a rail or switch, one for each port on the suspect's rails."""
        for verdict in super()._suspect_verdicts(suspect):
            if suspect.kind == NIC:
                yield self._with_share_alone(verdict, suspect)
                continue
            if suspect.kind not in FABRIC_PARTS:
                yield verdict
                continue
            part = f"rail={suspect.rails[0]}" if suspect.kind == RAIL else switch_scope(suspect.where)
            name = self._names.get(suspect.where, "")
            note = f"; the switch is {name}" if suspect.kind == SWITCH and name != suspect.where else ""
            for scope in [
                self._scopes[end] for end in self._scopes if end[0] == verdict.host and end[1] in suspect.rails
            ]:
                detail, reason = f"{verdict.detail}{note}", f"{verdict.reason}{note}"
                yield replace(verdict, scope=scope, part=part, detail=detail, reason=reason)

    def _with_share_alone(self, verdict: Verdict, suspect: Suspect) -> Verdict:
        share, least = self._share_alone(_end_of(suspect)), self._least_share(ALONE)
        if not share or not least:
            return verdict
        conclusion = (
            "the cause is its cable, a module or the switch port"
            if share >= least
            else "the cause is the port, its PCIe slot or its settings, not the cable"
        )
        note = f"in loopback the port reaches {100 * share:.0f} % of its rate: {conclusion}"
        return replace(verdict, reason=f"{verdict.reason}; {note}", detail=f"{verdict.detail}; {note}")


def _end_of(suspect: Suspect) -> End:
    """Return the end of a suspect that is a single port."""
    (host,), (rail,) = suspect.hosts, suspect.rails
    return host, rail


def least_share(view: HostView, name: str) -> float:
    """Return the share of a port's rate that a healthy port reaches: the strictest limit of figure `name`; 0 without a limit."""
    limits = (item.value for item in view.criteria().values() if item.name == name and item.operator == "ge")
    return max((float(limit) for limit in limits if isinstance(limit, int | float)), default=0.0)


def _words(value: Value) -> list[str]:
    return value.split() if isinstance(value, str) else []
