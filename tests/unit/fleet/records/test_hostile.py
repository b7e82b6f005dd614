"""Test that commands on damaged and forged run directories print no traceback, and accept no host that has a damaged file."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.inventory.waivers_file import read_waivers
from fleet.records import baseline_store, run_lock
from fleet.records.load import RecordReader, load
from schemas import documents, quick, run_directory
from schemas.catalogue import BENCHMARKS
from schemas.errors import RunError, UsageError
from schemas.records import to_json
from tests import accepted, builders, fuzz

Damage = Callable[[Path], None]
RecordDamage = Callable[..., None]
"""Damages the record of a host; arguments: the run directory, and the name of the host if it is not h1."""


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Fail a test after ten minutes: a command that reads from a named pipe without a writer would wait forever."""

    def fail(*_: object) -> None:
        pytest.fail("deadline exceeded")  # raises a BaseException, which `except Exception` does not catch

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def valid_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a short, valid run of two hosts, and return its directory. Tests must not change it."""
    directory = tmp_path_factory.mktemp("runs") / "r1"
    fuzz.small_run(directory, full=True)
    return directory


@pytest.fixture
def run(tmp_path: Path, valid_run: Path) -> Path:
    """Return the directory of a copy of `valid_run`."""
    return shutil.copytree(valid_run, tmp_path / "runs" / "r1")


def command(
    directory: Path, capsys: pytest.CaptureFixture[str], verb: str = "report", *more: object
) -> tuple[int, str]:
    """Run a command. Return its exit code and the last line of stderr ("" if stderr is empty). Fail if there is a traceback."""
    capsys.readouterr()
    code = accepted.call(verb, directory, *more)
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert code in (0, 1, 2)
    return code, (errors.splitlines() or [""])[-1]


# Special files


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def endless_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mknod(path, 0o644 | 0o020000, os.makedev(1, 5))  # the device numbers of /dev/zero


def link_to_itself(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(10_000_000_000)


SPECIAL_FILES = [fifo, directory, endless_link, link_to_itself, sparse, *([device] if os.getuid() == 0 else [])]


@pytest.mark.parametrize("damage", SPECIAL_FILES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["hosts/h1.json", "events.jsonl", "plan.json"])
def test_special_file_in_the_run_directory_is_rejected(
    run: Path, name: str, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    if damage is device:
        try:
            damage(run / "probe")
        except PermissionError:
            pytest.skip("no permission to create devices")
        (run / "probe").unlink()
    damage(run / name)
    if name == "plan.json":
        with pytest.raises(RunError, match=r"plan\.json"):
            load(run)
        return
    result = load(run)
    assert [item.path for item in result.quarantined] == [name]
    assert result.evidence["h1"].problem
    assert command(run, capsys)[0] == 2


@pytest.mark.parametrize("damage", SPECIAL_FILES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("verb", ["rma", "judge", "watch"])
def test_special_file_in_place_of_the_report_causes_no_traceback(
    run: Path, verb: str, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rma` and `judge` fail, and name the file. `watch` ignores it."""
    damage(run / "report.json")
    code, message = command(run, capsys, verb, *(["--json"] if verb == "watch" else []))
    assert code == 2 if verb != "watch" else code in (0, 2)
    assert "report.json" in message or verb == "watch"


def test_symlinked_record_directory_is_rejected(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "hosts").rename(run.parent / "elsewhere")
    (run / "hosts").symlink_to(run.parent / "elsewhere")
    assert command(run, capsys)[0] == 2
    assert "its directory is a symbolic link" in load(run).evidence["h1"].problem


@pytest.mark.parametrize(
    "name", ["report.html", "report.md", "report.json", "junit.xml", "observations.csv", "verdicts.prom"]
)
def test_symlinked_report_is_replaced_not_followed(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    victim = run.parent / "victim"
    victim.write_text("untouched")
    (run / name).symlink_to(victim)
    assert command(run, capsys)[0] == 0
    assert victim.read_text() == "untouched"
    assert not (run / name).is_symlink()


# Invalid text


def record(change: Callable[[dict[str, Any]], object]) -> RecordDamage:
    """Return a function that changes the JSON document of a host's record."""

    def damage(run: Path, host: str = "h1") -> None:
        path = run / "hosts" / f"{host}.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return damage


def raw(change: Callable[[bytes], bytes]) -> RecordDamage:
    """Return a function that changes the bytes of a host's record."""

    def damage(run: Path, host: str = "h1") -> None:
        path = run / "hosts" / f"{host}.json"
        path.write_bytes(change(path.read_bytes()))

    return damage


HALF = "\ud800"
"""The first half of a surrogate pair. Alone, it is not a character."""


def observation(**fields: Any) -> RecordDamage:
    """Return a function that adds an observation to a host's record."""
    common = {"name": "memory.bandwidth", "scope": "gpu=0", "stage": "benchmark", "unit": "B/s", "status": "measured"}
    return record(lambda document: document["observations"].append(common | fields))


def soak(**columns: list[float]) -> RecordDamage:
    """Return a function that adds a soak to a host's record. The soak has one series of two buckets.

    `columns` replace columns of the series.
    """
    columns = {"at": [0, 1], "n": [1, 1], "low": [1, 1], "mean": [1, 1], "high": [1, 1]} | columns
    series = {"name": "stress.throughput", "scope": "gpu=0", "unit": "FLOP/s", **columns}
    values = {"began": builders.WHEN, "planned_s": 10, "soaked_s": 10}
    return record(lambda document: document.update(soak=values | {"timeline": {"bucket_s": 1, "series": [series]}}))


INVALID_RECORDS: list[tuple[RecordDamage, str]] = [
    (record(lambda document: document["software"].update(torch=HALF)), "half a character"),
    (record(lambda document: document["software"].update({HALF: "1"})), "half a character"),
    (record(lambda document: document["gpus"][0].update(serial=HALF)), "half a character"),
    (record(lambda document: document["launches"][0].update(log_tail=f"x{HALF}")), "half a character"),
    (raw(lambda text: text.replace(b"2.11.0", b"\xed\xa0\x80")), "not UTF-8"),
    (raw(lambda text: b"\xef\xbb\xbf" + text), "BOM"),
    (raw(lambda text: text.decode().encode("utf-16")), "not UTF-8"),
    (raw(lambda text: text.replace(b"2.11.0", b"2\x00")), "not JSON"),
    (raw(lambda text: text + b"\x00"), "not JSON"),
    (raw(lambda text: text + text), "not JSON"),
    (raw(lambda text: b"[" * 50_000), "nested deeper"),
    (raw(lambda text: b'{"a":' * 50_000), "nested deeper"),
    (raw(lambda text: text.replace(b'"run_id"', b'"run_id": "r1", "run_id"')), "duplicate key"),
    (record(lambda document: document.update(simulated=True)), "simulated"),
    (record(lambda document: document.update(rehearsal=True)), "unknown rehearsal"),
    (record(lambda document: document.update(gang="h2")), "gang h2"),
    (record(lambda document: document.update(gang="../hosts")), "gang"),
    (record(lambda document: document.update(host="../../x")), "host"),
    (record(lambda document: document.update(host="h1\n")), "host"),
    (record(lambda document: document.update(snapshots={})), "snapshots"),
    (record(lambda document: document["gpus"][0].update(index=2**70)), "64 bits"),
    (record(lambda document: document["gpus"][0].update(index=True)), "index"),
    (
        record(lambda document: document["gpus"][0].update(index=0.0)),
        "index: 0.0 is not a whole number: write 0",
    ),
    (record(lambda document: document["observations"][0].update(value=float("nan"))), "NaN"),
    (record(lambda document: document["observations"][0].update(value=[1])), "value"),
    (observation(value=1.7e308), "1.7e+308 is farther from 0 than any measurement"),
    (observation(value=5e-324), "5e-324 is nearer to 0 than any measurement"),
    (observation(value=1.0, params={"size_bytes": -1.7e308}), "params: 1.7e+308 is farther from 0"),
    (
        record(lambda document: document["snapshots"][0]["metrics"][0].update(values={"host": -1.7e308})),
        "farther from 0",
    ),
    (
        record(lambda document: document["launches"][0].update(duration_s=1.7e308)),
        "duration_s: 1.7e+308 is greater",
    ),
    (
        observation(value=1.0, scope="gpu=0,partner=h2,gpu=3"),
        "scope gpu=0,partner=h2,gpu=3 has the same label twice",
    ),
    (
        record(lambda document: document["snapshots"][0]["metrics"][0].update(values={"gpu=0,gpu=1": 1})),
        "the same label twice",
    ),
    (
        observation(name="collector.nvml", status="error", reason="x"),
        "collector.nvml: only snapshots report collectors",
    ),
    (soak(n=[1], low=[1], high=[1]), "at, n, low, mean and high have 2, 1, 1, 2, 1 entries"),
    (soak(at=[1, 1]), "not in order"),
    (soak(mean=[5e-324, 1]), "nearer to 0 than any measurement"),
    (soak(mean=[1.7e308, 1]), "farther from 0 than any"),
    (soak(n=[2**63, 2**63]), "figures in one bucket"),
]
"""Functions that damage a record, each with a part of the reason why the record is rejected."""


def test_invalid_record_affects_only_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, damaged = tmp_path / "r1", [f"h{number}" for number in range(len(INVALID_RECORDS))]
    fuzz.small_run(run, full=True, hosts=(*damaged, "healthy"))
    for host, (damage, _) in zip(damaged, INVALID_RECORDS, strict=True):
        damage(run, host)
    result = load(run)
    reasons = {item.path: item.reason for item in result.quarantined}
    assert reasons.keys() == {f"hosts/{host}.json" for host in damaged}
    for host, (_, why) in zip(damaged, INVALID_RECORDS, strict=True):
        assert why in reasons[f"hosts/{host}.json"]
    assert result.evidence["healthy"].records
    assert command(run, capsys)[0] == 2
    decisions = {host["name"]: host["decision"] for host in documents.read(run / "report.json", "report")["hosts"]}
    assert decisions == {**dict.fromkeys(damaged, "incomplete"), "healthy": "accepted"}


@pytest.mark.parametrize(
    ("value", "decision"),
    [
        *((value, "rejected") for value in (1e60, 1e-60, 2**63, 0, "x", True)),
        (-1e60, "incomplete"),  # a negative rate, count or time is inconclusive
    ],
)
def test_host_with_impossible_figures_is_not_accepted(
    tmp_path: Path, value: float | str, decision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "r1"
    fuzz.small_run(run, full=True, gang=True)
    for path in (run / "hosts" / "h1.json", run / "gangs" / "r1" / "h1.json"):
        document = json.loads(path.read_text())
        for metric in (metric for snapshot in document["snapshots"] for metric in snapshot["metrics"]):
            metric.update(values=dict.fromkeys(metric.get("values", {}), value))
        for reading in document["observations"]:
            reading.update({"value": value} if reading["status"] == "measured" else {})
        document["launches"][0]["duration_s"] = 1e60
        path.write_text(json.dumps(document))
    assert not load(run).quarantined
    assert command(run, capsys)[0] == (1 if decision == "rejected" else 2)
    reported = documents.read(run / "report.json", "report")
    assert {host["name"]: host["decision"] for host in reported["hosts"]}["h1"] == decision
    assert (run / "report.html").stat().st_size > 0 < (run / "report.md").stat().st_size


def test_impossible_soak_figures_give_a_report_that_does_not_accept_the_host(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buckets = 100  # more buckets than a report shows
    means = [1e-60, *[1e60, -1e60] * 49, 1e60]
    columns = {"low": [-1e60] * buckets, "mean": means, "high": [1e60] * buckets}
    soak(at=[*range(buckets)], n=[10**9] * buckets, **columns)(run)
    assert not load(run).quarantined
    assert command(run, capsys)[0] in (1, 2)
    reported = documents.read(run / "report.json", "report")
    assert [host["decision"] == "accepted" for host in reported["hosts"]] == [False, True]


def test_text_in_place_of_a_counter_fails_only_its_host(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def damage(document: dict[str, Any]) -> None:
        for metric in (metric for snapshot in document["snapshots"] for metric in snapshot["metrics"]):
            if metric["name"] == "gpu.pcie.replays":
                metric["values"]["gpu=0"] = "x"

    record(damage)(run)
    assert command(run, capsys)[0] == 1
    document = json.loads((run / "report.json").read_text())
    assert [host["decision"] for host in document["hosts"]] == ["rejected", "accepted"]
    assert [(bad["name"], bad["value"]) for bad in document["verdicts"] if bad["verdict"] != "pass"] == [
        ("gpu.pcie.replays", "x")
    ]


def test_invalid_text_in_events_still_gives_a_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"at": builders.WHEN, "play": "Gang", "what": "failed", "host": "h1", "task": "t", "message": HALF}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert command(run, capsys)[0] == 2
    (run / "events.jsonl").write_bytes(json.dumps(event | {"message": "X"}).replace("X", "\xff").encode("latin-1"))
    assert command(run, capsys)[0] == 2
    event["message"] = "a\u2028b\x85c\x0cd"
    (run / "events.jsonl").write_text(json.dumps(event, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load(run).events == {"h1": ["failed at Gang: t: a\u2028b\x85c\x0cd"]}


# Plans


def plan(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return a function that changes the JSON document of the plan."""

    def damage(run: Path) -> None:
        document = json.loads((run / "plan.json").read_text())
        change(document)
        (run / "plan.json").write_text(json.dumps(document))

    return damage


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (plan(lambda document: document["hosts"].append(document["hosts"][0])), "duplicate host h1"),
        (plan(lambda document: document["hosts"][0].update(devices=[0, 0])), "devices"),
        (plan(lambda document: document["hosts"][0].update(gang="../../x")), "gang"),
        (plan(lambda document: document["hosts"][0].update(gang="a\x00b")), "gang"),
        (plan(lambda document: document["hosts"][0].update(gang="/etc")), "gang"),
        (plan(lambda document: document["hosts"][0].update(rack=HALF)), "half a character"),
        (plan(lambda document: document["hosts"][0].update(name="../h1")), "name"),
        (plan(lambda document: document["expected"][0].update(params={"op": {"a": 1}})), "params"),
        (plan(lambda document: document["expected"][0].update(params={"op": ["copy"]})), "params"),
        (plan(lambda document: document["hosts"][0].update(gang="x")), "it has gangs, but no stage gang"),
        (plan(lambda document: document["expected"][0].update(stage="benchmar")), "an unknown stage 'benchmar'"),
        (plan(lambda document: document.update(expected=[])), "it does not expect "),
        (plan(lambda document: document["expected"].pop()), "it does not expect "),
        (plan(lambda document: document["expected"].append(document["expected"][0])), "it expects "),
        (plan(lambda document: document["expected"][0].update(peers=True)), "it does not expect "),
        (plan(lambda document: document["stages"][0]["benchmarks"].popitem()), "does not measure it"),
        (plan(lambda document: document["stages"][0]["benchmarks"].update(mistake={})), "unknown benchmark 'mistake'"),
        (
            plan(lambda document: document["expected"][0].update(name="paiirs.bandwidth", scope="peers")),
            "expects 'paiirs.band",
        ),
        (
            plan(lambda document: document["hosts"][0].update(devices=[0.0])),
            "hosts.0.devices.0: 0.0 is not a whole number",
        ),
    ],
)
def test_invalid_plan_is_refused(run: Path, damage: Damage, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run)
    code, message = command(run, capsys)
    assert code == 2
    assert "plan.json" in message
    assert why in message
    assert not (run / "report.json").exists()


def test_plan_with_a_wrong_value_of_any_setting_is_refused(run: Path) -> None:
    original = json.loads((run / "plan.json").read_text())
    wrong = itertools.cycle([None, -1e60, "?", {}, [[]], [{}], [-1], [True]])
    for benchmark, entry in BENCHMARKS.items():
        for key in entry.settings:
            document = {
                **original,
                "stages": [{**original["stages"][0], "benchmarks": {benchmark: {key: next(wrong)}}}],
            }
            (run / "plan.json").write_text(json.dumps(document))
            with pytest.raises(RunError, match=r"plan\.json"):
                load(run)


def test_host_name_too_long_for_a_file_name_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(lambda document: document["hosts"][0].update(name="h" * 253))(run)
    assert command(run, capsys)[0] == 2


def test_file_with_a_name_that_is_not_utf8_is_quarantined(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(os.fsdecode(os.fsencode(run / "hosts") + b"/\xff.json")).write_text("{}")
    code, message = command(run, capsys)
    assert code != 70, message
    assert "hosts/\\xff.json" in (run / "report.md").read_text(encoding="utf-8")


# Truncated files


def test_record_truncated_at_any_byte_is_rejected(tmp_path: Path) -> None:
    plan = fuzz.small_run(tmp_path / "r1")
    path = tmp_path / "r1" / "hosts" / "h1.json"
    document = json.loads(path.read_bytes())
    document["snapshots"], document["observations"] = document["snapshots"][:1], document["observations"][:1]
    whole = json.dumps(document).encode()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        evidence, rejected = RecordReader(tmp_path / "r1", plan, {}).read(plan.hosts[0].name)
        assert bool(evidence.records) == (length == len(whole)), length
        assert bool(rejected) != bool(evidence.records)


def test_truncated_large_record_is_rejected(run: Path) -> None:
    whole = (run / "hosts" / "h1.json").read_bytes().rstrip()
    for length in range(0, len(whole), 211):
        assert quick.Reader().record(whole[:length]) is None
        with pytest.raises(documents.DocumentError):
            documents.checked(whole[:length], "record", source="r")


@pytest.mark.parametrize("schema", ["plan", "report"])
def test_truncated_plan_or_report_is_rejected(run: Path, schema: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, capsys)[0] == 0
    whole = (run / f"{schema}.json").read_bytes().rstrip()
    for length in range(0, len(whole), max(1, len(whole) // 1000)):
        with pytest.raises(documents.DocumentError):
            documents.checked(whole[:length], schema, source=schema)
    (run / f"{schema}.json").write_bytes(whole[: len(whole) // 2])
    for verb in ("rma", "judge"):
        code, message = command(run, capsys, verb)
        assert (code, f"{schema}.json" in message) == (2, True)
    assert command(run, capsys, "watch", "--json")[0] in (0, 2)


def test_event_file_truncated_within_a_line_is_rejected(run: Path) -> None:
    """A file that ends with a complete line is valid, with or without the line break after it."""
    event = {
        "at": builders.WHEN,
        "play": "Gang",
        "what": "unreachable",
        "host": "h1",
        "task": "t",
        "message": "gone: é",
    }
    passed = {"at": builders.WHEN, "play": "Set-up", "what": "passed", "hosts": ["h1", "h2"]}
    whole = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (passed, event)).encode()
    line_ends = {0, len(json.dumps(passed)), len(json.dumps(passed)) + 1}
    for length in range(len(whole) + 1):
        (run / "events.jsonl").write_bytes(whole[:length])
        result = load(run)
        assert bool(result.rejected or result.events) == (length not in line_ends), length


def test_resumed_run_keeps_the_complete_lines_of_its_journal(tmp_path: Path) -> None:
    """Only the incomplete last line is dropped."""
    run_lock.acquire(tmp_path / "r1")
    path = tmp_path / "r1" / run_directory.JOURNAL
    whole = path.read_bytes() * 2
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        run_lock.acquire(tmp_path / "r1")
        lines = path.read_text().splitlines()
        assert len(lines) == whole[:length].count(b"\n") + 1, length
        for line in lines:
            documents.validate(json.loads(line), "journal", source="a line")


WAIVERS = """schema: rackproof.waivers/1
waivers:
- {criterion: hbm-copy, host: h1, scope: gpu=0, who: Ada, why: it is to be replaced, until: 2027-01-31}
- criterion: hbm-copy
  host: h2
  name: memory.bandwidth
  absent: true
  who: Ada
  until: 2027-01-31
  why: it is to be replaced
"""


def test_truncated_waiver_file_waives_no_more_than_the_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "waivers.yml"
    path.write_text(WAIVERS)
    whole = read_waivers(str(path), ("h1", "h2"))
    assert len(whole) == 2
    read = 0
    for length in range(len(WAIVERS)):
        path.write_text(WAIVERS[:length])
        try:
            result = read_waivers(str(path), ("h1", "h2"))
        except UsageError:
            continue
        read += 1
        # The text of `why` may be cut off, so it is not compared.
        assert [replace(waiver, why="") for waiver in result] == [
            replace(waiver, why="") for waiver in whole[: len(result)]
        ]
    assert read


@pytest.mark.parametrize(
    "text",
    [
        "1: 2", "null: 1", "true: 1", "? [a]\n: b", "a: !!int ''", "a: !!bool x", "a: !!timestamp x", "a: !!float ''", "a: *b",
        "a: &a [*a]", "a: !!binary '%'", "a: !!python/object x", "a: \x00", "- [", "--- a\n--- b", "a: 1e999", "a: .nan",
        "a: 1\na: 2", "",
    ],
)  # fmt: skip
def test_invalid_waiver_yaml_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "waivers.yml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"waivers\.yml"):
        read_waivers(str(path), ())


def test_truncated_baseline_snapshot_is_rejected(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        fuzz.write_input_files(tmp_path)
    run = tmp_path / fuzz.RUN_WITH_BASELINE
    plan = load(run).plan
    gpus = load(run).evidence["h1"].gpus()
    assert baseline_store.BaselineSnapshot(run, plan).of_host("h1", gpus).problem == ""
    for name in ("index.json", "hosts/h1.json", "gpus/h1-0.json"):
        path = run / "baseline" / name
        whole = path.read_bytes()
        for length in range(0, len(whole), max(1, len(whole) // 20)):
            path.write_bytes(whole[:length])
            assert "is invalid" in baseline_store.BaselineSnapshot(run, plan).of_host("h1", gpus).problem
        path.unlink()
        assert "is invalid" in baseline_store.BaselineSnapshot(run, plan).of_host("h1", gpus).problem
        path.write_bytes(whole)


# Fuzzing


def test_eight_hundred_mutations_cause_no_wrong_result() -> None:
    """This test has a fixed seed. Each week, CI runs `make fuzz`: a million mutations with a new seed."""
    signal.alarm(3600)  # more than the usual ten minutes, because other tests use the same CPU cores
    counts, reported = fuzz.run(800, jobs=2, seed=1, report=lambda _: None)
    assert reported == []
    assert not any(counts[name] for name in fuzz.FAILURES)
    # The counts show that mutations were tried.
    assert counts["mutations"] == 800
    assert counts["accepted"] > 40 < counts["rejected"] + counts["incomplete"]
    assert counts["commands"] > 2
    assert counts["gang records"] > 80


def test_mutations_insert_copies_of_lists_and_objects() -> None:
    """Without copies, a mutation could change `fuzz.VALUES`. A list could even contain itself."""
    values = repr(fuzz.VALUES)
    for seed in range(20_000):
        rng, document = random.Random(seed), {"values": list[Any]()}  # noqa: S311 (a reproducible sequence)
        for _ in range(3):
            fuzz._mutate_value(rng, document)
        json.dumps(document)
    assert repr(fuzz.VALUES) == values


def test_fuzzer_gives_a_rejection_reason_for_invalid_evidence(tmp_path: Path) -> None:
    """For each of these changes, `rejection_reason` must return why the run must not be accepted."""
    trial = fuzz.Trial(tmp_path / "trial", 1, full=True, gang=True)
    document = to_json(trial.plan)
    valid, host_record, gang_record = trial.originals, "hosts/h1.json", "gangs/r1/h1.json"
    criteria = fuzz.H200_PACK.criteria
    assert fuzz.rejection_reason(document, valid, criteria) == ""
    for old, new, why in (
        (b'"status": "measured"', b'"status": "measurd"', "no valid record"),
        (b'"nonce": "0', b'"nonce": "1', "the record belongs to"),
        (b'"outcome": "finished"', b'"outcome": "failed"', "the last launch of stage"),
        (b"NVIDIA H200", b"NVIDIA H100", "another model"),
        (b'"h1-0"', b'"h2-0"', "in two slots"),
        (b"4270000000000.0", b"1270000000000.0", "wanted ge"),
    ):
        assert old in valid[host_record]
        assert why in fuzz.rejection_reason(
            document, valid | {host_record: valid[host_record].replace(old, new)}, criteria
        )
    for old, new, why in (
        (b'"gang": "r1"', b'"gang": "r2"', "the record belongs to"),
        (b'"h1-0"', b'"h1-1"', "in two slots, or two GPUs in one"),
        (b'"stage": "gang",', b'"stage": "gone",', "was not measured"),
        (b",partner=h2", b",partner=h3", "was not measured"),
        (b'"members": [\n    "h1",\n    "h2"', b'"members": [\n    "h1"', "no launch with all hosts of its gang"),
        (b'"value": 0,', b'"value": 3,', "wanted eq 0"),
        (b'"name": "collective.all_reduce.wrong_elements",\n   "scope": "gang=r1",', b"", "no valid record"),
    ):
        assert old in valid[gang_record], old
        assert why in fuzz.rejection_reason(
            document, valid | {gang_record: valid[gang_record].replace(old, new)}, criteria
        )


def test_fuzz_detects_writes_outside_the_run_directory(tmp_path: Path) -> None:
    result: list[str] = []
    (tmp_path / "run").mkdir()
    with fuzz._watched(tmp_path, [tmp_path / "run"], result.append):
        (tmp_path / "run" / "inside").write_text("")
        assert result == []
        (tmp_path / "outside").write_text("")
        (tmp_path / "run" / "inside").rename(tmp_path / "moved")
    assert {text.rsplit("/", 1)[-1] for text in result} == {
        "outside",
        "moved",
        "a new or missing entry of the watched directory",
    }


def test_report_is_written_for_a_record_with_an_impossible_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schema of records accepts 30 February. In each step, the test replaces one timestamp by this date."""
    directory = tmp_path / "r1"
    fuzz.small_run(directory, full=True, gang=True)
    changed = 0
    for path in sorted(directory.glob("hosts/*.json"))[:1] + sorted(directory.glob("gangs/*/*.json"))[:1]:
        text = path.read_text(encoding="utf-8")
        for moment in re.finditer(r'"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"', text):
            path.write_text(f'{text[: moment.start()]}"2026-02-30T00:00:00Z"{text[moment.end() :]}', encoding="utf-8")
            assert command(directory, capsys)[0] == 2, text[moment.start() - 80 : moment.end()]
            changed += 1
        path.write_text(text, encoding="utf-8")
    assert changed > 8
