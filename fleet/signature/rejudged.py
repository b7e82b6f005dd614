"""Whether report.json is what the records give: judged anew, and compared verdict by verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.judge.criteria import PACKS, shipped_packs
from fleet.records.load import PLAN_BYTES
from fleet.report.rejudge import rejudged as compared
from fleet.signature.sums import digest
from schemas import documents
from schemas.errors import RunError, UsageError
from schemas.records import to_json
from schemas.reports import FleetReport
from schemas.run_directory import RunDirectory

REPORT_BYTES = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """What judging the records again gives."""

    report: FleetReport
    differences: tuple[str, ...]
    """In a line each, where report.json says something else; empty where it is exactly what the records give."""


Judge = Callable[[Path, Sequence[str], Sequence[str]], FleetReport]
"""Run directory, further packs and further waivers -> its report: what `rackproof report` does before it writes."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a run is judged by beside what its plan says: names of packs and files, as on the command line."""

    criteria: tuple[str, ...] = ()
    waivers: tuple[str, ...] = ()


def rejudged(run_dir: Path, rules: Rules, judge: Judge) -> Rejudged:
    """The run judged again, beside its report.json. Raises RunError where there is none, or no plan."""
    try:
        there: Mapping[str, Any] = documents.read(RunDirectory(run_dir).report, "report", max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: make it with rackproof report {run_dir}") from None
    report = judge(run_dir, rules.criteria, rules.waivers)
    return Rejudged(report=report, differences=tuple(differences(there, report)))


def differences(there: Mapping[str, Any], report: FleetReport) -> list[str]:
    """Where a report.json is not what the records give: decisions first, then verdicts, then whatever else."""
    if told := verdicts_differ(there, report):
        return told
    here: Mapping[str, Any] = json.loads(json.dumps(to_json(report)))
    rest = sorted(key for key in {*there, *here} - {"rackproof"} if there.get(key) != here.get(key))
    return [f"{key} differs" for key in rest]


def verdicts_differ(there: Mapping[str, Any], report: FleetReport) -> list[str]:
    """Where the decisions, of the fleet and of each host, and the verdicts of a report.json are not what the records give."""
    found = [_differs("decision", there["decision"], report.decision)]
    before = {host["name"]: host["decision"] for host in there["hosts"]}
    after = {host.name: host.decision for host in report.hosts}
    found += [_differs(host, before.get(host), after.get(host)) for host in {**before, **after}]
    found += map(str, compared(there, report))
    return [text for text in found if text]


def _differs(what: str, there: str | None, here: str | None) -> str:
    said = f"{what}: {there or 'not there'} in report.json, {here or 'not there'} by the records"
    return said if there != here else ""


def digests(run_dir: Path, rules: Rules) -> dict[str, str]:
    """Pack or file of waivers by which a run may be judged -> its SHA-256: `h200-sxm`, or the path of the operator's own.

    Raises:
        UsageError: a file of theirs is not there.
    """
    plan = documents.read(RunDirectory(run_dir).plan, "plan", max_bytes=PLAN_BYTES)
    found = {name: digest(PACKS / f"{name}.yml") for name in shipped_packs()}
    for name in (*plan["criteria"], *rules.criteria, *rules.waivers):
        if name not in found:
            try:
                found[name] = digest(Path(name))
            except RunError as error:
                raise UsageError(f"{name}: a pack or waivers that cannot be read: {error}") from None
    return found
