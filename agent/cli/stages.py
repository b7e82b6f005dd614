"""Start a run on this host, and run one of its stages: shared by the verbs that measure."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from agent.cli.common import fail
from agent.cli.wait import wait_for_stage
from agent.launch import options as run_settings
from agent.launch import stage as stages
from agent.placement.membership import find_host
from agent.placement.rank_placement import RankPlacement
from agent.run import background, lease
from agent.run.record import HostRun
from schemas.errors import HeldError
from schemas.probes import probe
from schemas.records import Record
from schemas.stages import BENCHMARK, CELL, GANG, PREFLIGHT, PROBE


def start_run(options: argparse.Namespace, placement: RankPlacement | None = None) -> HostRun:
    """Return the run, started here if there is a --plan; set `options.host` if it is not given.

    Raises:
        PlacementError: the host is not in the plan, or a setting is wrong.
        HeldError: another run has this host.
    """
    plan = run_settings.plan_of(options)
    options.host = options.host or find_host(plan, os.environ, placement)
    run_settings.check(options)
    if options.plan:
        run = stages.take_up(options.run_dir, options.host, run_settings.text_of(options))
        stages.look(run, PREFLIGHT, once=True)
        return run
    return HostRun(options.run_dir, options.host)


def run_stage(options: argparse.Namespace, stage: str, members: Sequence[str]) -> int:
    """Run a stage while no other process of this host does, and while no other run has the host; return the exit code."""
    run = HostRun(options.run_dir, options.host)
    try:
        if options.detach:
            lease.renew(options.run_dir, run.plan)
            code = _run_stage(options, stage, list(members))
            return code if code or not options.wait else wait_for_stage(run, BENCHMARK if stage == BENCHMARK else GANG)
        with background.alone(options.run_dir, BENCHMARK if stage == BENCHMARK else GANG):
            lease.renew(options.run_dir, run.plan, stage)
            return _run_stage(options, stage, list(members))
    except HeldError as held:
        return fail(str(held), lease.HELD)


def _run_stage(options: argparse.Namespace, stage: str, members: list[str]) -> int:
    run, number = HostRun(options.run_dir, options.host), getattr(options, "number", 0)
    try:
        if run.plan.study:
            run, stage = run.of_cell(number), CELL
        planned = probe(run.plan.stage(GANG)) if stage == PROBE else run.plan.stage(stage)
        for member in members:
            run.plan.host(member)
    except KeyError as error:
        return fail(f"{error.args[0]!r} is not in the plan of run {run.plan.run_id}")
    gang = run.host.gang if stage in (GANG, PROBE, CELL) else ""
    earlier = [launch for launch in run.record(gang).launches if stages.made(launch, stage, members, number)]
    if earlier:
        print(f"stage {stage} was {earlier[-1].outcome} at {earlier[-1].began}; it is not measured again")
        return 0
    if options.detach:
        arguments = [argument for argument in sys.argv if argument not in ("--detach", "--wait")]
        print(background.start(arguments, options.run_dir, GANG if gang else stage))
        return 0
    record = stages.measure(
        run,
        planned,
        members,
        number,
        port=getattr(options, "port", 0),
        closed=getattr(options, "admit", "") == "members",
        interface=options.interface,
        exported=run_settings.exported(options),
    )
    print_record(record, as_json=options.json)
    return 0


def print_record(record: Record, *, as_json: bool) -> None:
    """Print how much was observed, and how each launch ended."""
    launches = [
        {"stage": launch.stage, "outcome": launch.outcome, "reason": launch.reason} for launch in record.launches
    ]
    if as_json:
        print(json.dumps({"host": record.host, "observations": len(record.everything()), "launches": launches}))
        return
    print(f"{record.host}: {len(record.everything())} observations recorded")
    for launch in launches:
        print(f"stage {launch['stage']}: {launch['outcome']} {launch['reason']}".rstrip())
