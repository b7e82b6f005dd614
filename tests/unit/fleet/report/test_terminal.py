"""Test when Rackproof colours and wraps its output."""

from __future__ import annotations

import io

import pytest

from fleet.report.terminal import ALWAYS, AUTO, NEVER, has_colour, width_of


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("choice", "variables", "is_terminal", "expected"),
    [
        (AUTO, {"TERM": "xterm"}, True, True),
        (AUTO, {"TERM": "xterm"}, False, False),
        (AUTO, {"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        (AUTO, {"TERM": "dumb"}, True, False),
        (NEVER, {"TERM": "xterm"}, True, False),
        (ALWAYS, {"TERM": "dumb", "NO_COLOR": "1"}, False, True),
    ],
)
def test_colour_follows_choice_environment_and_terminal(
    monkeypatch: pytest.MonkeyPatch, choice: str, variables: dict[str, str], is_terminal: bool, expected: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_colour(choice, Terminal() if is_terminal else io.StringIO()) is expected


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "97")
    assert width_of(io.StringIO()) is None
    assert width_of(Terminal()) == 97
