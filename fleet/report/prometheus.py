"""The report for Prometheus: `verdicts.prom`, a textfile of node_exporter, so that a fleet's last acceptance can be asked for.

A rehearsal's decisions are called `REHEARSAL accepted` and so on, a simulated run's `SIMULATED accepted`: no query for
accepted GPUs finds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from fleet.quantities import finite
from fleet.report.format import clean, params_text
from schemas.reports import (
    ACCEPTED,
    ACTIONS,
    ALL,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    FleetReport,
    Verdict,
)
from schemas.scopes import Scope

MOST_FAILURES = 500
"""A fleet that is all wrong must not be a flood of series; the gravest actions are kept. What is inconclusive is only counted."""
LABEL_LIMIT = 128
_FAILURE = ("host", "rack", "gpu", "scope", "serial", "criterion", "action")
_FIGURE = (*_FAILURE, "name", "stage", "params", "unit", "operator")


def render_prometheus(report: FleetReport) -> str:
    """The report in Prometheus' text format: decisions, counts of verdicts, coverage, and what failed or is not known."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Report(report))
    return generate_latest(registry).decode()


class _Report:
    """A collector of what does not change any more."""

    def __init__(self, report: FleetReport) -> None:
        self._report = report
        self._racks = {host.name: host.rack for host in report.hosts}

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing beforehand."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every family; each series has the run, so that files of several runs can lie side by side."""
        report = self._report
        flags = tuple(str(flag).lower() for flag in (report.rehearsal, report.simulated))
        labels = ("profile", "rehearsal", "simulated", "rackproof")
        yield self._family(
            "info",
            "What was judged, and by which Rackproof",
            labels,
            [((report.profile, *flags, report.rackproof), 1.0)],
        )
        yield self._family(
            "end_timestamp_seconds", "When the last host's record ended", (), [((), _seconds(report.ended))]
        )
        yield self._family("decision", "1 for the decision on the fleet", ("decision",), self._decisions())
        yield self._family(
            "host_decision", "1 for the decision on the host", ("host", "rack", "decision"), self._host_decisions()
        )
        yield self._family(
            "host_verdicts", "Verdicts on the host's observations", ("host", "rack", "verdict"), self._counts()
        )
        yield self._family(
            "host_observations",
            "Observations that the plan expects of the host",
            ("host", "rack", "status"),
            self._seen(),
        )
        found = self._failures(waived=False)
        yield self._family("failures", "Observations that fail the criterion", _FAILURE, found[:MOST_FAILURES])
        left_out = float(len(found[MOST_FAILURES:]))
        yield self._family("failures_left_out", f"Failures beyond {MOST_FAILURES}; 0: none", (), [((), left_out)])
        waived = self._failures(waived=True)[:MOST_FAILURES]
        yield self._family("waived", "Observations that fail a criterion, for which somebody answers", _FAILURE, waived)
        for name, about, figures in (
            ("failure_value", "What was found where a criterion fails, in the unit of its label", "value"),
            ("failure_limit", "What the criterion wanted there", "limit"),
        ):
            yield self._family(name, about, _FIGURE, self._figures(figures))

    def _family(
        self, name: str, about: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> GaugeMetricFamily:
        said = f"{self._report.mark}, no GPU was looked at. {about}" if self._report.mark else about
        family = GaugeMetricFamily(f"rackproof_report_{name}", said, labels=("run_id", *labels))
        for values, value in samples:
            family.add_metric([clean(text) for text in (self._report.run_id, *values)], value)
        return family

    def _named(self, decision: str) -> str:
        return f"{self._report.mark} {decision}".strip()

    def _decisions(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for decision in (ACCEPTED, REJECTED, INCOMPLETE):
            yield (self._named(decision),), float(decision == self._report.decision)

    def _host_decisions(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for host in self._report.hosts:
            for decision in (ACCEPTED, REJECTED, INCOMPLETE):
                yield (host.name, host.rack, self._named(decision)), float(decision == host.decision)

    def _counts(self) -> Iterator[tuple[tuple[str, ...], float]]:
        counts = Counter((verdict.host, verdict.verdict) for verdict in self._report.verdicts)
        for host in self._report.hosts:
            # Of a large fleet the report does not hold what passed of each host: then it is not told, and not 0.
            for verdict in (PASS, FAIL, INCONCLUSIVE) if self._report.detail == ALL else (FAIL, INCONCLUSIVE):
                yield (host.name, host.rack, verdict), float(counts[host.name, verdict])

    def _seen(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for host in self._report.hosts:
            for status in ("expected", "measured", "missing", "error", "skipped", "unsupported"):
                yield (host.name, host.rack, status), float(getattr(host.coverage, status))

    def _failures(self, *, waived: bool) -> list[tuple[tuple[str, ...], float]]:
        """The gravest action first."""
        counts = Counter(self._failure(verdict) for verdict in self._failed() if (verdict.waiver is not None) == waived)
        told = ((labels, float(count)) for labels, count in counts.items())
        return sorted(told, key=lambda item: (_gravity(item[0][-1]), item[0]))

    def _failed(self) -> Iterator[Verdict]:
        return (verdict for verdict in self._report.verdicts if verdict.verdict == FAIL)

    def _figures(self, kind: str) -> Iterator[tuple[tuple[str, ...], float]]:
        """Value or limit of each failure that is a number, the gravest action first."""
        standing = [verdict for verdict in self._failed() if verdict.waiver is None]
        ordered = sorted(standing, key=lambda verdict: _gravity(verdict.action))[:MOST_FAILURES]
        found: dict[tuple[str, ...], float] = {}
        for verdict in ordered:
            params = params_text(verdict.params)
            more = (verdict.name, verdict.stage, params, verdict.unit, verdict.operator)
            value = getattr(verdict, kind)
            number = float(value) if isinstance(value, bool) else finite(value)
            if number is not None:
                found[(*self._failure(verdict), *(clean(text, LABEL_LIMIT) for text in more))] = number
        yield from found.items()

    def _failure(self, verdict: Verdict) -> tuple[str, ...]:
        gpu = Scope.parse(verdict.place).get("gpu")
        texts = (
            verdict.host, self._racks.get(verdict.host, ""), gpu, verdict.scope, verdict.serial,
            verdict.criterion, verdict.action,
        )  # fmt: skip
        return tuple(clean(text, LABEL_LIMIT) for text in texts)


def _gravity(action: str) -> int:
    return ACTIONS.index(action) if action in ACTIONS else len(ACTIONS)


def _seconds(when: str) -> float:
    """Seconds since 1970; NaN for what is no time."""
    try:
        return datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return float("nan")
