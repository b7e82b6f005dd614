"""The results of modules that run on a host must not decide what the control node reads, writes or runs.

test_collection runs the playbooks on a host whose results contain facts with the names of Rackproof's variables.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from schemas.documents import CONFIDENTIAL, MAX_BYTES, part
from tests import ROOT
from tests.lab.lab import CONTROL_PYTHON

HOSTILE_PYTHON = """#!/usr/bin/python3 -IS
import json, pathlib, subprocess, sys
done = subprocess.run(["{python}", *sys.argv[1:]], stdin=sys.stdin, capture_output=True)
output = done.stdout
try:
    result = json.loads(output)
    result.setdefault("ansible_facts", {{}}).update(json.loads(pathlib.Path("{facts}").read_text()))
    output = json.dumps(result).encode()
except ValueError:
    pass
sys.stdout.buffer.write(output)
sys.stderr.buffer.write(done.stderr)
sys.exit(done.returncode)
"""
"""Program that a hostile host has in place of Python: it runs each module, and adds facts to the result of the module."""
VARIABLE = re.compile(
    r"(?<![\w-])(_?(?:rackproof|nvidia_driver|container_toolkit|agent|gang|monitoring|notify|plan|revalidate)_[a-z_]+)"
)


def variables_of_the_playbooks() -> set[str]:
    """Return every name in the playbooks and roles that may be a variable, internal ones included."""
    files = [*(ROOT / "playbooks").glob("*.yml"), *(ROOT / "roles").rglob("*.yml"), *(ROOT / "roles").rglob("*.j2")]
    return {name for path in files for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}


def hostile_python(directory: Path, value: str) -> Path:
    """Write HOSTILE_PYTHON, and return its path.

    For each variable, the program adds a fact with the name of the variable and the value `value`.
    """
    facts = dict.fromkeys(sorted(variables_of_the_playbooks()), value)
    assert len(facts) > 100
    (directory / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    python = directory / "python"
    python.write_text(HOSTILE_PYTHON.format(python=CONTROL_PYTHON, facts=directory / "facts.json"), encoding="utf-8")
    python.chmod(0o755)
    return python


def test_checkout_does_not_inject_facts_as_variables() -> None:
    assert "\ninject_facts_as_vars = False\n" in (ROOT / "ansible.cfg").read_text(encoding="utf-8")


def test_size_limit_of_fetching_a_record_equals_the_size_limit_of_reading_it() -> None:
    """The action plugin `fetch_record` repeats the number MAX_BYTES of `schemas/documents.py`."""
    action = (ROOT / "playbooks" / "action_plugins" / "fetch_record.py").read_text(encoding="utf-8")
    assert f"\nMAX_BYTES = {MAX_BYTES:_}\n" in action


ROLES = yaml.safe_load((ROOT / "roles" / "plan" / "tasks" / "bind.yml").read_text(encoding="utf-8"))[0]["loop"]
"""Roles whose `tasks/bind.yml` the role `plan` runs. Each of these files sets the variables of its role as facts with `set_fact`.

A module on a host can return facts with the same names, but they do not replace facts that `set_fact` has set.
"""


def test_every_role_with_defaults_except_schedule_sets_its_variables_as_facts() -> None:
    """The role `schedule` runs only on the control node, so no other host can return facts to it."""
    roles = {path.parts[-3] for path in (ROOT / "roles").glob("*/defaults/main.yml")}
    assert roles - set(ROLES) == {"schedule"}


@pytest.mark.parametrize("role", ROLES)
def test_task_that_sets_a_secret_as_a_fact_prints_nothing(role: str) -> None:
    secrets = {name for name, item in part("inventory")["properties"].items() if item.get(CONFIDENTIAL)}
    assert len(secrets) == 4
    (task,) = yaml.safe_load((ROOT / "roles" / role / "tasks" / "bind.yml").read_text(encoding="utf-8"))
    assert task.get("no_log", False) == bool(secrets & task["ansible.builtin.set_fact"].keys())


@pytest.mark.parametrize("role", ROLES)
def test_every_default_of_a_role_is_set_as_a_fact(role: str) -> None:
    defaults = yaml.safe_load((ROOT / "roles" / role / "defaults" / "main.yml").read_text(encoding="utf-8"))
    (task,) = yaml.safe_load((ROOT / "roles" / role / "tasks" / "bind.yml").read_text(encoding="utf-8"))
    facts = task["ansible.builtin.set_fact"]
    assert [name for name in defaults if facts.get(name) != f"{{{{ {name} }}}}"] == []
