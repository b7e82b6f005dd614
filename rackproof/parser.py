"""The command line parser: one-line errors, exit code 64, and no abbreviated options."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from schemas import documents
from schemas.errors import UsageError

_SURROGATE = re.compile("[\ud800-\udfff]")
_NUMBER = re.compile(r"-(\d+|\d*\.\d+)")
_OPTION_LINE = re.compile(r"^  (-.*?)(?:  |$)", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


class Parser(argparse.ArgumentParser):
    """Parses a command line, and reports an error in one line.

    Options must be written in full, because in a later version an abbreviation could mean another option.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})
        self._words: list[str] = []
        self._is_second_pass = False

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments. An unexpected argument is an error.

        `history import --history DIRECTORY RUN` has two positional arguments: `import`, and a list, here `RUN`. Before Python
        3.13, argparse takes this list as empty if an option is between the two. A second pass then parses all options first,
        and the positional arguments last.
        """
        if self._is_second_pass:
            return super().parse_known_args(args, namespace)
        self._words = list(sys.argv[1:] if args is None else args)
        options, extra = super().parse_known_args(self._words, namespace)
        if extra and self._ends_with_list() and "--" not in self._words:
            self._is_second_pass = True
            try:
                options, extra = self.parse_known_intermixed_args(self._words)
            finally:
                self._is_second_pass = False
        if extra:
            self.error(f"unexpected argument {extra[0]!r}")
        self._refuse_broken_text(options)
        return options, extra

    def _refuse_broken_text(self, options: argparse.Namespace) -> None:
        """Report the text of an option that is not in the encoding of the locale, such as Latin-1 text in a UTF-8 locale.

        Such a text cannot be written to a file or a notification. Paths of runs may have any bytes.
        """
        for action in self._actions:
            value = getattr(options, action.dest, None) if action.option_strings else None
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not text.isprintable() and _SURROGATE.search(text):
                    encoding = sys.getfilesystemencoding().upper()
                    self.error(f"argument {action.option_strings[-1]}: {text!r} is not {encoding} text")

    def _ends_with_list(self) -> bool:
        """Return whether there are several positional arguments, of which the last is a list that may be empty."""
        positionals = [action for action in self._actions if not action.option_strings]
        return len(positionals) > 1 and positionals[-1].nargs == argparse.ZERO_OR_MORE

    def error(self, message: str) -> None:  # type: ignore[override]
        """Print the error and exit. If the command line has an unknown option, report that option instead.

        For a mistyped required option, argparse would only report that the required option is missing.
        """
        known = self._option_names()
        words = self._words[: self._words.index("--")] if "--" in self._words else self._words
        if unknown := next((word for word in words if _is_option(word) and not _is_known(word, known)), ""):
            name = unknown.partition("=")[0]
            message = f"unknown option {name}{documents.nearest(name, known)}"
        line = " ".join(message.split())
        self.exit(
            UsageError.exit_code, f"{self.prog}: {line}{'' if line.endswith('?)') else f': see {self.prog} --help'}\n"
        )

    def _option_names(self) -> list[str]:
        """Return the options of this parser, as its help lists them."""
        return [name for line in _OPTION_LINE.findall(self.format_help()) for name in _OPTION.findall(line)]


def _is_option(word: str) -> bool:
    """Return whether the word is an option, and not a value such as `-`, `-1` or a text with a space."""
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NUMBER.fullmatch(word)


def _is_known(word: str, known: Sequence[str]) -> bool:
    return word.partition("=")[0] in known or (not word.startswith("--") and word[:2] in known)
