"""`rackproof watch`: a run directory, its events and what exporters answer -> a screen, lines, JSON."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fleet.watch import exporters, findings
from fleet.watch.lines import HeartbeatLines, changes
from fleet.watch.progress import DONE, FAILED, LEFT, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from fleet.watch.screen import render
from fleet.watch.tail import Tail
from fleet.watch.text import duration, width
from fleet.watch.view import View
from fleet.watch.watcher import Watcher
from rackproof import main as rackproof
from schemas import documents, locks, run_directory
from schemas.plans import Plan
from schemas.records import Record, to_json
from tests import ROOT, builders

BEGAN = 1_795_233_600.0  # 2026-11-21T04:00:00Z
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
WAIT = "benchmark : Run the benchmarks"


@cache
def planned(hosts: tuple[str, ...]) -> Plan:
    return builders.plan(*hosts)


class Run:
    """A run directory, to which things happen."""

    def __init__(self, directory: Path, *hosts: str) -> None:
        self.directory = directory / "runs" / "r1"
        self.plan = planned(hosts or ("h1", "h2", "h3"))
        self.names = [host.name for host in self.plan.hosts]
        self.at = time.time() - 300
        documents.write(self.directory / "plan.json", json.loads(json.dumps(to_json(self.plan))))

    def tell(self, what: str, at: float | None = None, **more: Any) -> Run:
        self.at = at if at is not None else self.at + 0.01
        event = {"at": stamp(self.at), "what": what, **more}
        documents.validate(event, "progress", source="progress.jsonl")
        with (self.directory / "progress.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        return self

    def play(self, name: str, *roles: str) -> Run:
        return self.tell("play", play=name, roles=list(roles))

    def task(self, name: str, *, hosts: list[str] | None = None, stage: str = "", ok: bool = True) -> Run:
        """A task that hosts begin with and, with `ok`, come through."""
        self.tell("task", task=name, **({"stage": stage} if stage else {}))
        for host in self.names if hosts is None else hosts:
            self.tell("began", host=host)
        for host in (self.names if hosts is None else hosts) if ok else ():
            self.tell("ok", host=host, **({"rc": 0} if stage else {}))
        return self

    def prepared(self) -> Run:
        """Up to the moment when the benchmarks are waited for on every host."""
        self.tell("start", playbook="acceptance.yml", pid=1)
        self.play("Preflight", "preflight").task("preflight : Check that the host can be measured")
        self.play("Inspect", "inspect").task("inspect : Fetch the record")
        self.play("Benchmark", "benchmark").task("benchmark : Run the benchmarks")
        return self.task(WAIT, stage="benchmark", ok=False)

    def befell(self, host: str, what: str, message: str) -> None:
        event = {
            "at": stamp(self.at),
            "play": "Benchmark",
            "what": what,
            "host": host,
            "task": WAIT,
            "message": message,
        }
        documents.validate(event, "event", source="events.jsonl")
        with (self.directory / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def hold(self, pid: int | None = None) -> Run:
        claim = locks.claim("r1", self.directory.parent, pid or os.getpid(), "2026-11-21T04:00:00.000000Z")
        claim = replace(claim, user="alice", host="control1")
        with locks.exclusive(self.directory / run_directory.LOCK) as file:
            locks.write_line(file, {**vars(claim), "running": []})
        return self

    def record(self, host: str, change: Any = lambda record: record) -> None:
        record: Record = change(builders.records(self.plan, host)[0])
        documents.write(self.directory / "hosts" / f"{host}.json", json.loads(json.dumps(to_json(record))))

    def look(self, **options: Any) -> View:
        return Watcher(self.directory, **{"judging": False, "asking": False, **options}).look(background=False)


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1e6):06}Z"


def states(view: View, stage: str) -> dict[str, str]:
    return {host.name: host.cells[stage].state for host in view.hosts}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path).hold()


# --- where the hosts are


def test_hosts_go_from_stage_to_stage(run: Run) -> None:
    run.prepared()
    run.tell("ok", host="h1", rc=0)
    view = run.look()
    assert states(view, "prepare") == states(view, "inspect") == dict.fromkeys(run.names, DONE)
    assert states(view, "benchmark") == {"h1": DONE, "h2": RUNNING, "h3": RUNNING}
    assert states(view, "gang") == dict.fromkeys(run.names, WAITING)
    assert (view.task, view.pending, view.answered) == (WAIT, ("h2", "h3"), 1)
    left = {host.name: host.remaining_s for host in view.hosts}
    assert left["h1"] is None
    waits = run.plan.stage("benchmark").deadline_s - 300
    assert left["h2"] == pytest.approx(waits, abs=5)


def test_stage_that_did_not_finish_failed_before_its_host_leaves(run: Run) -> None:
    run.prepared().tell("ok", host="h2", rc=3)
    run.tell("ok", host="h1", rc=0).tell("ok", host="h3", rc=0)
    run.task("benchmark : Fetch the record")
    assert states(run.look(), "benchmark") == {"h1": DONE, "h2": FAILED, "h3": DONE}


@pytest.mark.parametrize("what", [FAILED, UNREACHABLE])
def test_host_that_leaves_comes_to_no_further_stage(what: str, run: Run) -> None:
    run.prepared().tell(what, host="h2")
    run.befell("h2", what, "Connection timed out")
    run.play("Gang", "gang").task("gang : Decide", hosts=["h1", "h3"])
    view = run.look()
    assert states(view, "benchmark") == {"h1": DONE, "h2": what, "h3": DONE}
    assert states(view, "gang") == {"h1": RUNNING, "h2": LEFT, "h3": RUNNING}
    trouble = {host.name: host.trouble for host in view.hosts}
    assert trouble == {"h1": "", "h2": f"Connection timed out (at {WAIT})", "h3": ""}


def test_host_that_is_rescued_goes_on(run: Run) -> None:
    run.prepared().tell(FAILED, host="h2").task("monitoring : Ask the service why", hosts=["h2"])
    view = run.look()
    assert states(view, "benchmark")["h2"] == RUNNING
    assert view.hosts[1].trouble == ""


def test_host_passed_over_by_a_second_launch_keeps_what_the_first_came_to(run: Run) -> None:
    run.prepared()
    run.play("Gang", "gang").task("gang : Run the launch", stage="gang", ok=False)
    run.tell("ok", host="h1", rc=3).tell("ok", host="h2", rc=0).tell("ok", host="h3", rc=0)
    run.task("gang : Run the launch", stage="gang", ok=False).tell("skipped", host="h1")
    assert states(run.look(), "gang") == {"h1": FAILED, "h2": RUNNING, "h3": RUNNING}


def test_stopping_the_exporters_at_the_end_is_no_new_preparation(run: Run) -> None:
    run.prepared().play("Stop what was started for the run", "monitoring").task("monitoring : End the exporter")
    assert states(run.look(), "prepare") == dict.fromkeys(run.names, DONE)


def test_what_ran_when_the_playbook_was_killed_is_unknown_until_it_is_resumed(run: Run) -> None:
    with subprocess.Popen(["sleep", "60"]) as gone:
        run.hold(gone.pid)
        gone.kill()
    run.prepared()
    view = run.look()
    assert (view.is_running, view.over, view.task) == (False, True, "")
    assert states(view, "benchmark") == dict.fromkeys(run.names, UNKNOWN)
    assert states(view, "inspect") == dict.fromkeys(run.names, DONE)
    run.hold().prepared()
    assert states(run.look(), "benchmark") == dict.fromkeys(run.names, RUNNING)
    assert run.look().attempts == 2


def test_without_events_only_what_records_say_is_known(run: Run) -> None:
    run.record("h1")
    view = run.look(judging=True)
    assert [cell.state for cell in view.hosts[0].cells.values()] == [DONE, DONE, DONE, UNKNOWN]
    assert {cell.state for cell in view.hosts[1].cells.values()} == {UNKNOWN}
    assert any("no progress.jsonl" in note for note in view.notes)


def test_host_of_no_gang_has_no_such_stage(tmp_path: Path) -> None:
    hosts = builders.inventory("h1", "h2", "h3", rackproof_gpu_count=2)
    hosts["h3"]["rackproof_gang"] = "none"
    run = Run(tmp_path)
    profile = builders.read_profile("standard")
    plan = builders.make_plan(profile, hosts, run_id="r1", nonce=builders.NONCE, created=builders.WHEN)
    documents.write(run.directory / "plan.json", json.loads(json.dumps(to_json(plan))))
    assert states(run.look(), "gang") == {"h1": UNKNOWN, "h2": UNKNOWN, "h3": "none"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        '{"at": "20',
        "[]",
        "null",
        '{"what": "ok"}',
        '{"at": "x", "what": "ok", "host": "h2"}',
        '{"at": "2026-11-21T04:00:00Z", "what": ["ok"], "host": "h2"}',
        '{"at": "2026-11-21T04:00:00Z", "what": "ok", "host": {"a": 1}}',
        '{"at": "2026-11-21T04:00:00Z", "what": "play", "play": 3, "roles": [[]]}',
        '{"at": "2026-11-21T04:00:00Z", "what": "ok", "host": "nobody"}',
        '{"at": "2026-11-21T04:00:00Z", "what": "' + "x" * 100_000 + '"}',
        "[" * 100_000,
        "\0\xff",
    ],
)
def test_line_that_makes_no_sense_is_passed_over(line: str, run: Run) -> None:
    run.prepared()
    before = run.look()
    with (run.directory / "progress.jsonl").open("a") as file:
        file.write(line + "\n")
    after = run.look()
    assert [host.cells for host in after.hosts] == [host.cells for host in before.hosts]


def test_events_are_read_once_and_a_line_that_grows_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"at": "2026-11-21T04:00:00Z", "what": "e')
    assert tail.read() == []
    with path.open("a") as file:
        file.write('nd"}\n')
    assert [event["what"] for event in tail.read()] == ["end"]
    assert tail.read() == []
    path.unlink()
    path.symlink_to("/dev/zero")
    assert tail.read() == []
    assert tail.problem


# --- what is found, and decided


def test_failed_criteria_are_shown_once_the_record_arrives(run: Run) -> None:
    run.prepared()
    broken = builders.snapshot(range(2), gpu__pcie__width={"gpu=0": 8, "gpu=1": 16})
    run.record("h1")
    run.record("h2", lambda record: replace(record, snapshots=(broken, *record.snapshots)))
    view = run.look(judging=True)
    assert (view.records, view.records_expected) == (2, 6)
    assert {host.name: len(host.failed) for host in view.hosts} == {"h1": 0, "h2": 1, "h3": 0}
    assert "gpu.pcie.width" in view.hosts[1].failed[0]
    shown = "\n".join(render(view, 160))
    assert "failed so far: 1 (2 of 6 records" in shown
    assert shown.endswith(view.hosts[1].failed[0])


def test_record_is_read_again_only_when_it_has_changed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.prepared().record("h1")
    watcher = Watcher(run.directory, asking=False)
    assert watcher.look(background=False).records == 1
    read: list[Path] = []
    real = documents.read
    monkeypatch.setattr(documents, "read", lambda path, *a, **k: (read.append(path), real(path, *a, **k))[1])
    watcher.look(background=False)
    assert read == []
    run.record("h2")
    watcher.look(background=False)
    assert [path.name for path in read] == ["h2.json"]


def test_record_of_another_run_is_reported_and_not_judged(run: Run) -> None:
    run.prepared().record("h1", lambda record: replace(record, nonce="f" * 32))
    view = run.look(judging=True)
    assert view.records == 0
    assert "hosts/h1.json: not of this host and run" in view.notes


def test_decision_is_shown_when_the_run_is_given_back(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.prepared()
    for host in run.names:
        run.tell("ok", host=host, rc=0)
    run.tell("end")
    for host in run.names[:2]:
        run.record(host)
    assert run.look().decision == ""
    assert rackproof.main(["report", str(run.directory)]) == 2
    assert run.look().decision == "incomplete"
    capsys.readouterr()
    assert rackproof.main(["watch", str(run.directory), "--once"]) == 0
    said = capsys.readouterr().out
    assert "decision: incomplete (INCOMPLETE)" in said
    assert "no record: hosts/h3.json is missing" in said
    run.hold()  # it is resumed: the decision is not of this attempt
    assert run.look().decision == ""


def test_decision_of_an_oversized_report_comes_from_the_journal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.prepared().record("h1")
    assert rackproof.main(["report", str(run.directory)]) == 2
    monkeypatch.setattr(findings, "REPORT_BYTES", 1000)
    view = run.look(judging=True)
    assert view.decision == "incomplete"
    assert view.records == 0  # what was judged is not judged again
    assert any(f"see {run.directory}/report.html" in note for note in view.notes)


# --- what the exporters tell


def page(run_id: str = "r1", updated: float = 1000.0, **more: str) -> str:
    values = {
        f'rackproof_run_info{{device="gpu",run_id="{run_id}",rack="r1"}}': "1.0",
        "rackproof_run_updated_timestamp_seconds": f"{updated}",
        'rackproof_stage_state{stage="benchmark",state="running"}': "1.0",
        'rackproof_stage_state{stage="benchmark",state="finished"}': "0.0",
        'rackproof_stage_deadline_timestamp_seconds{stage="benchmark"}': f"{updated + 130}",
        'rackproof_stage_progress_ratio{stage="benchmark"}': "0.61",
        'rackproof_stage_ranks{stage="benchmark",benchmark="gemm"}': "1.0",
        'rackproof_stage_ranks{stage="benchmark",benchmark="stress"}': "7.0",
        **more,
    }
    return "# HELP rackproof_stage_state x\n" + "".join(f"{key} {value}\n" for key, value in values.items())


@contextlib.contextmanager
def exporter(answer: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """Something that listens, and answers whoever comes with this, a piece at a time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        piece = 1 if pause_s else max(1, len(answer))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client, contextlib.suppress(OSError):
                        client.recv(4096)
                        for start in range(0, len(answer), piece):
                            client.sendall(answer[start : start + piece])
                            time.sleep(pause_s)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def http(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\n\r\n{body}".encode()


def targets(run: Run, *addresses: str) -> None:
    groups = [
        {"targets": [address], "labels": {"host": host, "rack": "r1", "run_id": "r1"}}
        for host, address in zip(run.names, addresses, strict=False)
    ]
    documents.write(run.directory.parent / "prometheus" / "r1.json", groups)


def test_progress_and_time_left_come_from_the_host(run: Run) -> None:
    run.prepared()
    with exporter(http(page())) as one, exporter(http(page(run_id="other"))) as other:
        targets(run, one, other)
        view = run.look(asking=True)
    first, second, third = view.hosts
    assert first.cells["benchmark"].progress == 0.61
    assert first.remaining_s == pytest.approx(130, abs=3)  # by its own clock, which need not be ours
    assert (first.benchmark, second.benchmark) == ("stress", "")
    assert second.cells["benchmark"].progress is None
    assert third.cells["benchmark"].progress is None
    note = next(note for note in view.notes if note.startswith("progress unknown"))
    assert "1 more host" in note
    assert "61 %" in "\n".join(render(view, 120))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "does not speak plain HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "does not speak plain HTTP"),
        (http("", "401 Unauthorized"), "asks for a password"),
        (http("", "302 Found\r\nLocation: http://127.0.0.1:1/"), "answers with an error"),
        (http("x" * (exporters.MOST_BYTES + 1)), "too large"),
    ],
)
def test_exporter_that_answers_something_else_leaves_the_progress_unknown(answer: bytes, why: str, run: Run) -> None:
    run.prepared()
    with exporter(answer) as address:
        targets(run, address)
        view = run.look(asking=True)
    assert view.hosts[0].cells["benchmark"] == replace(view.hosts[0].cells["benchmark"], state=RUNNING, progress=None)
    assert any(why in note or "1 more" in note or "2 more" in note for note in view.notes)
    with exporter(answer) as address, pytest.raises(ValueError, match=why):
        exporters.fetch(address)


def test_exporter_that_never_comes_to_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "DEADLINE_S", 0.3)
    began = time.monotonic()
    with exporter(http(page()), pause_s=0.05) as address, pytest.raises(OSError, match="timed out"):
        exporters.fetch(address)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999", "-1e999", "0x1", ""])
def test_figure_that_is_none_is_left_out(value: str) -> None:
    name = 'rackproof_stage_progress_ratio{stage="benchmark"}'
    assert exporters.stages(page(**{name: value}), "r1", 0.0)["benchmark"].progress is None


def test_progress_is_a_share_whatever_the_host_says() -> None:
    name = 'rackproof_stage_progress_ratio{stage="benchmark"}'
    assert exporters.stages(page(**{name: "7e9"}), "r1", 0.0)["benchmark"].progress == 1.0


# --- the screen


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 132, 200, 400])
def test_screen_fits_the_window(columns: int, run: Run) -> None:
    run.prepared().tell(FAILED, host="h2")
    run.befell("h2", FAILED, "no route to host " * 20)
    view = run.look()
    for rows in (1, 2, 5, 12, 24, 60):
        lines = render(view, columns, rows)
        assert 0 < len(lines) <= rows
        assert max(map(width, lines)) <= columns
        coloured = render(view, columns, rows, colour=True)
        assert max(width(ESCAPE.sub("", line)) for line in coloured) <= columns


def test_wide_screen_shows_everything(run: Run) -> None:
    run.prepared().tell("ok", host="h1", rc=0).tell(FAILED, host="h2")
    run.befell("h2", FAILED, "deadline of 600 s")
    text = [re.sub(r"  +", "  ", line) for line in render(run.look(), 200)]
    assert text[0].startswith("r1 · r1 · standard")
    assert text[1].startswith("running: alice on control1")
    assert re.fullmatch(r"now: benchmark : Run the benchmarks, for 5 min( \d+ s)?, waiting for: h3", text[2])
    assert "benchmark  1 failed  1 running  1 done" in text
    assert "host  prepare  inspect  benchmark  gang  last seen  time left  what" in text
    assert f"h2  done  done  failed  left  5 min  deadline of 600 s (at {WAIT})" in text


HOSTILE = [
    "\x1b]0;owned\x07\x1b[2J\x1b[H",
    "\x9b2J\x90q\x9c",
    "\r\nbenchmark: done\n\v\f\u2028\u2029",
    "\u202egnp.exe\u2066\u200b",
    "Z\u0301\u0302\u0303" * 50,
    "\ud800",
    "\x00\x08\x7f",
    "日本語" * 100,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_host_says_steers_the_terminal(text: str, run: Run) -> None:
    old = run.prepared().look()
    run.tell(FAILED, host="h2")
    run.befell("h2", FAILED, text)
    view = run.look()
    view = replace(
        view, hosts=tuple(replace(host, failed=(text,), benchmark=text) for host in view.hosts), notes=(text,)
    )
    view = replace(view, judged=view.at, task=text, summary=())
    for columns in (40, 200):
        coloured = render(view, columns, 40, colour=True)
        harmless([ESCAPE.sub("", line) for line in coloured])
        assert max(width(ESCAPE.sub("", line)) for line in coloured) <= columns
        assert len(coloured) <= 40
    harmless([*changes(old, view), *HeartbeatLines(1).hear(replace(view, pending=("h1",)))])


def harmless(lines: list[str]) -> None:
    for line in lines:
        assert line.isprintable(), repr(line)


def test_hundreds_of_hosts_are_counted_and_those_in_trouble_shown_first(tmp_path: Path) -> None:
    run = Run(tmp_path, *(f"r{number:03}" for number in range(400))).hold().prepared()
    for name in run.names[:390]:
        run.tell("ok", host=name, rc=0)
    run.tell(UNREACHABLE, host="r395")
    run.befell("r395", UNREACHABLE, "no route")
    began = time.process_time()
    view = run.look()
    lines = render(view, 132, 30)
    spent = time.process_time() - began
    assert len(lines) <= 30
    shown = [line.split()[0] for line in lines if re.match(r"r\d\d\d ", line)]
    assert shown[:3] == ["r395", "r390", "r391"]  # then what still runs, in the inventory's order
    assert any("9 running" in line and "390 done" in line and "1 unreachable" in line for line in lines)
    hidden = next(line for line in lines if "more hosts" in line)
    assert f"and {400 - len(shown)} more hosts" in hidden
    assert spent < 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (45, "45 s"), (60, "1 min"), (130, "2 min 10 s"), (11100, "3 h 5 min"), (187200, "2 d 4 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- lines for logs, and for the playbook's own terminal


def test_log_prints_each_change_once(run: Run) -> None:
    watcher = Watcher(run.directory, judging=False, asking=False)
    run.prepared()
    first = watcher.look()
    said = [line[9:] for line in changes(None, first)]
    assert said[0] == "run r1: 3 hosts of r1, profile standard"
    assert "h1, h2, h3 benchmark: running" in said
    assert changes(first, watcher.look()) == []
    run.tell("ok", host="h1", rc=0).tell(FAILED, host="h2")
    run.befell("h2", FAILED, "no space left")
    second = watcher.look()
    assert [line[9:] for line in changes(first, second)] == [
        f"h2 benchmark: failed: no space left (at {WAIT})",
        "h1 benchmark: done",
    ]
    result = (replace(second.hosts[0], failed=("FAIL: h1 gpu=0: x",)), *second.hosts[1:])
    third = replace(second, hosts=result, decision="rejected", summary=("Hosts: 0",))
    assert [line[9:] for line in changes(second, third)] == ["FAIL: h1 gpu=0: x", "decision: rejected", "Hosts: 0"]


def test_waiting_is_logged_at_start_on_progress_and_rarely_after(run: Run) -> None:
    view = run.prepared().look()
    begun, beats = view.task_since or 0.0, HeartbeatLines(30)

    def hear(after: float, share: float | None, pending: tuple[str, ...] = ("h1", "h2", "h3")) -> list[str]:
        hosts = tuple(
            replace(
                host,
                remaining_s=600 - after,
                cells={**host.cells, "benchmark": replace(host.cells["benchmark"], progress=share)},
            )
            for host in view.hosts
        )
        moment = replace(view, at=begun + after, hosts=hosts, pending=pending, answered=3 - len(pending))
        return [line[9:] for line in beats.hear(moment)]

    minutes = duration(run.plan.stage("benchmark").deadline_s)
    assert hear(1, 0.0) == []
    assert hear(3, 0.0) == [f"benchmark: h1, h2, h3 are measuring, for at most {minutes} each"]
    assert hear(20, 0.1) == []
    assert hear(40, 0.2) == ["benchmark: 0 of 3 hosts done, h1 20 %, h2 20 %, h3 20 %, at most 9 min 20 s left"]
    assert hear(60, 0.3) == []
    assert hear(71, 0.3, ("h2",)) == ["benchmark: 2 of 3 hosts done, h2 30 %, at most 8 min 49 s left"]
    assert hear(200, 0.3, ("h2",)) == []  # nothing moved
    assert hear(372, 0.3, ("h2",)) == ["benchmark: 2 of 3 hosts done, h2 30 %, at most 3 min 48 s left"]
    assert hear(410, None, ("h2",)) == ["benchmark: 2 of 3 hosts done, h2 unknown, at most 3 min 10 s left"]
    assert hear(420, None, ()) == []


def test_long_task_is_logged_with_its_remaining_hosts(run: Run) -> None:
    run.prepared().task("agent : Install what the agent needs", ok=False).tell("ok", host="h1")
    view = run.look()
    later = replace(view, at=(view.task_since or 0.0) + 45)
    assert [line[9:] for line in HeartbeatLines(30).hear(later)] == [
        "agent : Install what the agent needs: 1 of 3 hosts done, h2, h3 still running for 45 s"
    ]


# --- the command


def test_json_is_one_document_that_programs_can_read(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.prepared()
    assert rackproof.main(["watch", str(run.directory), "--once", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "rackproof.watch/2"
    assert document["hosts"][0]["cells"]["benchmark"]["state"] == RUNNING


def test_without_a_run_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rackproof.main(["watch", str(tmp_path)]) == 2
    assert "give the directory of a run" in capsys.readouterr().err
    assert rackproof.main(["watch", str(tmp_path), "--every", "0"]) == 64


def watching(run: Run, *options: str, **arguments: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "rackproof"), "watch", str(run.directory), "--every=0.2", *options]
    return subprocess.Popen([*command, "--no-ask", "--no-judge"], **arguments)


def test_log_ends_when_the_run_is_no_longer_running(run: Run) -> None:
    run.prepared()
    with watching(run, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert b"run r1: 3 hosts" in process.stdout.readline()
        (run.directory / run_directory.LOCK).unlink()
        rest = process.stdout.read()
        assert process.wait(10) == 0
    assert b"the run is not running" in rest
    assert b"\x1b" not in rest


class Terminal:
    """A terminal of 24 lines with the command in it."""

    def __init__(self, run: Run) -> None:
        self.main, side = pty.openpty()
        self.resize(100, 24)
        self.before = termios.tcgetattr(self.main)
        environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}
        self.process = watching(run, stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True)
        os.close(side)
        self.seen = b""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, wanted: bytes, seconds: float = 15.0) -> bytes:
        """What came up to and with that."""
        ends = time.monotonic() + seconds
        while wanted not in self.seen:
            assert time.monotonic() < ends, f"{wanted!r} did not come: {self.seen[-3000:]!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.main, 65536)
                except OSError:  # the other end is closed
                    break
        assert wanted in self.seen, self.seen[-3000:]
        result, _, self.seen = self.seen.partition(wanted)
        return result + wanted

    def rest(self) -> bytes:
        """What came after that, to the end."""
        self.process.wait(10)
        with contextlib.suppress(OSError):
            while select.select([self.main], [], [], 0.2)[0] and (part := os.read(self.main, 65536)):
                self.seen += part
        return self.seen


@pytest.fixture
def terminal(run: Run) -> Iterator[Terminal]:
    run.prepared()
    result = Terminal(run)
    yield result
    result.process.kill()
    result.process.wait()
    os.close(result.main)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_screen_is_drawn_again_and_given_back(number: int, code: int, run: Run, terminal: Terminal) -> None:
    first = terminal.until(b"now: benchmark : Run the benchmarks")
    assert first.startswith(b"\x1b[?1049h\x1b[?25l")
    run.tell(FAILED, host="h3")
    run.befell("h3", FAILED, "it burns")
    frame = terminal.until(b"it burns")
    assert b"\x1b[?1049h" not in frame  # drawn over, not anew
    terminal.resize(60, 10)
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.until(b"\x1b[J")
    terminal.process.send_signal(number)
    rest = terminal.rest()
    assert terminal.process.returncode == code
    assert rest.endswith(b"\x1b[?25h\x1b[?1049l")
    assert b"Traceback" not in rest
    assert termios.tcgetattr(terminal.main) == terminal.before


def test_shell_has_its_screen_while_the_command_is_stopped(terminal: Terminal) -> None:
    terminal.until(b"now: ")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.until(b"\x1b[?25h\x1b[?1049l")
    os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)  # the screen is given back a moment before it stops
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(b"\x1b[?1049h\x1b[?25l")
    terminal.until(b"now: ")


def test_screen_ends_with_the_decision_and_leaves_it_on_the_terminal(run: Run, terminal: Terminal) -> None:
    terminal.until(b"now: ")
    for host in run.names:
        run.tell("ok", host=host, rc=0)
    run.tell("end")
    assert rackproof.main(["report", str(run.directory)]) == 2
    rest = terminal.rest()
    assert terminal.process.returncode == 0
    after = rest.rpartition(b"\x1b[?1049l")[2].decode()
    assert "decision: incomplete" in after
    assert "\x1b" not in after
