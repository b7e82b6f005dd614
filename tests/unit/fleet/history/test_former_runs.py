"""A report that is compared with a history (a database of former runs) shows percentiles, earlier values and causes seen before.

The comparison changes no decision.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.history import former_runs
from fleet.history.database import History
from fleet.history.former_runs import MAX_VALUES, compared, history_from_json, percentile, with_history
from fleet.history.rows import run_rows
from fleet.history.store import add_run
from fleet.records.load import Run
from fleet.report.html.host_data import embedded_data
from fleet.report.html.page import MAX_BYTES, render_html
from fleet.report.judge_run import judge_run
from fleet.report.markdown import render_markdown
from schemas import documents
from schemas.baselines import REAL, SIMULATED
from schemas.records import Gpu, Observation, Record, to_json
from schemas.reports import FigureHistory, FleetReport, HostReport, RunHistory, SeenBefore
from tests.accepted import Change, rackproof, report_of, run_directory, slowed, swapped
from tests.histories import DRIVERS, MODEL, Faults

DATES = {f"r{day}": f"2026-10-0{day}T00:00:00Z" for day in range(1, 6)}
HOST_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def run_at(directory: Path, name: str, *changes: Change, **over: Any) -> Path:
    """Write the run `name`, created on its day in DATES, with the changes applied to each record."""

    def change(record: Record) -> Record:
        for each in changes:
            record = each(record)
        return record

    return run_directory(directory / name, change=change, created=DATES[name], **over)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the runs `r1` to `r5`, one a day, and `h`, the history of all of them except r5.

    GPU 0 of h1 has only half of its stress.throughput in r2, r4 and r5, so h1 is rejected in these runs. The memory.bandwidth of
    this GPU decreases from run to run by 0.2 % of its value in r1.
    """
    directory = tmp_path_factory.mktemp("former")
    for number, name in enumerate(DATES):
        changes = [slowed("memory.bandwidth", 1 - number / 500)]
        if name in ("r2", "r4", "r5"):
            changes.append(slowed("stress.throughput", 0.5))
        run = run_at(directory, name, *changes)
        if name != "r5":
            add_run(directory / "h", run_rows(*judge_run(run, [])))
    return directory


@pytest.fixture(scope="module")
def judged(runs: Path) -> tuple[Run, FleetReport]:
    """Return the run r5, and its report without a comparison with the history."""
    return judge_run(runs / "r5", [])


@pytest.fixture(scope="module")
def report(runs: Path, judged: tuple[Run, FleetReport]) -> FleetReport:
    """Return the report of r5 with the comparison with the history."""
    run, plain = judged
    report, problem = with_history(runs / "h", run.plan, plain)
    assert problem == ""
    return report


def figure(section: RunHistory, name: str, part: str = "gpu=0", host: str = "h1") -> tuple[Any, Any]:
    """Return the comparison of the figure `name`, and its entry for one part of a host."""
    (compared_figure,) = (item for item in section.figures if item.name == name)
    (entry,) = (item for item in compared_figure.parts if (item.host, item.part) == (host, part))
    return compared_figure, entry


def test_history_changes_no_decision_verdict_or_cause(runs: Path, tmp_path: Path) -> None:
    """`--history` adds only the section `history` to the report, and not even that if the given directory does not exist."""
    run, store = tmp_path / "r5", tmp_path / "h"
    shutil.copytree(runs / "r5", run)
    shutil.copytree(runs / "h", store)

    def report_with(*options: object) -> tuple[int, dict[str, Any]]:
        return rackproof("report", run, *options).returncode, report_of(run)

    code, plain = report_with()
    with_code, compared_report = report_with("--history", store)
    assert compared_report.pop("history")["causes"]
    assert (with_code, compared_report) == (code, plain)
    assert report_with("--history", store)[1].pop("history") == json.loads(
        json.dumps(to_json(with_history(runs / "h", *_judged(run))[0].history))
    ), "the first report with --history added the run to the history, but the run must not be compared with itself"
    shutil.rmtree(store)
    deleted = rackproof("report", run, "--history", store)
    assert (deleted.returncode, report_of(run)) == (code, plain)
    assert deleted.stderr == (
        f"rackproof: note: no history in {store} yet: the report compares nothing with former runs\n"
    )


def _judged(run: Path) -> tuple[Any, FleetReport]:
    """Return the plan of a run and its report without a history."""
    loaded, report = judge_run(run, [])
    return loaded.plan, report


def test_each_accepted_part_counts_once_with_its_newest_value(report: FleetReport) -> None:
    section = report.history
    assert section is not None
    assert section.runs == 4
    bandwidth, own = figure(section, "memory.bandwidth")
    assert (bandwidth.accepted, bandwidth.model) == (4, "NVIDIA H200")
    # The newest accepted value of this GPU is from r3, 0.4 % below that of r1. Its value in r5, 0.8 % below that of r1, is less
    # than the newest accepted values of all four GPUs.
    assert own.percentile == 0.0
    # Of the four values, one is less than that of GPU 0 of h2, and three are equal, which count half: (1 + 3 / 2) / 4.
    assert figure(section, "memory.bandwidth", host="h2")[1].percentile == 62.5
    assert [value / own.values[0] for value in own.values] == pytest.approx([1, 0.998, 0.996, 0.994, 0.992], abs=1e-5)


def test_values_of_rejected_hosts_are_in_the_trend_but_not_in_the_median(report: FleetReport) -> None:
    section = report.history
    assert section is not None
    stress, own = figure(section, "stress.throughput")
    assert stress.median == own.values[0]
    assert [value / own.values[0] for value in own.values] == [1.0, 0.5, 1.0, 0.5, 0.5]


def test_cause_was_seen_before_on_the_same_part(report: FleetReport) -> None:
    assert report.history is not None
    (seen,) = report.history.causes
    assert seen == SeenBefore(cause=0, parts=1, runs=2, last="2026-10-04", run="r4")
    assert "Seen before: 2 times, last on 2026-10-04 in r4" in render_html(report)
    assert "`Seen before: 2 times, last on 2026-10-04 in r4`" in render_markdown(report)


def test_figures_of_gpus_and_hosts_are_compared_over_20_months(
    fleet: tuple[Faults, Path], judged: tuple[Run, FleetReport]
) -> None:
    """A figure is compared with the newest accepted value of each part. Only the largest message size is compared."""
    history, driver = History(fleet[1], SIMULATED), DRIVERS[2]
    newest = history.rows(
        "select serial, arg_max(value, began) from figures where name = 'memory.bandwidth' and driver = $driver and accepted "
        "group by serial order by 2",
        {"driver": driver},
    )
    serial, value = newest[len(newest) // 4]
    busbw = {"name": "collective.all_reduce.busbw", "unit": "B/s", "stage": "benchmark", "status": "measured"}
    host = HostReport(
        name="r01-h01", rack="r01", decision="accepted", record="", coverage=judged[1].coverage,
        gpus=(Gpu(index=3, serial=serial, uuid="GPU-1", name=MODEL, pci_bus_id="0000:01:00.0"),),
        software={"driver.version": driver},
        measurements=(
            Observation(name="memory.bandwidth", scope="gpu=3", value=value, unit="B/s", stage="benchmark",
                        status="measured", params={"op": "copy"}),
            *(Observation(**busbw, scope="host", value=4.7e11, params={"dtype": "fp32", "size_bytes": size})
              for size in (1 << 20, 1 << 33, 1 << 24)),
        ),
    )  # fmt: skip
    plan = replace(judged[0].plan, created="2027-01-01T00:00:00Z")
    section = compared(history, plan, replace(judged[1], hosts=(host,), causes=()))
    of_gpu, of_host = section.figures
    assert (section.runs, of_gpu.accepted) == (20, len(newest))
    assert of_gpu.parts[0].percentile == pytest.approx(100 * (len(newest) // 4 + 0.5) / len(newest), abs=0.05)
    earlier = history.rows(
        "select value from figures where serial = $serial and name = 'memory.bandwidth' order by began",
        {"serial": serial},
    )
    assert of_gpu.parts[0].values == pytest.approx([*(row[0] for row in earlier[-MAX_VALUES:]), value], rel=1e-5)
    assert (of_host.params["size_bytes"], of_host.accepted) == (1 << 33, 27), (
        "of the 28 hosts, only r00-h00 was never accepted"
    )
    assert len(of_host.parts[0].values) == MAX_VALUES + 1


def test_part_is_identified_by_its_serial_in_any_slot(runs: Path, tmp_path: Path) -> None:
    run = run_at(
        tmp_path, "r5", swapped("h1", 0, "new"), swapped("h2", 1, "h1-0"),
        slowed("stress.throughput", 0.5), slowed("stress.throughput", 0.5, host="h2", scope="gpu=1"),
    )  # fmt: skip
    plan, plain = _judged(run)
    section = with_history(runs / "h", plan, plain)[0].history
    assert section is not None
    assert len(figure(section, "memory.bandwidth", part="gpu=1", host="h2")[1].values) == 5
    assert figure(section, "memory.bandwidth")[1].values == ()
    seen = {plain.causes[item.cause].serial: item.runs for item in section.causes}
    assert seen == {"h1-0": 2}, "the new GPU has no former cause, although its slot has one"


def test_runs_that_began_later_are_ignored(runs: Path) -> None:
    plan, plain = _judged(runs / "r1")
    report, problem = with_history(runs / "h", plan, plain)
    assert (report.history, problem) == (RunHistory(runs=0), "")
    assert render_markdown(report).count("ercentile") == 1, "only the legend may mention percentiles"


def test_value_has_no_percentile_among_too_few_accepted_parts(tmp_path: Path) -> None:
    for name in ("r1", "r2"):
        run = run_at(tmp_path, name, hosts=["h1"])
        loaded, report = judge_run(run, [])
        report = with_history(tmp_path / "h", loaded.plan, report)[0]
        add_run(tmp_path / "h", run_rows(loaded, report))
    assert report.history is not None
    assert {(item.accepted, item.median) for item in report.history.figures if item.parts[0].part != "host"} == {
        (2, None)
    }
    assert {part.percentile for item in report.history.figures for part in item.parts} == {None}
    assert {len(part.values) for item in report.history.figures for part in item.parts} == {2}


@pytest.mark.parametrize(("value", "expected"), [(0.5, 0.0), (1.0, 12.5), (2.0, 50.0), (3.0, 87.5), (9.0, 100.0)])
def test_values_equal_to_the_given_value_count_half(value: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 2.0, 3.0], value) == expected


def test_simulated_run_is_compared_only_with_simulated_runs(runs: Path, tmp_path: Path) -> None:
    def simulated(record: Record) -> Record:
        return replace(record, simulated=True)

    store = tmp_path / "h"
    shutil.copytree(runs / "h", store)
    two = [run_at(tmp_path, name, simulated, simulated=True) for name in ("r3", "r4")]
    done = [rackproof("report", run, "--history", store) for run in two]
    assert [len(item.stderr.splitlines()) for item in done] == [1, 0], (
        "the first run must note that there is no history of simulated runs"
    )
    assert "history" not in report_of(two[0])
    assert report_of(two[1])["history"]["runs"] == 1
    assert len(History(store, REAL).rows("from runs")) == 4
    assert len(History(store, SIMULATED).rows("from runs")) == 2


def test_damaged_files_give_one_warning_and_their_figures_are_ignored(runs: Path, tmp_path: Path) -> None:
    store, run = tmp_path / "h", tmp_path / "r5"
    shutil.copytree(runs / "h", store)
    shutil.copytree(runs / "r5", run)
    for path in (store / REAL / "figures").glob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-10])
    done = rackproof("report", run, "--history", store)
    (line,) = done.stderr.splitlines()
    assert line.startswith("rackproof: warning: history: ")
    assert line.endswith("; and 3 more")
    section = report_of(run)["history"]
    assert (section.get("figures"), section["causes"][0]["runs"]) == (None, 2)


def test_history_section_is_unchanged_after_writing_and_reading(report: FleetReport) -> None:
    document = json.loads(json.dumps(to_json(report)))
    documents.validate(document, "report", source="test")
    assert history_from_json(document["history"]) == report.history


def test_tables_show_percentiles_and_host_pages_show_the_last_runs(report: FleetReport) -> None:
    markdown, html = render_markdown(report), render_html(report)
    assert "percentile 0 of 4)` **fail**" in markdown
    assert "percentile 0 of 4</i>" in html
    result = HOST_DATA.search(html)
    assert result
    data = json.loads(result[1])
    texts = data["texts"]
    rows = [[*(texts[number] for number in row[:5]), row[5]] for row in data["pages"]["0"]["former"]]
    (row,) = (row for row in rows if row[0] == "memory.bandwidth" and row[2] == "GPU 0")
    assert row[3:5] == ["percentile 0 of 4 accepted H200", "4270 GB/s to 4236 GB/s over 5 runs"]
    assert re.fullmatch(r"M0 \d+l[-\d ]+", row[5])
    (reason,) = data["pages"]["0"]["reasons"]
    assert texts[reason[-1]] == "2 times, last on 2026-10-04 in r4"


def test_views_without_a_history_do_not_mention_it(judged: tuple[Run, FleetReport]) -> None:
    page, markdown = render_html(judged[1]), render_markdown(judged[1])
    assert "ercentile" not in markdown
    assert "Seen before" not in markdown
    assert '"former"' not in page
    assert "Seen before:" not in page


def test_comparisons_are_the_first_to_be_omitted_if_the_page_is_too_large(
    report: FleetReport, judged: tuple[Run, FleetReport]
) -> None:
    size = len(embedded_data(judged[1], MAX_BYTES).encode())
    data = json.loads(embedded_data(report, size + 200))
    plain = json.loads(embedded_data(judged[1], size + 200))
    assert [page.pop("former") for page in data["pages"].values()] == [[], []]
    assert data["pages"].keys() == plain["pages"].keys()


def test_json_report_of_one_host_has_only_the_comparisons_of_that_host(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "r5"
    shutil.copytree(runs / "r5", run)
    done = rackproof("report", run, "--host", "h1", "--json", "--history", runs / "h")
    section = json.loads(done.stdout)["history"]
    assert {part["host"] for item in section["figures"] for part in item["parts"]} == {"h1"}
    assert section["causes"][0]["runs"] == 2


def test_text_from_the_history_is_escaped(report: FleetReport) -> None:
    assert report.history is not None
    hostile = SeenBefore(cause=0, parts=1, runs=1, last="2026-01-01", run="<img src=x> `](http://x)`" + "x" * 5000)
    changed = replace(report, history=replace(report.history, causes=(hostile, replace(hostile, cause=99))))
    assert "<img" not in render_html(changed)
    assert "<img" not in render_markdown(changed)
    assert "`](" not in render_markdown(changed)
    assert len(render_html(changed)) < len(render_html(report)) + 5000


def test_figures_and_causes_need_only_three_queries(
    runs: Path, judged: tuple[Run, FleetReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = []
    rows = History.rows
    monkeypatch.setattr(History, "rows", lambda *arguments: (queries.append(arguments[1]), rows(*arguments))[1])
    run, plain = judged
    assert compared(History(runs / "h"), run.plan, plain).figures
    assert len([query for query in queries if "figures" in query or "causes" in query]) == 3


@pytest.mark.parametrize("section", [RunHistory(runs=-1), RunHistory(runs=0, figures=(FigureHistory(
    name="x", stage="", params={}, unit="", model="", driver="", accepted=3, median=math.nan, parts=()),))],
    ids=["negative number of runs", "median that is not a number"])  # fmt: skip
def test_invalid_comparison_is_omitted_with_a_warning(
    runs: Path, monkeypatch: pytest.MonkeyPatch, section: RunHistory
) -> None:
    run, report = judge_run(runs / "r5", [])
    monkeypatch.setattr(former_runs, "compared", lambda *_: section)
    result, line = with_history(runs / "h", run.plan, report)
    assert result.history is None
    assert line.startswith("warning: the report compares nothing with former runs: ")
