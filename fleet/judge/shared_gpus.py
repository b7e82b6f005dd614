"""Attribute slow figures to other processes on the GPU, which may be healthy.

A launch does not start on a GPU that is in use, unless rackproof_share_gpus allows it. But another process may start later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice

from fleet.judge.evidence import from_benchmark
from fleet.judge.finding import CEILINGS, FLOORS
from fleet.judge.host_view import HostView
from schemas.reports import FAIL, Verdict
from schemas.scopes import Scope

_PROCESSES = "gpu.processes"
MAX_NAMED = 8
"""Maximum number of processes, and of GPUs of a process, that a text names."""
NO_SPEEDS = (".accuracy", ".mtu")
"""Last parts of names of figures that are not speeds although their limit is a minimum. Other processes do not lower them."""


def with_other_processes(views: Iterable[HostView], verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts. If a speed failed and another process used the GPU, the reason says so, with the action `configure`.

    Another process used a GPU if the supervisor saw such a process in a launch of the verdict's stage. If processes are allowed
    (rackproof_share_gpus), it is also enough that the GPU had compute processes before or after a stage. For a figure whose scope
    names no GPU, such as `host`, these may be processes on any GPU of the host. For a figure of a gang (the hosts of one
    multi-node launch) or of a pair of hosts, they may also be on the other hosts. They do not explain that a rail or a switch is
    slow.

    Args:
        views: the hosts of the verdicts. A gang must be in `views` as a whole.
        verdicts: verdicts of any criteria.
    """
    by_name = {view.host.name: view for view in views}
    gangs: dict[str, list[str]] = defaultdict(list)
    for name, view in by_name.items():
        gangs[view.host.gang].append(name)

    @cache
    def of_host(host: str, stage: str) -> Mapping[str, str]:
        return dict(_used_gpus(by_name[host], stage))

    @cache
    def of_gang(gang: str, stage: str) -> Sequence[tuple[str, str, str]]:
        used = ((host, gpu, process) for host in gangs[gang] for gpu, process in of_host(host, stage).items())
        return tuple(islice(used, MAX_NAMED))

    def uses(verdict: Verdict) -> Iterator[tuple[str, str]]:
        """Yield each GPU that another process used, with its host if this is not the host of the verdict, and the process."""
        scope, stage = Scope.parse(verdict.scope), verdict.stage
        named = {f"gpu={scope.labels[kind]}" for kind in ("gpu", "peer") if kind in scope.labels}
        for gpu, process in of_host(verdict.host, stage).items():
            if not named or gpu in named:
                yield gpu, process
        if (partner := scope.get("partner")) in by_name:
            yield from ((f"{gpu} of {partner}", process) for gpu, process in of_host(partner, stage).items())
        for host, gpu, process in of_gang(by_name[verdict.host].host.gang, stage) if scope.is_gang else ():
            if host != verdict.host:
                yield f"{gpu} of {host}", process

    def explained(verdict: Verdict) -> Verdict:
        is_of_fabric = Scope.parse(verdict.part).is_in_fabric
        if verdict.verdict != FAIL or verdict.host not in by_name or not is_speed(verdict) or is_of_fabric:
            return verdict
        gpus_of: dict[str, list[str]] = defaultdict(list)
        for gpu, process in uses(verdict):
            gpus_of[process or "another process"].append(gpu)
        if not gpus_of:
            return verdict
        texts = (f"{process} used {', '.join(gpus[:MAX_NAMED])}" for process, gpus in gpus_of.items())
        allowed = ", which rackproof_share_gpus allows" if by_name[verdict.host].host.share_gpus else ""
        text = f"{' and '.join(islice(texts, MAX_NAMED))}{allowed}: end that process, and measure again"
        detail = "; ".join(filter(None, (text, verdict.detail)))
        return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail, action="configure")

    return list(map(explained, verdicts))


def is_speed(verdict: Verdict) -> bool:
    """Return whether the verdict judges a benchmark's rate by a minimum, or its time by a maximum.

    A healthy part can miss such a limit because of another process.
    """
    if not from_benchmark(verdict.name) or verdict.name.endswith(NO_SPEEDS):
        return False
    return verdict.operator in FLOORS or (verdict.operator in CEILINGS and verdict.unit == "s")


def _used_gpus(view: HostView, stage: str) -> Iterator[tuple[str, str]]:
    """Yield each GPU that another process used, and the process, if it is known. A GPU may be yielded several times."""
    for snapshot, metric in view.observations.metrics.get(_PROCESSES, ()) if view.host.share_gpus else ():
        if snapshot.phase != "during":  # then the launch has processes of its own
            yield from ((scope, "") for scope, count in metric.values.items() if count)
    for launch in view.evidence.launches():
        if launch.stage == stage:
            yield from launch.other_processes.items()
