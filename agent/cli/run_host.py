"""`rackproof attend`: this host's part of a planned run from beginning to end, where no control node goes from host to host.

Each step is the verb that the playbooks call on a host, as a process of its own: one that dies costs what it would have measured.
What there is of the record at the end is told in the log, whatever happened.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from agent.cli.emit_record import told
from agent.gang.discovery import meet
from agent.gang.protocol import ExchangeError, Gang
from agent.launch import options as launch_options
from agent.launch.request import LaunchRequest
from agent.launch.stage import record_not_started
from agent.placement.membership import find_host, use_all_processors
from agent.placement.rank_placement import PlacementError, without_placement
from agent.run import lease
from agent.run.record import HostRun, run_directory
from schemas import documents
from schemas.plans import Plan
from schemas.probes import GANG
from schemas.timeline import SOAK

USAGE, TROUBLE = 64, 2
STATE = Path("/var/lib/rackproof")
HOST = "RACKPROOF_HOST"
MEET_S = 900.0
MOST_MEET_S = 86400.0
ALONE = {"benchmark": "bench", SOAK: "soak"}
OPERATORS = ("PET_", "TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")
"""Beginnings of what Kubeflow's operator tells a pod for a torchrun of its own; the plan says who starts together."""


class Asked(Exception):  # noqa: N818 - not an error
    """Somebody asked this process to end."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds attend to the command."""
    attend = verbs.add_parser(
        "attend",
        parents=[launch_options.standalone_options()],
        help="carry out this host's part of a planned run, where no control node reaches it, and tell the record in the log",
        epilog="example: rackproof attend --plan /etc/rackproof/plan.json. Exit codes: 0 a record was told, whatever it says; "
        "2 not possible here; 64 wrong usage; 75 another run has this host; 143 it was asked to end, and told what it had.",
    )
    attend.add_argument(
        "--host", help=f"this host's name in the plan (default: {HOST}, else found by the names that it goes by)"
    )
    attend.add_argument(
        "--run-dir", type=run_directory, help=f"directory of the run on this host (default: {STATE}/runs/RUN_ID)"
    )
    attend.add_argument("--interface", default="", help="network interface for NCCL and gloo (default: they choose)")
    attend.add_argument(
        "--port",
        type=int,
        default=29500,
        help="first of four ports of the gang: ranks, heartbeats, meeting (default: 29500)",
    )
    attend.add_argument(
        "--meet-within",
        type=float,
        default=MEET_S,
        metavar="SECONDS",
        help=f"for which the gang's hosts wait for each other; those that came then start (default: {MEET_S:g})",
    )
    attend.add_argument("--quiet", action="store_true", help="do not tell the record in the log: --results has it")
    attend.set_defaults(call=_attend, detach=False, plan=None)


def _attend(options: argparse.Namespace) -> int:
    if not options.plan:
        return _complain("--plan is missing: give the plan.json that `rackproof plan --run-dir` has written")
    if not 0 < options.meet_within <= MOST_MEET_S:
        return _complain(f"--meet-within {options.meet_within:g}: give more than 0 and up to {MOST_MEET_S:g} seconds")
    if not 0 < options.port <= 65532:
        return _complain(f"--port {options.port}: give 1 to 65532; the three ports after it are used as well")
    try:
        launch_options.check_options(options)
        given = launch_options.read_plan(options)
        options.host = options.host or os.environ.get(HOST) or find_host(given.plan, os.environ)
    except PlacementError as error:
        return _complain(str(error))
    options.run_dir = (options.run_dir or STATE / lease.RUNS / given.plan.run_id).absolute()
    if note := use_all_processors() if _environment().keys() < os.environ.keys() else "":
        _say(note)
    return _Part(options, given.plan, given.text).carry_out()


class _Part:
    """This host's part of the run."""

    def __init__(self, options: argparse.Namespace, plan: Plan, text: str) -> None:
        self._options, self._plan, self._text = options, plan, text

    def carry_out(self) -> int:
        """Does all of it; the exit code."""
        run: HostRun | None = None
        try:
            _on_request(_asked)
            code = self._verb("inspect", "--plan=-", stdin=self._text)
            if code:
                return code
            run = HostRun(self._options.run_dir, self._options.host)
            for stage in self._plan.stages:
                if verb := ALONE.get(stage.name):
                    self._verb(verb, *self._settings())
                elif stage.name == GANG and run.host.gang:
                    self._together(run)
            return self._tell(run)
        except Asked:
            run = run or self._begun()
            if not run or self._tell(run):
                lease.release(lease.state_directory(self._options.run_dir), self._plan.run_id)
                _say("asked to end before this host was looked at: there is no record to tell")
            return 128 + signal.SIGTERM

    def _begun(self) -> HostRun | None:
        """What the inspection may have left that was not waited for to its end."""
        try:
            return HostRun(self._options.run_dir, self._options.host)
        except documents.DocumentError:
            return None

    def _together(self, run: HostRun) -> None:
        options, stage = self._options, self._plan.stage(GANG)
        expected = self._plan.gangs()[run.host.gang]
        gang = Gang.of(self._plan, run.host, "meeting", expected, options.port)
        try:
            members = meet(gang, options.meet_within, _say)
        except ExchangeError as error:
            members, why = [], str(error)
        else:
            absent = [host for host in expected if host not in members]
            why = f"nobody to launch with: {', '.join(absent)} did not come within {options.meet_within:g} s"
            if absent and len(members) > 1:
                _say(f"without {', '.join(absent)}, who did not come within {options.meet_within:g} s")
        if len(members) > 1:
            self._verb(
                "launch", f"--members={','.join(members)}", "--number=1", f"--port={options.port}", *self._settings()
            )
        else:
            _say(why)
            request = LaunchRequest(stage=stage, members=tuple(expected), number=1)
            record_not_started(run, run.host.gang, request, why)

    def _settings(self) -> list[str]:
        """What the verbs are told of this one's own command line."""
        options = self._options
        chosen = [f"--interface={options.interface}"] if options.interface else []
        chosen += ["--ethernet"] if options.ethernet else []
        chosen += [f"--nccl-debug={options.nccl_debug}"] if options.nccl_debug else []
        return chosen + [f"--env={pair}" for pair in options.env]

    def _verb(self, verb: str, *arguments: str, stdin: str = "") -> int:
        """Runs one verb; its exit code. A signal to end is handed on, and the verb waited for."""
        settings = arguments if verb != SOAK else [word for word in arguments if word.startswith("--interface")]
        command = [
            sys.executable,
            sys.argv[0],
            verb,
            f"--run-dir={self._options.run_dir}",
            f"--host={self._options.host}",
        ]
        _say(f"{verb} begins")
        held: list[int] = []
        _on_request(lambda number, _: held.append(number))  # or a process that was begun would be nobody's
        process = subprocess.Popen(
            [*command, *settings], stdin=subprocess.PIPE, stdout=sys.stderr, text=True, env=_environment()
        )
        try:
            _on_request(_asked)
            if held:
                _asked(held[0], None)
            process.communicate(stdin)
        except Asked:
            process.terminate()
            process.wait()
            raise
        _say(f"{verb} ended with {process.returncode}")
        return process.returncode

    def _tell(self, run: HostRun) -> int:
        """The records, to wherever they are asked for."""
        _on_request(signal.SIG_IGN)  # what is told in part is refused
        launch_options.publish_results(self._options, run)
        count = 1 if self._options.quiet else told(run)
        lease.release(lease.state_directory(run.directory), self._plan.run_id)
        return 0 if count else TROUBLE


def _environment() -> dict[str, str]:
    """Without what mpirun, srun or an operator told this process of its place: it is one of its own."""
    return {name: value for name, value in without_placement(os.environ).items() if not name.startswith(OPERATORS)}


def _asked(_number: int, _frame: FrameType | None) -> None:
    _on_request(signal.SIG_IGN)  # asked twice: what ends is not ended
    raise Asked


def _on_request(what: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, what)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _complain(message: str, code: int = USAGE) -> int:
    _say(f"rackproof: {message}")
    return code
