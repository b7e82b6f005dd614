"""Find slow figures whose cause is that several hosts of the inventory are one machine and were measured at the same time.

Containers of one machine, and several hosts with `ansible_connection: local`, share its processors, host memory, PCIe, disks and
network. If they are measured at the same time, each may be slow although all parts are healthy. Hosts of one machine are
recognised by their equal `host.boot_id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from fleet.judge.drift import DRIFT
from fleet.judge.host_view import HostView
from fleet.judge.reboots import BOOT_ID
from fleet.judge.shared_gpus import is_speed
from schemas.catalogue import BENCHMARKS
from schemas.reports import FAIL, Verdict, VerdictKind
from schemas.scopes import HOST, Scope
from schemas.stages import SOAK
from schemas.times import epoch_seconds

MAX_NAMES = 8
"""Maximum number of hosts that a text names. Most machines have at most eight GPUs, and few have more hosts than GPUs."""


class _Span(NamedTuple):
    """A launch or a soak of a host."""

    stage: str
    began: float
    ended: float
    """`began` and `ended` are in seconds since 1970."""
    is_judged: bool
    """Whether its figures are judged; False for a probe, a cell of a scaling study, or a launch that a later launch replaced."""


class Machines:
    """The hosts with a record, grouped by the boot ID that they report, and when each was measured.

    The objects of several hosts can be merged (`update`) in any order.
    """

    def __init__(self) -> None:
        self._spans: dict[str, dict[str, tuple[_Span, ...]]] = {}
        """Boot ID -> host -> its launches and soaks."""

    def add(self, view: HostView) -> None:
        """Add a host. A host that rebooted during the run has several boot IDs."""
        for boot in _boot_ids(view):
            self._spans.setdefault(boot, {})[view.host.name] = tuple(_spans(view))

    def update(self, other: Machines) -> None:
        """Add the hosts of another object."""
        for boot, hosts in other._spans.items():
            self._spans.setdefault(boot, {}).update(hosts)

    def complete(self) -> None:
        """Remove the hosts that are alone on their machine, to save memory. Call it after the last merge."""
        self._spans = {boot: hosts for boot, hosts in self._spans.items() if len(hosts) > 1}

    def shared(self) -> list[tuple[str, ...]]:
        """Return the hosts of each machine that has several hosts."""
        machines = {tuple(sorted(hosts, key=_natural)) for hosts in self._spans.values() if len(hosts) > 1}
        return sorted(machines, key=lambda hosts: list(map(_natural, hosts)))

    def measured_together(self, view: HostView, stage: str) -> tuple[str, ...]:
        """Return the host and the other hosts of its machine that were measured during its `stage`; empty if no other was."""
        name = view.host.name
        others = {
            other
            for hosts in map(self._spans.get, _boot_ids(view))
            for other, spans in (hosts or {}).items()
            if other != name and any(_overlap(judged, span) for judged in _judged(view, stage) for span in spans)
        }
        return tuple(sorted({name, *others}, key=_natural)) if others else ()


def with_one_machine(views: Iterable[HostView], verdicts: Iterable[Verdict], machines: Machines) -> list[Verdict]:
    """Return the verdicts. A failed speed gets the action `configure` if other hosts of the machine were measured meanwhile.

    The reason then names all these hosts. The verdict remains FAIL. Verdicts on benchmarks that depend on the GPU alone
    (`Benchmark.gpu_bound`) do not change, nor do verdicts of rehearsals, whose hosts may be one machine.

    Args:
        views: the hosts. If a host is in a gang (the hosts of one multi-node launch), `views` must contain all hosts of the gang.
        verdicts: all verdicts on these hosts.
        machines: the machines of the whole run.
    """
    by_name = {view.host.name: view for view in views if not view.plan.rehearsal}

    @cache
    def of_host(host: str, stage: str) -> tuple[str, ...]:
        return machines.measured_together(by_name[host], stage)

    @cache
    def of_gang(gang: str, stage: str) -> tuple[str, ...]:
        members = (name for name, view in by_name.items() if view.host.gang == gang)
        return next(filter(None, (of_host(member, stage) for member in members)), ())

    result = []
    for verdict in verdicts:
        if verdict.verdict == FAIL and verdict.host in by_name and _depends_on_host(verdict):
            hosts = of_host(verdict.host, verdict.stage)
            if not hosts and Scope.parse(verdict.scope).is_gang:
                hosts = of_gang(by_name[verdict.host].host.gang, verdict.stage)
            verdict = _annotated(verdict, hosts)
        result.append(verdict)
    return result


def _annotated(verdict: Verdict, hosts: Sequence[str]) -> Verdict:
    if not hosts:
        return verdict
    names = name_hosts(hosts)
    text = (
        f"{names} are the same machine and were measured at the same time: list this machine as one host in the inventory, "
        "and measure again"
    )
    detail = "; ".join(filter(None, (text, verdict.detail)))
    reason = f"{verdict.reason}; {text}"
    return replace(
        verdict, reason=reason, detail=detail, action="configure", kind=VerdictKind.SHARED_MACHINE, user=names
    )


def name_hosts(hosts: Sequence[str]) -> str:
    """Return the names of several hosts: `h1, h2 and h3`; of more than MAX_NAMES the first ones, and how many more."""
    if len(hosts) > MAX_NAMES:
        return f"{', '.join(hosts[:MAX_NAMES])} and {len(hosts) - MAX_NAMES} more"
    return f"{', '.join(hosts[:-1])} and {hosts[-1]}"


def _depends_on_host(verdict: Verdict) -> bool:
    """Return whether the verdict is on a speed that depends on resources that all hosts of one machine share."""
    first, _, rest = verdict.name.partition(".")
    benchmark = BENCHMARKS.get(rest.partition(".")[0] if first == DRIFT else first)
    return is_speed(verdict) and not (benchmark and benchmark.gpu_bound)


def _boot_ids(view: HostView) -> dict[str, None]:
    """Return the boot IDs that the host reported, in the order of time, as keys."""
    values = (metric.values.get(HOST) for _, metric in view.observations.metrics.get(BOOT_ID, ()))
    return dict.fromkeys(value for value in values if isinstance(value, str) and value)


def _spans(view: HostView) -> Iterator[_Span]:
    """Yield the launches and soaks of a host, except those whose start time is invalid: another check reports them."""
    for launch in view.evidence.launches():
        if (began := _seconds(launch.began)) is not None:
            yield _Span(launch.stage, began, began + launch.duration_s, not launch.observations)
    for soak in (record.soak for record in view.evidence.records):
        if soak and (began := _seconds(soak.began)) is not None:
            yield _Span(SOAK, began, _seconds(soak.ended) or began + soak.soaked_s, True)


def _judged(view: HostView, stage: str) -> list[_Span]:
    """Return the launches and soaks of a stage of the host whose figures are judged."""
    return [span for span in _spans(view) if span.stage == stage and span.is_judged]


def _overlap(first: _Span, second: _Span) -> bool:
    """Return whether two spans have a time in common. All times are from the clock of one machine."""
    return first.began < second.ended and second.began < first.ended


def _seconds(text: str) -> float | None:
    try:
        return epoch_seconds(text)
    except ValueError:
        return None


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which h2 comes before h10."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]
