"""Generate docs/alerts.md from the table of alerts and the criteria packs.

The `runbook_url` of every alert leads to this page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fleet.integrations.alerts.rules import Alert, Rule, criteria_of, read_table, rules_of, shares
from fleet.judge.criteria import Criterion, Pack
from fleet.quantities import NONE
from fleet.report.formatting import ACTIONS

HEAD = """# Alerts

This page explains each alert of [deploy/prometheus/rackproof.rules.yml](../deploy/prometheus/rackproof.rules.yml) and what to do.
An alert on a criterion fires if a reading violates the criterion's limit ([checks.md](checks.md)). To change a limit, change the
criterion in a pack of your own: `rackproof criteria alerts mine.yml` prints the rules with that pack. If a criterion limits the
increase of a counter during a run, the alert fires if the counter rises by more than this limit within an hour. In the first hour
after a boot such an alert does not fire, because links go up and down while a healthy host boots. The severity `critical` means
that the host is unfit for use, and `warning` that the host must be inspected.

To load the alerts, see [deploy/prometheus](../deploy/prometheus/README.md).

**From an alert to the part**: an alert on a GPU, a network adapter or a disk has the labels `host`, `slot` (PCI address) and
`serial` (of an InfiniBand adapter: its node GUID; of an Ethernet adapter: its MAC address). If a part is gone, its alert keeps
these labels as long as Prometheus scrapes the host; the series `rackproof:missing:…` are the parts that the host listed before
and does not list now. An alert on the PCIe link of an adapter or a drive has the PCI address in the label `pci`, and neither
`slot` nor `serial`. `rackproof doctor` on the host takes all readings again, without benchmarks, and lists those that violate a
limit. The annotation `rma` is the command that creates the RMA package for the part. The package contains the measurements of
one run (here `runs/rack12`), and states the alert as the reason:

```
rackproof rma runs/rack12 --host r01-h03 --serial 1650123000456 --reason RackproofGpuRemapFailed
```

An alert has no label `serial` if the part has reported no serial since Prometheus began to scrape the host. The report of the
last run names such a part by its slot.
"""


def runbook(packs: Iterable[Pack]) -> str:
    """Return the page, with one section for each alert. The `runbook_url` of an alert links to the heading of its section."""
    criteria = criteria_of(packs)
    groups = read_table()
    lines = [HEAD, "| alert | severity | meaning |\n|---|---|---|"]
    for alert in (alert for group in groups for alert in group.alerts):
        lines.append(
            f"| [{alert.alert}](#{alert.alert.lower()}) | {alert.severity} | {_first_sentence(alert.meaning)} |"
        )
    lines.append("")
    for group in groups:
        if group.record:
            lines.append(f"## Series used by {', '.join(alert.alert for alert in group.alerts)}\n")
        for name, expr in (group.record or {}).items():
            lines.append(f"`{name}` is recorded as:\n\n```\n{shares(expr, criteria).strip()}\n```\n")
        lines += [line for alert in group.alerts for line in _section(alert, criteria)]
    return "\n".join(lines).rstrip() + "\n"


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


def _section(alert: Alert, criteria: Mapping[str, Criterion]) -> Iterator[str]:
    yield f"## {alert.alert}\n"
    yield f"**{alert.severity}.** {alert.meaning}\n"
    yield f"{alert.remedy}\n"
    yield "| fires on | criterion | action | source |\n|---|---|---|---|"
    for rule in rules_of(alert, criteria):
        yield f"| {' | '.join(_cells(rule))} |"
    yield ""


def _cells(rule: Rule) -> Iterator[str]:
    duration = f" for {rule.alert.hold}" if rule.alert.hold else ""
    expr = " ".join(rule.expr.split())
    yield f"`{_escape_pipes(expr)}`{duration}"
    yield ", ".join(f"`{criterion.id}`" for criterion in rule.criteria) or NONE
    yield ACTIONS[rule.action].lower() or NONE
    sources = [criterion.source for criterion in rule.criteria] or [rule.alert.source]
    yield _escape_pipes(sources[0] if len(sources) == 1 else f"{len(sources)} codes, each with its source in checks.md")


def _escape_pipes(text: str) -> str:
    return text.replace("|", "\\|")
