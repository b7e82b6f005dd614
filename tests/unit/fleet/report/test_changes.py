"""Test the Markdown page and the terminal table of the changes between two runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleet.report.changes import MAX_ROWS, changes_blocks, changes_page
from fleet.report.terminal import render_blocks
from schemas.baselines import Change


def change(**fields: Any) -> Change:
    """Return a regression of a GPU, with `fields` replaced."""
    default = {"kind": "regressed", "host": "h1", "scope": "gpu=0", "what": "gemm.throughput", "text": "slower"}
    return Change(**{**default, "unit": "FLOP/s", "old": 8e14, "new": 6e14, **fields})


def terminal_text(*changes: Change) -> str:
    return render_blocks(changes_blocks(changes), width=200, colour=False)


def test_page_without_changes_states_once_that_nothing_changed() -> None:
    assert changes_page("Changes", ["old: a", "new: b"], []) == "# Changes\n\n- old: a\n- new: b\n\nNothing changed.\n"


def test_shortened_table_names_the_command_that_lists_all_changes() -> None:
    changes = tuple(change(host=f"h{number}") for number in range(MAX_ROWS + 2))
    assert changes_page("Changes", [], changes).endswith("\n\n… and 2 more in the output of `rackproof diff --json`.\n")


def test_row_shows_one_change_and_counts_the_others_of_its_kind() -> None:
    regressions = [change(), change(what="memory.bandwidth"), change(what="memory.latency")]
    (_, row, unclear) = terminal_text(*regressions, change(kind="unclear", old=None)).splitlines()
    assert row.endswith(" and 2 more changes of this kind")
    assert "more changes" not in unclear


def test_parts_with_equal_changes_share_a_row() -> None:
    of_one_gpu = [change(), change(what="memory.bandwidth"), change(what="memory.latency")]
    of_another_gpu = [replace(item, scope="gpu=1") for item in of_one_gpu]
    (_, row) = terminal_text(*of_one_gpu, *of_another_gpu).splitlines()
    assert row.endswith(" and 2 more changes of this kind to each part")
