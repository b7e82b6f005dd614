"""Test that no code parses sentences of a report.

If random texts replace the sentences, report files change only in these texts, and notifications do not change.
"""

from __future__ import annotations

import json
import random
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.integrations.notification import payload
from fleet.report.html.page import render_html
from fleet.report.junit import render_junit
from fleet.report.markdown import render_markdown
from fleet.report.prometheus import render_prometheus
from fleet.report.rejudge import changed_verdicts
from fleet.report.tables import devices, headline
from fleet.report.tables.reasons import reasons
from fleet.rma.parts import failed_parts
from schemas.plans import Plan
from schemas.records import to_json
from schemas.reports import KINDS, LINES, FleetReport, LineKind, Verdict, VerdictKind
from tests import ROOT
from tests.unit.fleet.integrations.test_revalidate import judged, skip_h2
from tests.unit.fleet.report.test_render import structure
from tests.unit.fleet.simulate.test_simulate import report_of, run_of

FAULTS = (
    *("xid79", "missing_gpu", "nvlink_down", "silent_corruption", "wrong_driver", "unreachable", "truncated_record"),
    *("hung", "ecc", "duplicate_serial", "missing_observations", "slow_hbm"),
)
FIXED_LINES = (LineKind.CHECK,)
"""Kinds of summary lines whose title and text are fixed terms, not sentences. `reworded` does not replace them."""


class RandomTexts:
    """Replaces each text by a random text; equal texts get equal replacements."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._texts: dict[str, str] = {"": ""}

    def __call__(self, text: str) -> str:
        if text not in self._texts:
            random_words = ("".join(self._random.choices(string.ascii_letters, k=8)) for _ in range(len(text) // 9 + 1))
            self._texts[text] = " ".join(random_words)
        return self._texts[text]


def reworded(report: FleetReport, texts: RandomTexts) -> FleetReport:
    """Return the report with every sentence replaced, except in summary lines of a kind in FIXED_LINES."""
    lines = tuple(
        line if line.kind in FIXED_LINES else replace(line, title=texts(line.title), text=texts(line.text))
        for line in report.acceptance.lines
    )
    return replace(
        report,
        acceptance=replace(report.acceptance, lines=lines),
        verdicts=tuple(
            replace(verdict, reason=texts(verdict.reason), detail=texts(verdict.detail)) for verdict in report.verdicts
        ),
        causes=tuple(replace(cause, title=texts(cause.title), why=texts(cause.why)) for cause in report.causes),
        quarantined=tuple(replace(item, reason=texts(item.reason)) for item in report.quarantined),
        changes=tuple(replace(change, text=texts(change.text)) for change in report.changes),
        hosts=tuple(
            replace(
                host,
                events=tuple(map(texts, host.events)),
                launches=tuple(replace(launch, reason=texts(launch.reason)) for launch in host.launches),
            )
            for host in report.hosts
        ),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> FleetReport:
    """Return the report of a simulated fleet with many kinds of verdicts."""
    return report_of(run_of(tmp_path_factory.mktemp("wording") / "r1", *FAULTS, hosts=13))


def tags(document: str) -> list[str]:
    """Return the tags of an XML document, and the attributes that are counts or types, without any other text."""
    return re.findall(r'</?[a-z-]+|(?:tests|failures|errors|skipped|type)="[^"]*"', document)


def rows(markdown: str) -> list[str]:
    """Return the first two characters and the number of vertical bars of each line."""
    return [f"{line[:2]}{line.count('|')}" for line in markdown.splitlines()]


def content(report: FleetReport) -> dict[str, Any]:
    """Return figures and structure of a report, without the texts that `reworded` replaces."""
    return {
        "decision": (report.decision, report.acceptance.status),
        "headline": headline.sentence(report),
        "checks": headline.checks(report),
        "caveats": len(headline.caveats(report)),
        "manifest": bool(headline.manifest(report)),
        "unjudged": headline.unjudged(report),
        "reasons": [
            replace(item, title="", why="", more=(), candidates=(), lead=replace(item.lead, reason="", detail=""))
            for item in reasons(report.verdicts, report.causes, {})
        ],
        "devices": devices.device_figures(report),
        "parts": [
            (part.host, part.scope, part.needs_part_work, len(part.findings))
            for part in failed_parts(report.causes, report.verdicts)
        ],
        "html": structure(render_html(report)),
        "junit": tags("".join(render_junit(report))),
        "markdown": rows(render_markdown(report)),
        "prometheus": render_prometheus(report),
    }


def test_reworded_report_has_the_same_figures_and_structure(report: FleetReport) -> None:
    other = reworded(report, RandomTexts(1))
    assert other.verdicts[0].reason != report.verdicts[0].reason
    before, after = content(report), content(other)
    for name, value in before.items():
        assert after[name] == value, name


def test_reworded_reasons_of_another_version_of_rackproof_are_not_a_change(report: FleetReport) -> None:
    old = document(replace(reworded(report, RandomTexts(1)), rackproof="0.9.0"))
    assert changed_verdicts(old, report) == ()


def document(report: FleetReport) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(to_json(report)))
    return result


@pytest.mark.parametrize("in_use", [True, False])
def test_notification_is_the_same_with_reworded_reasons(tmp_path: Path, in_use: bool) -> None:
    def change(plan: Plan, directory: Path) -> None:
        if in_use:
            skip_h2(plan, directory)

    report_document, plan = judged(tmp_path, change, rackproof_gang="none")
    texts = RandomTexts(1)
    sent = payload(report_document, plan, link="", directory=tmp_path)
    for verdict in report_document["verdicts"]:
        verdict["reason"] = texts(verdict["reason"])
    reworded_payload = payload(report_document, plan, link="", directory=tmp_path)
    assert sent == reworded_payload
    assert sent["state"] == ("busy" if in_use else "accepted")


def test_fleet_has_many_kinds_of_verdicts_and_lines(report: FleetReport) -> None:
    """The tests that use `report` cover only the kinds of verdicts and lines that it has."""
    kinds = {verdict.kind for verdict in report.verdicts}
    assert kinds >= {
        *(VerdictKind.LIMIT, VerdictKind.CHANGE, VerdictKind.PEERS, VerdictKind.IDENTITY),
        *(VerdictKind.MISSING, VerdictKind.UNFINISHED, VerdictKind.ERROR),
    }
    assert kinds <= {*KINDS}
    assert {line.kind for line in report.acceptance.lines} <= {*LINES}


def test_schema_lists_the_kinds_of_verdicts_and_lines() -> None:
    schema = json.loads((ROOT / "schemas" / "report.schema.json").read_text(encoding="utf-8"))
    verdict = schema["properties"]["verdicts"]["items"]["properties"]
    line = schema["properties"]["acceptance"]["properties"]["lines"]["items"]["properties"]
    assert verdict["kind"]["enum"] == list(KINDS)
    assert line["kind"]["enum"] == list(LINES)
    assert Verdict.__dataclass_fields__["kind"].default == VerdictKind.LIMIT
