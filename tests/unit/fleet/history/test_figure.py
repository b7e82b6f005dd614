"""In percentiles a part counts once for each run, even if it has many values in a run (one for each link, peer or adapter)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.history.database import History
from fleet.history.figure import Selection, figure_answer
from fleet.history.peers import PeerFigure, percentiles
from fleet.history.rows import HostRows, Row, RunRows
from fleet.history.store import add_run, merge_runs
from schemas.baselines import REAL

NAME, MODEL, DRIVER = "peer_copy.bandwidth", "NVIDIA H200", "570"
HOSTS = {"a": (4, 1.0e11), "b": (2, 2.0e11), "c": (2, 2.0e11)}
"""Host -> number of GPUs, bandwidth of each pair in B/s. Each direction is a pair: host a has 12, hosts b and c have 2 each."""


def host_rows(name: str) -> HostRows:
    """Return the rows of one run of a host: its GPUs and the bandwidths of their pairs."""
    count, value = HOSTS[name]
    place = {"host": name, "rack": "r1", "model": MODEL, "driver": DRIVER}
    common = {**place, "name": NAME, "stage": "benchmark", "settings": "", "unit": "B/s", "accepted": True}
    parts: list[Row] = [{**place, "slot": "", "serial": "", "part": "host", "decision": "accepted"}]
    figures: list[Row] = []
    for gpu in range(count):
        gpu_place = {"slot": f"gpu={gpu}", "serial": f"{name}-{gpu}"}
        parts.append({**place, **gpu_place, "part": "gpu", "decision": "accepted"})
        peers = [peer for peer in range(count) if peer != gpu]
        figures += [{**common, **gpu_place, "within": f"peer={peer}", "value": value} for peer in peers]
        # A figure of the whole GPU, not of a pair: it is compared separately.
        figures.append({**common, **gpu_place, "within": "", "value": 9e11})
    return HostRows(parts=tuple(parts), figures=tuple(figures))


@pytest.fixture(params=["single runs", "merged"])
def history(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    """Return a history of two runs of all hosts: with files for each run, or merged into one monthly file for each table."""
    for day in (1, 2):
        entry: dict[str, Any] = {
            "run": f"r{day}", "began": f"2026-11-0{day} 00:00:00", "ended": f"2026-11-0{day} 01:00:00", "profile": "",
            "decision": "accepted", "rackproof": "", "hosts": 3, "gpus": 8, "notes": [],
        }  # fmt: skip
        rows = RunRows(
            kind=REAL, nonce=f"{day:032x}", entry=entry, causes=(), hosts=[host_rows(name) for name in HOSTS]
        )
        add_run(tmp_path, rows)
    if request.param == "merged":
        merge_runs(tmp_path, REAL)
    return History(tmp_path)


def test_distribution_of_pairs_counts_each_gpu_once_in_each_run(history: History) -> None:
    sections = {section.name: section.rows for section in figure_answer(history, Selection(name=NAME), 1.5e11).sections}
    whole, pairs = sections["figures"]
    # Both rows have 16 values: 8 GPUs in 2 runs. All pairs of a GPU count as one value.
    assert [(row["within"], row["values"], row["parts"]) for row in (whole, pairs)] == [("", 16, 8), ("peer=*", 16, 8)]
    assert (pairs["least"], pairs["p05"], pairs["p95"], pairs["most"]) == (1e11, 1e11, 2e11, 2e11)
    assert [(row["within"], row["percentile"], row["values"]) for row in sections["place"]] == [
        ("", 0.0, 16),
        ("peer=*", 50.0, 16),
    ]


def test_each_rack_has_one_row_for_gpus_and_one_for_pairs(history: History) -> None:
    answer = figure_answer(history, Selection(name=NAME))
    (by_rack,) = (section for section in answer.sections if section.name == "by_rack")
    assert [(row["within"], row["rack"], row["median"]) for row in by_rack.rows] == [
        ("", "r1", 9e11),
        ("peer=*", "r1", 1e11),
    ]
    assert "within" in by_rack.columns
    assert answer.notes == []


def test_percentile_of_a_pair_is_among_pairs_and_counts_each_gpu_once(history: History) -> None:
    def asked(value: float, within: str) -> PeerFigure:
        return PeerFigure(
            name=NAME, settings="", stage="benchmark", model=MODEL, driver=DRIVER, within=within, value=value
        )

    pair, other, whole = percentiles(history, [asked(1.5e11, "peer=1"), asked(2e11, "peer=7"), asked(1.5e11, "")])
    assert pair
    assert other
    assert whole
    assert (pair.below, pair.values, pair.parts) == (pytest.approx(0.5, abs=0.005), 16, 8)
    assert other.below == pytest.approx(0.75, abs=0.005)
    assert (whole.below, whole.values, whole.parts) == (0.0, 16, 8)


def test_value_has_no_percentile_among_fewer_than_three_parts(tmp_path: Path) -> None:
    entry: dict[str, Any] = {
        "run": "r1", "began": "2026-11-01 00:00:00", "ended": "2026-11-01 01:00:00", "profile": "",
        "decision": "accepted", "rackproof": "", "hosts": 1, "gpus": 2, "notes": [],
    }  # fmt: skip
    add_run(tmp_path, RunRows(kind=REAL, nonce="1" * 32, entry=entry, causes=(), hosts=[host_rows("b")]))
    answer = figure_answer(History(tmp_path), Selection(name=NAME), 1.5e11)
    assert [row["percentile"] for row in answer.sections[1].rows] == [None, None]
