"""Read the inventory: the hosts to accept, and their variables."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from schemas import documents
from schemas.errors import UsageError

GROUP = "gpu_hosts"
OUR_VARIABLE = re.compile(r"^(rackproof|nvidia_driver|container_toolkit)_")

Variables = dict[str, Any]


def read_inventory(sources: Iterable[str]) -> dict[str, Variables]:
    """Return host -> variables for every host of the group `gpu_hosts`, in inventory order.

    `sources` are as for `ansible-playbook -i`, or one JSON file in the format of `ansible-inventory --list`.

    Raises:
        UsageError: the inventory, the group or its hosts are missing, or a variable is unknown or of the wrong type.
    """
    hosts = hosts_of(_listing(list(sources)))
    check_variables(hosts)
    check_addresses(hosts)
    return hosts


def _listing(sources: list[str]) -> Mapping[str, Any]:
    if len(sources) == 1 and sources[0].endswith(".json"):
        text, source = _read(sources[0]), sources[0]
    else:
        text, source = _ansible_inventory(sources), ", ".join(sources)
    try:
        listing = documents.parse(text, source=source, max_bytes=200_000_000)
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    if not isinstance(listing, dict):
        raise UsageError(f"{source}: not an inventory")
    return listing


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _ansible_inventory(sources: list[str]) -> str:
    for source in sources:
        if not source.endswith(",") and not Path(source).exists():
            raise UsageError(f"inventory {source}: no such file or directory")
    program = shutil.which("ansible-inventory", path=Path(sys.executable).parent) or shutil.which("ansible-inventory")
    if program is None:
        raise UsageError("ansible-inventory is not on PATH: install rackproof[control], or run `make dev`")
    arguments = [argument for source in sources for argument in ("-i", source)]
    completed = subprocess.run([program, *arguments, "--list"], capture_output=True, text=True, check=False)
    if completed.returncode:
        message = " ".join(completed.stderr.split())
        cause = re.search(
            r"<<< caused by >>> (.*?) Origin: (\S+)", message
        )  # every inventory plugin reports it; show it once
        raise UsageError(f"inventory {', '.join(sources)}: {f'{cause[2]}: {cause[1]}' if cause else message[:500]}")
    return completed.stdout


def hosts_of(listing: Mapping[str, Any]) -> dict[str, Variables]:
    """Return the hosts of `gpu_hosts` and its child groups, each with its variables."""
    if GROUP not in listing:
        known = [name for name in listing if name != "_meta"]
        raise UsageError(
            f"the inventory has no group {GROUP}{documents.nearest(GROUP, known)}: add the hosts to accept to it"
        )
    names: list[str] = []
    pending, visited = [GROUP], set()
    while pending:
        group = pending.pop(0)
        if group in visited:
            continue
        visited.add(group)
        names.extend(listing.get(group, {}).get("hosts", []))
        pending.extend(listing.get(group, {}).get("children", []))
    if not names:
        raise UsageError(f"the group {GROUP} of the inventory has no hosts")
    variables = listing.get("_meta", {}).get("hostvars", {})
    return {name: dict(variables.get(name, {})) for name in names}


def check_variables(hosts: Mapping[str, Variables]) -> None:
    """Raise UsageError if a variable of Rackproof is unknown or invalid; the message names the host and the nearest variable."""
    for name, variables in hosts.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}", name):
            raise UsageError(f"host {name!r}: a host name may have only letters, digits, '.', '_' and '-'")
        ours = {key: value for key, value in variables.items() if OUR_VARIABLE.match(key)}
        # Unknown variable names sort first.
        for error in sorted(documents.faults(ours, "inventory"), key=lambda error: [str(step) for step in error.path]):
            if isinstance(error.instance, str) and "{{" in error.instance:
                raise UsageError(
                    f"host {name}: {error.path[0]}: {error.instance!r} is a template, which only a playbook evaluates: "
                    "give a value here, or plan with the playbook"
                )
            problem = (
                documents.explain(error)
                .replace("the document: unknown ", "unknown variable ")
                .removeprefix("the document: ")
            )
            raise UsageError(f"host {name}: {problem}")


def check_addresses(hosts: Mapping[str, Variables]) -> None:
    """Raise UsageError if two hosts are reached at the same address and port."""
    visited: dict[tuple[str, str], str] = {}
    for name, variables in hosts.items():
        if variables.get("ansible_connection") == "local":
            continue
        key = (str(variables.get("ansible_host", name)), str(variables.get("ansible_port", 22)))
        if key in visited:
            raise UsageError(
                f"hosts {visited[key]} and {name} have the same address {key[0]} port {key[1]}: "
                "one machine would be measured twice; correct ansible_host"
            )
        visited[key] = name
