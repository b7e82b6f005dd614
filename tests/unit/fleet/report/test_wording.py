"""No sentence of the judge is read by code: reworded at random, a report shows and sends the same."""

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
from fleet.rma.parts import parts
from schemas.plans import Plan
from schemas.records import to_json
from schemas.reports import KINDS, LINES, FleetReport, LineKind, Verdict, VerdictKind
from tests import ROOT
from tests.unit.fleet.integrations.test_revalidate import judged, skipped
from tests.unit.fleet.report.test_render import structure
from tests.unit.fleet.simulate.test_simulate import report_of, run_of

FAULTS = (
    *("xid79", "missing_gpu", "nvlink_down", "silent_corruption", "wrong_driver", "unreachable", "truncated_record"),
    *("hung", "ecc", "duplicate_serial", "missing_observations", "slow_hbm"),
)
SEEDS = (1, 2)
TITLES = (LineKind.CHECK,)
"""Lines whose title and text are words of the report, and not sentences: they are shown as they are."""


class Words:
    """A random text for every sentence, always the same for the same one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._texts: dict[str, str] = {"": ""}

    def __call__(self, text: str) -> str:
        if text not in self._texts:
            words = ("".join(self._random.choices(string.ascii_letters, k=8)) for _ in range(len(text) // 9 + 1))
            self._texts[text] = " ".join(words)
        return self._texts[text]


def reworded(report: FleetReport, words: Words) -> FleetReport:
    """The report with another text in place of every sentence."""
    lines = tuple(
        line if line.kind in TITLES else replace(line, title=words(line.title), text=words(line.text))
        for line in report.acceptance.lines
    )
    return replace(
        report,
        acceptance=replace(report.acceptance, lines=lines),
        verdicts=tuple(
            replace(verdict, reason=words(verdict.reason), detail=words(verdict.detail)) for verdict in report.verdicts
        ),
        quarantined=tuple(replace(item, reason=words(item.reason)) for item in report.quarantined),
        changes=tuple(replace(change, text=words(change.text)) for change in report.changes),
        hosts=tuple(
            replace(
                host,
                events=tuple(map(words, host.events)),
                launches=tuple(replace(launch, reason=words(launch.reason)) for launch in host.launches),
            )
            for host in report.hosts
        ),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> FleetReport:
    """A report with as many kinds of verdicts as a simulated fleet can have."""
    return report_of(run_of(tmp_path_factory.mktemp("wording") / "r1", *FAULTS, hosts=13))


def tags(document: str) -> list[str]:
    """The XML without its texts and the values of its attributes, but for the counts and types."""
    return re.findall(r'</?[a-z-]+|(?:tests|failures|errors|skipped|type)="[^"]*"', document)


def rows(markdown: str) -> list[str]:
    """How each line of a page begins, and how many cells it has."""
    return [f"{line[:2]}{line.count('|')}" for line in markdown.splitlines()]


def shown(report: FleetReport) -> dict[str, Any]:
    """What a report shows, apart from its sentences."""
    return {
        "decision": (report.decision, report.acceptance.status),
        "headline": headline.sentence(report),
        "checks": headline.checks(report),
        "caveats": len(headline.caveats(report)),
        "manifest": bool(headline.manifest(report)),
        "unjudged": headline.unjudged(report),
        "reasons": [replace(item, text="", detail="", more=()) for item in reasons(report.verdicts)],
        "devices": devices.device_figures(report),
        "parts": [(part.host, part.place, part.returned, len(part.findings)) for part in parts(report.verdicts)],
        "html": structure(render_html(report)),
        "junit": tags("".join(render_junit(report))),
        "markdown": rows(render_markdown(report)),
        "prometheus": render_prometheus(report),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_report_shows_the_same_in_other_words(report: FleetReport, seed: int) -> None:
    other = reworded(report, Words(seed))
    assert other.verdicts[0].reason != report.verdicts[0].reason
    before, after = shown(report), shown(other)
    for what, value in before.items():
        assert after[what] == value, what


@pytest.mark.parametrize("seed", SEEDS)
def test_judging_again_with_a_version_of_other_words_changes_nothing(report: FleetReport, seed: int) -> None:
    old = document(replace(reworded(report, Words(seed)), rackproof="0.9.0"))
    assert changed_verdicts(old, report) == ()


def document(report: FleetReport) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(to_json(report)))
    return result


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("in_use", [True, False])
def test_notification_has_the_same_state_in_other_words(tmp_path: Path, seed: int, in_use: bool) -> None:
    def change(plan: Plan, directory: Path) -> None:
        if in_use:
            skipped(plan, directory)

    made, plan = judged(tmp_path, change, rackproof_gang="none")
    words = Words(seed)
    sent = payload(made, plan, link="", directory=tmp_path)
    for verdict in made["verdicts"]:
        verdict["reason"] = words(verdict["reason"])
    again = payload(made, plan, link="", directory=tmp_path)
    assert sent == again
    assert sent["state"] == ("busy" if in_use else "accepted")


def test_fleet_has_many_kinds_of_verdicts_and_lines(report: FleetReport) -> None:
    """What the other tests reword is not one kind alone."""
    kinds = {verdict.kind for verdict in report.verdicts}
    assert kinds >= {
        *(VerdictKind.LIMIT, VerdictKind.CHANGE, VerdictKind.PEERS, VerdictKind.IDENTITY),
        *(VerdictKind.MISSING, VerdictKind.UNFINISHED, VerdictKind.ERROR),
    }
    assert kinds <= {*KINDS}
    assert {line.kind for line in report.acceptance.lines} <= {*LINES}


def test_schema_lists_the_kinds() -> None:
    schema = json.loads((ROOT / "schemas" / "report.schema.json").read_text(encoding="utf-8"))
    verdict = schema["properties"]["verdicts"]["items"]["properties"]
    line = schema["properties"]["acceptance"]["properties"]["lines"]["items"]["properties"]
    assert verdict["kind"]["enum"] == list(KINDS)
    assert line["kind"]["enum"] == list(LINES)
    assert Verdict.__dataclass_fields__["kind"].default == VerdictKind.LIMIT
