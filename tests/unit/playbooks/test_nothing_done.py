"""Test that a playbook that did nothing, or that would ignore a part of `-e`, exits with 64.

The operator could take exit code 0 for an acceptance.

The exit code remains 0 for a playbook that ran tasks (test_inventory_forms) and with `--list-tasks`
(tests/unit/roles/test_roles.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.ansible_commands import run_ansible
from tests.lab.lab import CONTROL_SHELL

PLAYBOOKS = ROOT / "playbooks"
ENVIRONMENT = {
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_EXECUTABLE": str(CONTROL_SHELL),  # with this shell, local modules run in half the time
}


def inventory(tmp_path: Path, group: str = "gpu_hosts") -> Path:
    """Write an inventory with the host h1 in `group`, and the hosts w1 and localhost in the group `web`."""
    local = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "rackproof_profile": "rehearsal",
        "rackproof_gang": "none",
        "rackproof_runs_directory": str(tmp_path / "runs"),
        "rackproof_prefix": str(tmp_path / "agent"),
        "rackproof_state_directory": str(tmp_path / "state"),
    }
    groups = {group: {"hosts": {"h1": None}, "vars": local}, "web": {"hosts": {"w1": None, "localhost": None}}}
    path = tmp_path / "hosts.yml"
    path.write_text(yaml.safe_dump(groups))
    return path


def play(tmp_path: Path, playbook: str, *options: str, group: str = "gpu_hosts") -> subprocess.CompletedProcess[str]:
    """Run a playbook on the inventory of `tmp_path`."""
    words = ("-i", inventory(tmp_path, group), PLAYBOOKS / f"{playbook}.yml", *options)
    return run_ansible("ansible-playbook", *words, directory=ROOT, environment=ENVIRONMENT)


@pytest.mark.parametrize(
    ("playbook", "options", "message"),
    [
        ("gang", ["--tags", "install"], "nothing was done: --tags install selects no task of this playbook"),
        ("acceptance", ["--limit", "localhost"], "no task ran on a host of the group gpu_hosts with --limit localhost"),
        ("stop", ["--limit", "w1"], "no task ran on a host of the group gpu_hosts with --limit w1"),
        (
            "acceptance",
            ["--skip-tags", "install,configure,run,report"],
            "no task ran on a host of the group gpu_hosts with --skip-tags configure,install,report,run: correct",
        ),
        ("burnin", ["--start-at-task", "no such task"], "no task ran on a host of the group gpu_hosts: correct"),
    ],
)
def test_playbook_that_did_nothing_exits_with_64(
    tmp_path: Path, playbook: str, options: list[str], message: str
) -> None:
    done = play(tmp_path, playbook, *options)
    assert done.returncode == 64, done.stdout + done.stderr
    assert message in " ".join((done.stdout + done.stderr).split())


def test_inventory_without_the_group_gpu_hosts_exits_with_64(tmp_path: Path) -> None:
    assert play(tmp_path, "acceptance", group="gpus").returncode == 64


def test_old_ansible_is_refused_before_the_run_directory_is_created(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import ansible.release; ansible.release.__version__ = '2.18.9'\n")
    command = [
        Path(sys.executable).parent / "ansible-playbook",
        "-i",
        inventory(tmp_path),
        PLAYBOOKS / "acceptance.yml",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ANSIBLE_HOME": str(tmp_path / "ansible")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 64, done.stdout + done.stderr
    message = " ".join(done.stderr.split())
    assert "ansible-core 2.18.9 of " in message
    assert "is too old for Rackproof, which needs 2.19 or newer: activate the virtual environment" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("strategy", ["free", "ansible.builtin.host_pinned"])
def test_strategy_of_ansible_that_runs_a_task_for_each_host_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("ANSIBLE_STRATEGY", strategy)
    done = play(tmp_path, "acceptance")
    assert done.returncode == 64, done.stdout + done.stderr
    message = " ".join((done.stdout + done.stderr).split())
    assert f"cannot run with Ansible's strategy {strategy}: all hosts" in message
    assert "ANSIBLE_STRATEGY=linear" in message
    assert not (tmp_path / "runs").exists()


IGNORED = [
    ("rackproof_profile: smoke", "rackproof_profile: smoke"),
    ("rackproof_purchase_order = 4711", "rackproof_purchase_order = 4711"),
    ("rackproof_purchase_order= 4711", "4711"),
    ("rackproof_purchase_order =4711", "rackproof_purchase_order =4711"),
    ("rackproof_site=Oslo, hall 2", "hall 2"),
    ("rackproof_reason='replaced GPU 3' of node3", "of node3"),
    ("rackproof_take_over", "rackproof_take_over"),
]
"""Values of `-e`, and the part of each that Ansible assigns to no variable."""
NAMES = sorted(path.stem for path in PLAYBOOKS.glob("*.yml"))
assert len(NAMES) >= len(IGNORED), (
    "each test tries one value with one playbook, so there must be a playbook for each value"
)


@pytest.mark.parametrize(
    ("name", "text", "unassigned"), [(name, *ignored) for name, ignored in zip(NAMES, cycle(IGNORED), strict=False)]
)
def test_every_playbook_refuses_option_e_with_a_part_that_ansible_ignores(
    tmp_path: Path, name: str, text: str, unassigned: str
) -> None:
    done = play(tmp_path, name, "-e", "rackproof_run_id=r1", "-e", text)
    assert done.returncode == 64, done.stdout + done.stderr
    message = " ".join(done.stderr.split())
    assert f"-e assigns `{unassigned}` to no variable" in message
    assert """-e "rackproof_site='Oslo, hall 2'", or write JSON: -e '{"rackproof_site": "Oslo, hall 2"}'""" in message
    assert "TASK" not in done.stdout
    assert not (tmp_path / "runs").exists()


def test_playbook_that_imports_one_of_rackproof_refuses_option_e_with_an_ignored_part(tmp_path: Path) -> None:
    (tmp_path / "own.yml").write_text(f"- import_playbook: {ROOT}/playbooks/acceptance.yml\n")
    done = play(tmp_path, str(tmp_path / "own"), "-e", "rackproof_operator=Ada Lovelace")
    assert done.returncode == 64, done.stdout + done.stderr
    assert "-e assigns `Lovelace` to no variable" in " ".join(done.stderr.split())


def test_extra_variable_in_quotes_json_or_a_file_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "order.yml").write_text("rackproof_purchase_order: PO 4711, part 2\n")
    texts = ("rackproof_site='Oslo, hall 2'", '{"rackproof_operator": "Ada Lovelace"}', f"@{tmp_path}/order.yml")
    done = play(tmp_path, "drivers", "-e", "rackproof_run_id=r1", *(word for text in texts for word in ("-e", text)))
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((tmp_path / "runs/r1/plan.json").read_text())
    planned = (plan["site"], plan["operator"], plan["purchase_order"])
    assert planned == ("Oslo, hall 2", "Ada Lovelace", "PO 4711, part 2")


def test_removal_of_a_schedule_needs_root_only_if_the_schedule_exists(tmp_path: Path) -> None:
    """Every task with `become` fails, because the program `/nonexistent` does not exist."""
    directories = {"_schedule_units": str(tmp_path), "_schedule_crontabs": str(tmp_path), "_schedule_become": True}
    options = ["-e", json.dumps({**directories, "ansible_become_user": "nobody", "ansible_become_exe": "/nonexistent"})]
    done = play(tmp_path, "schedule", "-e", "rackproof_schedule_state=absent", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "rackproof-revalidate-hosts").touch()
    done = play(tmp_path, "schedule", "-e", "rackproof_schedule_state=absent", *options)
    assert done.returncode == 2
    assert "/nonexistent" in done.stdout + done.stderr


def check_refusal(done: subprocess.CompletedProcess[str], runs: Path) -> None:
    """Check that a playbook refused to judge the run `r1`, and did not create `runs`, the directory of all runs."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"there is no run {runs}/r1 to judge" in " ".join(done.stdout.split())
    assert not runs.exists()


def test_report_on_a_run_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """tests/lab/test_roles.py runs report.yml for a run that exists."""
    check_refusal(play(tmp_path, "report", "-e", "rackproof_run_id=r1"), tmp_path / "runs")


def test_tag_report_judges_only_a_run_that_exists(tmp_path: Path) -> None:
    options = ("--tags", "report", "-e", "rackproof_run_id=r1")
    check_refusal(play(tmp_path, "acceptance", *options), tmp_path / "runs")
    plan = [sys.executable, ROOT / "rackproof", "plan", "-i", tmp_path / "hosts.yml", "--run-dir", tmp_path / "runs/r1"]
    subprocess.run(plan, check=True, capture_output=True)
    done = play(tmp_path, "acceptance", *options, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
