"""A first look at one host: does it plainly pass, as far as that can be told without the others?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleet.judge import expectations
from fleet.judge.baseline import judge_presence
from fleet.judge.digests import CRITERION as DIGEST
from fleet.judge.digests import Told, digest_verdict, told_digests
from fleet.judge.drift import soaked
from fleet.judge.evidence import LAUNCH, HostView, Planned, from_benchmark
from fleet.judge.fleet_stats import Known
from fleet.judge.survey.benchmarks import Benchmarks
from fleet.judge.survey.found import Key, Looked
from fleet.judge.survey.snapshots import Snapshots
from fleet.judge.tally import Tally
from fleet.judge.uniformity import kin
from schemas.reports import PASS
from schemas.scopes import Scope


class Look:
    """Looks at one host after the other, and feeds what each shows into what is known of the fleet."""

    def __init__(self, planned: Planned, known: Known, tally: Tally) -> None:
        self._planned, self._known = planned, known
        self._snapshots, self._benchmarks = Snapshots(planned, known), Benchmarks(known, tally)
        self._kinds: dict[Key, int] = {}

    def forget(self) -> None:
        """Lets go of what only helps to look at more hosts."""
        self._kinds.clear()
        self._snapshots.forget()
        self._benchmarks.forget()

    def at(self, view: HostView) -> Looked | None:
        """What the host brings, where nothing speaks against it so far; None where it must be judged in full."""
        told = told_digests(view, self._planned)
        self._known.name(view)
        if view.has_record:
            self._known.digests.count(told)
        found = self._looked(view, told)
        if found is None:
            self._known.compare(view)
        else:
            self._feed(view, found)
        return found

    def _looked(self, view: HostView, digests: Sequence[tuple[Key, Told]]) -> Looked | None:
        if not self._plain(view):
            return None
        first = (expectations.model(view), expectations.constancy(view), soaked(view), judge_presence(view))
        found = Looked(view=view)
        for verdicts in first:
            for verdict in verdicts:
                if verdict.verdict != PASS:
                    return None
                found.passed.append((verdict, verdict.value))
        for key, told in digests:
            verdict = digest_verdict(told, PASS, "", limit=told.digest)
            found.same.append((DIGEST, key, told.digest, told.seen.scope, verdict))
        kind = self._kind(view)
        well = self._collectors(view) and self._benchmarks.read(view, kind, found)
        well = well and self._snapshots.read(view, kind, found)
        return found if well and self._figures(view, kind, found) else None

    def _figures(self, view: HostView, kind: int, found: Looked) -> bool:
        """What the fleet is measured by: of the benchmarks by the program, and of the snapshots."""
        values = found.values
        for key, scope, place in found.program.figures:
            value = values[place]
            if not isinstance(value, float | int) or not math.isfinite(value):
                return False
            found.figures.append((key, f"gang={view.host.gang}" if Scope.parse(scope).is_gang else scope, float(value)))
        found.figures += self._snapshots.figures(view, kind)
        ranks = [(of, figure, values[place]) for of, figure, place in found.program.ranks]
        if not all(isinstance(value, float | int) for _, _, value in ranks):
            return False
        found.ranks = ranks
        return True

    def _feed(self, view: HostView, found: Looked) -> None:
        for key, scope, number in found.figures:
            self._known.fleet.feed(key, scope, number)
        for criterion, key, what, value in found.alike:
            self._known.groups.feed(key, what, value, (criterion, *kin(view)))
        for of, figure, value in found.ranks:
            self._known.ranks.feed(of, figure, float(value or 0))

    def _plain(self, view: HostView) -> bool:
        """Whether it is of the kind that can be judged by what others say: no soak, no accepted record to compare with."""
        if not view.has_record or view.evidence.problem or view.unseen() or view.plan.baseline is not None:
            return False
        # Who speaks of a benchmark in a snapshot, or of the host's health in a benchmark, is none of ours.
        mixed = any(map(_of_ranks, view.observations.metrics))
        mixed = mixed or any(not from_benchmark(name) for record in view.evidence.records
                             for name in {seen.name for seen in record.observations})  # fmt: skip
        return not mixed and not any(record.soak for record in view.evidence.records)

    def _kind(self, view: HostView) -> int:
        """Hosts of one kind are judged alike where they say the same."""
        taken = tuple((shot.stage, shot.phase) for shot in view.evidence.snapshots())
        places = tuple(view.evidence.places().items())
        key: Key = (
            taken,
            view.host.scopes,
            view.host.device,
            view.fabric,
            view.host.gpu_model,
            bool(view.host.gang),
        )
        key = (*key, places, tuple(view.names.items()), *map(id, view.packs))
        return self._kinds.setdefault(key, len(self._kinds))

    def _collectors(self, view: HostView) -> bool:
        """Whether every collector worked in every snapshot."""
        return not any(
            metric.absent
            for name, told in view.observations.metrics.items()
            if name.startswith("collector.")
            for _, metric in told
        )


def _of_ranks(name: str) -> bool:
    return from_benchmark(name) or name.startswith(f"{LAUNCH}.")
