"""A run that was altered after its measurement is accepted only if the change is allowed (`Alteration.reason_allowed`).

The first test makes 732 alterations of simulated runs and of runs on real GPUs. They include every operation of `KINDS`.
`make alter` makes a million alterations.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.documents import part
from tests import ROOT, alterations
from tests.alterations import DUPLICATE, NEGATE, REMOVE, SCALE, SHIFT, SWAP, UNIT

COUNTS = {"one GPU": 400, "two hosts": 300, "three hosts": 8, "h200x1": 16, "h200x2": 8}
"""Run -> number of alterations. The first run is small and is judged ten times faster than the others, so most alterations are of
this run."""
KINDS = {
    "identity of a GPU": {REMOVE, DUPLICATE, SWAP},
    "identity of the record": {REMOVE, SWAP},
    "launch": {REMOVE, DUPLICATE, SWAP, SCALE},
    "participant": {REMOVE, DUPLICATE, SWAP},
    "rank": {REMOVE, DUPLICATE, SWAP, NEGATE},
    "snapshot": {REMOVE, DUPLICATE, SWAP},
    "reading": {REMOVE, DUPLICATE, SWAP},
    "value of a reading": {REMOVE, DUPLICATE, SWAP, NEGATE, SCALE},
    "reason for a missing reading": {REMOVE, DUPLICATE},  # no SWAP: elements of one kind have equal reasons here
    "unit": {REMOVE, UNIT},
    "figure": {REMOVE, DUPLICATE, SWAP, NEGATE, SCALE},
    "setting of a figure": {REMOVE, DUPLICATE, SWAP, SCALE},
    "samples of a figure": {REMOVE, SWAP, SCALE},
    "version": {REMOVE, DUPLICATE},
    "time": {REMOVE, SHIFT},
}
"""Part of the evidence -> the operations that the alterations of this part must include."""


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alterations.simulated_run("one GPU", tmp_path_factory.mktemp("runs"))


def test_no_altered_run_is_accepted_unless_the_change_is_allowed(
    one_gpu: Path, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    counts, failures = alterations.Counts(), []
    for name, count in COUNTS.items():
        measured = ROOT / "docs" / "measurements" / name
        run = one_gpu if name == "one GPU" else measured
        if name in alterations.SIMULATED and name != "one GPU":
            run = alterations.simulated_run(name, tmp_path)
        more, result = alterations.alter(run, count, seed=2)
        counts += more
        failures += result
    record_property("table", f"{alterations.table(counts)}\n{counts.total()} alterations")
    assert not failures, "\n".join(failures[:20])
    assert counts.total() == sum(COUNTS.values())
    counted = {(which, operation) for which, operation, _ in counts}
    assert {(which, each) for which, operations in KINDS.items() for each in operations} <= counted


def test_removed_or_altered_figure_of_a_port_is_detected(tmp_path: Path) -> None:
    """The plan lists no figures of RDMA ports. Which figures a port must have follows from its readings and from the launch."""
    run = alterations.simulated_run("RDMA ports", tmp_path)
    counts, failures = alterations.alter(run, 50, seed=1, kind_prefix="observations/verbs.")
    assert not failures, "\n".join(failures[:20])
    assert {operation for which, operation, _ in counts if which == "figure"} >= {REMOVE, DUPLICATE, SWAP, SCALE}


def test_removed_or_altered_part_of_a_soak_is_detected() -> None:
    """A soak without its timeline would hide a drift."""
    run = ROOT / "docs" / "measurements" / "h200x1-burnin"
    counts, failures = alterations.alter(run, 400, seed=1, kind_prefix="soak")
    assert not failures, "\n".join(failures[:20])
    assert {operation for _, operation, _ in counts} == {REMOVE, DUPLICATE, SWAP, NEGATE, SCALE, UNIT, SHIFT}


def test_every_field_of_the_record_schema_is_altered() -> None:
    """A field that is added to the schema is altered too, although `tests.alterations` does not name it."""
    schema = {"properties": {"added": {"type": "object", "additionalProperties": {"type": "number"}}}}
    result = {
        each.kind: [*alterations.operations(each)] for each in alterations.elements({"added": {"gpu=0": 4}}, schema)
    }
    assert result == {"added": [REMOVE, SWAP], "added/gpu": [REMOVE, SWAP, DUPLICATE, NEGATE, SCALE]}
    named = {
        each.place[0] for each in alterations.elements(dict.fromkeys(part("record")["properties"], 1), part("record"))
    }
    assert named == part("record")["properties"].keys()


def test_altered_run_that_is_accepted_is_reported(one_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two checks that detect a changed unit of a reading are disabled, so a run with such a change is accepted."""
    monkeypatch.setattr("fleet.judge.consistency.impossible_readings", lambda snapshot, **_: ())
    monkeypatch.setattr("fleet.judge.consistency.reading_problems", lambda record: ())
    _, failures = alterations.alter(one_gpu, 20, seed=1, kind_prefix="snapshots/preflight before/metrics")
    assert any(": accepted: unit" in failure for failure in failures)


def test_allowed_change_is_no_failure_if_only_the_decision_from_files_is_accepted(
    one_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = alterations.alter(one_gpu, 20, seed=2)
    monkeypatch.setattr(alterations, "CHECKED_FROM_FILES", 1)
    monkeypatch.setattr(alterations.AcceptedRun, "quick_decision", lambda *_, **__: "INCOMPLETE")
    counts, failures = alterations.alter(one_gpu, 20, seed=2)
    assert not failures
    allowed = {key: count for key, count in expected.items() if key[-1] in ("allowed", "without effect")}
    assert allowed
    assert allowed.items() <= counts.items()


def test_run_that_is_not_accepted_cannot_be_altered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only accepted runs can be altered"):
        alterations.AcceptedRun(ROOT / "docs" / "measurements" / "h200x1-slowed-0.2")
