"""The command `rackproof`: dispatch to the verbs of GPU hosts and of the control node, imported when used."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.cli.verbs import VERBS as HOST_VERBS
from rackproof.logs import configure_logging
from schemas import VERSION, documents
from schemas.errors import RackproofError

FLEET_VERBS = (
    "plan",
    "gangs",
    "report",
    "judge",
    "baseline",
    "diff",
    "watch",
    "simulate",
    "power",
    "criteria",
    "scheduler",
    "notice",
    "revalidate",
    "collect",
    "rma",
    "scaling",
    "sign",
    "verify",
)
BOTH_VERBS = ("run",)
OUR_OWN = ("agent", "collectors", "fleet", "rackproof", "schemas")
EXTRAS = {
    "control": ("ansible", "jinja2", "jsonschema_rs", "msgspec"),
    "bench": ("numpy", "torch", "torchvision"),
    "parquet": ("pyarrow",),
}
"""Extra of the package -> what only it brings."""
USAGE, TROUBLE, DEFECT, INTERRUPTED = 64, 2, 70, 130


class _Parser(argparse.ArgumentParser):
    """argparse that says in one line what is wrong with a command line, and exits as the documentation promises.

    An option is written out: of an abbreviation the next version may make another option.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> None:  # type: ignore[override]
        line = " ".join(message.split())
        self.exit(USAGE, f"{self.prog}: {line}{'' if line.endswith('?)') else f': see {self.prog} --help'}\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does; what is not known is an error, told before anything that is missing since it was mistyped."""
        words = list(sys.argv[1:] if args is None else args)
        if unknown := next(filter(self._is_unknown, self._own(words)), ""):
            name = unknown.partition("=")[0]
            self.error(f"unknown option {name}{documents.nearest(name, self._option_string_actions)}")
        found, more = super().parse_known_args(words, namespace)
        if more:
            self.error(f"{more[0]!r} is one word too many")
        return found, more

    def _own(self, words: list[str]) -> list[str]:
        """The words that are this parser's: before `--`; those after a verb are the verb's own."""
        words = words[: words.index("--")] if "--" in words else words
        verb = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
        return words[:verb] if self._subparsers else words

    def _is_unknown(self, word: str) -> bool:
        """Whether it is an option that the verb has not: no value such as `-`, `-1` or a text with a space."""
        if len(word) < 2 or word[0] != "-" or " " in word or self._negative_number_matcher.match(word):
            return False
        known = self._option_string_actions
        return word.partition("=")[0] not in known and (word.startswith("--") or word[:2] not in known)


def main(arguments: list[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        print(
            "rackproof: interrupted; files are written whole or not at all: the same command again is safe",
            file=sys.stderr,
        )
        return INTERRUPTED


def _main(arguments: list[str] | None) -> int:
    if alone := arguments is None:
        gc.disable()  # until all is imported: looking for garbage in it takes a twelfth of the time, and there is none
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _Parser(
        prog="rackproof",
        description="Accept, burn in and re-validate GPU racks.",
        epilog="Exit codes: 0 accepted (report) or done, 1 rejected, 2 incomplete or not possible, 64 wrong usage, "
        "70 a defect in Rackproof itself, 74 a report could not be written, 75 somebody else has the run or the host, "
        "130 interrupted. "
        "`rackproof VERB --help` shows each verb with an example.",
    )
    parser.add_argument("--version", action="version", version=f"rackproof {VERSION}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=_Parser)
    verb = next((word for word in arguments if not word.startswith("-")), "")
    if verb and verb not in (*HOST_VERBS, *FLEET_VERBS, *BOTH_VERBS):
        parser.error(f"unknown verb {verb!r}{documents.nearest(verb, (*HOST_VERBS, *FLEET_VERBS, *BOTH_VERBS))}")
    # Each side has needs of its own (NVML here, Ansible there), so only the one that is asked for is imported.
    for module, mine in (
        ("agent.cli.verbs", HOST_VERBS),
        ("fleet.cli.verbs", FLEET_VERBS),
        ("rackproof.local_run", BOTH_VERBS),
    ):
        if verb in mine or not verb:
            try:
                importlib.import_module(module).add_verbs(verbs, verb)
            except ImportError as error:
                if verb:
                    parser.exit(TROUBLE, f"rackproof {verb}: {_lacking(error)}\n")
    if alone:
        gc.freeze()
        gc.enable()
    options = parser.parse_args(arguments)
    if "call" not in options:
        parser.print_help()
        return USAGE
    configure_logging()
    try:
        return int(options.call(options))
    except Exception as error:  # noqa: BLE001 - Python's own exit code for a traceback, 1, would read as `rejected`
        return _told(error)


def _lacking(error: ImportError) -> str:
    """What is not installed, and what brings it."""
    name = (error.name or "").partition(".")[0]
    if not name:
        return str(error)
    extra = next((f"[{extra}]" for extra, brings in EXTRAS.items() if name in brings), "")
    return f"{name} is not installed: pip install 'rackproof{extra}', in a checkout '.{extra}'"


def _told(error: Exception) -> int:
    """Tells what went wrong, and gives the exit code for it."""
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
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in OUR_OWN:
        print(f"rackproof: {_lacking(error)}", file=sys.stderr)
        return TROUBLE
    traceback.print_exception(error)
    print("rackproof: this is a defect in Rackproof; please report it with the lines above", file=sys.stderr)
    return DEFECT


def _remedy(error: BaseException | None) -> str:
    """What to do about a file that could not be read, where whoever read it could not know what it was to be."""
    if not isinstance(error, OSError) or not error.filename:
        return ""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if Path(str(error.filename)).name == "plan.json":
            return ": give the directory of a run, which has a plan.json, or a plan that is there"
        return ": give the path of a file that is there"
    if isinstance(error, IsADirectoryError):
        return ": give a file, and not a directory"
    return ": run this as a user who may, or give another path" if isinstance(error, PermissionError) else ""


if __name__ == "__main__":
    sys.exit(main())
