"""Test the lab itself: its hosts have private files and answer real SSH, its faults are real, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import hosts, lab, machine
from .lab import Lab, LabError, LabUnavailable

METRICS_SERVER = """
import http.server, socket

class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(f"lab_name_length {len(socket.gethostname())}\\n".encode())

    def log_message(self, *arguments):
        pass

http.server.ThreadingHTTPServer(("0.0.0.0", 9400), Metrics).serve_forever()
"""


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("three_hosts"), hosts=3) as running:
        yield running


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 15) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout} s it is still not true that {what}"
        time.sleep(0.05)


def paths_of(prefix: str) -> list[str]:
    """Return the paths of the network namespaces and run directories of all labs whose names begin with `prefix`."""
    directories = [directory for directory in (machine.NAMESPACES, machine.RUN) if directory.is_dir()]
    return [str(path) for directory in directories for path in directory.iterdir() if path.name.startswith(prefix)]


def paths_of_this_process() -> set[str]:
    """Return the paths of all labs that this process started."""
    return set(paths_of(f"rp-{os.getpid()}-"))


def processes_of(lab_name: str) -> set[tuple[str, str]]:
    """Return PID and start time of every process in the network namespaces of the lab."""
    paths = [Path(path) for path in paths_of(lab_name)]
    inodes = {path.stat().st_ino for path in paths if path.parent == machine.NAMESPACES}
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns" / "net").stat().st_ino in inodes:
                pids.add((process.name, stat_fields(process.name)[19]))
    return pids


def stat_fields(pid: str) -> list[str]:
    """Return the fields of /proc/PID/stat, beginning with the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def still_running(processes: set[tuple[str, str]]) -> list[str]:
    """Return the PIDs of the processes that still run.

    A process is identified by PID and start time, not by its namespace: the kernel may have reused the inode of the namespace.
    """
    running = []
    for pid, start in processes:
        with contextlib.suppress(OSError):
            fields = stat_fields(pid)
            if fields[19] == start and fields[0] not in "ZX":
                running.append(pid)
    return running


def pids_by_command_line(text: str) -> list[str]:
    """Return the PIDs of the processes with this text in their command line."""
    matching = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (process / "cmdline").read_text(errors="replace"):
                matching.append(process.name)
    return matching


def reachable(running: Lab, address: str, *, source: str | None = None) -> bool:
    """Return whether sshd at `address` answers a scan by the host `source`, or by the control node if `source` is None."""
    scan = ["ssh-keyscan", "-T", "1", address]
    answer = running.on(source, *scan, check=False) if source else running.run(scan, check=False)
    return bool(answer.stdout)


def test_every_host_answers_ssh_with_its_own_identity(three_hosts: Lab) -> None:
    assert [(host.name, host.address) for host in three_hosts.hosts] == [
        ("node1", "10.77.0.11"),
        ("node2", "10.77.0.12"),
        ("node3", "10.77.0.13"),
    ]
    identity = ["cat", "/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/etc/ssh/ssh_host_ed25519_key.pub"]
    answers = []
    for host in three_hosts.hosts:
        assert three_hosts.ssh(host.name, "hostname").stdout == f"{host.name}\n"
        answers += three_hosts.ssh(host.name, *identity).stdout.splitlines()
    assert len(set(answers)) == len(answers) == 9
    assert Path("/etc/machine-id").read_text().strip() not in answers
    assert three_hosts.key.stat().st_mode & 0o777 == 0o600


def test_hosts_reach_each_other_by_name_on_both_ssh_ports(three_hosts: Lab) -> None:
    for source, target in [("node1", "node2"), ("node2", "node3"), ("node3", "node1"), ("node1", "node1")]:
        key = three_hosts.on(target, "cut", "-d ", "-f2", "/etc/ssh/ssh_host_ed25519_key.pub").stdout.strip()
        for port in ("22", "2222"):
            assert key in three_hosts.on(source, "ssh-keyscan", "-p", port, target).stdout


def test_host_is_unreachable_after_cut_and_reachable_after_reconnect(three_hosts: Lab) -> None:
    address = three_hosts.host("node2").address
    assert reachable(three_hosts, address)
    three_hosts.cut("node2")
    try:
        assert not reachable(three_hosts, address)
        assert not reachable(three_hosts, "node2", source="node1")
        assert reachable(three_hosts, "node3", source="node1")
        assert three_hosts.on("node2", "ip", "-brief", "address", "show", "eth0").stdout.split()[2] == f"{address}/24"
    finally:
        three_hosts.reconnect("node2")
    wait_until(lambda: reachable(three_hosts, address), "node2 answers again")


def test_files_that_a_host_writes_are_visible_only_on_this_host(three_hosts: Lab, tmp_path: Path) -> None:
    source = Path(__file__)
    before = source.read_bytes()
    marker = f"rackproof-{os.getpid()}"
    directories = ["/etc", "/root", "/tmp", "/var/tmp", "/dev/shm", "/run", str(source.parent), sys.prefix]
    for folder in directories:
        three_hosts.put("node1", f"{folder}/{marker}", "mine")
        assert three_hosts.on("node1", "cat", f"{folder}/{marker}").stdout == "mine"
        assert three_hosts.on("node2", "test", "-e", f"{folder}/{marker}", check=False).returncode == 1
        assert not (Path(folder) / marker).exists()
    three_hosts.put("node1", str(source), "changed")
    three_hosts.on("node1", "rm", "/etc/debian_version")
    assert source.read_bytes() == before
    assert three_hosts.on("node2", "cat", source).stdout.encode() == before
    assert Path("/etc/debian_version").exists()
    for hidden in (tmp_path, three_hosts.directory, three_hosts.key):
        assert three_hosts.on("node1", "test", "-e", hidden, check=False).returncode == 1, hidden


def test_host_sees_only_its_own_processes_and_cannot_set_sysctls(three_hosts: Lab) -> None:
    """The import of pytest shows that hosts have the Python packages of the tests."""
    pids = three_hosts.on(
        "node3", sys.executable, "-c", "import os, pytest; print(*filter(str.isdigit, os.listdir('/proc')))"
    )
    assert str(three_hosts.host("node3").pid) not in pids.stdout.split()
    assert three_hosts.on("node3", "cat", "/proc/1/cmdline").stdout.startswith("bash\0")
    refused = three_hosts.on("node3", "sh", "-c", "echo 1 >/proc/sys/vm/swappiness", check=False)
    assert "Read-only" in refused.stderr


def test_put_creates_the_directories_above_a_file_and_sets_its_mode(three_hosts: Lab) -> None:
    three_hosts.put("node2", "/srv/deep/hello", "#!/bin/sh\necho hello from $(hostname) in $PWD\n", mode=0o755)
    assert three_hosts.on("node2", "/srv/deep/hello", cwd=Path("/srv")).stdout == "hello from node2 in /srv\n"


def test_failed_command_raises_an_exception_with_its_output(three_hosts: Lab) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        three_hosts.on("node1", "sh", "-c", "echo the reason >&2; exit 3")
    assert failure.value.returncode == 3
    assert failure.value.__notes__ == ["the reason"]
    assert three_hosts.run(["false"], check=False).returncode == 1
    with pytest.raises(LabError, match="no host 'node9'; it has node1, node2, node3"):
        three_hosts.on("node9", "true")


@pytest.mark.parametrize("where", ["control", "node1"])
def test_command_is_killed_with_its_children_at_the_time_limit(three_hosts: Lab, where: str) -> None:
    mark = f"77{os.getpid()}.{len(where)}"  # seconds to sleep; no other process has this number in its command line
    command = ["sh", "-c", f"echo begun; sleep {mark} & sleep {mark}"]
    with pytest.raises(subprocess.TimeoutExpired) as failure:
        _ = (
            three_hosts.run(command, timeout=0.3)
            if where == "control"
            else three_hosts.on(where, *command, timeout=0.3)
        )
    assert failure.value.__notes__ == ["begun"]
    wait_until(lambda: not pids_by_command_line(mark), "the children of the command are gone")


def test_commands_do_not_inherit_ignored_signals(three_hosts: Lab) -> None:
    ignored = ["sed", "-n", "s/^SigIgn:\\s*//p", "/proc/self/status"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answers = [three_hosts.run(ignored), three_hosts.on("node1", *ignored), three_hosts.ssh("node1", *ignored)]
    finally:
        signal.signal(signal.SIGINT, before)
    standard = (1 << 31) - 1  # mask of signals 1 to 31; the C library uses some of the real-time signals above them
    assert [int(answer.stdout, 16) & standard for answer in answers] == [0, 0, 0]


def test_ansible_reaches_every_host_through_the_inventory(three_hosts: Lab) -> None:
    ansible = shutil.which("ansible", path=str(Path(sys.executable).parent)) or shutil.which("ansible")
    assert ansible is not None, "the lab's tests need ansible-core"
    inventory = three_hosts.inventory({"node2": {"slot": 7}}, {"rack": "r1"})
    assert three_hosts.inventory(name="plain") != inventory
    ping = ["-m", "ansible.builtin.ping", "-a", "data='{{ rack }} {{ slot | default(0) }}'"]
    answer = three_hosts.run([ansible, "gpu_hosts", "-i", inventory, "--one-line", *ping], cwd=three_hosts.directory)
    pongs = [re.sub(" .*: ", " ", line) for line in answer.stdout.splitlines()]
    assert sorted(pongs) == ['node1 "r1 0"}', 'node2 "r1 7"}', 'node3 "r1 0"}']


REPORTING_MODULE = """
import os, sys
print(sys.argv[1:], os.getcwd(), oct(os.umask(0o77)), sorted(os.environb.items()), sys.stdin.read(), flush=True)
print("to standard error", file=sys.stderr)
"""


@pytest.mark.parametrize("ends", ["", "sys.exit(7)", "sys.exit('what is wrong')", "1 / 0"])
@pytest.mark.parametrize("arguments", [[], ["one", "two words"]])
def test_module_interpreters_behave_like_python(tmp_path: Path, ends: str, arguments: list[str]) -> None:
    """The lab's interpreters, MODULE_PYTHON and CONTROL_PYTHON, must give the same exit code and output as /usr/bin/python3.

    The program is a file if there are arguments; otherwise it comes from standard input.
    """
    program = tmp_path / "program.py"
    program.write_text(REPORTING_MODULE + ends)
    given = [str(program), *arguments] if arguments else []
    text = "more" if arguments else program.read_text()
    outputs = []
    for command in (["/usr/bin/python3", *(given or ["-"])], [lab.MODULE_PYTHON, *given], [lab.CONTROL_PYTHON, *given]):
        environment = {"PATH": "/usr/bin", "LC_ALL": "C.UTF-8", "WORD": "\u00e4"}
        done = subprocess.run(
            command, input=text, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        errors = done.stderr.splitlines()
        outputs.append((done.returncode, done.stdout, errors[0], errors[-1]))
    assert outputs[0][1]
    assert outputs[1:] == outputs[:1] * 2


def test_prometheus_scrapes_hosts_with_the_labels_of_a_target_file(three_hosts: Lab, tmp_path: Path) -> None:
    targets = [
        {"targets": [f"{three_hosts.host(name).address}:9400"], "labels": {"host": name, "rack": "r1"}}
        for name in ("node1", "node3")
    ]
    (tmp_path / "gpu_hosts.json").write_text(json.dumps(targets))
    prometheus = three_hosts.prometheus(tmp_path / "*.json")
    for name in ("node1", "node3"):
        three_hosts.put(name, "/srv/metrics.py", METRICS_SERVER)
        three_hosts.start(name, "python3", "/srv/metrics.py")
    samples = prometheus.wait_for('lab_name_length{rack="r1"}', timeout=30, at_least=2)
    assert {series["metric"]["host"]: series["value"][1] for series in samples} == {"node1": "5", "node3": "5"}
    assert prometheus.query("absent_metric") == []
    with pytest.raises(LabError, match="has 0 series"):
        prometheus.wait_for("absent_metric", timeout=0)
    with pytest.raises(subprocess.CalledProcessError):
        prometheus.query("not promql")


def test_lab_leaves_nothing_behind(three_hosts: Lab, tmp_path: Path) -> None:
    before = paths_of_this_process()
    with Lab(tmp_path, hosts=2) as other:
        lab_name = other.control.removesuffix("-control")
        detach = ["setsid", "--fork", "sh", "-c", "exec sleep 1000 >/dev/null 2>&1"]
        other.run(detach)
        other.on("node1", *detach)
        background = other.popen(["sh", "-c", "trap '' TERM; echo ready; sleep 1000"], stdout=subprocess.PIPE)
        assert background.stdout is not None
        assert background.stdout.readline() == "ready\n"
        assert (
            len(paths_of(lab_name)) == 5
        )  # the namespaces of the switch, the control node and two hosts, and the run directory
        processes = processes_of(lab_name)
        assert len(still_running(processes)) > 6
    assert paths_of(lab_name) == []
    assert still_running(processes) == []
    assert pids_by_command_line(str(tmp_path)) == []
    assert background.poll() is not None
    assert other.hosts == ()
    assert paths_of_this_process() == before
    assert reachable(three_hosts, three_hosts.host("node1").address), "the other lab must still run"


@pytest.mark.usefixtures("three_hosts")
def test_host_that_does_not_start_is_reported_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = paths_of_this_process()
    broken = tmp_path / "broken-init.sh"
    broken.write_text('if [ "$2" = node2 ]; then echo "no sshd on $2"; exit 1; fi\nexec bash "$0".good "$@"\n')
    shutil.copy(hosts.INIT, f"{broken}.good")
    monkeypatch.setattr(hosts, "INIT", broken)
    with pytest.raises(LabError, match="node2 ended; its log:\nno sshd on node2"), Lab(tmp_path / "lab", hosts=3):
        pass
    broken.write_text("exec sleep 1000\n")
    monkeypatch.setattr(lab, "READY_SECONDS", 0.3)
    with pytest.raises(LabError, match=r"node1 does not answer SSH after 0\.3 s"), Lab(tmp_path / "lab", hosts=1):
        pass
    assert paths_of_this_process() == before
    assert pids_by_command_line(str(tmp_path)) == []


@pytest.mark.usefixtures("three_hosts")
def test_interrupt_during_the_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = paths_of_this_process()

    def interrupt(*arguments: object) -> None:
        assert paths_of_this_process() > before
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "_wait_for_ssh", interrupt)
    with pytest.raises(KeyboardInterrupt), Lab(tmp_path, hosts=2):
        pass
    assert paths_of_this_process() == before
    assert pids_by_command_line(str(tmp_path)) == []


@pytest.fixture
def command(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, str]]:
    """Start a lab of one host with `python -m tests.lab.lab 1`; yield the process, its inventory and the name of its lab."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.lab.lab", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=hosts.CHECKOUT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            inventory = Path(process.stdout.readline().strip())
            hint = process.stderr.readline()
            yield process, inventory, hint.partition("/run/netns/")[2].partition("-control")[0]
        finally:
            process.kill()


def test_command_keeps_the_lab_until_interrupted(command: tuple[subprocess.Popen[str], Path, str]) -> None:
    process, inventory, lab_name = command
    assert "ansible_host: 10.77.0.11" in inventory.read_text()
    assert len(paths_of(lab_name)) == 4
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 0
    assert paths_of(lab_name) == []
    assert not inventory.exists()


def test_next_lab_removes_the_leftovers_of_a_killed_lab(
    three_hosts: Lab, command: tuple[subprocess.Popen[str], Path, str], tmp_path: Path
) -> None:
    process, inventory, lab_name = command
    control = machine.NAMESPACES / f"{lab_name}-control"
    background_command = [
        "nsenter",
        f"--net={control}",
        "--",
        "setsid",
        "--fork",
        "sh",
        "-c",
        "exec sleep 1000 >/dev/null 2>&1",
    ]
    subprocess.run(background_command, check=True)
    processes = processes_of(lab_name)
    assert len(still_running(processes)) > 2
    process.kill()
    process.wait()
    # The host ends when the process that started its lab is killed. The namespaces and the processes in the namespace of the
    # control node remain, and the next lab must remove them.
    wait_until(lambda: not pids_by_command_line(str(inventory.parent)), "the host is gone")
    with Lab(tmp_path / "next", hosts=1):
        assert paths_of(lab_name) == []
        assert still_running(processes) == []
        assert reachable(three_hosts, three_hosts.host("node1").address), "a running lab must not be removed"


def test_missing_requirements_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.requirements_missing() == []
    monkeypatch.setattr(machine, "SEARCH_PATH", str(tmp_path))
    with (
        pytest.raises(LabUnavailable, match=r"sshd \(Debian package openssh-server\).*prometheus \(Debian"),
        Lab(tmp_path),
    ):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.requirements_missing()[0] == "root (run the tests with sudo)"


def test_private_directories_are_outside_the_root_overlay(tmp_path: Path) -> None:
    """`inner` is left out, because it is below `tmp_path`, which is returned."""
    inner = tmp_path / "inner"
    inner.mkdir()
    assert hosts.outside_root_overlay([inner, tmp_path, Path("/usr"), Path("/dev/shm")]) == [Path("/dev/shm"), tmp_path]
