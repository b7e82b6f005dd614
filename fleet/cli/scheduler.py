"""`rackproof scheduler`: ask Slurm or Kubernetes about hosts, drain them for a run, and resume them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fleet.cli.modes import call_in_mode
from fleet.integrations.scheduler import DRAINED, are_nodes, drain_or_ask, guard, notes, resume_all
from fleet.integrations.schedulers import KINDS
from schemas import documents
from schemas.errors import RunError, UsageError


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add scheduler to the command."""
    verb = verbs.add_parser(
        "scheduler",
        help="ask Slurm or Kubernetes whether hosts are in use, drain them for a run, and resume them",
        epilog='example: echo \'{"r12-h01": "node-r12-1"}\' | rackproof scheduler ask --kind slurm --run-dir runs/r1 --json. '
        "Exit codes: 0 done, even if hosts are in use; 1 resume: a node could not be resumed; 2 --run-dir does not exist or, "
        "with resume, is not the directory of a run; 64 wrong usage.",
    )
    verb.add_argument(
        "what",
        choices=["ask", "drain", "resume"],
        help="ask: print which hosts are in use; drain: drain the nodes of the hosts, wait for their jobs, then do the same as "
        "ask; resume: resume the nodes that the run drained",
    )
    verb.add_argument("--run-dir", type=Path, required=True, help="directory of the run on the control node")
    verb.add_argument(
        "--kind",
        choices=KINDS,
        help="the scheduler; required for ask and drain, which read a JSON object from standard input: host -> its node name",
    )
    verb.add_argument(
        "--word",
        action="append",
        default=[],
        dest="words",
        help="word that precedes each scheduler command, such as sudo; may be repeated",
    )
    verb.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="drain: time for jobs to finish (default: 0)"
    )
    verb.add_argument(
        "--when-finished", action="store_true", help="resume: wait until the playbook that drained the nodes exits"
    )
    verb.add_argument(
        "--json",
        action="store_true",
        help="ask, drain: print a JSON object: host -> why it is in use or could not be drained",
    )
    modes = {**dict.fromkeys(("kind", "words", "json"), "ask drain"), "wait": "drain", "when_finished": "resume"}
    verb.set_defaults(call=call_in_mode(call, verb, modes))


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    known = any((options.run_dir / name).exists() for name in ("plan.json", DRAINED))
    if not options.run_dir.is_dir() or (options.what == "resume" and not known):
        why = "no plan.json in it" if options.run_dir.is_dir() else "no such directory"
        raise RunError(f"{options.run_dir}: {why}: give the directory of a run, which has a plan.json")
    if options.what == "resume":
        problems = guard(options.run_dir) if options.when_finished else resume_all(options.run_dir)
        print("\n".join(problems), end="\n" if problems else "")
        return 1 if problems else 0
    if options.kind is None:
        raise UsageError(f"--kind is missing: choose one of {', '.join(KINDS)}")
    try:
        nodes = documents.parse(sys.stdin.buffer.read(), source="standard input")
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    if not are_nodes(nodes):
        raise UsageError(
            'standard input: give {"host": "node name in the scheduler"}; a node name has only letters, digits, ".", "_" and "-"'
        )
    busy = drain_or_ask(
        options.run_dir, options.kind, options.words, nodes, drain=options.what == "drain", wait_s=options.wait
    )
    if options.what == "drain":
        print("".join(f"{line}\n" for line in notes(options.run_dir)), end="", file=sys.stderr)
    if options.json:
        print(json.dumps(busy))
    else:
        print("\n".join(f"{host}: {why}" for host, why in busy.items()) or "no host is in use")
    return 0
