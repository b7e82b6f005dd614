"""The results of modules that run on a host must not decide what the control node reads, writes or runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from schemas.documents import MAX_BYTES
from tests import ROOT
from tests.fakes import bmc
from tests.lab.kill_points import profile_without_figures
from tests.lab.lab import CONTROL_PYTHON, CONTROL_SHELL
from tests.lab.prometheus import free_port

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
CANARIES = (bmc.USER.encode(), bmc.PASSWORD.encode())
"""Account of the BMC. No output and no file but the inventory may contain these words."""
VARIABLE = re.compile(
    r"(?<![\w-])(_?(?:rackproof|nvidia_driver|container_toolkit|agent|gang|monitoring|notify|plan|revalidate)_[a-z_]+)"
)


def variables_of_the_playbooks() -> set[str]:
    """Return every name in the playbooks and roles that may be a variable, internal ones included."""
    files = [*(ROOT / "playbooks").glob("*.yml"), *(ROOT / "roles").rglob("*.yml"), *(ROOT / "roles").rglob("*.j2")]
    return {name for path in files for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}


@pytest.fixture
def bait(tmp_path: Path) -> Path:
    """Return the directory to which the facts of the hostile host point. Nothing may be written or removed there."""
    directory = tmp_path / "bait"
    directory.mkdir()
    (directory / "file").write_text("kept", encoding="utf-8")
    return directory


@pytest.fixture
def service(tmp_path: Path) -> Iterator[bmc.Service]:
    """Serve a simulated BMC of the host."""
    with bmc.serve(bmc.Service(bmc.old_schema()), bmc.make_certificate(tmp_path)) as served:
        yield served


@pytest.fixture
def inventory(tmp_path: Path, bait: Path, service: bmc.Service) -> Path:
    """Return an inventory whose only host has a Python that adds facts to every module result."""
    facts = dict.fromkeys(sorted(variables_of_the_playbooks()), str(bait / "file"))
    assert len(facts) > 100
    (tmp_path / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(HOSTILE_PYTHON.format(python=CONTROL_PYTHON, facts=tmp_path / "facts.json"), encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(profile_without_figures()), encoding="utf-8")
    variables = {
        "ansible_connection": "local",
        "ansible_host": "127.0.0.1",
        "ansible_python_interpreter": str(python),
        "rackproof_profile": str(tmp_path / "tiny.yml"),
        "rackproof_runs_directory": str(tmp_path / "runs"),
        "rackproof_prefix": str(tmp_path / "agent"),
        "rackproof_state_directory": str(tmp_path / "state"),
        "rackproof_python": sys.executable,
        "rackproof_system_torch": True,
        "rackproof_gang": "none",
        "rackproof_exporter_service": False,
        "rackproof_exporter_port": free_port(),
        "rackproof_minimum_free_bytes": 100_000_000,
        "nvidia_driver_state": "ignored",
        "rackproof_bmc_address": f"127.0.0.1:{service.port}",
        "rackproof_bmc_user": bmc.USER,
        "rackproof_bmc_password": "{{ vault_of_the_operator }}",
        "rackproof_bmc_ca": str(tmp_path / "127.0.0.1.pem"),
        "vault_of_the_operator": bmc.PASSWORD,
    }
    path = tmp_path / "inventory.yml"
    path.write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"local1": variables}}}), encoding="utf-8")
    return path


def play(directory: Path, inventory: Path, playbook: str, *options: str, config: str = "") -> str:
    """Run a playbook with the roles and plugins of the checkout, and `config` in ansible.cfg. Return the output."""
    text = (
        f"[defaults]\nroles_path = {ROOT}/roles\ncallback_plugins = {ROOT}/playbooks/callback_plugins\n"
        f"action_plugins = {ROOT}/playbooks/action_plugins\n{config}"
    )
    (directory / "ansible.cfg").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", inventory, ROOT / "playbooks" / playbook, *options],
        cwd=directory,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(directory / "ansible.cfg"),
            "ANSIBLE_HOME": str(directory / "home"),
            "ANSIBLE_PIPELINING": "1",  # as in the ansible.cfg of the checkout
            "ANSIBLE_EXECUTABLE": str(CONTROL_SHELL),  # with it, local modules run in half the time
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stdout + done.stderr


def test_facts_of_a_hostile_host_replace_no_variable(
    tmp_path: Path, inventory: Path, bait: Path, service: bmc.Service
) -> None:
    """The account of the host's BMC is sent to no other address, and is in no output and no file but the inventory.

    In this test facts become variables. This is Ansible's default, which applies to the collection; the ansible.cfg of the
    checkout turns it off. tests/lab/test_hostile_host.py tests the setting of the checkout over SSH, with more facts.
    """
    output = play(
        tmp_path,
        inventory,
        "acceptance.yml",
        "-vvv",
        "-e",
        "rackproof_run_id=r1",
        config="inject_facts_as_vars = True\n",
    )
    assert "FINAL ACCEPTANCE: REHEARSAL PASS" in output, output[-4000:]
    assert [path.name for path in bait.iterdir()] == ["file"]
    record = json.loads((tmp_path / "runs" / "r1" / "bmcs" / "local1.json").read_text(encoding="utf-8"))
    moments = [(taken["stage"], taken["phase"], len(taken["metrics"]) > 10) for taken in record["snapshots"]]
    assert moments == [("preflight", "before", True), ("benchmark", "after", True)]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != inventory]
    assert [path for path in files if any(canary in path.read_bytes() for canary in CANARIES)] == []
    assert [canary for canary in CANARIES if canary.decode() in output] == []
    assert (bait / "file").read_text(encoding="utf-8") == "kept"


def test_checkout_does_not_inject_facts_as_variables() -> None:
    assert "\ninject_facts_as_vars = False\n" in (ROOT / "ansible.cfg").read_text(encoding="utf-8")


def test_cached_fact_with_the_name_of_a_variable_is_refused(tmp_path: Path, inventory: Path) -> None:
    """A fact cache keeps what a hostile host returned in an earlier run."""
    config = f"inject_facts_as_vars = False\nfact_caching = jsonfile\nfact_caching_connection = {tmp_path / 'cache'}\n"
    play(tmp_path, inventory, "deploy.yml", "--tags", "run", "-e", "rackproof_run_id=r1", config=config)
    output = play(tmp_path, inventory, "acceptance.yml", "-e", "rackproof_run_id=r2", config=config)
    message = " ".join(output.split())
    assert "the fact cache of local1 has" in message, output[-4000:]
    assert "rackproof_notify_sendmail" in message
    assert not (tmp_path / "runs" / "r2").exists()


def test_largest_record_that_is_fetched_is_the_largest_that_is_read() -> None:
    action = (ROOT / "playbooks" / "action_plugins" / "fetch_record.py").read_text(encoding="utf-8")
    assert f"\nMAX_BYTES = {MAX_BYTES:_}\n" in action


ROLES = yaml.safe_load((ROOT / "roles" / "plan" / "tasks" / "bind.yml").read_text(encoding="utf-8"))[0]["loop"]
"""Roles whose variables the role `plan` sets as facts. The result of a module on a host cannot replace these facts."""


def test_every_role_with_defaults_sets_its_variables_as_facts() -> None:
    """Only the role `schedule` sets none, because it connects to no host."""
    roles = {path.parts[-3] for path in (ROOT / "roles").glob("*/defaults/main.yml")}
    assert roles - set(ROLES) == {"schedule"}


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_set_as_a_fact(role: str) -> None:
    defaults = yaml.safe_load((ROOT / "roles" / role / "defaults" / "main.yml").read_text(encoding="utf-8"))
    (task,) = yaml.safe_load((ROOT / "roles" / role / "tasks" / "bind.yml").read_text(encoding="utf-8"))
    facts = task["ansible.builtin.set_fact"]
    assert [name for name in defaults if facts.get(name) != f"{{{{ {name} }}}}"] == []
