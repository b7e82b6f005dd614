"""Test that a name in an inventory is refused if it is read as another number. The message has file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fleet.inventory.ansible import _text_variables, check_listing, read_inventory
from fleet.inventory.sources import check_names_in_files
from schemas.errors import UsageError
from tests import ROOT
from tests.ansible_commands import run_ansible
from tests.unit.playbooks.test_nothing_done import ENVIRONMENT

YAML_NUMBERS = {
    "010": 8,
    "011": 9,
    "007": 7,
    "00": 0,
    "0x1A": 26,
    "1:30": 90,
    "1_000": 1000,
    "0b11": 3,
    "+8": 8,
    "550.120": 550.12,
    "1.20": 1.2,
    "1.10": 1.1,
    "1.00": 1.0,
    "580.": 580.0,
    "01.5": 1.5,
    "1.0e+3": 1000.0,
    "+1.5": 1.5,
}
"""Text -> the number that YAML reads it as."""


def yaml_inventory(first: str, second: str = "r2", name: str = "rackproof_rack") -> str:
    return f"gpu_hosts:\n  hosts:\n    h1:\n      {name}: {first}\n    h2: {{{name}: {second}}}\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("position", ["block", "flow", "anchor"])
@pytest.mark.parametrize("text", YAML_NUMBERS)
@pytest.mark.parametrize("name", ["rackproof_rack", "nvidia_driver_version", "container_toolkit_version"])
def test_name_that_yaml_reads_as_another_number_is_refused(tmp_path: Path, text: str, name: str, position: str) -> None:
    inventory = {
        "block": yaml_inventory(text, name=name),
        "flow": yaml_inventory("r1", text, name=name),
        "anchor": yaml_inventory(f"&rack {text}", "*rack", name=name),
    }[position]
    path = write(tmp_path / "hosts.yml", inventory)
    line = 5 if position == "flow" else 4
    message = f'{path}:{line}: {name}: {text} is read as the number {YAML_NUMBERS[text]}: write it in quotes: {name}: "{text}"'
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        read(path)


@pytest.mark.parametrize(
    ("first", "second", "racks"),
    [
        ("12", "8", ["12", "8"]),
        ("0", "1", ["0", "1"]),
        ('"010"', "'011'", ["010", "011"]),
        ("009", "08", ["009", "08"]),  # no octal numbers, so YAML reads them as texts
        ("!!str 010", "r10", ["010", "r10"]),
        ("12 # not 010", "13", ["12", "13"]),
        ("r010", "1e3", ["r010", "1e3"]),
        ('"550.120"', "550.54.15", ["550.120", "550.54.15"]),
    ],
)
def test_name_that_is_read_as_it_is_written_is_accepted(
    tmp_path: Path, first: str, second: str, racks: list[str]
) -> None:
    path = write(tmp_path / "hosts.yml", yaml_inventory(first, second))
    hosts = read(path)
    assert [variables["rackproof_rack"] for variables in hosts.values()] == racks


def test_numbers_and_variables_of_other_software_may_have_any_form(tmp_path: Path) -> None:
    path = write(
        tmp_path / "hosts.yml",
        "gpu_hosts:\n  vars: {mode: 0644, rackproof_gpu_count: 010, rackproof_fabric_gbps: 0x10}\n  hosts: {h1: }\n",
    )
    assert read(path)["h1"]["rackproof_gpu_count"] == 8


@pytest.mark.parametrize(
    "file",
    [
        "hosts.yml",
        "hosts",
        "group_vars/gpu_hosts.yml",
        "group_vars/gpu_hosts/racks.yaml",
        "host_vars/h1",
        "host_vars/h1.yml",
    ],
)
@pytest.mark.parametrize("source", ["file", "directory"])
def test_files_of_variables_beside_the_inventory_are_searched(tmp_path: Path, file: str, source: str) -> None:
    inventory = tmp_path / "inventory"
    main = write(inventory / ("hosts" if file == "hosts" else "hosts.yml"), yaml_inventory("r1"))
    text = yaml_inventory("010") if file.startswith("hosts") else "# racks\nrackproof_rack: 010\n"
    path = write(inventory / file, text)
    with pytest.raises(UsageError, match=rf"^{re.escape(str(path))}:\d: rackproof_rack: 010 is read as the number 8: "):
        read(main if source == "file" else inventory)


@pytest.mark.parametrize(
    ("written", "number"),
    [
        *(("0x1A", 26), ("0o10", 8), ("1_0", 10), ("0b11", 3), ("010", None), ("12", None), ("1a", None)),
        *(("550.120", 550.12), ("1.20", 1.2), ("1e3", 1000.0), ("550.54.15", None), ("1-2", None)),
    ],
)
@pytest.mark.parametrize("name", ["hosts.ini", "hosts"])
def test_names_in_ini_inventories_are_compared_with_literals_of_python(
    tmp_path: Path, name: str, written: str, number: int | None
) -> None:
    path = write(
        tmp_path / name, f"[gpu_hosts]\nh1 rackproof_rack={written} rackproof_gpu_count=8 # rackproof_rack=0x1\nh2\n"
    )
    if number is None:
        assert read(path)["h1"]["rackproof_rack"] == written
        return
    message = f"hosts.*:2: rackproof_rack: {written} is read as the number {number}: .*rackproof_rack='\"{written}\"'"
    with pytest.raises(UsageError, match=message):
        read(path)


@pytest.mark.parametrize("value", ["1.20", '"1.20"', "'1.20'", "'\"1.20\"'"])
@pytest.mark.parametrize("place", ["line of a host", "variables of the group"])
def test_quotes_of_a_version_in_an_ini_inventory_count_as_ansible_counts_them(
    tmp_path: Path, place: str, value: str
) -> None:
    name = "container_toolkit_version"
    is_of_host = place == "line of a host"
    text = f"h1 {name}={value}\n" if is_of_host else f"h1\n[gpu_hosts:vars]\n{name}={value}\n"
    path = write(tmp_path / "hosts.ini", f"[gpu_hosts]\n{text}")
    if listed(path)[name] == "1.20":
        assert read(path)["h1"][name] == "1.20"
    elif isinstance(listed(path)[name], float):
        remedy = f"{name}='\"1.20\"'" if is_of_host else f'{name}="1.20"'
        with pytest.raises(UsageError, match=f"{name}: 1.20 is read as the number 1.2: write it in quotes: {remedy}$"):
            read(path)
        write(path, path.read_text().replace(f"{name}={value}", remedy))
        assert listed(path)[name] == "1.20"


@pytest.mark.parametrize(
    "line",
    [
        'h1 rackproof_site="2.50 MW hall"',
        "h1 rackproof_site='0x10 a' # rackproof_site=1.20",
        'h1 rackproof_site="hall rackproof_rack=1.20"',
        "h1 rackproof_site=2.50MW",
        "h1 rackproof_site='\"2.50\"'",
        "; rackproof_site=1.20",
        "h1\n; h2 rackproof_site=1.20",
        "h1\n[gpu_hosts:vars]\nrackproof_site=2.50 MW hall",
        "h1\n[gpu_hosts:vars]\nrackproof_site=Hall rackproof_rack=1.20",
        "h1\n[gpu_hosts:vars]\n;rackproof_site=1.20",
        "h1\n[gpu_hosts:vars]\nrackproof_site='1.20'",
    ],
)
def test_text_with_a_number_in_an_ini_inventory_is_accepted(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "hosts.ini", f"[gpu_hosts]\nh1\n{line}\n")
    site = listed(path).get("rackproof_site", "")
    assert isinstance(site, str)
    assert read(path)["h1"].get("rackproof_site", "") == site


@pytest.mark.parametrize(
    "line",
    [
        "h1 rackproof_site=hall nvidia_driver_version=1.20 # note",
        'h1 rackproof_site="2.50 MW hall" nvidia_driver_version="+1.20"',
        'h1 nvidia_driver_version=1."20"',
        "h1\n[gpu_hosts:vars] # note\nnvidia_driver_version = 1.20 # note",
    ],
)
def test_version_in_an_ini_inventory_that_ansible_reads_as_a_number_is_refused(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "hosts.ini", f"[gpu_hosts]\n{line}\n")
    assert listed(path)["nvidia_driver_version"] == 1.2
    with pytest.raises(
        UsageError, match=r"nvidia_driver_version: \+?1\.20 is read as the number 1\.2: write it in quotes"
    ):
        read(path)


def listed(inventory: Path) -> dict[str, Any]:
    """Return the variables of h1 as Ansible reads them."""
    return dict(listing(inventory)["_meta"]["hostvars"]["h1"])


def read(inventory: Path) -> dict[str, dict[str, Any]]:
    """Do what `read_inventory` does: search the files of the inventory, and check what Ansible reads.

    Other tests of `read_inventory` start `ansible-inventory` as it does.
    """
    check_names_in_files([str(inventory)], _text_variables())
    return check_listing(listing(inventory))


def listing(inventory: Path) -> dict[str, Any]:
    """Return what `ansible-inventory` prints with the settings of the checkout, which include those of `read_inventory`."""
    done = run_ansible("ansible-inventory", "-i", inventory, "--list", directory=ROOT, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_number_without_its_text_is_refused_without_an_example_of_another_version(tmp_path: Path) -> None:
    """The listing has only the number, so the text may have been 550.12 or 550.120."""
    path = tmp_path / "hosts.json"
    variables = {"h1": {"nvidia_driver_version": 550.12}}
    path.write_text(json.dumps({"gpu_hosts": {"hosts": ["h1"]}, "_meta": {"hostvars": variables}}))
    with pytest.raises(UsageError, match="write it in quotes with all its digits") as error:
        read_inventory([str(path)])
    assert '"550.12"' not in str(error.value)


@pytest.mark.parametrize(
    "source", ["h1,h2", ",".join(f"host{number}" for number in range(1000)), "/no/such/file", "h\0"]
)
def test_sources_that_are_no_files_are_left_out(source: str) -> None:
    listing = {"_meta": {"sources": [source]}, "gpu_hosts": {"hosts": ["h1"]}}
    assert check_listing(listing) == {"h1": {}}


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"a: [", b"$ANSIBLE_VAULT;1.1;AES256\n3039", b"a: &a [*a]\n", b"x: !vault |\n  3\n"]
)
def test_files_that_are_no_yaml_are_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hosts.yml").write_bytes(content)
    assert check_listing({"_meta": {"sources": [str(tmp_path)]}, "gpu_hosts": {"hosts": ["h1"]}}) == {"h1": {}}


def test_playbook_passes_the_sources_of_its_inventory(tmp_path: Path) -> None:
    path = write(tmp_path / "hosts.yml", yaml_inventory("010"))
    variables: dict[str, Any] = {"rackproof_profile": "rehearsal", "rackproof_runs_directory": str(tmp_path)}
    words = ("-i", path, ROOT / "playbooks" / "drivers.yml", "-e", json.dumps(variables))
    done = run_ansible("ansible-playbook", *words, directory=ROOT, environment=ENVIRONMENT)
    assert done.returncode == 2
    shown = " ".join((done.stdout + done.stderr).split())
    assert f"{path}:4: rackproof_rack: 010 is read as the number 8" in shown
