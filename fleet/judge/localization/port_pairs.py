"""The pair matrix of RDMA ports, below NCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet.judge.host_view import HostView
from fleet.judge.localization.gang_pairs import GangPairs
from fleet.judge.localization.launches import Attempt
from fleet.judge.localization.matrix import End
from schemas.records import Observation
from schemas.reports import Verdict
from schemas.scopes import Scope


class VerbsPairs(GangPairs):
    """The pairs of RDMA ports: the same matrix below NCCL, in which an end is a port."""

    benchmark = "verbs"

    def __init__(
        self, attempt: Attempt, views: Mapping[str, HostView], verdicts: Sequence[Verdict], collective_slow: bool
    ) -> None:
        self._scopes: dict[End, str] = {}
        super().__init__(attempt, views, verdicts, collective_slow)
        self._failed_alone = set()

    def _is_compared(self, observation: Observation) -> bool:
        """Return whether it is a write from host memory in one direction, or a latency. Each end reports what it sent."""
        settings = {"op": "write", "direction": "one_way", "memory": "host"}
        return all(observation.params.get(key, value) == value for key, value in settings.items())

    def _rail(self, view: HostView, observation: Observation) -> int | None:
        """Return the rail that the host reports; None without a port."""
        rail, scope = observation.params.get("rail"), Scope.parse(observation.scope)
        if type(rail) is not int or not scope.get("hca"):
            return None
        self._scopes[(view.host.name, rail)] = f"hca={scope.get('hca')},port={scope.get('port')}"
        return rail

    def _scope_of_end(self, view: HostView, rail: int) -> str:
        return self._scopes.get((view.host.name, rail), self._scope)
