"""Read the Ansible inventory: the hosts to test (group `gpu_hosts`), and their variables."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.inventory.sources import check_names_in_files
from fleet.records.remedies import with_remedy
from schemas import documents
from schemas.errors import UsageError

if TYPE_CHECKING:
    from jsonschema import ValidationError

GROUP = "gpu_hosts"
MAX_TYPING_ERRORS = 2
"""A name counts as a misspelt variable of Rackproof if it has at most this many missing or extra characters. A wrong character
counts as one missing and one extra."""
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
"""Texts that stand for a boolean. An INI inventory and `-e name=value` may give a boolean variable as text."""
DEADLINE_S = 600
"""Longest time for ansible-inventory. The inventory plugin of a cloud provider may need minutes to query the provider."""
SETTINGS = {
    "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
    "ANSIBLE_INVENTORY_IGNORE": ".pyc, .pyo, .swp, .bak, ~, .rpm, .md, .txt, .rst, .orig, .cfg, .retry, .csv",
    "ANSIBLE_DUPLICATE_YAML_DICT_KEY": "error",
}
"""Environment variables with the same effect as settings in Rackproof's ansible.cfg. They are needed because ansible-inventory
reads that file only if it is in the current directory."""
DEFAULT_BMC_PORTS = {"redfish": 443, "ipmi": 623}
LISTED = ": write the inventory in the format of `ansible-inventory --list`"

Variables = dict[str, Any]


def read_inventory(sources: Iterable[str]) -> dict[str, Variables]:
    """Return host -> variables for every host of the group `gpu_hosts`, in inventory order.

    `sources` are as for `ansible-playbook -i`, or one JSON file in the format of `ansible-inventory --list`.

    Raises:
        UsageError: the inventory, the group or its hosts are missing, a host name or a variable is invalid, or two hosts have
            the same address.
    """
    return check_listing(_listing(list(sources)))


def check_listing(listing: Mapping[str, Any]) -> dict[str, Variables]:
    """Return the hosts of a listing (the format of `ansible-inventory --list`), checked by `check_hosts`. Raises UsageError.

    The role `plan` passes a listing of its own, which has the values of only some variables. This listing also has the names of
    all variables, in `_meta.names`, and the sources of the inventory, in `_meta.sources`. `check_names` and
    `check_names_in_files` check them.
    """
    check_names_in_files(_names(listing, "_meta", "sources"), _text_variables())
    hosts = check_hosts(hosts_of(listing))
    check_names(_names(listing, "_meta", "names"))
    return hosts


def check_hosts(hosts: Mapping[str, Variables]) -> dict[str, Variables]:
    """Return all hosts with their variables as `check_variables` converts them.

    Raises:
        UsageError: a host name or a variable is invalid, or two hosts have the same address.
    """
    checked = check_variables(hosts)
    check_addresses(checked)
    return checked


def check_names(names: Iterable[str]) -> None:
    """Raise UsageError if one of the names is an unknown or misspelt variable of Rackproof."""
    for name in names:
        if _is_ours(name) and name not in _schema_types():
            raise UsageError(f"unknown variable {name}{documents.nearest(name, _schema_types())}")


def _listing(sources: list[str]) -> Mapping[str, Any]:
    is_listing = len(sources) == 1 and sources[0].endswith(".json")
    source = ", ".join(sources)
    try:
        text = _read(source) if is_listing else _ansible_inventory(sources)
        listing = documents.parse(text, source=source, max_bytes=200_000_000)
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    if not isinstance(listing, dict):
        raise UsageError(f"{source}: not an inventory")
    return listing


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _ansible_inventory(sources: list[str]) -> bytes:
    for source in sources:
        if "," not in source and not Path(source).exists():  # a source with a comma may be a list of hosts
            raise UsageError(f"inventory {source}: no such file or directory")
    check_names_in_files(sources, _text_variables())
    program = shutil.which("ansible-inventory", path=Path(sys.executable).parent) or shutil.which("ansible-inventory")
    if program is None:
        raise UsageError("ansible-inventory is not on PATH: install rackproof[control], or run `make dev`")
    arguments = [argument for source in sources for argument in ("-i", source)]
    command = [program, *arguments, "--list"]
    try:
        completed = subprocess.run(
            command, capture_output=True, check=False, timeout=DEADLINE_S, env={**SETTINGS, **os.environ}
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"inventory {', '.join(sources)}: ansible-inventory did not finish within {DEADLINE_S} s: "
            "run `ansible-inventory -i SOURCE --list` to see what it waits for"
        ) from None
    if completed.returncode:
        message = completed.stderr.decode(errors="replace")
        raise UsageError(f"inventory {', '.join(sources)}: {with_remedy(_parse_error(message))}")
    return completed.stdout


def _parse_error(message: str) -> str:
    """Return file and cause of an error of ansible-inventory, which tries several plugins on a file and reports every error.

    If the message has no known form, return its beginning.
    """
    message = " ".join(message.split())
    causes = re.findall(
        r"<<< caused by >>> (.*?) Origin: (?:<inventory plugin \S+ with source '([^']*)'>|(\S+))", message
    )
    # The plugin `auto` reports "no root 'plugin' key" for every file that does not configure a plugin.
    # So this error is never the cause.
    found = [(source or origin, cause) for cause, source, origin in causes if "no root 'plugin' key" not in cause]
    if not found:
        return message[:500]
    origin, first = found[0]
    is_yaml = origin.partition(":")[0].endswith((".yml", ".yaml", ".json"))
    return f"{origin}: {first if is_yaml else '; '.join(dict.fromkeys(cause for _, cause in found))}"


def hosts_of(listing: Mapping[str, Any]) -> dict[str, Variables]:
    """Return the hosts of `gpu_hosts` and its child groups, each with its variables. Raises UsageError."""
    if GROUP not in listing:
        known = [name for name in listing if name != "_meta"]
        raise UsageError(
            f"the inventory has no group {GROUP}{documents.nearest(GROUP, known)}: put the hosts to test in this group"
        )
    names: list[str] = []
    pending, visited = [GROUP], set()
    while pending:
        group = pending.pop(0)
        if group in visited:
            continue
        visited.add(group)
        names.extend(_names(listing, group, "hosts"))
        pending.extend(_names(listing, group, "children"))
    if not names:
        raise UsageError(f"the group {GROUP} of the inventory has no hosts")
    hostvars = _entry(listing, "_meta").get("hostvars", {})
    hosts: dict[str, Any] = hostvars if isinstance(hostvars, dict) else dict.fromkeys(names)
    if wrong := [name for name in names if not isinstance(hosts.get(name, {}), dict)]:
        raise UsageError(f"the inventory: _meta.hostvars has no mapping of variables for {wrong[0]}{LISTED}")
    return {name: dict(hosts.get(name, {})) for name in names}


def _entry(listing: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    entry = listing.get(group, {})
    if not isinstance(entry, dict):
        raise UsageError(f"the inventory: {group} is not a mapping{LISTED}")
    return entry


def _names(listing: Mapping[str, Any], group: str, key: str) -> list[str]:
    names = _entry(listing, group).get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"the inventory: {group}.{key} is not a list of names{LISTED}")
    return names


def check_variables(hosts: Mapping[str, Variables]) -> dict[str, Variables]:
    """Return all hosts, with the values of Rackproof's variables converted to the types of the schema.

    An INI inventory gives some booleans and numbers as text, such as `yes`.

    Raises:
        UsageError: a host name is invalid, or a variable of Rackproof is unknown or invalid. The message names the host and, for
            an unknown variable, the known variable with the most similar name. Variables of other software are ignored, unless
            the name is probably a misspelt variable of Rackproof.
    """
    checked = {}
    for name, variables in hosts.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}", name):
            raise UsageError(f"host {name!r}: a host name may have only letters, digits, '.', '_' and '-'")
        ours = {key: _without_final_slash(key, _typed(key, value)) for key, value in variables.items() if _is_ours(key)}
        # Errors on unknown variables have an empty path, so they come first.
        for error in sorted(documents.faults(ours, "inventory"), key=lambda error: [str(step) for step in error.path]):
            if isinstance(error.instance, str) and "{{" in error.instance:
                shown = (
                    "the value, which is secret and not shown," if documents.is_secret(error) else repr(error.instance)
                )
                raise UsageError(
                    f"host {name}: {error.path[0]}: {shown} is a template, which only a playbook evaluates: "
                    "give a value here, or plan with the playbook"
                )
            problem = (
                documents.explain(error)
                .replace("the document: unknown ", "unknown variable ")
                .removeprefix("the document: ")
            )
            raise UsageError(f"host {name}: {problem}{_remedy(error)}")
        checked[name] = {**variables, **ours}
    return checked


@cache
def _schema_types() -> dict[str, Any]:
    """Return variable -> type in the schema; None for a variable of several types."""
    return {name: item.get("type") for name, item in documents.part("inventory")["properties"].items()}


@cache
def _text_variables() -> frozenset[str]:
    """Return the variables whose value is a text, such as a name, and no secret."""
    properties = documents.part("inventory")["properties"].items()
    return frozenset(
        name for name, item in properties if item.get("type") == "string" and documents.CONFIDENTIAL not in item
    )


@cache
def _is_ours(name: str) -> bool:
    """Return whether this is a variable of Rackproof, or probably a misspelt one."""
    known = _schema_types()
    return name in known or name.startswith("rackproof_") or any(_is_misspelt(name, other) for other in known)


def _is_misspelt(name: str, known: str) -> bool:
    if abs(len(name) - len(known)) > MAX_TYPING_ERRORS:
        return False
    same = sum(
        block.size for block in difflib.SequenceMatcher(None, name.lower(), known, autojunk=False).get_matching_blocks()
    )
    return len(name) + len(known) - 2 * same <= MAX_TYPING_ERRORS


def _typed(name: str, value: Any) -> Any:
    """Return the value converted to its type in the schema; unchanged if it has this type already or cannot be converted."""
    wanted = _schema_types().get(name)
    text = value.strip().lower() if isinstance(value, str) else str(value) if type(value) is int else ""
    if wanted == "boolean" and text in (*TRUE, *FALSE):
        return text in TRUE
    if wanted == "integer" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    if (
        wanted == "number"
        and isinstance(value, str)
        and re.fullmatch(r"[0-9]{1,18}(\.[0-9]+)?(e[+-]?[0-9]{1,3})?", text)
    ):
        return float(text)
    if wanted == "string" and type(value) is int:
        return str(value)
    return value


def _without_final_slash(name: str, value: Any) -> Any:
    """Return a list of directories without the slashes at their ends. Return the value of any other variable unchanged."""
    if name not in _directory_lists() or not isinstance(value, list):
        return value
    return [item.rstrip("/") or item if isinstance(item, str) else item for item in value]


@cache
def _directory_lists() -> frozenset[str]:
    """Return the variables whose value is a list of directories."""
    directory, variables = documents.part("inventory", "$defs/directory"), documents.part("inventory")["properties"]
    return frozenset(name for name, item in variables.items() if item.get("items") == {"description": ""} | directory)


def _remedy(error: ValidationError) -> str:
    """Return how to correct a value; empty for errors that need no more words.

    For a value out of range, or one that matches no alternative, return the first sentence of the variable's description. For a
    value that has the wrong type because of the inventory's format, return how to write it.
    """
    if error.validator in ("minimum", "maximum", "oneOf"):
        description = str(documents.part("inventory")["properties"][error.absolute_path[0]]["description"])
        return f" ({description.partition('. ')[0]})"
    if error.validator != "type" or len(error.absolute_path) != 1:
        return ""
    name, value, wanted = error.absolute_path[0], error.instance, error.validator_value
    if wanted == "string" and isinstance(value, float):  # YAML reads 580.10 as the number 580.1
        return f' with all its digits: {name}: "…" (in the line of a host in an INI inventory {name}=\'"…"\')'
    if wanted in ("array", "object") and isinstance(value, str):
        example = "[a, b]" if wanted == "array" else "{name: value}"
        return f": an INI inventory and `-e NAME=VALUE` give text; set the variable in YAML: `{name}: {example}`"
    return ""


def check_addresses(hosts: Mapping[str, Variables]) -> None:
    """Raise UsageError if an address or port is a template, or if two hosts have the same address and port or the same BMC.

    Hosts with a local connection may have the same address.
    """
    _check_bmc_addresses(hosts)
    visited: dict[tuple[str, str], str] = {}
    for name, variables in hosts.items():
        for variable in ("ansible_host", "ansible_port"):
            if "{{" in (value := str(variables.get(variable, ""))):
                raise UsageError(
                    f"host {name}: {variable}: {value!r} is a template, which only a playbook evaluates: "
                    "give a value here, or plan with the playbook"
                )
        if variables.get("ansible_connection") == "local":
            continue
        key = (str(variables.get("ansible_host", name)), str(variables.get("ansible_port", 22)))
        if key in visited:
            raise UsageError(
                f"hosts {visited[key]} and {name} have the same address {key[0]} port {key[1]}: "
                "one machine would be measured twice; correct ansible_host"
            )
        visited[key] = name


def _check_bmc_addresses(hosts: Mapping[str, Variables]) -> None:
    """Raise UsageError if two hosts have the same BMC."""
    visited: dict[tuple[str, str], str] = {}
    for name, variables in hosts.items():
        if not (address := str(variables.get("rackproof_bmc_address") or "")):
            continue
        key = _bmc_endpoint(address, str(variables.get("rackproof_bmc_protocol", "redfish")))
        if key in visited:
            raise UsageError(
                f"hosts {visited[key]} and {name} have the same BMC {address}: each host has its own; correct "
                "rackproof_bmc_address"
            )
        visited[key] = name


def _bmc_endpoint(address: str, protocol: str) -> tuple[str, str]:
    """Return host and port of a BMC. All spellings of an address give the same result. A default port is empty."""
    host, port = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::(\d+))?", address).groups(default="")  # type: ignore[union-attr]
    host = host.strip("[]").rstrip(".").casefold()
    with suppress(ValueError):
        host = str(ip_address(host))
    is_default = int(port or DEFAULT_BMC_PORTS[protocol]) == DEFAULT_BMC_PORTS[protocol]
    return host, "" if is_default else port.lstrip("0")
