"""The command `rackproof`: the table of its verbs, its help and its error messages."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import io
import os
import sys
import traceback
from pathlib import Path

from rackproof import PACKAGES
from rackproof.logs import configure_logging
from rackproof.parser import Parser
from schemas import VERSION, documents
from schemas.errors import DEFECT, INTERRUPTED, TROUBLE, RackproofError, UsageError, printable

VERBS = {
    # run a test
    "plan": "fleet.cli.plan",
    "run": "rackproof.local_run",
    "watch": "fleet.cli.watch",
    "doctor": "agent.cli.doctor",
    "revalidate": "fleet.cli.revalidate",
    "simulate": "fleet.cli.simulate",
    # read the result
    "report": "fleet.cli.report",
    "rma": "fleet.cli.rma",
    "sign": "fleet.cli.sign",
    "verify": "fleet.cli.verify",
    "scaling": "fleet.cli.scaling",
    "cables": "fleet.cli.cables",
    # compare
    "diff": "fleet.cli.diff",
    "baseline": "fleet.cli.baseline",
    "history": "fleet.cli.history",
    "judge": "fleet.cli.judge",
    # criteria
    "criteria": "fleet.cli.criteria",
    "power": "fleet.cli.power",
    # integrate
    "export": "agent.cli.export",
    "scheduler": "fleet.cli.scheduler",
    "notice": "fleet.cli.notice",
    "upload": "fleet.cli.upload",
    "collect": "fleet.cli.collect",
    # internal (the playbooks and launchers call these)
    "inspect": "agent.cli.inspect",
    "bench": "agent.cli.bench",
    "launch": "agent.cli.launch",
    "soak": "agent.cli.soak",
    "wait": "agent.cli.wait",
    "stop": "agent.cli.stop",
    "run-host": "agent.cli.run_host",
    "emit-record": "agent.cli.emit_record",
    "busy": "agent.cli.busy",
    "gangs": "fleet.cli.gangs",
    "bmc": "fleet.cli.bmc",
    # this command
    "help": "rackproof.shell_verbs",
    "version": "rackproof.shell_verbs",
    "completion": "rackproof.shell_verbs",
}
"""Verb -> its module, whose function `add_verb` adds the parser of the verb and sets `call`, the function that runs the verb.

Only the module of the requested verb is imported, because playbooks start the command often, and because GPU hosts and the
control node have different dependencies installed.
"""
GROUPS = {
    "plan": "run a test",
    "report": "read the result",
    "diff": "compare",
    "criteria": "criteria",
    "export": "integrate",
    "inspect": "internal (the playbooks and launchers call these)",
    "help": "this command",
}
"""First verb of each group in `--help` -> heading of the group. A group ends before the first verb of the next group."""
EXTRAS = {
    "control": ("ansible", "jinja2", "jsonschema_rs", "msgspec", "pyghmi", "redfish", "rich", "shtab"),
    "bench": ("numpy", "torch", "torchvision"),
    "history": ("duckdb",),
    "parquet": ("pyarrow",),
    "upload": ("boto3", "botocore"),
}
"""Extra in pyproject.toml -> modules that are installed with this extra and not without it."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return its exit code.

    Raises:
        SystemExit: for `--help` and `--version`, for wrong usage, or if a package that the verb needs is missing.
    """
    if is_process := arguments is None:
        _open_missing_streams()
    try:
        try:
            code = _run_verb(sys.argv[1:] if arguments is None else arguments, is_process=is_process)
        except SystemExit:  # a text such as that of `--help` was printed
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # here, because an error at the exit of Python would replace the exit code by 120
        return code
    except KeyboardInterrupt:
        _print_error("rackproof: interrupted; every file that was written is complete")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - after a traceback Python exits with 1, which here means `rejected`
        return _report_error(error)
    finally:
        _discard_unwritable_output()


def _open_missing_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed (`>&-` in a shell).

    If descriptor 1 or 2 stays closed, the next file that is opened gets this number, and child processes print into the file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open until the process ends
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _discard_unwritable_output() -> None:
    """Discard output that cannot be written, such as output to a closed pipe. Python would fail at exit, with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be on a full disk; the exit code still tells what happened
        print(text, file=sys.stderr)


def _run_verb(arguments: list[str], *, is_process: bool) -> int:
    if is_process:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # the output may have ≥, which some encodings lack
        gc.disable()  # until all imports are done: garbage collection takes a twelfth of the start-up time and frees nothing
    verb = next((word for word in arguments if not word.startswith("-")), "")
    parser = build_parser(verb)
    if is_process:
        gc.freeze()
        gc.enable()
    options = parser.parse_args(arguments)
    if "call" not in options:
        parser.print_help()
        return UsageError.exit_code
    configure_logging()
    return int(options.call(options))


class MainParser(Parser):
    """The parser of the command, whose help lists the verbs by group."""

    verbs: argparse._SubParsersAction[argparse.ArgumentParser]

    def format_help(self) -> str:
        """Return usage, description, the verbs by group, options and exit codes."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        lines = {action.dest: action for action in self.verbs._choices_actions}
        for verb in VERBS:
            if verb in GROUPS:
                if verb != next(iter(VERBS)):
                    formatter.end_section()
                formatter.start_section(GROUPS[verb])
            formatter.add_arguments([lines[verb]] if verb in lines else [])
        formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def build_parser(verb: str = "") -> MainParser:
    """Return the parser of the command with one verb; if `verb` is empty, with all verbs whose dependencies are installed.

    Raises:
        SystemExit: the verb is unknown, or a package that it needs is missing.
    """
    parser = MainParser(
        prog="rackproof",
        description="Acceptance-test, burn in and re-validate racks of GPU servers.",
        epilog="Exit codes: 0 accepted or done, 1 rejected, 2 incomplete or not possible, 64 wrong usage, "
        "70 a defect in Rackproof itself, 74 a report could not be written or uploaded, "
        "75 the run or host is locked by another process, "
        "130 interrupted. "
        "`rackproof help VERB` shows each verb with an example.",
    )
    parser.add_argument("--version", action="version", version=f"rackproof {VERSION}")
    parser.verbs = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=Parser)
    if verb and verb not in VERBS:
        parser.error(f"unknown verb {verb!r}{documents.nearest(verb, VERBS)}")
    for module in dict.fromkeys([VERBS[verb]] if verb else VERBS.values()):
        try:
            importlib.import_module(module).add_verb(parser.verbs)
        except ImportError as error:
            if verb:
                parser.exit(TROUBLE, f"rackproof {verb}: {_missing_package(error)}\n")
    return parser


def _missing_package(error: ImportError) -> str:
    """Return a message that names the missing package and the extra that installs it."""
    name = (error.name or "").partition(".")[0]
    if not name:
        return str(error)
    extra = next((f"[{extra}]" for extra, modules in EXTRAS.items() if name in modules), "")
    return (
        f"{name} is not installed for {sys.executable}: use the Python that Rackproof is installed for, "
        f"or run pip install 'rackproof{extra}' (in a checkout: pip install '.{extra}')"
    )


def _report_error(error: Exception) -> int:
    """Print what went wrong and return the exit code. If the reader of standard output closed the pipe, print nothing."""
    if isinstance(error, RackproofError):
        _print_error(printable(f"rackproof: {error}{_remedy(error.__cause__)}"))
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return TROUBLE
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        _print_error(printable(f"rackproof: {where}{error.strerror or error}{_remedy(error)}"))
        return TROUBLE
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in PACKAGES:
        _print_error(f"rackproof: {_missing_package(error)}")
        return TROUBLE
    _print_error("".join(traceback.format_exception(error)).rstrip())
    _print_error("rackproof: this is a bug in Rackproof; please report it with the traceback above")
    return DEFECT


def _remedy(error: BaseException | None) -> str:
    """Return what to do about a common file error, such as a missing file; empty for any other error."""
    if not isinstance(error, OSError) or not error.filename:
        return ""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if Path(str(error.filename)).name == "plan.json":
            return ": give the directory of a run, which has a plan.json, or the path of an existing plan"
        return ": give the path of an existing file"
    if isinstance(error, IsADirectoryError):
        return ": give a file, not a directory"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ": free up space on its file system"
    return ": use an account with permission, or give another path" if isinstance(error, PermissionError) else ""


if __name__ == "__main__":
    sys.exit(main())
