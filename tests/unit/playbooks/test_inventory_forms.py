"""Test which inventories the playbooks accept: those with templates, variables of other software, or a host named localhost.

An inventory with a misspelt variable of Rackproof is refused.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT
from tests.ansible_commands import run_ansible
from tests.unit.playbooks.test_nothing_done import ENVIRONMENT


def run_drivers_playbook(
    tmp_path: Path, hosts: dict[str, Any], *options: str, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Run drivers.yml for the run `r1`.

    No host has `nvidia_driver_state: installed`, so the playbook only checks the inventory and writes the plan.
    """
    common = {
        "rackproof_profile": "rehearsal",
        "rackproof_gang": "none",
        "rackproof_runs_directory": str(tmp_path),
        "rackproof_run_id": "r1",
        **variables,
    }
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts, "vars": common}}))
    words = ("-i", inventory, ROOT / "playbooks" / "drivers.yml", *options)
    return run_ansible("ansible-playbook", *words, directory=ROOT, environment=ENVIRONMENT)


def planned_hosts(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Return name -> address and rack of each planned host."""
    document = json.loads((tmp_path / "r1" / "plan.json").read_text())
    return {host["name"]: (host["address"], host["rack"]) for host in document["hosts"]}


def test_templates_and_foreign_variables_and_a_host_localhost_are_accepted(tmp_path: Path) -> None:
    done = run_drivers_playbook(
        tmp_path,
        {
            **{
                name: {"number": number, "ansible_host": "10.0.0.{{ number }}"} for name, number in (("a", 1), ("b", 2))
            },
            "localhost": {"ansible_user": "nobody-here", "rackproof_rack": 12},
        },
        rackproof_rack="r{{ number }}",
        nvidia_driver_branch=580,
        nvidia_driver_skip_reboot="{{ not_defined_here }}",
        container_toolkit_image="{{ not_defined_either }}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert planned_hosts(tmp_path) == {
        "a": ("10.0.0.1", "r1"),
        "b": ("10.0.0.2", "r2"),
        "localhost": ("localhost", "12"),
    }


def test_misspelt_variable_is_refused(tmp_path: Path) -> None:
    """The playbook passes only the name of this variable to `rackproof plan`, not its value."""
    done = run_drivers_playbook(tmp_path, {"a": None}, rackprof_rack="x")
    assert done.returncode == 2
    assert "unknown variable rackprof_rack (did you mean" in " ".join(done.stdout.split() + done.stderr.split())
