"""Test Rackproof with a real Slurm on two lab hosts: a job tests the nodes it runs on, and the prolog drains a faulty node."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import documents
from tests.lab.lab import Lab
from tests.lab.shared import share

ROOT = Path(__file__).parents[2]
HOSTS = ("node1", "node2")
PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
SHARED = "/srv/shared"
RACKPROOF = Path(sys.executable).parent / "rackproof"
CONFIGURATION = """
ClusterName=lab
SlurmctldHost=node1(10.77.0.11)
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ReturnToService=2
PrivateData=jobs
Prolog=/etc/slurm/rackproof-health
PrologFlags=Alloc
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
NodeName=node[1-2] NodeAddr=10.77.0.1[1-2] CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=120 State=UP
PartitionName=hidden Nodes=ALL Hidden=YES State=UP
"""
"""PrivateData hides the jobs of other accounts. The partition `hidden` is listed only with `squeue --all`."""
HAS_CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
CGROUP_CONF = (
    f"CgroupPlugin=cgroup/{'v2' if HAS_CGROUP_V2 else 'v1'}\nCgroupAutomount=no\n"
    f"{'IgnoreSystemd=yes' if HAS_CGROUP_V2 else ''}\n"
)
PROFILE = {
    "schema": "rackproof.profile/1",
    "summary": "the smallest profile",
    "device": "cpu",
    "processes_per_host": 1,
    "stages": {
        "benchmark": {
            "deadline_s": 90,
            "collective_timeout_s": 60,
            "benchmarks": {"verbs": {}},  # does not import torch: the import takes 2 s of CPU time
        },
        "gang": {
            "deadline_s": 90,
            "collective_timeout_s": 60,
            "benchmarks": {
                "collective": {"ops": ["all_reduce"], "placements": ["in_place"], "sizes_bytes": [8], "seconds": 0.05}
            },
        },
    },
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    missing = [f"{program} ({package})" for program, package in PROGRAMS.items() if not shutil.which(program)]
    if missing:
        pytest.fail(
            f"Slurm is not installed: {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"
        )
    directory = tmp_path_factory.mktemp("slurm")
    with Lab(directory / "lab", hosts=len(HOSTS)) as new_lab:
        share(new_lab, directory / "shared", SHARED)
        (directory / "shared" / "tiny.yml").write_text(yaml.safe_dump(PROFILE))
        for host in HOSTS:
            _start_node(new_lab, host)
        _wait(lambda: _states(new_lab) == dict.fromkeys(HOSTS, "idle"), 30, lambda: _logs(new_lab))
        yield new_lab


def _start_node(lab: Lab, host: str) -> None:
    lab.put(host, "/etc/slurm/slurm.conf", CONFIGURATION)
    lab.put(host, "/etc/slurm/cgroup.conf", CGROUP_CONF)
    lab.put(host, "/etc/slurm/rackproof-health", (ROOT / "deploy/slurm/rackproof-health").read_text(), 0o755)
    lab.put(host, "/etc/rackproof/slurm-health.conf", f"RACKPROOF={RACKPROOF}\nSECONDS=0\n")
    prepare = (
        "mkdir -p /run/munge /var/lib/munge /var/log/munge /var/spool/slurmd /var/spool/slurmctld && "
        "(echo 0123456789abcdef0123456789abcdef >/etc/munge/munge.key) && chown -R munge: /etc/munge /run/munge /var/l*/munge && "
        "chmod 755 /run/munge && chmod 400 /etc/munge/munge.key && setpriv --reuid=munge --regid=munge --clear-groups munged"
    )
    lab.on(host, "sh", "-c", prepare)
    no_output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if host == HOSTS[0]:
        lab.start(host, "slurmctld", "-D", "-i", **no_output)
    lab.start(host, "slurmd", "-D", "-N", host, **no_output)


def _states(lab: Lab) -> dict[str, str]:
    lines = lab.on(HOSTS[0], "sinfo", "--noheader", "-N", "-o", "%N %T", check=False).stdout.splitlines()
    return dict(line.split() for line in lines)


def _logs(lab: Lab) -> str:
    return "\n".join(
        lab.on(host, "sh", "-c", "tail -n 25 /var/log/slurm*.log", check=False).stdout for host in HOSTS
    ) + str(_states(lab))


def _wait(condition: Any, timeout_s: float, describe: Any) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.1)


def _submit(lab: Lab, *options: str, **variables: str) -> str:
    settings = {"RACKPROOF": str(RACKPROOF), **variables}
    return lab.on(
        HOSTS[0],
        "sbatch",
        "--parsable",
        *options,
        ROOT / "deploy/slurm/rackproof.sbatch",
        cwd=Path(SHARED),
        env=settings,
    ).stdout.strip()


def _show_job(lab: Lab, job: str) -> str:
    return lab.on(HOSTS[0], "scontrol", "show", "job", job, "--oneliner", check=False).stdout


def test_job_accepts_its_nodes(lab: Lab, tmp_path: Path) -> None:
    """The batch script plans the run, tests each node alone, then all nodes in one launch.

    Its exit code is that of `rackproof report`.
    """
    job = _submit(
        lab,
        "--nodes=2",
        RACKPROOF_PROFILE=f"{SHARED}/tiny.yml",
        RACKPROOF_INTERFACE="eth0",
        RACKPROOF_STATE="/var/tmp/rp",
    )
    _wait(
        lambda: "JobState=COMPLETED" in _show_job(lab, job) or "ExitCode=0:0" not in _show_job(lab, job),
        120,
        lambda: _show_job(lab, job),
    )
    log = lab.on(HOSTS[0], "cat", f"{SHARED}/rackproof-{job}.log").stdout
    print(log)
    report = documents.parse(lab.on(HOSTS[0], "cat", f"{SHARED}/runs/slurm-{job}/report.json").stdout, source="report")
    assert report["decision"] == "accepted", log
    assert "FINAL ACCEPTANCE: REHEARSAL PASS" in log
    launches = {
        host["name"]: [(launch["stage"], launch["outcome"], launch["members"]) for launch in host["launches"]]
        for host in report["hosts"]
    }
    assert launches == {host: [("benchmark", "finished", [host]), ("gang", "finished", list(HOSTS))] for host in HOSTS}
    assert "JobState=COMPLETED" in _show_job(lab, job)


OTHER_ACCOUNT = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")


@pytest.mark.parametrize(
    ("partition", "prefix", "variables", "jobs"),
    [
        ("hidden", (), {}, r"Slurm job \d+ of root \(RUNNING\)"),
        ("gpu", (), {"SQUEUE_USERS": "nobody", "SQUEUE_PARTITION": "hidden"}, r"Slurm job \d+ of root \(RUNNING\)"),
        ("gpu", OTHER_ACCOUNT, {}, r"Slurm jobs that this account may not see \(state MIXED, 1 CPUs allocated\)"),
    ],
    ids=["hidden partition", "environment", "PrivateData"],
)
def test_node_with_a_job_that_squeue_hides_by_default_is_in_use(
    lab: Lab, partition: str, prefix: tuple[str, ...], variables: dict[str, str], jobs: str
) -> None:
    options = ("--nodelist=node2", "--output=/dev/null", f"--partition={partition}", "--wrap=sleep 60")
    job = lab.on(HOSTS[0], "sbatch", "--parsable", *options, cwd=Path(SHARED)).stdout.strip()
    _wait(lambda: "JobState=RUNNING" in _show_job(lab, job), 40, lambda: _show_job(lab, job))

    def ask() -> str:
        words = [f"--word={word}" for word in prefix]
        command = (RACKPROOF, "scheduler", "ask", "--kind=slurm", "--run-dir=/tmp", *words)
        return lab.on(HOSTS[0], *command, stdin='{"h1": "node1", "h2": "node2"}', env=variables).stdout

    try:
        assert re.fullmatch(f"h2: {jobs}\n", ask())
    finally:
        lab.on(HOSTS[0], "scancel", job)
        _wait(lambda: _states(lab)["node2"] == "idle", 40, lambda: _logs(lab))
    assert ask() == "no host is in use\n"


def test_faulty_node_is_drained_with_the_reason_before_the_job_starts(lab: Lab) -> None:
    """The prolog requires eight GPUs on node2, which has none. On node1 it requires no GPUs, so node1 still runs jobs."""
    lab.put("node2", "/etc/rackproof/slurm-health.conf", f"RACKPROOF={RACKPROOF}\nSECONDS=0\nGPUS=8\n")
    lab.on(HOSTS[0], "sbatch", "--parsable", "--nodelist=node2", "--output=/dev/null", "--wrap=true", cwd=Path(SHARED))
    _wait(lambda: _states(lab)["node2"].startswith("drain"), 40, lambda: _logs(lab))
    node_state = lab.on(HOSTS[0], "scontrol", "show", "node", "node2", "--oneliner").stdout
    print(node_state)
    assert "Reason=rackproof: " in node_state
    assert "gpu." in node_state
    assert _states(lab)["node1"] == "idle"
    done = lab.on(HOSTS[0], "srun", "--nodelist=node1", "echo", "here", cwd=Path(SHARED), timeout=40)
    assert done.stdout == "here\n"
