"""The pair matrix of one gang launch (a gang: the hosts of one multi-node launch), its suspects, and the verdicts on them.

The pair matrix has the measurements between every two hosts, on each rail: the observations `pairs.bandwidth` and
`pairs.latency` between GPUs. The matrix of RDMA ports (`port_pairs.py`) has `verbs.bandwidth` and `verbs.latency`. Between GPUs,
a rail is the position of a GPU among the GPUs under test of its host. One host of a pair, with its rail, is an end.

A slow host fails, and a slow NIC or GPU fails its host. A slow link between two hosts is inconclusive on both of them, because a
link also looks slow if another pair of hosts uses one of its cables at the same time. But the slow link
fails both hosts if the collectives are slow too, and no other suspect explains that. A link over which no data could be
exchanged also fails both hosts. In both cases, the hosts fail only if both are normal with other hosts.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from fleet.judge.evidence import from_benchmark
from fleet.judge.host_view import HostView
from fleet.judge.localization.faults import CRITERION, STAGE
from fleet.judge.localization.launches import EVEN_ODDS, Attempt
from fleet.judge.localization.matrix import (
    BANDWIDTH,
    FABRIC,
    GPU,
    HOST,
    LATENCY,
    LINK,
    NIC,
    RAIL,
    SWITCH,
    End,
    Pair,
    PairKind,
    Suspect,
    Tolerance,
)
from fleet.judge.localization.slow import MIN_HOSTS
from fleet.judge.localization.suspects import comparable_pairs, find_suspects
from fleet.quantities import counted
from fleet.quantities import quantity as shown
from fleet.scope_text import describe_scope
from schemas.records import ERROR, MEASURED, Observation
from schemas.reports import FAIL, INCONCLUSIVE, OF_INVENTORY, PASS, Verdict, VerdictKind
from schemas.scopes import Scope, pci_address

_KIND_NAMES = {NIC: "NIC", GPU: "GPU"}
UNITS = {BANDWIDTH: "B/s", LATENCY: "s"}
SOURCE = "Rackproof policy: equal hosts on one fabric reach the same speed with each other (docs/localisation.md)"
REHEARSAL_TOLERANCE = Tolerance(bandwidth=0.75, latency=0.9, sigmas=2)
"""Tolerances of a rehearsal (a run on CPUs): a quarter (1 - 0.75) of the typical bandwidth and ten times (1 / (1 - 0.9)) the
typical latency still pass. Most noise on CPUs stays within these limits.

`sigmas` is 2, not 6: with 6, the noise of five processes on a busy machine hid a host that was a hundred times too slow."""
REHEARSAL_MIN_CONFIDENCE = 0.8
"""Confidence from which a slow host of a rehearsal is reported. A host that is slow in three comparisons out of three
reaches it. A single slow pair is no evidence, because another process may be using the CPU."""
LINK_PARAM = "link"
"""Parameter of the verdicts on a link: its two hosts, and its slow rails if not all of its rails are slow."""
MAX_ID = 64
"""Maximum length of the ID of a switch in a scope."""
ON_PATH = (
    *("gpu.pcie.*", "pcie.*", "host_copy.*", "pageable_copy.*"),
    *("gpu.throttle.*", "gpu.clock.*", "gpu.temperature*", "stress.throttled_share"),
    *("xid.*", "gpu.recovery_action", "kernel.event.*"),
)
"""Observations of a GPU whose failure explains that its exchange with other hosts is slow or fails.

They show its PCIe link, its clocks, and errors that stop it. Others, such as another VBIOS, a memory error or a lost NVLink, do
not slow this exchange, so a NIC that was not measured without the GPU may be slow as well."""
SLOW_RAIL = 0.75
"""Share of the typical speed below which a rail is reported even if no collective is slow. Smaller differences between rails may
be by design."""


@dataclass
class _PairReports:
    """The measurements that the two hosts of a pair reported for one rail."""

    values: dict[str, list[float]] = field(default_factory=lambda: {BANDWIDTH: [], LATENCY: []})
    failures: dict[str, str] = field(default_factory=dict)
    """Quantity -> why an end did not measure it."""
    ends: dict[str, set[str]] = field(default_factory=lambda: {MEASURED: set(), ERROR: set()})
    """MEASURED -> the hosts of the pair with a measurement; ERROR -> those with an error."""

    @property
    def only_failed_end(self) -> str:
        """Return the host that reported an error, if the other host of the pair measured without an error; otherwise empty."""
        (failing, *others), measuring = [*self.ends[ERROR], ""], self.ends[MEASURED] - self.ends[ERROR]
        return failing if measuring and not any(others) else ""

    def failed(self, *, either_end: bool) -> str:
        """Return why the pair failed, or an empty string.

        Args:
            either_end: whether an error at one end is enough. If false, an error in a quantity counts only if neither end
                measured this quantity: a value from one end shows that the exchange took place.
        """
        reasons = (why for quantity, why in self.failures.items() if either_end or not self.values[quantity])
        return next(reasons, "")

    def value(self, quantity: str, *, slower_end: bool) -> float | None:
        """Return the mean of both ends or, with `slower_end`, the worse value; None if the pair failed or was not measured."""
        values = self.values[quantity]
        if not values or self.failed(either_end=slower_end):
            return None
        slower = min if quantity == BANDWIDTH else max
        return slower(values) if slower_end else statistics.fmean(values)

    def add(self, quantity: str, observation: Observation, host: str) -> None:
        """Add the measurement or the error of one end."""
        value = observation.value
        if observation.status in self.ends:
            self.ends[observation.status].add(host)
        if observation.status == MEASURED and isinstance(value, int | float) and math.isfinite(value) and value > 0:
            self.values[quantity].append(float(value))
        elif observation.status == MEASURED:
            self.failures.setdefault(quantity, f"invalid {quantity}: {value!r:.40}")
        elif observation.status == ERROR:
            self.failures.setdefault(quantity, observation.reason)


def _drop_errors_of_one_end(reports: Mapping[tuple[str, str, int], _PairReports]) -> None:
    """Drop the errors of one end of a pair if the other end measured without an error.

    Data in one direction needs acknowledgements in the other direction. So the path works, and the errors are no evidence against
    it. Other verdicts report that the figures of the failed end are missing. If an end has such errors with most of its partners,
    and with at least two, its errors are kept: then its port is suspect.
    """
    own_errors: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for (a, b, rail), report in reports.items():
        for host in (a, b):
            own_errors[host, rail].append(report.only_failed_end == host)
    for (*_, rail), report in reports.items():
        of_end = own_errors.get((report.only_failed_end, rail), [])
        if of_end and not (sum(of_end) > 1 and 2 * sum(of_end) > len(of_end)):
            report.failures.clear()


class GangPairs:
    """The pairs of one gang launch, their suspects and the verdicts."""

    benchmark = "pairs"
    is_one_way = False
    """Whether each end measures only the data that it sends. Otherwise both ends measure the same exchange in both directions."""

    def __init__(
        self,
        attempt: Attempt,
        views: Mapping[str, HostView],
        verdicts: Sequence[Verdict],
        collective_slow: bool,
        switches: Mapping[End, str] | None = None,
        ports: Mapping[End, str] | None = None,
    ) -> None:
        """Find the pairs of the launch.

        Args:
            attempt: the launch.
            views: the hosts.
            verdicts: earlier verdicts, which show the GPUs that failed alone.
            collective_slow: whether a collective of the gang was too slow, unless settings of NCCL explain that.
            switches: end -> the switch that its port is connected to, for the ends whose switch is known.
            ports: end -> what is known about its port (`VerbsPairs.ports_of_gpus`).
        """
        self._scope = f"gang={attempt.gang}"
        self._attempt = attempt
        members = {host: views[host] for host in attempt.launches}
        self._members = members
        self._rails = {
            name: {str(device): rail for rail, device in enumerate(view.host.devices)} for name, view in members.items()
        }
        """Host -> device under test -> its rail."""
        self._collective_slow = collective_slow
        self._known_switches = switches or {}
        self._only_gross_faults = self._shares_links()
        """Whether the pairs may share one link, as in a rehearsal on one machine, so that only gross faults are reported."""
        self._by_slower_end = self._only_gross_faults or self.is_one_way
        """Whether the value of the slower end counts for the pair, and not the mean of both ends.

        If `is_one_way`, the ends measure different directions. In a rehearsal, the faster end is unreliable: it may count data as
        sent that has only reached a socket buffer.
        """
        self._tolerance = REHEARSAL_TOLERANCE if self._only_gross_faults else Tolerance()
        self._pairs = self._measured_pairs()
        self._compared = {quantity: comparable_pairs(self._pairs, quantity) for quantity in UNITS}
        self._failed_alone: Mapping[End, str] = {}
        """End -> which of its parts (GPU or NIC) fails a check without other hosts that explains slow pairs."""
        self._normal_alone: Collection[End] = ()
        """The ends that are RDMA ports, and are normal in loopback."""
        if not self._only_gross_faults:
            ports = ports or {}
            gpus = (end for end in _failed_alone(members, verdicts, ports) if ports.get(end, GPU) == GPU)
            slow_ports = (end for end, kind in ports.items() if kind == NIC)
            self._failed_alone = dict.fromkeys(gpus, GPU) | dict.fromkeys(slow_ports, NIC)

    def _shares_links(self) -> bool:
        """Return whether several pairs may use the same link, because the hosts may be one machine."""
        return next(iter(self._members.values())).plan.rehearsal

    def _measured_pairs(self) -> list[Pair]:
        reports: dict[tuple[str, str, int], _PairReports] = defaultdict(_PairReports)
        culprits = self._attempt.culprits()
        for host, view in self._members.items():
            for quantity in UNITS:
                name = f"{self.benchmark}.{quantity}"
                for observation in self._latest(host, name):
                    key = self._pair_key(view, observation)
                    # An error in the exchange with a host that stopped the launch is no evidence against its partner.
                    if key and not (observation.status == ERROR and culprits.keys() & set(key)):
                        reports[key].add(quantity, observation, host)
        if self.is_one_way and not self._only_gross_faults:
            _drop_errors_of_one_end(reports)
        pairs = [
            Pair(
                a=a,
                b=b,
                rail=rail,
                bandwidth=report.value(BANDWIDTH, slower_end=self._by_slower_end),
                latency=report.value(LATENCY, slower_end=self._by_slower_end),
                failed=report.failed(either_end=self._by_slower_end),
                kind=self._pair_kind(a, b),
            )
            for (a, b, rail), report in sorted(reports.items())
            if report.failures or any(report.values.values())
        ]
        return _merge_rails(pairs) if self._only_gross_faults else pairs

    def _latest(self, host: str, name: str) -> Collection[Observation]:
        """Return for each pair the last measurement or error; if it has neither, its first observation.

        A pair may be tested several times in a launch. If a test fails, the later tests are reported as skipped; then the
        error is returned.
        """
        latest: dict[str, Observation] = {}
        for item in self._attempt.named(host, name):
            if self._is_compared(item) and (item.status in (MEASURED, ERROR) or item.scope not in latest):
                latest[item.scope] = item
        return latest.values()

    def _pair_key(self, view: HostView, observation: Observation) -> tuple[str, str, int] | None:
        """Return the two hosts in alphabetical order and the rail; None if the observation is not of a pair of the gang."""
        partner, rail = Scope.parse(observation.scope).get("partner"), self._rail(view, observation)
        if observation.stage != STAGE or rail is None or partner not in self._members or partner == view.host.name:
            return None
        a, b = sorted((view.host.name, partner))
        return a, b, rail

    def _switches(self) -> Mapping[End, str]:
        """Return end -> the switch that its port is connected to, for the ends whose switch is known."""
        return self._known_switches

    def _least_speeds(self) -> Mapping[PairKind, float]:
        """Return kind of pair -> the lowest bandwidth of a healthy pair in B/s, for the kinds for which it is known."""
        return {}

    def _kind_name(self, suspect: Suspect) -> str:
        return _KIND_NAMES.get(suspect.kind, suspect.kind)

    def _is_compared(self, observation: Observation) -> bool:
        """Return whether the observation belongs in the matrix."""
        return True

    def _rail(self, view: HostView, observation: Observation) -> int | None:
        """Return the rail of an observation: the position of its GPU among the GPUs under test; None if it has no such GPU."""
        index = Scope.parse(observation.scope).get(view.host.device)
        return self._rails[view.host.name].get(index)

    def _scope_of_end(self, view: HostView, rail: int) -> str:
        return view.host.scopes[rail]

    def _pair_kind(self, a: str, b: str) -> PairKind:
        first, second = (self._members[name].host for name in (a, b))
        return PairKind(across=first.rack != second.rack, gbps=min(first.fabric_gbps, second.fabric_gbps))

    @property
    def hosts(self) -> frozenset[str]:
        """Return the hosts of the pairs that were attempted."""
        return frozenset(host for pair in self._pairs for host in (pair.a, pair.b))

    def verdicts(self) -> Iterator[Verdict]:
        """Yield verdicts on the suspects, then passes for the other hosts if there are at least three hosts."""
        if not self._pairs:
            return
        suspects = find_suspects(
            self._pairs,
            failed_alone=self._failed_alone,
            normal_alone=self._normal_alone,
            collective_slow=self._collective_slow,
            tolerance=self._tolerance,
            switches=self._switches(),
            least=self._least_speeds(),
        )
        suspects = [suspect for suspect in suspects if self._is_reported(suspect)]
        self._is_collective_explained = any(item.kind != LINK and self._fails(item) for item in suspects)
        suspect_verdicts = [verdict for suspect in suspects for verdict in self._suspect_verdicts(suspect)]
        yield from suspect_verdicts
        suspected = {verdict.host for verdict in suspect_verdicts}
        hosts = dict.fromkeys(host for pair in self._pairs for host in (pair.a, pair.b))
        for host in hosts if len(hosts) >= MIN_HOSTS else ():
            if host not in suspected:
                yield from self._passes(host)

    def _is_reported(self, suspect: Suspect) -> bool:
        if self._only_gross_faults and not _is_gross_fault(suspect):
            return False
        return suspect.kind != RAIL or self._collective_slow or _is_failed_or_much_slower(suspect)

    def _suspect_verdicts(self, suspect: Suspect) -> Iterator[Verdict]:
        for host in suspect.hosts or tuple(self._members):
            yield self._suspect_verdict(host, suspect)

    def _suspect_verdict(self, host: str, suspect: Suspect) -> Verdict:
        view = self._members[host]
        scope = self._scope
        if suspect.kind == HOST:
            scope = "host"
        elif len(suspect.hosts) == 1:
            scope = self._scope_of_end(view, suspect.rails[0])
        fails = self._fails(suspect)
        part, serial = "", view.serial(scope)
        note = ""
        if suspect.kind == LINK and not fails:
            note = "; measure again: the link also looks slow if another pair uses one of its cables at the same time"
        elif suspect.kind == NIC and scope in view.host.scopes:
            # The serial of the NIC is not known. With the serial of the GPU, the GPU would be sent back instead of the NIC.
            address = next((gpu.pci_bus_id for gpu in view.gpus if f"gpu={gpu.index}" == scope and gpu.pci_bus_id), "")
            known = (f"serial {serial}" if serial else "", f"PCI {pci_address(address)}" if address else "")
            identity = ", ".join(filter(None, known))
            note = f"; it is the NIC that {describe_scope(scope)}{f' ({identity})' if identity else ''} uses"
            part, serial = f"nic=rail{suspect.rails[0]}", ""
        elif suspect.kind == SWITCH:
            part, serial = switch_scope(suspect.where), ""
        elif suspect.kind == RAIL:
            part, serial = f"rail={suspect.rails[0]}", ""
        kind = self._kind_name(suspect)
        is_in_name = suspect.where.startswith(f"{kind} ")  # the name of a rail is `rail 1`
        title = f"suspect {suspect.where}" if is_in_name else f"suspect {kind} {suspect.where}".strip()
        names_part = bool(part) or scope != self._scope
        quantity = suspect.quantity
        return Verdict(
            host=host,
            scope=scope,
            part=part,
            serial=serial,
            name=f"{self.benchmark}.{quantity}",
            stage=STAGE,
            verdict=FAIL if fails else INCONCLUSIVE,
            criterion=CRITERION,
            kind=VerdictKind.SUSPECT,
            value=suspect.measured,
            limit=suspect.limit,
            operator=_operator(quantity) if suspect.limit is not None else "",
            unit=UNITS[quantity],
            params={LINK_PARAM: suspect.where} if suspect.kind == LINK else {},
            reason=f"{title} (confidence {suspect.confidence:.2f}): {suspect.evidence}{note}",
            detail=f"{'' if names_part else f'{title}: '}{suspect.evidence}{note}",
            action="inspect_hardware" if fails else "none",
            source=SOURCE,
            basis="policy",
        )

    def _fails(self, suspect: Suspect) -> bool:
        """Return whether the suspect fails its hosts.

        A rail, switch or fabric may be slow by design, so it fails its hosts only if the collective is slow too. A link fails
        its hosts if they could not exchange data, or if the collective is slow and no other suspect explains that. In both cases,
        both hosts must be normal with other hosts.
        """
        if suspect.kind == LINK:
            is_cause = self._collective_slow and not self._is_collective_explained
            if len(self.hosts) < MIN_HOSTS:
                return is_cause
            # A link without a measurement has failed. If both ends work with other hosts, the confidence is above EVEN_ODDS.
            return (suspect.measured is None or is_cause) and suspect.confidence > EVEN_ODDS
        return suspect.kind not in (RAIL, SWITCH, FABRIC) or self._collective_slow

    def _passes(self, host: str) -> Iterator[Verdict]:
        """Yield a pass for each quantity of a host that is no suspect. A single slow pair of it may miss the limit."""
        for quantity, unit in UNITS.items():
            measured = [
                (pair, value) for pair in self._compared[quantity] if (value := _value(pair, quantity)) is not None
            ]
            host_values = [value for pair, value in measured if host in (pair.a, pair.b)]
            if not host_values:
                continue
            value, typical = statistics.median(host_values), statistics.median(value for _, value in measured)
            limit = typical * (1 - self._tolerance.bandwidth)
            if quantity == LATENCY:
                limit = typical / (1 - self._tolerance.latency)
            within = value >= limit if quantity == BANDWIDTH else value <= limit
            conclusion = "no part of the host is slow" if within else "slow, but no part of this host is a suspect"
            yield Verdict(
                host=host,
                scope=self._scope,
                name=f"{self.benchmark}.{quantity}",
                stage=STAGE,
                verdict=PASS,
                criterion=CRITERION,
                value=value,
                limit=limit if within else None,
                operator=_operator(quantity) if within else "",
                unit=unit,
                reason=f"the median of its {counted(len(host_values), 'pair')} is {shown(value, unit)}, "
                f"and that of all pairs of the gang is {shown(typical, unit)}: {conclusion}",
                source=SOURCE,
                basis="policy",
            )


def switch_scope(switch: str) -> str:
    """Return the scope of a switch. Characters of its ID that a scope cannot contain are replaced."""
    text = re.sub(r"[^\w.:-]", "_", switch, flags=re.ASCII)[:MAX_ID]  # a switch may send any text
    return f"switch={text}"


def _operator(quantity: str) -> str:
    return "ge" if quantity == BANDWIDTH else "le"


def _value(pair: Pair, quantity: str) -> float | None:
    return pair.bandwidth if quantity == BANDWIDTH else pair.latency


def _merge_rails(pairs: Iterable[Pair]) -> list[Pair]:
    """Return one `Pair` for every two hosts, merged from all their rails (`_merged_pair`), with the rail number 0.

    In a rehearsal, all rails of two hosts share one link. Some rails also share a CPU.
    """
    rails_of_link: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        rails_of_link[(pair.a, pair.b)].append(pair)
    return [replace(_merged_pair(rails), rail=0) for rails in rails_of_link.values()]


def _merged_pair(rails: Sequence[Pair]) -> Pair:
    """Return the pair of the first rail that failed; if none failed, a pair with the best bandwidth and latency of all rails."""
    return next((pair for pair in rails if pair.failed), None) or replace(
        rails[0],
        bandwidth=max((pair.bandwidth for pair in rails if pair.bandwidth is not None), default=None),
        latency=min((pair.latency for pair in rails if pair.latency is not None), default=None),
    )


def _is_failed_or_much_slower(suspect: Suspect) -> bool:
    """Return whether a rail failed or has less than SLOW_RAIL of the typical speed."""
    if suspect.measured is None or suspect.typical is None:
        return True
    is_rate = suspect.quantity == BANDWIDTH
    share = suspect.measured / suspect.typical if is_rate else suspect.typical / suspect.measured
    return share < SLOW_RAIL


def _is_gross_fault(suspect: Suspect) -> bool:
    """Return whether all pairs of the suspect failed, or the suspect is a host that is slow with enough partners."""
    return suspect.measured is None or (suspect.kind == HOST and suspect.confidence >= REHEARSAL_MIN_CONFIDENCE)


def _failed_alone(
    members: Mapping[str, HostView], verdicts: Iterable[Verdict], ports: Mapping[End, str]
) -> Collection[End]:
    """Return the ends whose GPU fails a check without other hosts that explains slow pairs.

    If the port of the end is normal (`ports`), every check explains them, otherwise only those in ON_PATH. Checks without an
    action do not count, nor failures that a wrong inventory or a change of the software explains. A check that most GPUs of the
    gang fail, for example because of a setting, does not explain why the pairs of one of them are slower.
    """
    failures: dict[str, set[End]] = defaultdict(set)
    for verdict in verdicts:
        view = members.get(verdict.host)
        scope = verdict.part_scope
        is_joint = verdict.stage == STAGE and from_benchmark(verdict.name)
        is_configured = verdict.kind in (*OF_INVENTORY, VerdictKind.SOFTWARE) and verdict.action == "configure"
        requires_action = verdict.verdict == FAIL and verdict.action != "none" and not is_configured
        if view and requires_action and not is_joint and scope in view.host.scopes:
            failures[verdict.name].add((verdict.host, view.host.scopes.index(scope)))
    total = sum(len(view.host.scopes) for view in members.values())
    return {
        end
        for name, ends in failures.items()
        for end in ends
        if 2 * len(ends) <= total and (ports.get(end) == GPU or any(fnmatchcase(name, pattern) for pattern in ON_PATH))
    }
