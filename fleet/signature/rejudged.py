"""Check report.json against the records: judge the run again and compare verdict by verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.judge.criteria import PACKS, shipped_packs
from fleet.records.load import PLAN_BYTES
from fleet.report.rejudge import changed_verdicts
from fleet.signature.sums import digest
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.records import to_json
from schemas.reports import FleetReport
from schemas.run_directory import RunDirectory

REPORT_BYTES = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """The result of judging the records again."""

    report: FleetReport
    differences: tuple[str, ...]
    """One line per difference of report.json; empty if it matches the records exactly."""


Judge = Callable[[Path, Sequence[str], Sequence[str]], FleetReport]
"""Run directory, additional packs and additional waivers -> report, as `rackproof report` computes it."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Packs and waivers beside those of the plan, as given on the command line."""

    criteria: tuple[str, ...] = ()
    waivers: tuple[str, ...] = ()


def judge_again(run_dir: Path, rules: Rules, judge: Judge) -> Rejudged:
    """Judge the run again and compare with its report.json. Raise RunError if report or plan is missing."""
    try:
        document: Mapping[str, Any] = documents.read(RunDirectory(run_dir).report, "report", max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: run rackproof report {run_dir}") from None
    report = judge(run_dir, rules.criteria, rules.waivers)
    return Rejudged(report=report, differences=tuple(differences(document, report)))


def differences(document: Mapping[str, Any], report: FleetReport) -> list[str]:
    """Describe where a report.json differs from the records: decisions, else verdicts, else other fields."""
    if lines := verdict_differences(document, report):
        return lines
    current: Mapping[str, Any] = json.loads(json.dumps(to_json(report)))
    keys = sorted(key for key in {*document, *current} - {"rackproof"} if document.get(key) != current.get(key))
    return [f"{key} differs" for key in keys]


def verdict_differences(document: Mapping[str, Any], report: FleetReport) -> list[str]:
    """Describe where the decisions, of the fleet and of each host, and the verdicts of a report.json differ."""
    lines = [_difference("decision", document["decision"], report.decision)]
    before = {host["name"]: host["decision"] for host in document["hosts"]}
    after = {host.name: host.decision for host in report.hosts}
    lines += [_difference(host, before.get(host), after.get(host)) for host in {**before, **after}]
    lines += map(str, changed_verdicts(document, report))
    return [line for line in lines if line]


def _difference(what: str, reported: str | None, judged: str | None) -> str:
    if reported == judged:
        return ""
    return f"{what}: {reported or 'missing'} in report.json, {judged or 'missing'} from the records"


def digests(run_dir: Path, rules: Rules) -> dict[str, str]:
    """Return the SHA-256 of every pack and waiver file that may judge the run, by pack name or path.

    Raises:
        UsageError: a file that the plan or the rules name cannot be read.
    """
    plan = documents.read(RunDirectory(run_dir).plan, "plan", max_bytes=PLAN_BYTES)
    by_name = {name: digest(PACKS / f"{name}.yml") for name in shipped_packs()}
    for name in (*plan["criteria"], *rules.criteria, *rules.waivers):
        if name not in by_name:
            try:
                by_name[name] = digest(Path(name))
            except RunError as error:
                raise UsageError(f"{name}: cannot read this pack or waiver file: {error}") from None
    return by_name
