"""Test the progress bar: it is drawn only on a terminal, counts items of other processes too, and is removed at the end."""

from __future__ import annotations

import io
import multiprocessing

import pytest

from fleet import progress


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def work(stream: io.StringIO) -> str:
    """Do six of eight items, four of them in another process, and return what was drawn."""
    with progress.progress_bar(stream):
        progress.begin("judging hosts", 8)
        process = multiprocessing.get_context("fork").Process(target=progress.advance, args=(4,))
        process.start()
        process.join()
        progress.draw()
        progress.advance(2)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def _draw_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")


def test_terminal_shows_the_items_of_all_processes() -> None:
    drawn = work(Terminal())
    assert "judging hosts" in drawn
    assert "4/8" in drawn
    assert "6/8" in drawn
    assert drawn.endswith("\x1b[1A\x1b[2K")  # the line is removed


def test_nothing_is_written_to_a_pipe_or_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(io.StringIO()) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert work(Terminal()) == ""


def test_calls_outside_a_progress_bar_raise_no_error() -> None:
    progress.begin("judging hosts", 8)
    progress.advance()
    progress.draw()
