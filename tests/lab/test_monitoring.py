"""What the role `monitoring` gives a Prometheus on the control node: rules and job for one that is there, or one for the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


@dataclass
class Control:
    """A control node that plays one task file of the role, without hosts to reach."""

    directory: Path

    def play(self, part: str, *options: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        inventory = self.directory / "inventory.yml"
        local = {"ansible_connection": "local", "ansible_python_interpreter": str(CONTROL_PYTHON)}
        group = {
            "hosts": {"h1": local, "h2": local},
            "vars": {"rackproof_profile": "rehearsal", "rackproof_run_id": "x"},
        }
        (self.directory / "host_vars").mkdir(exist_ok=True)
        (self.directory / "host_vars" / "localhost.yml").write_text(CONTROL_NODE)
        inventory.write_text(yaml.safe_dump({"all": {"children": {"gpu_hosts": group}}}))
        role = {"ansible.builtin.import_role": {"name": "monitoring", "tasks_from": part}, "name": "Play"}
        play = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [role]}
        (self.directory / "playbooks").mkdir(exist_ok=True)
        (self.directory / "playbooks" / "part.yml").write_text(yaml.safe_dump([play]))
        given = {"rackproof_runs_directory": str(self.directory / "runs"), **variables}
        done = subprocess.run(
            [
                *(Path(sys.executable).parent / "ansible-playbook", "-i", inventory),
                *(self.directory / "playbooks" / "part.yml", "-e", json.dumps(given), *options),
            ],
            env={**os.environ, "ANSIBLE_ROLES_PATH": str(ROOT / "roles"), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture
def control(tmp_path: Path) -> Control:
    (tmp_path / "rackproof.py").symlink_to(ROOT / "rackproof.py")
    (tmp_path / "runs").mkdir()
    return Control(tmp_path)


def changes(done: subprocess.CompletedProcess[str]) -> int:
    return done.stdout.count("\nchanged: ")


def test_an_existing_prometheus_gets_rules_and_job(control: Control, tmp_path: Path) -> None:
    own = tmp_path / "mine.yml"
    criterion = {
        "id": "pcie-replay",
        "name": "gpu.pcie.replays",
        "scope": "gpu",
        "operator": "le",
        "value": 7,
        "delta": True,
    }
    criterion |= {"unit": "1", "action": "reseat", "source": "ours: seven", "basis": "policy"}
    own.write_text(yaml.safe_dump({"schema": "rackproof.criteria/1", "summary": "ours", "criteria": [criterion]}))
    directory = tmp_path / "etc"
    given: dict[str, Any] = {"rackproof_prometheus": "config", "rackproof_prometheus_directory": str(directory)}
    given |= {"rackproof_criteria": [str(own)], "rackproof_runbook": "https://wiki.example/alerts"}
    given |= {"rackproof_prometheus_scrape": {"scheme": "https", "scrape_interval": "30s"}}
    assert changes(control.play("prometheus", "--check", **given)) == 3
    assert not directory.exists()
    assert changes(control.play("prometheus", **given)) == 3
    assert changes(control.play("prometheus", **given)) == 0
    subprocess.run(["promtool", "check", "config", directory / "rackproof.scrape.yml"], check=True)
    subprocess.run(["promtool", "check", "rules", directory / "rackproof.rules.yml"], check=True)
    rules = (directory / "rackproof.rules.yml").read_text()
    assert "increase(rackproof_gpu_pcie_replays_total[1h]) > 7" in rules
    assert "https://wiki.example/alerts#rackproofgpugone" in rules
    job = yaml.safe_load((directory / "rackproof.scrape.yml").read_text())["scrape_configs"][0]
    assert (job["job_name"], job["scheme"], job["scrape_interval"]) == ("rackproof", "https", "30s")
    assert job["file_sd_configs"][0]["files"] == [str(tmp_path / "runs" / "prometheus" / "*.json")]


def test_a_prometheus_is_run_for_the_run(control: Control, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    given = {"rackproof_prometheus": "run", "rackproof_prometheus_listen": address}
    metrics = tmp_path / "runs" / "x" / "metrics"
    try:
        control.play("prometheus", **given)
        prometheus = Prometheus(url=f"http://{address}", log=metrics / "prometheus.log", run=processes.run)
        assert prometheus.query("vector(1)")
        assert changes(control.play("prometheus", **given)) == 0
    finally:
        ended = subprocess.run([sys.executable, SCRIPT, "stop", metrics], capture_output=True, text=True, check=True)
    assert ended.stdout == "ended\n"
    assert (metrics / "data" / "wal").is_dir()


def test_a_prometheus_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "start", tmp_path, "prometheus", "--config.file=/nowhere/prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/nowhere/prometheus.yml" in done.stderr
    stopped = subprocess.run([sys.executable, SCRIPT, "stop", tmp_path], capture_output=True, text=True, check=True)
    assert stopped.stdout == "does not run\n"


def test_verdicts_are_handed_to_node_exporter(control: Control, tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir()
    (tmp_path / "runs" / "x" / "verdicts.prom").write_text("rackproof_report_decision 1\n")
    given = {"rackproof_verdicts_textfile": str(tmp_path / "rackproof.prom")}
    assert changes(control.play("verdicts", **given)) == 1
    assert (tmp_path / "rackproof.prom").read_text() == "rackproof_report_decision 1\n"
    assert changes(control.play("verdicts", **given)) == 0
