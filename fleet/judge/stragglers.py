"""Explain stragglers in data-parallel training.

A criterion that compares a rank with the fleet (`vs_fleet`) decides that the rank computes too long. This module adds the rank
and the cause to the failure. Causes are readings of the rank's GPU, or of its host's CPU, that differ from the median over the
rank's peers during the measured training steps. This module may change the action of the verdict, but never its result.
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
MIN_DEVIATION = 0.05
"""Smallest relevant difference from the peers' median, as a fraction of the median: the clocks of healthy GPUs differ by less.
It is also the smallest relevant difference between two shares of time, and the smallest relevant wait, as a fraction of the time
that the rank computes."""
MIN_HOTTER_K = 10.0
"""Kelvin above the peers' median from which a GPU counts as hotter."""
MIN_MORE_PRESSURE = 0.2
"""A host counts as short of processors if its share of time with CPU pressure exceeds the peers' median by more than this."""
LAUNCH_BOUND_SHARE = 0.9
"""If the host launches kernels for more than this share of the compute time, the GPU waits for the host."""
REASONS: Mapping[str, str] = {
    "hw_thermal": "thermal slowdown (hardware)",
    "sw_thermal": "thermal slowdown (software)",
    "hw_power_brake": "power brake",
    "hw_slowdown": "hardware slowdown",
}
"""NVML's clock event reason, as in the parameter `reason` of `straggler.throttled_share` -> the reason in words."""
POWER_CAP = "power_cap"
"""The clock event reason for a GPU at its power limit. It is not in REASONS, because healthy GPUs also run at this limit."""

Figures = Mapping[str, float]
"""Name of a figure -> its value. The name is the last part of the observation's name, such as `clock`; for a share of time with a
clock event reason, the reason follows: `throttled_share hw_thermal`."""
Kind = tuple[str, str]
"""GPU model and stage."""
Sign = Callable[[Figures, Figures], str]
"""A function from the rank's figures and the peers' medians to a deviation in words, or an empty string."""


class RankFigures:
    """The figures of ranks by GPU model and stage. Statistics of different hosts can be merged in any order."""

    def __init__(self, views: Iterable[HostView] = ()) -> None:
        self._series: dict[Kind, dict[str, array[float]]] = {}
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Add the figures of a host's ranks."""
        for kind, ranks in _figures_of(view).items():
            series = self._series.setdefault(kind, {})
            for figures in ranks.values():
                for name, value in figures.items():
                    series.setdefault(name, array("d")).append(value)

    def add_figures(self, kind: Kind, figure: str, values: Iterable[float]) -> None:
        """Add one figure of several ranks."""
        self._series.setdefault(kind, {}).setdefault(figure, array("d")).extend(values)

    def update(self, other: RankFigures) -> None:
        """Add the figures of other hosts."""
        for kind, series in other._series.items():
            merged = self._series.setdefault(kind, {})
            for name, values in series.items():
                merged.setdefault(name, array("d")).extend(values)

    def peer_medians(self, kind: Kind, own: Figures) -> dict[str, float]:
        """Return the median of each figure over all ranks except the one with the figures `own`."""
        return _medians(self._series.get(kind, {}), own)


def _medians(series: Mapping[str, Iterable[float]], own: Figures) -> dict[str, float]:
    """Return the median of each figure, without the rank's own values."""
    medians = {}
    for name, values in series.items():
        others = sorted(values)
        if own.get(name) in others:
            others.remove(own[name])
        if others:
            medians[name] = statistics.median(others)
    return medians


def _figures_of(view: HostView) -> dict[Kind, dict[str, dict[str, float]]]:
    """Return the figures of a host's ranks: GPU model and stage -> scope -> figure -> value."""
    figures: dict[Kind, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for kind, figure, observation in ranks_of(view):
        if isinstance(observation.value, float | int):
            figures[kind][observation.scope][figure] = float(observation.value)
    return figures


def ranks_of(view: HostView) -> Iterator[tuple[Kind, str, Observation]]:
    """Yield each figure of each rank of the host: GPU model and stage, name of the figure, its last observation."""
    latest: dict[tuple[Kind, str, str], Observation] = {}
    for name in view.observations:
        for observation in view.observations[name] if name.startswith("straggler.") else ():
            is_number = isinstance(observation.value, float | int)
            if observation.scope in view.host.scopes and observation.status == MEASURED and is_number:
                figure = f"{name.rpartition('.')[2]} {observation.params.get('reason', '')}".strip()
                latest[(_key(view, observation.stage, observation.scope), observation.scope, figure)] = observation
    return ((kind, figure, observation) for (kind, _, figure), observation in latest.items())


def with_straggler_causes(
    views: Iterable[HostView], verdicts: Sequence[Verdict], known: RankFigures | None = None
) -> list[Verdict]:
    """Return the verdicts, with rank, delay and cause added to each failure of `straggler.compute`.

    The delay is the time that the other ranks wait for the rank.

    The action becomes `configure` if a limit on the rank's CPU explains the delay and no reading of its GPU deviates.

    Args:
        views: the hosts of the verdicts.
        verdicts: verdicts of any criteria.
        known: the figures of all ranks of the fleet; None: those of the ranks of `views` are used.
    """
    if not any(_is_straggler(verdict) for verdict in verdicts):
        return list(verdicts)
    hosts = {view.host.name: view for view in views}
    known = known or RankFigures(hosts.values())
    return [
        _explain(hosts[item.host], item, known, hosts.values()) if _is_straggler(item) and item.host in hosts else item
        for item in verdicts
    ]


def _launch_series(view: HostView, kind: Kind, views: Iterable[HostView]) -> dict[str, list[float]]:
    """Return figure -> its values on all ranks of the launch.

    In the stage `gang`, these are the ranks of all hosts of the gang, otherwise only those of this host.
    """
    series: dict[str, list[float]] = defaultdict(list)
    for other in views:
        same_launch = other is view or (kind[1] == "gang" and other.host.gang == view.host.gang)
        for figures in _figures_of(other).get(kind, {}).values() if same_launch else ():
            for name, value in figures.items():
                series[name].append(value)
    return series


def _is_straggler(verdict: Verdict) -> bool:
    return verdict.name == NAME and verdict.verdict == FAIL and isinstance(verdict.value, float | int)


def _key(view: HostView, stage: str, scope: str) -> Kind:
    return view.names.get(scope, ""), stage


def _explain(view: HostView, verdict: Verdict, known: RankFigures, views: Iterable[HostView]) -> Verdict:
    kind = _key(view, verdict.stage, verdict.scope)
    figures = _figures_of(view).get(kind, {}).get(verdict.scope, {})
    own, usual = {**figures, "compute": float(verdict.value or 0)}, known.peer_medians(kind, figures)
    launch_medians = _medians(_launch_series(view, kind, views), figures)
    gpu_signs = _signs(GPU_SIGNS, own, usual)
    cpu_limits = _signs(CPU_LIMIT_SIGNS, own, usual)
    causes = [*gpu_signs, *cpu_limits, *_signs(HOST_SIGNS, own, usual)]
    why = "; ".join(causes) or "no reading of its GPU or its host's CPU during the training steps explains this"
    text = f"{_rank_name(view, verdict)} computes {_longer(own, usual)}{_delay(own, launch_medians)}: {why}"
    return replace(
        verdict,
        reason=f"{text}; {verdict.reason}",
        detail="; ".join(filter(None, (text, verdict.detail))),
        action="configure" if cpu_limits and not gpu_signs else verdict.action,
    )


def _rank_name(view: HostView, verdict: Verdict) -> str:
    """Return `rank 3 (node2 gpu=1)`, with the rank's number in the last launch of the stage; `node2 gpu=1` if it is unknown."""
    launches = [launch for launch in view.evidence.launches() if launch.stage == verdict.stage]
    local = view.host.scopes.index(verdict.scope) if verdict.scope in view.host.scopes else -1
    rank = [rank.rank for launch in launches[-1:] for rank in launch.ranks if rank.local_rank == local]
    where = f"{view.host.name} {verdict.scope}"
    return f"rank {rank[0]} ({where})" if rank else where


def _longer(own: Figures, usual: Figures) -> str:
    peers = usual.get("compute", 0.0)
    return f"{(own['compute'] / peers - 1) * 100:.0f} % longer than its peers" if peers else "longer than its peers"


def _delay(own: Figures, launch_medians: Figures) -> str:
    """Return in words how long the other ranks wait in each step (median).

    Return an empty string if they hardly wait, or wait less than twice as long as this rank.
    """
    wait = launch_medians.get("wait", 0.0)
    if wait < MIN_DEVIATION * own["compute"] or wait < 2 * own.get("wait", 0.0):
        return ""
    share = own.get("last_share", 0.0)
    return f" (the other ranks wait {_ms(wait)} a step; this rank is last in {share * 100:.0f} % of the steps)"


def _signs(signs: Iterable[Sign], own: Figures, usual: Figures) -> list[str]:
    return [text for sign in signs if (text := sign(own, usual))]


def _rank_and_peers(name: str, own: Figures, usual: Figures) -> tuple[float, float]:
    """Return the value of a figure on the rank, and its median over the peers; 0 in place of a number that is not reported."""
    return own.get(name, 0.0), usual.get(name, 0.0)


def _clock(own: Figures, usual: Figures) -> str:
    mine, others = _rank_and_peers("clock", own, usual)
    if not 0 < mine < others * (1 - MIN_DEVIATION):
        return ""
    share, _ = _rank_and_peers(f"throttled_share {POWER_CAP}", own, usual)
    capped = share > MIN_DEVIATION and "power" in own and "power" in usual
    why = (
        f" because of its power limit (it drew {own['power']:.0f} W, its peers {usual['power']:.0f} W)"
        if capped
        else ""
    )
    return f"its SM clock was {mine / 1e6:.0f} MHz (peers: {others / 1e6:.0f} MHz){why}"


def _throttled(own: Figures, usual: Figures) -> str:
    shares = {words: _rank_and_peers(f"throttled_share {reason}", own, usual) for reason, words in REASONS.items()}
    texts = [
        f"{words} active for {mine * 100:.0f} % of the time"
        for words, (mine, others) in shares.items()
        if mine > others + MIN_DEVIATION
    ]
    return ", ".join(texts)


def _temperature(own: Figures, usual: Figures) -> str:
    mine, others = _rank_and_peers("temperature", own, usual)
    return f"its GPU was at {mine:.0f} °C (peers: {others:.0f} °C)" if others and mine > others + MIN_HOTTER_K else ""


def _quota(own: Figures, usual: Figures) -> str:
    mine, others = _rank_and_peers("cpu_throttled_share", own, usual)
    is_stopped = mine > others + MIN_DEVIATION
    return f"the CPU quota of its cgroup stopped it in {mine * 100:.0f} % of the quota periods" if is_stopped else ""


def _cpus(own: Figures, usual: Figures) -> str:
    mine, others = _rank_and_peers("cpus", own, usual)
    return f"the rank may use {mine:.0f} of its host's processors, its peers {others:.0f}" if 0 < mine < others else ""


def _launch(own: Figures, usual: Figures) -> str:
    """Return in words that launching kernels is slow, if it takes almost all of the compute time; otherwise an empty string."""
    mine, others = _rank_and_peers("launch", own, usual)
    bound = mine > LAUNCH_BOUND_SHARE * own["compute"] and mine > others * (1 + MIN_DEVIATION)
    return (
        f"its GPU waits for the CPU: launching kernels takes {_ms(mine)} a step (peers: {_ms(others)})"
        if bound and others
        else ""
    )


def _cpu_wait(own: Figures, usual: Figures) -> str:
    mine, others = _rank_and_peers("cpu_wait", own, usual)
    much = mine > MIN_DEVIATION * own["compute"] and mine > 2 * others
    return f"its threads wait {_ms(mine)} a step for a processor (peers: {_ms(others)})" if much else ""


def _pressure(own: Figures, usual: Figures) -> str:
    mine, others = _rank_and_peers("cpu_pressure", own, usual)
    busy = mine > others + MIN_MORE_PRESSURE
    return (
        f"its host was short of processors for {mine * 100:.0f} % of the time (peers: {others * 100:.0f} %)"
        if busy
        else ""
    )


def _cpu_time(own: Figures, usual: Figures) -> str:
    """Return in words that the rank needs much more CPU time than its peers; empty if not, or if the GPU limits the step time."""
    mine, others = _rank_and_peers("cpu_time", own, usual)
    is_host_bound = "launch" not in own or own["launch"] > LAUNCH_BOUND_SHARE * own["compute"]
    is_slower = is_host_bound and 0 < others * 1.2 < mine
    return f"the rank needs {_ms(mine)} of CPU time a step (peers: {_ms(others)})" if is_slower else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


GPU_SIGNS: Sequence[Sign] = (_clock, _throttled, _temperature)
CPU_LIMIT_SIGNS: Sequence[Sign] = (_quota, _cpus)
"""Signs that a setting limits the rank's CPU time, so that no part is faulty."""
HOST_SIGNS: Sequence[Sign] = (_launch, _cpu_wait, _cpu_time, _pressure)
