"""The command `rackproof`: one table of verbs, each imported when it is used."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from pathlib import Path

from rackproof import PACKAGES
from rackproof.logs import configure_logging
from rackproof.parser import Parser
from schemas import VERSION, documents
from schemas.errors import DEFECT, INTERRUPTED, TROUBLE, RackproofError, UsageError

VERBS = {
    # on a GPU host
    "inspect": "agent.cli.inspect",
    "doctor": "agent.cli.doctor",
    "bench": "agent.cli.bench",
    "launch": "agent.cli.launch",
    "soak": "agent.cli.soak",
    "wait": "agent.cli.wait",
    "export": "agent.cli.export",
    "stop": "agent.cli.stop",
    "run-host": "agent.cli.run_host",
    "emit-record": "agent.cli.emit_record",
    "busy": "agent.cli.busy",
    # on the control node
    "plan": "fleet.cli.plan",
    "gangs": "fleet.cli.gangs",
    "report": "fleet.cli.report",
    "judge": "fleet.cli.judge",
    "baseline": "fleet.cli.baseline",
    "diff": "fleet.cli.diff",
    "watch": "fleet.cli.watch",
    "simulate": "fleet.cli.simulate",
    "power": "fleet.cli.power",
    "criteria": "fleet.cli.criteria",
    "scheduler": "fleet.cli.scheduler",
    "notice": "fleet.cli.notice",
    "revalidate": "fleet.cli.revalidate",
    "collect": "fleet.cli.collect",
    "rma": "fleet.cli.rma",
    "scaling": "fleet.cli.scaling",
    "sign": "fleet.cli.sign",
    "verify": "fleet.cli.verify",
    # on a machine that is both
    "run": "rackproof.local_run",
}
"""Verb -> the module whose `add_verb` adds its parser and sets `call`.

Only the module of the requested verb is imported: each side has dependencies of its own, and a playbook starts the command often.
"""
EXTRAS = {
    "control": ("ansible", "jinja2", "jsonschema_rs", "msgspec", "rich"),
    "bench": ("numpy", "torch", "torchvision"),
    "parquet": ("pyarrow",),
}
"""Extra of the package -> the imports that only this extra installs."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        print(
            "rackproof: interrupted; every file is either complete or not written: run the same command again to continue",
            file=sys.stderr,
        )
        return INTERRUPTED


def _main(arguments: list[str] | None) -> int:
    if is_process := arguments is None:
        gc.disable()  # until all imports are done: collection takes a twelfth of the start-up time and frees nothing
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = Parser(
        prog="rackproof",
        description="Acceptance-test, burn in and re-validate racks of GPU servers.",
        epilog="Exit codes: 0 accepted (report) or done, 1 rejected, 2 incomplete or not possible, 64 wrong usage, "
        "70 a defect in Rackproof itself, 74 a report could not be written, 75 the run or host is locked by another process, "
        "130 interrupted. "
        "`rackproof VERB --help` shows each verb with an example.",
    )
    parser.add_argument("--version", action="version", version=f"rackproof {VERSION}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=Parser)
    verb = next((word for word in arguments if not word.startswith("-")), "")
    if verb and verb not in VERBS:
        parser.error(f"unknown verb {verb!r}{documents.nearest(verb, VERBS)}")
    for module in dict.fromkeys([VERBS[verb]] if verb else VERBS.values()):
        try:
            importlib.import_module(module).add_verb(verbs)
        except ImportError as error:
            if verb:
                parser.exit(TROUBLE, f"rackproof {verb}: {_missing_package(error)}\n")
    if is_process:
        gc.freeze()
        gc.enable()
    options = parser.parse_args(arguments)
    if "call" not in options:
        parser.print_help()
        return UsageError.exit_code
    configure_logging()
    try:
        return int(options.call(options))
    except Exception as error:  # noqa: BLE001 - Python's own exit code for a traceback, 1, would read as `rejected`
        return _report_error(error)


def _missing_package(error: ImportError) -> str:
    """Return which package is not installed, and which extra installs it."""
    name = (error.name or "").partition(".")[0]
    if not name:
        return str(error)
    extra = next((f"[{extra}]" for extra, brings in EXTRAS.items() if name in brings), "")
    return f"{name} is not installed: pip install 'rackproof{extra}', in a checkout '.{extra}'"


def _report_error(error: Exception) -> int:
    """Print what went wrong and return the exit code."""
    if isinstance(error, RackproofError):
        print(f"rackproof: {error}{_remedy(error.__cause__)}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return TROUBLE
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        print(f"rackproof: {where}{error.strerror or error}{_remedy(error)}", file=sys.stderr)
        return TROUBLE
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in PACKAGES:
        print(f"rackproof: {_missing_package(error)}", file=sys.stderr)
        return TROUBLE
    traceback.print_exception(error)
    print("rackproof: this is a bug in Rackproof; please report it with the traceback above", file=sys.stderr)
    return DEFECT


def _remedy(error: BaseException | None) -> str:
    """Return the remedy for a file error that the code which opened the file could not explain."""
    if not isinstance(error, OSError) or not error.filename:
        return ""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if Path(str(error.filename)).name == "plan.json":
            return ": give the directory of a run, which has a plan.json, or an existing plan"
        return ": give the path of an existing file"
    if isinstance(error, IsADirectoryError):
        return ": give a file, not a directory"
    return ": run this as a user with permission, or give another path" if isinstance(error, PermissionError) else ""


if __name__ == "__main__":
    sys.exit(main())
