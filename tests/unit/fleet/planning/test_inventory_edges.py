"""Edge cases of an inventory: types and misspelt names of variables, groups, addresses and error texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.inventory import ansible
from fleet.inventory.ansible import (
    check_addresses,
    check_hosts,
    check_listing,
    check_names,
    check_variables,
    hosts_of,
    read_inventory,
)
from schemas.errors import UsageError


def typed(name: str, value: Any) -> Any:
    """Return `value` as `check_variables` converts it for the variable `name`."""
    return check_variables({"h1": {name: value}})["h1"][name]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rackproof_gpu_count", "8", 8),
        ("rackproof_gpu_count", " 8 ", 8),
        ("rackproof_gpu_count", 8, 8),
        ("rackproof_share_gpus", "Yes", True),
        ("rackproof_share_gpus", "on", True),
        ("rackproof_share_gpus", "1", True),
        ("rackproof_share_gpus", 1, True),
        ("rackproof_share_gpus", "off", False),
        ("rackproof_share_gpus", "no", False),
        ("rackproof_share_gpus", 0, False),
        ("rackproof_fabric_gbps", "400", 400.0),
        ("rackproof_fabric_gbps", "4e2", 400.0),
        ("rackproof_fabric_gbps", "1.5e-1", 0.15),
        ("rackproof_fabric_gbps", 400, 400),
        ("rackproof_rack", 12, "12"),
        ("rackproof_rack", "12", "12"),
        ("other_variable", "8", "8"),
    ],
)
def test_value_is_converted_to_the_type_of_its_variable(name: str, value: Any, expected: Any) -> None:
    result = typed(name, value)
    assert (result, type(result)) == (expected, type(expected))


def test_slash_at_the_end_of_a_directory_is_removed() -> None:
    assert typed("rackproof_local_storage", ["/data/", "/scratch"]) == ["/data", "/scratch"]
    with pytest.raises(UsageError, match="has non-unique elements"):
        typed("rackproof_shared_storage", ["/data/", "/data"])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("rackproof_gpu_count", "eight", ""),
        ("rackproof_gpu_count", "9" * 19, ""),
        ("rackproof_gpu_count", "8.5", ""),
        ("rackproof_gpu_count", True, ""),
        ("rackproof_share_gpus", "maybe", ""),
        ("rackproof_share_gpus", 2, ""),
        ("rackproof_fabric_gbps", "fast", ""),
        ("rackproof_rack", 580.1,
         ': write it in quotes with all its digits: rackproof_rack: "…" (in the line of a host in an INI inventory '
         'rackproof_rack=\'"…"\')'),
        ("rackproof_rack", True, ": write it in quotes"),
        ("rackproof_gpu_devices", "[0, 1]",
         ": an INI inventory and `-e NAME=VALUE` give text; set the variable in YAML: `rackproof_gpu_devices: [a, b]`"),
        ("rackproof_environment", "A=1",
         ": an INI inventory and `-e NAME=VALUE` give text; set the variable in YAML: `rackproof_environment: {name: value}`"),
        ("rackproof_gpu_devices", 3, ""),
        ("rackproof_environment", {"A": 1}, ": write it in quotes"),
    ],
)  # fmt: skip
def test_value_of_a_wrong_type_is_refused_with_a_remedy_only_if_there_is_one(name: str, value: Any, text: str) -> None:
    with pytest.raises(UsageError) as error:
        typed(name, value)
    message = str(error.value)
    assert message.startswith(f"host h1: {name}")
    remedies = (": write it in quotes", ": an INI inventory")
    assert message.endswith(text) if text else not any(remedy in message for remedy in remedies)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rackproof_gpu_cont", "rackproof_gpu_count"),
        ("rackproof_gpu_counts", "rackproof_gpu_count"),
        ("rackproof_gpu_co", ""),
        ("rackprof_gpu_count", "rackproof_gpu_count"),
        ("rakprof_gpu_count", "rackproof_gpu_count"),
        ("RACKPROOF_gpu_count", "rackproof_gpu_count"),
    ],
)
def test_misspelt_variable_is_refused(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"unknown variable {name}.*{nearest}"):
        check_variables({"h1": {name: 8}})
    with pytest.raises(UsageError, match=f"unknown variable {name}.*{nearest}"):
        check_names(["ansible_host", name])


@pytest.mark.parametrize(
    "name", ["rakprf_gpu_count", "rack_gpu_count", "ackproo_gpu_coun", "gpu_count", "ansible_user"]
)
def test_variable_without_a_prefix_similar_to_rackproof_is_ignored(name: str) -> None:
    assert check_variables({"h1": {name: 8}}) == {"h1": {name: 8}}
    check_names([name])


def test_names_without_a_mistake_are_accepted() -> None:
    check_names(["rackproof_gpu_count", "ansible_host"])


def test_misspelt_name_in_a_listing_is_refused_even_without_a_value() -> None:
    listing = {"gpu_hosts": {"hosts": ["h1"]}, "_meta": {"hostvars": {"h1": {}}, "names": ["rackproof_gpu_cont"]}}
    with pytest.raises(UsageError, match="unknown variable rackproof_gpu_cont"):
        check_listing(listing)
    assert check_listing({**listing, "_meta": {"hostvars": {"h1": {}}}}) == {"h1": {}}


def test_group_with_a_similar_name_is_suggested_but_not_the_key_of_the_metadata() -> None:
    with pytest.raises(UsageError, match=r"the inventory has no group gpu_hosts.*gpu_host\b"):
        hosts_of({"gpu_host": {}, "_meta": {}})
    with pytest.raises(UsageError) as error:
        hosts_of({"_meta": {}})
    assert "_meta" not in str(error.value)


def test_group_that_contains_itself_is_read_once() -> None:
    listing = {
        "gpu_hosts": {"hosts": ["h1"], "children": ["more", "gone", "gpu_hosts"]},
        "more": {"hosts": ["h2", "h1"], "children": ["gpu_hosts"]},
        "_meta": {"hostvars": {"h2": {"a": 1}}},
    }
    assert hosts_of(listing) == {"h1": {}, "h2": {"a": 1}}


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ({"ansible_host": "10.0.0.1"}, {"ansible_host": "10.0.0.2"}, False),
        ({"ansible_host": "10.0.0.1"}, {"ansible_host": "10.0.0.1"}, True),
        ({"ansible_host": "10.0.0.1"}, {"ansible_host": "10.0.0.1", "ansible_port": 22}, True),
        ({"ansible_host": "10.0.0.1"}, {"ansible_host": "10.0.0.1", "ansible_port": 23}, False),
        ({"ansible_host": "10.0.0.1", "ansible_port": "23"}, {"ansible_host": "10.0.0.1", "ansible_port": 23}, True),
        ({"ansible_host": "h2"}, {}, True),
        ({"ansible_host": "10.0.0.1"}, {"ansible_host": "10.0.0.1", "ansible_connection": "local"}, False),
        ({"ansible_connection": "local"}, {"ansible_connection": "local"}, False),
    ],
)
def test_two_hosts_with_the_same_address_and_port_are_refused(
    first: dict[str, Any], second: dict[str, Any], is_same: bool
) -> None:
    if not is_same:
        check_addresses({"h1": first, "h2": second})
        return
    with pytest.raises(UsageError, match="hosts h1 and h2 have the same address"):
        check_addresses({"h1": first, "h2": second})


def bmc(address: str, protocol: str = "redfish") -> dict[str, Any]:
    return {"rackproof_bmc_address": address, "rackproof_bmc_protocol": protocol}


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        (bmc("bmc1"), bmc("bmc1"), True),
        (bmc("bmc1.example"), bmc("BMC1.Example."), True),
        (bmc("10.0.0.1"), bmc("10.0.0.1:443"), True),
        (bmc("10.0.0.1:0443"), {"rackproof_bmc_address": "10.0.0.1"}, True),
        (bmc("10.0.0.1", "ipmi"), bmc("10.0.0.1:623", "ipmi"), True),
        (bmc("10.0.0.1"), bmc("10.0.0.1", "ipmi"), True),
        (bmc("10.0.0.1:8443"), bmc("10.0.0.1:08443"), True),
        (bmc("[FD00::1]"), bmc("[fd00:0::1]:443"), True),
        (bmc("10.0.0.1:8443"), bmc("10.0.0.1"), False),
        (bmc("10.0.0.1:8443"), bmc("10.0.0.1:8444"), False),
        (bmc("10.0.0.1:623"), bmc("10.0.0.1"), False),
        (bmc("bmc1"), bmc("bmc2"), False),
        (bmc(""), bmc(""), False),
        (bmc(""), {}, False),
    ],
)
def test_two_hosts_with_the_same_bmc_are_refused(first: dict[str, Any], second: dict[str, Any], is_same: bool) -> None:
    hosts = {"h0": {}, "h1": first, "h2": second}
    if not is_same:
        assert check_hosts(hosts)["h1"] == first
        return
    with pytest.raises(UsageError, match=r"hosts h1 and h2 have the same BMC .*correct rackproof_bmc_address"):
        check_hosts(hosts)


@pytest.mark.parametrize("variable", ["ansible_host", "ansible_port"])
def test_address_or_port_that_is_a_template_is_refused(variable: str) -> None:
    message = f"host h1: {variable}: '{{{{ x }}}}' is a template, which only a playbook evaluates: give"
    with pytest.raises(UsageError, match=message):
        check_addresses({"h1": {variable: "{{ x }}"}})


def caused(cause: str, origin: str, *more: str) -> str:
    """Return an error message of `ansible-inventory` that has these causes, all of the same origin (file and line)."""
    return "".join(f"<<< caused by >>> {each} Origin: {origin} " for each in (cause, *more))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no\n  cause", "no cause"),
        ("x" * 600, "x" * 500),
        (caused("bad line.", "/i/hosts.yml:3:1"), "/i/hosts.yml:3:1: bad line."),
        (caused("bad line.", "/i/hosts.yaml:3", "other."), "/i/hosts.yaml:3: bad line."),
        (caused("bad line.", "/i/hosts.json:3", "other."), "/i/hosts.json:3: bad line."),
        (caused("bad line.", "/i/hosts.ini:3", "other."), "/i/hosts.ini:3: bad line.; other."),
        (caused("same.", "/i/hosts:3", "same."), "/i/hosts:3: same."),
        (caused("no root 'plugin' key.", "/i/hosts.yml:1") + caused("bad.", "/i/hosts.yml:2"), "/i/hosts.yml:2: bad."),
        (caused("bad.", "<inventory plugin 'ini' with source '/i/hosts'>"), "/i/hosts: bad."),
    ],
)  # fmt: skip
def test_error_of_ansible_inventory_names_file_and_cause(
    message: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ansible-inventory"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{message}\nEND\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(ansible.shutil, "which", lambda *_, **__: str(program))
    source = tmp_path / "hosts"
    source.write_text("")
    with pytest.raises(UsageError) as error:
        read_inventory([str(source)])
    assert str(error.value).startswith(f"inventory {source}: {expected}")
    assert len(str(error.value)) < 900


def test_bytes_of_an_error_that_are_not_utf8_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ansible-inventory"
    program.write_text("#!/bin/sh\nprintf 'bad \\377 byte' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(ansible.shutil, "which", lambda *_, **__: str(program))
    with pytest.raises(UsageError, match="bad \ufffd byte"):
        read_inventory(["h1,"])


def test_json_file_must_exist_and_contain_a_listing(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"gpu_hosts": {"hosts": ["h1"]}, "_meta": {"hostvars": {}}}))
    assert read_inventory([str(path)]) == {"h1": {}}
    path.write_text("[]")
    with pytest.raises(UsageError, match="not an inventory"):
        read_inventory([str(path)])
    with pytest.raises(UsageError, match=r"none\.json"):
        read_inventory([str(tmp_path / "none.json")])
