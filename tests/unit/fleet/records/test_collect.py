"""Test `rackproof collect`, which reads records from logs and volumes.

Damaged records are rejected. Records of other runs are quarantined. In a log, a record is split into frames, one per line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.records.collect_sources import read_source
from rackproof import main as command
from schemas import documents, frames
from schemas.plans import Plan
from schemas.records import Metric, Record, to_json
from tests import builders
from tests.accepted import rackproof

HOSTS = ("h1", "h2")


@pytest.fixture
def plan() -> Plan:
    return builders.plan(*HOSTS, profile="smoke", gpu_count=1)


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Path:
    """Write a run directory that contains only the plan. Return its path."""
    documents.write(tmp_path / "runs" / "r1" / "plan.json", to_json(plan))
    return tmp_path / "runs" / "r1"


def text_of(record: Record) -> bytes:
    return (json.dumps(to_json(record), default=dict) + "\n").encode()


def lines_of(plan: Plan, *hosts: str, node: str = "", **changes: Any) -> list[str]:
    """Return the log lines with the records of these hosts. `changes` replaces fields of the records."""
    return [
        line
        for host in hosts
        for record in builders.records(plan, host)
        for line in frames.lines(
            text_of(replace(record, **changes)),
            run_id=changes.get("run_id", record.run_id),
            host=changes.get("host", record.host),
            gang=record.gang,
            node=node,
        )
    ]


def log_of(tmp_path: Path, lines: list[str], name: str = "pods.log") -> Path:
    """Write a log with these lines between lines of other text. Return its path."""
    path = tmp_path / name
    path.write_text("\n".join(["h1: 900 observations recorded", *lines, "rackproof: done"]) + "\n", encoding="utf-8")
    return path


def test_records_collected_from_a_log_are_judged(run: Path, plan: Plan, tmp_path: Path) -> None:
    done = rackproof("collect", run, log_of(tmp_path, lines_of(plan, *HOSTS)))
    assert (done.returncode, done.stderr) == (0, "")
    assert "collected hosts/h1.json" in done.stdout
    assert "none missing" in done.stdout
    assert rackproof("report", run).returncode == 0


def test_pod_without_output_leaves_the_fleet_incomplete(run: Path, plan: Plan, tmp_path: Path) -> None:
    done = rackproof("collect", run, log_of(tmp_path, lines_of(plan, "h1")))
    assert done.returncode == 0
    assert "missing: hosts/h2.json, gangs/r1/h2.json" in done.stdout
    report = rackproof("report", run)
    assert report.returncode == 2
    assert "h2" in report.stdout


def test_record_is_transferred_byte_for_byte(plan: Plan) -> None:
    record = text_of(builders.records(plan, "h1")[0])
    reported, problems = frames.read(frames.lines(record, run_id="r1", host="h1", node="gpu-a"), source="log")
    assert problems == []
    assert [(item.text, item.host, item.node) for item in reported] == [(record, "h1", "gpu-a")]


@pytest.mark.parametrize("length", [1, 60, 253])
def test_each_frame_line_fits_into_one_atomic_pipe_write(plan: Plan, length: int) -> None:
    name, text = "n" * length, text_of(builders.records(plan, "h1")[0])
    written = list(frames.lines(text, run_id=name, host=name, gang=name, node=name))
    assert len(written) > 1
    assert max(len(line) + 1 for line in written) <= frames.LINE_BYTES
    (record,), problems = frames.read(written, source="log")
    assert (record.text, record.node, problems) == (text, name, [])


def test_record_with_long_non_ascii_names_is_transferred_unchanged(plan: Plan) -> None:
    name, text = "\u00e9" * 253, text_of(builders.records(plan, "h1")[0])
    written = list(frames.lines(text, run_id=name, host=name, gang=name, node=name))
    (record,), problems = frames.read(written, source="log")
    assert (record.text, record.host, problems) == (text, name, [])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: f"[pod/rackproof-0-x7k2p/rackproof] {line}",
        lambda line: f"2026-11-21T04:00:00.123456789Z stdout F {line}",
        lambda line: f"[1,0]<stdout>:{line}\r",
        lambda line: json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "2026-11-21T04:00:00Z"}),
    ],
    ids=["kubectl --prefix", "containerd log file", "mpirun --tag-output", "Docker log file"],
)
def test_prefixes_and_wrappers_of_log_lines_are_ignored(
    wrap: Callable[[str], str], run: Path, plan: Plan, tmp_path: Path
) -> None:
    done = rackproof("collect", run, log_of(tmp_path, [wrap(line) for line in lines_of(plan, *HOSTS)]))
    assert (done.returncode, done.stderr) == (0, "")


def test_lines_of_several_pods_may_be_mixed_and_repeated(run: Path, plan: Plan, tmp_path: Path) -> None:
    lines = lines_of(plan, *HOSTS)
    lines = [*lines[1::2], *reversed(lines), *lines[::2]]
    assert rackproof("collect", run, log_of(tmp_path, lines)).returncode == 0


def test_records_are_collected_from_standard_input_and_listed_as_json(run: Path, plan: Plan) -> None:
    done = subprocess.run(
        [sys.executable, command.__file__, "collect", run, "-", "--json"],
        input="\n".join(lines_of(plan, *HOSTS)),
        capture_output=True,
        text=True,
        check=False,
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert sorted(document["added"]) == [f"gangs/r1/{host}.json" for host in HOSTS] + [
        f"hosts/{host}.json" for host in HOSTS
    ]
    assert (document["problems"], document["missing"], document["unchanged"]) == ([], [], [])


def cut_line(lines: list[str]) -> list[str]:
    return [*lines[:1], lines[1][:200], *lines[2:]]


def lose_line(lines: list[str]) -> list[str]:
    return [*lines[:1], *lines[2:]]


def change_letter(lines: list[str]) -> list[str]:
    at = lines[1].index('"data":"') + 50
    other = "A" if lines[1][at] != "A" else "B"
    return [*lines[:1], lines[1][:at] + other + lines[1][at + 1 :], *lines[2:]]


def mix_lines(lines: list[str]) -> list[str]:
    return [*lines[:1], lines[1][:500] + lines[2][:500] + lines[1][500:], *lines[2:]]


def change_part_number(lines: list[str]) -> list[str]:
    return [*lines[:1], lines[1].replace('"part":2', '"part":3'), *lines[2:]]


def change_size(lines: list[str]) -> list[str]:
    frame = json.loads(lines[0].removeprefix(frames.MARK))
    return [line.replace(f'"bytes":{frame["bytes"]}', '"bytes":100') for line in lines]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_line, "line 3: not JSON"),
        (lose_line, "is cut off: 1 of"),
        (change_letter, "line 3: part 2 of the record of h1 does not match its checksum"),
        (mix_lines, "the line of a record was cut off or mixed with another"),
        (change_part_number, "line 3: part 3 of the record of h1 does not match its checksum"),
        (change_size, "does not match its checksum"),
    ],
)
def test_damaged_log_line_rejects_only_its_record(
    damage: Callable[[list[str]], list[str]], message: str, run: Path, plan: Plan, tmp_path: Path
) -> None:
    many = {str(number): hashlib.sha256(str(number).encode()).hexdigest() for number in range(200)}
    record = replace(builders.records(plan, "h1")[0], software=many)
    lines = list(frames.lines(text_of(record), run_id="r1", host="h1"))
    assert len(lines) > 3
    done = rackproof("collect", run, log_of(tmp_path, [*damage(lines), *lines_of(plan, "h2")]))
    assert done.returncode == 2
    assert message in done.stderr
    assert all(line.startswith("rackproof: ") for line in done.stderr.splitlines())
    assert not (run / "hosts" / "h1.json").exists()
    assert (run / "hosts" / "h2.json").exists(), "the other record is undamaged, so it is collected"


def without_checksum(line: str) -> str:
    frame = json.loads(line.removeprefix(frames.MARK))
    del frame["crc32"]
    return frames.MARK + json.dumps(frame)


def with_non_ascii_data(line: str) -> str:
    frame = json.loads(line.removeprefix(frames.MARK))
    frame["data"] = "é" + frame["data"][1:]
    frame["crc32"] = frames._check(frame["sha256"], frame["part"], frame["data"])
    return frames.MARK + json.dumps(frame)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_checksum, "line 2: a line of a record lacks fields, or has invalid ones"),
        (with_non_ascii_data, "line 2: a line of a record lacks fields, or has invalid ones"),
        (lambda line: '{"log":' + "[" * 200_000 + line, "line 2: nested deeper than"),
    ],
    ids=["no checksum", "not ASCII", "nested too deeply"],
)
def test_invalid_log_line_is_rejected_with_its_line_number(
    damage: Callable[[str], str], message: str, run: Path, plan: Plan, tmp_path: Path
) -> None:
    line = lines_of(plan, "h1")[0]
    done = rackproof("collect", run, log_of(tmp_path, [damage(line), *lines_of(plan, "h2")]))
    assert done.returncode == 2
    assert message in done.stderr
    assert "collected hosts/h2.json" in done.stdout


def test_decompression_bomb_is_rejected() -> None:
    (line,) = frames.lines(b"x" * 1000, run_id="r1", host="h1")
    frame = json.loads(line.removeprefix(frames.MARK))
    bomb = next(frames.lines(b"\0" * 50_000_000, run_id="r1", host="h1"))
    frame |= {"data": json.loads(bomb.removeprefix(frames.MARK))["data"], "parts": 1, "part": 1}
    frame["crc32"] = frames._check(frame["sha256"], 1, frame["data"])
    reported, problems = frames.read([frames.MARK + json.dumps(frame)], source="log")
    assert reported == []
    assert "does not match its checksum" in problems[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "r0"}, "a record of run r0 (host h1), not of run r1"),
        ({"nonce": "f" * 32}, "was made with another plan for run r1"),
        ({"host": "h9"}, "host h9 is not in the plan"),
    ],
)
def test_record_of_another_run_plan_or_host_is_quarantined(
    changes: dict[str, str], message: str, run: Path, plan: Plan, tmp_path: Path
) -> None:
    done = rackproof("collect", run, log_of(tmp_path, lines_of(plan, "h1", **changes)))
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(run.glob("hosts/*")) + list(run.glob("gangs/*/*"))
    assert len(list(run.glob("quarantine/*.json"))) == 2
    events = [json.loads(line) for line in (run / "collected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {event["what"] for event in events} == {"quarantined"}


def test_record_whose_log_lines_name_another_host_is_rejected(run: Path, plan: Plan, tmp_path: Path) -> None:
    record = builders.records(plan, "h1")[0]
    lines = list(frames.lines(text_of(record), run_id="r1", host="h2"))
    done = rackproof("collect", run, log_of(tmp_path, lines))
    assert done.returncode == 2
    assert "the record is of host h1, but its log lines name h2" in done.stderr


def test_only_a_later_record_replaces_an_earlier_one(run: Path, plan: Plan, tmp_path: Path) -> None:
    early = log_of(tmp_path, lines_of(plan, "h1", ended="2026-11-21T04:01:00Z"), "early.log")
    late = log_of(tmp_path, lines_of(plan, "h1", ended="2026-11-21T04:09:00Z"), "late.log")
    for log, ended in ((early, "04:01"), (late, "04:09"), (early, "04:09")):
        assert rackproof("collect", run, log).returncode == 0
        assert f"T{ended}" in json.loads((run / "hosts" / "h1.json").read_text(encoding="utf-8"))["ended"]


def emitted_lines(record: Record) -> list[str]:
    return list(frames.lines(text_of(record), run_id=record.run_id, host=record.host, gang=record.gang))


LATER = "2026-11-21T04:09:00Z"


def test_record_that_extends_the_earlier_one_replaces_it(run: Path, plan: Plan, tmp_path: Path) -> None:
    whole = builders.records(plan, "h1")[0]
    early = replace(whole, observations=whole.observations[:3], snapshots=whole.snapshots[:1], launches=())
    for record in (early, replace(whole, ended=LATER)):
        assert rackproof("collect", run, log_of(tmp_path, emitted_lines(record))).returncode == 0
    assert documents.read(run / "hosts" / "h1.json", "record")["ended"] == LATER
    assert not (run / "quarantine").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda record: {"observations": record.observations[:-1]},
        lambda record: {"observations": (replace(record.observations[0], value=1.0), *record.observations[1:])},
        lambda record: {"snapshots": record.snapshots[1:]},
        lambda record: {"launches": record.launches[1:]},
        lambda record: {"gpus": (replace(record.gpus[0], serial="another"),)},
        lambda record: {"software": {"torch": "0"}},
    ],
    ids=[
        "lacks a figure",
        "changes a figure",
        "lacks a snapshot",
        "lacks a launch",
        "changes a GPU",
        "changes a version",
    ],
)
def test_record_that_changes_earlier_data_needs_the_attempt_option(
    change: Callable[[Record], dict[str, Any]], run: Path, plan: Plan, tmp_path: Path
) -> None:
    record = replace(builders.records(plan, "h1")[0], software={"torch": "2.7"})
    original = text_of(record)
    assert rackproof("collect", run, log_of(tmp_path, emitted_lines(record))).returncode == 0
    changed_log = log_of(tmp_path, emitted_lines(replace(record, ended=LATER, **change(record))))
    done = rackproof("collect", run, changed_log)
    assert done.returncode == 2
    assert "hosts/h1.json: 2 records have the start time" in done.stderr
    assert "one lacks or changes data of an earlier one" in done.stderr
    assert (run / "hosts" / "h1.json").read_bytes() == original
    assert rackproof("collect", run, changed_log, "--attempt", "last").returncode == 0
    assert documents.read(run / "hosts" / "h1.json", "record")["ended"] == LATER
    digest = hashlib.sha256(original).hexdigest()
    assert (run / "quarantine" / f"{digest[:16]}.json").read_bytes() == original
    events = [json.loads(line) for line in (run / "collected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["sha256"] for event in events if event["what"] == "replaced"] == [digest]


@pytest.mark.parametrize(("attempt", "began"), [("first", "T04:00"), ("last", "T05:00")])
def test_operator_chooses_between_two_attempts(attempt: str, began: str, run: Path, plan: Plan, tmp_path: Path) -> None:
    again = {"began": "2026-11-21T05:00:00Z", "ended": "2026-11-21T05:09:00Z"}
    log = log_of(tmp_path, lines_of(plan, "h1") + lines_of(plan, "h1", **again))
    done = rackproof("collect", run, log)
    assert done.returncode == 2
    assert "hosts/h1.json: the host began the run 2 times" in done.stderr
    assert not (run / "hosts" / "h1.json").exists()
    for _ in range(2):
        assert rackproof("collect", run, log, "--attempt", attempt).returncode == 0
        assert began in json.loads((run / "hosts" / "h1.json").read_text(encoding="utf-8"))["began"]
    events = [json.loads(line) for line in (run / "collected.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = {event["sha256"] for event in events if event["what"] == "quarantined"}
    assert {path.name for path in (run / "quarantine").iterdir()} == {f"{digest[:16]}.json" for digest in kept}
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (run / "quarantine").iterdir()]
    assert sorted(record.get("gang", "") for record in records) == ["", "r1"]
    assert all(began not in record["began"] for record in records)
    assert len([event for event in events if event["what"] == "quarantined"]) == len(kept)


def of_pod(plan: Plan, number: int, *, machine: int, has_gang_record: bool = True) -> list[Record]:
    """Return the records of h1 from one pod. The host record began at `number` o'clock, and the gang record at half past."""
    boot = Metric(name="host.boot_id", unit="1", values={"host": f"boot of machine {machine}"})
    records = []
    for minute, record in zip((0, 30), builders.records(plan, "h1"), strict=True):
        gpus = tuple(replace(gpu, serial=f"{machine}", uuid=f"GPU-{machine}") for gpu in record.gpus)
        first, *rest = record.snapshots
        metrics = (*(metric for metric in first.metrics if metric.name != boot.name), boot)
        snapshots = (replace(first, metrics=metrics), *rest)
        times = {"began": f"2026-11-21T0{number}:{minute:02}:00Z", "ended": f"2026-11-21T0{number}:59:00Z"}
        records.append(replace(record, gpus=gpus, snapshots=snapshots, **times))
    return records if has_gang_record else records[:1]


PATHS = ("hosts/h1.json", "gangs/r1/h1.json")


def begins(run: Path) -> list[str | None]:
    """Return the hour at which the host's record and its gang record in the run directory began; None: no record."""
    return [documents.read(run / path, "record")["began"][12:13] if (run / path).exists() else None for path in PATHS]


@pytest.mark.parametrize("steps", ["together", "older first", "newer first"])
@pytest.mark.parametrize("machine", [1, 2], ids=["same machine", "other machine"])
@pytest.mark.parametrize(
    "gangs",
    [(True, True), (True, False), (False, True)],
    ids=["both have a gang record", "only the first", "only the last"],
)
@pytest.mark.parametrize("attempt", ["first", "last"])
def test_all_records_of_a_host_are_of_the_chosen_attempt(
    attempt: str, gangs: tuple[bool, bool], machine: int, steps: str, run: Path, plan: Plan, tmp_path: Path
) -> None:
    older = [line for item in of_pod(plan, 4, machine=1, has_gang_record=gangs[0]) for line in emitted_lines(item)]
    newer = [
        line for item in of_pod(plan, 5, machine=machine, has_gang_record=gangs[1]) for line in emitted_lines(item)
    ]
    lines = {"together": [newer + older], "older first": [older, newer], "newer first": [newer, older]}[steps]
    logs = [log_of(tmp_path, part, f"{number}.log") for number, part in enumerate(lines)]
    codes = [rackproof("collect", run, log, "--attempt", attempt).returncode for log in logs]
    assert codes == [0] * len(logs)
    hour, has_gang_record = ("4", gangs[0]) if attempt == "first" else ("5", gangs[1])
    assert begins(run) == [hour, hour if has_gang_record else None]
    put_aside = [json.loads(path.read_text(encoding="utf-8")) for path in (run / "quarantine").iterdir()]
    assert {record["began"][12:13] for record in put_aside} == {"4", "5"} - {hour}
    assert len(put_aside) == 1 + (gangs[1] if attempt == "first" else gangs[0])


@pytest.mark.parametrize("machine", [1, 2], ids=["same machine", "other machine"])
@pytest.mark.parametrize("is_collected_before", [False, True])
def test_records_of_several_attempts_of_a_host_are_all_rejected(
    is_collected_before: bool, machine: int, run: Path, plan: Plan, tmp_path: Path
) -> None:
    """The newer attempt has no gang record. Without `--attempt`, its record must not appear beside the older gang record."""
    older = [line for record in of_pod(plan, 4, machine=1) for line in emitted_lines(record)]
    newer = emitted_lines(of_pod(plan, 5, machine=machine)[0])
    if is_collected_before:
        assert rackproof("collect", run, log_of(tmp_path, older)).returncode == 0
    done = rackproof("collect", run, log_of(tmp_path, older + newer + lines_of(plan, "h2")))
    assert done.returncode == 2
    reason = "two machines wrote records of this host" if machine == 2 else "the host began the run 2 times"
    assert f"hosts/h1.json: {reason}" in done.stderr
    assert "gangs/r1/h1.json: " in done.stderr
    assert begins(run) == (["4", "4"] if is_collected_before else [None, None])
    assert (run / "hosts" / "h2.json").exists()


def test_gang_record_is_not_put_beside_the_host_record_of_a_later_attempt(
    run: Path, plan: Plan, tmp_path: Path
) -> None:
    _, gang = of_pod(plan, 4, machine=1)
    own, _ = of_pod(plan, 5, machine=1)
    log = log_of(tmp_path, [*emitted_lines(gang), *emitted_lines(own)])
    done = rackproof("collect", run, log)
    assert (done.returncode, begins(run)) == (2, [None, None])
    assert "hosts/h1.json: the records of this host are of several attempts" in done.stderr
    assert rackproof("collect", run, log, "--attempt", "last").returncode == 0
    assert begins(run) == ["5", None]


def test_volume_is_searched_without_following_links(run: Path, plan: Plan, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    for host in HOSTS:
        for record in builders.records(plan, host):
            path = f"gangs/{record.gang}.json" if record.gang else "record.json"
            documents.write(volume / host / "runs" / "r1" / path, to_json(record))
    documents.write(volume / "h1" / "runs" / "r1" / "plan.json", to_json(plan))
    (volume / "h1" / "hosts").symlink_to(tmp_path)
    (volume / "h1" / "other.log").symlink_to("/etc/passwd")
    done = rackproof("collect", run, volume)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 records collected" in done.stdout
    assert "0 records collected, 4 unchanged" in rackproof("collect", run, volume).stdout


def test_damaged_record_on_a_volume_is_rejected_and_others_are_collected(run: Path, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "volume" / "hosts").mkdir(parents=True)
    (tmp_path / "volume" / "hosts" / "h1.json").write_bytes(text_of(builders.records(plan, "h1")[0])[:-40])
    (tmp_path / "volume" / "hosts" / "h2.json").write_bytes(text_of(builders.records(plan, "h2")[0]))
    done = rackproof("collect", run, tmp_path / "volume")
    assert done.returncode == 2
    assert "volume/hosts/h1.json: not JSON at offset" in done.stderr
    assert "collected hosts/h2.json" in done.stdout


def test_unreadable_log_or_folder_is_reported_and_others_are_read(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    log_of(tmp_path, lines_of(plan, "h1"), "good.log")
    log_of(tmp_path, lines_of(plan, "h2"), "unreadable.log")
    refused = {str(tmp_path / name) for name in ("locked", "unreadable.log")}

    def unless_refused(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, changed to fail for the paths in `refused`. File modes would not stop tests that run as root."""

        def call(path: Any, *arguments: Any) -> Any:
            if str(path) in refused:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path, *arguments)

        return call

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, unless_refused(getattr(os, name)))
    records, problems = read_source(str(tmp_path))
    assert {record.host for record in records} == {"h1"}
    assert problems == [f"{tmp_path}/{name}: Permission denied" for name in ("unreadable.log", "locked")]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "-"], 2, "give the directory that `rackproof plan --run-dir` created"),
        (["RUN", "nowhere.log"], 64, "nowhere.log: No such file or directory"),
        (["RUN", "/dev/null"], 64, "not a file: give a log, a directory, or - for standard input"),
        (["RUN"], 64, "the following arguments are required: SOURCE"),
    ],
)
def test_wrong_usage_is_reported_with_a_message_and_an_exit_code(
    arguments: list[str], code: int, message: str, run: Path
) -> None:
    done = rackproof("collect", *[str(run) if word == "RUN" else word for word in arguments])
    assert done.returncode == code
    assert message in done.stderr


def test_log_without_a_record_is_reported(run: Path, tmp_path: Path) -> None:
    done = rackproof("collect", run, log_of(tmp_path, []))
    assert done.returncode == 2
    assert "pods.log: no record found: collect the whole log" in done.stderr


HOSTILE = "\x1b]0;title\x07\x1b[2J\r\u202e\u2028\x9b31m"


def test_text_of_a_log_cannot_control_the_terminal(run: Path, plan: Plan, tmp_path: Path) -> None:
    (line,) = list(frames.lines(b"{}", run_id=plan.run_id, host=f"h{HOSTILE}", gang=f"g{HOSTILE}", node=HOSTILE))
    frame = json.loads(line.removeprefix(frames.MARK))
    damaged = [frames.MARK + json.dumps(frame | change) for change in ({"parts": 2}, {"crc32": "0"}, {HOSTILE: 1})]
    folder = tmp_path / f"logs{HOSTILE}"
    folder.mkdir()
    (folder / f"a{HOSTILE}.log").write_text("\n".join([line, *damaged]) + "\n", encoding="utf-8")
    (folder / "record.json").write_text("{}")
    for arguments in ((run, folder), (run, folder, "--json"), (run, folder / f"b{HOSTILE}")):
        done = rackproof("collect", *arguments)
        assert done.returncode
        assert all(character.isprintable() or character in "\n\t" for character in done.stdout + done.stderr)
