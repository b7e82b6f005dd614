"""Run a real multi-host lab on one machine: every host is a network namespace with its own files, processes, name and sshd.

    with Lab(tmp_path, hosts=3) as lab:
        lab.run(["ansible", "all", "-i", lab.inventory(), "-m", "ansible.builtin.ping"])
        lab.cut("node2")

One bridge connects the hosts node1 … nodeN (10.77.0.11 …) and a control namespace (10.77.0.2), where the operator's
programs run. A host sees a copy-on-write view of this machine's root file system, so it has the same programs. Files that
a host writes disappear when the host ends. A host has its own /dev, /proc, /root, /run, /sys and /tmp. It also sees this
checkout and the Python interpreter of the tests, even if they are below one of these directories.
Do not change this machine's root file system while a lab runs: what the hosts then see is undefined (overlayfs). To change a
file of a host, use `put`.

Needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN), overlayfs, and the Debian packages hostname, iproute2, util-linux,
python3, openssh-client, openssh-server and prometheus. `python -m tests.lab.lab 3` starts a lab for manual use.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from . import machine, processes
from .hosts import ENVIRONMENT, Host, boot
from .machine import LabError, LabUnavailable, requirements_missing
from .processes import Command, Stream
from .prometheus import Prometheus, write_config

__all__ = ["Host", "Lab", "LabError", "LabUnavailable", "Prometheus", "requirements_missing"]

CONTROL_ADDRESS = "10.77.0.2"
MODULE_PYTHON = Path(__file__).absolute().with_name("module_python.py")
"""`ansible_python_interpreter` of the hosts. It runs Ansible modules in forks of a server that has imported their common code."""
CONTROL_PYTHON = MODULE_PYTHON.with_name("control_python.py")
"""Python interpreter of the control node. It runs the module `command` in a new process, other modules in forks of the server."""
CONTROL_SHELL = MODULE_PYTHON.with_name("control_shell.sh")
"""Shell of Ansible on the control node. It runs modules with CONTROL_PYTHON even if a playbook sets another interpreter."""
CONTROL_NODE = yaml.safe_dump({"ansible_shell_executable": str(CONTROL_SHELL), "ansible_pipelining": True})
"""Content of host_vars/localhost.yml, which is written beside every inventory."""
MAX_HOSTS = 200
READY_SECONDS = 15.0
# Ignore the user's SSH configuration and known hosts: every lab has the same addresses, but other host keys.
SSH_OPTIONS = (
    "-F /dev/null -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "
    "-o IdentitiesOnly=yes -o BatchMode=yes"
)


class Lab:
    """Hosts, a network and a control namespace, which exist until the `with` block ends."""

    def __init__(self, directory: Path, hosts: int = 3) -> None:
        """Prepare a lab, which writes its SSH key, logs, inventories and Prometheus data to `directory`.

        The directory may be deleted after the lab has ended.
        """
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be 1 to {MAX_HOSTS}, not {hosts}")
        self.directory = directory.absolute()
        self.key = self.directory / "key"
        self.hosts: tuple[Host, ...] = ()
        self._names = tuple(f"node{number}" for number in range(1, hosts + 1))
        self._run_directory = Path()
        self._inits: list[subprocess.Popen[str]] = []
        self._started: list[subprocess.Popen[str]] = []
        self._servers = 0

    def __enter__(self) -> Lab:
        if missing := requirements_missing():
            raise LabUnavailable("the lab needs " + "; ".join(missing))
        try:
            self._start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    # --- interface for tests

    @property
    def control(self) -> str:
        """Return the network namespace of the control node, as `ip netns` lists it."""
        return f"{self._run_directory.name}-control"

    def host(self, name: str) -> Host:
        """Return the host with this name. Raise LabError if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"this lab has no host {name!r}; it has {', '.join(host.name for host in self.hosts)}")

    def run(
        self,
        command: Command,
        *,
        check: bool = True,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str | None = None,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the control node. `env` is added to this process's environment."""
        return processes.run(
            [*self._control_prefix(), *command],
            check=check,
            timeout=timeout,
            env=processes.environment(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )

    def popen(
        self, command: Command, *, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> subprocess.Popen[str]:
        """Start a command on the control node. It is killed when the lab ends. `arguments` are passed to `subprocess.Popen`."""
        return self._popen([*self._control_prefix(), *command], processes.environment(env), **arguments)

    def on(
        self,
        host: str,
        *command: str | Path,
        check: bool = True,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: Path = Path("/"),
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a host, without SSH. Its environment has only the variables in ENVIRONMENT and `env`."""
        return processes.run(
            self.host(host).inside(command, cwd),
            check=check,
            timeout=timeout,
            env={**ENVIRONMENT, **(env or {})},
            stdin=stdin,
        )

    def start(
        self,
        host: str,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = Path("/"),
        **arguments: Any,
    ) -> subprocess.Popen[str]:
        """Start a command inside a host. It is killed when the lab ends. `arguments` are passed to `subprocess.Popen`."""
        return self._popen(self.host(host).inside(command, cwd), {**ENVIRONMENT, **(env or {})}, **arguments)

    def ssh(
        self, host: str, *command: str, check: bool = True, timeout: float = 30
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host as the operator would: from the control node over SSH."""
        target = f"root@{self.host(host).address}"
        ssh = ["ssh", *shlex.split(SSH_OPTIONS), "-i", str(self.key), target, shlex.join(command)]
        return self.run(ssh, check=check, timeout=timeout)

    def put(self, host: str, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file on a host, and create its missing parent directories."""
        write = 'mkdir -p "$(dirname "$1")" && cat >"$1" && chmod "$2" "$1"'
        self.on(host, "sh", "-c", write, "sh", path, f"{mode:o}", stdin=text)

    def host_path(self, host: str, path: str) -> Path:
        """Return the path at which this machine sees a file of the host, so that tests can poll it without starting processes."""
        return Path(f"/proc/{self.host(host).pid}/root{path}")

    def cut(self, host: str) -> None:
        """Cut the link of a host at the switch: packets from and to the host are lost, but its TCP connections stay open."""
        self._ip("-n", self._switch, "link", "set", self.host(host).name, "down")

    def reconnect(self, host: str) -> None:
        """Restore the link of a host."""
        self._ip("-n", self._switch, "link", "set", self.host(host).name, "up")

    def inventory(
        self,
        hostvars: Mapping[str, Mapping[str, Any]] | None = None,
        groupvars: Mapping[str, Any] | None = None,
        name: str = "inventory",
        only: Collection[str] = (),
    ) -> Path:
        """Write an Ansible inventory and return its path.

        Its group `gpu_hosts` has the hosts in `only`, or all hosts if `only` is empty.
        """
        chosen = [self.host(each) for each in only] or self.hosts
        hosts: dict[str, dict[str, Any]] = {host.name: {"ansible_host": host.address} for host in chosen}
        for each, variables in (hostvars or {}).items():
            hosts[self.host(each).name].update(variables)
        common = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": SSH_OPTIONS,
            # The default directory is shared: Ansible would reuse the SSH connections of another lab with the same addresses.
            "ansible_control_path_dir": str(self._run_directory),
            "ansible_python_interpreter": str(MODULE_PYTHON),
        }
        group = {"hosts": hosts, "vars": {**common, **(groupvars or {})}}
        path = self.directory / f"{name}.yml"
        path.write_text(yaml.safe_dump({"all": {"children": {"gpu_hosts": group}}}, sort_keys=False))
        (self.directory / "host_vars").mkdir(exist_ok=True)
        (self.directory / "host_vars" / "localhost.yml").write_text(CONTROL_NODE)
        return path

    def prometheus(self, targets_glob: Path, scrape_interval: str = "1s") -> Prometheus:
        """Start Prometheus on the control node; it scrapes the targets in the file_sd files matching `targets_glob`."""
        self._servers += 1
        directory = Path(tempfile.mkdtemp(prefix="prometheus-", dir=self.directory))
        config, log = directory / "prometheus.yml", directory / "log"
        write_config(config, targets_glob, scrape_interval)
        address = f"{CONTROL_ADDRESS}:{9089 + self._servers}"
        options = [f"--web.listen-address={address}", f"--storage.tsdb.path={directory / 'data'}"]
        with log.open("w") as stream:
            command = ["prometheus", f"--config.file={config}", *options]
            server = self.popen(command, stdout=stream, stderr=subprocess.STDOUT)
        prometheus = Prometheus(url=f"http://{address}", log=log, run=self.run)
        prometheus.wait_ready(server)
        return prometheus

    # --- start and removal

    @property
    def _switch(self) -> str:
        return f"{self._run_directory.name}-switch"

    def _start(self) -> None:
        machine.sweep()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._run_directory = machine.claim()
        addresses = {name: f"10.77.0.{11 + number}" for number, name in enumerate(self._names)}
        namespaces = {name: f"{self._run_directory.name}-{name}" for name in self._names}
        names = {"localhost": "127.0.0.1", "control": CONTROL_ADDRESS, **addresses}
        (self.directory / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        self.key.unlink(missing_ok=True)  # ssh-keygen asks before it overwrites a file
        processes.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", self.key])

        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
        self._plug(self.control, "control", CONTROL_ADDRESS)
        for name in self._names:
            self._plug(namespaces[name], name, addresses[name])
            self._inits.append(boot(self.directory, name, namespaces[name]))
        self._wait_for_ssh(addresses)
        pids = {name: int((self.directory / f"{name}.pid").read_text()) for name in self._names}
        self.hosts = tuple(Host(name, addresses[name], namespaces[name], pids[name]) for name in self._names)

    def _plug(self, namespace: str, port: str, address: str) -> None:
        """Make a namespace and connect its eth0 to a port of the switch."""
        self._ip("netns", "add", namespace)
        self._ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", port, "netns", self._switch)
        self._ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip("-n", namespace, "link", "set", device, "up")
        self._ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")

    def _wait_for_ssh(self, addresses: Mapping[str, str]) -> None:
        """Wait until every host sends its SSH banner to the control node."""
        deadline = time.monotonic() + READY_SECONDS
        banner = 'read -r line <"/dev/tcp/$1/22" && [[ $line == SSH-* ]]'
        for (name, address), process in zip(addresses.items(), self._inits, strict=True):
            while not self._answers(["bash", "-c", banner, "bash", address]):
                if process.poll() is not None or time.monotonic() > deadline:
                    log = (self.directory / f"{name}.log").read_text(errors="replace")[-processes.SHOWN :]
                    state = "ended" if process.poll() is not None else f"does not answer SSH after {READY_SECONDS} s"
                    raise LabError(f"{name} {state}; its log:\n{log.strip() or '(empty)'}")
                time.sleep(0.02)

    def _answers(self, command: Command) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.run(command, check=False, timeout=1).returncode == 0
        return False

    def _remove(self) -> None:
        """End all processes and delete all namespaces of the lab. A KeyboardInterrupt during this is raised at the end."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._remove_once()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _remove_once(self) -> None:
        # end_all() may miss processes of the lab. An interrupt may come before a new process is added to _started or _inits, and
        # SSH control masters leave their process group. machine.remove() finds these processes by their network namespace.
        processes.end_all(self._started)
        if self._run_directory.name:
            machine.remove(self._run_directory.name)
        processes.end_all(self._inits, grace=0)
        for process in [*self._inits, *self._started]:
            processes.close_pipes(process)
        self._inits, self._started, self.hosts = [], [], ()

    def _popen(self, argv: Command, env: Mapping[str, str], **arguments: Any) -> subprocess.Popen[str]:
        defaults = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True}
        process: subprocess.Popen[str] = subprocess.Popen(
            [str(part) for part in argv], env=env, **{**defaults, **arguments}
        )
        self._started.append(process)
        return process

    def _control_prefix(self) -> list[str]:
        # Not `ip netns exec`, which hides /sys/fs/cgroup. `env --default-signal` lets Ctrl-C end the command even if a shell
        # started this process in the background: shells start background jobs with SIGINT ignored, and children inherit that.
        return ["nsenter", f"--net={machine.NAMESPACES / self.control}", "--", "env", "--default-signal"]

    @staticmethod
    def _ip(*arguments: str) -> None:
        processes.run(["ip", *arguments], timeout=10)


def main(arguments: list[str] | None = None) -> int:
    """Start a lab, print the path of its inventory and keep it until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.lab", description=main.__doc__)
    parser.add_argument("hosts", nargs="?", type=int, default=3)
    count = parser.parse_args(arguments).hosts

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell starts background jobs with SIGINT ignored
        signal.signal(number, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="rackproof-lab-") as directory, Lab(Path(directory), count) as lab:
            print(lab.inventory(), flush=True)
            print(f"Control node: nsenter --net={machine.NAMESPACES / lab.control} COMMAND", file=sys.stderr)
            while True:
                time.sleep(1)  # signal.pause() would miss a signal that arrives just before it
    except KeyboardInterrupt:
        return 0
    except LabUnavailable as error:
        print(error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
