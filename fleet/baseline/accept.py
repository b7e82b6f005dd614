"""Accept a run: add it to the baselines of its hosts and GPUs."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.records import baseline_store
from fleet.records.host_state import HostState, host_state, merge_levels
from fleet.records.load import REPORT_BYTES, Run
from fleet.signature.rejudged import verdict_differences
from schemas import documents
from schemas.baselines import GPU, HOST, Accepted, Level, PartBaseline
from schemas.errors import RunError, UsageError
from schemas.reports import ACCEPTED, FleetReport, Verdict
from schemas.run_directory import RunDirectory

MAX_RUNS = 20
"""Maximum number of runs in the baseline of a part. If there are more, the oldest are dropped."""


@dataclass(frozen=True, kw_only=True)
class Approval:
    """The person who accepts a run, the date and the reason."""

    who: str
    at: str
    why: str = ""


def refuse_unaccepted(run: Run, report: FleetReport) -> str:
    """Check that the run is accepted, and return the digest of its report.

    Raises:
        RunError: there is no report, its decision is not `accepted`, or judging the run again gives another result.
    """
    path = RunDirectory(run.directory).report
    try:
        content = documents.read_bytes(path, max_bytes=REPORT_BYTES)
        document = documents.checked(content, "report", source=str(path), max_bytes=REPORT_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: run `rackproof report {run.directory}` first") from None
    decision = document["decision"]
    if decision != ACCEPTED:
        raise RunError(
            f"run {run.plan.run_id} is {decision}: only an accepted run can be a baseline; waive known failures with "
            "rackproof_waivers or `rackproof report --waivers FILE`"
        )
    if report.decision != ACCEPTED:
        raise RunError(
            f"run {run.plan.run_id} is {report.decision} when it is judged again, but the decision in its report is `accepted`: "
            "give the criteria and waivers with which the report was written (--criteria, --waivers), or write the report again"
        )
    if differences := verdict_differences(document, report):
        more = f" (and {len(differences) - 1} more)" if differences[1:] else ""
        raise RunError(
            f"{path} does not match the records: {differences[0]}{more}: give the criteria and waivers with which it was "
            f"written (--criteria, --waivers), or run `rackproof report {run.directory}` again and read it"
        )
    return hashlib.sha256(content).hexdigest()


def baselines_of_run(run: Run, report: FleetReport, digest: str, by: Approval) -> Iterator[PartBaseline]:
    """Yield the baseline of each GPU and each host from this run alone."""
    kind = baseline_store.kind_of(run.plan)
    for host in run.plan.hosts:
        state = host_state(run.evidence[host.name])
        waived = [verdict for verdict in report.verdicts if verdict.host == host.name and verdict.waiver]
        for name, gpu in state.gpus_by_identity().items():
            slot = f"gpu={gpu.index}"
            gpu_waived = [verdict for verdict in waived if verdict.part_scope == slot]
            yield PartBaseline(
                kind=kind,
                part=GPU,
                id=name,
                host=host.name,
                slot=slot,
                runs=(_accepted(run, report, digest, by, gpu_waived),),
                figures=_levels(state, name),
                gpus=(gpu,),
            )
        yield PartBaseline(
            kind=kind,
            part=HOST,
            id=host.name,
            host=host.name,
            runs=(_accepted(run, report, digest, by, waived),),
            figures=_levels(state, ""),
            gpus=state.gpus,
            parts=state.parts,
            versions=state.versions,
        )


def _accepted(run: Run, report: FleetReport, digest: str, by: Approval, waived: Iterable[Verdict]) -> Accepted:
    waivers = dict.fromkeys(f"{verdict.waiver.target}: {verdict.waiver}" for verdict in waived if verdict.waiver)
    return Accepted(
        run_id=run.plan.run_id,
        nonce=run.plan.nonce,
        report=digest,
        status=report.acceptance.status,
        at=by.at,
        by=by.who,
        why=by.why,
        began=run.plan.created,
        waivers=tuple(waivers),
    )


def _levels(state: HostState, part: str) -> tuple[Level, ...]:
    return tuple(figure.level for figure in state.figures.get(part, {}).values())


def with_earlier(new: PartBaseline, old: PartBaseline | None) -> PartBaseline:
    """Return `new` with the runs and figures of `old`, the earlier baseline of the same part, added to its own.

    If `old` already contains the run of `new`, the figures of this run are taken from `new`. If `old` contains a run that began
    later, everything but the figures is taken from `old`. The newest MAX_RUNS runs are kept.

    Raises:
        UsageError: `old` contains a different run with the same name, or MAX_RUNS runs that began later.
    """
    if old is None:
        return new
    added = new.runs[-1]
    for run in old.runs:
        if run.run_id == added.run_id and run.nonce != added.nonce:
            raise UsageError(
                f"the baseline of {new.id} has another run named {added.run_id}: restart the baseline with --replace, "
                "or use another run name"
            )
    others = [run for run in old.runs if run.run_id != added.run_id]
    later = [run for run in others if _beginning(run) > _beginning(added)]
    if len(later) >= MAX_RUNS:
        raise UsageError(
            f"the baseline of {new.id} has {len(later)} runs that began after {added.run_id}, and keeps only the newest "
            f"{MAX_RUNS}: accept a newer run, or restart the baseline with --replace"
        )
    runs = (*(run for run in others if run not in later), added, *later)[-MAX_RUNS:]
    kept_runs = {run.run_id for run in runs}
    old_levels = {level.key: level for level in old.figures}
    new_levels = {level.key: level for level in new.figures}
    figures = []
    for key in {**old_levels, **new_levels}:
        levels = [_restrict_level(level, kept_runs) for level in (old_levels.get(key), new_levels.get(key)) if level]
        if any(level.values for level in levels):
            figures.append(merge_levels([level for level in levels if level.values]))
    return replace(old if later else new, runs=runs, figures=tuple(figures))


def _beginning(run: Accepted) -> str:
    """Return when a run began: at the latest when it was accepted, because the clock may have been wrong when it was planned."""
    return min(run.began, run.at)


def _restrict_level(level: Level, runs: set[str]) -> Level:
    return replace(level, values={run: value for run, value in level.values.items() if run in runs})


PartKey = tuple[str, str, str]
"""Kind, part (`host` or `gpu`) and id of a baseline."""


def key(baseline: PartBaseline) -> PartKey:
    """Return the key of a baseline."""
    return baseline.kind, baseline.part, baseline.id


def accept(
    run: Run,
    report: FleetReport,
    directory: Path,
    by: Approval,
    *,
    replace_runs: bool,
    replaced: Container[PartKey] = (),
) -> list[PartBaseline]:
    """Add an accepted run to the baselines of its parts and return them.

    Args:
        run: the run.
        report: the result of judging the run again.
        directory: directory of the baselines.
        by: who accepts the run, when and why.
        replace_runs: whether the run replaces the earlier runs in the baselines of its parts.
        replaced: keys of the baselines that the same command has already written for another run. Even if `replace_runs` is true,
            `run` is added to these baselines, so that they get all runs that the command accepts.

    Raises:
        RunError: the run is not accepted, an existing baseline is invalid, or a baseline cannot be written.
        UsageError: a baseline contains a different run with the same name.
    """
    digest = refuse_unaccepted(run, report)
    try:
        baselines = [
            with_earlier(
                new, baseline_store.read(directory, *key(new)) if not replace_runs or key(new) in replaced else None
            )
            for new in baselines_of_run(run, report, digest, by)
        ]
    except documents.DocumentError as error:
        raise RunError(f"{error}: remove the file, or restart the baseline with --replace") from None
    try:
        # The baseline of a host lists its GPUs. `baselines_of_run` yields those first, so the baseline of a host is written only
        # after those of its GPUs.
        for baseline in baselines:
            baseline_store.write(directory, baseline)
    except (OSError, documents.DocumentError) as error:
        raise RunError(f"cannot write the baseline in {directory}: {error}") from None
    return baselines
