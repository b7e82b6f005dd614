"""Test observations.csv: measured and missing observations have a row, and each column has one type.

No text from a host may act as a formula in a spreadsheet program.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence
from fleet.report import observations
from fleet.report.merge import merge
from fleet.report.observations import (
    COLUMNS,
    NUMBERS,
    WHOLE_NUMBERS,
    ObservationRow,
    SharedFields,
    cell,
    escape_formula,
    render_csv,
    rows_as_csv,
)
from fleet.report.parquet import render_parquet
from fleet.report.stream import write_stream
from rackproof.main import main
from schemas.records import ERROR, MEASURED, Observation, Samples
from schemas.reports import EXCEPTIONS, FleetReport, Verdict
from schemas.waivers import Waiver
from tests import builders
from tests.unit.fleet.report.test_report import write_run

PLAN = builders.plan("h1", "h2", profile="smoke")
PACKS = read_packs([])
HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
Evidences = dict[str, Evidence]


def table(text: str) -> list[dict[str, str]]:
    """Parse the CSV file into a dictionary per row."""
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    head = next(lines)
    assert tuple(head) == COLUMNS
    rows = list(lines)
    assert all(len(row) == len(COLUMNS) for row in rows)
    return [dict(zip(head, row, strict=True)) for row in rows]


def report_and_rows(evidence: Evidences) -> tuple[FleetReport, list[dict[str, str]]]:
    report = merge(PLAN, evidence, PACKS)
    return report, table("".join(render_csv(report, evidence)))


@pytest.fixture(scope="module")
def healthy() -> tuple[FleetReport, list[dict[str, str]]]:
    return report_and_rows(builders.evidence(PLAN))


@pytest.mark.parametrize("name", ["x", "phase", "dtype"])
def test_thousands_of_observations_that_differ_in_one_parameter_are_reported(name: str) -> None:
    evidence = builders.evidence(PLAN)
    record, *others = evidence["h2"].records
    base = next(item for item in record.observations if item.name == "memory.bandwidth" and item.scope == "gpu=1")
    more = tuple(replace(base, value=1.0e12, params={**base.params, name: str(number)}) for number in range(4000))
    evidence["h2"] = Evidence(records=(replace(record, observations=(*record.observations, *more)), *others))
    _, rows = report_and_rows(evidence)
    assert len(rows) > 4000


SOME_PARAMS = st.dictionaries(st.sampled_from(["phase", "a", "b"]), st.integers(0, 2))


@given(
    st.lists(st.tuples(st.sampled_from(["s", "t"]), SOME_PARAMS), max_size=12),
    st.lists(st.tuples(st.sampled_from(["", "s"]), SOME_PARAMS), max_size=6),
)
def test_verdict_belongs_to_the_same_observation_among_few_and_among_many(
    observed: list[tuple[str, dict[str, int]]], judged: list[tuple[str, dict[str, int]]]
) -> None:
    """Among many observations of one name and scope, an index of their parameters is used."""
    items = [
        Observation(name="a.b", scope="host", stage=stage, unit="1", status=MEASURED, value=1, params=params)
        for stage, params in observed
    ]
    verdicts = [
        Verdict(host="h", scope="host", name="a.b", verdict="pass", criterion="", reason="", stage=stage, params=params)
        for stage, params in judged
    ]
    among_few = observations._assign(items, verdicts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observations, "_MANY", 0)
        assert observations._assign(items, verdicts) == among_few


def slow_memory(item: Observation) -> Observation:
    return replace(item, value=1.0e12) if item.name == "memory.bandwidth" and item.scope == "gpu=1" else item


def test_every_observation_is_a_row_with_its_verdict(
    healthy: tuple[FleetReport, list[dict[str, str]]],
) -> None:
    report, rows = healthy
    evidence = builders.evidence(PLAN)
    observation_count = sum(len(item.observations()) + len(item.versions()) for item in evidence.values())
    assert len([row for row in rows if row["status"]]) == observation_count > 500
    assert {row["verdict"] for row in rows} == {"pass", ""}
    assert sum(int(row["verdicts"]) for row in rows) == len(report.verdicts)
    assert {(row["host"], row["serial"]) for row in rows if row["scope"] == "gpu=1"} == {("h1", "h1-1"), ("h2", "h2-1")}


def test_failure_is_in_the_row_of_its_observation() -> None:
    evidence = builders.evidence(PLAN)
    evidence["h2"] = builders.with_observations(evidence["h2"], slow_memory)
    _, rows = report_and_rows(evidence)
    failed = [row for row in rows if row["verdict"] == "fail"]
    assert {(row["host"], row["serial"], row["name"]) for row in failed} == {("h2", "h2-1", "memory.bandwidth")}
    assert all(float(row["value"]) == 1.0e12 < float(row["limit"]) and row["operator"] == "ge" for row in failed)
    assert {row["unit"] for row in failed} == {"B/s"}


def test_missing_observation_is_a_row() -> None:
    evidence = builders.evidence(PLAN)
    evidence["h2"] = builders.with_observations(evidence["h2"], lambda item: None if item.scope == "gpu=1" else item)
    _, rows = report_and_rows(evidence)
    missing = [row for row in rows if row["status"] == "missing"]
    assert missing
    assert {(row["host"], row["scope"], row["verdict"], row["value"]) for row in missing} == {
        ("h2", "gpu=1", "inconclusive", "")
    }
    assert all(row["reason"] for row in missing)


def test_host_without_a_record_has_a_row() -> None:
    evidence = {**builders.evidence(PLAN), "h2": Evidence(problem="no record: hosts/h2.json is missing")}
    _, rows = report_and_rows(evidence)
    assert [(row["status"], row["reason"]) for row in rows if row["host"] == "h2"] == [
        ("missing", "no record: hosts/h2.json is missing")
    ]


def test_waiver_is_in_the_row(healthy: tuple[FleetReport, list[dict[str, str]]]) -> None:
    waiver = Waiver(criterion="c", who="alice", why="known", until="2026-12-31", host="h1")
    verdict = Verdict(
        host="h1", scope="host", name="xid.last_seen", verdict="fail", criterion="c", reason="r", waiver=waiver
    )
    report = replace(healthy[0], verdicts=(verdict,))
    (row,) = [row for row in table("".join(render_csv(report, {}))) if row["verdict"]]
    assert (row["verdict"], row["waiver"]) == ("fail", "waived by alice until 2026-12-31: known")


@pytest.mark.parametrize(("flag", "mark"), [("rehearsal", "REHEARSAL"), ("simulated", "SIMULATED")])
def test_rehearsal_and_simulation_are_marked_in_every_row(
    healthy: tuple[FleetReport, list[dict[str, str]]], flag: str, mark: str
) -> None:
    report = replace(healthy[0], **{flag: True})  # type: ignore[arg-type]
    assert {row["mark"] for row in table("".join(render_csv(report, builders.evidence(PLAN))))} == {mark}
    assert {row["mark"] for row in healthy[1]} == {""}


@pytest.mark.parametrize(("gang", "records"), [("", "hosts/h1.json"), ("r1", "hosts/h1.json and gangs/r1/h1.json")])
def test_accepted_host_in_a_large_fleet_has_one_row_which_names_its_records(
    healthy: tuple[FleetReport, list[dict[str, str]]], gang: str, records: str
) -> None:
    first, second = healthy[0].hosts
    hosts = replace(first, gang=gang), replace(second, decision="rejected")
    report = replace(healthy[0], detail=EXCEPTIONS, verdicts=(), hosts=hosts)
    rows = table("".join(render_csv(report, builders.evidence(PLAN))))
    assert [(row["status"], row["reason"]) for row in rows if row["host"] == "h1"] == [
        ("skipped", f"host is accepted; in a large fleet its observations are only in {records}")
    ]
    assert len([row for row in rows if row["host"] == "h2"]) > 200
    assert {row["verdict"] for row in rows} == {"not listed"}, (
        "no row may have the verdict `pass`, because this report lists no passes"
    )
    all_rows = table("".join(render_csv(report, builders.evidence(PLAN), all_hosts=True)))
    assert len(all_rows) == 2 * len([row for row in rows if row["host"] == "h2"])


def row_of(value: object, reason: str = "") -> str:
    """Return a CSV file with one row: a measured observation with `value`, or an error if `reason` is given."""
    samples = Samples(n=3, min=-1.5, p50=-1.0, max=2.0, cv=0.1)
    observation = Observation(
        name="x.y",
        scope="host",
        stage="benchmark",
        unit="1",
        status=ERROR if reason else MEASURED,
        value=None if reason else value,  # type: ignore[arg-type]
        reason=reason,
        samples=samples,
    )
    row = ObservationRow(host="h1", rack="r1", serial="", scope="host", name="x.y", observation=observation)
    return ",".join(COLUMNS) + "\r\n" + rows_as_csv(SharedFields(mark="", run_id="r1"), [row])


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-3, "-3"), (-1.5e-9, "-1.5e-09"), (0, "0"), (2**63, str(2**63)), (True, "true"), ("580.1", "580.1"), ("7", "7")],
)
def test_numbers_and_texts_have_separate_columns(value: object, shown: str) -> None:
    text = row_of(value)
    (row,) = table(text)
    is_number = type(value) in (int, float)
    assert (row["value"], row["value_text"]) == ((shown, "") if is_number else ("", shown))
    assert (row["min"], row["samples"]) == ("-1.5", "3")
    assert text.endswith("\r\n")
    assert text.count("\n") == 2


def test_each_column_has_one_type() -> None:
    """Programs that read CSV derive the type of a column from the cells of the column."""
    evidence = builders.evidence(PLAN)
    evidence["h2"] = builders.with_observations(evidence["h2"], slow_memory)
    report, rows = report_and_rows(evidence)
    for row in rows:
        for name in NUMBERS | WHOLE_NUMBERS:
            if row[name]:
                float(row[name])  # raises ValueError if the text is not a number
        assert not (row["value"] and row["value_text"])
        assert not (row["limit"] and row["limit_text"])
    assert {row["value_text"] for row in rows} > {"", "true"}
    limits = [item.limit for item in report.verdicts if isinstance(item.limit, bool | str)]
    assert limits
    assert {row["limit_text"] for row in rows} > {""}


DANGEROUS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
FORMULAE = [
    "=1+1",
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    " =1",
    "＝1",
    '=HYPERLINK("http://x")',
    "\x1b]=1",
    "\u202e=1",
]


@pytest.mark.parametrize("text", FORMULAE)
def test_host_text_is_never_a_formula(text: str) -> None:
    (value,) = table(row_of(text))
    (reason,) = table(row_of(None, reason=f"{text}, and more"))
    for escaped in (value["value_text"], reason["reason"]):
        assert not escaped.strip().startswith(DANGEROUS)


def test_text_after_a_semicolon_is_escaped_only_if_it_could_be_a_formula() -> None:
    assert escape_formula("a;=1+1") == "a;'=1+1"
    assert escape_formula("failed; reset the GPU") == "failed; reset the GPU"


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=40))
def test_any_text_is_one_line_without_a_formula(text: str) -> None:
    escaped = cell(text)
    assert isinstance(escaped, str)
    assert not {unicodedata.category(character) for character in escaped} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not escaped.strip().startswith(DANGEROUS)
    escaped.encode()


def test_report_writes_csv_without_pyarrow_and_says_what_parquet_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "r1", PLAN)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["report", str(tmp_path / "r1"), "--parquet"]) == 64
    assert "install rackproof with the extra `parquet`" in capsys.readouterr().err
    assert not (tmp_path / "r1" / "observations.csv").exists(), "without pyarrow, --parquet must write nothing"
    assert main(["report", str(tmp_path / "r1")]) == 0
    assert len(table((tmp_path / "r1" / "observations.csv").read_bytes().decode())) > 500


@pytest.mark.skipif(not HAS_ARROW, reason="pyarrow (150 MB) is not installed: pip install '.[parquet]'")
def test_parquet_has_the_rows_of_the_csv_file_with_typed_values(
    healthy: tuple[FleetReport, list[dict[str, str]]], tmp_path: Path
) -> None:
    from pyarrow import parquet

    write_stream(tmp_path / "o.parquet", render_parquet(healthy[0], builders.evidence(PLAN)))
    rows = parquet.read_table(tmp_path / "o.parquet").to_pylist()
    assert len(rows) == len(healthy[1])
    for typed, plain in zip(rows, healthy[1], strict=True):
        assert tuple(typed) == COLUMNS
        for name, value in typed.items():
            assert type(value) in ((int, float) if name in NUMBERS | WHOLE_NUMBERS else (str,)) or value is None
            if text := plain[name]:
                assert value == (text if isinstance(value, str) else float(text)), name
            else:
                assert value in (None, ""), name
