"""Generate docs/metrics.md: every metric of the exporter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from agent.exporter.dcgm_names import HELP as DCGM_HELP
from agent.exporter.earlier_names import earlier_name
from agent.exporter.metric_names import (
    BENCHMARK,
    COLLECTORS,
    COUNTER,
    GAUGE,
    INFO,
    RUN,
    SAMPLED,
    MetricSpec,
    info_label,
    prometheus_name,
)
from agent.exporter.sampler import BUCKETS
from collectors.base import IDENTITY_LABELS, Absent, Family
from schemas.readings import PROMETHEUS_NAMES

HEAD = """# Metrics

Every metric of `rackproof export`. The dashboards and alert rules use these names. `UPDATE_GOLDEN=1 pytest
tests/unit/agent/exporter/test_metrics_page.py` generates this page from the code.

- Names end with the base unit, and those of counters with `_total`. A flag is 0 or 1.
- A missing reading has no series, never a zero. `rackproof_readings_absent` counts missing readings, and
  `rackproof_collector_success` is 0 if a whole collector failed.
- The systemd service that the playbooks install may not read the state of the clock (`ProtectClock`). It exports none of
  `rackproof_clock_synchronized`, `rackproof_clock_offset_seconds` and `rackproof_clock_error_…`.
- Readings that are texts (names, versions, serials) are labels. The host and each of its parts (GPU, NIC …) have one series with
  these labels and the value 1: `rackproof_host_info`, `rackproof_gpu_info`, `rackproof_nic_info` …
- `gpu` is the NVML index, and `uuid` identifies the GPU. Other devices have the labels `pci` (as in sysfs), `hca`, `nic`, `disk`.
- The scrape targets that the `monitoring` role configures add the labels `host`, `rack` and `run_id` to every series.
  `rackproof_run_info` has labels `run_id` and `rack` of its own, which Prometheus renames to `exported_run_id` and
  `exported_rack`.
"""


def page(families: Iterable[Family]) -> str:
    """Return the page, given every family of the collectors."""
    families = list(families)
    sections = [
        ("Collectors and exporter", "State of the exporter itself.", _spec_rows(COLLECTORS)),
        ("Run and stages", RUN_TEXT, _spec_rows(RUN)),
        ("Benchmarks, while they run", BENCHMARK_TEXT, _spec_rows(BENCHMARK)),
        ("Samples, ten per second", SAMPLED_TEXT, _spec_rows(SAMPLED)),
        ("Readings", "Readings of the collectors at each scrape.", [row for row in map(_number_row, families) if row]),
        ("Texts", "Labels of the `_info` series.", sorted(row for row in map(_text_row, families) if row)),
        ("`--compat 1.0`", EARLIER_TEXT, [row for row in map(_earlier_row, families) if row]),
        ("`--compat dcgm`", DCGM_TEXT, [(name, UNTYPED, DCGM_LABELS, text) for name, text in DCGM_HELP.items()]),
    ]
    return "\n".join([HEAD, *(line for section in sections for line in _section(*section))]).rstrip() + "\n"


UNTYPED = "untyped"
Row = tuple[str, str, str, str]
"""Name, kind, labels, meaning."""
RUN_TEXT = """These metrics come from the file `runs/live.json` in the state directory (`--state`). The process that runs a stage
writes this file every 2 s. A host that has had no run has none of these series. Labels in parentheses are missing from some
series."""
BENCHMARK_TEXT = """The latest figures of the ranks of this host, while their stage runs and for 5 minutes after its end.
`rackproof_benchmark_wrong_results` and `rackproof_benchmark_unmeasured` remain until another run starts on this host. A figure
that all ranks measured together has no device label."""
SAMPLED_TEXT = f"""Each GPU is sampled 10 times a second (`--sample-hz`; 0: never); temperature and memory clock are read in every
fifth sample. The window is the last 30 s (`--window`), so with a scrape every 15 s each sample is in the window of at least one
scrape. Sampling starts with the first scrape and continues between scrapes, so histograms and counters include every sample at
any scrape interval.
Buckets of both histograms: {", ".join(f"{bound:g}" for bound in BUCKETS)}. NVML stays open for the
sampling: stop the exporter before you reset a GPU or unload the driver.

```promql
# share of the last 5 minutes in which the GPU drew more than 95 % of its power limit
1 - rate(rackproof_gpu_power_of_limit_ratio_bucket{{le="0.95"}}[5m])
  / on(instance, gpu) rate(rackproof_gpu_power_of_limit_ratio_count[5m])
```"""
EARLIER_TEXT = """`--compat 1.0` (`rackproof_exporter_compat: ["1.0"]`) exports these names of Rackproof 1.0 in addition to the
names above, for rules and dashboards that still use the old names. The names changed because Prometheus reserves the ending
`_count` for histograms and summaries. The old names will be removed in the next release."""
DCGM_LABELS = "gpu, UUID, device, modelName, pci_bus_id, Hostname"
DCGM_TEXT = """`--compat dcgm` exports these names in addition to the names above, so that the Grafana dashboards 12239 and 15117
for dcgm-exporter work unchanged. The metrics `DCGM_FI_PROF_*` exist only from Hopper on, and only if the driver allows the
exporter's account to read them. Their values are means over the time since the previous reading of the hardware (`--every`)."""


def _section(title: str, text: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"## {title}\n\n{text}\n"
    yield "| metric | type | labels | meaning |\n|---|---|---|---|"
    yield from (f"| `{name}` | {kind} | {labels} | {_escape(meaning)} |" for name, kind, labels, meaning in rows)
    yield ""


def _spec_rows(specs: Iterable[MetricSpec]) -> list[Row]:
    return [(spec.name, spec.kind, ", ".join(spec.labels), spec.help) for spec in specs]


def _values(family: Family) -> list[object]:
    return [value for _, value in family.readings if not isinstance(value, Absent)]


def _number_row(family: Family) -> Row | None:
    values = _values(family)
    if values and all(isinstance(value, str) for value in values):
        return None
    name = prometheus_name(family.name, family.unit) + ("_total" if family.counter else "")
    kind = COUNTER if family.counter else GAUGE
    return name, kind, _labels(family), f"{family.help} (`{family.name}`)"


def _earlier_row(family: Family) -> Row | None:
    if family.name not in PROMETHEUS_NAMES or not _number_row(family):
        return None
    return earlier_name(family.name), GAUGE, _labels(family), f"now `{prometheus_name(family.name, family.unit)}`"


def _text_row(family: Family) -> Row | None:
    if not any(isinstance(value, str) for value in _values(family)):
        return None
    scope_labels = [key for key in family.label_names() if key not in IDENTITY_LABELS]
    return (
        f"rackproof_{'_'.join(scope_labels) or 'host'}_info",
        INFO,
        info_label(family.name),
        f"{family.help} (`{family.name}`)",
    )


def _labels(family: Family) -> str:
    return ", ".join(family.label_names())


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
