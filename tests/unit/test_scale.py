"""Fleets of any size: the fast ways say what the plain ones say, whatever the order and the number of processes."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Planned
from fleet.judge.tally import Tally
from fleet.records import load as loading
from fleet.records.load import Run, load
from fleet.report import scale
from fleet.report.merge import merge
from schemas import documents, quick
from schemas.decode import record_from_json
from schemas.plans import Choice, Chosen, Plan
from schemas.records import Observation, Record, to_json
from schemas.reports import ALL, EXCEPTIONS, FAIL, INCONCLUSIVE, PASS, FleetReport, Verdict
from schemas.waivers import Waiver
from tests import builders, fleets

PACKS = read_packs(())
Change = Callable[[Record], Record]


def changed(change: Callable[[Observation], Observation]) -> Change:
    """A record with something done to its observations."""
    return lambda record: replace(record, observations=tuple(map(change, record.observations)))


def set_to(name: str, scope: str, value: Any) -> Change:
    """One figure as it should not be."""

    def change(seen: Observation) -> Observation:
        return replace(seen, value=value) if (seen.name, seen.scope) == (name, scope) else seen

    return changed(change)


def unmeasured(record: Record) -> Record:
    """A figure that could not be had."""
    lost = next(seen for seen in record.observations if seen.name == "memory.bandwidth")
    error = replace(lost, status="error", value=None, reason="no memory")
    return replace(record, observations=tuple(error if seen is lost else seen for seen in record.observations))


def counted_up(record: Record) -> Record:
    """An uncorrectable error in the last snapshot."""
    *before, last = record.snapshots
    metrics = tuple(
        replace(metric, values={**metric.values, "gpu=1": 2})
        if metric.name == "gpu.ecc.uncorrectable_volatile"
        else metric
        for metric in last.metrics
    )
    return replace(record, snapshots=(*before, replace(last, metrics=metrics)))


def twin(record: Record) -> Record:
    """A serial that the first host has too."""
    first, *others = record.gpus
    return replace(record, gpus=(replace(first, serial="r00000-h0-0"), *others))


def without_one(record: Record) -> Record:
    """A GPU that neither driver nor bus has; the report tells its slot by the other hosts."""
    counts = ("gpu.count", "gpu.pci_count")
    shots = tuple(
        replace(shot, metrics=tuple(replace(m, values={"host": 1}) if m.name in counts else m for m in shot.metrics))
        for shot in record.snapshots
    )
    return replace(record, gpus=record.gpus[:1], snapshots=shots)


def other_driver(record: Record) -> Record:
    return replace(record, software={**record.software, "nccl": "2.20.1"})


FAULTS: dict[str, Change | None] = {
    "slow by the datasheet": set_to("gemm.throughput", "gpu=1", 1e14),
    "slow by the fleet": set_to("memory.bandwidth", "gpu=0", 4.1e12),
    "wrong bits": set_to("digest.value", "gpu=1", "0123456789abcdef"),
    "an error": unmeasured,
    "an ECC error": counted_up,
    "a twin": twin,
    "a GPU missing": without_one,
    "another NCCL": other_driver,
    "no record": None,
    "another run's": lambda record: replace(record, nonce="f" * 32),
    "nothing": lambda record: record,
}


def small(directory: Path, fault: str = "nothing", count: int = 10) -> Run:
    """A fleet of a few hosts that is looked at as if it were large."""
    of = fleets.plan(count, gpu_count=2)
    name, change = of.hosts[min(5, count - 1)].name, FAULTS[fault]
    fleets.write(directory, of, {name: change})
    if change in (twin, without_one):  # both of its records tell what GPUs it has
        record = change(fleets.records(of, name)[1])  # type: ignore[misc]
        documents.write_text(directory / "gangs" / record.gang / f"{name}.json", fleets.text(record))
    return load(directory)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is more than four hosts is a large fleet."""
    monkeypatch.setattr(loading, "LARGE", 4)


def classic(run: Run) -> FleetReport:
    """The report by the plain way: every host judged in full, all of them in memory."""
    evidence, quarantined = {}, list(run.quarantined)
    records = loading.Records(run.directory, run.plan, run.events, run.journal)
    for host in run.plan.hosts:
        evidence[host.name], refused = records.read(host)
        quarantined += refused
    return merge(run.plan, evidence, PACKS, events=run.events, quarantined=quarantined)


def exceptions(report: FleetReport) -> list[tuple[str, ...]]:
    return sorted(
        (item.host, item.criterion, item.name, item.scope, item.reason)
        for item in report.verdicts
        if item.verdict != PASS
    )


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("fault", FAULTS)
def test_large_fleet_is_judged_as_a_small_one_is(tmp_path: Path, fault: str) -> None:
    run = small(tmp_path, fault)
    assert run.large
    found, plain = scale.report_of(run, PACKS, workers=1), classic(run)
    assert (found.detail, plain.detail) == (EXCEPTIONS, ALL)
    assert exceptions(found) == exceptions(plain)
    if fault == "a GPU missing":  # each process knows the slots of its own hosts
        assert exceptions(scale.report_of(run, PACKS, workers=2)) == exceptions(plain)
    assert bool(exceptions(plain)) == (fault != "nothing")
    told = [item.detail for item in found.verdicts if item.name == "gpu.count" and item.verdict == FAIL]
    where = "nothing at PCI 0000:01:00.0, by the address alone, where 9 of 9 hosts with 2 GPUs have one"
    assert told == ([where] if fault == "a GPU missing" else [])
    assert found.judged == plain.judged
    assert found.left_out + len(found.verdicts) == len(plain.verdicts)
    for name in ("decision", "acceptance", "coverage", "unjudged", "unknown", "quarantined", "ended"):
        assert getattr(found, name) == getattr(plain, name), name
    for mine, theirs in zip(found.hosts, plain.hosts, strict=True):
        for name in ("name", "decision", "coverage", "gpus", "software", "packs", "events"):
            assert getattr(mine, name) == getattr(theirs, name), (mine.name, name)


def met(directory: Path, of: Plan, members: dict[str, tuple[str, ...]]) -> None:
    """Changes with whom hosts were started in their gang."""
    for name, together in members.items():
        for record in (record for record in fleets.records(of, name) if record.gang):
            launches = tuple(replace(launch, members=together) for launch in record.launches)
            path = directory / "gangs" / record.gang / f"{name}.json"
            documents.write_text(path, fleets.text(replace(record, launches=launches)))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("case", ["a smaller gang", "two groups", "another host is uneasy"])
def test_summary_of_a_large_fleet_says_with_whom_a_gang_was_measured(tmp_path: Path, case: str) -> None:
    run = small(tmp_path, "slow by the datasheet" if case == "another host is uneasy" else "nothing")
    gang = next(iter(run.plan.gangs().values()))
    groups = {"a smaller gang": [gang[:-1]], "two groups": [gang[:4], gang[4:]]}.get(case, [])
    met(tmp_path, run.plan, {name: group for group in groups for name in group})
    run = load(tmp_path)
    found, plain = scale.report_of(run, PACKS, workers=1), classic(run)
    assert found.acceptance == plain.acceptance
    lines = [line for line in plain.acceptance.summary if line.startswith("Gang ")]
    assert len(lines) == {"a smaller gang": 1, "two groups": 2}.get(case, 0)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("plainly", [True, False])
def test_page_of_one_host_has_the_status_with_what_must_be_read_with_it(tmp_path: Path, plainly: bool) -> None:
    run = small(tmp_path, "slow by the datasheet", 3 if plainly else 10)
    assert run.large is not plainly
    slow, well = run.plan.hosts[2 if plainly else 5].name, run.plan.hosts[0].name
    (criterion,) = {item.criterion for item in classic(run).verdicts if item.verdict == FAIL and item.host == slow}
    waiver = Waiver(criterion=criterion, host=slow, who="Ada Example", why="agreed in annex 3", until="2099-12-31")
    items = [
        Chosen(stage="benchmark", benchmark=name, chosen=name != "gemm", cost_s=1, why="")
        for name in ("memory", "gemm")
    ]
    choice = Choice(budget_s=60, cost_s=20, runs=0, items=tuple(items))
    run = replace(run, plan=replace(run.plan, waivers=(waiver,), choice=choice))
    for name, status in ((slow, "PASS WITH WAIVERS"), (well, "PASS")):
        page = scale.report_on_host(run, PACKS, name, workers=1).acceptance
        assert page.status == f"{status} (1 of 2 benchmarks chosen)"
        assert "NOT CHOSEN, so not judged: gemm (benchmark)" in page.summary


@pytest.mark.usefixtures("large")
def test_report_is_the_same_by_any_number_of_processes(tmp_path: Path) -> None:
    run = small(tmp_path, "slow by the fleet", 24)
    texts = {quick.text(to_json(scale.report_of(run, PACKS, workers=workers))) for workers in (1, 2, 3)}
    assert len(texts) == 1
    document = json.loads(texts.pop())
    documents.validate(document, "report", source="the report")
    documents.validate(document, "report", source="the report")


@pytest.mark.usefixtures("large")
def test_page_of_one_host_brings_back_what_the_report_leaves_out(tmp_path: Path) -> None:
    run = small(tmp_path, "slow by the fleet")
    report, plain = scale.report_of(run, PACKS, workers=1), classic(run)
    assert not any(host.measurements for host in report.hosts if host.decision == "accepted")
    for name in (run.plan.hosts[5].name, run.plan.hosts[6].name):
        alone = scale.report_on_host(run, PACKS, name, workers=1)
        assert alone.detail == ALL
        assert sorted(map(str, alone.verdicts)) == sorted(str(item) for item in plain.verdicts if item.host == name)
        assert alone.hosts == tuple(host for host in plain.hosts if host.name == name)


def test_small_fleet_is_shown_in_full(tmp_path: Path) -> None:
    run = small(tmp_path, count=3)
    report = scale.report_of(run, PACKS)
    assert (run.large, report.detail, report.left_out) == (False, ALL, 0)
    assert sum(row.passed + row.failed + row.inconclusive for row in report.judged) == len(report.verdicts)


# The reader against the authority


def record_text(count: int = 2) -> str:
    of: Plan = fleets.plan(1, gpu_count=count, gangs=False)
    return fleets.text(fleets.records(of, of.hosts[0].name)[0])


TEXT = record_text()
SHORT = json.dumps(
    {
        "schema": "rackproof.record/1", "run_id": "r1", "nonce": builders.NONCE, "host": "h1",
        "began": builders.WHEN, "ended": builders.WHEN,
        "rackproof": "0", "simulated": False, "gpus": [to_json(builders.gpu("h1", 0))],
        "snapshots": [{"stage": "preflight", "phase": "before", "at": builders.WHEN, "duration_s": 0.5, "metrics": [
            {"name": "gpu.count", "unit": "1", "values": {"host": 2}},
            {"name": "gpu.power", "unit": "W", "values": {"gpu=0": 1.5e2}, "absent": {"gpu=1": "error: no: \\u2028 answer"}},
        ]}],
        "observations": [
            {"name": "gemm.throughput", "scope": "gpu=0", "stage": "b", "unit": "1", "status": "measured", "value": 1e-6,
             "params": {"dtype": "bf16"}, "samples": {"n": 3, "min": 1, "p50": 2.0, "max": 3, "cv": 0.1}},
            {"name": "gemm.throughput", "scope": "gpu=1", "stage": "b", "unit": "1", "status": "error", "reason": "no: luck"},
        ],
        "launches": [to_json(builders.launch("benchmark", ("h1",)))],
    },
    indent=1,
)  # fmt: skip
INSERTS = (
    *(
        '"',
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
        "\\",
        "\\u003a",
        "\\u001c",
        "\\ud800",
        "\n",
        " ",
        "\x00",
        "\x85",
        "é",
        "\ufeff",
    ),
    *("null", "true", "1e999", "NaN", "18446744073709551616", "-0", "1.0", '"value": 1,', '"status": "measured",'),
    *('"x": {"y": {"z": []}},', '"host": "h2",', "measured", "error: \\u001c", "error: \\u0085", "5e-324", "0123"),
)


def verdict_of(text: bytes) -> Record | None:
    """What jsonschema says, the authority."""
    try:
        document = documents.parse(text, source="x")
        documents.validator("record").validate(document)
        return record_from_json(document)
    except (jsonschema.ValidationError, ValueError):
        return None


def believed(text: bytes) -> bool:
    """Whether it is taken for a record."""
    with contextlib.suppress(ValueError):
        return bool(documents.checked(text, "record", source="x"))
    return False


@pytest.mark.skipif(not quick.available(), reason="the libraries of the control node are not installed")
@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32))
def test_reader_believes_nothing_that_the_authority_refuses(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    text = SHORT
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(text))
        kind = draw.randrange(4)
        if kind == 0:
            text = text[:at] + draw.choice(INSERTS) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + draw.randrange(1, 12) :]
        elif kind == 2:
            text = text[:at] + chr(draw.randrange(32, 127)) + text[at + 1 :]
        else:
            lines = text.split("\n")
            lines.insert(draw.randrange(len(lines)), draw.choice(lines))
            text = "\n".join(lines)
    raw = text.encode("utf-8", "surrogatepass")
    quickly, word = quick.Reader().record(raw), verdict_of(raw)
    if quickly is not None:
        assert quickly == word
    assert believed(raw) == (word is not None)


@pytest.mark.skipif(not quick.available(), reason="the libraries of the control node are not installed")
def test_reader_reads_what_hosts_write() -> None:
    reader = quick.Reader()
    digits = SHORT.replace(json.loads(SHORT)["nonce"], "7" * 32)  # of no number of more than 64 bits
    assert digits != SHORT
    for text in (TEXT, SHORT, digits):
        found = reader.record(text.encode())
        assert found is not None
        assert found == verdict_of(text.encode())
    first, second = (reader.record(TEXT.encode()) for _ in range(2))
    assert first
    assert second
    assert all(one is other for one, other in zip(first.snapshots[0].metrics, second.snapshots[0].metrics, strict=True))


@pytest.mark.skipif(not quick.available(), reason="the libraries of the control node are not installed")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"host": "h1"', '"host": "h1", "host": "h1"'),
        ('"host": 2', '"host": 2, "host": 2'),
        ('"n": 3', '"n": 3, "n": 3'),
        ('"value": 1e-06', '"value": 1e999'),
        ('"value": 1e-06', '"value": 18446744073709551616'),
        ('"value": 1e-06', '"value": 1e-06, "reason": "none"'),
        ('"status": "measured"', '"status": "measure"'),
        ('"unit": "W"', '"unit": "W", "more": 1'),
        ("error: no: ", "error:"),
        ('"metrics": [', '"metrics": [null, '),
        ('"index": 0', '"index": -1'),
    ],
)
def test_reader_refuses(old: str, new: str) -> None:
    assert old in SHORT
    text = SHORT.replace(old, new, 1).encode()
    assert quick.Reader().record(text) is None
    assert verdict_of(text) is None


# The sums


def told(host: str, value: float, verdict: str = PASS) -> Verdict:
    return Verdict(
        host=host, scope="gpu=0", name="gemm.throughput", stage="benchmark", verdict=verdict, criterion="gemm", reason="",
        value=value, limit=5.0, operator="ge", unit="1", source="ours", action="rma" if verdict == FAIL else "none",
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from([PASS, FAIL, INCONCLUSIVE])), min_size=1, max_size=60),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_sums_do_not_depend_on_the_order(items: list[tuple[float, str]], parts: int, chance: random.Random) -> None:
    places = {f"h{at}": at for at in range(len(items))}
    verdicts = [told(f"h{at}", value, verdict) for at, (value, verdict) in enumerate(items)]
    planned = Planned(builders.plan())
    whole = Tally(planned, places)
    for verdict in verdicts:
        whole.add(verdict)
    tallies = [Tally(planned, places) for _ in range(parts)]
    chance.shuffle(verdicts)
    for verdict in verdicts:
        chance.choice(tallies).add(verdict)
    first, *others = tallies
    for other in others:
        first.update(other)
    assert first.judged() == whole.judged()


def test_row_has_the_distribution_of_its_values() -> None:
    tally = Tally(Planned(builders.plan()), {f"h{at}": at for at in range(5000)})
    for at in range(5000):
        tally.add(told(f"h{at}", 100 + at / 100, FAIL if at < 3 else PASS))
    (row,) = tally.judged()
    assert (row.passed, row.failed, row.limit, row.action) == (4997, 3, 5.0, "rma")
    assert [far.host for far in row.farthest] == [f"h{at}" for at in range(10)]
    assert row.spread is not None
    assert (row.spread.n, row.spread.min, row.spread.max, sum(row.spread.bins)) == (5000, 100, 149.99, 5000)
    assert row.spread.p50 == pytest.approx(125, rel=2e-4)
    assert row.spread.p05 == pytest.approx(102.5, rel=2e-4)
