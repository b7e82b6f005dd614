"""Test the program that starts and stops the Prometheus of a run. Shell commands stand in for Prometheus."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT

SCRIPT = ROOT / "roles" / "monitoring" / "files" / "prometheus.py"
READY = "Server is ready to receive web requests"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the program as a module that waits only 0.2 s after each signal; after the test, kill the processes it started."""
    spec = importlib.util.spec_from_file_location("run_prometheus", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STOP_S", 0.2)
    popen, started = subprocess.Popen, []

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    yield module
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def server(script: ModuleType, tmp_path: Path) -> int:
    """Start a server that ignores SIGTERM, and return its process id."""
    command = ["sh", "-c", f"trap '' TERM; echo '{READY}'; while :; do sleep 60; done"]
    assert script.main("start", str(tmp_path), *command) == 0
    return int(script.running_pid(tmp_path))


def test_server_that_ignores_sigterm_is_killed(
    script: ModuleType, server: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main("start", str(tmp_path), "another") == 0  # the server is running, so `another` is not started
    assert script.main("stop", str(tmp_path)) == 0
    outcomes = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert outcomes == [{"pid": server, "started": False}, {"pid": server, "stopped": True}]


def test_server_that_keeps_running_after_sigkill_is_an_error(
    script: ModuleType, server: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(script.os, "kill", lambda *_: None)
        assert script.main("stop", str(tmp_path)) == 1
    expected = f"Prometheus does not stop: process {server} is still running 0.2 s after SIGKILL\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo bad configuration; exit 3", "exited with code 3; its log ends: bad configuration"),
        ("exit 0", "exited with code 0; its log is empty"),
        ("echo still loading; sleep 60", "not ready after 0.3 s; its log ends: still loading"),
    ],
)
def test_message_says_why_the_server_does_not_start(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    expected: str,
) -> None:
    monkeypatch.setattr(script, "READY_S", 0.3)
    assert script.main("start", str(tmp_path), "sh", "-c", command) == 1
    assert capsys.readouterr().err == f"Prometheus does not start: {expected}\n"
    assert script.running_pid(tmp_path) == 0


@pytest.mark.parametrize("arguments", [(), ("stop",), ("restart", "."), ("start", "."), ("stop", ".", "sh")])
def test_invalid_arguments_start_and_stop_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    for verb in ("start", "stop"):
        monkeypatch.setattr(script, verb, lambda *_: pytest.fail("must not run"))
    assert script.main(*arguments) == 2
    assert "prometheus.py stop DIRECTORY" in capsys.readouterr().err


def test_program_prints_its_usage_if_the_verb_is_unknown() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "stopp", "."], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "usage:")
