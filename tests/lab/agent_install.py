"""Install the agent on lab hosts (hosts simulated on this machine), for tests that do not test the installation itself.

In a test run, the playbook installs the agent on one host; every other host gets a copy of the installed files.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from schemas.locks import exclusive
from tests.lab import processes
from tests.lab.kill_points import STATE, Site
from tests.lab.lab import Host, Lab

PREFIX = "/opt/rackproof"


def install_agent(lab: Lab, archive: Path) -> None:
    """Install the agent on every host of the lab.

    The first call in a test run creates `archive`, a tar file of the installed agent. All pytest workers use this file.
    """
    first, *others = lab.hosts
    with exclusive(archive.with_suffix(".lock")):
        if archive.exists():
            others = [first, *others]
        else:
            _deploy(lab, first)
            _pack(first, archive)
    for host in others:
        with archive.open("rb") as packed:
            subprocess.run(_tar_command(host, "-x"), stdin=packed, check=True, timeout=60)


def _deploy(lab: Lab, host: Host) -> None:
    site = Site(lab=lab, runs=lab.directory / "install")
    site.runs.mkdir()
    # Keep no SSH connection open: later tests would reuse it, although they may have changed the settings of sshd.
    variables = {"rackproof_gang": "none", "ansible_ssh_args": "-o ControlMaster=no"}
    attempt = site.start("install", "deploy", only=[host.name], **variables)
    output = attempt.end()
    assert attempt.process.returncode == 0, output[-4000:]
    lab.on(host.name, f"{PREFIX}/bin/rackproof", "stop", f"{STATE}/exporter")
    lab.on(host.name, "rm", "-r", f"{STATE}/exporter")


def _pack(host: Host, archive: Path) -> None:
    partial = archive.with_suffix(".part")
    with partial.open("w") as file:
        processes.run(_tar_command(host, "-c", PREFIX[1:], STATE[1:]), stdout=file)
    partial.rename(archive)


def _tar_command(host: Host, *arguments: str) -> list[str]:
    """Return a tar command that runs in the root of the host and uses standard input or output of this machine."""
    return [str(part) for part in host.inside(["tar", "-f", "-", *arguments], Path("/"))]
