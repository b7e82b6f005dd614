"""Verbs with modes: the argument `what` selects what such a verb does. An option without effect in the chosen mode is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from schemas.errors import UsageError

Call = Callable[[argparse.Namespace], int]


def call_in_mode(call: Call, parser: argparse.ArgumentParser, modes: Mapping[str, str]) -> Call:
    """Return `call` with a check of the options before it.

    `modes`: option -> the values of `what` with which the option has an effect, separated by spaces. The other options have an
    effect with every value.

    The returned function raises UsageError if an option has another value than its default, but no effect.
    """
    known = {action.dest: action for action in parser._actions}

    def checked(options: argparse.Namespace) -> int:
        for name, words in modes.items():
            action, value, effective = known[name], getattr(options, name), words.split()
            if options.what not in effective and value != action.default and value != []:
                label = action.option_strings[-1] if action.option_strings else f"argument {value[0]!r}"
                raise UsageError(
                    f"{parser.prog.removeprefix('rackproof ')} {options.what}: {label} has no effect: omit it (it is for "
                    f"{', '.join(effective)})"
                )
        return call(options)

    return checked
