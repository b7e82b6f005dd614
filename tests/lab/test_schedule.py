"""The schedule on a control node where systemd runs: the timer waits, starts what it is to start, and goes without a trace."""

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
    """Plays the playbook on the host, so many times; how many tasks changed something each time."""
    variables = ["-e", "rackproof_runs_directory=/srv/site/runs", "-e", f"ansible_python_interpreter={MODULE_PYTHON}"]
    command = ["env", f"ANSIBLE_CONFIG={ROOT / 'ansible.cfg'}", "HOME=/root", "LANG=C.UTF-8", ANSIBLE]
    command += ["-i", "/srv/site/rack1.yml", *[ROOT / "playbooks" / "schedule.yml"] * times, *variables, *options]
    played = host.on(*map(str, command), check=False, timeout=180)
    print(played.stdout[-4000:], played.stderr[-2000:])
    assert played.returncode == 0
    _, *plays = played.stdout.split("PLAY [Schedule]")
    return [len(re.findall("^changed: ", play, re.MULTILINE)) for play in plays]


def show(host: SystemdHost, unit: str, *properties: str) -> list[str]:
    """These properties of a unit."""
    asked = ",".join(properties)
    return host.on("systemctl", "show", f"--property={asked}", unit).stdout.splitlines()


def ask(host: SystemdHost, *command: str) -> subprocess.CompletedProcess[str]:
    return host.on(*command, check=False)


UNITS = "/etc/systemd/system"
CRONTAB = "/etc/cron.d/rackproof-revalidate-rack1"


def test_timer_waits_starts_its_service_and_goes(host: SystemdHost) -> None:
    assert schedule(host, "--check") > [0]
    assert written(host) == []
    assert schedule(host, times=2) == [3, 0]  # two files, and the timer is started and enabled
    assert show(host, TIMER, "ActiveState", "UnitFileState") == ["ActiveState=active", "UnitFileState=enabled"]
    assert SERVICE in ask(host, "systemctl", "list-timers", "--all", "rackproof*").stdout
    assert show(host, SERVICE, "SuccessExitStatus") == ["SuccessExitStatus=75"]  # under way already: no failure
    sound(host)

    assert ask(host, "systemctl", "start", SERVICE).returncode != 0  # the rack's only host does not exist
    said = ask(host, "journalctl", f"--unit={SERVICE}", "--output=cat").stdout
    print(said[-3000:])
    assert "rackproof: run rack1-" in said
    assert ask(host, "sh", "-c", "ls /srv/site/runs/rack1-*/report.html").returncode == 0

    calendar = ask(host, "grep", "OnCalendar", f"{UNITS}/{TIMER}").stdout.strip()
    days = '{"rackproof_schedule_days": ["Mon", "Thu"]}'
    assert schedule(host, "-e", "rackproof_schedule_kind=cron", "-e", days) > [0]
    assert ask(host, "systemctl", "is-active", TIMER).stdout.strip() == "inactive"
    assert written(host) == [CRONTAB]
    minute, hour, *rest = ask(host, "tail", "-1", CRONTAB).stdout.split()
    assert calendar == f"OnCalendar=*-*-* {int(hour):02}:{int(minute):02}:00"  # the same time, however it is started
    assert rest[:4] == ["*", "*", "Mon,Thu", "root"]

    pulled = ("-e", "rackproof_schedule_repository=https://git.example.org/site.git")
    assert schedule(host, *pulled) > [0]
    sound(host)
    assert (
        "ansible-pull --url=https://git.example.org/site.git --checkout=main"
        in ask(host, "cat", f"{UNITS}/{SERVICE}").stdout
    )
    removed, again = schedule(host, "-e", "rackproof_schedule_state=absent", times=2)
    assert (removed > 0, again) == (True, 0)
    assert "0 timers" in ask(host, "systemctl", "list-timers", "--all", "rackproof*").stdout
    assert written(host) == []


def written(host: SystemdHost) -> list[str]:
    """What the role left in /etc."""
    return ask(host, "find", "/etc", "-name", "rackproof-revalidate*", "-not", "-path", "*.wants/*").stdout.split()


def sound(host: SystemdHost) -> None:
    """What systemd-analyze does not like it says, and exits 0."""
    verified = ask(host, "systemd-analyze", "verify", f"{UNITS}/{SERVICE}", f"{UNITS}/{TIMER}")
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
