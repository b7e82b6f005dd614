"""Hosts that have the agent already, as the playbook installs it: once in a test run, and every other host gets a copy.

For tests of what comes after. That it can be installed, with what it needs, is seen by test_roles and tests/unit/test_collection.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from schemas.locks import exclusive
from tests.lab import processes
from tests.lab.kill_points import STATE, Site
from tests.lab.lab import Host, Lab

PREFIX = "/opt/rackproof"


def settle(lab: Lab, archive: Path) -> None:
    """Puts the agent on every host; `archive` is what all workers of a test run make once and share."""
    first, *others = lab.hosts
    with exclusive(archive.with_suffix(".lock")):
        if archive.exists():
            others = [first, *others]
        else:
            _deploy(lab, first)
            _pack(first, archive)
    for host in others:
        with archive.open("rb") as packed:
            subprocess.run(_inside(host, "-x"), stdin=packed, check=True, timeout=60)


def _deploy(lab: Lab, host: Host) -> None:
    site = Site(lab=lab, runs=lab.directory / "settled")
    site.runs.mkdir()
    # No connection stays: who comes next would have it, with the settings that sshd had then.
    alone = {"rackproof_gang": "none", "ansible_ssh_args": "-o ControlMaster=no"}
    attempt = site.start("settled", "deploy", only=[host.name], **alone)
    output = attempt.end()
    assert attempt.process.returncode == 0, output[-4000:]
    lab.on(host.name, f"{PREFIX}/bin/rackproof", "stop", f"{STATE}/exporter")
    lab.on(host.name, "rm", "-r", f"{STATE}/exporter")


def _pack(host: Host, archive: Path) -> None:
    part = archive.with_suffix(".part")
    with part.open("w") as file:
        processes.run(_inside(host, "-c", PREFIX[1:], STATE[1:]), stdout=file)
    part.rename(archive)


def _inside(host: Host, *arguments: str) -> list[str]:
    """tar, in the root of the host, of or into a file of this machine."""
    return [str(part) for part in host.inside(["tar", "-f", "-", *arguments], Path("/"))]
