"""The verb `bench`: run the stage `benchmark` of the plan on this host, without other hosts."""

from __future__ import annotations

import argparse

from agent.cli.common import fail, run_options
from agent.cli.stages import run_stage, start_run
from agent.launch import options as launch_options
from agent.placement.rank_placement import PlacementError
from agent.run import lease
from schemas.errors import HeldError
from schemas.stages import BENCHMARK


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add bench to the command."""
    parser = verbs.add_parser(
        "bench",
        parents=[run_options(), launch_options.standalone_options()],
        help="run the stage `benchmark` of the plan on this host, without other hosts",
        epilog="example: rackproof bench --run-dir /var/lib/rackproof/runs/r1 --host r12-h01",
    )
    parser.set_defaults(call=_bench)


def _bench(options: argparse.Namespace) -> int:
    try:
        run = start_run(options)
    except PlacementError as error:
        return fail(str(error))
    except HeldError as held:
        return fail(str(held), lease.HELD)
    return run_stage(options, run, BENCHMARK, [run.host.name])
