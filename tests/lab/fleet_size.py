"""Measure the load on the control node when it accepts a fleet of 200 hosts: `python -m tests.lab.fleet_size 200`.

Every host of the inventory is this machine, over a local connection, with a state directory and an exporter for each host. The
agent is installed once for all hosts. The profile has only a short benchmark stage, the NVIDIA driver is not checked, and there
is no gang (hosts of a multi-node launch). The acceptance runs twice; in the second run the hosts are already set up. The printed
CPU seconds are those of ansible-playbook and the processes that it waits for, including the Ansible modules on the hosts. They
exclude the benchmarks, which run in the background on the same CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.lab.kill_points import smallest_torch_profile

ROOT = Path(__file__).parents[2]
FIRST_PORT = 20000


def inventory(count: int, directory: Path) -> dict[str, Any]:
    """Return an inventory of `count` hosts that are all this machine."""
    hosts = {f"h{number:04d}": {"rackproof_exporter_port": FIRST_PORT + number} for number in range(count)}
    variables = {
        "ansible_connection": "local",
        "ansible_host": "127.0.0.1",
        "ansible_python_interpreter": sys.executable,
        "rackproof_profile": str(directory / "tiny.yml"),
        "rackproof_rack": "loopback",
        "rackproof_gang": "none",
        "nvidia_driver_state": "ignored",
        "rackproof_prefix": str(directory / "agent"),
        "rackproof_state_directory": f"{directory}/state/{{{{ inventory_hostname }}}}",
        "rackproof_runs_directory": str(directory / "runs"),
        "rackproof_python": sys.executable,
        "rackproof_system_torch": True,
    }
    return {"gpu_hosts": {"hosts": hosts, "vars": variables}}


def play(directory: Path, playbook: str, run_id: str) -> tuple[float, float, str]:
    """Run a playbook; return the elapsed seconds, the CPU seconds and the output."""
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(directory / "hosts.yml")]
    command += [str(ROOT / "playbooks" / f"{playbook}.yml"), "-e", f"rackproof_run_id={run_id}"]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "ANSIBLE_HOME": str(directory / "ansible")},
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, spent, done.stdout


def tasks_of(printed: str) -> float:
    """Return the mean over all hosts of the number of tasks that the play recap counts as `ok`."""
    counts = [int(ok) for ok in re.findall(r"^h\d+ +: ok=(\d+)", printed, re.MULTILINE)]
    return sum(counts) / len(counts) if counts else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the acceptance twice and print its load. Return 1 if a host was not accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", type=int, nargs="?", default=200)
    parser.add_argument(
        "--keep", action="store_true", help="keep the working directory, and do not run the playbook teardown"
    )
    options = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="rackproof-size-", dir="/var/tmp"))
    profile = smallest_torch_profile(0.2)
    profile["stages"] = {"benchmark": profile["stages"]["benchmark"] | {"deadline_s": 1800}}
    (directory / "tiny.yml").write_text(yaml.safe_dump(profile))
    (directory / "hosts.yml").write_text(yaml.safe_dump(inventory(options.hosts, directory)))
    good = True
    try:
        for run_id in ("first", "second"):
            seconds, spent, printed = play(directory, "acceptance", run_id)
            (directory / f"{run_id}.log").write_text(printed)
            report = json.loads((directory / "runs" / run_id / "report.json").read_text())
            passed = sum(host["decision"] == "accepted" for host in report["hosts"])
            good = good and passed == options.hosts
            print(
                f"{run_id}: {options.hosts} hosts, {passed} accepted, {tasks_of(printed):.1f} tasks per host, {seconds:.0f} s, "
                f"{seconds / options.hosts:.2f} s and {spent / options.hosts:.2f} CPU-s per host",
                flush=True,
            )
    finally:
        if not options.keep:
            play(directory, "teardown", "second")
            shutil.rmtree(directory, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
