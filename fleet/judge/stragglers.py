"""Explain stragglers in data-parallel training.

A criterion that compares a rank with the fleet (`vs_fleet`) finds that the rank computes longer than its limit allows. This
module adds the rank and the cause to the failure. Causes are readings of the rank's GPU, or of its host's CPU, that differ from
the median over the rank's peers during the measured training steps.

The processors of the host launch the kernels of a step. If they take so long that the GPU waits for them, the compute time shows
the speed of the processors. It then says nothing against the GPU, and processors of healthy hosts differ. So a rank whose longer
launching explains its compute time passes up to a higher limit (MAX_LAUNCH_BOUND). Beyond that limit, the host fails.
"""

from __future__ import annotations

import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.straggler_signs import (
    CPU_LIMIT_SIGNS,
    GPU_SIGNS,
    HOST_SIGNS,
    LAUNCH_BOUND_SHARE,
    MIN_DEVIATION,
    SHORTAGE_SIGNS,
    SLOW_GPU_SIGNS,
    Figures,
    milliseconds,
    rank_and_peers,
    signs,
)
from fleet.quantities import SIGNS, format_pair
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, PASS, Verdict
from schemas.scopes import HOST

NAME = "straggler.compute"
MAX_LAUNCH_BOUND = 1.33
"""Highest compute time of a rank that waits for its host's launches, divided by the median of its peers. For healthy H100 and
H200 in virtual machines, this ratio is 0.89 to 1.13 (measured). nvidia-resiliency-ext reports a rank whose speed is
below 75 % of that of the fastest rank."""
MIN_RANKS = 3
"""A rank is also compared with the ranks of its own host if the host has at least this many, as for a median of the fleet."""

Kind = tuple[str, str]
"""GPU model and stage."""


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

    The action becomes `configure` if a limit on the rank's CPU explains the delay and no reading of its GPU deviates. If longer
    launching explains the compute time, the failure is attributed to the host; or it becomes a pass (`_is_usual_launching`).

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
    gpu_signs = signs(GPU_SIGNS, own, usual)
    cpu_limits = signs(CPU_LIMIT_SIGNS, own, usual)
    causes = [*gpu_signs, *cpu_limits, *signs(HOST_SIGNS, own, usual)]
    why = "; ".join(causes) or "no reading of its GPU or its host's CPU during the training steps explains this"
    text = f"{_rank_name(view, verdict)} computes {_longer(own, usual)}{_delay(own, launch_medians)}: {why}"
    of_host = [each for scope, each in _figures_of(view).get(kind, {}).items() if scope != verdict.scope]
    is_of_host = not signs(SLOW_GPU_SIGNS, own, usual) and _explains(verdict, own, usual, of_host)
    if is_of_host and _is_usual_launching(own, usual):
        return _passed(verdict, text, own, usual)
    return replace(
        verdict,
        reason=f"{text}; {verdict.reason}",
        detail="; ".join(filter(None, (text, verdict.detail))),
        action="configure" if cpu_limits and not gpu_signs else verdict.action,
        part=HOST if is_of_host else verdict.part,
        serial="" if is_of_host else verdict.serial,
    )


def _explains(verdict: Verdict, own: Figures, usual: Figures, of_host: Sequence[Figures]) -> bool:
    """Return whether the rank would meet the limit if launching took no longer than on its peers.

    The peers are all ranks of the fleet, and also the other ranks of its host (`of_host`) if they are enough. The limit is the
    same share of both medians.
    """
    if not isinstance(verdict.limit, int | float) or not usual.get("compute") or not _extra_launch(own, usual):
        return False
    share = verdict.limit / usual["compute"]
    medians = [usual]
    if len(of_host) >= MIN_RANKS - 1:
        medians.append({name: statistics.median(each[name] for each in of_host if name in each) for name in of_host[0]})
    return all(own["compute"] - _extra_launch(own, peers) <= share * peers.get("compute", 0.0) for peers in medians)


def _extra_launch(own: Figures, usual: Figures) -> float:
    """Return by how many seconds launching takes longer than on the peers; 0 if not, or if the GPU does not wait for it."""
    mine, others = rank_and_peers("launch", own, usual)
    return max(0.0, mine - others) if others and mine > LAUNCH_BOUND_SHARE * own["compute"] else 0.0


def _is_usual_launching(own: Figures, usual: Figures) -> bool:
    """Return whether the processors of the host launch the kernels as slowly as those of a healthy host may.

    The compute time is at most MAX_LAUNCH_BOUND of the median, nothing limits the rank's CPU time, and the host has free
    processors.
    """
    is_short = signs(SHORTAGE_SIGNS, own, usual)
    return own["compute"] <= MAX_LAUNCH_BOUND * usual["compute"] and not is_short


def _passed(verdict: Verdict, text: str, own: Figures, usual: Figures) -> Verdict:
    """Return the verdict as a pass below the limit for ranks that wait for the launches of their hosts."""
    limit = MAX_LAUNCH_BOUND * usual["compute"]
    found, wanted = format_pair(own["compute"], limit, verdict.unit)
    detail = f"{text}; such a rank may take {MAX_LAUNCH_BOUND * 100:.0f} % of the median of its peers"
    return replace(
        verdict,
        verdict=PASS,
        limit=limit,
        reason=f"found {found}, wanted {SIGNS[verdict.operator]} {wanted} ({detail})",
        detail=detail,
        action="none",
        severity="",
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
    return f" (the other ranks wait {milliseconds(wait)} a step; this rank is last in {share * 100:.0f} % of the steps)"
