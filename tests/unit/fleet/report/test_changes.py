"""Test the pages and the terminal table of the changes between two runs."""

from __future__ import annotations

from typing import Any

from fleet.report.changes import MAX_ROWS, changes_blocks, changes_page
from fleet.report.terminal import render_blocks
from schemas.baselines import Change


def change(**over: Any) -> Change:
    fields = {"kind": "regressed", "host": "h1", "scope": "gpu=0", "what": "gemm.throughput", "text": "slower"}
    return Change(**{**fields, "unit": "FLOP/s", "old": 8e14, "new": 6e14, **over})


def terminal_text(*changes: Change) -> str:
    return render_blocks(changes_blocks(changes), width=200, colour=False)


def test_page_without_changes_states_once_that_nothing_changed() -> None:
    assert changes_page("Changes", ["old: a", "new: b"], []) == "# Changes\n\n- old: a\n- new: b\n\nNothing changed.\n"


def test_shortened_table_names_the_command_that_lists_all_changes() -> None:
    changes = tuple(change(host=f"h{number}") for number in range(MAX_ROWS + 2))
    assert changes_page("Changes", [], changes).endswith("\n\n… and 2 more in the output of `rackproof diff --json`.\n")


def test_rows_count_further_changes_of_the_same_kind() -> None:
    pair = [change(), change(what="memory.bandwidth"), change(what="memory.latency")]
    assert (
        terminal_text(*pair, change(kind="unclear", old=None))
        .splitlines()[1]
        .endswith(" and 2 more changes of this kind")
    )
    both = [*pair, *(change(scope="gpu=1", what=each.what) for each in pair)]
    (_, row) = terminal_text(*both).splitlines()
    assert row.endswith(" and 2 more changes of this kind to each part")
