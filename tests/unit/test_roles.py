"""The roles' variables: defaults, argument specs, the inventory's schema and its documentation say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.inventory import OURS, check_variables

ROOT = Path(__file__).parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
SCHEMA: dict[str, Any] = json.loads((ROOT / "schemas" / "inventory.schema.json").read_text())["properties"]


def defaults(role: str) -> dict[str, Any]:
    path = ROOT / "roles" / role / "defaults" / "main.yml"
    return yaml.safe_load(path.read_text()) if path.exists() else {}


def for_operators(role: str) -> dict[str, Any]:
    """The defaults that an inventory may override."""
    return {name: value for name, value in defaults(role).items() if OURS.match(name)}


@pytest.mark.parametrize("role", [role for role in ROLES if role != "common" and for_operators(role)])
def test_argument_specs_equal_defaults(role: str) -> None:
    specs = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())
    options = specs["argument_specs"]["main"]["options"]
    assert {name: option["default"] for name, option in options.items()} == for_operators(role)
    assert {name: option["description"] for name, option in options.items()} == {
        name: SCHEMA[name]["description"] for name in options
    }


def test_every_default_is_a_variable_that_the_schema_allows() -> None:
    for role in ROLES:
        plain = {name: value for name, value in for_operators(role).items() if "{{" not in str(value) and value != ""}
        assert set(for_operators(role)) <= set(SCHEMA), role
        check_variables({"host": plain})


def test_no_two_roles_have_a_default_for_one_variable() -> None:
    names = [name for role in ROLES for name in defaults(role)]
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
