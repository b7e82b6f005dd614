"""Render the report for Prometheus: `verdicts.prom`, for node_exporter's textfile collector.

The decisions of a rehearsal are named `REHEARSAL accepted` and so on, and the decisions of a simulated run `SIMULATED accepted`.
So a query for the decision `accepted` does not match them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from fleet.quantities import finite
from fleet.report.formatting import clean, params_text
from schemas.reports import (
    ACCEPTED,
    ALL,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    FleetReport,
    Verdict,
    action_rank,
)
from schemas.scopes import Scope
from schemas.times import seconds_or_nan

MAX_FAILURES = 500
"""Maximum number of series in each metric of failures. If there are more, those with the most severe actions are kept."""
LABEL_LIMIT = 128
_FAILURE = ("host", "rack", "gpu", "scope", "serial", "criterion", "action")
_FIGURE = (*_FAILURE, "name", "stage", "params", "unit", "operator")


def render_prometheus(report: FleetReport) -> str:
    """Return the report in Prometheus' text format: decisions, counts of verdicts, coverage and failures."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ReportCollector(report))
    return generate_latest(registry).decode()


class _ReportCollector:
    """A collector of one finished report."""

    def __init__(self, report: FleetReport) -> None:
        self._report = report
        self._racks = {host.name: host.rack for host in report.hosts}

    def describe(self) -> list[GaugeMetricFamily]:
        """Return no descriptions. The registry uses them only to find metrics with the same name."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every metric family; each series has the label `run_id`, so that files of several runs can coexist."""
        report = self._report
        flags = tuple(str(flag).lower() for flag in (report.rehearsal, report.simulated))
        labels = ("profile", "rehearsal", "simulated", "rackproof")
        yield self._family(
            "info",
            "Profile, kind of run and Rackproof version",
            labels,
            [((report.profile, *flags, report.rackproof), 1.0)],
        )
        yield self._family(
            "end_timestamp_seconds", "When the last record of the run ended", (), [((), seconds_or_nan(report.ended))]
        )
        other = "0 for each other decision"
        yield self._family("decision", f"1 for the decision on the fleet, {other}", ("decision",), self._decisions())
        yield self._family(
            "host_decision",
            f"1 for the decision on the host, {other}",
            ("host", "rack", "decision"),
            self._host_decisions(),
        )
        yield self._family(
            "host_verdicts", "Verdicts on the host's observations", ("host", "rack", "verdict"), self._counts()
        )
        yield self._family(
            "host_observations",
            "Observations that the plan expects of the host",
            ("host", "rack", "status"),
            self._coverage(),
        )
        failures = self._failures(waived=False)
        yield self._family(
            "failures", "Observations that fail a criterion and are not waived", _FAILURE, failures[:MAX_FAILURES]
        )
        yield self._family(
            "failures_left_out",
            f"Failures left out, because they exceed {MAX_FAILURES} or because report.json does not list them",
            (),
            [((), float(len(failures[MAX_FAILURES:]) + self._unlisted()))],
        )
        waived = self._failures(waived=True)[:MAX_FAILURES]
        yield self._family("waived", "Observations that fail a criterion and are waived", _FAILURE, waived)
        for name, about, figures in (
            ("failure_value", "Value that fails the criterion; the label unit states its unit", "value"),
            ("failure_limit", "Limit of the failed criterion; the label unit states its unit", "limit"),
        ):
            yield self._family(name, about, _FIGURE, self._figures(figures))

    def _family(
        self, name: str, about: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> GaugeMetricFamily:
        help_text = f"{self._report.mark}, no GPU was tested. {about}" if self._report.mark else about
        family = GaugeMetricFamily(f"rackproof_report_{name}", help_text, labels=("run_id", *labels))
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
        listed = sum(verdict.verdict in (FAIL, INCONCLUSIVE) for verdict in self._report.verdicts)
        if listed < sum(row.failed + row.inconclusive for row in self._report.judged):
            return  # the failures that report.json does not list would be missing from the counts
        counts = Counter((verdict.host, verdict.verdict) for verdict in self._report.verdicts)
        for host in self._report.hosts:
            # The report of a large fleet does not list passes, so their number is not known: omit the series.
            for verdict in (PASS, FAIL, INCONCLUSIVE) if self._report.detail == ALL else (FAIL, INCONCLUSIVE):
                yield (host.name, host.rack, verdict), float(counts[host.name, verdict])

    def _coverage(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for host in self._report.hosts:
            for status in ("expected", "measured", "missing", "error", "skipped", "unsupported"):
                yield (host.name, host.rack, status), float(getattr(host.coverage, status))

    def _failures(self, *, waived: bool) -> list[tuple[tuple[str, ...], float]]:
        """Return the labels of each failure with the number of verdicts that have them, the most severe action first."""
        counts = Counter(self._failure(verdict) for verdict in self._failed() if (verdict.waiver is not None) == waived)
        samples = ((labels, float(count)) for labels, count in counts.items())
        return sorted(samples, key=lambda item: (action_rank(item[0][-1]), item[0]))

    def _unlisted(self) -> int:
        """Return the number of failed verdicts that the report counts, but does not list."""
        total = sum(row.failed for row in self._report.judged)  # `judged` is empty on the page of one host
        return max(0, total - sum(1 for _ in self._failed()))

    def _failed(self) -> Iterator[Verdict]:
        return (verdict for verdict in self._report.verdicts if verdict.verdict == FAIL)

    def _figures(self, kind: str) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the value or limit (`kind`) of the first MAX_FAILURES failures without a waiver, most severe action first.

        A boolean counts as 0 or 1; other values that are not numbers are left out.
        """
        effective = [verdict for verdict in self._failed() if verdict.waiver is None]
        ordered = sorted(effective, key=lambda verdict: (action_rank(verdict.action), self._failure(verdict)))[
            :MAX_FAILURES
        ]
        samples: dict[tuple[str, ...], float] = {}
        for verdict in ordered:
            params = params_text(verdict.params)
            more = (verdict.name, verdict.stage, params, verdict.unit, verdict.operator)
            value = getattr(verdict, kind)
            number = float(value) if isinstance(value, bool) else finite(value)
            if number is not None:
                samples[(*self._failure(verdict), *(clean(text, LABEL_LIMIT) for text in more))] = number
        yield from samples.items()

    def _failure(self, verdict: Verdict) -> tuple[str, ...]:
        gpu = Scope.parse(verdict.part_scope).get("gpu")
        texts = (
            verdict.host, self._racks.get(verdict.host, ""), gpu, verdict.scope, verdict.serial,
            verdict.criterion, verdict.action,
        )  # fmt: skip
        return tuple(clean(text, LABEL_LIMIT) for text in texts)
