"""What `bench` and `launch` are told where no playbook carries out the run: a plan, a place for the records, settings of NCCL."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from agent.placement.rank_placement import PlacementError
from agent.run.record import PLAN_BYTES, HostRun
from schemas import documents
from schemas.plans import Plan, plan_from_json
from schemas.run_directory import RunDirectory, record_name

LEVELS = ("VERSION", "WARN", "INFO", "TRACE")
STANDARD_INPUT = "-"


def without_ansible() -> argparse.ArgumentParser:
    """The options, as a parent of the verbs' parsers."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("without Ansible")
    group.add_argument("--plan", help="begin the run here with this plan.json, and take its first snapshot; - reads it")
    group.add_argument(
        "--results",
        type=Path,
        help="directory of the run that all hosts share: the record is put there at the end, for `rackproof report`",
    )
    group.add_argument(
        "--ethernet", action="store_true", help="NCCL uses sockets and no InfiniBand or RoCE (NCCL_IB_DISABLE=1)"
    )
    group.add_argument("--nccl-debug", choices=LEVELS, help="what NCCL says in the ranks' logs (NCCL_DEBUG)")
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for the ranks; may be repeated"
    )
    return parser


def exported(options: argparse.Namespace) -> dict[str, str]:
    """The variables that these options give the ranks."""
    found = {"NCCL_IB_DISABLE": "1"} if getattr(options, "ethernet", False) else {}
    if level := getattr(options, "nccl_debug", None):
        found["NCCL_DEBUG"] = level
    return found | dict(_pair(text) for text in getattr(options, "env", ()))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise PlacementError(f"--env {text}: write NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0")
    return name, value


def text_of(options: argparse.Namespace) -> str:
    """The plan that was given, as text; standard input is read once."""
    if options.plan == STANDARD_INPUT and options.detach:
        raise PlacementError("--plan - with --detach: standard input is gone by then; give the plan as a file")
    if options.plan != STANDARD_INPUT:
        return Path(options.plan).read_text(encoding="utf-8")
    if not hasattr(options, "plan_text"):
        options.plan_text = sys.stdin.read()
    return str(options.plan_text)


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that was given, or that the run was begun with here.

    Raises:
        documents.DocumentError: it is not one.
        OSError: it cannot be read.
    """
    if not getattr(options, "plan", None):
        return plan_from_json(documents.read(RunDirectory(options.run_dir).plan, "plan", max_bytes=PLAN_BYTES))
    source = f"--plan {options.plan}"
    document = documents.parse(text_of(options), source=source, max_bytes=PLAN_BYTES)
    documents.validate(document, "plan", source=source)
    return plan_from_json(document)


def check(options: argparse.Namespace) -> None:
    """Raises PlacementError or OSError where the settings are wrong, or the record would have no place at the end."""
    exported(options)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.results):
            pass


def delivered(options: argparse.Namespace, code: int) -> int:
    """Puts what this host has written where it was asked for; the exit code."""
    if code or options.detach or not options.results:
        return code
    run = HostRun(options.run_dir, options.host)
    name, gang = run.host.name, run.host.gang
    plan = RunDirectory(options.results).plan
    if not plan.exists():
        documents.write_text(plan, RunDirectory(run.directory).plan.read_text(encoding="utf-8"))
    for place, path in ((record_name(name), run.path()), (record_name(name, gang), run.path(gang))):
        if path.exists() and (gang or path == run.path()):
            documents.write_text(options.results / place, path.read_text(encoding="utf-8"))
    return 0
