"""Whom the others wait for in data-parallel training, and why: a failed `straggler.compute` is told with what was seen of its
GPU and of its host's CPU during those very steps, beside the median of its peers.

That it is too slow is the verdict of a criterion like any other (`vs_fleet`). Here it gets its rank, and its cause: what is
out of line with the other GPUs of its model in the same stage. Nothing is judged by that, and so nothing fails by it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleet.judge.evidence import HostView
from schemas.records import MEASURED
from schemas.reports import FAIL, Verdict

NAME = "straggler.compute"
OUT_OF_LINE = 0.05
"""Of the peers' median: healthy GPUs of a model differ by less in clock; also the share of time that counts as some."""
HOTTER_K = 10.0
MORE_PRESSURE = 0.2
LAUNCH_BOUND = 0.9
"""Share of the computing after which the host was still telling the GPU what to do: then the GPU waits for its host."""
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
Place = tuple[str, str]
"""Host and scope."""
Sign = Callable[[Figures, Figures], str]
"""Own figures and the peers' medians -> what is out of line, or an empty string."""


@dataclass(kw_only=True)
class _Ranks:
    """The ranks of one GPU model in one stage."""

    figures: dict[Place, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    launched: dict[Place, str] = field(default_factory=dict)
    """Which of them wait for each other: their gang, or their host."""

    def usual(self, own: Place, together: bool = False) -> dict[str, float]:
        """The medians of the others; `together`: of those that were launched with it."""
        series: dict[str, list[float]] = defaultdict(list)
        for place, figures in self.figures.items():
            if place != own and (not together or self.launched[place] == self.launched[own]):
                for name, value in figures.items():
                    series[name].append(value)
        return {name: statistics.median(values) for name, values in series.items()}


def with_causes(views: Iterable[HostView], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, those on ranks that compute too long with who it is, what it costs the others, and the cause.

    Where it is a setting of the host's CPU that explains it, and nothing of the GPU is out of line, no part is to be acted on.
    """
    if not any(_names(verdict) for verdict in verdicts):
        return list(verdicts)
    hosts = {view.host.name: view for view in views}
    ranks = _ranks(hosts.values())
    return [_told(hosts[item.host], item, ranks) if _names(item) and item.host in hosts else item for item in verdicts]


def _names(verdict: Verdict) -> bool:
    return verdict.name == NAME and verdict.verdict == FAIL and isinstance(verdict.value, float | int)


def _key(view: HostView, stage: str, scope: str) -> tuple[str, str]:
    return view.names.get(scope, ""), stage


def _ranks(views: Iterable[HostView]) -> dict[tuple[str, str], _Ranks]:
    found: dict[tuple[str, str], _Ranks] = defaultdict(_Ranks)
    for view in views:
        for name, items in view.observations.items():
            for seen in items if name.startswith("straggler.") else ():
                value = seen.value
                if seen.scope in view.host.scopes and seen.status == MEASURED and isinstance(value, float | int):
                    ranks, place = found[_key(view, seen.stage, seen.scope)], (view.host.name, seen.scope)
                    last = name.rpartition(".")[2]
                    ranks.figures[place][f"{last} {seen.params.get('reason', '')}".strip()] = float(value)
                    ranks.launched[place] = f"gang={view.host.gang}" if seen.stage == "gang" else view.host.name
    return found


def _told(view: HostView, verdict: Verdict, found: Mapping[tuple[str, str], _Ranks]) -> Verdict:
    ranks, place = found[_key(view, verdict.stage, verdict.scope)], (view.host.name, verdict.scope)
    own, usual = {**ranks.figures[place], "compute": float(verdict.value or 0)}, ranks.usual(place)
    gpu, host = _signs(ON_GPU, own, usual), _signs(ON_HOST, own, usual)
    withheld = _signs(WITHHELD, own, usual)
    causes = [*gpu, *withheld, *host]
    why = "; ".join(causes) or "nothing that was read of its GPU and its host's CPU in those steps explains it"
    text = (
        f"{_who(view, verdict)} computes {_longer(own, usual)}{_waited(own, ranks.usual(place, together=True))}: {why}"
    )
    return replace(
        verdict,
        reason=f"{text}; {verdict.reason}",
        detail="; ".join(part for part in (text, verdict.detail) if part),
        action="none" if withheld and not gpu else verdict.action,
    )


def _who(view: HostView, verdict: Verdict) -> str:
    """`rank 3 (node2 gpu=1)`: its number in the last launch of the stage, where that tells."""
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


def _clock(own: Figures, usual: Figures) -> str:
    mine, others = own.get("clock", 0.0), usual.get("clock", 0.0)
    if not 0 < mine < others * (1 - OUT_OF_LINE):
        return ""
    capped = own.get(f"throttled_share {POWER_CAP}", 0.0) > OUT_OF_LINE and "power" in own and "power" in usual
    why = f" at its power limit, {own['power']:.0f} W against {usual['power']:.0f} W" if capped else ""
    return f"its SM clock was {mine / 1e6:.0f} MHz against {others / 1e6:.0f} MHz{why}"


def _throttled(own: Figures, usual: Figures) -> str:
    found = {words: own.get(f"throttled_share {reason}", 0.0) for reason, words in REASONS.items()}
    above = {words: usual.get(f"throttled_share {reason}", 0.0) + OUT_OF_LINE for reason, words in REASONS.items()}
    told = [
        f"{words} active for {share * 100:.0f} % of the time" for words, share in found.items() if share > above[words]
    ]
    return ", ".join(told)


def _temperature(own: Figures, usual: Figures) -> str:
    mine, others = own.get("temperature", 0.0), usual.get("temperature")
    return f"it was at {mine:.0f} °C against {others:.0f} °C" if others and mine > others + HOTTER_K else ""


def _quota(own: Figures, _: Figures) -> str:
    share = own.get("cpu_throttled_share", 0.0)
    return (
        f"the CPU quota of its cgroup stopped it in {share * 100:.0f} % of the periods" if share > OUT_OF_LINE else ""
    )


def _cpus(own: Figures, usual: Figures) -> str:
    mine, others = own.get("cpus", 0.0), usual.get("cpus", 0.0)
    return f"it may use {mine:.0f} of its host's processors, its peers {others:.0f}" if 0 < mine < others else ""


def _launch(own: Figures, usual: Figures) -> str:
    """Only where launching takes longer than elsewhere, and the device has nothing left to do when it is over."""
    mine, others = own.get("launch", 0.0), usual.get("launch", 0.0)
    bound = mine > LAUNCH_BOUND * own["compute"] and mine > others * (1 + OUT_OF_LINE)
    return f"its GPU waits for the CPU: launching takes {_ms(mine)} against {_ms(others)}" if bound and others else ""


def _cpu_wait(own: Figures, usual: Figures) -> str:
    mine, others = own.get("cpu_wait", 0.0), usual.get("cpu_wait", 0.0)
    much = mine > OUT_OF_LINE * own["compute"] and mine > 2 * others
    return f"its threads wait {_ms(mine)} a step for a processor, against {_ms(others)}" if much else ""


def _pressure(own: Figures, usual: Figures) -> str:
    mine, others = own.get("cpu_pressure", 0.0), usual.get("cpu_pressure", 0.0)
    busy = mine > others + MORE_PRESSURE
    return (
        f"processors of its host were short {mine * 100:.0f} % of the time, against {others * 100:.0f} %"
        if busy
        else ""
    )


def _cpu_time(own: Figures, usual: Figures) -> str:
    """Where the host decides how long a step takes: more work for it, or a slower processor."""
    mine, others = own.get("cpu_time", 0.0), usual.get("cpu_time", 0.0)
    decides = "launch" not in own or own["launch"] > LAUNCH_BOUND * own["compute"]
    much = decides and 0 < others * 1.2 < mine
    return f"it needs {_ms(mine)} of CPU a step, against {_ms(others)}" if much else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


ON_GPU: Sequence[Sign] = (_clock, _throttled, _temperature)
WITHHELD: Sequence[Sign] = (_quota, _cpus)
"""A setting, and no part, keeps the CPU from it."""
ON_HOST: Sequence[Sign] = (_launch, _cpu_wait, _cpu_time, _pressure)
