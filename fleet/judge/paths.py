"""Explain slow collectives by a slow NCCL transport, or by settings that limit NCCL.

A slow transport is usually caused by a setting, so the action of the verdict becomes `configure`. The verdict keeps the
criterion's action in two cases, in which the cause may be a bad link: other ranks of the fleet reach the required bandwidth over
this transport, or another verdict on the host finds a bad link between GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from fleet.judge import outliers
from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import evaluate, holds, series
from fleet.judge.finding import FLOORS
from fleet.judge.host_view import HostView
from fleet.judge.outliers import FigureKey, FleetFigures
from fleet.judge.shared_gpus import is_speed
from schemas.records import MEASURED, Observation, Value, is_number
from schemas.reports import FAIL, PASS, Verdict
from schemas.scopes import Scope

CHECK_WITHIN = (
    "check NCCL_P2P_* and NCCL_SHM_* in the environment, and peer access between the GPUs (nvidia-smi topo -p2p r)"
)
CHECK_BETWEEN = (
    "check NCCL_* in the environment (NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET), the IB devices (ibv_devinfo), and the module "
    "nvidia_peermem or DMA-BUF"
)
CHECK_NVLS = "check NCCL_NVLS_ENABLE in the environment, and that the fabric manager runs"
COMMUNICATION = ("collective.", "mnnvl.", "model_parallel.", "pairs.")
"""Prefixes of the figures that depend on NCCL."""
PAIR_BANDWIDTH = "pairs.bandwidth"
SETTINGS, OTHER_SETTINGS = "nccl_settings", "nccl_other_settings"
"""Parameters of figures of collectives: settings that may slow NCCL on a healthy host, such as `NCCL_PROTO=LL`, and other
settings of which this is not known, such as `NCCL_CGA_CLUSTER_SIZE=0`."""
LINKS = ("peer_copy.", "digest.wrong_peer_copies", "gpu.nvlink.")
"""Prefixes of the names of observations that fail if a link between GPUs is bad, whatever transport NCCL chose."""

CUT_NAME = "NET/AWS"
"""Older agents cut the name `NET/AWS Libfabric/0/GDRDMA` at the space. The rest, which states GPUDirect RDMA, is lost, so
a transport of this name does not count as slow."""
ANY_NETWORK = "fabric-busbw-any-network"
"""Id of the criterion whose limit, 10 MB/s, any network reaches."""
Path = tuple[str, str, str, Value, Value]
"""Id of a criterion, name and stage of a figure, message size in bytes, and the transport over which the figure was measured."""


class NormalPaths:
    """The paths on which some ranks of the fleet reach the required bandwidth (normal paths).

    If other ranks fail on a normal path, the transport is not the reason.

    A limit may depend on the figures of the whole fleet. Therefore the best figure of each path is kept, and compared with its
    limit when the figures of all hosts are known.
    """

    def __init__(self) -> None:
        self._passing: set[Path] = set()
        self._best: dict[tuple[Path, FigureKey, str], tuple[Criterion, float]] = {}
        """Path, key of the figure, and scope (empty unless the criterion has `by_position`) -> criterion and best value."""
        self.paths: frozenset[Path] = frozenset()
        """The normal paths; complete after `find_normal_paths`."""

    def add(self, view: HostView, figures: FleetFigures) -> None:
        """Add the paths of one host; `figures` returns the keys by which figures of different hosts are compared."""
        names = {name for name in view.observations.benchmark_names() if is_bandwidth_name(name)}
        for criterion in view.criteria().values() if names else ():
            if criterion.same_as_fleet is None and criterion.matched(names):
                self._add(view, criterion, figures)

    def _add(self, view: HostView, criterion: Criterion, figures: FleetFigures) -> None:
        """Add the paths on which this host passes the criterion. If the limit depends on the fleet, add the figures instead."""
        if not criterion.vs_fleet:
            for verdict in evaluate(view, criterion, figures):
                if verdict.verdict == PASS and is_bandwidth(verdict):
                    self._passing.add(path_of(view, verdict))
            return
        for group in series(view, criterion):
            measured = [item for item in group if item.status == MEASURED]
            numbers = [float(item.value or 0) for item in measured if is_number(item.value)]
            if measured and len(numbers) == len(measured):
                last = measured[-1]
                path = (criterion.id, *_figure_path(view, last))
                self.add_figure(path, figures.key(view, last), last.scope, criterion, numbers)

    def add_passing(self, path: Path) -> None:
        self._passing.add(path)

    def add_figure(self, path: Path, key: FigureKey, scope: str, criterion: Criterion, values: Sequence[float]) -> None:
        """Add the repeated values of one figure that is compared with the fleet."""
        worst, best = (min, max) if criterion.operator in FLOORS else (max, min)
        value = (best if criterion.best_of_run else worst)(values)
        figure = (path, key, scope if criterion.by_position else "")
        known = self._best.get(figure)
        self._best[figure] = (criterion, value if known is None else best(known[1], value))

    def update(self, other: NormalPaths) -> None:
        """Add the paths of other hosts."""
        self._passing |= other._passing
        for (path, key, scope), (criterion, value) in other._best.items():
            known = self._best.get((path, key, scope))
            best = max if criterion.operator in FLOORS else min
            self._best[(path, key, scope)] = (criterion, value if known is None else best(known[1], value))

    def find_normal_paths(self, figures: FleetFigures) -> None:
        """Set `paths`: compare the best figures with the limits of the whole fleet."""
        passing = set(self._passing)
        for (path, key, scope), (criterion, value) in self._best.items():
            peers = figures.peers_at(key, scope, criterion)
            if outliers.has_enough_peers(criterion, peers) and holds(
                criterion.operator, value, outliers.limit(criterion, peers)
            ):
                passing.add(path)
        self.paths = frozenset(passing)


def with_slow_path(view: HostView, verdict: Verdict, of_host: Sequence[Verdict], normal: Collection[Path]) -> Verdict:
    """Return the verdict. If a slow transport explains a failed bandwidth, add this reason, and set the action to `configure`.

    If another verdict on the host finds a bad link between GPUs (LINKS), the action stays the same. A failed verdict on
    `collective.nvls` with the value false gets the remedy CHECK_NVLS.

    Args:
        view: the host.
        verdict: a verdict on this host.
        of_host: every verdict on this host.
        normal: paths on which other ranks of the fleet reach the required bandwidth (`NormalPaths`).
    """
    if verdict.verdict != FAIL:
        return verdict
    if verdict.name == "collective.nvls" and verdict.value is False:
        return replace(verdict, reason=f"{verdict.reason}; {CHECK_NVLS}", detail=CHECK_NVLS)
    may_explain = is_bandwidth(verdict) and path_of(view, verdict) not in normal
    explanation = _explain_transport(view, verdict) if may_explain else ""
    if not explanation:
        return verdict
    return _explained(verdict, explanation, of_host)


def with_nccl_settings(view: HostView, verdict: Verdict, of_host: Sequence[Verdict]) -> Verdict:
    """Return the verdict. If a figure is slow while NCCL has settings, name them.

    If they are known to limit NCCL, the action is `configure`, unless another verdict on the host finds a bad link between GPUs
    (LINKS). Other settings do not change the action: they may be right for the fabric.

    The settings are those of the collectives in the same stage.
    """
    if verdict.verdict != FAIL or not verdict.name.startswith(COMMUNICATION) or not is_speed(verdict):
        return verdict
    if names := _settings(view, verdict.stage, SETTINGS):
        return _explained(verdict, f"NCCL is limited by {names}: remove the setting, and measure again", of_host)
    if names := _settings(view, verdict.stage, OTHER_SETTINGS):
        note = f"NCCL has the settings {names}: if they are not needed, measure again without them"
        detail = "; ".join(filter(None, (verdict.detail, note)))
        return replace(verdict, reason=f"{verdict.reason}; {note}", detail=detail)
    return verdict


def _settings(view: HostView, stage: str, parameter: str) -> str:
    figures = (item for name in view.observations.benchmark_names() for item in _collectives(view, name))
    settings = {item.params[parameter]: None for item in figures if item.stage == stage and parameter in item.params}
    return "; ".join(map(str, settings))


def with_transport_of_gang(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict on a failed pair of hosts. If a slow transport of the gang's collectives explains it, add this reason.

    The action is then `configure`. A transport over which another pair of the host reaches the limit does not explain it: the
    pairs of a gang use the same transport.
    """
    if verdict.name != PAIR_BANDWIDTH or not is_number(verdict.limit):
        return verdict
    of_stage = [item for item in view.observations[PAIR_BANDWIDTH] if item.stage == verdict.stage]
    if any(is_number(item.value) and item.value >= verdict.limit for item in of_stage):
        return verdict
    scope = f"gang={view.host.gang}"
    figures = (item for name in view.observations.benchmark_names() for item in _collectives(view, name))
    transports = {
        _transport(view, item): None for item in figures if (item.stage, item.scope) == (verdict.stage, scope)
    }
    explanations = (_explain_between_hosts(transport) for transport in transports)
    explanation = next(filter(None, explanations), "")
    return _explained(verdict, explanation, ()) if explanation else verdict


def _collectives(view: HostView, name: str) -> Sequence[Observation]:
    return view.observations[name] if name.startswith("collective.") else ()


def _explained(verdict: Verdict, explanation: str, of_host: Sequence[Verdict]) -> Verdict:
    detail = "; ".join(filter(None, (explanation, verdict.detail)))
    bad_link = any(other.verdict == FAIL and other.name.startswith(LINKS) for other in of_host)
    action = verdict.action if bad_link else "configure"
    return replace(verdict, reason=f"{explanation}; {verdict.reason}", detail=detail, action=action)


def is_bandwidth(verdict: Verdict) -> bool:
    """Return whether the verdict is on the bandwidth of a collective."""
    return is_bandwidth_name(verdict.name)


def is_bandwidth_name(name: str) -> bool:
    """Return whether figures with that name are the bandwidth of a collective."""
    return name.startswith("collective.") and name.endswith(".busbw")


def judges_bandwidth(criterion: str, name: str) -> bool:
    """Return whether a criterion that judges the figure `name` judges the bandwidth of a collective.

    ANY_NETWORK does not count, because a slow network passes it.
    """
    return is_bandwidth_name(name) and criterion != ANY_NETWORK


def path_of(view: HostView, verdict: Verdict) -> Path:
    return (verdict.criterion, *_figure_path(view, verdict))


def _figure_path(view: HostView, item: Observation | Verdict) -> tuple[str, str, Value, Value]:
    return item.name, item.stage, item.params.get("size_bytes"), _transport(view, item)


def _explain_transport(view: HostView, verdict: Verdict) -> str:
    """Return why the transport that NCCL chose for this figure's ranks is slow.

    Empty if the transport is fast, or if the ranks are on one host and its GPU model has no peer access.
    """
    transport = _transport(view, verdict)
    if Scope.parse(verdict.scope).is_gang:
        return _explain_between_hosts(transport)
    slow = slow_transport(transport, within=True)
    return f"NCCL uses {slow} instead of P2P; {CHECK_WITHIN}" if slow and _has_peer_access(view) else ""


def _explain_between_hosts(transport: Value) -> str:
    slow = slow_transport(transport, within=False)
    if not slow:
        return ""
    if slow.upper().startswith("NET/SOCKET"):
        return f"NCCL uses {slow} instead of InfiniBand; {CHECK_BETWEEN}"
    return f"NCCL uses {slow} without GPUDirect RDMA; {CHECK_BETWEEN}"


@lru_cache(maxsize=1024)
def slow_transport(transport: Value, *, within: bool) -> str:
    """Return the first slow transport in a list of NCCL transports; empty if all are fast.

    `within`: whether the ranks are on one host. Within a host, every transport over host memory or a network is slow.
    """
    names = re.split(r"[,;|+\s]+", transport) if isinstance(transport, str) else []
    if within:
        return next((name for name in names if name.upper().startswith(("SHM", "NET"))), "")
    return next((name for name in names if _is_slow_between_hosts(name)), "")


def _has_peer_access(view: HostView) -> bool:
    """Return whether the criteria require peer access between the GPUs. GPU models without it always use host memory."""
    return any(item.matches_name("peer_copy.access") and item.value is True for item in view.criteria().values())


def _is_slow_between_hosts(name: str) -> bool:
    """Return whether the transport is TCP, or a network transport (of NCCL or a plugin) without GPUDirect RDMA."""
    upper = name.upper()
    return upper.startswith("NET/") and "GDRDMA" not in upper and upper != CUT_NAME


def _transport(view: HostView, figure: Observation | Verdict) -> Value:
    """Return the measured `collective.transport` of the figure's stage and scope, or else the figure's parameter `transport`."""
    observed = [
        item.value
        for item in view.observations.get("collective.transport", ())
        if (item.stage, item.scope) == (figure.stage, figure.scope) and item.status == MEASURED
    ]
    return observed[-1] if observed else figure.params.get("transport")
