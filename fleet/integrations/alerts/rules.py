"""The table of alerts and the criteria packs -> a rule file for Prometheus. Limits come from the criteria alone.

What a criterion allows over a run (`delta`) an alert allows over any WINDOW. A criterion on a text becomes a matcher on the
label of the exporter's `_info` series. Criteria that differ in one label alone, as those of the XIDs do, become one rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fleet.inventory.yaml_files import LOADER
from fleet.judge.criteria import Criterion, Pack
from schemas.errors import UsageError
from schemas.readings import PROMETHEUS_SUFFIX, READINGS

TABLE = Path(__file__).with_name("table.yml")
RUNBOOK = "docs/alerts.md"
PACKS = ("common", "fleet-relative")
"""The packs of which the table speaks."""
WINDOW = "1h"
BROKEN = {"eq": "!=", "le": ">", "lt": ">=", "ge": "<", "gt": "<="}
"""Operator of a criterion -> the comparison that holds where the criterion does not."""
_HEAD = """# Made by `rackproof criteria alerts` of fleet/integrations/alerts/table.yml and the criteria packs: change those, not this file.
# What each alert means and asks for: {runbook}
"""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A line of the table: one alert, for which there may be several rules."""

    alert: str
    severity: str
    """critical: the host is not fit for work. warning: somebody should look."""
    summary: str
    description: str
    meaning: str
    """For the runbook: what has happened."""
    remedy: str
    """For the runbook: what to do."""
    criteria: tuple[str, ...] = ()
    """Ids of criteria that it speaks for."""
    names: tuple[str, ...] = ()
    """Observations: it speaks for every criterion on one of them."""
    expr: str = ""
    """What no criterion says, in PromQL. `<share ID>` stands for the share that the criterion ID wants."""
    hold: str = ""
    """How long an `expr` must hold; a criterion's rule fires at once."""
    action: str = "monitor"
    source: str = ""
    """Where an `expr` comes from."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Alerts that are evaluated together, and the series that are recorded before them."""

    name: str
    alerts: tuple[Alert, ...] = ()
    record: Mapping[str, str] | None = None
    """Name of a recorded series -> PromQL."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of an alert: `criteria` are those whose limit it holds."""

    alert: Alert
    expr: str
    action: str
    criterion: str = ""
    wanted: str = ""
    criteria: tuple[Criterion, ...] = ()


def read_table(path: Path = TABLE) -> tuple[Group, ...]:
    """The groups of alerts. The file is our own, and what is wrong with it is a defect: TypeError, KeyError."""
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)  # noqa: S506 - a SafeLoader
    return tuple(
        Group(
            name=name,
            alerts=tuple(_alert(item) for item in group.get("alerts", ())),
            record=group.get("record"),
        )
        for name, group in document.items()
    )


def _alert(item: Mapping[str, Any]) -> Alert:
    found: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
    found["hold"] = found.pop("for", "")
    return Alert(**found)


def criteria_of(packs: Iterable[Pack]) -> dict[str, Criterion]:
    """Id -> criterion; of two packs the later one has the last word."""
    return {criterion.id: criterion for pack in packs for criterion in pack.criteria}


def rules_of(alert: Alert, criteria: Mapping[str, Criterion]) -> list[Rule]:
    """The rules of an alert.

    Raises:
        UsageError: a criterion's limit is none that a rule can hold, or the packs have no such criterion.
    """
    meant = [_known(criteria, name) for name in alert.criteria]
    meant += [criterion for criterion in criteria.values() if criterion.name in alert.names]
    grouped: dict[tuple[Any, ...], list[Criterion]] = {}
    for criterion in meant:
        grouped.setdefault(_likeness(criterion), []).append(criterion)
    rules = [_rule(alert, alike) for alike in grouped.values()]
    if alert.expr:
        rules.append(Rule(alert=alert, expr=shares(alert.expr, criteria), action=alert.action))
    return rules


def shares(text: str, criteria: Mapping[str, Criterion]) -> str:
    """`text` with `<share ID>` as the number that the criterion wants. Raises UsageError as `rules_of`."""

    def share(match: re.Match[str]) -> str:
        criterion = _known(criteria, match.group(1))
        if criterion.fleet_fraction is None:
            raise UsageError(f"criterion {criterion.id}: it compares with no fleet, as the alert made of it does")
        return f"{criterion.fleet_fraction:g}"

    return re.sub(r"<share ([\w-]+)>", share, text)


def _known(criteria: Mapping[str, Criterion], name: str) -> Criterion:
    if name not in criteria:
        raise UsageError(f"no pack has the criterion {name}, of which an alert speaks")
    return criteria[name]


def _likeness(criterion: Criterion) -> tuple[Any, ...]:
    """What criteria have in common that one rule can speak for: all but one label, whose value their id has in it."""
    varying = _varying(criterion)
    fixed = tuple(sorted((key, value) for key, value in criterion.where.items() if key != varying))
    common = (criterion.name, criterion.operator, str(criterion.value), criterion.action, criterion.delta)
    return (*common, fixed, varying, _id(criterion))


def _varying(criterion: Criterion) -> str:
    parts = criterion.id.split("-")
    return next((key for key, value in criterion.where.items() if str(value) in parts and str(value).isdigit()), "")


def _id(criterion: Criterion) -> str:
    """Its id, with the label in place of the label's value."""
    key = _varying(criterion)
    told = f"{{{{ $labels.{key} }}}}"
    return criterion.id.replace(str(criterion.where[key]), told) if key else criterion.id


def _rule(alert: Alert, alike: Sequence[Criterion]) -> Rule:
    first, key = alike[0], _varying(alike[0])
    if first.value is None or READINGS.get(first.name) is None:
        raise UsageError(f"criterion {first.id}: a rule of Prometheus can hold a plain value of a reading alone")
    labels = {name: str(value) for name, value in first.where.items() if name != key}
    matchers = [f'{name}="{value}"' for name, value in labels.items()]
    if key:
        matchers.append(f'{key}=~"{"|".join(str(criterion.where[key]) for criterion in alike)}"')
    return Rule(
        alert=alert,
        expr=_expression(first, matchers),
        action=first.action,
        criterion=_id(first),
        wanted=_wanted(first) + ("" if key else f"; source: {first.source}"),
        criteria=tuple(alike),
    )


def _expression(criterion: Criterion, matchers: Sequence[str]) -> str:
    if isinstance(criterion.value, str):
        return _text(criterion, matchers)
    series = exported(criterion.name) + (f"{{{', '.join(matchers)}}}" if matchers else "")
    limit = f"{BROKEN[criterion.operator]} {float(criterion.value or 0):.15g}"
    if not criterion.delta:
        return f"{series} {limit}"
    if not READINGS[criterion.name].counter:
        raise UsageError(f"criterion {criterion.id}: what changed of a reading that is no counter needs a rule by hand")
    return f"increase({series}[{WINDOW}]) {limit}"


def _text(criterion: Criterion, matchers: Sequence[str]) -> str:
    """What is text in the record is a label of an info series, and not there where nothing could be read."""
    label = re.sub(r"^(gpu|host)\.", "", criterion.name).replace(".", "_")
    places = "_".join(READINGS[criterion.name].labels) or "host"
    other = f'{label}!~"{criterion.value}|"'
    return f"rackproof_{places}_info{{{', '.join([*matchers, other])}}}"


def exported(name: str) -> str:
    """A reading's name in Prometheus."""
    reading = READINGS[name]
    return f"rackproof_{name.replace('.', '_')}{PROMETHEUS_SUFFIX[reading.unit]}{'_total' if reading.counter else ''}"


def _wanted(criterion: Criterion) -> str:
    value = criterion.value
    told = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    words = {"eq": "", "le": "at most ", "lt": "less than ", "ge": "at least ", "gt": "more than "}
    return f"wanted: {words[criterion.operator]}{told}" + (f" in {WINDOW}" if criterion.delta else "")


def rule_file(packs: Iterable[Pack], runbook: str = RUNBOOK, groups: Sequence[Group] | None = None) -> str:
    """The rule file as YAML. `runbook` is where docs/alerts.md can be read. Raises UsageError as `rules_of`."""
    criteria = criteria_of(packs)
    document = {
        "groups": [
            {"name": f"rackproof-{group.name}", "rules": list(_rules(group, criteria, runbook))}
            for group in groups or read_table()
        ]
    }
    text: str = yaml.dump(
        document, Dumper=_Indented, sort_keys=False, explicit_start=True, width=110, allow_unicode=True
    )
    return text.replace("---\n", f"---\n{_HEAD.format(runbook=runbook)}", 1)


def _rules(group: Group, criteria: Mapping[str, Criterion], runbook: str) -> Iterator[dict[str, Any]]:
    for name, expr in (group.record or {}).items():
        yield {"record": name, "expr": expr.strip()}
    for alert in group.alerts:
        for rule in rules_of(alert, criteria):
            yield _entry(rule, runbook, criteria)


def _entry(rule: Rule, runbook: str, criteria: Mapping[str, Criterion]) -> dict[str, Any]:
    alert, held = rule.alert, {} if rule.criteria or not rule.alert.hold else {"for": rule.alert.hold}
    labels = {"severity": alert.severity, "action": rule.action}
    labels |= {"criterion": rule.criterion} if rule.criterion else {}
    wanted = f" ({rule.criterion}, {rule.wanted})" if rule.criterion else ""
    return {
        "alert": alert.alert,
        "expr": rule.expr.strip(),
        **held,
        "labels": labels,
        "annotations": {
            "summary": alert.summary,
            "description": shares(alert.description, criteria) + wanted,
            "action": rule.action,
            "runbook_url": f"{runbook}#{alert.alert.lower()}",
        },
    }


class _Indented(yaml.SafeDumper):
    """Lists are indented, and what has several lines keeps them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _scalar(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Indented.add_representer(str, _scalar)
