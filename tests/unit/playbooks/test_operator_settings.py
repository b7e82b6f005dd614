"""Test that settings of the operator's ansible.cfg do not end the run of healthy hosts, nor a task that may take hours."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ansible_commands import run_ansible

PLAYBOOKS = Path(__file__).parents[3] / "playbooks"
SETTINGS = ("any_errors_fatal", "timeout")
"""Keywords of a play whose defaults are settings of ansible.cfg: `any_errors_fatal` and `task_timeout`."""
PLAYS = [
    (path.name, play) for path in sorted(PLAYBOOKS.glob("*.yml")) for play in yaml.safe_load(path.read_text())
    if "hosts" in play
]  # fmt: skip


@pytest.mark.parametrize(("name", "play"), PLAYS, ids=[f"{name}: {play['name']}" for name, play in PLAYS])
def test_play_states_the_settings_that_a_run_needs(name: str, play: dict[str, Any]) -> None:
    assert [play.get(setting) for setting in SETTINGS] == [False, 0]


def test_host_continues_after_the_failure_of_another_host_whatever_ansible_cfg_says(tmp_path: Path) -> None:
    stated = {setting: PLAYS[0][1][setting] for setting in SETTINGS}
    tasks: list[dict[str, Any]] = [
        {"ansible.builtin.command": {"argv": ["test", "{{ inventory_hostname }}", "=", "h2"]}},
        {"ansible.builtin.command": {"argv": ["sleep", "2"]}},
        {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} continues"}},
    ]
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    play = {"hosts": "all", "gather_facts": False, **stated, "vars": variables, "tasks": tasks}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    (tmp_path / "ansible.cfg").write_text("[defaults]\nany_errors_fatal = True\ntask_timeout = 1\n")
    environment = {"ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg")}
    done = run_ansible("ansible-playbook", "-i", "h1,h2", "play.yml", directory=tmp_path, environment=environment)
    assert re.findall(r"(\w+) continues", done.stdout) == ["h2"], done.stdout + done.stderr
