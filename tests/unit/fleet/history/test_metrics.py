"""`rackproof history metrics` counts each host by its newest run, even if older runs are imported later.

promtool accepts the output.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from schemas.records import Record
from tests.accepted import rackproof, run_directory

Series = dict[tuple[str, ...], float]


def slow(record: Record) -> Record:
    """Return a record of h1 with half the memory.bandwidth of GPU 0, so that h1 is rejected; return other records unchanged."""
    if record.host != "h1":
        return record
    return replace(record, observations=tuple(
        replace(item, value=float(item.value or 0) * 0.5)
        if item.name == "memory.bandwidth" and item.scope == "gpu=0" else item
        for item in record.observations))  # fmt: skip


def metrics(history: Path, *options: str) -> tuple[dict[str, Series], str]:
    """Return the metrics and the text from which they were parsed.

    The metrics: name without `rackproof_history_rack_` -> label values -> value. The label values are sorted by
    the names of their labels.
    """
    done = rackproof("history", "metrics", "--history", history, *options)
    assert (done.returncode, done.stderr) == (0, "")
    families = {
        family.name.removeprefix("rackproof_history_rack_"): {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in family.samples
        }
        for family in text_string_to_metric_families(done.stdout)  # type: ignore[no-untyped-call]
    }
    return families, done.stdout


def test_state_is_that_of_the_newest_run_of_each_host(tmp_path: Path) -> None:
    """Run r2 rejects h1, and run r3 tests only h2. The oldest run, r1, accepts both hosts and is imported last.

    The rack of both hosts is also called r1: in the expected labels, `r1` is the rack and `r3` the run.
    """
    history = tmp_path / "history"
    runs = [
        run_directory(tmp_path / "r2", created="2026-10-02T00:00:00Z", change=slow),
        run_directory(tmp_path / "r3", created="2026-10-03T00:00:00Z", hosts=("h2",)),
        run_directory(tmp_path / "r1", created="2026-10-01T00:00:00Z"),
    ]
    assert rackproof("history", "import", *runs, "--history", history).returncode == 0
    families, text = metrics(history)
    assert families["hosts"] == {("accepted", "r1"): 1, ("rejected", "r1"): 1, ("incomplete", "r1"): 0}
    assert sum(families["causes"].values()) == 1
    assert families["last_run_info"] == {("accepted", "smoke", "r1", "r3"): 1}
    assert families["last_run_timestamp_seconds"] == {("r1",): 1790985600}
    assert subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=False).returncode == 0
    assert text.endswith("# EOF\n")
    assert families["rackproof_history_unreadable_files"] == {(): 0}
    file = tmp_path / "fleet.prom"
    assert rackproof("history", "metrics", file, "--history", history).stdout == f"metrics: {file}\n"
    assert file.read_text() == text
    next((history / "gpu" / "parts").glob("*.parquet")).unlink()
    done = rackproof("history", "metrics", "--history", history)
    assert "rackproof_history_unreadable_files 1.0" in done.stdout


def test_simulated_run_is_not_exported_as_accepted(tmp_path: Path) -> None:
    history = tmp_path / "history"
    run = run_directory(tmp_path / "r1", simulated=True)
    assert rackproof("history", "import", run, "--history", history).returncode == 0
    families, text = metrics(history, "--kind", "simulated")
    names = {f"SIMULATED {decision}" for decision in ("accepted", "rejected", "incomplete")}
    assert {decision for decision, _ in families["hosts"]} == names
    assert sum(families["hosts"].values()) == 2
    assert all("SIMULATED" in line for line in text.splitlines() if line.startswith("# HELP rackproof_history_rack"))
    assert rackproof("history", "metrics", "--history", history).returncode == 2, "the history has no run of real GPUs"


def test_run_with_a_wrong_date_is_not_the_newest(tmp_path: Path) -> None:
    history = tmp_path / "history"
    right = run_directory(tmp_path / "r1", change=slow)
    wrong = run_directory(tmp_path / "r2", created="2099-01-01T00:00:00Z", hosts=("h1",))
    assert rackproof("history", "import", right, wrong, "--history", history).returncode == 0
    text = rackproof("history", "metrics", "--history", history).stdout
    assert 'run_id="r1"' in text
    assert 'run_id="r2"' not in text
