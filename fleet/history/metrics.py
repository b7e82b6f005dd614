"""Render the newest state of each rack as OpenMetrics, for node_exporter's textfile collector or a page that Prometheus scrapes.

Only gauges are used, so the text is valid as OpenMetrics and in Prometheus' older text format. The age of a rack's newest run is
`time() - rackproof_history_rack_last_run_timestamp_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest

from fleet.history.database import History
from schemas.baselines import REAL
from schemas.reports import ACCEPTED, INCOMPLETE, REJECTED

_NEWEST = """
with dated as (select parts.*, runs.clock = '' as is_right from parts join runs using (nonce) where part = 'host'),
newest as (select host, arg_max(nonce, (is_right, began, nonce)) as nonce from dated group by host),
states as (select dated.* from dated join newest using (host, nonce))
"""
_HOSTS = f"""{_NEWEST}
select rack, decision, count(distinct host) from states group by all order by all"""
_RUNS = f"""{_NEWEST},
last as (select rack, arg_max(nonce, (is_right, began, nonce)) as nonce from states group by rack)
select last.rack, runs.run, runs.profile, runs.decision, epoch(runs.began) from last join runs using (nonce) order by all"""
_CAUSES = f"""{_NEWEST}
select states.rack, problem, action, count(distinct (causes.host, slot))
from causes join (select host, nonce, rack from states) as states using (host, nonce) where not waived
group by all order by all"""


def render_metrics(history: History) -> str:
    """Return the state of each rack: hosts by decision, causes by problem, and the newest run.

    The state of a host is that of its newest run with a right date or, if none of its runs has a right date, of its newest run.
    So all hosts of a rack count, even if they were tested in different runs. In rehearsals and simulated runs the decisions have
    names such as `REHEARSAL accepted`, as in the file verdicts.prom of a run.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_HistoryCollector(history))
    return str(generate_latest(registry).decode())  # type: ignore[no-untyped-call]


class _HistoryCollector:
    """A collector of the newest state of each rack."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._mark = "" if history.kind == REAL else history.kind.upper()

    def describe(self) -> list[GaugeMetricFamily]:
        """Return no descriptions. The registry uses them only to find metrics with the same name."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every metric family."""
        hosts = self._family("hosts", "Hosts by the decision on them in their newest run", "decision")
        counts = {(rack, decision): count for rack, decision, count in self._history.rows(_HOSTS)}
        for rack in sorted({rack for rack, _ in counts}):
            for decision in (ACCEPTED, REJECTED, INCOMPLETE):
                hosts.add_metric([rack, self._named(decision)], counts.get((rack, decision), 0))
        yield hosts
        about = "Parts with causes that are not waived, in the newest run of their host"
        causes = self._family("causes", about, "problem", "action")
        for *labels, count in self._history.rows(_CAUSES):
            causes.add_metric(labels, count)
        yield causes
        info = self._family(
            "last_run_info",
            "Newest run of the rack, and the decision on that whole run, including hosts in other racks",
            "run_id",
            "profile",
            "decision",
        )
        began = self._family("last_run_timestamp_seconds", "When the newest run of the rack began")
        for rack, run, profile, decision, seconds in self._history.rows(_RUNS):
            info.add_metric([rack, run, profile, self._named(decision)], 1)
            began.add_metric([rack], seconds)
        yield from (info, began)
        about = "Damaged or missing files of the history; these metrics lack the runs in these files"
        yield GaugeMetricFamily("rackproof_history_unreadable_files", about, value=len(self._history.problems))

    def _family(self, name: str, about: str, *labels: str) -> GaugeMetricFamily:
        about = f"{self._mark}, no GPU was tested. {about}" if self._mark else about
        return GaugeMetricFamily(f"rackproof_history_rack_{name}", about, labels=("rack", *labels))

    def _named(self, decision: str) -> str:
        return f"{self._mark} {decision}".strip()
