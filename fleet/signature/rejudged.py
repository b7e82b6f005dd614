"""Check report.json against the records: judge the run again and compare verdict by verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet.history.former_runs import history_from_json
from fleet.judge.criteria import PACKS, located_packs, shipped_packs
from fleet.records.load import REPORT_BYTES
from fleet.report.rejudge import changed_verdicts
from fleet.signature.sums import digest
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.records import to_json
from schemas.reports import FleetReport
from schemas.run_directory import PLAN_BYTES, RunDirectory


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """The result of judging the records again."""

    report: FleetReport
    differences: tuple[str, ...]
    """One line per difference from report.json; empty if report.json matches the records exactly."""


Judge = Callable[[Path, Sequence[str], Sequence[str]], FleetReport]
"""Function that judges a run again and returns the report, as `rackproof report` does.

Its arguments are the run directory, and packs and waivers in addition to those of the plan.
"""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Packs (files with criteria) and waiver files from the command line, in addition to those of the plan."""

    criteria: tuple[str, ...] = ()
    waivers: tuple[str, ...] = ()


def judge_again(run_dir: Path, rules: Rules, judge: Judge) -> Rejudged:
    """Judge the run again and compare the result with its report.json. Raise RunError if report.json or the plan is missing."""
    try:
        document: Mapping[str, Any] = documents.read(RunDirectory(run_dir).report, "report", max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: run rackproof report {run_dir}") from None
    report = judge(run_dir, rules.criteria, rules.waivers)
    # The comparison with former runs cannot be recomputed from the records. Copy it from report.json, because the report files
    # (HTML, Markdown, …) contain it and are rendered again from `report`.
    if "history" in document:
        report = replace(report, history=history_from_json(document["history"]))
    return Rejudged(report=report, differences=tuple(differences(document, report)))


def differences(document: Mapping[str, Any], report: FleetReport) -> list[str]:
    """Describe how report.json (`document`) differs from the run judged again (`report`).

    Compare decisions and verdicts first. Compare all other fields only if these are equal.
    """
    if lines := verdict_differences(document, report):
        return lines
    current: Mapping[str, Any] = json.loads(json.dumps(to_json(report)))
    keys = sorted(key for key in {*document, *current} - {"rackproof"} if document.get(key) != current.get(key))
    return [f"`{key}` differs" for key in keys]


def verdict_differences(document: Mapping[str, Any], report: FleetReport) -> list[str]:
    """Describe each difference in the decision on the fleet, in the decision on a host, or in a verdict."""
    lines = [_difference("decision", document["decision"], report.decision)]
    reported = {host["name"]: host["decision"] for host in document["hosts"]}
    judged = {host.name: host.decision for host in report.hosts}
    lines += [_difference(host, reported.get(host), judged.get(host)) for host in {**reported, **judged}]
    lines += map(str, changed_verdicts(document, report))
    return [line for line in lines if line]


def _difference(name: str, reported: str | None, judged: str | None) -> str:
    if reported == judged:
        return ""
    return f"{name}: {reported or 'missing'} in report.json, {judged or 'missing'} when judged again"


def rule_digests(run_dir: Path, rules: Rules) -> dict[str, str]:
    """Return file -> SHA-256 for all shipped packs, the packs that the plan names, and the packs and waiver files in `rules`.

    The key is the name of a shipped pack, or the path of any other file. If another file takes the place of a pack that the plan
    names (`located_packs`), the key is the path in the plan.

    Raises:
        UsageError: one of these packs or waiver files cannot be read.
    """
    plan = documents.read(RunDirectory(run_dir).plan, "plan", max_bytes=PLAN_BYTES)
    by_name = {name: digest(PACKS / f"{name}.yml") for name in shipped_packs()}
    packs = located_packs(plan["criteria"], rules.criteria)
    for name, path in {**packs, **{name: name for name in rules.waivers}}.items():
        if name not in by_name:
            try:
                by_name[name] = digest(Path(path))
            except RunError as error:
                raise UsageError(f"{name}: cannot read this pack or waiver file: {error}") from None
    return by_name
