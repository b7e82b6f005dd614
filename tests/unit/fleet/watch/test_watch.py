"""Test `rackproof watch`: it reads a run from its run directory and from the Prometheus exporters of the hosts.

Its output is a screen that is updated, log lines, or a JSON document.
"""

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
from rich.cells import cell_len
from rich.console import Console

from fleet.planning.duration import estimate_duration
from fleet.watch import exporters, findings
from fleet.watch.lines import HeartbeatLines, changes
from fleet.watch.progress import DONE, FAILED, LEFT, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from fleet.watch.screen import RunScreen
from fleet.watch.tail import Tail
from fleet.watch.text import duration
from fleet.watch.view import StageCell, View, expected_s
from fleet.watch.watcher import Watcher
from rackproof import main as rackproof
from schemas import documents, locks, run_directory
from schemas.plans import Plan
from schemas.records import Record, to_json
from tests import ROOT, builders

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
WAIT = "benchmark : Run the benchmarks"
"""Name of the Ansible task that runs on a host until the benchmarks of this host have ended."""


@cache
def planned(hosts: tuple[str, ...]) -> Plan:
    return builders.plan(*hosts)


class Run:
    """A run directory to which tests add events, records and a lock."""

    def __init__(self, directory: Path, *hosts: str) -> None:
        self.directory = directory / "runs" / "r1"
        self.plan = planned(hosts or ("h1", "h2", "h3"))
        self.names = [host.name for host in self.plan.hosts]
        self.at = time.time() - 300
        documents.write(self.directory / "plan.json", json.loads(json.dumps(to_json(self.plan))))

    def add_event(self, what: str, at: float | None = None, **more: Any) -> Run:
        """Add an event to progress.jsonl. `at`: its time, by default 0.01 s after the previous event."""
        self.at = at if at is not None else self.at + 0.01
        event = {"at": stamp(self.at), "what": what, **more}
        documents.validate(event, "progress", source="progress.jsonl")
        with (self.directory / "progress.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        return self

    def play(self, name: str, *roles: str) -> Run:
        return self.add_event("play", play=name, roles=list(roles))

    def task(self, name: str, *, hosts: list[str] | None = None, stage: str = "", ok: bool = True) -> Run:
        """Add a task that each of `hosts` (default: all) begins and, if `ok` is true, ends without a failure.

        `stage`: the stage whose end the task waits for; empty if it waits for no stage.
        """
        self.add_event("task", task=name, **({"stage": stage} if stage else {}))
        for host in self.names if hosts is None else hosts:
            self.add_event("began", host=host)
        for host in (self.names if hosts is None else hosts) if ok else ():
            self.add_event("ok", host=host, **({"rc": 0} if stage else {}))
        return self

    def start_benchmarks(self) -> Run:
        """Add the events from the start of the playbook until every host runs the task WAIT."""
        self.add_event("start", playbook="acceptance.yml", pid=1)
        self.play("Preflight", "preflight").task("preflight : Check that the host can be measured")
        self.play("Inspect", "inspect").task("inspect : Fetch the record")
        self.play("Benchmark", "benchmark").task("benchmark : Read the BMCs during the benchmarks")
        return self.task(WAIT, stage="benchmark", ok=False)

    def add_failure(self, host: str, what: str, message: str) -> None:
        """Add to events.jsonl that a host failed or became unreachable in the task WAIT. `what`: `failed` or `unreachable`."""
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

    def lock(self, pid: int | None = None) -> Run:
        """Lock the run for a playbook with process ID `pid`. The default is the ID of this test process, which is running."""
        claim = locks.claim("r1", self.directory.parent, pid or os.getpid(), "2026-11-21T04:00:00.000000Z")
        claim = replace(claim, user="alice", host="control1")
        with locks.exclusive(self.directory / run_directory.LOCK) as file:
            locks.write_line(file, {**vars(claim), "running": []})
        return self

    def record(self, host: str, change: Any = lambda record: record) -> None:
        """Write the record of a host to the run directory. `change`: function that returns a changed record, which is written."""
        record: Record = change(builders.records(self.plan, host)[0])
        builders.write_record(self.directory / "hosts" / f"{host}.json", record)

    def view(self, **options: Any) -> View:
        return Watcher(self.directory, **{"judge_records": False, "scrape_exporters": False, **options}).read_view(
            background=False
        )


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1e6):06}Z"


def states_of(view: View, stage: str) -> dict[str, str]:
    return {host.name: host.cells[stage].state for host in view.hosts}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path).lock()


# --- states of the hosts


def test_states_follow_the_events(run: Run) -> None:
    run.start_benchmarks()
    run.add_event("ok", host="h1", rc=0)
    view = run.view()
    assert states_of(view, "prepare") == states_of(view, "inspect") == dict.fromkeys(run.names, DONE)
    assert states_of(view, "benchmark") == {"h1": DONE, "h2": RUNNING, "h3": RUNNING}
    assert states_of(view, "gang") == dict.fromkeys(run.names, WAITING)
    assert (view.task, view.pending, view.answered) == (WAIT, ("h2", "h3"), 1)
    remaining = {host.name: host.remaining_s for host in view.hosts}
    assert remaining["h1"] is None
    until_deadline = run.plan.stage("benchmark").deadline_s - 300
    assert remaining["h2"] == pytest.approx(until_deadline, abs=5)


def test_nonzero_exit_code_fails_the_stage_before_ansible_drops_the_host(run: Run) -> None:
    run.start_benchmarks().add_event("ok", host="h2", rc=3)
    run.add_event("ok", host="h1", rc=0).add_event("ok", host="h3", rc=0)
    run.task("benchmark : Fetch the record")
    assert states_of(run.view(), "benchmark") == {"h1": DONE, "h2": FAILED, "h3": DONE}


@pytest.mark.parametrize("what", [FAILED, UNREACHABLE])
def test_failed_or_unreachable_host_leaves_the_run_before_later_stages(what: str, run: Run) -> None:
    run.start_benchmarks().add_event(what, host="h2")
    run.add_failure("h2", what, "Connection timed out")
    run.play("Gang", "gang").task("gang : Decide", hosts=["h1", "h3"])
    view = run.view()
    assert states_of(view, "benchmark") == {"h1": DONE, "h2": what, "h3": DONE}
    assert states_of(view, "gang") == {"h1": RUNNING, "h2": LEFT, "h3": RUNNING}
    trouble = {host.name: host.trouble for host in view.hosts}
    assert trouble == {"h1": "", "h2": f"Connection timed out (at {WAIT})", "h3": ""}


def test_host_whose_failure_is_rescued_continues_its_stage(run: Run) -> None:
    """A task runs on a host after a failure only if a `rescue` of the playbook handled the failure."""
    run.start_benchmarks().add_event(FAILED, host="h2").task("monitoring : Ask the service why", hosts=["h2"])
    view = run.view()
    assert states_of(view, "benchmark")["h2"] == RUNNING
    assert view.hosts[1].trouble == ""


def test_host_that_skips_the_second_launch_keeps_its_state_from_the_first_launch(run: Run) -> None:
    run.start_benchmarks()
    run.play("Gang", "gang").task("gang : Run the launch", stage="gang", ok=False)
    run.add_event("ok", host="h1", rc=3).add_event("ok", host="h2", rc=0).add_event("ok", host="h3", rc=0)
    run.task("gang : Run the launch", stage="gang", ok=False).add_event("skipped", host="h1")
    assert states_of(run.view(), "gang") == {"h1": FAILED, "h2": RUNNING, "h3": RUNNING}


def test_stopping_the_exporters_does_not_restart_the_prepare_stage(run: Run) -> None:
    run.start_benchmarks().play("Stop what was started for the run", "monitoring").task("monitoring : End the exporter")
    assert states_of(run.view(), "prepare") == dict.fromkeys(run.names, DONE)


def test_killed_playbook_leaves_running_stages_unknown_until_the_run_is_resumed(run: Run) -> None:
    with subprocess.Popen(["sleep", "60"]) as killed:
        run.lock(killed.pid)
        killed.kill()
    run.start_benchmarks()
    view = run.view()
    assert (view.is_running, view.is_over, view.task) == (False, True, "")
    assert states_of(view, "benchmark") == dict.fromkeys(run.names, UNKNOWN)
    assert states_of(view, "inspect") == dict.fromkeys(run.names, DONE)
    run.lock().start_benchmarks()
    assert states_of(run.view(), "benchmark") == dict.fromkeys(run.names, RUNNING)
    assert run.view().attempts == 2


def test_states_come_from_records_if_there_are_no_events(run: Run) -> None:
    run.record("h1")
    view = run.view(judge_records=True)
    assert [cell.state for cell in view.hosts[0].cells.values()] == [DONE, DONE, DONE, UNKNOWN]
    assert {cell.state for cell in view.hosts[1].cells.values()} == {UNKNOWN}
    assert any("no progress.jsonl" in note for note in view.notes)


def test_host_outside_gangs_has_no_gang_stage(tmp_path: Path) -> None:
    """A gang is the hosts of one multi-node launch. h1 and h2 are a gang."""
    hosts = builders.inventory("h1", "h2", "h3", rackproof_gpu_count=2)
    hosts["h3"]["rackproof_gang"] = "none"
    run = Run(tmp_path)
    profile = builders.read_profile("standard")
    plan = builders.make_plan(profile, hosts, run_id="r1", nonce=builders.NONCE, created=builders.WHEN)
    documents.write(run.directory / "plan.json", json.loads(json.dumps(to_json(plan))))
    assert states_of(run.view(), "gang") == {"h1": UNKNOWN, "h2": UNKNOWN, "h3": "none"}


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
        '{"at": "2026-11-21T04:00:00Z", "what": "ok", "host": "unknown-host"}',
        '{"at": "2026-11-21T04:00:00Z", "what": "' + "x" * 100_000 + '"}',
        "[" * 100_000,
        "\0\xff",
    ],
)
def test_invalid_event_lines_are_ignored(line: str, run: Run) -> None:
    run.start_benchmarks()
    before = run.view()
    with (run.directory / "progress.jsonl").open("a") as file:
        file.write(line + "\n")
    after = run.view()
    assert [host.cells for host in after.hosts] == [host.cells for host in before.hosts]


def test_tail_returns_each_complete_line_once(tmp_path: Path) -> None:
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
    path.symlink_to("/dev/zero")  # a link is not followed; reading /dev/zero would never end
    assert tail.read() == []
    assert tail.problem


# --- findings and the decision


def test_cause_of_a_failure_is_shown_when_the_record_of_the_host_is_fetched(run: Run) -> None:
    run.start_benchmarks()
    broken = builders.snapshot(range(2), gpu__pcie__width={"gpu=0": 8, "gpu=1": 16})
    run.record("h1")
    run.record("h2", lambda record: replace(record, snapshots=(broken, *record.snapshots)))
    view = run.view(judge_records=True)
    assert (view.records, view.records_expected) == (2, 6)
    assert {host.name: len(host.failed) for host in view.hosts} == {"h1": 0, "h2": 1, "h3": 0}
    assert "gpu.pcie.width" in view.hosts[1].failed[0]
    shown = "\n".join(render(view, 160))
    assert "causes of failure so far: 1 (2 of 6 records" in shown
    assert shown.endswith(view.hosts[1].failed[0])


def test_unchanged_record_is_not_read_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start_benchmarks().record("h1")
    watcher = Watcher(run.directory, scrape_exporters=False)
    assert watcher.read_view(background=False).records == 1
    read: list[Path] = []
    real = documents.read
    monkeypatch.setattr(documents, "read", lambda path, *a, **k: (read.append(path), real(path, *a, **k))[1])
    watcher.read_view(background=False)
    assert read == []
    run.record("h2")
    watcher.read_view(background=False)
    assert [path.name for path in read] == ["h2.json"]


def test_record_of_another_run_is_noted_and_not_judged(run: Run) -> None:
    run.start_benchmarks().record("h1", lambda record: replace(record, nonce="f" * 32))
    view = run.view(judge_records=True)
    assert view.records == 0
    assert "hosts/h1.json: its run, nonce, host or gang is not the one in the plan" in view.notes


def test_decision_is_shown_after_the_report_is_written(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.start_benchmarks()
    for host in run.names:
        run.add_event("ok", host=host, rc=0)
    run.add_event("end")
    for host in run.names[:2]:
        run.record(host)
    assert run.view().decision == ""
    assert rackproof.main(["report", str(run.directory)]) == 2
    assert run.view().decision == "incomplete"
    capsys.readouterr()
    assert rackproof.main(["watch", str(run.directory), "--once"]) == 0
    output = capsys.readouterr().out
    assert "decision: incomplete (INCOMPLETE)" in output
    assert "left no usable record: hosts/h3.json is missing" in output
    run.lock()  # a playbook resumes the run: the decision in report.json is that of the previous attempt
    assert run.view().decision == ""


def test_decision_of_an_oversized_report_comes_from_the_journal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start_benchmarks().record("h1")
    assert rackproof.main(["report", str(run.directory)]) == 2
    monkeypatch.setattr(findings, "MAX_REPORT_BYTES", 1000)
    view = run.view(judge_records=True)
    assert view.decision == "incomplete"
    assert view.records == 0  # a decided run is not judged again
    assert any(f"see {run.directory}/report.html" in note for note in view.notes)


# --- reports of the exporters


def page(run_id: str = "r1", updated: float = 1000.0, **more: str) -> str:
    """Return a page of metrics as an exporter serves it; `more` adds or replaces series."""
    values = {
        f'rackproof_run_info{{device="gpu",run_id="{run_id}",rack="r1"}}': "1.0",
        "rackproof_run_updated_timestamp_seconds": f"{updated}",
        'rackproof_stage_state{stage="benchmark",state="running"}': "1.0",
        'rackproof_stage_state{stage="benchmark",state="finished"}': "0.0",
        'rackproof_stage_deadline_timestamp_seconds{stage="benchmark"}': f"{updated + 130}",
        'rackproof_stage_expected_end_timestamp_seconds{stage="benchmark"}': f"{updated + 70}",
        'rackproof_stage_progress_ratio{stage="benchmark"}': "0.61",
        'rackproof_stage_ranks{stage="benchmark",benchmark="gemm"}': "1.0",
        'rackproof_stage_ranks{stage="benchmark",benchmark="stress"}': "7.0",
        **more,
    }
    return "# HELP rackproof_stage_state x\n" + "".join(f"{key} {value}\n" for key, value in values.items())


@contextlib.contextmanager
def exporter(answer: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """Serve `answer` to every client, and yield HOST:PORT. If `pause_s` is not 0, pause for this time after each byte."""
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


def write_targets(run: Run, *addresses: str) -> None:
    """Write the Prometheus targets of the run. The first address is for the first host of the plan, and so on."""
    groups = [
        {"targets": [address], "labels": {"host": host, "rack": "r1", "run_id": "r1"}}
        for host, address in zip(run.names, addresses, strict=False)
    ]
    documents.write(run.directory.parent / "prometheus" / "r1.json", groups)


def test_progress_and_remaining_time_come_from_the_exporter(run: Run) -> None:
    """The exporter of h2 reports another run, and h3 has no exporter, so their progress is unknown."""
    run.start_benchmarks()
    with exporter(http(page())) as address, exporter(http(page(run_id="other"))) as address_of_other_run:
        write_targets(run, address, address_of_other_run)
        view = run.view(scrape_exporters=True)
    first, second, third = view.hosts
    assert first.cells["benchmark"].progress == 0.61
    # 130 s and 70 s are differences between timestamps in the page, because the clocks of host and control node may differ.
    assert first.remaining_s == pytest.approx(130, abs=3)
    assert first.expected_s == pytest.approx(70, abs=3)
    assert second.expected_s is None
    assert (first.benchmark, second.benchmark) == ("stress", "")
    assert second.cells["benchmark"].progress is None
    assert third.cells["benchmark"].progress is None
    note = next(note for note in view.notes if note.startswith("progress unknown"))
    assert "1 more host" in note
    assert re.search(r"^h1 .* 61 % .* 1 min (10|0\d) s +stress", "\n".join(render(view, 120)), re.M)
    heartbeat = HeartbeatLines(0)
    heartbeat.due(replace(view, pending=("h1",), answered=2))
    (line,) = heartbeat.due(replace(view, at=view.at + 1, pending=("h1",), answered=2))
    assert re.fullmatch(r"\S+ benchmark: 2 of 3 hosts done, h1 61 %, about 1 min (10|0\d) s left", line)


def test_time_left_is_the_time_of_the_slowest_host_plus_the_times_of_waiting_stages(run: Run) -> None:
    view = run.start_benchmarks().view()
    assert view.expected_s is None, (
        "the time left must be unknown, because no exporter reports when the running stage is expected to end"
    )
    stages_s = {"benchmark": 200.0, "gang": 60.0}
    hosts = [replace(host, expected_s=100.0 + number) for number, host in enumerate(view.hosts)]
    assert expected_s(hosts, stages_s) == 102.0 + 60.0
    assert expected_s([replace(hosts[0], expected_s=None), *hosts[1:]], stages_s) is None
    done = [replace(host, cells={**host.cells, "benchmark": StageCell(state=DONE)}) for host in hosts]
    assert expected_s(done, stages_s) == 60.0
    all_done = [replace(host, cells={**host.cells, "gang": StageCell(state=DONE)}) for host in done]
    assert expected_s(all_done, stages_s) is None
    assert expected_s(done, {}) is None
    assert "about 2 min 42 s left" in "\n".join(render(replace(view, expected_s=162.0), 160))


def test_new_run_shows_the_sum_of_the_estimated_times_of_all_stages(run: Run) -> None:
    run.add_event("start", playbook="acceptance.yml", pid=1).play("Preflight", "preflight")
    estimate = estimate_duration(run.plan, None)
    assert run.view().expected_s == pytest.approx(sum(estimate.stages_s.values()))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "not a plain HTTP response"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "not a plain HTTP response"),
        (http("", "401 Unauthorized"), "requires a password"),
        (http("", "302 Found\r\nLocation: http://127.0.0.1:1/"), "HTTP error"),
        (http("x" * (exporters.MAX_PAGE_BYTES + 1)), "response too large"),
    ],
)
def test_progress_is_unknown_if_the_answer_is_not_a_metrics_page(answer: bytes, why: str, run: Run) -> None:
    run.start_benchmarks()
    with exporter(answer) as address:
        write_targets(run, address)
        view = run.view(scrape_exporters=True)
    assert view.hosts[0].cells["benchmark"] == replace(view.hosts[0].cells["benchmark"], state=RUNNING, progress=None)
    assert any(why in note or "1 more" in note or "2 more" in note for note in view.notes)
    with exporter(answer) as address, pytest.raises(ValueError, match=why):
        exporters.fetch(address)


def test_slow_exporter_is_abandoned_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "DEADLINE_S", 0.3)
    began = time.monotonic()
    with exporter(http(page()), pause_s=0.05) as address, pytest.raises(OSError, match="timed out"):
        exporters.fetch(address)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999", "-1e999", "0x1", ""])
def test_invalid_progress_is_ignored(value: str) -> None:
    name = 'rackproof_stage_progress_ratio{stage="benchmark"}'
    assert exporters.parse_page(page(**{name: value}), "r1", 0.0)["benchmark"].progress is None


def test_progress_above_one_is_clamped() -> None:
    name = 'rackproof_stage_progress_ratio{stage="benchmark"}'
    assert exporters.parse_page(page(**{name: "7e9"}), "r1", 0.0)["benchmark"].progress == 1.0


# --- the screen


def render(view: View, columns: int, rows: int | None = None, *, colour: bool = False) -> list[str]:
    console = Console(width=columns, height=rows, force_terminal=colour, color_system="standard" if colour else None)
    with console.capture() as capture:
        console.print(RunScreen(view, fit_height=rows is not None))
    return [line.rstrip() for line in capture.get().split("\n")[:-1]]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 132, 200, 400])
def test_screen_fits_the_window(columns: int, run: Run) -> None:
    run.start_benchmarks().add_event(FAILED, host="h2")
    run.add_failure("h2", FAILED, "no route to host " * 20)
    view = run.view()
    for rows in (1, 2, 5, 12, 24, 60):
        lines = render(view, columns, rows)
        assert 0 < len(lines) <= rows
        assert max(map(cell_len, lines)) <= columns
        coloured = render(view, columns, rows, colour=True)
        assert max(cell_len(ESCAPE.sub("", line)) for line in coloured) <= columns


def test_wide_screen_shows_all_columns(run: Run) -> None:
    run.start_benchmarks().add_event("ok", host="h1", rc=0).add_event(FAILED, host="h2")
    run.add_failure("h2", FAILED, "deadline of 600 s")
    text = [re.sub(r"  +", "  ", line) for line in render(run.view(), 200)]
    assert text[0].startswith("r1 · r1 · standard")
    assert text[1].startswith("running: alice on control1")
    assert re.fullmatch(r"now: benchmark : Run the benchmarks, for 5 min( \d+ s)?, waiting for: h3", text[2])
    assert "benchmark  1 failed  1 running  1 done" in text
    assert "host  prepare  inspect  benchmark  gang  last seen  time left  what" in text
    h2 = next(line for line in text if line.startswith("h2"))
    assert re.fullmatch(
        rf"h2  done  done  failed  left  5 min( \d+ s)?  deadline of 600 s \(at {re.escape(WAIT)}\)", h2
    )


def test_long_message_is_cut_off_and_the_other_columns_are_complete(run: Run) -> None:
    run.start_benchmarks().add_event(FAILED, host="h2")
    run.add_failure("h2", FAILED, "GPU 3 was silent for 60 s in gemm " * 20)
    lines = render(run.view(), 100)
    row = next(line for line in lines if line.startswith("h2"))
    assert row.split()[:5] == ["h2", "done", "done", "failed", "left"]
    assert row.endswith("…")
    assert len(row) == 100


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
def test_text_from_hosts_cannot_control_the_terminal(text: str, run: Run) -> None:
    old = run.start_benchmarks().view()
    run.add_event(FAILED, host="h2")
    run.add_failure("h2", FAILED, text)
    view = run.view()
    view = replace(
        view, hosts=tuple(replace(host, failed=(text,), benchmark=text) for host in view.hosts), notes=(text,)
    )
    view = replace(view, judged=view.at, task=text, summary=())
    for columns in (40, 200):
        coloured = render(view, columns, 40, colour=True)
        assert_printable([ESCAPE.sub("", line) for line in coloured])
        assert max(cell_len(ESCAPE.sub("", line)) for line in coloured) <= columns
        assert len(coloured) <= 40
    assert_printable([*changes(old, view), *HeartbeatLines(1).due(replace(view, pending=("h1",)))])


def test_markup_from_hosts_is_printed_as_text(run: Run) -> None:
    markup = "[bold red]no route[/] :warning: [link=http://x]y[/link]"
    run.start_benchmarks().add_event(FAILED, host="h2")
    run.add_failure("h2", FAILED, markup)
    assert f"h2: {markup} (at {WAIT})" in render(run.view(), 200)


def assert_printable(lines: list[str]) -> None:
    for line in lines:
        assert line.isprintable(), repr(line)


def test_hosts_that_need_attention_come_first_and_hidden_hosts_are_counted(tmp_path: Path) -> None:
    run = Run(tmp_path, *(f"r{number:03}" for number in range(400))).lock().start_benchmarks()
    for name in run.names[:390]:
        run.add_event("ok", host=name, rc=0)
    run.add_event(UNREACHABLE, host="r395")
    run.add_failure("r395", UNREACHABLE, "no route")
    view = run.view()
    lines = render(view, 132, 30)
    assert len(lines) <= 30
    shown = [line.split()[0] for line in lines if re.match(r"r\d\d\d ", line)]
    # The unreachable host is first. The running hosts follow in the order of the inventory.
    assert shown[:3] == ["r395", "r390", "r391"]
    assert any("9 running" in line and "390 done" in line and "1 unreachable" in line for line in lines)
    hidden = next(line for line in lines if "more hosts" in line)
    assert f"and {400 - len(shown)} more hosts" in hidden


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (45, "45 s"), (60, "1 min"), (130, "2 min 10 s"), (11100, "3 h 5 min"), (187200, "2 d 4 h")],
)
def test_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- lines for logs and for the terminal of the playbook


def test_log_prints_each_change_once(run: Run) -> None:
    watcher = Watcher(run.directory, judge_records=False, scrape_exporters=False)
    run.start_benchmarks()
    first = watcher.read_view()
    lines = [line[9:] for line in changes(None, first)]  # without the time of day
    assert lines[0] == "run r1: 3 hosts of r1, profile standard"
    assert "h1, h2, h3 benchmark: running" in lines
    assert changes(first, watcher.read_view()) == []
    run.add_event("ok", host="h1", rc=0).add_event(FAILED, host="h2")
    run.add_failure("h2", FAILED, "no space left")
    second = watcher.read_view()
    assert [line[9:] for line in changes(first, second)] == [
        f"h2 benchmark: failed: no space left (at {WAIT})",
        "h1 benchmark: done",
    ]
    hosts = (replace(second.hosts[0], failed=("FAIL: h1 gpu=0: x",)), *second.hosts[1:])
    third = replace(second, hosts=hosts, decision="rejected", summary=("Hosts: 0",))
    assert [line[9:] for line in changes(second, third)] == ["FAIL: h1 gpu=0: x", "decision: rejected", "Hosts: 0"]


def test_unchanged_heartbeat_line_is_printed_less_often(run: Run) -> None:
    """A heartbeat line shows the progress of the current task. The first line of a task names the hosts that measure.

    A changed line is printed at most every 30 s. An unchanged line is printed again after 300 s.
    """
    view = run.start_benchmarks().view()
    begun, heartbeat = view.task_since or 0.0, HeartbeatLines(30)

    def lines_after(after: float, share: float | None, pending: tuple[str, ...] = ("h1", "h2", "h3")) -> list[str]:
        """Return the lines to print `after` seconds after the start of the task, if every host has done `share` of its stage.

        `share`: None if it is unknown. `pending`: the hosts on which the task is still running.
        """
        hosts = tuple(
            replace(
                host,
                remaining_s=600 - after,
                cells={**host.cells, "benchmark": replace(host.cells["benchmark"], progress=share)},
            )
            for host in view.hosts
        )
        moment = replace(view, at=begun + after, hosts=hosts, pending=pending, answered=3 - len(pending))
        return [line[9:] for line in heartbeat.due(moment)]

    minutes = duration(run.plan.stage("benchmark").deadline_s)
    assert lines_after(1, 0.0) == []
    assert lines_after(3, 0.0) == [f"benchmark: h1, h2, h3 are measuring, for at most {minutes} each"]
    assert lines_after(20, 0.1) == []
    assert lines_after(40, 0.2) == ["benchmark: 0 of 3 hosts done, h1 20 %, h2 20 %, h3 20 %, at most 9 min 20 s left"]
    assert lines_after(60, 0.3) == []
    assert lines_after(71, 0.3, ("h2",)) == ["benchmark: 2 of 3 hosts done, h2 30 %, at most 8 min 49 s left"]
    assert lines_after(200, 0.3, ("h2",)) == []  # the same progress as at 71 s
    assert lines_after(372, 0.3, ("h2",)) == ["benchmark: 2 of 3 hosts done, h2 30 %, at most 3 min 48 s left"]
    assert lines_after(410, None, ("h2",)) == ["benchmark: 2 of 3 hosts done, h2 unknown, at most 3 min 10 s left"]
    assert lines_after(420, None, ()) == []


def test_long_task_is_logged_with_its_pending_hosts(run: Run) -> None:
    run.start_benchmarks().task("agent : Install what the agent needs", ok=False).add_event("ok", host="h1")
    view = run.view()
    later = replace(view, at=(view.task_since or 0.0) + 45)
    assert [line[9:] for line in HeartbeatLines(30).due(later)] == [
        "agent : Install what the agent needs: 1 of 3 hosts done, h2, h3 still running for 45 s"
    ]


# --- the command


def test_json_output_is_one_document(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.start_benchmarks()
    assert rackproof.main(["watch", str(run.directory), "--once", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "rackproof.watch/2"
    assert document["hosts"][0]["cells"]["benchmark"]["state"] == RUNNING


def test_only_the_screen_needs_rich(run: Run) -> None:
    program = "import sys; sys.modules['rich'] = None; from rackproof.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "watch", str(run.start_benchmarks().directory), "--once", "--no-judge"]
    screen = subprocess.run([*command, "--no-ask"], capture_output=True, text=True, cwd=ROOT)
    assert screen.returncode == 2
    assert "rich is not installed for " in screen.stderr
    assert "pip install 'rackproof[control]'" in screen.stderr
    document = subprocess.run([*command, "--no-ask", "--json"], capture_output=True, text=True, cwd=ROOT)
    assert document.returncode == 0
    assert json.loads(document.stdout)["run_id"] == "r1"


def test_directory_without_a_run_and_an_interval_of_zero_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rackproof.main(["watch", str(tmp_path)]) == 2
    assert "give the directory of a run" in capsys.readouterr().err
    assert rackproof.main(["watch", str(tmp_path), "--every", "0"]) == 64


def start_watch(run: Run, *options: str, **arguments: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "rackproof"), "watch", str(run.directory), "--every=0.2", *options]
    return subprocess.Popen([*command, "--no-ask", "--no-judge"], **arguments)


def test_log_ends_when_the_lock_is_released(run: Run) -> None:
    run.start_benchmarks()
    with start_watch(run, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert b"run r1: 3 hosts" in process.stdout.readline()
        (run.directory / run_directory.LOCK).unlink()
        rest = process.stdout.read()
        assert process.wait(10) == 0
    assert b"no playbook is running, and the run has no decision" in rest
    assert b"\x1b" not in rest


class Terminal:
    """A terminal of 100 columns and 24 rows in which `rackproof watch` runs."""

    def __init__(self, run: Run) -> None:
        self.main, secondary = pty.openpty()
        self.resize(100, 24)
        self.before = termios.tcgetattr(self.main)
        environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}
        for name in ("COLUMNS", "LINES"):  # rich prefers them to the size of the terminal
            environment.pop(name, None)
        self.process = start_watch(
            run, stdin=secondary, stdout=secondary, stderr=secondary, env=environment, start_new_session=True
        )
        os.close(secondary)
        self.unread = b""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, wanted: bytes, seconds: float = 15.0) -> bytes:
        """Return the output up to and including `wanted`."""
        deadline = time.monotonic() + seconds
        while wanted not in self.unread:
            assert time.monotonic() < deadline, f"{wanted!r} was not printed: {self.unread[-3000:]!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                try:
                    self.unread += os.read(self.main, 65536)
                except OSError:  # the other end is closed
                    break
        assert wanted in self.unread, self.unread[-3000:]
        output, _, self.unread = self.unread.partition(wanted)
        return output + wanted

    def read_to_end(self) -> bytes:
        """Return the remaining output, up to the exit of the command."""
        self.process.wait(10)
        with contextlib.suppress(OSError):
            while select.select([self.main], [], [], 0.2)[0] and (part := os.read(self.main, 65536)):
                self.unread += part
        return self.unread


@pytest.fixture
def terminal(run: Run) -> Iterator[Terminal]:
    run.start_benchmarks()
    opened = Terminal(run)
    yield opened
    opened.process.kill()
    opened.process.wait()
    os.close(opened.main)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_closes_the_screen_and_restores_the_terminal(
    number: int, code: int, run: Run, terminal: Terminal
) -> None:
    first = terminal.read_until(b"now: benchmark : Run the benchmarks")
    assert first.startswith(b"\x1b[?1049h\x1b[H\x1b[?25l")  # alternate screen, cursor to the top left, hide the cursor
    run.add_event(FAILED, host="h3")
    run.add_failure("h3", FAILED, "out of memory")
    frame = terminal.read_until(b"out of memory")
    assert b"\x1b[?1049h" not in frame  # the screen is updated in place, not opened again
    terminal.resize(60, 10)
    terminal.read_until(b"more lines")
    terminal.process.send_signal(number)
    rest = terminal.read_to_end()
    assert terminal.process.returncode == code
    assert rest.endswith(b"\x1b[?25h\x1b[?1049l")  # show the cursor, leave the alternate screen
    assert b"Traceback" not in rest
    assert termios.tcgetattr(terminal.main) == terminal.before


def test_terminal_is_restored_while_the_command_is_suspended(terminal: Terminal) -> None:
    terminal.read_until(b"now: ")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.read_until(b"\x1b[?25h\x1b[?1049l")
    os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)  # the terminal is restored before the process is suspended
    terminal.process.send_signal(signal.SIGCONT)
    terminal.read_until(b"\x1b[?1049h\x1b[H\x1b[?25l")
    terminal.read_until(b"now: ")


def test_decision_remains_on_the_terminal_after_the_screen_is_closed(run: Run, terminal: Terminal) -> None:
    terminal.read_until(b"now: ")
    for host in run.names:
        run.add_event("ok", host=host, rc=0)
    run.add_event("end")
    assert rackproof.main(["report", str(run.directory)]) == 2
    rest = terminal.read_to_end()
    assert terminal.process.returncode == 0
    after = rest.rpartition(b"\x1b[?1049l")[2].decode()
    assert "decision: incomplete" in after
    assert "\x1b" not in after
