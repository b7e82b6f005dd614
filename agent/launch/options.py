"""Options of `bench`, `launch` and `run-host` for a run without a playbook: the plan, the shared results, NCCL settings."""

from __future__ import annotations

import argparse
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agent.placement.rank_placement import PlacementError
from agent.run.record import STANDARD_INPUT, HostRun, read_plan_text
from schemas import documents
from schemas.decode import record_from_json
from schemas.plans import Plan, plan_from_json
from schemas.records import Record
from schemas.run_directory import PLAN_BYTES, RunDirectory, record_name

LEVELS = ("VERSION", "WARN", "INFO", "TRACE")


@dataclass(frozen=True, kw_only=True)
class GivenPlan:
    """A plan from the command line, or from the run directory."""

    plan: Plan
    text: str
    """JSON text of `--plan`; empty without `--plan`, because the plan is then already in the run directory."""


def standalone_options() -> argparse.ArgumentParser:
    """Return a parser with these options, for `parents` of the argparse parsers of `bench`, `launch` and `run-host`."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("without Ansible")
    group.add_argument(
        "--plan",
        help="plan.json, or - for standard input: begin the run of this plan and take the first snapshot of this host. "
        "Without this option, bench and launch continue the run in --run-dir; run-host requires this option",
    )
    group.add_argument(
        "--results",
        type=Path,
        help="directory that all hosts share: at the end, copy this host's record to it, for `rackproof report`",
    )
    group.add_argument(
        "--ethernet",
        action="store_true",
        help="let NCCL use TCP sockets instead of InfiniBand or RoCE (NCCL_IB_DISABLE=1)",
    )
    group.add_argument("--nccl-debug", choices=LEVELS, help="log level of NCCL in the ranks (NCCL_DEBUG)")
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable for the ranks; may be repeated",
    )
    return parser


def rank_environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that the options set for the ranks. Raises PlacementError if an `--env` is malformed."""
    variables = {"NCCL_IB_DISABLE": "1"} if options.ethernet else {}
    if options.nccl_debug:
        variables["NCCL_DEBUG"] = options.nccl_debug
    return variables | dict(_parse_variable(text) for text in options.env)


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise PlacementError(f"--env {text}: write NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0")
    return name, value


def read_plan(options: argparse.Namespace) -> GivenPlan:
    """Return the plan from `--plan`; without this option, from the run directory. Call once: it may read standard input.

    Raises:
        PlacementError: `--plan -` with `--detach`.
        documents.DocumentError: the plan is invalid.
        OSError: the plan cannot be read.
    """
    path = getattr(options, "plan", None)
    if not path:
        return GivenPlan(plan=RunDirectory(options.run_dir).read_plan(), text="")
    if path == STANDARD_INPUT and options.detach:
        raise PlacementError(
            "--plan - with --detach: the background process has no standard input; give the plan as a file"
        )
    text = read_plan_text(path)
    source = f"--plan {path}"
    document = documents.parse(text, source=source, max_bytes=PLAN_BYTES)
    documents.validate(document, "plan", source=source)
    return GivenPlan(plan=plan_from_json(document), text=text)


def check_options(options: argparse.Namespace) -> None:
    """Check `--env`, create the directory of `--results`, and check that it is writable. Raises PlacementError or OSError."""
    rank_environment(options)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.results):
            pass


def publish_results(options: argparse.Namespace, run: HostRun) -> None:
    """If `--results` is given, copy this host's records to that directory. Also copy the plan if the directory has none.

    Raises:
        documents.DocumentError: the directory has a record of this host that another machine wrote.
    """
    if not options.results:
        return
    _check_same_machine(options.results / record_name(run.host.name), run)
    plan = RunDirectory(options.results).plan
    if not plan.exists():
        text = RunDirectory(run.directory).plan.read_text(encoding="utf-8")
        documents.write_text(plan, text, mode=documents.SECRET)
    for gang in dict.fromkeys(("", run.host.gang)):
        if (record := run.path(gang)).exists():
            target = options.results / record_name(run.host.name, gang)
            documents.write_text(target, record.read_text(encoding="utf-8"))


def _check_same_machine(target: Path, run: HostRun) -> None:
    """Raise DocumentError if `target` is a record of this run that another machine wrote, so that no record is lost."""
    if not target.exists():
        return
    try:
        there = record_from_json(documents.read(target, "record"), source=str(target))
    except documents.DocumentError:
        return  # a damaged record is replaced
    own = run.record()
    if (there.run_id, there.nonce) != (own.run_id, own.nonce) or there.began == own.began:
        return  # a machine that has rebooted continues its record
    boots, own_boots = _boot_ids(there), _boot_ids(own)
    if boots and own_boots and not boots & own_boots:
        raise documents.DocumentError(
            f"{target} is the record of another machine (begun {there.began}, boot ID {', '.join(sorted(boots))}) and was not "
            f"replaced with that of this machine, {socket.gethostname()} (begun {own.began}, boot ID "
            f"{', '.join(sorted(own_boots))}): both ran as host {own.host}; give each machine its own name in the plan "
            f"(--host). The record of this machine is {run.path()}. If the record there is of an earlier attempt, delete "
            f"{target} and repeat the command"
        )


def _boot_ids(record: Record) -> set[str]:
    metrics = [metric for metric in record.distinct_metrics if metric.name == "host.boot_id"]
    return {str(value) for metric in metrics for value in metric.values.values()}
