"""Test the files of the container image without building it; `make test-image` builds and runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests import ROOT

HERE = ROOT / "deploy" / "container"
SCRIPTS = sorted(HERE.glob("*.sh"))
UNPRIVILEGED_UID = 10001


def tool(name: str) -> str:
    """Return the path of a program that pip installed."""
    return str(Path(sys.executable).parent / name)


def test_containerfile_passes_hadolint() -> None:
    done = subprocess.run([tool("hadolint"), HERE / "Containerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_scripts_pass_shellcheck() -> None:
    done = subprocess.run([tool("shellcheck"), *SCRIPTS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_copied_paths_exist_and_are_not_ignored() -> None:
    """Without this test, a missing module would be noticed only when the image is built."""
    containerfile = (HERE / "Containerfile").read_text(encoding="utf-8")
    ignored = (HERE / "Containerfile.dockerignore").read_text(encoding="utf-8").split()
    words = [
        line.split()[1:-1] for line in containerfile.splitlines() if line.startswith("COPY") and "--from" not in line
    ]
    copied = {word for line in words for word in line if not word.startswith("--")}
    for pattern in copied:
        assert list(ROOT.glob(pattern)), pattern
        assert any(f"!{part}" in ignored for part in (pattern, *map(str, Path(pattern).parents)))
    modules = {"agent", "collectors", "fleet", "rackproof", "schemas"}
    assert {path.name for pattern in copied for path in ROOT.glob(pattern)} >= modules
    assert {path.name for path in SCRIPTS} <= {Path(pattern).name for pattern in copied}


@pytest.fixture
def image(tmp_path: Path) -> dict[str, str]:
    """Copy the scripts of the image to a temporary directory; return the environment variables with which to run them.

    `rackproof` and `python` in this PATH only print their name and arguments.
    """
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("rackproof", "python"):
        (directory / name).write_text(f'#!/bin/sh\necho {name} "$@"\n', encoding="utf-8")
        (directory / name).chmod(0o755)
    shutil.copytree(HERE, tmp_path / "container")
    for path in (tmp_path, *tmp_path.rglob("*")) if os.geteuid() == 0 else ():
        os.chown(path, UNPRIVILEGED_UID, 0)
    for parent in tmp_path.parents:  # pytest creates its directories so that other users cannot enter them
        if parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)
    return {
        "PATH": f"{directory}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "RACKPROOF_CONTAINER_STATE": str(tmp_path / "state"),
    }


def entry(image: dict[str, str], *arguments: str, script: str = "entry.sh") -> subprocess.CompletedProcess[str]:
    """Run a script of the image. If the tests run as root, the script runs as the user of the image."""
    path = Path(image["HOME"]) / "container" / script
    user = {"user": UNPRIVILEGED_UID, "group": 0, "extra_groups": []} if os.geteuid() == 0 else {}
    return subprocess.run(
        ["/bin/sh", path, *arguments], capture_output=True, text=True, check=False, env=image, cwd="/", **user
    )


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        ([], "rackproof run"),
        (["rackproof"], "rackproof run"),
        (["rackproof", "run"], "rackproof run"),
        (["--validation-only"], "rackproof run --validation-only"),
        (["rackproof", "--epochs", "5", "--batch-size", "128"], "rackproof run --epochs 5 --batch-size 128"),
        (["rackproof", "run", "--validation-only"], "rackproof run --validation-only"),
        (["rackproof", "doctor", "--gpus", "8"], "rackproof doctor --gpus 8"),
        (["rackproof", "--version"], "rackproof --version"),
        (["rackproof", "--help"], "rackproof --help"),
        (["python", "-c", "a b"], "python -c a b"),
    ],
)
def test_container_arguments_select_the_command(arguments: list[str], called: str, image: dict[str, str]) -> None:
    done = entry(image, *arguments)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, called, "")


def test_unknown_program_is_reported(image: dict[str, str]) -> None:
    done = entry(image, "docktor")
    assert (done.returncode, done.stdout) == (64, "")
    assert (
        done.stderr
        == "rackproof: no program docktor in this image: for a command of Rackproof use `rackproof docktor …`\n"
    )


@pytest.mark.parametrize(("mode", "file"), [("sshd", "authorized_keys"), ("mpi", "id_rsa.pub")])
def test_sshd_and_mpi_do_not_start_without_the_key_of_the_job(mode: str, file: str, image: dict[str, str]) -> None:
    done = entry(image, mode, "true")
    assert (done.returncode, done.stdout) == (64, "")
    assert f"id_rsa or {file} cannot be read: mount the job's key there" in done.stderr


@pytest.fixture
def launcher(image: dict[str, str]) -> dict[str, str]:
    """Return the environment of the launcher of an MPIJob with the hosts h1, h2 and h3.

    mpirun runs until the file `end` exists. ssh prints its last four arguments: the host and the command. For h2, ssh prints a
    part of a line and fails.
    """
    home = Path(image["HOME"])
    (home / ".ssh").mkdir()
    for name in ("id_rsa", "id_rsa.pub"):
        (home / ".ssh" / name).write_text("key\n", encoding="utf-8")
    (home / "hostfile").write_text("# workers\nh1 slots=1\n\nh2 slots=1\nh3 slots=1\n", encoding="utf-8")
    programs = {
        "mpirun": 'echo "mpirun $*" >&2; echo $$ >~/pid; until [ -e ~/end ]; do sleep 0.05; done',
        "ssh": 'shift $(($# - 4)); [ "$1" != h2 ] || { printf "cut off"; exit 255; }; echo "$@"',
    }
    for name, text in programs.items():
        (home / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (home / "bin" / name).chmod(0o755)
    for path in home.rglob("*") if os.geteuid() == 0 else ():
        os.chown(path, UNPRIVILEGED_UID, 0)
    return {**image, "OMPI_MCA_orte_default_hostfile": str(home / "hostfile")}


def check_launcher_output(code: int, output: str, errors: str) -> None:
    assert "rackproof: no record of h2\n" in errors
    assert 'rackproof run-host --quiet "$@" || : sh --plan=/p.json --ethernet' in errors
    emit = "rackproof emit-record --plan=/p.json"
    assert (code, output.split("\n")) == (2, [f"h1 {emit}", "", "cut off", f"h3 {emit}", "", ""])


def test_launcher_of_an_mpijob_prints_the_records_of_the_hosts_that_can_be_reached(launcher: dict[str, str]) -> None:
    (Path(launcher["HOME"]) / "end").touch()
    done = entry(launcher, "run-hosts", "/p.json", "--ethernet")
    check_launcher_output(done.returncode, done.stdout, done.stderr)


def test_launcher_of_an_mpijob_that_is_terminated_ends_mpirun_and_prints_the_records(launcher: dict[str, str]) -> None:
    home = Path(launcher["HOME"])
    command = ["/bin/sh", home / "container" / "entry.sh", "run-hosts", "/p.json", "--ethernet"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=launcher, cwd="/"
    ) as process:
        deadline = time.monotonic() + 20
        while not (home / "pid").exists() or not (home / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        output, errors = process.communicate(timeout=20)
    check_launcher_output(process.returncode, output, errors)
    assert not Path("/proc", (home / "pid").read_text().strip()).exists()


@pytest.mark.parametrize("arguments", [[], ["/p.json"]])
def test_launcher_of_an_mpijob_needs_a_plan_and_a_hostfile(arguments: list[str], launcher: dict[str, str]) -> None:
    Path(launcher["OMPI_MCA_orte_default_hostfile"]).write_text("" if arguments else "h1\n", encoding="utf-8")
    done = entry(launcher, "run-hosts", *arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert "usage: run-hosts PLAN" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run the check as the user of the image")
def test_health_check_depends_on_the_command_of_the_container(image: dict[str, str]) -> None:
    assert entry(image, script="healthy.sh").returncode == 1, (
        "the container must be unhealthy until its command is started"
    )
    entry(image)
    results = {**image, "RACKPROOF_RESULTS": image["HOME"]}
    assert entry(results, script="healthy.sh").returncode == 0
    assert entry({**image, "RACKPROOF_RESULTS": "/proc"}, script="healthy.sh").returncode == 1
    entry(image, "rackproof", "export")
    port = {**results, "RACKPROOF_EXPORTER_PORT": "1"}
    (Path(image["HOME"]) / "bin" / "python3").symlink_to(sys.executable)
    assert entry(port, script="healthy.sh").returncode == 1, (
        "the container must be unhealthy if its exporter does not answer"
    )


def test_image_and_job_of_one_host_use_the_same_user() -> None:
    containerfile = (HERE / "Containerfile").read_text(encoding="utf-8")
    assert f"USER {UNPRIVILEGED_UID}:0" in containerfile
    job = yaml.safe_load((ROOT / "deploy/kubernetes/one-host/job.yaml").read_text(encoding="utf-8"))
    security = job["spec"]["template"]["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (UNPRIVILEGED_UID, 0)
