"""Test the guides of CONTRIBUTING.md by following them literally in a copy of the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.fakes import nvml, whole

PACKAGES = ("agent", "collectors", "fleet", "rackproof", "schemas")
PYTEST_OPTIONS = ("-q", "-c", os.devnull, "--rootdir", ".", "--basetemp", "pytest-files")
"""Without `--basetemp`, pytest removes directories of older runs before it ends, which can take minutes."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the code, including its bytecode files, so that Python need not compile it again."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    return tmp_path


def code_blocks(heading: str) -> list[str]:
    """Return the code blocks of a section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)


def add_entry(table: Path, entry: str) -> None:
    """Add lines at the end of the first dictionary in the file."""
    text = table.read_text(encoding="utf-8")
    table.write_text(text.replace("\n}\n", f"\n{entry}}}\n", 1), encoding="utf-8")


CALL_VERBS = (
    "import json, sys; from rackproof.main import main; print([main(words) for words in json.loads(sys.argv[1])])"
)


def call_verbs(checkout: Path, *commands: str) -> tuple[str, str]:
    """Call verbs of rackproof in one process; return their exit codes as text (`[0, 2]`), and their output and standard error."""
    words = json.dumps([command.split() for command in commands])
    done = run_python(checkout, "-c", CALL_VERBS, words)
    output, _, codes = done.stdout.rstrip().rpartition("\n")
    return codes, output + done.stderr


def run_python(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def run(checkout: Path, *arguments: str, exit_code: int = 0, **environment: str) -> str:
    """Run Python in the checkout and return its output, including standard error if `exit_code` is not 0."""
    done = run_python(checkout, *arguments, **environment)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout + done.stderr if exit_code else done.stdout


JUDGE_A_CHANGED_FAN = """
import pathlib, sys
from agent.diagnose.doctor import build_plan, judge_snapshots
from agent.sampling.snapshot import take_snapshot
from fleet.judge.criteria import read_packs
from tests.fakes import whole

root, snapshots = pathlib.Path(sys.argv[1]), []
for phase, speed in (("before", 4200), ("after", 4350)):
    (root / "sys/class/hwmon/hwmon0/fan1_input").write_text(f"{speed}\\n")
    snapshot, gpus = take_snapshot(whole.build_collectors(root), stage="doctor", phase=phase)
    snapshots.append(snapshot)
verdicts = judge_snapshots(build_plan("h1", 8, snapshots[0].at), snapshots, gpus, read_packs([]))
print(len(verdicts) > 1000, [(item.name, item.verdict, item.reason) for item in verdicts if item.verdict != "pass"])
"""
"""Program that runs in the checkout. It judges two snapshots of a healthy host. Only the fan speed differs.

It prints whether there are more than 1000 verdicts, and the verdicts other than `pass`.
"""


def test_new_collector_is_exported_catalogued_and_judged(checkout: Path) -> None:
    module, line, test = code_blocks("A collector")
    (checkout / "collectors/fan.py").write_text(module, encoding="utf-8")
    table = checkout / "collectors/table.py"
    add_entry(table, line)
    anchor = "from collectors.host import"
    table.write_text(table.read_text().replace(anchor, f"from collectors.fan import FanCollector\n{anchor}"))
    shutil.copytree(ROOT / "tests/fakes", checkout / "tests/fakes")
    (checkout / "tests/unit").mkdir()
    (checkout / "tests/unit/test_fan.py").write_text(test, encoding="utf-8")
    run(checkout, "-m", "pytest", *PYTEST_OPTIONS, "tests/unit/test_fan.py")

    host = whole.build_host(checkout / "host")
    library = nvml.build(checkout / "nvml")
    driver = nvml.environment(library, nvml.write(checkout / "scenario", "healthy-h100x8", *whole.NVML))
    text = run(checkout, "-m", "tests.fakes.whole", str(host), "readings", **driver)
    readings = json.loads(text)
    assert readings["fan.speed"]["labels"] == ["chip", "fan"]
    catalogue = checkout / "schemas/readings.json"
    catalogue.write_text(text, encoding="utf-8")
    assert "| `rackproof_fan_speed` | gauge | chip, fan |" in run(
        checkout, "-m", "tests.fakes.whole", str(host), "metrics", **driver
    )
    fan = host / "sys/class/hwmon/hwmon0/fan1_input"
    fan.parent.mkdir(parents=True)
    fan.write_text("4200\n")
    scrape = "import pathlib, sys; from agent.exporter.exporter import registry; from collectors.table import build_collectors; "
    scrape += "from prometheus_client import generate_latest; "
    scrape += "print(generate_latest(registry(build_collectors(root=pathlib.Path(sys.argv[1])))).decode())"
    page = run(checkout, "-c", scrape, str(host), **driver)
    assert 'rackproof_fan_speed{chip="hwmon0",fan="fan1"} 4200.0' in page

    assert run(checkout, "-c", JUDGE_A_CHANGED_FAN, str(host), **driver) == "True []\n"
    del readings["fan.speed"]["varies"]  # without `varies`, a value that changes during the run is a contradiction
    catalogue.write_text(json.dumps(readings), encoding="utf-8")
    contradiction = "[('fan.speed', 'inconclusive', 'changed during the run: 4200, then 4350')]"
    assert run(checkout, "-c", JUDGE_A_CHANGED_FAN, str(host), **driver) == f"True {contradiction}\n"


def test_new_benchmark_runs_and_is_planned(checkout: Path) -> None:
    module, entry = code_blocks("A benchmark")
    (checkout / "agent/benchmarks/compute/sort.py").write_text(module, encoding="utf-8")
    add_entry(checkout / "schemas/benchmarks/hardware.py", entry)
    output = run(checkout, "-m", "agent.benchmarks", "--only", "sort")
    assert re.search(r"^cpu=0 +sort\.rate +\d.* 1/s .*size=65536$", output, re.MULTILINE), output
    list_figures = (
        "from schemas.catalogue import expand; print([item.name for item in expand('benchmark', 'sort', {})])"
    )
    assert run(checkout, "-c", list_figures) == "['sort.rate', 'benchmark.duration']\n"


def test_new_report_format_is_written_and_verified(checkout: Path) -> None:
    module, line, test = code_blocks("A report format")
    (checkout / "fleet/report/host_list.py").write_text(module, encoding="utf-8")
    table = checkout / "fleet/report/formats.py"
    add_entry(table, line)
    anchor = "from fleet.report.html"
    table.write_text(
        table.read_text().replace(anchor, f"from fleet.report.host_list import render_host_list\n{anchor}")
    )
    (checkout / "tests").mkdir()
    for helper in ("__init__.py", "builders.py"):
        shutil.copy(ROOT / "tests" / helper, checkout / "tests")
    (checkout / "tests/test_host_list.py").write_text(test, encoding="utf-8")
    run(checkout, "-m", "pytest", *PYTEST_OPTIONS, "tests/test_host_list.py")

    run_dir, key, signers = checkout / "demo", checkout / "key", checkout / "signers"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    signers.write_text(f"operator {key.with_suffix('.pub').read_text()}", encoding="utf-8")
    simulate = f"simulate {run_dir} --hosts 2 --gpus 1 --profile smoke --readings judged"
    sign, verify = f"sign {run_dir} --key {key}", f"verify {run_dir} --allowed-signers {signers}"
    codes, output = call_verbs(checkout, simulate, f"report {run_dir}", sign, verify)
    assert codes == "[0, 0, 0, 0]", output
    hosts = run_dir / "hosts.txt"
    assert hosts.read_text(encoding="utf-8").startswith("demo: SIMULATED PASS\n")
    hosts.write_text("r01-h01: accepted\n", encoding="utf-8")
    codes, output = call_verbs(checkout, verify, sign)
    assert codes == "[1, 2]", output
    assert "changed: hosts.txt" in output
    assert "hosts.txt: does not match report.json" in output


def test_new_verb_is_in_the_command(checkout: Path) -> None:
    module, line = code_blocks("A verb")
    (checkout / "agent/cli/uptime.py").write_text(module, encoding="utf-8")
    add_entry(checkout / "rackproof/main.py", line)
    assert json.loads(run(checkout, "rackproof", "uptime", "--json"))["uptime_s"] > 0
    assert "uptime" in run(checkout, "rackproof", "--help")


def test_new_criterion_fails_for_its_fault(checkout: Path) -> None:
    """test_faults.py requires a fault for each criterion on readings, so the guides for both are tested together."""
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("images", "measurements"))
    pack = checkout / "fleet/judge/packs/gpu-health.yml"
    pack.write_text(pack.read_text(encoding="utf-8") + code_blocks("A criterion")[0], encoding="utf-8")
    run(checkout, "rackproof", "criteria", "lint", str(pack))
    test = ("-m", "pytest", *PYTEST_OPTIONS, "-n", "0", "tests/unit/collectors/test_faults.py", "-k")
    assert "persistence-mode" in run(checkout, *test, "every_criterion", exit_code=1)
    faults = checkout / "tests/unit/collectors/test_faults.py"
    line = code_blocks("A fault")[0]
    faults.write_text(
        faults.read_text(encoding="utf-8").replace("FAULTS = [\n", f"FAULTS = [\n{line}", 1), encoding="utf-8"
    )
    assert "2 passed" in run(checkout, *test, "every_criterion or persistence-mode-off")


def test_new_role_runs(checkout: Path) -> None:
    for name in ("roles", "playbooks", "inventory"):
        shutil.copytree(ROOT / name, checkout / name)
    shutil.copy(ROOT / "ansible.cfg", checkout)
    role = checkout / "roles/banner"
    for directory in ("meta", "tasks"):
        (role / directory).mkdir(parents=True)
    files = (role / "meta/main.yml", role / "tasks/main.yml", checkout / "playbooks/banner.yml")
    for path, block in zip(files, code_blocks("A role"), strict=True):
        path.write_text(block, encoding="utf-8")
    state = checkout / "state"
    variables = {"rackproof_state_directory": str(state), "rackproof_run_id": "r1", "nvidia_driver_state": "ignored"}
    state.mkdir()
    program = Path(sys.executable).parent / "ansible-playbook"
    options = ("--limit", "local1", "-e", json.dumps(variables))
    play = subprocess.run(
        [program, "-i", "inventory/local/rehearsal.yml", "playbooks/banner.yml", *options],
        cwd=checkout,
        env={
            **os.environ,
            "PWD": str(checkout),
            "ANSIBLE_HOME": str(checkout / "home"),
            "ANSIBLE_CONFIG": str(checkout / "ansible.cfg"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert play.returncode == 0, play.stdout + play.stderr
    assert (state / "banner").read_text(encoding="utf-8") == "Rackproof measures this host in run r1.\n"
