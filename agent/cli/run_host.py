"""The verb `run-host`: run this host's part of a planned run from beginning to end, without a control node.

For the snapshot and for each stage it runs the same verb (subcommand of `rackproof`) as the playbooks do. Each verb runs in a
process of its own, so that a crash loses only the measurements of one verb. At the end, even if a stage failed, the record is
printed to standard output, unless --quiet is given. The standard output of a container is its log.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

from agent.cli.common import fail, print_progress
from agent.cli.emit_record import NO_RECORD, emit_records, record_files
from agent.gang.discovery import discover_members
from agent.gang.protocol import Gang, GangError
from agent.launch import options as launch_options
from agent.launch.request import LaunchRequest
from agent.launch.stage import record_not_started
from agent.placement.membership import find_host
from agent.placement.rank_placement import PlacementError, without_placement
from agent.run import lease
from agent.run.readiness import check_gpu_allocation
from agent.run.record import HostRun, run_directory
from schemas import documents
from schemas.locks import claim_to_json
from schemas.plans import Plan
from schemas.stages import GANG, SOAK

HOST_VARIABLE = "RACKPROOF_HOST"
DISCOVERY_TIMEOUT_S = 900.0
MAX_DISCOVERY_TIMEOUT_S = 86400.0
VERBS = {"benchmark": "bench", SOAK: "soak"}
"""Stage -> verb, for the stages that a host runs alone."""
OPERATOR_VARIABLES = (
    "PET_",
    "TORCHELASTIC_",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "LOCAL_RANK",
)
"""Prefixes of the variables that Kubeflow's operator sets for torchrun. Verbs do not inherit them: the plan defines the ranks."""


class TerminationRequested(Exception):  # noqa: N818 - not an error
    """This process received SIGTERM or SIGINT."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add run-host to the command."""
    parser = verbs.add_parser(
        "run-host",
        parents=[launch_options.standalone_options()],
        help="run this host's part of a planned run without a control node, and print the record to the log",
        epilog="example: rackproof run-host --plan /etc/rackproof/plan.json. Exit codes: 0 this host has a record, whatever "
        "its results; 2 the run is not possible on this host, or there is no record; 64 wrong usage; 75 another run holds this "
        "host; 143 terminated: the record so far, if any, is printed all the same, unless --quiet is given.",
    )
    parser.add_argument(
        "--host",
        help=f"this host's name in the plan (default: the environment variable {HOST_VARIABLE}; if it is not set, the planned "
        "host whose name matches this machine)",
    )
    parser.add_argument(
        "--run-dir", type=run_directory, help=f"directory of the run on this host (default: {lease.STATE}/runs/RUN_ID)"
    )
    parser.add_argument(
        "--interface", default="", help="network interface for NCCL and gloo (default: their own choice)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=29500,
        help="first of four consecutive ports that a gang (the hosts of one multi-node launch) uses: rendezvous of the ranks, "
        "two ports for status messages, member discovery (default: 29500)",
    )
    parser.add_argument(
        "--meet-within",
        type=float,
        default=DISCOVERY_TIMEOUT_S,
        metavar="SECONDS",
        help="how long the hosts of a gang wait for each other; then those that have connected start the launch "
        f"(default: {DISCOVERY_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="do not print the record to the log; use it with --results, which copies the record",
    )
    parser.set_defaults(call=_run_host, detach=False, plan=None)


def _run_host(options: argparse.Namespace) -> int:
    if not options.plan:
        return fail("--plan is missing: give the plan.json that `rackproof plan --run-dir` has written")
    if not 0 < options.meet_within <= MAX_DISCOVERY_TIMEOUT_S:
        return fail(
            f"--meet-within {options.meet_within:g}: give more than 0 and up to {MAX_DISCOVERY_TIMEOUT_S:g} seconds"
        )
    if not 0 < options.port <= 65532:
        return fail(f"--port {options.port}: give 1 to 65532; the three ports after it are used as well")
    try:
        launch_options.check_options(options)
        given = launch_options.read_plan(options)
        options.host = options.host or os.environ.get(HOST_VARIABLE) or find_host(given.plan, os.environ)
        check_gpu_allocation(given.plan, options.host, os.environ)
    except PlacementError as error:
        return fail(str(error))
    options.run_dir = (options.run_dir or lease.STATE / lease.RUNS / given.plan.run_id).absolute()
    return HostRunner(options, given.plan, given.text).run()


class HostRunner:
    """Runs this host's part of a run."""

    def __init__(self, options: argparse.Namespace, plan: Plan, plan_text: str) -> None:
        self._options, self._plan, self._plan_text = options, plan, plan_text

    def run(self) -> int:
        """Run all stages and print the record; return the exit code."""
        run: HostRun | None = None
        try:
            _on_termination(_request_termination)
            # The claim names this process, which runs as long as the run does. The process of the verb ends before that.
            claim = claim_to_json(lease.load_claim(None, self._plan.run_id, self._options.run_dir))
            code = self._run_verb("inspect", "--plan=-", f"--claim={json.dumps(claim)}", stdin=self._plan_text)
            if code:
                return code
            run = HostRun(self._options.run_dir, self._options.host)
            for stage in self._plan.stages:
                if verb := VERBS.get(stage.name):
                    self._run_verb(verb, *self._verb_options())
                elif stage.name == GANG and run.host.gang:
                    self._launch_gang(run)
            return self._emit(run)
        except TerminationRequested:
            run = run or self._started_run()
            if not run or self._emit(run):
                lease.release(lease.state_directory(self._options.run_dir), self._plan.run_id, self._plan.nonce)
                print_progress("terminated before the first snapshot: there is no record")
            return 128 + signal.SIGTERM

    def _started_run(self) -> HostRun | None:
        """Return the run if the interrupted verb `inspect` had already begun it; otherwise None."""
        try:
            return HostRun(self._options.run_dir, self._options.host)
        except documents.DocumentError:
            return None

    def _launch_gang(self, run: HostRun) -> None:
        """Wait for the gang's other hosts and launch with those that connect. If none connects, record why there is no launch."""
        options, stage = self._options, self._plan.stage(GANG)
        expected = self._plan.gangs()[run.host.gang]
        gang = Gang.from_plan(self._plan, run.host, "meeting", expected, options.port)
        try:
            members = discover_members(gang, options.meet_within, print_progress)
        except GangError as error:
            members, reason = [], str(error)
        else:
            absent = ", ".join(host for host in expected if host not in (*members, run.host.name))
            # If `members` is empty, neither of the two hosts that collect the members (`gang.watchers`) answered this host. The
            # other hosts may have launched without this host.
            absence = f"{absent} did not connect" if members else f"no answer from {' and '.join(gang.watchers)}"
            reason = f"no other host to launch with: {absence} within {options.meet_within:g} s"
            if absent and len(members) > 1:
                print_progress(f"launching without {absent}: did not connect within {options.meet_within:g} s")
        if len(members) > 1:
            arguments = (f"--members={','.join(members)}", "--number=1", f"--port={options.port}")
            self._run_verb("launch", *arguments, *self._verb_options())
        else:
            print_progress(reason)
            request = LaunchRequest(stage=stage, members=tuple(expected), number=1)
            record_not_started(run, run.host.gang, request, reason)

    def _verb_options(self) -> list[str]:
        """Return those options of this command line that the verbs of the stages get too."""
        options = self._options
        arguments = [f"--interface={options.interface}"] if options.interface else []
        arguments += ["--ethernet"] if options.ethernet else []
        arguments += [f"--nccl-debug={options.nccl_debug}"] if options.nccl_debug else []
        return arguments + [f"--env={variable}" for variable in options.env]

    def _run_verb(self, verb: str, *arguments: str, stdin: str = "") -> int:
        """Run one verb; return its exit code. On termination, terminate the verb and wait for its end."""
        # Of the options that `_verb_options` returns, `soak` accepts only --interface.
        options = (
            arguments if verb != SOAK else [argument for argument in arguments if argument.startswith("--interface")]
        )
        run_options = [f"--run-dir={self._options.run_dir}", f"--host={self._options.host}"]
        command = [sys.executable, sys.argv[0], verb, *run_options, *options]
        print_progress(f"{verb} started")
        pending: list[int] = []
        # The handler raises nothing: an exception inside Popen would leave the new process running.
        _on_termination(lambda number, _: pending.append(number))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, text=True, env=_environment())
        try:
            _on_termination(_request_termination)
            if pending:
                _request_termination(pending[0], None)
            process.communicate(stdin)
        except TerminationRequested:
            process.terminate()
            process.wait()
            raise
        print_progress(f"{verb} ended with exit code {process.returncode}")
        return process.returncode

    def _emit(self, run: HostRun) -> int:
        """Print the records to standard output, copy them to --results, and release the host; return the exit code.

        Raises:
            OSError: --results is not writable. The records have been printed all the same (unless --quiet is given).
        """
        # A signal while the record is printed would truncate it, and `rackproof collect` would reject it.
        _on_termination(signal.SIG_IGN)
        try:
            count = len([*record_files(run)]) if self._options.quiet else emit_records(run)
            launch_options.publish_results(self._options, run)
        finally:
            lease.release(lease.state_directory(run.directory), self._plan.run_id, self._plan.nonce)
        return 0 if count else NO_RECORD


def _environment() -> dict[str, str]:
    """Return the environment for the verbs, without the variables in which mpirun, srun or Kubeflow's operator sets ranks."""
    environment = without_placement(os.environ)
    return {name: value for name, value in environment.items() if not name.startswith(OPERATOR_VARIABLES)}


def _request_termination(_number: int, _frame: FrameType | None) -> None:
    _on_termination(signal.SIG_IGN)  # a second signal must not interrupt the shutdown
    raise TerminationRequested


def _on_termination(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
