"""Test the scripts of the roles `nvidia_driver` and `container_toolkit`, which check a host before anything is installed."""

from __future__ import annotations

import importlib.util
import json
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
    """Return the problems with `daemon` that the probe reports on a host with NVSwitches.

    Args:
        commands: process id -> command line.
        daemon: MANAGER or PERSISTENCED. The other daemon is not checked.
        readable: the process ids whose command line this user may read.
    """
    probe = load("nvidia_driver")
    files = {f"/proc/{pid}/cmdline": f"{commands[pid]}\0" for pid in readable}
    monkeypatch.setattr(probe, "read", lambda path: files.get(path, ""))
    monkeypatch.setattr(probe.os, "listdir", lambda _: [*commands, "cpuinfo"])
    result = probe.list_programs()
    if daemon == MANAGER:
        return [text for text, _ in probe.fabric_problems("auto", 4, "580.126.20", result)]
    monkeypatch.setattr(probe, "is_loaded", lambda _: False)
    options = type("Options", (), {"version": "", "modules": "", "fabric_manager": "ignored"})
    return [text for text, _ in probe.problems(options, ["580.126.20"], {"0": "Disabled"}, "", result)]


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


@pytest.mark.parametrize(
    ("is_loaded", "has_root", "is_container"), [(True, True, True), (True, False, False), (False, True, False)]
)
@pytest.mark.usefixtures("programs")
def test_driver_in_a_container_is_not_installed_a_second_time(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool, has_root: bool, is_container: bool
) -> None:
    """NVIDIA's GPU operator loads the kernel module from a container, so the host has no nvidia-smi."""
    probe = load("nvidia_driver")
    monkeypatch.setattr(probe, "is_loaded", lambda module: is_loaded and module == "nvidia")
    monkeypatch.setattr(probe.os.path, "isdir", lambda path: has_root and path.startswith("/run/nvidia/driver"))
    versions, _, error = probe.query_driver()
    options = type("Options", (), {"version": "580", "modules": "open", "fabric_manager": "ignored"})
    ((text, action),) = probe.driver_problems(options, versions, error)
    assert "found: nvidia-smi is not installed; " in text
    assert ("GPU operator" in text, "nvidia_driver_state: installed" in text) == (is_container, not is_container)
    assert action == (probe.NOTHING if is_container else probe.REBOOT)


REAL_DOCKER = """case $1 in
--version) echo 'Docker version 27.5.1, build 9f9e405' ;;
info) echo '{"nvidia":{},"runc":{}}' ;;
esac"""
PODMAN = """case $1 in
--version) echo "${0##*/} version 4.9.3" ;;
info) echo 'Error: template: info: field Runtimes not found' >&2; exit 125 ;;
esac"""
EMULATION = "echo 'Emulate Docker CLI using podman. Create /etc/containers/nodocker to quiet msg.' >&2"


def install_runtimes(programs: Path, kind: str) -> None:
    """Install what `kind` names: docker, podman, both, or podman with a link or script `docker` that runs it."""
    if kind != "docker":
        write_program(programs / "podman", PODMAN)
    if kind.startswith("docker"):
        write_program(programs / "docker", REAL_DOCKER)
    elif kind == "link":
        (programs / "docker").symlink_to("podman")
    elif kind == "link to podman-remote":
        (programs / "podman").rename(programs / "podman-remote")
        (programs / "docker").symlink_to("podman-remote")
    elif kind.startswith("script"):
        message = EMULATION if kind == "script with a message" else ":"
        write_program(programs / "docker", f'{message}\nexec {programs}/podman "$@"')


@pytest.mark.parametrize("wanted", ["auto", "docker", "podman"])
@pytest.mark.parametrize(
    ("kind", "automatic", "chosen"),
    [
        ("docker", "docker", "docker"),
        ("docker and podman", "docker", "docker"),
        ("only podman", "podman", "docker"),
        ("link", "podman", "podman"),
        ("link to podman-remote", "podman", "podman"),
        ("script with a message", "podman", "podman"),
        ("script without a message", "podman", "podman"),
    ],
)
def test_docker_that_is_podman_is_checked_as_podman(
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    automatic: str,
    chosen: str,
    wanted: str,
) -> None:
    """The probe checks `automatic` if the inventory says auto, and `chosen` if it says docker."""
    install_runtimes(programs, kind)
    write_program(programs / "nvidia-ctk", "echo NVIDIA Container Toolkit CLI version 1.18.1")
    probe = load("container_toolkit")
    monkeypatch.setattr(probe, "cdi_problem", str)
    monkeypatch.setattr(probe.sys, "argv", ["probe.py", f"--runtime={wanted}"])
    code = probe.main()
    runtime = {"auto": automatic, "docker": chosen, "podman": "podman"}[wanted]
    output = capsys.readouterr()
    facts = json.loads(output.out)
    has_problem = runtime == "docker" and not (programs / "docker").exists()
    assert (facts["runtime"], facts["containers"]) == (runtime, None if has_problem else 0)
    assert code == has_problem, output.err


def test_podman_behind_a_failing_script_is_recognized(programs: Path) -> None:
    """With a broken configuration, podman fails even for `--version`. The script prints its message first."""
    write_program(programs / "docker", f"{EMULATION}\nexit 125")
    assert load("container_toolkit").is_podman("docker")
