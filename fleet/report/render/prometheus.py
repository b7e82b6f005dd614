"""The report for Prometheus: `verdicts.prom`, a textfile of node_exporter, so that a fleet's last acceptance can be asked for.

A rehearsal's decisions are called `REHEARSAL accepted` and so on: no query for accepted GPUs finds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from fleet.report.render.format import clean
from schemas.reports import (
    ACCEPTED,
    ACTIONS,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    FleetReport,
    Verdict,
)

MOST_FAILURES = 500
"""A fleet that is all wrong must not be a flood of series; the gravest actions are kept. What is inconclusive is only counted."""
LABEL_LIMIT = 128
_FAILURE = ("host", "rack", "gpu", "scope", "serial", "criterion", "action")


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
        yield self._family("info", "What was judged, and by which Rackproof", ("profile", "rehearsal", "rackproof"), [
            ((report.profile, str(report.rehearsal).lower(), report.rackproof), 1.0)
        ])  # fmt: skip
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
        found = self._failures()
        yield self._family("failures", "Observations that fail the criterion", _FAILURE, found[:MOST_FAILURES])
        left_out = float(len(found[MOST_FAILURES:]))
        yield self._family("failures_left_out", f"Failures beyond {MOST_FAILURES}; 0: none", (), [((), left_out)])

    def _family(
        self, name: str, about: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> GaugeMetricFamily:
        said = f"REHEARSAL, no GPU was looked at. {about}" if self._report.rehearsal else about
        family = GaugeMetricFamily(f"rackproof_report_{name}", said, labels=("run_id", *labels))
        for values, value in samples:
            family.add_metric([clean(text) for text in (self._report.run_id, *values)], value)
        return family

    def _named(self, decision: str) -> str:
        return f"REHEARSAL {decision}" if self._report.rehearsal else decision

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
            for verdict in (PASS, FAIL, INCONCLUSIVE):
                yield (host.name, host.rack, verdict), float(counts[host.name, verdict])

    def _seen(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for host in self._report.hosts:
            for status in ("expected", "measured", "missing", "error", "skipped", "unsupported"):
                yield (host.name, host.rack, status), float(getattr(host.coverage, status))

    def _failures(self) -> list[tuple[tuple[str, ...], float]]:
        """The gravest action first."""
        counts = Counter(self._failure(verdict) for verdict in self._report.verdicts if verdict.verdict == FAIL)
        gravity = {action: number for number, action in enumerate(ACTIONS)}
        told = ((labels, float(count)) for labels, count in counts.items())
        return sorted(told, key=lambda item: (gravity.get(item[0][-1], len(gravity)), item[0]))

    def _failure(self, verdict: Verdict) -> tuple[str, ...]:
        places = dict(part.partition("=")[::2] for part in verdict.scope.split(","))
        texts = (
            verdict.host, self._racks.get(verdict.host, ""), places.get("gpu", ""), verdict.scope, verdict.serial,
            verdict.criterion, verdict.action,
        )  # fmt: skip
        return tuple(clean(text, LABEL_LIMIT) for text in texts)


def _seconds(when: str) -> float:
    """Seconds since 1970; NaN for what is no time."""
    try:
        return datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return float("nan")
