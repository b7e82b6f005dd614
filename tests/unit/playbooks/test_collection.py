"""Test Rackproof as an Ansible collection: it is built, installed into an empty directory, and used for a rehearsal.

A rehearsal is a run on CPUs instead of GPUs. The host of this rehearsal is hostile: it adds facts to every module result.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomllib
import yaml

from deploy.galaxy.role_readmes import generated_pages
from schemas import VERSION
from tests import ROOT
from tests.fakes import bmc
from tests.lab.kill_points import smallest_benchmark_profile
from tests.lab.lab import CONTROL_SHELL
from tests.lab.prometheus import free_port
from tests.unit.playbooks.test_trust_boundary import hostile_python

ENVIRONMENT = ROOT / "deploy" / "awx" / "execution-environment.yml"
CANARIES = (bmc.USER.encode(), bmc.PASSWORD.encode())
"""User name and password of the simulated BMC (the management controller of a host). The inventory file contains them. No other
file and no output may contain them."""


def run(
    *words: str | Path, cwd: Path, environment: Mapping[str, str] | None = None, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program of the virtual environment in which the tests run."""
    program = Path(sys.executable).parent / words[0]
    variables = {**os.environ, "PWD": str(cwd), **(environment or {})}
    return subprocess.run(
        [program, *words[1:]], cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=timeout_s
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the collection like `make collection`, and return its archive."""
    directory = tmp_path_factory.mktemp("built")
    home = {"ANSIBLE_HOME": str(directory / "home")}
    done = run("ansible-galaxy", "collection", "build", "--output-path", directory / "dist", cwd=ROOT, environment=home)
    assert done.returncode == 0, done.stderr
    return directory / "dist" / f"rackproof-rackproof-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def site(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory in which only the collection is installed."""
    site = tmp_path_factory.mktemp("site")
    environment = {"ANSIBLE_HOME": str(site / "home")}
    command = ("ansible-galaxy", "collection", "install", archive, "-p", site / "collections", "--offline")
    done = run(*command, cwd=site, environment=environment)
    assert done.returncode == 0, done.stderr
    return site


def installed(site: Path) -> Path:
    return site / "collections" / "ansible_collections" / "rackproof" / "rackproof"


def test_collection_contains_only_what_a_control_node_needs(archive: Path) -> None:
    with tarfile.open(archive) as members:
        names = members.getnames()
    tops = {name.partition("/")[0] for name in names} - {"MANIFEST.json", "FILES.json"}
    wanted = {
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "ansible.cfg",
        "pyproject.toml",
    }
    wanted |= {
        "agent",
        "collectors",
        "docs",
        "fleet",
        "inventory",
        "meta",
        "playbooks",
        "rackproof",
        "roles",
        "schemas",
    }
    assert tops == wanted
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".png"))]
    assert archive.stat().st_size < 2_000_000


def test_galaxy_importer_accepts_the_collection(archive: Path, tmp_path: Path) -> None:
    """Ansible Galaxy runs the importer on each upload.

    The test turns off the checks with ansible-doc, ansible-lint and flake8. `make lint-ansible` runs ansible-lint.
    """
    settings = "[galaxy-importer]\nRUN_ANSIBLE_DOC = False\nRUN_ANSIBLE_LINT = False\nRUN_FLAKE8 = False\n"
    (tmp_path / "importer.cfg").write_text(settings)
    done = run(
        *("python", "-m", "galaxy_importer.main", archive),
        cwd=tmp_path,
        environment={"GALAXY_IMPORTER_CONFIG": str(tmp_path / "importer.cfg"), "ANSIBLE_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr
    assert "Importer processing completed successfully" in done.stdout


def test_role_readmes_and_page_of_variables_are_current() -> None:
    """To update the files, run the test with UPDATE_GOLDEN=1, or run `make golden`."""
    for path, text in generated_pages().items():
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, path


def test_galaxy_yml_and_execution_environment_have_the_version_of_rackproof() -> None:
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text(encoding="utf-8"))
    assert (galaxy["namespace"], galaxy["name"], galaxy["version"]) == ("rackproof", "rackproof", VERSION)
    environment = ENVIRONMENT.read_text(encoding="utf-8")
    assert set(re.findall(r"rackproof-rackproof-([\w.]+)\.tar\.gz", environment)) == {VERSION}


def test_collection_and_package_require_the_same_minimum_version_of_ansible_core() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    lowest = next(item for item in extras["control"] if item.startswith("ansible-core")).split(",")[0]
    runtime = yaml.safe_load((ROOT / "meta" / "runtime.yml").read_text(encoding="utf-8"))
    assert lowest.removeprefix("ansible-core>=") + ".0" == runtime["requires_ansible"].removeprefix(">=")


def test_requirements_of_the_collection_equal_the_requirements_of_the_package_for_a_control_node() -> None:
    """meta/requirements.txt does not list bcrypt and nvidia-ml-py, because only GPU hosts need them.

    It does not list ansible-core either, because the definition of the execution environment sets its version.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    of_the_package = {*project["dependencies"], *project["optional-dependencies"]["control"]}
    lines = (ROOT / "meta" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    left_out = ("ansible-core", "bcrypt", "nvidia-ml-py")
    assert {line for line in lines if not line.startswith("#")} == {
        item for item in of_the_package if not item.startswith(left_out)
    }


def wheel(directory: Path, to: Path) -> Path:
    command = ("python", "-m", "hatchling", "build", "--target", "wheel", "--directory", to)
    done = run(*command, cwd=directory)
    assert done.returncode == 0, done.stderr
    return next(to.glob("*.whl"))


def test_wheel_built_from_the_collection_equals_the_wheel_built_from_the_checkout(site: Path, tmp_path: Path) -> None:
    """If the wheel has changed, the agent is installed again on each host. A move to the collection must not cause this."""
    collection_wheel, checkout_wheel = wheel(installed(site), tmp_path / "there"), wheel(ROOT, tmp_path / "here")
    assert zipfile.ZipFile(collection_wheel).namelist() == zipfile.ZipFile(checkout_wheel).namelist()
    assert collection_wheel.read_bytes() == checkout_wheel.read_bytes()


@dataclass(frozen=True)
class Rehearsal:
    """A finished rehearsal with the playbook `acceptance` of the collection. Its only host adds facts to every module result."""

    site: Path
    inventory: Path
    environment: dict[str, str]
    done: subprocess.CompletedProcess[str]

    @property
    def bait(self) -> Path:
        """A directory with one file. Every added fact has the path of this file as its value. The directory must not change."""
        return self.site / "bait"

    @property
    def directory(self) -> Path:
        return self.site / "runs" / "r1"


@pytest.fixture(scope="module")
def rehearsal(site: Path) -> Rehearsal:
    """Run the playbook `acceptance` on the first of the two hosts in inventory/local/rehearsal.yml, with a simulated BMC.

    The profile is `smallest_benchmark_profile`. ANSIBLE_INJECT_FACT_VARS=True makes every fact a variable. This is Ansible's
    default, but the `ansible.cfg` of the collection turns it off. Ansible's fact cache keeps the facts after the run.
    """
    (site / "bait").mkdir()
    (site / "bait" / "file").write_text("kept", encoding="utf-8")
    profile, inventory = site / "tiny.yml", site / "one.yml"
    profile.write_text(yaml.safe_dump(smallest_benchmark_profile()), encoding="utf-8")
    content = yaml.safe_load((installed(site) / "inventory" / "local" / "rehearsal.yml").read_text(encoding="utf-8"))
    del content["gpu_hosts"]["hosts"]["local2"]
    assert content["gpu_hosts"]["vars"].pop("ansible_python_interpreter") == "{{ ansible_playbook_python }}"
    variables = {
        "ansible_python_interpreter": str(hostile_python(site, value=str(site / "bait" / "file"))),
        "rackproof_profile": str(profile),
        "nvidia_driver_state": "ignored",
        "rackproof_minimum_free_bytes": 100_000_000,
        "rackproof_gang": "none",
        "rackproof_exporter_port": free_port(),  # this machine may already have an exporter
    }
    environment = {
        "ANSIBLE_HOME": str(site / "home"),
        "ANSIBLE_COLLECTIONS_PATH": str(site / "collections"),
        "ANSIBLE_CONFIG": str(installed(site) / "ansible.cfg"),
        "ANSIBLE_CACHE_PLUGIN": "jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(site / "cache"),
        "ANSIBLE_EXECUTABLE": str(CONTROL_SHELL),  # with this shell, local modules run in half the time
    }
    with bmc.serve(bmc.Service(bmc.old_schema()), bmc.make_certificate(site)) as service:
        variables |= {
            "rackproof_bmc_address": f"127.0.0.1:{service.port}",
            "rackproof_bmc_user": bmc.USER,
            "rackproof_bmc_password": "{{ vault_of_the_operator }}",
            "rackproof_bmc_ca": str(site / "127.0.0.1.pem"),
            "vault_of_the_operator": bmc.PASSWORD,
        }
        content["gpu_hosts"]["hosts"]["local1"] = variables
        inventory.write_text(yaml.safe_dump(content), encoding="utf-8")
        done = accept(site, inventory, "r1", {**environment, "ANSIBLE_INJECT_FACT_VARS": "True"}, "-vvv")
    return Rehearsal(site, inventory, environment, done)


def accept(
    site: Path, inventory: Path, name: str, environment: Mapping[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the playbook `acceptance` of the collection. `name`: the ID of the run."""
    variables = ("-e", json.dumps({"rackproof_run_id": name}))
    command = ("ansible-playbook", "-i", inventory, "rackproof.rackproof.acceptance", *variables, *options)
    return run(*command, cwd=site, environment=environment)


def test_acceptance_playbook_of_the_collection_writes_a_report(rehearsal: Rehearsal) -> None:
    assert rehearsal.done.returncode == 0, rehearsal.done.stdout[-4000:]
    assert "FINAL ACCEPTANCE: REHEARSAL PASS" in rehearsal.done.stdout
    names = {path.name for path in rehearsal.directory.iterdir()}
    assert {"report.html", "events.jsonl", "progress.jsonl", "journal.jsonl"} <= names, (
        "the callback plugin must write events.jsonl and progress.jsonl"
    )
    collection = installed(rehearsal.site)
    assert not (collection / "runs").exists(), (
        "a run must write nothing into the collection, which another user may own"
    )
    assert not (collection / "build").exists()


def test_facts_of_a_hostile_host_replace_no_variable(rehearsal: Rehearsal) -> None:
    """The BMC is read twice, at its address in the inventory. Its credentials are only in the inventory file.

    tests/lab/test_hostile_host.py tests hostile hosts over SSH. There, the `ansible.cfg` of the checkout applies, so facts do not
    become variables.
    """
    output = rehearsal.done.stdout + rehearsal.done.stderr
    assert "FINAL ACCEPTANCE: REHEARSAL PASS" in output, output[-4000:]
    assert [path.name for path in rehearsal.bait.iterdir()] == ["file"]
    record = json.loads((rehearsal.directory / "bmcs" / "local1.json").read_text(encoding="utf-8"))
    moments = [(taken["stage"], taken["phase"], len(taken["metrics"]) > 10) for taken in record["snapshots"]]
    assert moments == [("preflight", "before", True), ("benchmark", "after", True)]
    files = [path for path in rehearsal.site.rglob("*") if path.is_file() and path != rehearsal.inventory]
    assert [path for path in files if any(canary in path.read_bytes() for canary in CANARIES)] == []
    assert [canary for canary in CANARIES if canary.decode() in output] == []
    assert (rehearsal.bait / "file").read_text(encoding="utf-8") == "kept"


def test_cached_fact_with_the_name_of_a_variable_is_refused(rehearsal: Rehearsal) -> None:
    """The fact cache still has the facts that the hostile host returned in the run `r1`."""
    done = accept(rehearsal.site, rehearsal.inventory, "r2", rehearsal.environment)
    message = " ".join((done.stdout + done.stderr).split())
    assert "the fact cache of local1 has" in message, message[-4000:]
    assert "rackproof_notify_sendmail" in message
    assert not (rehearsal.site / "runs" / "r2").exists()


def test_callback_plugin_is_loaded_with_the_settings_of_ansible_runner(site: Path) -> None:
    """AWX and ansible-navigator use ansible-runner, which sets its own directory of callback plugins.

    The `ansible.cfg` of the collection does not apply there, so an empty file replaces it in this test.
    """
    (site / "runners").mkdir()
    (site / "empty.cfg").touch()
    environment = {
        "ANSIBLE_HOME": str(site / "home"),
        "ANSIBLE_COLLECTIONS_PATH": str(site / "collections"),
        "ANSIBLE_CONFIG": str(site / "empty.cfg"),
        "ANSIBLE_CALLBACK_PLUGINS": str(site / "runners"),
    }
    inventory = site / "unreachable.yml"
    inventory.write_text("gpu_hosts: {hosts: {h1: {ansible_host: 127.0.0.1, ansible_port: 9, rackproof_gpu_count: 1}}}")
    variables = json.dumps({"rackproof_run_id": "named", "rackproof_gang": "none"})
    command = ("ansible-playbook", "-i", inventory, "rackproof.rackproof.inspect", "-e", variables)
    done = run(*command, cwd=site, environment=environment)
    assert done.returncode == 4, done.stdout[-2000:]
    events = [json.loads(line) for line in (site / "runs/named/events.jsonl").read_text().splitlines()]
    assert [event["host"] for event in events if event["what"] == "unreachable"] == ["h1"]


def test_ansible_builder_accepts_the_execution_environment(site: Path, archive: Path) -> None:
    context = site / "context"
    definition = yaml.safe_load(ENVIRONMENT.read_text(encoding="utf-8"))
    definition["additional_build_files"][0]["src"] = str(archive)
    copy = site / "execution-environment.yml"
    copy.write_text(yaml.safe_dump(definition), encoding="utf-8")
    done = run("ansible-builder", "create", "-f", copy, "-c", context, cwd=site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (context / "_build" / "collection" / archive.name).is_file()
    done = run("ansible-builder", "introspect", site / "collections", cwd=site)
    requirements = yaml.safe_load(done.stdout.partition("---")[2])
    # ansible-builder leaves out PyYAML, because ansible-core requires it.
    assert {re.split(r"[>=]", line)[0] for line in requirements["python"]} == {
        *(
            "jsonschema",
            "jsonschema-rs",
            "msgspec",
            "prometheus-client",
            "pyghmi",
            "redfish",
            "hatchling",
            "jinja2",
            "rich",
            "shtab",
        )
    }
    assert any(line.startswith("openssh-clients") for line in requirements["system"])
