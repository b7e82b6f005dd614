"""`rackproof watch` beside a real playbook over SSH: three lab hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas import documents
from tests.lab.kill_points import ROOT, Attempt, Site
from tests.lab.lab import Lab

HOSTS = ("node1", "node2", "node3")
MEASURE_S = 4.0
TASK = "benchmark : Wait for the benchmarks"


@dataclass(frozen=True)
class Watched:
    """A run that was watched from the moment on at which hosts were measured."""

    directory: Path
    playbook: str
    views: list[dict[str, Any]]
    lines: list[str]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watch")
    (directory / "runs").mkdir()
    with Lab(directory / "lab", hosts=len(HOSTS)) as lab, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACKPROOF_HEARTBEAT", "2")
        site = Site(lab=lab, runs=directory / "runs")
        attempt = site.start("r1", seconds=MEASURE_S)
        watchers = watch(attempt, lab, site.runs / "r1")
        output = attempt.end()
        for watcher in watchers:
            assert watcher.wait(20) == 0
        views, lines = ((lab.directory / name).read_text().splitlines() for name in ("views", "lines"))
        print(output[-3000:], *lines, sep="\n")
        yield Watched(site.runs / "r1", output, [json.loads(view) for view in views], lines)


def watch(attempt: Attempt, lab: Lab, run: Path) -> list[subprocess.Popen[str]]:
    """One that tells a program, one that tells a log; into files, since nobody reads while they tell."""
    assert attempt.reached("preflight : Check that the host can be measured", 1.0), attempt.lines[-20:]
    command = [sys.executable, str(ROOT / "rackproof.py"), "watch", str(run), "--every=0.5"]
    found = []
    for name, *options in (("views", "--json"), ("lines", "--every=1", "--no-judge", "--no-ask")):
        with (lab.directory / name).open("w") as file:
            found.append(lab.popen([*command, *options], stdout=file))
    return found


def cells(view: dict[str, Any], stage: str) -> dict[str, dict[str, Any]]:
    return {host["name"]: host["cells"][stage] for host in view["hosts"]}


def test_stages_are_seen_to_run_and_then_the_decision(watched: Watched) -> None:
    for stage in ("prepare", "inspect", "benchmark", "gang"):
        states = [{cell["state"] for cell in cells(view, stage).values()} for view in watched.views]
        assert {"running"} in states, stage
        assert states[-1] == {"done"}, stage
    assert [view["decision"] for view in watched.views][-1] == "accepted"
    assert not any(view["decision"] for view in watched.views if view["carried"])


def test_exporters_tell_how_far_a_stage_is_and_how_long_it_has_left(watched: Watched) -> None:
    measured = [host for view in watched.views if view["task"] == TASK for host in view["hosts"]]
    assert {"stress"} <= {host["doing"] for host in measured}
    left = [host["left_s"] for host in measured if host["left_s"] is not None]
    assert left
    assert all(0 < seconds <= 90 for seconds in left)
    progress = [host["cells"]["benchmark"]["progress"] for host in measured]
    assert all(share is None or 0 <= share <= 1 for share in progress)
    assert any(share is not None for share in progress)


def test_log_has_a_line_for_each_change(watched: Watched) -> None:
    said = [line.split(" ", 1)[1] for line in watched.lines]
    assert "run r1: 3 hosts of rack1, profile tiny4, REHEARSAL" in said
    for host in HOSTS:  # one line for several where they are seen at once
        running = [place for place, line in enumerate(said) if host in line and line.endswith(" benchmark: running")]
        assert len(running) == 1
        assert running[0] < said.index("decision: accepted")
    assert not [line for line in watched.lines if "\x1b" in line]


def test_playbook_tells_what_it_waits_for(watched: Watched) -> None:
    assert "benchmark: node1, node2, node3 measure now, for at most 1 min 30 s each" in watched.playbook
    assert "benchmark: 0 of 3 hosts done, node1 " in watched.playbook
    assert "no progress is told any more" not in watched.playbook


def test_every_event_is_as_the_schema_says(watched: Watched) -> None:
    events = [json.loads(line) for line in (watched.directory / "progress.jsonl").read_text().splitlines()]
    for event in events:
        documents.validate(event, "progress", source="progress.jsonl")
    assert (events[0]["what"], events[-1]["what"]) == ("start", "end")
    waits = [event["stage"] for event in events if event["what"] == "task" and "stage" in event]
    assert list(dict.fromkeys(waits)) == ["benchmark", "gang"]
    assert [event for event in events if event["what"] == "targets"]
