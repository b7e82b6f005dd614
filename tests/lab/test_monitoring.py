"""Test the role `monitoring`: alert rules and scrape job for an existing Prometheus, a Prometheus that is started for the run,
and verdict metrics for node_exporter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import processes
from tests.lab.lab import CONTROL_NODE, CONTROL_PYTHON
from tests.lab.prometheus import Prometheus, free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "roles" / "monitoring" / "files" / "prometheus.py"


CRITERION = {
    "id": "pcie-replay",
    "replaces": "pcie-replay",
    "name": "gpu.pcie.replays",
    "scope": "gpu",
    "operator": "le",
    "value": 7,
    "delta": True,
    "unit": "1",
    "action": "reseat",
    "source": "ours: seven",
    "basis": "policy",
}


@dataclass
class Control:
    """A control node that runs task files of the role. The hosts of its inventory, h1 and h2, are the control node itself."""

    directory: Path
    address: str = ""
    """Address of the Prometheus that the run starts."""

    @property
    def metrics(self) -> Path:
        return self.directory / "runs" / "x" / "metrics"

    def task_files(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return name of a play -> task file of the role, and variables of the play."""
        variables: dict[str, Any] = {"rackproof_prometheus": "config"}
        variables |= {"rackproof_prometheus_directory": str(self.directory / "etc")}
        variables |= {"rackproof_criteria": [str(self.directory / "mine.yml")]}
        variables |= {"rackproof_runbook": "https://wiki.example/alerts"}
        variables |= {"rackproof_prometheus_scrape": {"scheme": "https", "scrape_interval": "30s"}}
        run = {"rackproof_prometheus": "run", "rackproof_prometheus_listen": self.address}
        verdicts = {"rackproof_verdicts_textfile": str(self.directory / "rackproof.prom")}
        return {"existing": ("prometheus", variables), "run": ("prometheus", run), "verdicts": ("verdicts", verdicts)}

    def play(self, *names: str, options: tuple[str, ...] = ()) -> list[dict[str, int]]:
        """Run these plays in order, and return how many tasks of each play changed something.

        `play("a", "b", "a", "b")` runs the plays a and b twice. The returned list has one dictionary for each time: name of a
        play -> number of its changed tasks.
        """
        inventory = self.directory / "inventory.yml"
        local = {"ansible_connection": "local", "ansible_python_interpreter": str(CONTROL_PYTHON)}
        group = {
            "hosts": {"h1": local, "h2": local},
            "vars": {"rackproof_profile": "rehearsal", "rackproof_run_id": "x"},
        }
        (self.directory / "host_vars").mkdir(exist_ok=True)
        (self.directory / "host_vars" / "localhost.yml").write_text(CONTROL_NODE)
        inventory.write_text(yaml.safe_dump({"all": {"children": {"gpu_hosts": group}}}))
        plays = []
        for name in names:
            task_file, variables = self.task_files()[name]
            role = {"ansible.builtin.import_role": {"name": "monitoring", "tasks_from": task_file}, "name": "Play"}
            role |= {"delegate_to": "localhost", "run_once": True}  # like the plays that use these task files
            play = {"hosts": "gpu_hosts", "gather_facts": False, "vars": variables, "tasks": [role]}
            plays.append({"name": name, **play})
        (self.directory / "playbooks").mkdir(exist_ok=True)
        (self.directory / "playbooks" / "parts.yml").write_text(yaml.safe_dump(plays))
        extra_variables = {"rackproof_runs_directory": str(self.directory / "runs")}
        done = subprocess.run(
            [
                *(Path(sys.executable).parent / "ansible-playbook", "-i", inventory),
                *(self.directory / "playbooks" / "parts.yml", "-e", json.dumps(extra_variables), *options),
            ],
            env={**os.environ, "ANSIBLE_ROLES_PATH": str(ROOT / "roles"), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        _, *plays_output = re.split(r"^PLAY \[(\w+)\]", done.stdout, flags=re.MULTILINE)
        changed = [text.count("\nchanged: ") for text in plays_output[1::2]]
        assert plays_output[::2] == list(names)
        step = len(set(names))
        return [dict(zip(names, changed[first : first + step], strict=False)) for first in range(0, len(names), step)]


@dataclass
class ChangedTasks:
    """Name of a play -> number of its changed tasks: in check mode (`checked`), and in the first and the second run."""

    control: Control
    checked: dict[str, int]
    first: dict[str, int]
    second: dict[str, int]


@pytest.fixture(scope="module")
def changed_tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChangedTasks]:
    """Run the play for the existing Prometheus in check mode, then all plays twice."""
    control = Control(tmp_path_factory.mktemp("monitoring"))
    (control.directory / "rackproof").symlink_to(ROOT / "rackproof")
    (control.directory / "runs" / "x").mkdir(parents=True)
    (control.directory / "runs" / "x" / "verdicts.prom").write_text("rackproof_report_decision 1\n")
    pack = {"schema": "rackproof.criteria/1", "summary": "ours", "criteria": [CRITERION]}
    (control.directory / "mine.yml").write_text(yaml.safe_dump(pack))
    (checked,) = control.play("existing", options=("--check",))
    assert not (control.directory / "etc").exists()
    control.address = f"127.0.0.1:{free_port()}"
    try:
        yield ChangedTasks(control, checked, *control.play(*control.task_files(), *control.task_files()))
    finally:
        subprocess.run([sys.executable, SCRIPT, "stop", control.metrics], capture_output=True, check=True)


def test_existing_prometheus_gets_rules_and_scrape_job(changed_tasks: ChangedTasks) -> None:
    assert (changed_tasks.checked["existing"], changed_tasks.first["existing"], changed_tasks.second["existing"]) == (
        3,
        3,
        0,
    )
    directory = changed_tasks.control.directory / "etc"
    subprocess.run(["promtool", "check", "config", directory / "rackproof.scrape.yml"], check=True)
    subprocess.run(["promtool", "check", "rules", directory / "rackproof.rules.yml"], check=True)
    rules = (directory / "rackproof.rules.yml").read_text()
    assert "increase(rackproof_gpu_pcie_replays_total[1h]) > 7" in rules
    assert "https://wiki.example/alerts#rackproofgpugone" in rules
    job = yaml.safe_load((directory / "rackproof.scrape.yml").read_text())["scrape_configs"][0]
    assert (job["job_name"], job["scheme"], job["scrape_interval"]) == ("rackproof", "https", "30s")
    targets = changed_tasks.control.directory / "runs" / "prometheus" / "*.json"
    assert job["file_sd_configs"][0]["files"] == [str(targets)]


def test_verdicts_are_copied_for_node_exporter(changed_tasks: ChangedTasks) -> None:
    assert (changed_tasks.first["verdicts"], changed_tasks.second["verdicts"]) == (1, 0)
    assert (changed_tasks.control.directory / "rackproof.prom").read_text() == "rackproof_report_decision 1\n"


def test_prometheus_for_the_run_is_started_and_stopped(changed_tasks: ChangedTasks) -> None:
    control = changed_tasks.control
    prometheus = Prometheus(url=f"http://{control.address}", log=control.metrics / "prometheus.log", run=processes.run)
    assert prometheus.query("vector(1)")
    assert (changed_tasks.first["run"] > 0, changed_tasks.second["run"]) == (True, 0)
    ended = subprocess.run(
        [sys.executable, SCRIPT, "stop", control.metrics], capture_output=True, text=True, check=True
    )
    assert json.loads(ended.stdout)["stopped"] is True
    assert (control.metrics / "data" / "wal").is_dir()


def test_reason_is_reported_if_prometheus_does_not_start(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "start", tmp_path, "prometheus", "--config.file=/nowhere/prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/nowhere/prometheus.yml" in done.stderr
    stopped = subprocess.run([sys.executable, SCRIPT, "stop", tmp_path], capture_output=True, text=True, check=True)
    assert json.loads(stopped.stdout) == {"pid": 0, "stopped": False}
