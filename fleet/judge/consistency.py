"""Check that the evidence of a host is complete and does not contradict itself. A contradiction is inconclusive, never a pass.

Nothing here is compared with a limit. Each check names the elements that disagree, so that the cause can be found. Possible
causes are an edited record, an agent that lost a part of a record, or a host whose clock or parts changed during the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fleet.judge.credibility import impossible_readings, is_doubtful
from fleet.judge.figure_consistency import Figures, Problem, figure_problems, figure_structure
from fleet.judge.host_view import HostView
from fleet.judge.memory_locality import locality_problems
from fleet.judge.port_consistency import port_problems
from fleet.judge.reading_consistency import CLOCK_TOLERANCE_S, FULL_PHASES, reading_problems
from fleet.judge.reading_relations import has_wrong_scope, relation_problems
from fleet.judge.sequence import sequence_problems
from fleet.judge.soak_consistency import soak_problems
from fleet.quantities import counted
from schemas.catalogue import needs_torch
from schemas.records import MEASURED, Launch, Record
from schemas.reports import Verdict, VerdictKind
from schemas.stages import BENCHMARK, GANG, GANG_STAGES, PREFLIGHT, SOAK
from schemas.times import epoch_seconds

DEADLINE_GRACE_S = 120.0
"""A supervisor needs at most this long to end its ranks after the deadline of the launch. A launch that takes longer than its
deadline plus this time is a contradiction."""
FIRST_READING_S = LAST_READING_S = 3600.0
"""A record begins at most this long before its first snapshot, and ends at most this long after its last snapshot or launch."""
SOFTWARE = ("torch", "cuda", "nccl", "cudnn")
"""Software whose versions the ranks report if they run on GPUs."""
CLOCK = "record.clock"


def contradictions(view: HostView, figures: Sequence[Figures] | None = None) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for every element of evidence that is missing or contradicts another.

    `figures` has lists of the host's figures. With each list comes its `FigureStructure` (`fleet.judge.figure_consistency`), or
    None if the structure is not known. Without `figures` (the host has no layout, see `fleet.judge.layout`), the figures are
    taken from the records. The same is done after a soak.
    """
    for name, scope, reason, stage in _problems(view, figures):
        yield view.inconclusive(name, scope, reason, stage, kind=VerdictKind.CONTRADICTORY)


def _problems(view: HostView, figures: Sequence[Figures] | None) -> Iterator[Problem]:
    evidence = view.evidence
    for record in evidence.records:
        doubtful = _doubtful(record)
        for snapshot in record.snapshots:
            yield from impossible_readings(snapshot, doubtful=doubtful)
        yield from _launch_problems(view, record)
        yield from sequence_problems(view, record)
        yield from soak_problems(view, record)
        yield from _clock_problems(record, view.plan.created, evidence.received.get(record.gang))
        yield from _time_problems(record)
        yield from _identity_problems(record)
        yield from reading_problems(record)
        yield from relation_problems(view, record)
        yield from _software_problems(view, record)
    yield from _figure_problems(view, figures)
    yield from locality_problems(view)
    yield from port_problems(view)
    yield from _snapshot_problems(view)
    yield from _record_problems(evidence.records)


def _doubtful(record: Record) -> set[int]:
    """Return the `id` of each metric for which `is_doubtful` is true. Set `is_sound` on the others that have no wrong scope."""
    doubtful = set()
    for metric in [metric for metric in record.distinct_metrics if not metric.is_sound]:
        if is_doubtful(metric):
            doubtful.add(id(metric))
        elif not has_wrong_scope(metric):
            vars(metric)["is_sound"] = True
    return doubtful


def _figure_problems(view: HostView, figures: Sequence[Figures] | None) -> Iterator[Problem]:
    records = view.evidence.records
    of_soak = [item for record in records if record.soak for item in record.observations]
    if of_soak:
        yield from figure_problems(view, of_soak, figure_structure(view, of_soak, is_soak=True))
    if figures is None or of_soak:
        figures = [([item for record in records if record.soak is None for item in record.observations], None)]
    for items, structure in figures:
        yield from figure_problems(view, items, structure)


def _launch_problems(view: HostView, record: Record) -> Iterator[Problem]:
    # Times in older records have a resolution of a second: two different launches may have begun in the same second. So all of
    # these fields are compared.
    began = Counter(
        (launch.stage, launch.began, launch.number, launch.outcome, launch.members)
        for launch in record.launches
        if launch.ranks
    )
    for (stage, moment, *_), count in began.items():
        if count > 1:
            yield f"stage.{stage}", "host", f"{count} launches began at {moment}: the record has a launch twice", stage
    for launch in record.launches:
        for reason in _contradictions_of_launch(view, launch):
            yield f"stage.{launch.stage}", "host", reason, launch.stage


def _contradictions_of_launch(view: HostView, launch: Launch) -> Iterator[str]:
    stage = next((item for item in view.plan.stages if item.name == launch.stage), None)
    deadline_s = min(launch.deadline_s, stage.deadline_s) if stage else launch.deadline_s
    if launch.duration_s > deadline_s + DEADLINE_GRACE_S:
        yield f"the launch took {launch.duration_s:.0f} s, but its deadline was {deadline_s:.0f} s"
    if stage and launch.deadline_s > stage.deadline_s:
        yield f"the launch had a deadline of {launch.deadline_s:g} s, but the plan has {stage.deadline_s:g} s"
    if view.host.name not in launch.members:
        yield f"the launch had the members {', '.join(launch.members)}, but not this host"
    if launch.stage in (BENCHMARK, SOAK) and launch.members != (view.host.name,):
        yield f"the launch of this stage must have this host as its only member, but had {', '.join(launch.members)}"
    if launch.outcome != "finished" or launch.stage not in (BENCHMARK, SOAK, GANG):
        return
    planned = len(view.host.devices)
    if len(launch.ranks) != planned:
        yield f"the launch finished with {counted(len(launch.ranks), 'rank')}, but the plan has {counted(planned, 'device')}"
    failed = [rank for rank in launch.ranks if rank.exit_code != 0]
    if failed:
        codes = ", ".join(f"rank {rank.rank} with {_code(rank.exit_code)}" for rank in failed[:3])
        yield f"the launch finished, but {len(failed)} of its ranks failed: {codes}"
    if sorted(rank.local_rank for rank in launch.ranks) != list(range(len(launch.ranks))):
        yield "the local ranks of the launch are not consecutive numbers from 0"
    ranks = sorted(rank.rank for rank in launch.ranks)
    if ranks and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        yield "the ranks of the launch are not consecutive numbers"


def _code(exit_code: int | None) -> str:
    return "an unknown exit code" if exit_code is None else f"exit code {exit_code}"


def _clock_problems(record: Record, planned: str, received: float | None) -> Iterator[Problem]:
    """Compare the times of a record with those of the control node.

    The plan has a nonce (a random text), which every record of the run must have. The right nonce does not prove that a record is
    of this run: a host gets the nonce with the plan, and can put it into an older record.

    Args:
        record: a record of the host.
        planned: when the control node made the plan.
        received: when the control node received the record, in seconds since 1970; None: unknown.
    """
    try:
        planned_at, began, ended = map(epoch_seconds, (planned, record.began, record.ended))
    except ValueError:
        return  # _time_problems reports invalid times of the record
    if began < planned_at - CLOCK_TOLERANCE_S:
        when = f"begins at {record.began}, {_amount(planned_at - began)} before the run was planned at {planned}"
        yield (
            CLOCK,
            "host",
            f"the record {when}: it is of an earlier run, or the clock of the host is behind that of the control node",
            "",
        )
    if received is not None and received < ended - CLOCK_TOLERANCE_S:
        when = f"ends at {record.ended}, {_amount(ended - received)} after the control node received it"
        yield (
            CLOCK,
            "host",
            f"the record {when}: the clock of the host is ahead of that of the control node, or the record was changed",
            "",
        )


def _amount(seconds: float) -> str:
    """Return a time difference in words: `3.0 h`, `40 min`."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _time_problems(record: Record) -> Iterator[Problem]:
    """Check that the times in a record do not contradict each other."""
    moments = [("its beginning", record.began), ("its end", record.ended)]
    moments += [(f"the snapshot {item.phase} {item.stage}", item.at) for item in record.snapshots]
    moments += [(f"the launch of {item.stage}", item.began) for item in record.launches]
    times: list[tuple[str, float]] = []
    for what, text in moments:
        try:
            times.append((what, epoch_seconds(text)))
        except ValueError:
            yield "record", "host", f"{what} has the time {text!r}, which is not a valid time", ""
            return
    (_, began), (_, ended), *_ = times
    first, last = began - CLOCK_TOLERANCE_S, ended + CLOCK_TOLERANCE_S
    read = [epoch_seconds(snapshot.at) for snapshot in record.snapshots]
    outside = [what for what, moment in times if not first <= moment <= last]
    if ended < began:
        yield "record", "host", "the record ends before it begins: the clock of the host was set back", ""
    elif outside:
        yield "record", "host", f"the record covers {record.began} to {record.ended}, but {outside[0]} is outside", ""
    elif read and ended - max([*read, *_ends_of_launches(record)]) > LAST_READING_S:
        yield (
            "record",
            "host",
            f"the record ends at {record.ended}, more than an hour after its last snapshot and launch",
            "",
        )
    elif read and min(read) - began > FIRST_READING_S:
        yield "record", "host", f"the record begins at {record.began}, more than an hour before its first snapshot", ""
    for launch in record.launches:
        if epoch_seconds(launch.began) + launch.duration_s > last:
            yield f"stage.{launch.stage}", "host", "the launch ends after the record", launch.stage


def _ends_of_launches(record: Record) -> Iterator[float]:
    return (epoch_seconds(launch.began) + launch.duration_s for launch in record.launches)


def _identity_problems(record: Record) -> Iterator[Problem]:
    """Yield a problem for each index or PCI address that two GPUs share."""
    for field in ("index", "pci_bus_id"):  # another check reports a serial or UUID that two GPUs share
        values = Counter(getattr(gpu, field) for gpu in record.gpus)
        for value, count in values.items():
            if count > 1 and value != "":
                yield f"gpu.{field}", "host", f"{count} GPUs of this host have {field} {value}", ""


def _software_problems(view: HostView, record: Record) -> Iterator[Problem]:
    without_torch = {stage.name for stage in view.plan.stages if not needs_torch(stage.benchmarks)}
    if any(launch.outcome == "finished" and launch.stage not in without_torch for launch in record.launches):
        for name in ("torch",) if view.plan.rehearsal else SOFTWARE:
            if not record.software.get(name):
                yield f"launch.{name}", "host", f"the launch finished, but the ranks reported no version of {name}", ""


def _snapshot_problems(view: HostView) -> Iterator[Problem]:
    """Check that no required snapshot is missing, and that no two have the same stage, phase and time.

    A host needs one of the beginning of the run, and one before and one after each finished stage `benchmark` or `gang`.
    """
    phases = Counter((item.stage, item.phase) for item in view.evidence.snapshots())
    alone = [record for record in view.evidence.records if not record.gang]
    if (PREFLIGHT, "before") not in phases and any(record.launches for record in alone):
        yield f"stage.{PREFLIGHT}", "host", "the record has no snapshot of the beginning of the run", PREFLIGHT
    finished = {launch.stage for launch in view.evidence.launches() if launch.outcome == "finished"}
    for stage in view.plan.stages:
        if stage.name not in finished or stage.name not in (BENCHMARK, GANG):
            continue
        for phase in FULL_PHASES:
            if (stage.name, phase) not in phases:
                reason = f"the record has no snapshot {phase} the launch"
                yield f"stage.{stage.name}", "host", reason, stage.name
    moments = Counter((item.stage, item.phase, item.at) for item in view.evidence.snapshots())
    for (name, phase, at), count in moments.items():
        if count > 1:
            yield (
                f"stage.{name}",
                "host",
                f"{count} snapshots {phase} the stage have the same time {at}",
                name,
            )


def _record_problems(records: Sequence[Record]) -> Iterator[Problem]:
    """Check that the records of a host have results of the right stages, and the same versions of Rackproof and other software.

    Figures and readings of GANG_STAGES belong in the record of a gang (the hosts of one multi-node launch). Those of all other
    stages belong in the record of the host alone.
    """
    for record in records:
        whose = f"the launches of gang {record.gang}" if record.gang else "the launches of this host alone"
        measured = {stage for stage, items in record.by_stage.items() if any(item.status == MEASURED for item in items)}
        for what, stages in (("figures", measured), ("readings", {snapshot.stage for snapshot in record.snapshots})):
            if foreign := sorted(stage for stage in stages if (stage in GANG_STAGES) != bool(record.gang)):
                stage_names = f"the stage{'' if len(foreign) == 1 else 's'} {', '.join(foreign)}"
                yield (
                    "record",
                    "host",
                    f"the record of {whose} has {what} of {stage_names}, which belong in another record",
                    "",
                )
    versions = {record.rackproof for record in records}
    if len(versions) > 1:
        yield (
            "record",
            "host",
            f"the records of the host were written by Rackproof {' and '.join(sorted(versions))}",
            "",
        )
    software: dict[str, str] = {}
    for record in records:
        for name, version in record.software.items():
            if software.setdefault(name, version) != version:
                reason = f"the records of the host have the versions {software[name]} and {version}"
                yield f"launch.{name}", "host", reason, ""
