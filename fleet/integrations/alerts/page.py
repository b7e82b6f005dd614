"""The table of alerts and the criteria packs -> docs/alerts.md, the page that every alert's runbook_url points into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fleet.integrations.alerts.rules import Alert, Rule, criteria_of, read_table, rules_of, shares
from fleet.judge.criteria import Criterion, Pack
from fleet.quantities import NONE
from fleet.report.formatting import ACTIONS

HEAD = """# Alerts

What the alerts of [deploy/prometheus/rackproof.rules.yml](../deploy/prometheus/rackproof.rules.yml) mean, and what to do.
Limits are those of the criteria ([checks.md](checks.md)), which is where to change one: `rackproof criteria alerts mine.yml`
prints the rules with a site's own pack. What a criterion allows a counter over a run, an alert allows it over any hour.
`critical`: the host is not fit for work; `warning`: somebody should look.

How to load them: [deploy/prometheus](../deploy/prometheus/README.md).

**From an alert to the part**: `rackproof_gpu_info{host="HOST", gpu="3"}` has the serial, UUID, PCI address and part number of the
GPU; where the alert names an address, ask for `rackproof_gpu_info{host="HOST", pci_bus_id=~"(?i)0*:1b:00.0"}`. `rackproof doctor`
on the host looks at everything once more and says what fails, with the limits. The papers for its return come from a run:
`rackproof rma RUN --serial SERIAL`.
"""


def runbook(packs: Iterable[Pack]) -> str:
    """The page: a section an alert, under the heading that its runbook_url names."""
    criteria = criteria_of(packs)
    groups = read_table()
    lines = [HEAD, "| alert | severity | says |\n|---|---|---|"]
    for alert in (alert for group in groups for alert in group.alerts):
        lines.append(f"| [{alert.alert}](#{alert.alert.lower()}) | {alert.severity} | {_first(alert.meaning)} |")
    lines.append("")
    for group in groups:
        for name, expr in (group.record or {}).items():
            lines.append(f"Recorded as `{name}`:\n\n```\n{shares(expr, criteria).strip()}\n```\n")
        lines += [line for alert in group.alerts for line in _section(alert, criteria)]
    return "\n".join(lines).rstrip() + "\n"


def _first(text: str) -> str:
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
    held = f" for {rule.alert.hold}" if rule.alert.hold and not rule.criteria else ""
    expr = " ".join(rule.expr.split())
    yield f"`{_plain(expr)}`{held}"
    yield ", ".join(f"`{criterion.id}`" for criterion in rule.criteria) or NONE
    yield ACTIONS[rule.action].lower() or NONE
    sources = [criterion.source for criterion in rule.criteria] or [rule.alert.source]
    yield _plain(sources[0] if len(sources) == 1 else f"{len(sources)} codes, each with its source in checks.md")


def _plain(text: str) -> str:
    return text.replace("|", "\\|")
