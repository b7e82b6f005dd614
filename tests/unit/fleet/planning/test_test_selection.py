"""Test how benchmarks are selected under a time budget: by earlier findings, age of the last run, and cost."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.planning.duration import estimate_duration
from fleet.planning.history import apply_budget, history
from fleet.planning.plan import expected_costs, make_plan, read_profile, without_unused_benchmarks
from fleet.planning.test_selection import LAUNCH_S, PastRun, select_tests, selection_summary
from fleet.report.html.page import render_html
from fleet.report.junit import render_junit
from fleet.report.markdown import render_markdown
from fleet.report.merge import merge
from fleet.report.tables import headline
from fleet.report.tables.summary_text import render_summary
from schemas import documents
from schemas.catalogue import BENCHMARKS
from schemas.durations import Size, expected_s
from schemas.errors import UsageError
from schemas.plans import BenchmarkChoice, BudgetSelection, Plan, plan_from_json
from schemas.records import Record, to_json
from schemas.stages import BENCHMARK
from tests import ROOT, builders
from tests.accepted import Done, rackproof

NOW = "2026-11-21T04:00:00Z"
STAGES = {BENCHMARK: ["gemm", "memory", "stress", "peer_copy"], "gang": ["collective", "pairs"]}
EACH = [(stage, name) for stage, names in STAGES.items() for name in names]
"""Stage and name of every benchmark in STAGES."""
SIZES = {BENCHMARK: Size(gpus=8), "gang": Size(gpus=8, hosts=16)}
ESTIMATES = {(stage, name): expected_s(name, {}, SIZES[stage]) for stage, name in EACH}


def ago(days: float) -> str:
    return (datetime(2026, 11, 21, 4, tzinfo=timezone.utc) - timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")


def past(days: float, hosts: int = 10, **changes: Any) -> PastRun:
    """Return a run that began `days` ago: each benchmark ran on `hosts` hosts without findings and took 10 s."""
    whole = PastRun(
        run_id=f"r{days}",
        began=ago(days),
        profile="revalidate",
        measured=dict.fromkeys(EACH, hosts),
        cost_s=dict.fromkeys(EACH, 10.0),
    )
    return replace(whole, **changes)


def chosen(choice: BudgetSelection) -> list[tuple[str, str]]:
    """Return stage and name of the chosen benchmarks, in the order in which they were chosen."""
    return [(item.stage, item.benchmark) for item in choice.items if item.chosen]


def pick(budget_s: float, *runs: PastRun, profile: str = "revalidate") -> BudgetSelection:
    """Return the selection from the benchmarks in STAGES that fits into `budget_s`, after the earlier `runs`."""
    return select_tests(ESTIMATES, runs, budget_s=budget_s, profile=profile, now=NOW)


def test_cheapest_benchmarks_come_first_without_history() -> None:
    choice = pick(10_000)
    assert set(chosen(choice)) == set(EACH)
    assert [name for _, name in chosen(choice)][:4] == ["memory", "gemm", "pairs", "peer_copy"]
    assert choice.cost_s == pytest.approx(sum(ESTIMATES.values()) + 2 * LAUNCH_S, abs=0.1)


@pytest.mark.parametrize("names", [("n1",), ("n1", "n2"), tuple(f"n{number}" for number in range(1, 17))])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("profile", ["revalidate", "standard"])
def test_budget_of_the_expected_time_of_the_run_is_enough_for_all_benchmarks(
    names: tuple[str, ...], gpus: int, profile: str
) -> None:
    """The costs of the benchmarks are the times from which the line `time` of the plan is computed."""
    hosts = builders.inventory(
        *names, rackproof_gpu_count=gpus, rackproof_gang="rack" if len(names) > 1 else "none", rackproof_batch_size=64
    )
    whole = without_unused_benchmarks({**read_profile(profile), "may_choose": True}, hosts)
    plan = make_plan(whole, hosts, run_id="r", nonce="0" * 32, created=NOW)
    expected = sum(estimate_duration(plan, None).stages_s.values())
    for budget_s, is_enough in ((expected + 5, True), (expected - 5, False)):
        reduced, choice = apply_budget(whole, hosts, budget=budget_s, runs=None, run_dir=None, now=NOW)
        assert choice
        assert all(item.chosen for item in choice.items) is is_enough
        plan = make_plan(reduced, hosts, run_id="r", nonce="0" * 32, created=NOW, choice=choice)
        assert choice.cost_s == pytest.approx(sum(estimate_duration(plan, None).stages_s.values()), abs=1)


@pytest.mark.parametrize("with_history", [False, True])
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("names", [("n1",), ("n1", "n2")])
def test_smallest_budget_that_is_accepted_measures_a_part(
    names: tuple[str, ...], gpus: int, with_history: bool
) -> None:
    """With one GPU, the benchmarks that need several GPUs take no time and measure nothing."""
    hosts = builders.inventory(*names, rackproof_gpu_count=gpus, rackproof_gang="none")
    profile = read_profile("revalidate")
    tests = [(BENCHMARK, name) for name in profile["stages"][BENCHMARK]["benchmarks"]]
    estimates = expected_costs(profile, hosts)
    measured = {key: 10 for key in tests if estimates[key]}
    runs = [past(7, measured=measured, cost_s=estimates)] if with_history else []
    for tenths in range(80, 140):
        choice = select_tests(estimates, runs, budget_s=tenths / 10, profile="revalidate", now=NOW)
        if choice.cost_s > choice.budget_s:
            continue  # `apply_budget` refuses this budget
        names_chosen = {item.benchmark for item in choice.items if item.chosen}
        stages = profile["stages"][BENCHMARK]
        kept = {name: settings for name, settings in stages["benchmarks"].items() if name in names_chosen}
        reduced = {**profile, "stages": {BENCHMARK: {**stages, "benchmarks": kept}}}
        plan = make_plan(reduced, hosts, run_id="r", nonce="0" * 32, created=NOW, choice=choice)
        host = plan.hosts[0]
        observed = {item.name for item in plan.expected_of(host) if plan.scopes_of(host, item)}
        assert observed - {"benchmark.duration"}, (tenths, names_chosen)


@pytest.mark.parametrize("budget_s", [1, 9, 9.3])
def test_time_in_the_refusal_of_a_small_budget_is_enough(budget_s: float) -> None:
    hosts = builders.inventory("n1", rackproof_gpu_count=1, rackproof_gang="none")
    profile = read_profile("revalidate")

    def plan(budget: float) -> None:
        apply_budget(profile, hosts, budget=budget, runs=None, run_dir=None, now=NOW)

    with pytest.raises(UsageError, match=rf"a budget of {budget_s} s is too small: .* takes about (\d+) s") as error:
        plan(budget_s)
    advised = re.search(r"takes about (\d+) s", str(error.value))
    assert advised
    plan(float(advised[1]))


def test_cost_is_that_of_the_largest_host() -> None:
    hosts = builders.inventory("n1", "n2", rackproof_gang="none", rackproof_gpu_count=2)
    hosts["n2"]["rackproof_gpu_count"] = 8
    costs = expected_costs(read_profile("revalidate"), hosts)
    alone = expected_costs(read_profile("revalidate"), {"n2": hosts["n2"]})
    assert costs == alone
    assert {stage for stage, _ in costs} == {BENCHMARK}


def test_skipped_benchmark_states_its_cost() -> None:
    choice = pick(20)
    assert chosen(choice) == [(BENCHMARK, "memory"), (BENCHMARK, "gemm")]
    skipped = {item.benchmark: item.why for item in choice.items if not item.chosen}
    assert skipped["stress"] == "takes 31 s; 6 s of 20 s remain; no earlier run: cheapest first"
    assert skipped["pairs"].startswith("takes 16 s")  # includes the start of the ranks of its stage


def test_benchmark_with_findings_comes_first() -> None:
    assert chosen(pick(26, past(1)))[0] == (
        BENCHMARK,
        "stress",
    )  # without findings, the benchmark that covers the most kinds of parts comes first
    failed = past(1, findings={(BENCHMARK, "peer_copy"): 4})
    assert chosen(pick(26, failed)) == [(BENCHMARK, "peer_copy")]


def test_cheaper_benchmark_is_preferred_at_equal_findings() -> None:
    history_ = past(
        1,
        findings={(BENCHMARK, "gemm"): 2, (BENCHMARK, "memory"): 2},
        cost_s={**dict.fromkeys(EACH, 10.0), (BENCHMARK, "gemm"): 90.0},
    )
    assert chosen(pick(26, history_)) == [(BENCHMARK, "memory")]


def test_benchmark_comes_later_if_an_earlier_one_covers_its_kind_of_part() -> None:
    order = chosen(pick(10_000, past(1)))
    assert order.index((BENCHMARK, "memory")) < order.index((BENCHMARK, "gemm"))  # stress already covers compute


def test_every_benchmark_runs_within_nine_weeks() -> None:
    """The weekly budget is enough for at most four of the six benchmarks."""
    runs, covered = [past(70)], set()
    for week in range(9, 0, -1):
        choice = select_tests(ESTIMATES, runs, budget_s=50, profile="revalidate", now=ago(7 * week))
        assert choice.cost_s <= 50
        covered |= set(chosen(choice))
        runs.append(past(7 * week, measured=dict.fromkeys(chosen(choice), 10)))
    assert covered == set(EACH)


def test_benchmark_that_never_ran_comes_first() -> None:
    without_gemm = past(1, measured=dict.fromkeys(EACH[1:], 10))
    choice = pick(26, without_gemm)
    assert chosen(choice) == [(BENCHMARK, "gemm")]
    assert choice.items[0].why == "0 findings in 0 measurements, never run; covers compute"


def test_cost_in_a_run_of_the_same_profile_takes_precedence() -> None:
    other = past(2, profile="standard", cost_s=dict.fromkeys(EACH, 100.0))
    assert {item.cost_s for item in pick(1000, other).items} == {100.0}
    assert {item.cost_s for item in pick(1000, other, past(1)).items} == {10.0}


@pytest.mark.parametrize("budget_s", [1, 20, 26, 47, 60, 81, 200, 1000])
def test_selection_fits_the_budget_and_ignores_the_order_of_runs(budget_s: float) -> None:
    """If no benchmark fits into the budget, `select_tests` selects the cheapest one. `apply_budget` then refuses the budget."""
    runs = [past(day, findings={EACH[day % 6]: day % 3}) for day in range(1, 8)]
    choice = pick(budget_s, *runs)
    assert choice == pick(budget_s, *reversed(runs))
    assert {(item.stage, item.benchmark) for item in choice.items} == set(EACH)
    assert chosen(choice)[0][0] == BENCHMARK
    assert choice.cost_s <= budget_s or len(chosen(choice)) == 1


# The history on disk


TOOK_S = 10.0


def with_long_launches(record: Record) -> Record:
    """Return the record with launches of 170 s. The cost of a benchmark must not be this duration."""
    return replace(record, launches=tuple(replace(launch, duration_s=170.0) for launch in record.launches))


def run_of(runs: Path, name: str, *, began: str = builders.WHEN, slow_host: str = "") -> Path:
    """Write a run of three hosts and its report. Each benchmark took TOOK_S. On `slow_host` all matrix products are slow."""
    plan = replace(builders.plan("h1", "h2", "h3", profile="smoke", rackproof_gang="none"), run_id=name, created=began)
    directory = runs / name
    documents.write(directory / "plan.json", json.loads(json.dumps(to_json(plan))))
    evidence = {
        host: builders.with_observations(
            replace(of_host, records=tuple(with_long_launches(record) for record in of_host.records)),
            lambda item: replace(item, value=TOOK_S) if item.name == "benchmark.duration" else item,
        )
        for host, of_host in builders.evidence(plan).items()
    }
    if slow_host:
        evidence[slow_host] = builders.with_observations(
            evidence[slow_host], lambda item: replace(item, value=1.0) if item.name == "gemm.throughput" else item
        )
    for host, host_evidence in evidence.items():
        documents.write(directory / "hosts" / f"{host}.json", to_json(host_evidence.records[0]))
    report = merge(plan, evidence, read_packs(()))
    documents.write(directory / "report.json", json.loads(json.dumps(to_json(report))))
    return directory


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    run_of(runs, "first", slow_host="h2")
    run_of(runs, "second")
    return runs


def test_history_has_the_earlier_runs_that_measured_any_of_the_given_hosts(earlier: Path) -> None:
    by_id = {run.run_id: run for run in history(earlier, {"h1", "h2", "h3"}, rehearsal=False)}
    assert set(by_id) == {"first", "second"}
    assert by_id["first"].measured[(BENCHMARK, "gemm")] == 3
    assert (by_id["first"].findings.get((BENCHMARK, "gemm")), by_id["second"].findings) == (1, {})
    assert by_id["first"].cost_s[(BENCHMARK, "gemm")] == TOOK_S
    (first,) = (run for run in history(earlier, {"h2", "elsewhere"}, rehearsal=False) if run.run_id == "first")
    assert first.measured[(BENCHMARK, "gemm")] == 1
    assert [*history(earlier, {"elsewhere"}, rehearsal=False)] == []
    assert [*history(earlier, {"h1"}, rehearsal=True)] == []
    assert {run.run_id for run in history(earlier, {"h1"}, rehearsal=False, excluded=earlier / "first")} == {"second"}


def test_earlier_runs_are_sorted_by_their_plans_and_not_by_file_times(tmp_path: Path) -> None:
    days = {"r1": 3, "r2": 1, "r3": 2}
    for name, day in days.items():
        run_of(tmp_path, name, began=f"2026-11-0{day}T04:00:00Z")
        for path in tmp_path.glob(f"{name}/*.json"):
            os.utime(path, (-day + 10, -day + 10))
    result = [run.run_id for run in history(tmp_path, {"h1"}, rehearsal=False)]
    assert result == sorted(days, key=lambda name: days[name], reverse=True)


def test_unreadable_runs_are_ignored(earlier: Path, tmp_path: Path) -> None:
    shutil.copytree(earlier, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "first" / "report.json").read_text()
    for number, broken in enumerate(("", "{}", "[]", text[: len(text) // 2], '{"hosts": 3, "verdicts": []}')):
        shutil.copytree(tmp_path / "first", tmp_path / f"broken{number}")
        (tmp_path / f"broken{number}" / "report.json").write_text(broken)
    no_time = json.loads(text) | {"began": "yesterday"}
    shutil.copytree(tmp_path / "first", tmp_path / "no_time")
    (tmp_path / "no_time" / "report.json").write_text(json.dumps(no_time))
    assert {run.run_id for run in history(tmp_path, {"h1"}, rehearsal=False)} == {"first", "second"}


# The plan


def plan_of(*arguments: str | Path, **variables: Any) -> Done:
    """Run `rackproof plan` for three hosts with the profile `revalidate`."""
    hosts = builders.inventory("h1", "h2", "h3", rackproof_gang="none", rackproof_gpu_count=2, **variables)
    listing = {"gpu_hosts": {"hosts": list(hosts)}, "_meta": {"hostvars": hosts}}
    return rackproof("plan", "-i", "-", "--profile", "revalidate", *arguments, stdin=json.dumps(listing))


def test_plan_contains_selection_and_reason(earlier: Path) -> None:
    done = plan_of("--budget", "60", "--history", earlier, "--json", rackproof_reason="replaced GPU 3")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    documents.validate(document, "plan", source="the plan")
    plan = plan_from_json(document)
    assert plan.reason == "replaced GPU 3"
    assert plan.choice
    assert plan.choice.runs == 2
    kept = {item.benchmark for item in plan.choice.items if item.chosen}
    assert kept == {*plan.stage(BENCHMARK).benchmarks}
    assert {item.name.split(".")[0] for item in plan.expected} - {"benchmark"} == kept
    assert "gemm" in kept  # gemm has a finding
    assert {item.benchmark for item in plan.choice.items} == {
        *read_profile("revalidate")["stages"][BENCHMARK]["benchmarks"]
    }
    lines = [str(line) for line in selection_summary(plan)]
    assert lines[0] == "Reason: replaced GPU 3"
    assert lines[1] == f"Time budget: {len(kept)} of {len(plan.choice.items)} benchmarks of revalidate chosen for 60 s"
    assert lines[2].startswith("NOT CHOSEN, so not judged: ")
    assert all(item.chosen or f"{item.benchmark} (benchmark)" in lines[2] for item in plan.choice.items)


def test_plan_prints_one_line_per_benchmark(earlier: Path) -> None:
    done = plan_of("--budget", "60", "--history", earlier)
    assert "selected for 60 s by the history of 2 earlier runs (takes about " in done.stdout
    assert any(
        line.startswith("  run      benchmark gemm") and "1 finding in 6 measurements" in line
        for line in done.stdout.splitlines()
    )
    assert "  skip     benchmark " in done.stdout


def test_plan_without_a_budget_is_the_whole_profile() -> None:
    document = json.loads(plan_of("--json").stdout)
    assert "choice" not in document
    assert selection_summary(plan_from_json(document)) == []
    assert list(document["stages"][0]["benchmarks"]) == [*read_profile("revalidate")["stages"][BENCHMARK]["benchmarks"]]


@pytest.mark.parametrize("domain", ["", "d1"])
def test_budget_is_not_spent_on_benchmarks_that_the_plan_omits(domain: str) -> None:
    more = {"rackproof_nvlink_domain": domain} if domain else {}
    profile = {**read_profile("standard"), "may_choose": True}
    hosts = builders.inventory("h1", "h2", rackproof_gpu_count=4, **more)
    profile = without_unused_benchmarks(profile, hosts)
    _, choice = apply_budget(profile, hosts, budget=7200, runs=None, run_dir=None, now=NOW)
    assert choice
    assert any(item.benchmark == "mnnvl" for item in choice.items) is bool(domain)


def test_resumed_run_keeps_its_selection(earlier: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(earlier / "second", runs / "second")
    arguments = ("--run-dir", runs / "now", "--json")
    first = plan_of(*arguments, rackproof_budget_s=60)
    assert first.returncode == 0, first.stderr
    shutil.copytree(earlier / "first", runs / "first")
    again = plan_of(*arguments, rackproof_budget_s=60)
    assert json.loads(again.stdout)["choice"] == json.loads(first.stdout)["choice"]
    other = plan_of(*arguments, rackproof_budget_s=90)
    assert (other.returncode, "begun with other values of choice" in other.stderr) == (64, True)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("soon", "'soon': give a number of seconds"),
        ("0", "greater than 0"),
        ("5", "5 s is too small"),
        ("nan", "give a number of seconds"),
    ],
)
def test_invalid_budget_is_refused(budget: str, message: str) -> None:
    done = plan_of("--budget", budget)
    assert done.returncode == 64
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("given_as", ["--budget", "rackproof_budget_s"])
def test_acceptance_profile_refuses_a_budget(given_as: str) -> None:
    arguments = ("--budget", "60") if given_as == "--budget" else ()
    done = plan_of(*arguments, "--profile", "standard", **({} if arguments else {given_as: 60}))
    assert (done.returncode, done.stdout) == (64, "")
    assert "rackproof_budget_s (--budget) is 60, but profile standard always runs completely" in done.stderr
    assert "omit the budget, or use a profile with `may_choose: true`" in done.stderr


def test_custom_profile_may_accept_a_budget(tmp_path: Path) -> None:
    custom = tmp_path / "custom.yml"
    text = (ROOT / "fleet/planning/profiles/smoke.yml").read_text()
    custom.write_text(text)
    assert plan_of("--budget", "60", "--profile", custom).returncode == 64
    custom.write_text(f"{text}may_choose: true\n")
    done = plan_of("--budget", "60", "--profile", custom)
    assert (done.returncode, done.stderr) == (0, "")


def test_of_the_shipped_profiles_only_those_for_revalidation_accept_a_budget() -> None:
    names = [path.stem for path in (ROOT / "fleet/planning/profiles").glob("*.yml")]
    assert sorted(name for name in names if read_profile(name).get("may_choose")) == [
        "revalidate",
        "revalidate-rehearsal",
    ]


def with_partial_selection(plan: Plan) -> Plan:
    """Return a plan in which one of three benchmarks is not selected."""
    items = [
        BenchmarkChoice(stage=BENCHMARK, benchmark=name, chosen=name != "gemm", cost_s=1, why="")
        for name in ("memory", "stress", "gemm")
    ]
    return replace(plan, reason="PASS", choice=BudgetSelection(budget_s=60, cost_s=20, runs=0, items=tuple(items)))


def test_page_markdown_junit_and_summary_show_the_selection() -> None:
    plan = with_partial_selection(
        builders.plan("h1", "h2", "h3", profile="smoke", rackproof_gang="none", rackproof_share_gpus=True)
    )
    report = merge(plan, builders.evidence(plan), read_packs(()))
    assert report.acceptance.status == "PASS (2 of 3 benchmarks chosen)"
    documents.validate(json.loads(json.dumps(to_json(report))), "report", source="the report")
    page, xml = render_html(report), "".join(render_junit(report))
    for view in (page, xml, render_markdown(report), render_summary(report)):
        assert "PASS (2 of 3 benchmarks chosen)" in view
    assert not [
        check for check in headline.checks(report) if check.title == "Reason"
    ]  # the reason that the operator gave is not a check
    caveats = page[page.index('id="caveats"') : page.index("<h3>Coverage</h3>")]
    assert headline.caveats(report) == [
        "Reason: PASS",
        "Time budget: 2 of 3 benchmarks of smoke chosen for 60 s",
        "NOT CHOSEN, so not judged: gemm (benchmark)",
        "GPUs shared: other processes were allowed to use the GPUs during the run (rackproof_share_gpus) on h1, h2, h3",
    ]
    for number, line in enumerate(headline.caveats(report), 1):
        assert f"<li>{line}</li>" in caveats
        assert f'<property name="caveat.{number}" value="{line}"/>' in xml


def test_report_mentions_no_selection_if_the_whole_profile_ran() -> None:
    plan = builders.plan("h1", "h2", "h3", profile="smoke", rackproof_gang="none")
    whole = BudgetSelection(
        budget_s=600,
        cost_s=20,
        runs=0,
        items=(BenchmarkChoice(stage=BENCHMARK, benchmark="gemm", chosen=True, cost_s=1, why=""),),
    )
    for choice in (None, whole):
        assert merge(replace(plan, choice=choice), builders.evidence(plan), read_packs(())).acceptance.status == "PASS"
    plain = merge(plan, builders.evidence(plan), read_packs(()))
    assert headline.caveats(plain) == []
    assert 'id="caveats"' not in render_html(plain)
    assert "caveat." not in "".join(render_junit(plain))


def test_profile_soak_refuses_a_budget() -> None:
    with pytest.raises(UsageError, match="rackproof_soak_duration"):
        apply_budget(read_profile("soak"), builders.inventory(), budget=300, runs=None, run_dir=None, now=NOW)


@pytest.mark.parametrize(("short", "whole"), [("revalidate", "standard"), ("revalidate-rehearsal", "rehearsal")])
def test_revalidation_measures_only_figures_that_the_acceptance_measures(short: str, whole: str) -> None:
    """A baseline from the acceptance then has every figure of a revalidation. Only the amount of work may differ."""
    both = [builders.plan("h1", "h2", "h3", profile=name, with_all_sizes=True) for name in (short, whole)]
    revalidated, accepted = (
        {(item.stage, item.name, json.dumps(item.params)) for item in plan.expected} for plan in both
    )
    assert revalidated <= accepted
    may_differ = {"seconds", "settle_seconds", "precision", "rounds", "max_steps"}
    for stage in both[0].stages:
        for benchmark, settings in stage.benchmarks.items():
            accepted_settings = both[1].stage(stage.name).benchmarks[benchmark]
            defaults = BENCHMARKS[benchmark].settings
            for key, value in {**defaults, **settings}.items():
                reference = {**defaults, **accepted_settings}[key]
                assert (
                    key in may_differ
                    or value == reference
                    or (isinstance(value, list) and set(value) <= set(reference))
                ), key
