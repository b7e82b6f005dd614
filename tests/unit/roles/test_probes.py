"""Test the scripts of the roles `nvidia_driver` and `container_toolkit`, which check a host before anything is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT


def load(role: str) -> ModuleType:
    """Return the script probe.py of a role as a module."""
    spec = importlib.util.spec_from_file_location(f"probe_of_{role}", ROOT / f"roles/{role}/files/probe.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only directory in which programs are found, apart from the shell."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


MANAGER, PERSISTENCED = "nv-fabricmanager", "nvidia-persistenced"
NOT_FOUND = "LoadState=not-found\nActiveState=inactive"
STATES = {
    "active": ("LoadState=loaded\nActiveState=active", 0),
    "activating": ("LoadState=loaded\nActiveState=activating", 0),
    "inactive": ("LoadState=loaded\nActiveState=inactive", 1),
    "failed": ("LoadState=loaded\nActiveState=failed", 1),
    "unknown to systemd": (NOT_FOUND, 0),
    "systemd does not answer": ("", 0),
    "no systemctl": (None, 0),
}
"""State of a service -> what `systemctl show` prints (None: there is no such program), and number of problems."""


def driver_problems(
    monkeypatch: pytest.MonkeyPatch, commands: dict[str, str], daemon: str, readable: tuple[str, ...]
) -> list[str]:
    """Return the problems of a host with NVSwitches on which `daemon` is the one that may not run.

    Args:
        commands: process id -> command line.
        daemon: the other daemon needs no process.
        readable: the process ids whose command line this user may read.
    """
    probe = load("nvidia_driver")
    files = {f"/proc/{pid}/cmdline": f"{commands[pid]}\0" for pid in readable}
    monkeypatch.setattr(probe, "read", lambda path: files.get(path, ""))
    monkeypatch.setattr(probe.os, "listdir", lambda _: [*commands, "cpuinfo"])
    found = probe.list_programs()
    if daemon == MANAGER:
        return [text for text, _ in probe.fabric_problems("auto", 4, "580.126.20", found)]
    monkeypatch.setattr(probe, "is_loaded", lambda _: False)
    options = type("Options", (), {"version": "", "modules": "", "fabric_manager": "ignored"})
    return [text for text, _ in probe.problems(options, ["580.126.20"], {"0": "Disabled"}, "", found)]


@pytest.mark.parametrize("daemon", [MANAGER, PERSISTENCED])
@pytest.mark.parametrize("hidden", ["process ids", "command lines"])
@pytest.mark.parametrize("state", STATES)
def test_daemon_whose_process_is_not_visible_is_a_problem_only_if_systemd_says_that_it_does_not_run(
    programs: Path, monkeypatch: pytest.MonkeyPatch, state: str, hidden: str, daemon: str
) -> None:
    """/proc has the option `hidepid`, and the user is not root: only processes of the user are visible."""
    write_program(programs / MANAGER, "echo 'Fabric Manager version is : 580.126.20'")
    output, number = STATES[state]
    if output is not None:
        write_program(programs / "systemctl", f"printf '%s\\n' '{output}'; [ -n '{output}' ]")
    commands = {"4711": "-bash"} if hidden == "process ids" else {"1": "/sbin/init", "900": daemon, "4711": "-bash"}
    problems = driver_problems(monkeypatch, commands, daemon, readable=("4711",))
    assert len(problems) == number
    assert all("start it with `systemctl enable --now nvidia-" in problem for problem in problems)


@pytest.mark.parametrize("daemon", [MANAGER, PERSISTENCED])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("runs", [True, False])
def test_visible_processes_decide_whether_a_daemon_runs(
    programs: Path, monkeypatch: pytest.MonkeyPatch, state: str, runs: bool, daemon: str
) -> None:
    write_program(programs / MANAGER, "echo 'Fabric Manager version is : 580.126.20'")
    output, _ = STATES[state]
    if output is not None:
        write_program(programs / "systemctl", f"printf '%s\\n' '{output}'")
    commands = {"1": "/sbin/init", **({"900": f"/usr/bin/{daemon}"} if runs else {})}
    assert len(driver_problems(monkeypatch, commands, daemon, readable=tuple(commands))) == (not runs)
