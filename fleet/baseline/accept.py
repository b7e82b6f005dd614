"""`rackproof baseline accept`: an accepted run becomes what its parts are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.records import baseline_store
from fleet.records.host_state import Sight, merged, serials, sight
from fleet.records.load import Run
from fleet.signature.rejudged import verdicts_differ
from schemas import documents
from schemas.baselines import GPU, HOST, Accepted, Kept, Level
from schemas.errors import RunError, UsageError
from schemas.reports import ACCEPTED, FleetReport, Verdict
from schemas.run_directory import RunDirectory

MOST_RUNS = 20
"""Runs of a part that a baseline keeps; of more the oldest go."""
REPORT_BYTES = 4_000_000_000


@dataclass(frozen=True, kw_only=True)
class By:
    """Who accepts, when and why."""

    who: str
    at: str
    why: str = ""


def refuse_unaccepted(run: Run, report: FleetReport) -> str:
    """Digest of the run's report.

    Raises:
        RunError: there is no report, it does not say that the fleet is accepted, or judged again the run is not, or not so.
    """
    path = RunDirectory(run.directory).report
    try:
        content = documents.read_bytes(path, max_bytes=REPORT_BYTES)
        said = documents.checked(content, "report", source=str(path), max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: run `rackproof report {run.directory}` first") from None
    decision = said["decision"]
    if decision != ACCEPTED:
        raise RunError(
            f"run {run.plan.run_id} is {decision}: only an accepted run can be a baseline. What somebody answers for is waived "
            "by name (rackproof_waivers, or `rackproof report --waivers FILE`)"
        )
    if report.decision != ACCEPTED:
        raise RunError(
            f"run {run.plan.run_id} is {report.decision} when it is judged again, though its report says accepted: name the "
            "criteria and waivers with which it was reported (--criteria, --waivers), or report it anew"
        )
    if differ := verdicts_differ(said, report):
        more = f" (and {len(differ) - 1} more)" if differ[1:] else ""
        raise RunError(
            f"{path} is not what the records give: {differ[0]}{more}: name the criteria and waivers with which it was reported "
            f"(--criteria, --waivers), or run `rackproof report {run.directory}` again and read it"
        )
    return hashlib.sha256(content).hexdigest()


def kept(run: Run, report: FleetReport, digest: str, by: By) -> Iterator[Kept]:
    """The baselines that the run alone makes: each host's and each GPU's."""
    kind = baseline_store.kind_of(run.plan)
    for host in run.plan.hosts:
        seen = sight(run.evidence[host.name])
        waived = [verdict for verdict in report.verdicts if verdict.host == host.name and verdict.waiver]
        for serial, gpu in serials(seen.gpus).items():
            slot = f"gpu={gpu.index}"
            about = [verdict for verdict in waived if verdict.place == slot]
            yield Kept(
                kind=kind,
                part=GPU,
                id=serial,
                host=host.name,
                slot=slot,
                runs=(_accepted(run, report, digest, by, about),),
                figures=_levels(seen, serial),
                gpus=(gpu,),
            )
        yield Kept(
            kind=kind,
            part=HOST,
            id=host.name,
            host=host.name,
            runs=(_accepted(run, report, digest, by, waived),),
            figures=_levels(seen, ""),
            gpus=seen.gpus,
            parts=seen.parts,
            versions=seen.versions,
        )


def _accepted(run: Run, report: FleetReport, digest: str, by: By, waived: Iterable[Verdict]) -> Accepted:
    told = dict.fromkeys(f"{verdict.waiver.target}: {verdict.waiver}" for verdict in waived if verdict.waiver)
    return Accepted(
        run_id=run.plan.run_id,
        nonce=run.plan.nonce,
        report=digest,
        status=report.acceptance.status,
        at=by.at,
        by=by.who,
        why=by.why,
        waivers=tuple(told),
    )


def _levels(seen: Sight, serial: str) -> tuple[Level, ...]:
    return tuple(figure.level for figure in seen.figures.get(serial, {}).values())


def with_earlier(new: Kept, old: Kept | None) -> Kept:
    """A part's baseline with one more run in it; a run that it has already is taken in anew.

    Raises:
        UsageError: another run of the same name is in it.
    """
    if old is None:
        return new
    added = new.runs[-1]
    for run in old.runs:
        if run.run_id == added.run_id and run.nonce != added.nonce:
            raise UsageError(
                f"the baseline of {new.id} has another run called {added.run_id}: begin it anew with --replace, "
                "or name runs apart"
            )
    runs = (*(run for run in old.runs if run.run_id != added.run_id), added)[-MOST_RUNS:]
    known = {run.run_id for run in runs}
    before = {level.key: level for level in old.figures}
    after = {level.key: level for level in new.figures}
    figures = []
    for key in {**before, **after}:
        levels = [_within(level, known) for level in (before.get(key), after.get(key)) if level]
        if any(level.values for level in levels):
            figures.append(merged([level for level in levels if level.values]))
    return replace(new, runs=runs, figures=tuple(figures))


def _within(level: Level, runs: set[str]) -> Level:
    return replace(level, values={run: value for run, value in level.values.items() if run in runs})


def accept(run: Run, report: FleetReport, directory: Path, by: By, *, anew: bool) -> list[Kept]:
    """Takes an accepted run into the baselines of its parts, and returns those. `report`: the run, judged again.

    Raises:
        RunError: the run is not accepted, or a baseline that is there cannot be believed.
        UsageError: as `with_earlier`.
    """
    digest = refuse_unaccepted(run, report)
    try:
        found = [
            with_earlier(new, None if anew else baseline_store.read(directory, new.kind, new.part, new.id))
            for new in kept(run, report, digest, by)
        ]
    except documents.DocumentError as error:
        raise RunError(f"{error}: remove it, or begin it anew with --replace") from None
    try:
        for one in found:  # of a host the GPUs first: its own file, by which they are found, comes last
            baseline_store.write(directory, one)
    except (OSError, documents.DocumentError) as error:
        raise RunError(f"the baseline cannot be written in {directory}: {error}") from None
    return found
