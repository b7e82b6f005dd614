"""Test the severity of failures: its default, its override in packs, and its use in alerts and reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.integrations.alerts.rules import PACKS, criteria_of, read_table, rules_of
from fleet.judge.criteria import read_pack
from fleet.report.tables.reasons import reasons as rendered
from schemas.reports import ACTIONS, CRITICAL, FAIL, INCONCLUSIVE, PASS, WARNING, Verdict


def failed_verdict(action: str, name: str = "gpu.a", **over: str) -> Verdict:
    fields = {"host": "h1", "scope": "host", "name": name, "verdict": FAIL, "criterion": name, "reason": name}
    return Verdict(**{**fields, "action": action, **over})  # type: ignore[arg-type]


@pytest.mark.parametrize("action", ACTIONS)
def test_action_decides_the_severity_if_no_severity_is_stated(action: str) -> None:
    assert failed_verdict(action).severity == (WARNING if action in ("configure", "monitor", "none") else CRITICAL)
    assert failed_verdict(action, severity=WARNING).severity == WARNING


@pytest.mark.parametrize("verdict", [PASS, INCONCLUSIVE])
def test_only_failures_have_a_severity(verdict: str) -> None:
    assert failed_verdict("rma", verdict=verdict).severity == ""


def test_alerts_have_the_severity_of_their_criteria() -> None:
    criteria = criteria_of([read_pack(name) for name in PACKS])
    differing = {
        criterion.id: (criterion.severity, alert.severity)
        for group in read_table()
        for alert in group.alerts
        for rule in rules_of(alert, criteria)
        for criterion in rule.criteria
        if criterion.severity != alert.severity
    }
    assert differing == {}


PACK = """\
schema: rackproof.criteria/1
summary: ours
criteria:
  - {id: a, name: gpu.count, operator: eq, value: 1, unit: "1", action: rma, severity: warning, source: "ours alone"}
  - {id: b, name: gpu.count, operator: eq, value: 1, unit: "1", action: rma, source: "ours alone"}
"""


def test_pack_can_state_another_severity_than_that_of_the_action(tmp_path: Path) -> None:
    path = tmp_path / "ours.yml"
    path.write_text(PACK)
    assert {item.id: item.severity for item in read_pack(str(path)).criteria} == {"a": WARNING, "b": CRITICAL}


def test_reports_list_critical_failures_first() -> None:
    verdicts = [
        failed_verdict("none", "gpu.open", verdict=INCONCLUSIVE),
        failed_verdict("rma", "gpu.noise", severity=WARNING),
        failed_verdict("reboot", "gpu.dead"),
    ]
    causes = diagnose(verdicts, {})
    assert [verdicts[cause.verdicts[0]].name for cause in causes] == ["gpu.dead", "gpu.noise", "gpu.open"]
    assert [item.name for item in rendered(verdicts, causes, {})] == ["gpu.dead", "gpu.noise", "gpu.open"]
