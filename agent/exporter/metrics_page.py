"""docs/metrics.md: every metric that the exporter gives, out of the code that gives it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from agent.exporter.dcgm_names import HELP as DCGM_HELP
from agent.exporter.metric_names import BENCHMARK, COLLECTORS, COUNTER, GAUGE, INFO, RUN, SAMPLED, Own, exported, label
from agent.exporter.sampler import BUCKETS
from collectors.base import IDENTITY, Absent, Family

HEAD = """# Metrics

Every metric of `rackproof export`, made out of the code by `UPDATE_GOLDEN=1 pytest tests/unit/test_metrics_page.py`. Dashboards
and alert rules are written against these names.

- Units are base units, and stand at the end of a name. A flag is 0 or 1. `_total` ends a counter.
- A reading that cannot be had is no series, never a zero: `rackproof_readings_absent` counts them, and
  `rackproof_collector_success` is 0 where a whole source failed.
- What is a text (a name, a version, a serial) is a label of an `_info` series of its scope, whose value is 1:
  `rackproof_host_info`, `rackproof_gpu_info`, `rackproof_nic_info` …
- `gpu` is the NVML index, `uuid` names the part; elsewhere a device is `pci` (as sysfs spells it), `hca`, `nic`, `disk`.
- The targets that the `monitoring` role writes add `host`, `rack` and `run_id` to every series. Where a series has such a label
  of its own (`rackproof_run_info`), Prometheus keeps the target's and renames the other: `exported_run_id`, `exported_rack`.
"""


def page(families: Iterable[Family]) -> str:
    """The page, given every family that the collectors have."""
    known = list(families)
    sections = [
        ("Collectors and exporter", "How the exporter itself fares.", _own(COLLECTORS)),
        ("Run and stages", RUN_TEXT, _own(RUN)),
        ("Benchmarks, while they run", BENCHMARK_TEXT, _own(BENCHMARK)),
        ("Samples, ten a second", SAMPLED_TEXT, _own(SAMPLED)),
        ("Readings", "Of the collectors, at each scrape.", [row for row in map(_numbers, known) if row]),
        ("Texts", "Labels of the `_info` series.", sorted(row for row in map(_texts, known) if row)),
        ("`--compat dcgm`", DCGM_TEXT, [(name, UNTYPED, DCGM_LABELS, about) for name, about in DCGM_HELP.items()]),
    ]
    return "\n".join([HEAD, *(line for section in sections for line in _section(*section))]).rstrip() + "\n"


UNTYPED = "untyped"
Row = tuple[str, str, str, str]
"""Name, kind, labels, meaning."""
RUN_TEXT = """Read from `runs/live.json` in the state directory (`--state`), which whoever runs a stage writes every 2 s.
Without a run on this host there are no such series. Labels that some series lack are in brackets."""
BENCHMARK_TEXT = """The newest figures of the ranks of this host, given while their stage runs and for 5 minutes after its end.
What all ranks do together has no device among its labels."""
SAMPLED_TEXT = f"""Of each GPU, 10 times a second (`--sample-hz`; 0: not at all). The window is the last 30 s (`--window`), for
everybody who scrapes: a scrape every 15 s misses nothing. The histograms and counters grow from the start of the exporter on, so
that at any interval nothing is lost. Buckets of both: {", ".join(f"{bound:g}" for bound in BUCKETS)}. NVML stays open for it,
which a reset of a GPU and an unloading of the driver have to wait for: stop the exporter before.

```promql
# share of the last 5 minutes in which the GPU drew more than 95 % of its power limit
1 - rate(rackproof_gpu_power_of_limit_ratio_bucket{{le="0.95"}}[5m])
  / on(instance, gpu) rate(rackproof_gpu_power_of_limit_ratio_count[5m])
```"""
DCGM_LABELS = "gpu, UUID, device, modelName, pci_bus_id, Hostname"
DCGM_TEXT = """Beside our own names, so that dashboards made for dcgm-exporter (12239, 15117) work unchanged. `DCGM_FI_PROF_*`
are from Hopper on, where the driver lets this account read them; they are means since the last scrape by anybody."""


def _section(title: str, about: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"## {title}\n\n{about}\n"
    yield "| metric | type | labels | meaning |\n|---|---|---|---|"
    yield from (f"| `{name}` | {kind} | {labels} | {_plain(meaning)} |" for name, kind, labels, meaning in rows)
    yield ""


def _own(every: Iterable[Own]) -> list[Row]:
    return [(own.name, own.kind, ", ".join(own.labels), own.help) for own in every]


def _values(family: Family) -> list[object]:
    return [value for _, value in family.readings if not isinstance(value, Absent)]


def _numbers(family: Family) -> Row | None:
    values = _values(family)
    if values and all(isinstance(value, str) for value in values):
        return None
    name = exported(family.name, family.unit) + ("_total" if family.counter else "")
    kind = COUNTER if family.counter else GAUGE
    return name, kind, _labels(family), f"{family.help} (`{family.name}`)"


def _texts(family: Family) -> Row | None:
    if not any(isinstance(value, str) for value in _values(family)):
        return None
    places = [key for key in _places(family) if key not in IDENTITY]
    return (
        f"rackproof_{'_'.join(places) or 'host'}_info",
        INFO,
        f"{label(family.name)}",
        f"{family.help} (`{family.name}`)",
    )


def _places(family: Family) -> list[str]:
    return list(dict.fromkeys(key for labels, _ in family.readings for key in labels))


def _labels(family: Family) -> str:
    return ", ".join(_places(family))


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
