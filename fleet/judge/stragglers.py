"""Explain stragglers in data-parallel training: a failed `straggler.compute` gets the readings of its GPU and of its host's CPU
during the same steps, beside the median of its peers.

A criterion (`vs_fleet`) decides that a rank is too slow. This module adds the rank and the cause: readings that differ from the
other GPUs of the model in the same stage. It judges nothing.
"""

from __future__ import annotations

import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge.host_view import HostView
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, Verdict

NAME = "straggler.compute"
OUT_OF_LINE = 0.05
"""Share of the peers' median: healthy GPUs of a model differ by less in clock. Also the smallest relevant share of time."""
HOTTER_K = 10.0
MORE_PRESSURE = 0.2
LAUNCH_BOUND = 0.9
"""Share of the computing time after which the host was still launching kernels: then the GPU waits for its host."""
REASONS: Mapping[str, str] = {
    "hw_thermal": "thermal slowdown (hardware)",
    "sw_thermal": "thermal slowdown (software)",
    "hw_power_brake": "power brake",
    "hw_slowdown": "hardware slowdown",
}
"""NVML's clock event reasons in words."""
POWER_CAP = "power_cap"
"""Not among them: healthy GPUs run into their power limit for some or all of the time."""

Figures = Mapping[str, float]
"""Last part of the name (and the reason, for a share) -> value."""
Kind = tuple[str, str]
"""GPU model and stage."""
Sign = Callable[[Figures, Figures], str]
"""Own figures and the peers' medians -> what is out of line, or an empty string."""


class RankFigures:
    """What was seen of the ranks of each GPU model in each stage; several, each of other hosts, can be put together."""

    def __init__(self, views: Iterable[HostView] = ()) -> None:
        self._series: dict[Kind, dict[str, array[float]]] = {}
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Takes the figures of a host's ranks."""
        for kind, ranks in _own(view).items():
            series = self._series.setdefault(kind, {})
            for figures in ranks.values():
                for name, value in figures.items():
                    series.setdefault(name, array("d")).append(value)

    def add_figure(self, kind: Kind, figure: str, value: float) -> None:
        """Takes one figure of one rank."""
        self._series.setdefault(kind, {}).setdefault(figure, array("d")).append(value)

    def update(self, other: RankFigures) -> None:
        """Takes the figures that another has."""
        for kind, series in other._series.items():
            mine = self._series.setdefault(kind, {})
            for name, values in series.items():
                mine.setdefault(name, array("d")).extend(values)

    def peer_medians(self, kind: Kind, own: Figures) -> dict[str, float]:
        """The medians of the others."""
        return _medians(self._series.get(kind, {}), own)


def _medians(series: Mapping[str, Iterable[float]], own: Figures) -> dict[str, float]:
    """The median of each figure, one's own left out."""
    result = {}
    for name, values in series.items():
        others = sorted(values)
        if name in own:
            others.remove(own[name])
        if others:
            result[name] = statistics.median(others)
    return result


def _own(view: HostView) -> dict[Kind, dict[str, dict[str, float]]]:
    """The figures of a host's ranks: GPU model and stage -> scope -> figure -> value."""
    result: dict[Kind, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for kind, figure, observation in ranks_of(view):
        if isinstance(observation.value, float | int):
            result[kind][observation.scope][figure] = float(observation.value)
    return result


def ranks_of(view: HostView) -> Iterator[tuple[Kind, str, Observation]]:
    """What was measured of each rank, the last of each figure, with the ranks that it is like."""
    latest: dict[tuple[Kind, str, str], Observation] = {}
    for name in view.observations:
        for observation in view.observations[name] if name.startswith("straggler.") else ():
            number = isinstance(observation.value, float | int)
            if observation.scope in view.host.scopes and observation.status == MEASURED and number:
                figure = f"{name.rpartition('.')[2]} {observation.params.get('reason', '')}".strip()
                latest[(_key(view, observation.stage, observation.scope), observation.scope, figure)] = observation
    return ((kind, figure, observation) for (kind, _, figure), observation in latest.items())


def with_straggler_causes(
    views: Iterable[HostView], verdicts: Sequence[Verdict], known: RankFigures | None = None
) -> list[Verdict]:
    """The verdicts, those on ranks that compute too long with who it is, what it costs the others, and the cause.

    `known` are the ranks of the whole fleet, where there are more than those of the views. Where it is a setting of the host's
    CPU that explains it, and nothing of the GPU is out of line, no part is to be acted on.
    """
    if not any(_names(verdict) for verdict in verdicts):
        return list(verdicts)
    hosts = {view.host.name: view for view in views}
    known = known or RankFigures(hosts.values())
    return [
        _told(hosts[item.host], item, known, hosts.values()) if _names(item) and item.host in hosts else item
        for item in verdicts
    ]


def _mates(view: HostView, kind: Kind, views: Iterable[HostView]) -> dict[str, list[float]]:
    """The figures of those that were launched with the ranks of this host, and of itself."""
    series: dict[str, list[float]] = defaultdict(list)
    for other in views:
        same = other is view or (kind[1] == "gang" and other.host.gang == view.host.gang)
        for figures in _own(other).get(kind, {}).values() if same else ():
            for name, value in figures.items():
                series[name].append(value)
    return series


def _names(verdict: Verdict) -> bool:
    return verdict.name == NAME and verdict.verdict == FAIL and isinstance(verdict.value, float | int)


def _key(view: HostView, stage: str, scope: str) -> Kind:
    return view.names.get(scope, ""), stage


def _told(view: HostView, verdict: Verdict, known: RankFigures, views: Iterable[HostView]) -> Verdict:
    kind = _key(view, verdict.stage, verdict.scope)
    figures = _own(view).get(kind, {}).get(verdict.scope, {})
    own, usual = {**figures, "compute": float(verdict.value or 0)}, known.peer_medians(kind, figures)
    mates = _medians(_mates(view, kind, views), figures)
    gpu, host = _signs(ON_GPU, own, usual), _signs(ON_HOST, own, usual)
    withheld = _signs(WITHHELD, own, usual)
    causes = [*gpu, *withheld, *host]
    why = "; ".join(causes) or "nothing that was read of its GPU and its host's CPU in those steps explains it"
    text = f"{_who(view, verdict)} computes {_longer(own, usual)}{_waited(own, mates)}: {why}"
    return replace(
        verdict,
        reason=f"{text}; {verdict.reason}",
        detail="; ".join(part for part in (text, verdict.detail) if part),
        action="none" if withheld and not gpu else verdict.action,
    )


def _who(view: HostView, verdict: Verdict) -> str:
    """Return `rank 3 (node2 gpu=1)`, with its number in the last launch of the stage if it has one."""
    launches = [launch for launch in view.evidence.launches() if launch.stage == verdict.stage]
    local = view.host.scopes.index(verdict.scope) if verdict.scope in view.host.scopes else -1
    rank = [rank.rank for launch in launches[-1:] for rank in launch.ranks if rank.local_rank == local]
    where = f"{view.host.name} {verdict.scope}"
    return f"rank {rank[0]} ({where})" if rank else where


def _longer(own: Figures, usual: Figures) -> str:
    peers = usual.get("compute", 0.0)
    return f"{(own['compute'] / peers - 1) * 100:.0f} % longer than its peers" if peers else "longer than its peers"


def _waited(own: Figures, mates: Figures) -> str:
    """What it costs those that run with it, where they wait and it does not."""
    wait = mates.get("wait", 0.0)
    if wait < OUT_OF_LINE * own["compute"] or wait < 2 * own.get("wait", 0.0):
        return ""
    share = own.get("last_share", 0.0)
    return f" (the others wait {_ms(wait)} a step; it is the last in {share * 100:.0f} % of them)"


def _signs(signs: Iterable[Sign], own: Figures, usual: Figures) -> list[str]:
    return [text for sign in signs if (text := sign(own, usual))]


def _both(name: str, own: Figures, usual: Figures) -> tuple[float, float]:
    """A figure and its usual value; 0 if it was not reported."""
    return own.get(name, 0.0), usual.get(name, 0.0)


def _clock(own: Figures, usual: Figures) -> str:
    mine, others = _both("clock", own, usual)
    if not 0 < mine < others * (1 - OUT_OF_LINE):
        return ""
    share, _ = _both(f"throttled_share {POWER_CAP}", own, usual)
    capped = share > OUT_OF_LINE and "power" in own and "power" in usual
    why = f" at its power limit, {own['power']:.0f} W against {usual['power']:.0f} W" if capped else ""
    return f"its SM clock was {mine / 1e6:.0f} MHz against {others / 1e6:.0f} MHz{why}"


def _throttled(own: Figures, usual: Figures) -> str:
    shares = {words: _both(f"throttled_share {reason}", own, usual) for reason, words in REASONS.items()}
    text = [
        f"{words} active for {mine * 100:.0f} % of the time"
        for words, (mine, others) in shares.items()
        if mine > others + OUT_OF_LINE
    ]
    return ", ".join(text)


def _temperature(own: Figures, usual: Figures) -> str:
    mine, others = _both("temperature", own, usual)
    return f"it was at {mine:.0f} °C against {others:.0f} °C" if others and mine > others + HOTTER_K else ""


def _quota(own: Figures, usual: Figures) -> str:
    share, _ = _both("cpu_throttled_share", own, usual)
    return (
        f"the CPU quota of its cgroup stopped it in {share * 100:.0f} % of the periods" if share > OUT_OF_LINE else ""
    )


def _cpus(own: Figures, usual: Figures) -> str:
    mine, others = _both("cpus", own, usual)
    return f"it may use {mine:.0f} of its host's processors, its peers {others:.0f}" if 0 < mine < others else ""


def _launch(own: Figures, usual: Figures) -> str:
    """Only if launching takes longer than elsewhere and the device is idle afterwards."""
    mine, others = _both("launch", own, usual)
    bound = mine > LAUNCH_BOUND * own["compute"] and mine > others * (1 + OUT_OF_LINE)
    return f"its GPU waits for the CPU: launching takes {_ms(mine)} against {_ms(others)}" if bound and others else ""


def _cpu_wait(own: Figures, usual: Figures) -> str:
    mine, others = _both("cpu_wait", own, usual)
    much = mine > OUT_OF_LINE * own["compute"] and mine > 2 * others
    return f"its threads wait {_ms(mine)} a step for a processor, against {_ms(others)}" if much else ""


def _pressure(own: Figures, usual: Figures) -> str:
    mine, others = _both("cpu_pressure", own, usual)
    busy = mine > others + MORE_PRESSURE
    return (
        f"processors of its host were short {mine * 100:.0f} % of the time, against {others * 100:.0f} %"
        if busy
        else ""
    )


def _cpu_time(own: Figures, usual: Figures) -> str:
    """If the host determines the step time: it has more work, or a slower processor."""
    mine, others = _both("cpu_time", own, usual)
    decides = "launch" not in own or own["launch"] > LAUNCH_BOUND * own["compute"]
    much = decides and 0 < others * 1.2 < mine
    return f"it needs {_ms(mine)} of CPU a step, against {_ms(others)}" if much else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


ON_GPU: Sequence[Sign] = (_clock, _throttled, _temperature)
WITHHELD: Sequence[Sign] = (_quota, _cpus)
"""A setting, and no part, keeps the CPU from it."""
ON_HOST: Sequence[Sign] = (_launch, _cpu_wait, _cpu_time, _pressure)
