"""Run one launch of a stage on this host: check its requirements, supervise it, and append its outcome to the record.

The supervisor, NVML and the table of collectors are imported only by the functions that use them. With `--detach`,
`rackproof bench` and `launch` only start the process that measures, and without these imports they take half the time.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from agent.exporter.live import LivePublisher, publish_idle, publish_record
from agent.gang.peer_channel import PeerChannel
from agent.gang.protocol import Gang, GangError
from agent.launch.outcome import MAX_REASON, LaunchOutcome
from agent.launch.request import LaunchRequest
from agent.placement.membership import use_all_processors
from agent.placement.rank_placement import DENIED, denied_device_nodes
from agent.run import background, lease, preflight
from agent.run.record import HostRun, private_directory
from agent.run.work_directory import archive_logs
from agent.sampling.snapshot import take_snapshot
from collectors.base import Absent, Collector
from schemas import documents
from schemas.catalogue import needs_torch
from schemas.plans import PlannedHost
from schemas.records import Gpu, Launch, Record, Snapshot
from schemas.stages import CELL, GANG_STAGES
from schemas.times import utc_now

log = logging.getLogger(__name__)

ATTEMPTS_FILE = "tries.json"
"""File in the run directory that counts the attempts at each cell (one measurement) of a scaling study."""
MAX_ATTEMPTS = 3
"""Maximum number of attempts at a cell. Without this limit, a cell whose supervisor is killed each time would be launched again
and again, because none of its launches is recorded."""


def start_run(run_dir: Path, host: str, plan: str, *, claim: str | None = None, take_over: bool = False) -> HostRun:
    """Begin or continue the run of this plan on this host.

    Args:
        run_dir: run directory on this host.
        host: this host's name in the plan.
        plan: the plan, as JSON text.
        claim: who runs this, as JSON text from the control node; None: the user of this process.
        take_over: continue even if another run holds this host, and end the supervisor of that run.

    Raises:
        documents.DocumentError: the plan or a file in the run directory is invalid.
        HeldError: another run holds this host.
    """
    run = HostRun.begin(run_dir, host, plan)
    claimant = lease.load_claim(claim, run.plan.run_id, run_dir)
    if note := lease.acquire(run_dir, run.plan, claimant, take_over=take_over):
        log.info("%s", note)
    return run


def record_snapshot(run: HostRun, stage: str, *, once: bool) -> Record:
    """Add a snapshot to the record and return the record.

    With `once`, add none if the record already has a snapshot from before this stage.
    """
    _use_all_processors()
    with background.exclusive_task(run.directory, "inspect"):
        record = run.record()
        if not (once and any((taken.stage, taken.phase) == (stage, "before") for taken in record.snapshots)):
            snapshot, gpus = take_snapshot(host_collectors(run), stage=stage, phase="before")
            record = run.append(snapshots=[snapshot], gpus=gpus)
    publish_idle(run)
    return record


def run_launch(run: HostRun, request: LaunchRequest) -> Record:
    """Run one launch of a stage on this host; return the record with its outcome, even if the launch failed."""
    from agent.launch.supervise import LaunchSpec, supervise
    from agent.launch.torchrun import LaunchError, launcher_command

    _use_all_processors()
    stage = request.stage.name
    gang = run.host.gang if stage in GANG_STAGES else ""
    if reason := _reason_not_to_start(run, request):
        return record_not_started(run, gang, request, reason)
    # SystemExit runs the supervisor's `finally` blocks, which end the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = _empty_work_directory(run, stage)
    context = f"{stage} {request.number}"
    gang_of_launch = Gang.from_plan(
        run.plan, run.host, context, request.members, request.port, members_only=request.members_only
    )
    try:
        command = launcher_command(
            run.plan,
            run.host,
            request,
            gang=gang_of_launch,
            work=work,
            data=lease.state_directory(run.directory) / "data",
            uuids={gpu.index: gpu.uuid for gpu in run.record().gpus},
        )
        if reason := _reason_of_environment(run.host, request, command.environment):
            raise LaunchError(reason)
        channel = PeerChannel(gang_of_launch) if len(request.members) > 1 else None
    except (LaunchError, GangError) as error:
        return record_not_started(run, gang, request, str(error))
    spec = LaunchSpec(
        stage=stage,
        host=run.host,
        members=request.members,
        command=command,
        work=work,
        deadline_s=request.stage.deadline_s,
        collective_timeout_s=request.stage.collective_timeout_s,
        number=request.number,
        collectors=host_collectors(run),
        fast_collectors=host_collectors(run, full_snapshot=False),
    )
    live = partial(
        LivePublisher,
        run,
        stage=stage,
        deadline_s=spec.deadline_s,
        work=work,
        ranks=command.ranks,
        span=request.span,
    )
    outcome = supervise(spec, record_start=partial(append_start, run, gang), report=_report, channel=channel, live=live)
    return append_outcome(run, gang, outcome)


def append_start(run: HostRun, gang: str, snapshots: Sequence[Snapshot], gpus: Sequence[Gpu]) -> None:
    """Append the snapshot from before a launch to the record."""
    run.append(gang, snapshots=snapshots, gpus=gpus)


def append_outcome(run: HostRun, gang: str, outcome: LaunchOutcome) -> Record:
    """Append the outcome of a launch to the record, and publish the record for the exporter."""
    record = run.append(
        gang,
        snapshots=outcome.snapshots,
        gpus=outcome.gpus,
        observations=outcome.observations,
        launches=[outcome.launch],
        software=outcome.software,
    )
    publish_record(run, record)
    return record


def record_not_started(run: HostRun, gang: str, request: LaunchRequest, reason: str) -> Record:
    """Append a launch that could not be started to the record."""
    launch = Launch(
        stage=request.stage.name,
        outcome="failed",
        reason=reason[:MAX_REASON],
        members=request.members,
        began=utc_now(),
        duration_s=0.0,
        deadline_s=request.stage.deadline_s,
        ranks=(),
        log_tail="",
        number=request.number,
    )
    return append_outcome(run, gang, LaunchOutcome(launch=launch))


def find_earlier_launch(launches: Sequence[Launch], stage: str, members: Sequence[str], number: int) -> Launch | None:
    """Return the recorded launch of the stage with these members and this number, however it ended.

    If `number` is 0, return the last one that finished. Return None if there is none.
    """
    for launch in reversed(launches):
        if (launch.stage, launch.members) == (stage, tuple(members)) and (
            launch.number == number if number else launch.outcome == "finished"
        ):
            return launch
    return None


def host_collectors(run: HostRun, *, full_snapshot: bool = True) -> list[Collector]:
    """Return all collectors. Without `full_snapshot`, they leave out slow readings.

    In a run on GPUs, the NVML collector reads only the GPUs under test.
    """
    from collectors.table import build_collectors

    return build_collectors(run.host.devices if run.host.device == "gpu" else None, full_snapshot=full_snapshot)


def count_attempt(run: HostRun, number: int) -> str:
    """Count an attempt at this cell (one measurement) of a scaling study.

    Return why the cell must not run again; empty if it may run, because there were fewer than MAX_ATTEMPTS attempts.
    """
    path = run.directory / ATTEMPTS_FILE
    try:
        document = documents.parse(path.read_bytes(), source=str(path))
    except (OSError, documents.DocumentError):
        document = None
    items = document.items() if isinstance(document, dict) else ()
    attempts = {str(key): count for key, count in items if type(count) is int}
    if (count := attempts.get(str(number), 0)) >= MAX_ATTEMPTS:
        return (
            f"the cell was started {count} times on host {run.host.name}, and each time its supervisor was killed: "
            f"see {run.directory / 'logs'} and the kernel log"
        )
    documents.write(path, {**attempts, str(number): count + 1})
    return ""


def _use_all_processors() -> None:
    """Let this process use every processor that its cpuset allows. Log a limit that remains: figures of the CPUs will be low."""
    from collectors.files import Files
    from collectors.host.processor import usable_processors

    if note := use_all_processors():
        log.info("%s", note)
    usable, online = usable_processors(Files(Path("/"))), os.cpu_count() or 0
    if usable < online:
        log.info(
            "this process can use %d of the %d processors of this host, because of a cpuset, a CPU quota or isolcpus",
            usable,
            online,
        )


def _reason_not_to_start(run: HostRun, request: LaunchRequest) -> str:
    """Return why this launch must not start; empty if it may. For a cell of a scaling study, count the attempt."""
    if request.stage.name == CELL and (reason := count_attempt(run, request.number)):
        return reason
    if needs_torch(request.stage.benchmarks) and (problems := [*preflight.shared_memory_problems(preflight.SHM)]):
        return problems[0]
    if run.host.device != "gpu":
        return ""
    from collectors.nvml import gpu_conflicts

    if reason := _reason_without_gpus(run):
        return reason
    if conflicts := gpu_conflicts(run.host.devices, share=run.host.share_gpus):
        return f"{'; '.join(conflicts)}: free the GPU, or set rackproof_share_gpus to measure anyway"
    return ""


def _reason_of_environment(host: PlannedHost, request: LaunchRequest, variables: Mapping[str, str]) -> str:
    """Return why the ranks must not start with these environment variables; empty if they may.

    A variable in rackproof_environment or of --env is set on purpose. It is no reason, even if it distorts the measurement.
    """
    if host.device != "gpu":
        return ""
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    return "; ".join(
        preflight.environment_problems(
            os.environ,
            {**changed, **host.environment, **request.environment},
            network=len(request.members) > 1,
            source=preflight.OWN_ENVIRONMENT,
            given_source="the settings of this run",
            remedy="remove it there, or set it in rackproof_environment or with --env to measure with it",
        )
    )


def _reason_without_gpus(run: HostRun) -> str:
    """Return why no rank would have a GPU; empty if NVML lists any GPU. Later each rank checks its own GPU."""
    from collectors.nvml import NotOpened, gpu_indices

    indices = gpu_indices()
    if indices and not isinstance(indices, Absent):
        return ""
    reason = indices.reason if isinstance(indices, Absent) else "NVML lists no GPU"
    remedy = ": nvidia-smi must list them; a container needs --gpus all"
    if isinstance(indices, NotOpened):
        remedy = ""
    elif denied_device_nodes(Path("/")):
        remedy = f": {DENIED}"
    return f"the plan has {len(run.host.devices)} GPUs on host {run.host.name}, and the driver reports none ({reason}){remedy}"


def _empty_work_directory(run: HostRun, stage: str) -> Path:
    """Return the work directory of the stage, empty and private; the logs of the previous attempt are archived."""
    work = run.directory / "work" / stage
    archive_logs(work, run.directory / "logs")
    shutil.rmtree(work, ignore_errors=True)
    private_directory(work)
    return work


def _report(line: str) -> None:
    log.info("%s", line)
