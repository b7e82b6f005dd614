"""Test the roles: consistency of their variables, their templates, and the scripts that they run on hosts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.run import preflight
from fleet.inventory.ansible import check_variables
from rackproof.main import main
from schemas.documents import CONFIDENTIAL
from schemas.errors import UsageError
from tests import ROOT
from tests.ansible_commands import run_ansible
from tests.lab.lab import CONTROL_PYTHON, CONTROL_SHELL

ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
SCHEMA: dict[str, Any] = json.loads((ROOT / "schemas" / "inventory.schema.json").read_text())["properties"]
OUR_VARIABLE = re.compile(r"^(rackproof|nvidia_driver|container_toolkit)_")
"""Matches the prefixes of the variables that an inventory may set."""
TYPES = {"str": "string", "int": "integer", "float": "number", "list": "array", "dict": "object"}
"""Type in argument_specs.yml -> type in the schema. The types `bool` and `raw` (any type) are not compared."""

LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": str(CONTROL_PYTHON)}


def read_role_file(role: str, path: str) -> dict[str, Any]:
    file = ROOT / "roles" / role / path
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def defaults(role: str) -> dict[str, Any]:
    return read_role_file(role, "defaults/main.yml")


def role_vars(role: str) -> dict[str, Any]:
    return read_role_file(role, "vars/main.yml")


def options(role: str) -> dict[str, dict[str, Any]]:
    """Return name -> argument spec of each variable of a role.

    The specs are in the entry `main`, which Ansible checks before it runs tasks/main.yml, or in the entry `inventory` if the role
    has no tasks/main.yml.
    """
    entry = "main" if (ROOT / "roles" / role / "tasks" / "main.yml").exists() else "inventory"
    specs = read_role_file(role, "meta/argument_specs.yml")
    role_options: dict[str, dict[str, Any]] = specs["argument_specs"][entry]["options"] if specs else {}
    return role_options


def inventory_defaults(role: str) -> dict[str, Any]:
    """Return the defaults that an inventory may override."""
    return {name: value for name, value in defaults(role).items() if OUR_VARIABLE.match(name)}


@pytest.mark.parametrize("role", ROLES)
def test_defaults_in_argument_specs_equal_the_defaults_of_the_role(role: str) -> None:
    assert {name: option["default"] for name, option in options(role).items()} == defaults(role)


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_have_a_type_and_a_description(role: str) -> None:
    for name, option in options(role).items():
        assert option["type"] in (*TYPES, "bool", "raw"), name
        assert re.fullmatch(r"\S.{10,}\.", option["description"]), name


@pytest.mark.parametrize("role", ROLES)
def test_argument_specs_equal_the_inventory_schema_in_type_and_description(role: str) -> None:
    for name in inventory_defaults(role):
        option, schema = options(role)[name], SCHEMA[name]
        assert option["description"] == schema["description"], name
        if option["type"] in TYPES:
            assert schema.get("type", "string") == TYPES[option["type"]], name
            assert option.get("choices") == schema.get("items", schema).get("enum"), name


def test_default_that_no_inventory_can_set_is_set_by_a_playbook() -> None:
    """A default that is set neither by an inventory nor by a playbook is a constant, which belongs in vars/main.yml."""
    playbooks = "".join(path.read_text() for path in (ROOT / "playbooks").glob("*.yml"))
    internal = {name: role for role in ROLES for name in defaults(role) if not OUR_VARIABLE.match(name)}
    for name, role in internal.items():
        assert name.startswith(f"{role}_"), name
        assert re.search(rf"^ +{name}: ", playbooks, re.MULTILINE), name


@pytest.mark.parametrize("role", ROLES)
def test_internal_variables_start_with_an_underscore_and_the_name_of_the_role(role: str) -> None:
    prefix = "_rackproof_" if role == "common" else f"_{role}_"
    assert [name for name in role_vars(role) if not name.startswith(prefix)] == []


def test_schema_of_the_inventory_allows_every_default() -> None:
    for role in ROLES:
        role_defaults = inventory_defaults(role)
        assert set(role_defaults) <= set(SCHEMA), role
        check_variables(
            {"host": {name: value for name, value in role_defaults.items() if "{{" not in str(value) and value != ""}}
        )


def test_each_variable_belongs_to_one_role() -> None:
    names = [name for role in ROLES for name in (*defaults(role), *role_vars(role))]
    assert sorted(names) == sorted(set(names))


def test_every_inventory_variable_that_roles_use_is_in_the_schema() -> None:
    used = {
        name
        for path in (ROOT / "roles").rglob("*")
        if path.suffix in (".yml", ".j2")
        for name in re.findall(r"(?<![\w-])((?:rackproof|nvidia_driver|container_toolkit)_[a-z_]+)", path.read_text())
    }
    assert used - set(ROLES) <= set(SCHEMA)


SECRETS = sorted(name for name, item in SCHEMA.items() if item.get(CONFIDENTIAL))
CANARY = "canary4711"
WRONG_VALUES: list[Any] = [
    f"https://hooks.example/{CANARY}",
    f"{{{{ a }}}}{CANARY}",
    [CANARY],
    [f"https://hooks.example/{CANARY}"],
    {CANARY: CANARY},
    {"Authorization": {"a": [CANARY]}},
    4711.5,
    True,
]
"""Values of several types. Of each secret variable, some of them have the wrong type."""


@pytest.mark.parametrize("value", WRONG_VALUES, ids=str)
@pytest.mark.parametrize("name", SECRETS)
def test_message_about_a_secret_variable_does_not_contain_its_value(name: str, value: Any) -> None:
    kind = {"string": str, "object": dict}.get(SCHEMA[name].get("type"), object)  # an account of a BMC has no type
    if isinstance(value, kind):
        check_variables({"h1": {name: value}})
        return
    with pytest.raises(UsageError) as caught:
        check_variables({"h1": {name: value}})
    assert str(caught.value).startswith(f"host h1: {name}: the value, which is secret and not shown, is ")
    assert "4711" not in str(caught.value)


def test_schemas_within_a_secret_schema_are_marked_as_secret_too() -> None:
    """`documents.explain` looks only at the schema that a value does not match."""
    for name in SECRETS:
        inner = [value for value in SCHEMA[name].values() if isinstance(value, dict | list)]
        assert inner == [], f"{name}: mark these schemas, and extend this test"


def test_verbose_play_does_not_print_secret_variables(tmp_path: Path) -> None:
    secrets = {
        "h1": {name: {"Authorization": CANARY} if name.endswith("headers") else CANARY for name in SECRETS},
        "h2": {name: [CANARY] for name in SECRETS},
    }
    hosts = {host: {**LOCAL, **variables} for host, variables in secrets.items()}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    tasks = [
        {"ansible.builtin.include_role": {"name": "bmc", "tasks_from": "bind"}},
        {
            "ansible.builtin.include_role": {"name": "notify", "tasks_from": "bind"},
            "vars": {"_rackproof_run_dir": str(tmp_path)},
        },
        {"ansible.builtin.include_role": {"name": "notify"}, "vars": {"_rackproof_run_dir": str(tmp_path)}},
    ]
    done = run_plays(tmp_path, {"hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks}, options=["-vvv"])
    assert "TASK [notify : Set the variables of the role as facts]" in done.stdout
    assert CANARY not in done.stdout + done.stderr


def test_example_inventory_is_valid() -> None:
    from fleet.inventory.ansible import read_inventory
    from fleet.planning.plan import make_plan, read_profile

    hosts = read_inventory([str(ROOT / "inventory" / "example")])
    plan = make_plan(read_profile("standard"), hosts, run_id="r", nonce="0" * 32, created="2026-11-21T04:00:00Z")
    assert plan.gangs() == {"rack12": ("r12-h01", "r12-h02", "r12-h03", "r12-h04")}


def test_every_ignored_failure_has_a_comment() -> None:
    """The comment says which later task handles the failure, or why none is needed."""
    lines = [line for path in (ROOT / "roles").rglob("*.yml") for line in path.read_text().splitlines()]
    assert [line for line in lines if re.search(r"failed_when: false(?! # .{20})", line)] == []


@pytest.mark.parametrize("playbook", sorted(path.name for path in (ROOT / "playbooks").glob("*.yml")))
def test_plays_have_only_documented_tags_or_the_tag_always(playbook: str) -> None:
    plays = yaml.safe_load((ROOT / "playbooks" / playbook).read_text())
    tags = [tag for play in plays if "hosts" in play for tag in play["tags"]]
    assert set(tags) <= {"install", "configure", "run", "report", "always"}


def test_tag_report_runs_no_measurement() -> None:
    """The tag runs the role `plan`, which sets the facts of the run, and the roles that end the run."""
    words = ("-i", "inventory/example", "playbooks/acceptance.yml", "--list-tasks", "--tags=report")
    listed = run_ansible("ansible-playbook", *words, directory=ROOT).stdout
    tasks = {line.partition("TAGS")[0].strip() for line in listed.splitlines() if re.match(r" +\w+ : ", line)}
    roles = {task.partition(" : ")[0] for task in tasks if "Validating arguments" not in task}
    assert roles == {"plan", "monitoring", "report"}
    assert "report : Judge the run" in tasks


DRIVERS = role_vars("nvidia_driver")["_nvidia_driver_table"]


def test_default_of_serial_in_the_drivers_playbook_equals_the_default_of_the_role() -> None:
    plays = yaml.safe_load((ROOT / "playbooks" / "drivers.yml").read_text())
    serial = [play["serial"] for play in plays if "serial" in play]
    assert len(serial) == 2
    assert all(f"default('{defaults('nvidia_driver')['nvidia_driver_serial']}')" in text for text in serial)


@pytest.mark.parametrize("role", ["nvidia_driver", "container_toolkit"])
def test_install_and_main_have_the_same_argument_specs(role: str) -> None:
    specs = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    assert specs["install"]["options"] == specs["main"]["options"]


@pytest.mark.parametrize("distribution", ["debian12", "ubuntu2404", "rhel9"])
def test_driver_packages_of_a_distribution_are_in_the_test_data(distribution: str) -> None:
    index = yaml.safe_load((ROOT / "tests" / "data" / "packages.yml").read_text())[distribution]
    driver = DRIVERS[distribution]
    assert {*driver["open"], *driver["proprietary"], "nvidia-fabricmanager"} <= set(index["packages"])


def test_driver_and_toolkit_support_the_same_distributions() -> None:
    toolkit = role_vars("container_toolkit")["_container_toolkit_table"]
    assert {distribution: driver["manager"] for distribution, driver in DRIVERS.items()} == toolkit
    page = (ROOT / "docs" / "drivers.md").read_text()
    for distribution in toolkit:
        name, version = re.fullmatch(r"([a-z]+)(\d+)", distribution).groups()  # type: ignore[union-attr]
        version = version if len(version) < 4 else f"{version[:-2]}.{version[-2:]}"
        assert re.search(rf"{name}\b[^.;|]*\b{version}\b", page, re.IGNORECASE), distribution


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("", True), ("580", True), ("580.", True), ("580.159.04", True), ("580*", False), ("latest", False)],
)
def test_schema_checks_the_driver_version(value: str, allowed: bool) -> None:
    assert bool(re.search(SCHEMA["nvidia_driver_version"]["pattern"], value)) is allowed


OS_RELEASES = {
    "debian12": 'ID=debian\nVERSION_ID="12"\n',
    "ubuntu2404": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n',
    "rhel9": 'ID="rhel"\nID_LIKE="fedora"\nVERSION_ID="9.6"\nPLATFORM_ID="platform:el9"\n',
    "rhel9 (Rocky)": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\nPLATFORM_ID="platform:el9"\n',
    "rhel9 (Alma)": 'ID="almalinux"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\nPLATFORM_ID="platform:el9"\n',
    "rhel9 (CentOS Stream)": 'ID="centos"\nID_LIKE="rhel fedora"\nVERSION_ID="9"\nPLATFORM_ID="platform:el9"\n',
    "rhel9 (Oracle)": 'ID="ol"\nID_LIKE="fedora"\nVERSION_ID="9.4"\nPLATFORM_ID="platform:el9"\n',
    "rhel10": 'ID="ol"\nID_LIKE="fedora"\nVERSION_ID="10.0"\nPLATFORM_ID="platform:el10"\n',
    "fedora42": 'ID=fedora\nVERSION_ID=42\nPLATFORM_ID="platform:f42"\n',
    "amzn2023": 'ID="amzn"\nID_LIKE="fedora"\nVERSION_ID="2023"\nPLATFORM_ID="platform:al2023"\n',
    "arch": "ID=arch\n",
    "": "",
}
"""Name of the distribution in NVIDIA's repositories -> /etc/os-release."""


@pytest.mark.parametrize("name", OS_RELEASES)
@pytest.mark.parametrize("role", ["nvidia_driver", "container_toolkit"])
def test_distribution_has_its_name_in_nvidias_repositories(
    role: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rebuilds of RHEL, such as Rocky, have the name of RHEL."""
    module = load_probe(role)
    monkeypatch.setattr(module, "read", lambda _: OS_RELEASES[name])
    assert module.distribution() == name.partition(" ")[0]


KERNEL_HEADERS = {
    ("debian12", "6.1.0-40-amd64"): "linux-headers-6.1.0-40-amd64",
    ("ubuntu2404", "6.8.0-60-generic-64k"): "linux-headers-6.8.0-60-generic-64k",
    ("rhel9", "5.14.0-570.12.1.el9_6.x86_64"): "kernel-devel-5.14.0-570.12.1.el9_6.x86_64",
    ("rhel9", "5.14.0-570.12.1.el9_6.aarch64+64k"): "kernel-64k-devel-5.14.0-570.12.1.el9_6.aarch64",
    ("rhel9", "5.14.0-570.12.1.el9_6.x86_64+rt"): "kernel-rt-devel-5.14.0-570.12.1.el9_6.x86_64",
}
"""Distribution and release of the kernel (`uname -r`) -> package of the kernel headers."""
UEK = ("5.15.0-307.178.5.el9uek.x86_64", "6.12.0-100.28.2.2.el9uek.x86_64", "6.12.0-105.51.5.el9uek.aarch64.64k")


def test_kernel_decides_the_package_of_its_headers_and_whether_a_driver_can_be_installed(tmp_path: Path) -> None:
    """Oracle's kernel UEK is refused, because it needs another compiler than that of the system."""
    hosts = {}
    for number, (distribution, kernel) in enumerate((*KERNEL_HEADERS, *(("rhel9", kernel) for kernel in UEK))):
        facts = {"distribution": distribution, "kernel": kernel, "in_use": []}
        hosts[f"h{number}"] = {"_rackproof_driver": {"stdout": json.dumps(facts)}, "kernel": kernel}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts, "vars": LOCAL}}))
    packages = "{{ _nvidia_driver_other_packages | join }}"
    play = {
        "hosts": "gpu_hosts",
        "gather_facts": False,
        "vars": {**defaults("nvidia_driver"), **role_vars("nvidia_driver")},
        "tasks": [
            {"ansible.builtin.copy": {"content": packages, "dest": f"{tmp_path}/{{{{ kernel }}}}"}},
            {
                "ansible.builtin.include_tasks": str(ROOT / "roles/nvidia_driver/tasks/apply.yml"),
                "when": "'uek' in kernel",
            },
        ],
    }
    done = run_plays(tmp_path, play)
    assert {key: (tmp_path / key[1]).read_text() for key in KERNEL_HEADERS} == KERNEL_HEADERS
    shown = " ".join(done.stdout.split())
    for kernel in UEK:
        assert f"the kernel {kernel} (UEK) needs another compiler" in shown
    assert done.stdout.count("failed=1") == len(UEK)


def load_probe(role: str) -> Any:
    """Return the module `probe.py` of a role. It is in no package, because Ansible copies it to hosts."""
    spec = importlib.util.spec_from_file_location("probe", ROOT / "roles" / role / "files" / "probe.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_port_owner_is_identified_if_it_closes_a_file_during_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a port is the process that listens on it.

    If the search did not identify Rackproof's agent as the owner, the preflight would report that another program uses the port.
    """
    readlink = os.readlink
    closed_files = iter([True])

    def readlink_with_one_closed_file(path: str) -> str:
        if path.startswith(f"/proc/{os.getpid()}/") and next(closed_files, False):
            raise FileNotFoundError(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", readlink_with_one_closed_file)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert preflight.listening_process(server.getsockname()[1]).startswith(f"process {os.getpid()} (")


def test_port_is_free_if_its_process_ends_during_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = iter([{"socket:[1]"}, set()])
    monkeypatch.setattr(preflight, "listening_sockets", lambda port: next(sockets))
    assert preflight.listening_process(29500) == ""


def test_port_of_another_users_process_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "listening_sockets", lambda port: {"socket:[1]"})
    assert preflight.listening_process(29500) == "a process of another user"


def test_unreachable_host_is_polled_for_the_whole_soak(tmp_path: Path) -> None:
    """A soak (benchmarks that are repeated for hours) is polled a limited number of times.

    A poll of an unreachable host fails at once. The role must then wait as long as a poll of a reachable host takes.
    """
    (tmp_path / "plan.json").write_text(json.dumps({"stages": [{"name": "soak", "duration_s": 1, "deadline_s": 1}]}))
    hosts = {"h1": {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    variables = defaults("common") | {
        "_rackproof_run_dir": str(tmp_path),
        "_rackproof_run_id": "r",
        "rackproof_fabric_interface": "",
        "_soak_polls": 2,
        "_soak_spare_polls": 0,
    }
    task = {"ansible.builtin.include_role": {"name": "soak"}, "vars": variables}
    done = run_plays(tmp_path, {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [task]})
    waits = done.stdout.split("TASK [soak : Wait for the duration of a poll]")[1:]
    assert [wait.split("\n")[1].split(":")[0] for wait in waits] == ["ok", "ok"], done.stdout + done.stderr
    assert done.returncode == 2, "the host must fail at the end of the soak"


HOSTILE_ANSWERS = [
    "{}",
    "[]",
    "null",
    "no JSON",
    '{"progress": {"a": []}, "started": "maybe"}',
    '{"progress": "{{ 1 / 0 }}"}',
]
"""What a hostile host may answer to a poll of its soak, in place of its progress."""


def test_hostile_answer_of_one_host_to_a_poll_does_not_end_the_soak_of_another(tmp_path: Path) -> None:
    """The good host is soaking at its first poll (exit code 4), and has finished at the second (exit code 0)."""
    good = json.dumps({"progress": "round 1", "started": True})
    hostile = {f"hostile{number}": answer for number, answer in enumerate(HOSTILE_ANSWERS)}
    answers = {**hostile, "good": good}
    (tmp_path / "plan.json").write_text(json.dumps({"stages": [{"name": "soak", "duration_s": 1, "deadline_s": 1}]}))
    hosts = {}
    for host, answer in answers.items():
        prefix, state = tmp_path / host / "prefix", tmp_path / host / "state"
        program = prefix / "bin" / "rackproof"
        program.parent.mkdir(parents=True)
        program.write_text(
            f"#!/bin/sh\necho >>{prefix}/polls\nprintf %s {shlex.quote(answer)}\n[ $(wc -l <{prefix}/polls) = 2 ] || exit 4\n"
        )
        program.chmod(0o755)
        (state / "runs" / "r").mkdir(parents=True)
        (state / "runs" / "r" / "record.json").write_text("{}")
        hosts[host] = {**LOCAL, "rackproof_prefix": str(prefix), "rackproof_state_directory": str(state)}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    variables = {
        "_rackproof_run_dir": str(tmp_path),
        "_rackproof_run_id": "r",
        "rackproof_fabric_interface": "",
        "_soak_poll_s": 1,
    }
    task = {"ansible.builtin.include_role": {"name": "soak"}, "vars": variables}
    done = run_plays(tmp_path, {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [task]})
    assert (tmp_path / "good" / "prefix" / "polls").read_text() == "\n\n", done.stdout + done.stderr
    assert re.search(r"^good .* failed=0 ", done.stdout, re.MULTILINE), done.stdout
    assert "round 1" in done.stdout


def test_no_expression_parses_the_output_of_several_hosts() -> None:
    """If it did, invalid output of one host would make the task fail for all hosts."""
    files = [path for path in (*(ROOT / "roles").rglob("*"), *(ROOT / "playbooks").glob("*")) if path.is_file()]
    expressions = [
        expression
        for path in files
        if path.suffix in (".yml", ".j2")
        for expression in re.findall(r"\{\{.*?\}\}|\{%.*?%\}", path.read_text(), re.DOTALL)
    ]
    assert len(expressions) > 300
    assert [text for text in expressions if re.search("from_(json|yaml)", text) and "hostvars" in text] == []


@pytest.fixture(scope="module")
def state_directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run tasks of the role `agent` on three local hosts. Return the parent of their state directories, and the output.

    A host has the same name as its state directory. The agent is removed from `marked` and `unmarked`. The installation on
    `shared` fails, because its state directory has a directory of other software. The mark is the file that identifies a state
    directory of Rackproof.
    """
    directory = tmp_path_factory.mktemp("agent")
    for name in ("marked", "unmarked"):
        for subdirectory in ("runs/r1", "data", "foreign"):
            (directory / name / subdirectory).mkdir(parents=True)
    (directory / "marked" / role_vars("agent")["_agent_state_mark"]).touch()
    (directory / "shared" / "foreign").mkdir(parents=True)
    (directory / "shared").chmod(0o1777)
    hosts = {name: {"rackproof_state_directory": str(directory / name)} for name in ("marked", "unmarked", "shared")}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts, "vars": LOCAL}}))
    (directory / "lock.json").write_text("{}")
    variables = {name: value for name, value in defaults("common").items() if name != "rackproof_state_directory"}
    variables |= {
        "_rackproof_run_dir": str(directory),
        "rackproof_prefix": str(directory / "prefix"),
        "rackproof_python": sys.executable,
    }
    plays = [
        {
            "hosts": pattern,
            "gather_facts": False,
            "vars": variables,
            "tasks": [{"ansible.builtin.include_role": {"name": "agent", "tasks_from": tasks}}],
        }
        for pattern, tasks in (("marked:unmarked", "remove"), ("shared", "install"))
    ]
    done = run_plays(directory, *plays)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("failed=0") == 2, done.stdout
    return directory, done.stdout


def test_files_of_the_agent_are_removed_only_if_the_state_directory_has_the_mark(
    state_directories: tuple[Path, str],
) -> None:
    directory, _ = state_directories
    assert {path.name for path in (directory / "marked").iterdir()} == {"foreign"}
    assert {path.name for path in (directory / "unmarked").iterdir()} == {"runs", "data", "foreign"}


def test_state_directory_with_other_files_is_refused(state_directories: tuple[Path, str]) -> None:
    directory, output = state_directories
    shared = directory / "shared"
    message = f"rackproof_state_directory {shared} contains other files (foreign): use a separate directory"
    assert message in " ".join(output.split())
    assert (shared.stat().st_mode & 0o7777, [path.name for path in shared.iterdir()]) == (0o1777, ["foreign"])


# --- templates


@pytest.fixture(scope="module")
def rendered_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files that Ansible renders from templates of roles."""
    directory = tmp_path_factory.mktemp("rendered")
    hosts = {
        "h1": {"ansible_host": "fd00::11"},
        "h2": {"ansible_host": "10.0.0.2"},
        "h3": {"ansible_host": "h3.example"},
        "h4": {"ansible_host": "10.0.0.4", "rackproof_exporter_listen": "10.1.0.4"},
        "h5": {"ansible_host": "10.0.0.5", "rackproof_exporter_listen": "0.0.0.0"},
        "h6": {"ansible_host": "fd00::16", "rackproof_exporter_listen": "::"},
    }
    targets = {"_rackproof_run_id": "r1", "rackproof_exporter_port": 9836}
    exporter = {**defaults("common"), "_rackproof_agent_id": "a", "_monitoring_writable": []}
    exporter |= {"rackproof_exporter_compat": ["1.0", "dcgm"]}
    cron = {"rackproof_schedule_repository": "https://me%40here:pass@git.example/r.git", "item": "rack1"}
    cron |= {"rackproof_schedule_inventories": {"rack1": "hosts.yml"}, "rackproof_runs_directory": "runs"}
    cron |= {"_schedule_start": {"stdout": '{"rack1": 121}'}}
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
            ("common", "targets.json.j2", targets),
            ("monitoring", "rackproof-exporter.service.j2", exporter),
            ("schedule", "revalidate.cron.j2", cron),
        )
    ]
    (directory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts, "vars": LOCAL}}))
    done = run_plays(directory, {"hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks})
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def run_plays(
    directory: Path, *plays: dict[str, Any], inventory: str = "hosts.yml", options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the plays on the hosts of `directory`/`inventory`, with the roles and action plugins of the checkout.

    The playbook is in `directory`/playbooks. Roles look for the command `rackproof` one level above it, in `directory`.
    """
    (directory / "playbooks").mkdir()
    (directory / "playbooks" / "play.yml").write_text(yaml.safe_dump(list(plays)))
    environment = {
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "ANSIBLE_ACTION_PLUGINS": str(ROOT / "playbooks" / "action_plugins"),
        # The ansible.cfg of the checkout also sets False. test_collection runs roles with Ansible's default, True.
        "ANSIBLE_INJECT_FACT_VARS": "False",
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_EXECUTABLE": str(CONTROL_SHELL),  # with this shell, local modules run in half the time
    }
    words = ("-i", inventory, "playbooks/play.yml", *options)
    return run_ansible("ansible-playbook", *words, directory=directory, environment=environment)


def write_program(path: Path, text: str) -> None:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_marker_of_an_installation_is_written_last_after_the_installed_files_are_on_the_disk() -> None:
    tasks = yaml.safe_load((ROOT / "roles/agent/tasks/install.yml").read_text())
    assert tasks[-2]["ansible.builtin.command"]["argv"] == ["sync", "--file-system", "{{ rackproof_prefix }}"]
    assert "installed-" in tasks[-1]["ansible.builtin.copy"]["dest"]


@pytest.mark.parametrize(
    ("tasks", "has_agent"),
    [("agent/tasks/main", False), ("agent/tasks/main", True), ("nvidia_driver/tasks/reboot", True)],
)
def test_host_that_another_run_holds_gets_no_agent_and_no_training_data_and_is_not_rebooted(
    tasks: str, has_agent: bool, tmp_path: Path
) -> None:
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"h1": LOCAL}}}))
    write_program(tmp_path / "bin" / "rackproof", "echo this host is held by run r2 >&2; exit 75")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "rackproof.whl").touch()
    (tmp_path / ("installed-1" if has_agent else "installed-0")).touch()
    variables = {
        "rackproof_prefix": str(tmp_path),
        "rackproof_state_directory": str(tmp_path / "state"),
        "rackproof_take_over": False,
        "rackproof_install_fio": False,
        "rackproof_data_directory": str(tmp_path / "agent"),
        "_rackproof_agent_id": "1",
        "_rackproof_claim": {},
        "_rackproof_run_dir": str(tmp_path),
    }
    include = {"ansible.builtin.include_tasks": str(ROOT / f"roles/{tasks}.yml")}
    play = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [include]}
    done = run_plays(tmp_path, play, options=["-e", json.dumps(variables)])
    must_fail = "reboot" in tasks or not has_agent
    assert done.returncode == (2 if must_fail else 0), done.stdout + done.stderr
    assert "this host is held by run r2" in done.stdout
    last_task = done.stdout.rpartition("TASK [")[2]
    assert not must_fail or last_task.startswith("common : Stop the exporter unless another run holds the host]")
    assert not (tmp_path / "state").exists()


PROBE = """
cat > /dev/null
in_use='"python (process 815)"'
[ -e {0}/ended ] && in_use=
echo '{{"installation_helps": true, "distribution": "debian12", "kernel": "6.1.0-40-amd64", "in_use": ['"$in_use"'],'
echo '"containers": 0, "runtime_wanted": true, "toolkit_wanted": true}}'
echo "not installed" >&2; exit 1
"""
"""Stands in for the Python that runs the probes of driver and toolkit. Neither is installed. A process uses the GPUs until the
file `ended` exists."""


def install_on_two_hosts(role: str, directory: Path, *options: str, stop: str) -> str:
    """Run the installation of a role on h1 and h2, one host at a time, and then a play that measures them; return the output.

    h1 needs the installation, h2 does not. `stop` stands in for `rackproof stop` on h1; empty: the agent is not installed.
    """
    hosts = {name: {**LOCAL, "rackproof_prefix": str(directory / name)} for name in ("h1", "h2")}
    for name, variables in hosts.items():
        variables["rackproof_python"] = str(directory / name / "bin" / "python")
    if stop:
        write_program(directory / "h1/bin/rackproof", stop)
    write_program(directory / "h1/bin/python", PROBE.format(directory / "h1"))
    write_program(directory / "h2/bin/python", """cat > /dev/null; echo '{"installation_helps": false}'""")
    (directory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    variables = {
        "rackproof_take_over": "ended" in stop,
        "_rackproof_claim": {},
        "_rackproof_bound": True,
        # The installation fails, because the role has no tasks for this package manager.
        "_nvidia_driver_table": {"debian12": {"manager": "no-such-manager"}},
        "_container_toolkit_table": {"debian12": "no-such-manager"},
    }
    install = {"ansible.builtin.import_role": {"name": role, "tasks_from": "install"}}
    measure = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} is measured"}}
    plays = [{"hosts": "gpu_hosts", "gather_facts": False, "serial": 1, "tasks": [install]}]
    plays.append({"hosts": "gpu_hosts", "gather_facts": False, "tasks": [measure]})
    done = run_plays(directory, *plays, options=["-e", json.dumps(variables), *options])
    return done.stdout + done.stderr


@pytest.mark.parametrize("role", ["nvidia_driver", "container_toolkit"])
def test_host_that_another_run_holds_is_not_changed_and_does_not_end_the_playbook(role: str, tmp_path: Path) -> None:
    output = install_on_two_hosts(role, tmp_path, stop="echo held by run r2 >&2; exit 75")
    assert "no-such-manager" not in output
    assert "the host is not changed: held by run r2" in output
    assert "h1 is measured" in output  # the play that takes the lease excludes it, and shows why
    assert "h2 is measured" in output


@pytest.mark.parametrize("role", ["nvidia_driver", "container_toolkit"])
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_driver_and_toolkit_are_installed_on_a_host_without_the_agent(
    role: str, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "h1").mkdir()
    (tmp_path / "h1" / "ended").touch()
    assert "no-such-manager" in install_on_two_hosts(role, tmp_path, *options, stop="")


def test_driver_is_installed_after_the_stage_of_another_run_was_ended(tmp_path: Path) -> None:
    output = install_on_two_hosts("nvidia_driver", tmp_path, stop=f"touch {tmp_path}/h1/ended")
    assert "process 815" not in output
    assert "no-such-manager" in output


@pytest.mark.parametrize("name", [*preflight.DISTORTING, *preflight.LEAST])
def test_preflight_accepts_a_variable_that_distorts_measurements_if_the_inventory_sets_it(name: str) -> None:
    """The check on the host gets only the variables of the inventory whose names match."""
    assert re.match(role_vars("preflight")["_preflight_checked"], name)


def test_clock_is_wrong_only_if_it_differs_from_the_times_before_and_after_the_connection(tmp_path: Path) -> None:
    """`slow` has a correct clock, but its connection takes longer than the permitted difference."""
    for host, offset_s in (("slow", 0), ("ahead", 3600), ("behind", -3600)):
        (tmp_path / host).mkdir()
        code = f"import time\nnow = time.time\ntime.time = lambda: now() + {offset_s}\n"
        (tmp_path / host / "sitecustomize.py").write_text(code)
        python, shell = tmp_path / host / "python", tmp_path / host / "sh"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / host} exec {sys.executable} "$@"\n')
        shell.write_text(f'#!/bin/sh\n{"sleep 2" if host == "slow" else ":"}\nexec {CONTROL_SHELL} "$@"\n')
        python.chmod(0o755)
        shell.chmod(0o755)
    paths = {name: str(tmp_path / "{{ inventory_hostname }}" / name) for name in ("python", "sh", "state")}
    variables = {
        **defaults("preflight"),
        **role_vars("preflight"),
        "_preflight_script": "{{ lookup('ansible.builtin.file', '" + preflight.__file__ + "') }}",
        "_preflight_network": False,
        "ansible_shell_executable": paths["sh"],
        "rackproof_python": paths["python"],
        "rackproof_prefix": paths["state"],
        "rackproof_state_directory": paths["state"],
        "rackproof_maximum_clock_skew_s": 1,
        "rackproof_minimum_free_bytes": 0,
        "rackproof_exporter_listen": "127.0.0.1",
        "rackproof_exporter_port": 1,
        "rackproof_rendezvous_port": 2,
        "rackproof_system_torch": False,
        "rackproof_wheelhouse": "",
    }
    hosts = dict.fromkeys(("slow", "ahead", "behind"), LOCAL)
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    tasks = [
        {"ansible.builtin.include_tasks": str(ROOT / "roles/preflight/tasks/main.yml")},
        {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} passed"}},
    ]
    play = {"hosts": "gpu_hosts", "gather_facts": False, "vars": variables, "tasks": tasks}
    output = run_plays(tmp_path, play).stdout
    assert re.findall(r"(\w+) passed", output) == ["slow"], output
    for clock in ("ahead of", "behind"):
        assert re.search(rf"the clock is 3[56]\d\d\.\d s {clock} the control node", output), output


PLANNER = """
cat > /dev/null # as the planner does: Ansible fails if nobody reads its input
rm launches 2>/dev/null && echo '{"launches": [["--number=1"]], "hosts": {"h1": 0, "h2": 0}, "awaited": [], "excluded": {}}' ||
echo '{"launches": [], "hosts": {}, "awaited": [], "excluded": {}}'
"""
"""Stands in for `rackproof gangs`. Plans a launch in the first call only."""
LAUNCH = """
echo "$0" >> starts
[ "$1" = --wait ] && exec sh wait
exit 0
"""
"""Stands in for `rackproof launch` on the host `$0`."""
WAIT = """
for _ in $(seq 50); do [ "$(wc -l < starts)" -ge 2 ] && exit 0; sleep 0.1; done
echo "the other host did not start"; exit 2
"""
"""Stands in for `rackproof wait`. It waits until both hosts have started."""


@pytest.mark.parametrize("forks", [1, 2])
def test_hosts_of_a_launch_start_once_and_wait_for_each_other_however_many_forks_ansible_has(
    forks: int, tmp_path: Path
) -> None:
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"h1": LOCAL, "h2": LOCAL}}}))
    (tmp_path / "launches").touch()
    (tmp_path / "wait").write_text(WAIT)
    (tmp_path / "gangs").mkdir()
    (tmp_path / "gangs" / "all.json").touch()
    role = read_role_file("gang", "vars/main.yml")
    variables = {
        "_gang_planner_command": ["sh", "-c", f"cd {tmp_path}; {PLANNER}"],
        "_gang_launch_command": ["sh", "-c", f"cd {tmp_path}; {LAUNCH}", "{{ inventory_hostname }}"],
        "_gang_launch_options": role["_gang_launch_options"],
        "_gang_exceeds_forks": role["_gang_exceeds_forks"],
        "_gang_wait_command": ["sh", "-c", f"cd {tmp_path}; exec sh wait"],
        "_gang_max_launches": 2,
        "_gang_name": "all",
        "_rackproof_host_dir": str(tmp_path),
        "_rackproof_run_dir": str(tmp_path / "run"),
    }
    tasks = [{"ansible.builtin.include_tasks": str(ROOT / "roles/gang/tasks/launch.yml")}]
    play = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks}
    done = run_plays(tmp_path, play, options=[f"--forks={forks}", "-e", json.dumps(variables)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((tmp_path / "starts").read_text().split()) == ["h1", "h2"]


@pytest.mark.parametrize("forks", [1, 2])
def test_benchmarks_run_on_all_hosts_at_the_same_time_however_many_forks_ansible_has(
    forks: int, tmp_path: Path
) -> None:
    """The BMCs of all hosts are read 30 s after the start of the stage, so no host may be idle then."""
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"h1": LOCAL, "h2": LOCAL}}}))
    (tmp_path / "wait").write_text(WAIT)
    role = read_role_file("benchmark", "vars/main.yml")
    variables = {
        "_benchmark_command": ["sh", "-c", f"cd {tmp_path}; {LAUNCH}", "{{ inventory_hostname }}"],
        "_benchmark_exceeds_forks": role["_benchmark_exceeds_forks"],
        "_benchmark_wait_command": ["sh", "-c", f"cd {tmp_path}; exec sh wait"],
    }
    (block,) = read_role_file("benchmark", "tasks/main.yml")
    tasks = [task for task in block["block"] if "ansible.builtin.command" in task]
    play = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks}
    done = run_plays(tmp_path, play, options=[f"--forks={forks}", "-e", json.dumps(variables)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((tmp_path / "starts").read_text().split()) == ["h1", "h2"]


# --- schedules of several inventories


KINDS = ("cron", "systemd")
Schedule = Callable[..., tuple[list[str], str]]


@pytest.fixture
def schedule(tmp_path: Path) -> Schedule:
    """Return a function that installs a schedule of each kind for an inventory, as two plays of one playbook.

    It returns the kinds whose schedule was installed, and the output in one line. The directory `etc-KIND` has the files.
    """
    variables = {"rackproof_schedule_repository": "https://me%40here:pass@git.example/r.git"}
    variables |= {"rackproof_runs_directory": "runs"}
    plays = []
    for kind in KINDS:
        (tmp_path / f"etc-{kind}").mkdir()
        directories = dict.fromkeys(("_schedule_units", "_schedule_crontabs"), str(tmp_path / f"etc-{kind}"))
        # Variables of the task: those of a play would not replace the variables of the role, which name directories of /etc.
        role = {
            "ansible.builtin.import_role": {"name": "schedule"},
            "vars": {**variables, **directories, "rackproof_schedule_kind": kind},
        }
        done = {"ansible.builtin.debug": {"msg": f"the schedule of {kind} is done"}}
        tasks = [{"block": [role, done], "rescue": [{"ansible.builtin.debug": {"msg": "refused"}}]}]
        plays.append({"hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks})

    def call(inventory: str, *more: str) -> tuple[list[str], str]:
        (tmp_path / inventory).parent.mkdir(exist_ok=True)
        (tmp_path / inventory).write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"localhost": LOCAL}}}))
        shutil.rmtree(tmp_path / "playbooks", ignore_errors=True)
        options = [word for text in more for word in ("-e", text)]
        shown = run_plays(tmp_path, *plays, inventory=inventory, options=options)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        text = " ".join((shown.stdout + shown.stderr).split())
        return [kind for kind in KINDS if f"the schedule of {kind} is done" in text], text

    return call


def schedule_files(directory: Path) -> dict[str, str]:
    """Return the path below `directory` and the text of each file of a schedule."""
    paths = [path for kind in KINDS for path in (directory / f"etc-{kind}").iterdir()]
    return {str(path.relative_to(directory)): path.read_text() for path in paths}


def test_schedule_is_replaced_by_that_of_another_inventory_only_after_its_removal(
    tmp_path: Path, schedule: Schedule
) -> None:
    """Both names are mapped to the same name of a schedule. The message names the options with which both can be installed.

    A schedule with another name, or of a missing inventory, is not in the way.
    """

    first, second = "a.b%$.yml", "a-b--.yml"
    assert schedule(first)[0] == [*KINDS]
    installed = schedule_files(tmp_path)
    assert schedule(first)[0] == [*KINDS]
    done, text = schedule(second)
    assert done == []
    reason = (
        f"{tmp_path}/{second}: its schedule would have the name a-b-- and replace the schedule of {tmp_path}/{first}: "
        "to keep both, set"  # the installed file has the inventory twice
    )
    assert text.count(reason) >= len(KINDS)
    assert "me%40here" not in text
    assert schedule_files(tmp_path) == installed
    (option,) = set(re.findall(r"first run this playbook with -e (\w+=\w+)", text))

    assert schedule(second, json.dumps({"rackproof_schedule_inventories": {"other": second}}))[0] == [*KINDS]
    both = schedule_files(tmp_path)
    assert installed.items() < both.items()
    (tmp_path / first).unlink()
    assert schedule(second)[0] == [*KINDS]
    replaced = schedule_files(tmp_path)
    assert replaced.keys() == both.keys()
    assert sum(f"--inventory={tmp_path}/{second}" in replaced[name] for name in installed) == len(KINDS)
    assert schedule(first, option)[0] == [*KINDS]
    assert schedule_files(tmp_path).keys() == both.keys() - installed.keys()


def test_target_is_the_address_of_the_host_in_the_notation_of_prometheus(rendered_templates: Path) -> None:
    groups = json.loads((rendered_templates / "targets.json").read_text())
    assert {group["labels"]["host"]: group["targets"] for group in groups} == {
        "h1": ["[fd00::11]:9836"],
        "h2": ["10.0.0.2:9836"],
        "h3": ["h3.example:9836"],
        "h4": ["10.1.0.4:9836"],
        # An exporter that listens on all addresses is scraped at the address of its host: 0.0.0.0 is Prometheus' own machine.
        "h5": ["10.0.0.5:9836"],
        "h6": ["[fd00::16]:9836"],
    }


def test_exporter_is_started_with_the_compatibility_options_of_the_inventory(
    rendered_templates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = (rendered_templates / "rackproof-exporter.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    assert command.endswith(" --compat=1.0 --compat=dcgm")
    # The test adds an invalid port. If this is the only error, the exporter accepts all options of the unit.
    assert main([*command.split(), "--port", "70000"]) == 64
    assert "not a port" in capsys.readouterr().err


def test_percent_sign_in_a_cron_command_is_escaped(rendered_templates: Path) -> None:
    """cron passes the text after the first unescaped `%` to the standard input of the command."""
    *_, line = (rendered_templates / "revalidate.cron").read_text().splitlines()
    assert "https://me\\%40here:pass@git.example/r.git" in line
    assert not re.search(r"(?<!\\)%", line)
    assert line.endswith("2>&1 | logger -t rackproof-revalidate-rack1")
    (task,) = yaml.safe_load((ROOT / "roles/schedule/tasks/cron.yml").read_text())
    assert task["ansible.builtin.template"]["mode"] == "0600"


# --- a schedule that updates its checkout


OTHER_ACCOUNT = 65_534
GIT = ("git", "-c", "user.name=alice", "-c", "user.email=alice@example.org")
FAKE_RACKPROOF = """
import pathlib, sys
with pathlib.Path(__file__).with_name("calls").open("a") as log:
    print(*sys.argv[1:], file=log)
active, broken = (pathlib.Path(__file__).with_name(name).exists() for name in ("active", "broken"))
if broken:
    raise ImportError
sys.exit(2 if "--not-updated" in sys.argv else 1 if "--active" in sys.argv and not active else 0)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a checkout of the repository `upstream`, with a fake `rackproof` and the units of a schedule that updates it.

    The checkout belongs to another account. The repository has one more commit, which adds the file `new`.
    """
    upstream, checkout = tmp_path / "upstream", tmp_path / "site"
    (upstream / "playbooks").mkdir(parents=True)
    updated = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [{"ansible.builtin.debug": {"msg": "updated"}}]}
    (upstream / "playbooks" / "schedule.yml").write_text(yaml.safe_dump([updated]))
    (upstream / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"localhost": LOCAL}}}))
    (upstream / "rackproof").write_text(FAKE_RACKPROOF)
    for command in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run([*GIT, *command], cwd=upstream, check=True)
    subprocess.run([*GIT, "clone", "-q", upstream, checkout], check=True)
    (upstream / "new").touch()
    for command in (("add", "-A"), ("commit", "-qm", "second")):
        subprocess.run([*GIT, *command], cwd=upstream, check=True)
    variables = {
        **defaults("schedule"),
        **role_vars("schedule"),
        "rackproof_schedule_repository": str(upstream),
        "_schedule_start": {"stdout": '{"rack1": 121}'},
        "item": "rack1",
    }
    variables |= {"rackproof_schedule_inventories": {"rack1": "hosts.yml"}, "rackproof_runs_directory": "runs"}
    names = ("revalidate.cron", "revalidate.service")
    tasks = [
        {
            "ansible.builtin.template": {
                "src": f"{ROOT}/roles/schedule/templates/{name}.j2",
                "dest": str(tmp_path / name),
            },
            "vars": {**variables, "_schedule_checkout": str(checkout)},
        }
        for name in names
    ]
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"localhost": LOCAL}}}))
    done = run_plays(tmp_path, {"hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks})
    assert done.returncode == 0, done.stdout + done.stderr
    for path in (checkout, *checkout.rglob("*")):
        os.chown(path, OTHER_ACCOUNT, OTHER_ACCOUNT)
    return checkout


def started(site: Path, kind: str) -> int:
    """Execute the command of the cron file, or the first command of the service; return the exit code."""
    if kind == "cron":
        line = (site.parent / "revalidate.cron").read_text().splitlines()[-1].split(maxsplit=6)[-1]
        assert len(line.replace(str(site.parent), "/srv")) < 1000  # cron of Debian ignores longer lines
        command = ["/bin/sh", "-c", line.rpartition(" 2>&1 | logger")[0].replace("\\%", "%")]
    else:
        unit = (site.parent / "revalidate.service").read_text()
        (text,) = re.findall(r"^ExecStartPre=\+(.*)$", unit, re.MULTILINE)
        command = shlex.split(text.replace("%%", "%").replace("$$", "$"))
    done = subprocess.run(command, cwd=site, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    return done.returncode


def calls(site: Path) -> list[str]:
    """Return the arguments of each call of the fake `rackproof`."""
    return (site / "calls").read_text().splitlines() if (site / "calls").exists() else []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give the checkout to another account")
@pytest.mark.parametrize("kind", ["cron", "systemd"])
def test_schedule_updates_a_checkout_of_another_account_and_sends_a_notification_if_this_fails(
    site: Path, kind: str
) -> None:
    measured = (
        [f"--inventory={site.parent}/hosts.yml"] if kind == "cron" else []
    )  # the service measures in another command
    (site / "active").touch()
    assert started(site, kind) == 0
    assert not (site / "new").exists()  # a run is active
    assert [call.split()[1] for call in calls(site)] == ["--active", *measured]
    (site / "active").unlink()
    (site / "calls").unlink()
    assert started(site, kind) == 0
    assert (site / "new").exists()
    assert [call.split()[1] for call in calls(site)] == ["--active", *measured]
    (site / "calls").unlink()
    (site.parent / "upstream").rename(site.parent / "moved")
    assert started(site, kind) == 2
    assert [call.split()[1] for call in calls(site)] == ["--active", "--not-updated"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give the checkout to another account")
@pytest.mark.parametrize("kind", ["cron", "systemd"])
def test_update_repairs_a_checkout_whose_rackproof_does_not_start(site: Path, kind: str) -> None:
    (site / "broken").touch()
    started(site, kind)
    assert (site / "new").exists()


SCHEDULES = [
    "a.b",
    "a_b",
    "a-b",
    "a_-b",
    "a__b",
    "a._b",
    "a_.b",
    "a.-b",
    "a.b.c",
    "a_-b.c",
    "rack12.dc1.example",
    "rack12-dc1-example",
    "_",
    "_..",
]


def test_crontabs_have_names_that_cron_reads_and_no_two_schedules_have_the_same(tmp_path: Path) -> None:
    """cron of Debian and Ubuntu reads only files whose names have no other characters than letters, digits, `_` and `-`."""
    task = {
        "ansible.builtin.debug": {"msg": "file: {{ _schedule_crontab }}"},
        "vars": role_vars("schedule"),
        "loop": SCHEDULES,
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": {"localhost": LOCAL}}}))
    done = run_plays(tmp_path, {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [task]})
    assert done.returncode == 0, done.stdout + done.stderr
    files = re.findall(r"file: /etc/cron\.d/([^\"\s]*)", done.stdout)
    assert len(files) == len(SCHEDULES), done.stdout
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", file) for file in files), files
    assert len(set(files)) == len(files)
    assert files[SCHEDULES.index("a-b")] == "rackproof-revalidate-a-b"


# --- a report that cannot be written


COMMANDS = {"judge": "report", "scaling": "scaling"}
"""Tasks file of the role `report` -> the command of `rackproof` that it runs."""


@pytest.fixture(scope="module")
def failed_reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Run each tasks file of COMMANDS with a fake `rackproof` that writes no report and exits with 2 or 74.

    Return the directory of the plays, and play -> output. A play is named after its tasks file and its exit code: `judge-2`.
    """
    directory = tmp_path_factory.mktemp("failed_reports")
    program = "import sys; print(f'rackproof: {sys.argv[2]}: {sys.argv[1]}: No space left on device', file=sys.stderr)"
    (directory / "rackproof").write_text(f"{program}; sys.exit(int(sys.argv[2].rpartition('-')[2]))")
    (directory / "verdicts.prom").write_text("of an earlier run\n")
    cases = [(tasks_file, f"{tasks_file}-{code}") for tasks_file in COMMANDS for code in (2, 74)]
    hosts = {name: {"ansible_connection": "local"} for _, name in cases}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    plays = []
    for tasks_file, name in cases:
        (directory / name).mkdir()
        (directory / name / "verdicts.prom").write_text("of an earlier run\n")
        role = {"ansible.builtin.import_role": {"name": "report", "tasks_from": tasks_file}}
        rescue = {"ansible.builtin.debug": {"msg": "the role failed"}}  # Ansible stops if every host of a play fails
        tasks = [{"block": [role], "rescue": [rescue]}]
        variables = {"_rackproof_run_dir": name, "rackproof_verdicts_textfile": str(directory / name / "copy.prom")}
        play = {"name": name, "hosts": name, "gather_facts": False, "vars": variables, "tasks": tasks}
        plays.append(play)
    done = run_plays(directory, *plays)
    assert done.returncode == 0, done.stdout
    sections = re.split(r"^PLAY (?:\[(\S+)\]|RECAP) \*+\n", done.stdout, flags=re.MULTILINE)
    return directory, dict(zip(sections[1:-2:2], sections[2:-1:2], strict=True))


@pytest.mark.parametrize("tasks_file", COMMANDS)
@pytest.mark.parametrize("code", [2, 74])
def test_command_that_writes_no_report_fails_the_role(
    failed_reports: tuple[Path, dict[str, str]], tasks_file: str, code: int
) -> None:
    """Exit code 2 can mean that the fleet or the study is incomplete. Without a report, the role must not say this.

    It must not copy the metrics of an earlier run either.
    """
    directory, output = failed_reports
    name = f"{tasks_file}-{code}"
    assert f"rackproof: {name}: {COMMANDS[tasks_file]}: No space left on device" in output[name]
    assert "the role failed" in output[name]
    assert "incomplete" not in output[name]
    assert "cells failed or are missing: see" not in output[name]
    assert not (directory / name / "copy.prom").exists()
