"""The roles' variables: defaults, argument specs, the inventory's schema and its documentation say the same."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.inventory.ansible import OUR_VARIABLE, check_variables
from tests import ROOT
from tests.lab.lab import CONTROL_PYTHON

ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
SCHEMA: dict[str, Any] = json.loads((ROOT / "schemas" / "inventory.schema.json").read_text())["properties"]
TYPES = {"str": "string", "int": "integer", "float": "number", "list": "array", "dict": "object"}
"""Ansible's names of types, and the schema's. A truth may be text in an inventory, and `raw` is anything."""

LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": str(CONTROL_PYTHON)}


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
    result: dict[str, dict[str, Any]] = specs["argument_specs"][entry]["options"] if specs else {}
    return result


def for_operators(role: str) -> dict[str, Any]:
    """The defaults that an inventory may override."""
    return {name: value for name, value in defaults(role).items() if OUR_VARIABLE.match(name)}


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_equal_defaults(role: str) -> None:
    assert {name: option["default"] for name, option in options(role).items()} == defaults(role)


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_have_a_type_and_a_description(role: str) -> None:
    for name, option in options(role).items():
        assert option["type"] in (*TYPES, "bool", "raw"), name
        assert re.fullmatch(r"\S.{10,}\.", option["description"]), name


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_equal_the_inventory_schema(role: str) -> None:
    for name in for_operators(role):
        option, schema = options(role)[name], SCHEMA[name]
        assert option["description"] == schema["description"], name
        if option["type"] in TYPES:
            assert schema.get("type", "string") == TYPES[option["type"]], name
            assert option.get("choices") == schema.get("items", schema).get("enum"), name


def test_default_outside_the_inventory_is_set_by_a_playbook() -> None:
    """What nobody sets is no default: it is in vars/main.yml."""
    playbooks = "".join(path.read_text() for path in (ROOT / "playbooks").glob("*.yml"))
    others = {name: role for role in ROLES for name in defaults(role) if not OUR_VARIABLE.match(name)}
    for name, role in others.items():
        assert name.startswith(f"{role}_"), name
        assert re.search(rf"^ +{name}: ", playbooks, re.MULTILINE), name


@pytest.mark.parametrize("role", ROLES)
def test_internal_variables_start_with_an_underscore_and_the_role(role: str) -> None:
    prefix = "_rackproof_" if role == "common" else f"_{role}_"
    assert [name for name in role_vars(role) if not name.startswith(prefix)] == []


def test_every_default_is_a_variable_that_the_schema_allows() -> None:
    for role in ROLES:
        plain = {name: value for name, value in for_operators(role).items() if "{{" not in str(value) and value != ""}
        assert set(for_operators(role)) <= set(SCHEMA), role
        check_variables({"host": plain})


def test_variables_belong_to_one_role() -> None:
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


def test_example_inventory_is_valid() -> None:
    from fleet.inventory.ansible import read_inventory
    from fleet.planning.plan import make_plan, read_profile

    hosts = read_inventory([str(ROOT / "inventory" / "example")])
    plan = make_plan(read_profile("standard"), hosts, run_id="r", nonce="0" * 32, created="2026-11-21T04:00:00Z")
    assert plan.gangs() == {"rack12": ("r12-h01", "r12-h02", "r12-h03", "r12-h04")}


def test_ignored_failure_has_a_comment_that_names_the_check_that_follows() -> None:
    lines = [line for path in (ROOT / "roles").rglob("*.yml") for line in path.read_text().splitlines()]
    assert [line for line in lines if re.search(r"failed_when: false(?! # .{20})", line)] == []


@pytest.mark.parametrize("playbook", sorted(path.name for path in (ROOT / "playbooks").glob("*.yml")))
def test_every_play_has_a_tag_that_operators_can_select(playbook: str) -> None:
    plays = yaml.safe_load((ROOT / "playbooks" / playbook).read_text())
    tags = [tag for play in plays if "hosts" in play for tag in play["tags"]]
    assert set(tags) <= {"install", "configure", "run", "report", "always"}


def test_tag_report_only_judges() -> None:
    """Also the plan, without which nothing is known of the run."""
    command = [Path(sys.executable).parent / "ansible-playbook", "-i", "inventory/example", "playbooks/acceptance.yml"]
    listed = subprocess.run(
        [*command, "--list-tasks", "--tags=report"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tasks = {line.partition("TAGS")[0].strip() for line in listed.splitlines() if re.match(r" +\w+ : ", line)}
    roles = {task.partition(" : ")[0] for task in tasks if "Validating arguments" not in task}
    assert roles == {"plan", "monitoring", "report"}
    assert "report : Judge the run" in tasks


DRIVERS = role_vars("nvidia_driver")["_nvidia_driver_table"]


def test_drivers_playbook_repeats_the_default_of_the_role() -> None:
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


def test_driver_and_toolkit_support_the_same_distributions() -> None:
    toolkit = role_vars("container_toolkit")["_container_toolkit_table"]
    assert {name: here["manager"] for name, here in DRIVERS.items()} == toolkit
    page = (ROOT / "docs" / "drivers.md").read_text()
    for name in ("Debian 12", "Ubuntu 22.04", "24.04", "RHEL 9"):
        assert name in page


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("", True), ("580", True), ("580.", True), ("580.159.04", True), ("580*", False), ("latest", False)],
)
def test_driver_versions_in_the_inventory(value: str, allowed: bool) -> None:
    assert bool(re.search(SCHEMA["nvidia_driver_version"]["pattern"], value)) is allowed


@pytest.fixture
def probe() -> Any:
    """Runs on hosts, where nothing of ours is installed yet."""
    result = importlib.util.spec_from_file_location("probe", ROOT / "roles/preflight/files/probe.py")
    assert result
    assert result.loader
    module = importlib.util.module_from_spec(result)
    result.loader.exec_module(module)
    return module


def test_port_owner_is_named_although_it_closes_a_file(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own supervisor, whose port is no obstacle, read as somebody else's."""
    observed = os.readlink
    gone = iter([True])

    def read(path: str) -> str:
        if path.startswith(f"/proc/{os.getpid()}/") and next(gone, False):
            raise FileNotFoundError(path)
        return observed(path)

    monkeypatch.setattr(os, "readlink", read)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert probe.listener(server.getsockname()[1]).startswith(f"process {os.getpid()} (")


def test_port_is_free_if_its_process_ends_during_the_search(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{"socket:[1]"}, set()])
    monkeypatch.setattr(probe, "listening", lambda port: next(looks))
    assert probe.listener(29500) == ""


def test_port_of_an_invisible_process_is_in_use(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "listening", lambda port: {"socket:[1]"})
    assert probe.listener(29500) == "a process of another user"


HOME = Path(getattr(sys, "_base_executable", sys.executable)).parent
VERSION = ".".join(map(str, sys.version_info[:3]))


def environment(prefix: Path, home: Path | str, version: str) -> Path:
    """An environment of the agent, as that Python would have made it."""
    for name in ("bin/pip", "bin/rackproof", "lib/python3.9/torch.pth", "wheels/rackproof-1-py3-none-any.whl"):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).touch()
    (prefix / "pyvenv.cfg").write_text(f"home = {home}\nversion = {version}")
    return prefix


def made(prefix: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "roles/agent/files/make_environment.py", prefix]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def test_environment_of_another_python_is_replaced(tmp_path: Path) -> None:
    """What was installed for the other goes; the wheels, which lie there too, stay. The same Python makes it once."""
    prefix = environment(tmp_path / "rackproof", "/opt/another/bin", VERSION)
    assert made(prefix).stdout == "made\n"
    assert not (prefix / "lib" / "python3.9").exists()
    assert (prefix / "wheels/rackproof-1-py3-none-any.whl").exists()
    version = subprocess.run(
        [prefix / "bin/python", "-m", "pip", "--version"], capture_output=True, text=True, check=True
    )
    assert f"(python {sys.version_info[0]}.{sys.version_info[1]})" in version.stdout
    again = made(prefix)
    assert (again.returncode, again.stdout) == (0, "")


@pytest.mark.parametrize(("version", "again"), [("3.9.2", True), (VERSION, False)])
def test_environment_of_another_python_version_is_replaced(tmp_path: Path, version: str, again: bool) -> None:
    """With a venv that makes nothing."""
    (tmp_path / "venv.py").touch()
    prefix = environment(tmp_path / "rackproof", HOME, version)
    done = made(prefix, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "made\n" if again else "")
    assert (prefix / "lib" / "python3.9").exists() is not again


@pytest.mark.parametrize("name", ["bin/pip", "pyvenv.cfg"])
def test_foreign_files_are_not_removed_for_the_environment(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("home = /opt/another/bin\n")
    done = made(tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"{tmp_path} has a {name} that is not the agent's: set rackproof_prefix to a separate directory"
    )
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [name]


def test_unreachable_host_is_polled_for_the_whole_soak(tmp_path: Path) -> None:
    """And not as often as it can be asked, which are all the times there are within a minute."""
    (tmp_path / "plan.json").write_text(json.dumps({"stages": [{"name": "soak", "duration_s": 1, "deadline_s": 1}]}))
    hosts = {"h1": {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    looks = {"_soak_polls": 2, "_soak_spare_polls": 0}
    given = {"_rackproof_run_dir": str(tmp_path), "_rackproof_run_id": "r", "rackproof_fabric_interface": "", **looks}
    task = {"ansible.builtin.include_role": {"name": "soak"}, "vars": {**defaults("common"), **given}}
    done = played(tmp_path, {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [task]})
    waits = done.stdout.split("TASK [soak : Wait for the duration of a poll]")[1:]
    assert [wait.split("\n")[1].split(":")[0] for wait in waits] == ["ok", "ok"], done.stdout + done.stderr
    assert done.returncode == 2, "it left the run"


@pytest.fixture(scope="module")
def scratches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """State directories of three hosts, this machine each, after tasks of the role `agent`; and what was printed."""
    directory = tmp_path_factory.mktemp("agent")
    for name in ("ours/runs/r1", "ours/data", "ours/somebodys", "theirs/runs/r1", "theirs/data", "theirs/somebodys"):
        (directory / name).mkdir(parents=True)
    (directory / "ours" / role_vars("agent")["_agent_state_mark"]).touch()
    (directory / "taken" / "somebodys").mkdir(parents=True)
    (directory / "taken").chmod(0o1777)
    hosts = {name: {"rackproof_state_directory": str(directory / name)} for name in ("ours", "theirs", "taken")}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts, "vars": LOCAL}}))
    (directory / "lock.json").write_text("{}")
    given = {"rackproof_prefix": str(directory / "prefix"), "rackproof_python": sys.executable}
    common = {name: value for name, value in defaults("common").items() if name != "rackproof_state_directory"}
    common |= {"_rackproof_run_dir": str(directory), **given}
    plays = [
        {
            "hosts": hosts,
            "gather_facts": False,
            "vars": common,
            "tasks": [{"ansible.builtin.include_role": {"name": "agent", "tasks_from": tasks}}],
        }
        for hosts, tasks in (("ours:theirs", "remove"), ("taken", "install"))
    ]
    done = played(directory, *plays)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("failed=0") == 2, done.stdout
    return directory, done.stdout


def test_state_directory_is_emptied_only_if_it_has_the_mark(scratches: tuple[Path, str]) -> None:
    directory, _ = scratches
    assert {path.name for path in (directory / "ours").iterdir()} == {"somebodys"}
    assert {path.name for path in (directory / "theirs").iterdir()} == {"runs", "data", "somebodys"}


def test_state_directory_with_other_files_is_refused(scratches: tuple[Path, str]) -> None:
    directory, printed = scratches
    taken = directory / "taken"
    said = f"rackproof_state_directory {taken} contains other files (somebodys): use a separate directory"
    assert said in " ".join(printed.split())
    assert (taken.stat().st_mode & 0o7777, [path.name for path in taken.iterdir()]) == (0o1777, ["somebodys"])


# --- templates, as Ansible fills them in


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the templates of roles give."""
    directory = tmp_path_factory.mktemp("filled")
    hosts = {
        "h1": {"ansible_host": "fd00::11"},
        "h2": {"ansible_host": "10.0.0.2"},
        "h3": {"ansible_host": "h3.example"},
    }
    targets = {"_rackproof_run_id": "r1", "rackproof_exporter_port": 9836}
    cron = {"rackproof_schedule_repository": "https://me%40here:pass@git.example/r.git", "item": "rack1"}
    cron |= {"rackproof_schedule_inventories": {"rack1": "hosts.yml"}, "rackproof_runs_directory": "runs"}
    tasks = [
        {
            "ansible.builtin.template": {
                "src": str(ROOT / "roles" / role / "templates" / template),
                "dest": str(directory / template.removesuffix(".j2")),
            },
            "vars": {**defaults(role), **role_vars(role), **variables},
            "run_once": True,
            "delegate_to": "localhost",
        }
        for role, template, variables in (
            ("monitoring", "targets.json.j2", targets),
            ("schedule", "revalidate.cron.j2", cron),
        )
    ]
    (directory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts, "vars": LOCAL}}))
    done = played(directory, {"hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks})
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def played(directory: Path, *plays: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Plays these on the hosts of hosts.yml, as a playbook that lies in `playbooks`."""
    (directory / "playbooks").mkdir()
    (directory / "playbooks" / "play.yml").write_text(yaml.safe_dump(list(plays)))
    command = [Path(sys.executable).parent / "ansible-playbook", "-i", "hosts.yml", "playbooks/play.yml"]
    environment = {
        **os.environ,
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "ANSIBLE_ACTION_PLUGINS": str(ROOT / "playbooks" / "action_plugins"),
    }
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)


def test_ipv6_address_is_in_brackets(filled: Path) -> None:
    listed = json.loads((filled / "targets.json").read_text())
    assert [item["targets"] for item in listed] == [["[fd00::11]:9836"], ["10.0.0.2:9836"], ["h3.example:9836"]]


def test_percent_sign_in_a_cron_command_is_escaped(filled: Path) -> None:
    """cron takes what comes after the first `%` that is not escaped for the command's input."""
    *_, line = (filled / "revalidate.cron").read_text().splitlines()
    assert "https://me\\%40here:pass@git.example/r.git" in line
    assert not re.search(r"(?<!\\)%", line)
    assert line.endswith("2>&1 | logger -t rackproof-revalidate-rack1")
    (task,) = yaml.safe_load((ROOT / "roles/schedule/tasks/cron.yml").read_text())
    assert task["ansible.builtin.template"]["mode"] == "0600"


# --- what judges, and does not come to a decision


VERBS = {"judge": "report", "scaling": "scaling"}
"""Tasks of the role -> the verb that they call."""


@pytest.fixture(scope="module")
def unreported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """For each verb and exit code a play in which no report is made: where, and what each printed."""
    directory = tmp_path_factory.mktemp("unreported")
    program = (
        "import sys; print(f'rackproof: {sys.argv[2]}: No space left on device, says {sys.argv[1]}', file=sys.stderr)"
    )
    (directory / "rackproof").write_text(f"{program}; sys.exit(int(sys.argv[2].rpartition('-')[2]))")
    (directory / "verdicts.prom").write_text("of an earlier run\n")
    cases = [(part, f"{part}-{code}") for part in VERBS for code in (2, 74)]
    hosts = {name: {"ansible_connection": "local"} for _, name in cases}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    plays = []
    for part, name in cases:
        (directory / name).mkdir()
        (directory / name / "verdicts.prom").write_text("of an earlier run\n")
        role = {"ansible.builtin.import_role": {"name": "report", "tasks_from": part}}
        failed = {"ansible.builtin.debug": {"msg": "it failed"}}  # rescued: a play without hosts ends the playbook
        tasks = [{"block": [role], "rescue": [failed]}]
        variables = {"_rackproof_run_dir": name, "rackproof_verdicts_textfile": str(directory / name / "handed.prom")}
        play = {"name": name, "hosts": name, "gather_facts": False, "vars": variables, "tasks": tasks}
        plays.append(play)
    done = played(directory, *plays)
    assert done.returncode == 0, done.stdout
    printed = re.split(r"^PLAY (?:\[(\S+)\]|RECAP) \*+\n", done.stdout, flags=re.MULTILINE)
    return directory, dict(zip(printed[1:-2:2], printed[2:-1:2], strict=True))


@pytest.mark.parametrize("part", VERBS)
@pytest.mark.parametrize("code", [2, 74])
def test_missing_report_is_not_an_incomplete_fleet(
    unreported: tuple[Path, dict[str, str]], part: str, code: int
) -> None:
    """2 is an incomplete fleet too, which has a report; what an earlier one left is not handed on."""
    directory, printed = unreported
    name = f"{part}-{code}"
    assert f"rackproof: {name}: No space left on device, says {VERBS[part]}" in printed[name]
    assert "it failed" in printed[name]
    assert "incomplete" not in printed[name]
    assert "cells are missing: see" not in printed[name]
    assert not (directory / name / "handed.prom").exists()
