"""The roles' variables: defaults, argument specs, the inventory's schema and its documentation say the same."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.inventory import OURS, check_variables

ROOT = Path(__file__).parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
SCHEMA: dict[str, Any] = json.loads((ROOT / "schemas" / "inventory.schema.json").read_text())["properties"]
TYPES = {"str": "string", "int": "integer", "float": "number", "list": "array", "dict": "object"}
"""Ansible's names of types, and the schema's. A truth may be text in an inventory, and `raw` is anything."""


def read(role: str, path: str) -> dict[str, Any]:
    file = ROOT / "roles" / role / path
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def defaults(role: str) -> dict[str, Any]:
    return read(role, "defaults/main.yml")


def role_vars(role: str) -> dict[str, Any]:
    return read(role, "vars/main.yml")


def options(role: str) -> dict[str, dict[str, Any]]:
    """What the role's argument specs say of each variable. Ansible checks `main` before the tasks of that name."""
    entry = "main" if (ROOT / "roles" / role / "tasks" / "main.yml").exists() else "inventory"
    specs = read(role, "meta/argument_specs.yml")
    found: dict[str, dict[str, Any]] = specs["argument_specs"][entry]["options"] if specs else {}
    return found


def for_operators(role: str) -> dict[str, Any]:
    """The defaults that an inventory may override."""
    return {name: value for name, value in defaults(role).items() if OURS.match(name)}


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_equal_defaults(role: str) -> None:
    assert {name: option["default"] for name, option in options(role).items()} == defaults(role)


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_have_a_type_and_one_line_that_says_what_it_is(role: str) -> None:
    for name, option in options(role).items():
        assert option["type"] in (*TYPES, "bool", "raw"), name
        assert re.fullmatch(r"\S.{10,}\.", option["description"]), name


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_say_what_the_schema_says(role: str) -> None:
    for name in for_operators(role):
        option, schema = options(role)[name], SCHEMA[name]
        assert option["description"] == schema["description"], name
        if option["type"] in TYPES:
            assert schema.get("type", "string") == TYPES[option["type"]], name
            assert option.get("choices") == schema.get("items", schema).get("enum"), name


def test_default_that_no_inventory_overrides_is_for_a_playbook() -> None:
    """What nobody sets is no default: it is in vars/main.yml."""
    playbooks = "".join(path.read_text() for path in (ROOT / "playbooks").glob("*.yml"))
    others = {name: role for role in ROLES for name in defaults(role) if not OURS.match(name)}
    for name, role in others.items():
        assert name.startswith(f"{role}_"), name
        assert re.search(rf"^ +{name}: ", playbooks, re.MULTILINE), name


@pytest.mark.parametrize("role", ROLES)
def test_what_nobody_sets_begins_with_an_underscore_and_the_role(role: str) -> None:
    prefix = "_rackproof_" if role == "common" else f"_{role}_"
    assert [name for name in role_vars(role) if not name.startswith(prefix)] == []


def test_every_default_is_a_variable_that_the_schema_allows() -> None:
    for role in ROLES:
        plain = {name: value for name, value in for_operators(role).items() if "{{" not in str(value) and value != ""}
        assert set(for_operators(role)) <= set(SCHEMA), role
        check_variables({"host": plain})


def test_no_two_roles_have_one_variable() -> None:
    names = [name for role in ROLES for name in (*defaults(role), *role_vars(role))]
    assert sorted(names) == sorted(set(names))


def test_every_variable_that_roles_use_is_known() -> None:
    used = {
        name
        for path in (ROOT / "roles").rglob("*")
        if path.suffix in (".yml", ".j2")
        for name in re.findall(r"(?<![\w-])((?:rackproof|nvidia_driver|container_toolkit)_[a-z_]+)", path.read_text())
    }
    assert used - set(ROLES) <= set(SCHEMA)


def test_documentation_lists_exactly_the_variables() -> None:
    page = (ROOT / "docs" / "inventory.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(SCHEMA)


def test_example_inventory_is_a_valid_one() -> None:
    from fleet.inventory import read_inventory
    from fleet.plan import make_plan, read_profile

    hosts = read_inventory([str(ROOT / "inventory" / "example")])
    plan = make_plan(read_profile("standard"), hosts, run_id="r", nonce="0" * 32, created="2026-11-21T04:00:00Z")
    assert plan.gangs() == {"rack12": ("r12-h01", "r12-h02", "r12-h03", "r12-h04")}


DRIVERS = role_vars("nvidia_driver")["_nvidia_driver_table"]


def test_playbook_of_the_drivers_has_the_roles_default() -> None:
    plays = yaml.safe_load((ROOT / "playbooks" / "drivers.yml").read_text())
    serial = [play["serial"] for play in plays if "serial" in play]
    assert len(serial) == 2
    assert all(f"default('{defaults('nvidia_driver')['nvidia_driver_serial']}')" in text for text in serial)


@pytest.mark.parametrize("role", ["nvidia_driver", "container_toolkit"])
def test_both_entries_of_a_role_take_the_same_options(role: str) -> None:
    specs = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    assert specs["install"]["options"] == specs["main"]["options"]


@pytest.mark.parametrize("distribution", ["debian12", "ubuntu2404", "rhel9"])
def test_packages_that_are_installed_are_in_the_recorded_indexes(distribution: str) -> None:
    record = yaml.safe_load((ROOT / "tests" / "data" / "packages.yml").read_text())[distribution]
    here = DRIVERS[distribution]
    assert {*here["open"], *here["proprietary"], "nvidia-fabricmanager"} <= set(record["packages"])


def test_driver_and_toolkit_are_installed_on_the_same_distributions_by_the_same_means() -> None:
    toolkit = role_vars("container_toolkit")["_container_toolkit_table"]
    assert {name: here["manager"] for name, here in DRIVERS.items()} == toolkit
    page = (ROOT / "docs" / "drivers.md").read_text()
    for name in ("Debian 12", "Ubuntu 22.04", "24.04", "RHEL 9"):
        assert name in page


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("", True), ("580", True), ("580.", True), ("580.159.04", True), ("580*", False), ("latest", False)],
)
def test_versions_that_an_inventory_may_ask_for(value: str, allowed: bool) -> None:
    assert bool(re.search(SCHEMA["nvidia_driver_version"]["pattern"], value)) is allowed


@pytest.fixture
def probe() -> Any:
    """Runs on hosts, where nothing of ours is installed yet."""
    found = importlib.util.spec_from_file_location("probe", ROOT / "roles/preflight/files/probe.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_who_has_a_port_is_told_though_it_closes_a_file_meanwhile(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own supervisor, whose port is no obstacle, read as somebody else's."""
    seen = os.readlink
    gone = iter([True])

    def read(path: str) -> str:
        if path.startswith(f"/proc/{os.getpid()}/") and next(gone, False):
            raise FileNotFoundError(path)
        return seen(path)

    monkeypatch.setattr(os, "readlink", read)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert probe.listener(server.getsockname()[1]).startswith(f"process {os.getpid()} (")


def test_a_port_whose_process_ended_while_it_was_looked_for_is_free(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([{"socket:[1]"}, set()])
    monkeypatch.setattr(probe, "listening", lambda port: next(looks))
    assert probe.listener(29500) == ""


def test_a_port_of_a_process_that_cannot_be_seen_is_taken(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "listening", lambda port: {"socket:[1]"})
    assert probe.listener(29500) == "a process of another user"
