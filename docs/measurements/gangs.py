"""Run a gang (the hosts of one multi-node launch) on one machine. Each host is represented by one or more GPUs of the machine.

NCCL treats them as separate hosts.

Usage: python docs/measurements/gangs.py RUN_DIR DEVICES PROFILE [FAULT]
    DEVICES  the GPUs of each host, e.g. 0/1/2/3 or 0,1/2,3
    PROFILE  name or .yml file of a profile, whose stage `gang` is run
    FAULT    stop:RANK or kill:RANK sends a signal to that rank while it measures; slow:HOST:SHARE pauses the ranks of a host (h0,
             h1 …) for a share of the time

RUN_DIR becomes a run directory like that of the playbooks. The report is written to it and printed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fleet.planning.plan import make_plan, read_profile  # noqa: E402
from schemas.plans import Plan  # noqa: E402
from schemas.records import to_json  # noqa: E402

PORT = 29600
PERIOD_S = 0.02
"""Period in which the ranks of a slow host are paused once. Load on its GPUs would hardly slow a transfer over sockets."""


def main() -> None:
    """Run the gang and print its outcome."""
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    directory, devices = Path(sys.argv[1]).absolute(), [part.split(",") for part in sys.argv[2].split("/")]
    fault = sys.argv[4].split(":") if len(sys.argv) == 5 else [""]
    plan = plan_of(directory.name, devices, sys.argv[3])
    directory.mkdir(parents=True)
    (directory / "plan.json").write_text(json.dumps(to_json(plan)), encoding="utf-8")
    hosts = {host.name: directory / "at" / host.name for host in plan.hosts}
    for name, host_directory in hosts.items():
        run_rackproof(name, host_directory, "inspect", "--plan", str(directory / "plan.json"))
    launches = {name: launch(name, host_directory, list(hosts)) for name, host_directory in hosts.items()}
    began, since = time.monotonic(), "the start"
    if fault[0] in ("stop", "kill"):
        since = "the fault"
        began = send_signal(fault[0], int(fault[1]), hosts)
    with paused_ranks(fault[1], float(fault[2])) if fault[0] == "slow" else nullcontext():
        for name, process in launches.items():
            process.wait(timeout=900)
            print(f"{name}: ended {time.monotonic() - began:.1f} s after {since}")
    fetch_records(directory, plan, hosts)


def plan_of(run_id: str, devices: list[list[str]], profile: str) -> Plan:
    """Return the plan that a playbook would make for hosts with these GPUs."""
    inventory = {
        f"h{number}": {
            "rackproof_gpu_count": len(own),
            "rackproof_gpu_devices": [int(index) for index in own],
            "rackproof_rack": "r1",
            "ansible_host": "127.0.0.1",
        }
        for number, own in enumerate(devices)
    }
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return make_plan(read_profile(profile), inventory, run_id=run_id, nonce=os.urandom(16).hex(), created=created)


def command(name: str, directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "rackproof"), *arguments, "--run-dir", str(directory), "--host", name]


def run_rackproof(name: str, directory: Path, *arguments: str) -> None:
    subprocess.run(command(name, directory, *arguments), check=True, stdout=subprocess.DEVNULL)


def launch(name: str, directory: Path, members: list[str]) -> subprocess.Popen[bytes]:
    """Start the launch on one host, like the gang role."""
    started = command(
        name, directory, "launch", "--members", ",".join(members), "--port", str(PORT), "--interface", "lo"
    )
    return subprocess.Popen(started, env={**os.environ, "NCCL_HOSTID": name})


@contextmanager
def paused_ranks(host: str, share: float) -> Iterator[None]:
    """Pause the ranks of the host for this share of the time, 50 times per second, until the block ends."""
    end = threading.Event()

    def pause() -> None:
        ranks: list[int] = []
        listed = 0.0
        while not end.wait(PERIOD_S * (1 - share)):
            if time.monotonic() > listed + 1:
                ranks, listed = [pid for pid in pids() if is_rank(pid, None, host)], time.monotonic()
            send(ranks, signal.SIGSTOP)
            time.sleep(PERIOD_S * share)
            send(ranks, signal.SIGCONT)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def send(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def send_signal(kind: str, rank: int, hosts: dict[str, Path]) -> float:
    """Wait until the rank runs an all_reduce, then stop or kill it; return the monotonic time of the signal, in s."""
    while not (state := [directory for directory in hosts.values() if measuring(directory, rank)]):
        time.sleep(0.1)
    time.sleep(2)
    name = next(name for name, directory in hosts.items() if directory == state[0])
    (pid,) = (pid for pid in pids() if is_rank(pid, rank, name))
    os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    print(f"{kind}: rank {rank} of {name}, process {pid}")
    return time.monotonic()


def measuring(directory: Path, rank: int) -> bool:
    try:
        state = json.loads((directory / "work" / "gang" / f"rank{rank}.state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return str(state["phase"]).startswith("collective all_reduce")


def is_rank(process: int, rank: int | None, host: str) -> bool:
    """Return whether the process is this rank (None: any) of the host."""
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        name = Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return False
    return (
        name == f"rank {rank}" if rank is not None else name.startswith("rank ")
    ) and f"NCCL_HOSTID={host}".encode() in environment


def fetch_records(directory: Path, plan: Plan, hosts: dict[str, Path]) -> None:
    """Fetch the records like the roles, and write the report."""
    (directory / "hosts").mkdir()
    for host in plan.hosts:
        shutil.copy(hosts[host.name] / "record.json", directory / "hosts" / f"{host.name}.json")
        record_path = hosts[host.name] / "gangs" / f"{host.gang}.json"
        kept = directory / "gangs" / host.gang / f"{host.name}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(record_path, kept)
        launched = json.loads(record_path.read_text(encoding="utf-8"))["launches"][-1]
        print(f"{host.name}: {launched['outcome']} {launched['duration_s']:.1f} s {launched['reason']}")
    report = [sys.executable, str(ROOT / "rackproof"), "report", str(directory)]
    print(f"report: exit code {subprocess.run(report, check=False).returncode}")


if __name__ == "__main__":
    main()
