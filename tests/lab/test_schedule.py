"""Test playbooks/schedule.yml on a control node with systemd: install a timer, replace it with a cron job, install a timer that
uses ansible-pull, and remove everything.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.lab.lab import CONTROL_NODE, MODULE_PYTHON
from tests.lab.systemd_host import SystemdHost

ROOT = Path(__file__).parents[2]
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"
TIMER, SERVICE = "rackproof-revalidate-rack1.timer", "rackproof-revalidate-rack1.service"
RACK = {"rackproof_revalidate_profile": "revalidate-rehearsal", "rackproof_gang": "none"}
INVENTORY = {"all": {"children": {"gpu_hosts": {"hosts": {"elsewhere": {}}, "vars": RACK}}}}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdHost]:
    with SystemdHost(tmp_path_factory.mktemp("schedule")) as new_host:
        for path, text in (("rack1.yml", yaml.safe_dump(INVENTORY)), ("host_vars/localhost.yml", CONTROL_NODE)):
            new_host.on("sh", "-c", f"mkdir -p /srv/site/host_vars && cat >/srv/site/{path} <<'END'\n{text}END\n")
        yield new_host


def schedule(host: SystemdHost, *options: str, times: int = 1) -> list[int]:
    """Run the playbook on the host `times` times; return the number of changed tasks of each run."""
    variables = ["-e", "rackproof_runs_directory=/srv/site/runs", "-e", f"ansible_python_interpreter={MODULE_PYTHON}"]
    command = ["env", f"ANSIBLE_CONFIG={ROOT / 'ansible.cfg'}", "HOME=/root", "LANG=C.UTF-8", ANSIBLE]
    command += ["-i", "/srv/site/rack1.yml", *[ROOT / "playbooks" / "schedule.yml"] * times, *variables, *options]
    process = host.on(*map(str, command), check=False, timeout=180)
    print(process.stdout[-4000:], process.stderr[-2000:])
    assert process.returncode == 0
    _, *plays = process.stdout.split("PLAY [Schedule]")
    return [len(re.findall("^changed: ", play, re.MULTILINE)) for play in plays]


def show(host: SystemdHost, unit: str, *properties: str) -> list[str]:
    """Return properties of a systemd unit, each as `NAME=value`."""
    names = ",".join(properties)
    return host.on("systemctl", "show", f"--property={names}", unit).stdout.splitlines()


def run_on(host: SystemdHost, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the host; any exit code is allowed."""
    return host.on(*command, check=False)


UNITS = "/etc/systemd/system"
CRONTAB = "/etc/cron.d/rackproof-revalidate-rack1"
DOTTED = "/etc/cron.d/rackproof-revalidate_rack1_-dc1"
"""The crontab of the schedule `rack1.dc1`. Cron of Debian ignores files whose name has a dot."""


def test_timer_is_installed_changed_to_cron_and_removed(host: SystemdHost) -> None:
    assert schedule(host, "--check")[0] > 0
    assert installed_files(host) == []
    assert schedule(host, times=2) == [3, 0]  # two tasks install a file each; one starts and enables the timer
    assert show(host, TIMER, "ActiveState", "UnitFileState") == ["ActiveState=active", "UnitFileState=enabled"]
    assert SERVICE in run_on(host, "systemctl", "list-timers", "--all", "rackproof*").stdout
    assert show(host, SERVICE, "SuccessExitStatus") == ["SuccessExitStatus=75"]  # 75: another run is in progress
    verify_units(host)

    assert (
        run_on(host, "systemctl", "start", SERVICE).returncode != 0
    )  # the only host of the rack, `elsewhere`, does not exist
    log = run_on(host, "journalctl", f"--unit={SERVICE}", "--output=cat").stdout
    print(log[-3000:])
    assert "rackproof: run rack1-" in log
    assert run_on(host, "sh", "-c", "ls /srv/site/runs/rack1-*/report.html").returncode == 0

    calendar = run_on(host, "grep", "OnCalendar", f"{UNITS}/{TIMER}").stdout.strip()
    days = '{"rackproof_schedule_days": ["Mon", "Thu"]}'
    assert schedule(host, "-e", "rackproof_schedule_kind=cron", "-e", days)[0] > 0
    assert run_on(host, "systemctl", "is-active", TIMER).stdout.strip() == "inactive"
    assert installed_files(host) == [CRONTAB]
    minute, hour, *rest = run_on(host, "tail", "-1", CRONTAB).stdout.split()
    assert calendar == f"OnCalendar=*-*-* {int(hour):02}:{int(minute):02}:00"  # the timer had the same time
    assert rest[:4] == ["*", "*", "Mon,Thu", "root"]

    names = '{"rackproof_schedule_kind": "cron", "rackproof_schedule_inventories": {"rack1": "/srv/site/rack1.yml", '
    names += '"rack1.dc1": "/srv/site/rack1.yml"}}'
    run_on(host, "touch", f"{CRONTAB}.dc1")
    assert schedule(host, "-e", names)[0] > 0
    assert sorted(installed_files(host)) == [CRONTAB, DOTTED]

    assert schedule(host, "-e", "rackproof_schedule_repository=https://git.example.org/site.git")[0] > 0
    verify_units(host)
    assert sorted(installed_files(host)) == [DOTTED, f"{UNITS}/{SERVICE}", f"{UNITS}/{TIMER}"]
    assert (
        "ansible-pull --url=https://git.example.org/site.git --checkout=main"
        in run_on(host, "cat", f"{UNITS}/{SERVICE}").stdout
    )

    first_changes, second_changes = schedule(host, "-e", names, "-e", "rackproof_schedule_state=absent", times=2)
    assert (first_changes > 0, second_changes) == (True, 0)
    assert "0 timers" in run_on(host, "systemctl", "list-timers", "--all", "rackproof*").stdout
    assert installed_files(host) == []


def installed_files(host: SystemdHost) -> list[str]:
    """Return the paths of the files that the role has installed in /etc."""
    return run_on(
        host, "find", "/etc", "-name", "rackproof-revalidate[-_]*", "-not", "-path", "*.wants/*"
    ).stdout.split()


def verify_units(host: SystemdHost) -> None:
    """Check that systemd-analyze finds no problem in the units. It may print problems and still exit with code 0."""
    verified = run_on(host, "systemd-analyze", "verify", f"{UNITS}/{SERVICE}", f"{UNITS}/{TIMER}")
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
