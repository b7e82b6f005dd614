"""Boot a host with systemd in systemd-nspawn.

The host has a copy-on-write view of this machine's root file system and its own network namespace. Its sshd listens at 127.0.0.1.

    with SystemdHost(tmp_path) as host:
        host.on("systemctl", "is-system-running")

Needs what the lab needs (lab.py), and the Debian package systemd-container.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from . import machine, processes
from .hosts import CHECKOUT, outside_root_overlay
from .lab import CONTROL_NODE, MODULE_PYTHON, SSH_OPTIONS

READY_SECONDS = 30.0
BASE, PACKAGES = "/usr/local/lib/lab-base", "/usr/local/lib/lab-packages"
"""Mount points in the host for the Python installation and the site-packages of the tests.

On this machine, the two directories may be below /root or /tmp. A service of the host may have a private /tmp, or may run as
a user who cannot read /root."""
# Script that starts the host. $1 is the directory of the host. $2 are the paths of new control groups: the systemd of the host
# creates its groups below them. The script is run in a new mount namespace.
START = """
set -e
mount --make-rprivate /
mkdir -p "$1/root"
mount --bind / "$1/root"
for group in $2; do mkdir "$group"; echo $$ >"$group/cgroup.procs"; done
shift 2
exec systemd-nspawn "$@"
"""
CGROUPS = Path("/sys/fs/cgroup")
HIERARCHIES = [path for path in (CGROUPS / "systemd", CGROUPS / "unified") if path.is_dir()] or [CGROUPS]
"""Root directories of the control group hierarchies of systemd: two if cgroup v1 and v2 are both mounted, else one."""


class SystemdHost:
    """A host with systemd. It runs from the start of the `with` block to its end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._claim = Path()
        self._namespace = ""
        self._groups: list[Path] = []
        self._process: subprocess.Popen[str] | None = None
        self._init_pid = 0

    def __enter__(self) -> SystemdHost:
        machine.sweep()
        self.directory.mkdir(parents=True, exist_ok=True)
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

    def on(self, *command: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command inside the host, without SSH."""
        enter = ["nsenter", f"--target={self._init_pid}", "--all", "--"]
        return processes.run([*enter, *command], check=check, timeout=timeout)

    def control(self, command: processes.Command, **arguments: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the control node, which reaches the host at 127.0.0.1."""
        enter = ["nsenter", f"--net={machine.NAMESPACES / self._namespace}", "--", "env", "--default-signal"]
        return processes.run([*enter, *command], **arguments)

    def inventory(self, **variables: Any) -> Path:
        """Write an inventory of the host, `node1`, and return its path."""
        common = {
            "ansible_host": "127.0.0.1",
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.directory / "key"),
            "ansible_ssh_common_args": SSH_OPTIONS,
            "ansible_control_path_dir": str(self._claim),
            "ansible_python_interpreter": str(MODULE_PYTHON),
        }
        path = self.directory / "inventory.yml"
        group = {"hosts": {"node1": {}}, "vars": {**common, **variables}}
        path.write_text(yaml.safe_dump({"all": {"children": {"gpu_hosts": group}}}, sort_keys=False))
        (self.directory / "host_vars").mkdir(exist_ok=True)
        (self.directory / "host_vars" / "localhost.yml").write_text(CONTROL_NODE)
        return path

    def _start(self) -> None:
        self._claim = machine.claim()
        self._namespace = f"{self._claim.name}-systemd"
        self._groups = [hierarchy / self._claim.name for hierarchy in HIERARCHIES]
        processes.run(["ip", "netns", "add", self._namespace])
        processes.run(["ip", "-n", self._namespace, "link", "set", "lo", "up"])
        key = self.directory / "key"
        key.unlink(missing_ok=True)
        processes.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
        shown = outside_root_overlay([CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)])
        nspawn = [
            *("--quiet", "--boot", "--register=no", "--keep-unit", "--volatile=overlay", "--console=pipe"),
            f"--network-namespace-path={machine.NAMESPACES / self._namespace}",
            f"--directory={self.directory / 'root'}",
            f"--bind-ro={key}.pub:/root/.ssh/authorized_keys",
            # Give the host the kernel log and the capability to read it.
            *("--bind=/dev/kmsg", "--capability=CAP_SYSLOG"),
            *(f"--bind-ro={path}" for path in shown),
            f"--bind-ro={sys.base_prefix}:{BASE}",
            f"--bind-ro={sysconfig.get_path('purelib')}:{PACKAGES}",
            *("--hostname=node1", "systemd.unit=ssh.service"),
        ]
        groups = " ".join(map(str, self._groups))
        with (self.directory / "log").open("w") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--", "bash", "-c", START, "bash", self.directory, groups, *nspawn],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._wait_for_ssh()

    def _wait_for_ssh(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_SECONDS
        banner = ["bash", "-c", 'read -r line <"/dev/tcp/127.0.0.1/22" && [[ $line == SSH-* ]]']
        while self.control(banner, check=False, timeout=5).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self.directory / "log").read_text(errors="replace")[-processes.SHOWN :]
                raise machine.LabError(f"the host with systemd does not answer SSH; its log:\n{log}")
            time.sleep(0.05)
        children = processes.run(["pgrep", "--parent", str(self._process.pid)]).stdout.split()
        self._init_pid = int(children[0])
        # Empty the start-up files of the shell, which would slow down every SSH command.
        self.on(
            "sh",
            "-c",
            "for file in /root/.bashrc /root/.profile /root/.bash_profile /etc/bash.bashrc; do : >$file; done",
        )

    def _remove(self) -> None:
        if self._process is not None:
            processes.end_all([self._process], grace=0)  # all processes of the host end with systemd-nspawn
        if self._claim.name:
            machine.remove(self._claim.name)
        deadline = time.monotonic() + 5  # a control group cannot be removed until its killed processes have exited
        while any(group.is_dir() for group in self._groups) and time.monotonic() < deadline:
            for group in self._groups:
                for inner in sorted([group, *group.rglob("*/")], reverse=True):
                    with contextlib.suppress(OSError):
                        inner.rmdir()
            time.sleep(0.01)
