"""The callback plugin that keeps the journal, where Ansible itself plays the end of a playbook for nobody."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.locks import born
from tests.unit.test_progress import play, run_dir, site

__all__ = ["run_dir"]
FAIL: dict[str, Any] = {"ansible.builtin.command": {"argv": ["false"]}}


def playbook(directory: Path, run_dir: Path, name: str, *plays: tuple[str, dict[str, Any]]) -> list[str]:
    """A playbook of this name that knows its run and writes its targets, and then plays these with one task each."""
    command = site(directory, run_dir)
    (begin, _) = yaml.safe_load((directory / "play.yml").read_text())
    file = {"dest": str(directory / f"{run_dir.name}.json"), "content": "[]", "mode": "0644"}
    begin["tasks"].append({"ansible.builtin.copy": file, "delegate_to": "localhost", "run_once": True})
    more = [{"name": title, "hosts": "gpu_hosts", "gather_facts": False, "tasks": [task]} for title, task in plays]
    (directory / name).write_text(yaml.safe_dump([begin, *more]))
    return [*command[:-1], str(directory / name)]


@contextlib.contextmanager
def prometheus(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What the run would take for its Prometheus."""
    (run_dir / "metrics").mkdir()
    with subprocess.Popen(["sleep", "60"]) as server:
        (run_dir / "metrics" / "prometheus.pid").write_text(f"{server.pid} {born(server.pid)}\n")
        try:
            yield server
        finally:
            server.kill()


REPORT = ("Report", {"ansible.builtin.debug": {"msg": "reported by the play"}})


@pytest.mark.parametrize("plays", [("h1 or h2",), ("h1", "h2")], ids=["in one play", "one after the other"])
def test_report_is_written_where_every_host_has_left(tmp_path: Path, run_dir: Path, plays: tuple[str, ...]) -> None:
    """And what is the run's alone ends with it."""
    failing = [(f"Measure {who}", {**FAIL, "when": f"inventory_hostname in '{who}'"}) for who in plays]
    with prometheus(run_dir) as server:
        done = play(playbook(tmp_path, run_dir, "acceptance.yml", *failing, REPORT), tmp_path)
        assert server.poll() is not None
    assert not (tmp_path / f"{run_dir.name}.json").exists()
    assert "reported by the play" not in done.stdout
    assert json.loads((run_dir / "report.json").read_text())["decision"] == "incomplete", done.stdout


@pytest.mark.parametrize("name", ["scaling.yml", "deploy.yml"])
def test_prometheus_of_a_run_ends_with_it_where_every_host_has_left(tmp_path: Path, run_dir: Path, name: str) -> None:
    """What deploy.yml starts is to stay."""
    with prometheus(run_dir) as server:
        play(playbook(tmp_path, run_dir, name, ("Measure", FAIL), REPORT), tmp_path)
        stays = server.poll() is None
    assert stays is (name == "deploy.yml")
    assert (tmp_path / f"{run_dir.name}.json").exists() is stays


def test_check_mode_ends_nothing(tmp_path: Path, run_dir: Path) -> None:
    with prometheus(run_dir) as server:
        play([*playbook(tmp_path, run_dir, "acceptance.yml", ("Measure", FAIL)), "--check"], tmp_path)
        stays = server.poll() is None
    assert stays
