"""Build and run the container image: `make test-image`, as root, with buildah and debootstrap, without Docker or a registry.

In place of NVIDIA's base image, the tests use a Debian from debootstrap with the torch of this Python environment.
The tests take about six minutes and 5 GB of disk. `make test` does not run them; it only runs the checks in
tests/unit/deploy/test_image.py, which build no image.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BASE, IMAGE = "localhost/rackproof-test-base", "localhost/rackproof-test"

pytestmark = pytest.mark.image


def buildah(*arguments: str | Path, check: bool = True, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["buildah", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        cwd=ROOT,
        env=environment(),
    )
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def environment() -> dict[str, str]:
    return {**os.environ, "BUILDAH_ISOLATION": "chroot"}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the name of the base image: $RACKPROOF_TEST_BASE or, if unset, a new Debian with Python, pip, Open MPI and torch."""
    if ready := os.environ.get("RACKPROOF_TEST_BASE"):
        yield ready
        return
    root = tmp_path_factory.mktemp("base") / "root"
    packages = "python3,python3-pip,python3-venv,ca-certificates,openmpi-bin"
    mirror = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root, mirror],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    source = Path(torch.__file__).parents[1]
    target = root / "usr/local/lib/python3.11/dist-packages"
    needed = (
        "torch",
        "torchgen",
        "torchvision",
        "numpy",
        "sympy",
        "mpmath",
        "networkx",
        "jinja2",
        "markupsafe",
        "fsspec",
    )
    for name in (*needed, "filelock", "PIL", "setuptools", "functorch"):
        for path in (*source.glob(name), *source.glob(f"{name}.libs"), *source.glob(f"{name}-*.dist-info")):
            shutil.copytree(path, target / path.name, symlinks=True)
    for path in (*source.glob("typing_extensions.py"), *source.glob("*pillow.libs")):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, target / path.name)
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
    container = buildah("from", "scratch").stdout.strip()
    buildah("add", container, root, "/")
    buildah("commit", container, BASE)
    buildah("rm", container)
    shutil.rmtree(root)
    yield BASE
    buildah("rmi", BASE)


@pytest.fixture(scope="session")
def container(base: str) -> Iterator[str]:
    """Build the image with buildah and the options in docs/container.md; return the name of a container of this image."""
    containerfile = "deploy/container/Containerfile"
    arguments = [f"--build-arg={item}" for item in (f"BASE={base}", "VERSION=1.2.3", "REVISION=abc")]
    buildah(
        "bud",
        "--format=docker",
        f"--ignorefile={containerfile}.dockerignore",
        "-f",
        containerfile,
        *arguments,
        "-t",
        IMAGE,
        ".",
    )
    name = buildah("from", IMAGE).stdout.strip()
    yield name
    buildah("rm", name)
    buildah("rmi", IMAGE)


def config(container: str) -> dict[str, object]:
    configuration: dict[str, object] = json.loads(buildah("inspect", container).stdout)["Docker"]["config"]
    return configuration


def command_of(container: str, *arguments: str) -> list[str]:
    """Return the command that a container engine starts: the entry point, then these arguments or, if none, the default ones."""
    configuration = config(container)
    return [*configuration["Entrypoint"], *(arguments or configuration["Cmd"])]  # type: ignore[misc, has-type]


def run(container: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the entry point of the image with these arguments, without capabilities."""
    variables = [f"--env={name}={value}" for name, value in (env or {}).items()]
    return buildah(
        "run", "--cap-drop=all", *variables, container, "--", *command_of(container, *arguments), check=False
    )


def test_image_configures_user_ports_labels_and_health_check(container: str) -> None:
    configuration = config(container)
    assert (configuration["User"], configuration["WorkingDir"]) == ("10001:0", "/results")
    assert {"2222/tcp", "9836/tcp"} <= set(configuration["ExposedPorts"])  # type: ignore[call-overload]
    labels: dict[str, str] = configuration["Labels"]  # type: ignore[assignment]
    assert (labels["org.opencontainers.image.version"], labels["org.opencontainers.image.revision"]) == ("1.2.3", "abc")
    assert configuration["Healthcheck"]["Test"] == ["CMD", "/opt/rackproof/container/healthy.sh"]  # type: ignore[index]
    assert "uid=10001(rackproof) gid=0(root)" in run(container, "id").stdout


def test_image_uses_the_torch_of_its_base_and_lists_its_packages(container: str) -> None:
    where = run(container, "python", "-c", "import torch, rackproof; print(torch.__file__, torch.__version__)").stdout
    assert where.split() == ["/usr/local/lib/python3.11/dist-packages/torch/__init__.py", torch.__version__]
    packages = run(
        container, "python", "-m", "pip", "list", "--path", "/opt/rackproof/lib/python3.11/site-packages"
    ).stdout
    assert "rackproof" in packages
    assert not {"torch", "ansible-core", "hatchling"} & set(packages.split())
    assert "openssh-server" in run(container, "dpkg-query", "-W", "-f", "${Package}\n").stdout, (
        "dpkg must list the packages of the image: a bill of materials is made from this list"
    )


@pytest.mark.parametrize("host_key", ["etc/ssh/ssh_host_rsa_key", "etc/ssh/ssh_host_ed25519_key"])
def test_image_has_no_ssh_host_key(container: str, host_key: str) -> None:
    assert run(container, "ls", f"/{host_key}").returncode == 2


def test_default_command_without_a_gpu_fails_and_accepts_nothing(container: str) -> None:
    done = run(container)
    assert done.returncode == 2
    assert "GPU" in done.stderr
    assert "PASS" not in done.stdout


def test_options_alone_run_the_acceptance_and_print_the_summary(container: str) -> None:
    done = run(container, "--profile", "rehearsal", "--epochs", "1", "--batch-size", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FINAL ACCEPTANCE: REHEARSAL PASS" in done.stdout
    assert "Training" in done.stdout


def test_training_is_skipped_with_the_option_validation_only(container: str) -> None:
    done = run(container, "rackproof", "--profile", "rehearsal", "--validation-only", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["rehearsal"] is True
    assert not any("Training" in line for line in report["acceptance"]["summary"])


@pytest.fixture
def keys(container: str, tmp_path: Path) -> str:
    """Copy an SSH key into the container, owned by root like a key that the MPI operator mounts; return its directory."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", tmp_path / "id_rsa"], check=True)
    shutil.copy(tmp_path / "id_rsa.pub", tmp_path / "authorized_keys")
    (tmp_path / "id_rsa").chmod(0o644)
    buildah("copy", "--chown=0:0", container, tmp_path, "/home/rackproof/.ssh")
    return "/home/rackproof/.ssh"


def test_mpirun_reaches_sshd_without_root_or_any_capability(container: str, keys: str) -> None:
    pid = "/tmp/rackproof-sshd.pid"
    sshd_words = ("sshd", "-o", f"PidFile={pid}")
    # The entry point stores its command, and the health check reads it: remove the command of the previous test.
    buildah("run", container, "--", "rm", "-f", "/tmp/rackproof-container/command")
    sshd = subprocess.Popen(
        [
            "buildah",
            "run",
            "--cap-drop=all",
            "--env=NCCL_DEBUG=WARN",
            container,
            "--",
            *command_of(container, *sshd_words),
        ],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # The health check is run without the entry point, which would replace the stored command.
        healthy = ("run", container, "--", "/opt/rackproof/container/healthy.sh")
        ends = time.monotonic() + 30
        while code := buildah(*healthy, check=False).returncode:
            assert time.monotonic() < ends, f"sshd is not healthy after 30 s: exit code {code}"
            time.sleep(0.3)
        mpi_options = ("--map-by", "ppr:1:node", "--bind-to", "none", "--mca", "plm_rsh_no_tree_spawn", "1")
        output = run(
            container,
            *("mpi", "mpirun", "--host", "127.0.0.2", *mpi_options, "sh", "-c"),
            'echo "$(id -u) $OMPI_COMM_WORLD_RANK $NCCL_DEBUG $(command -v rackproof)"',
        )
        assert output.returncode == 0, output.stderr
        assert output.stdout.split() == ["10001", "0", "WARN", "/opt/rackproof/bin/rackproof"]
    finally:
        # If `buildah run` were killed instead, sshd would keep running.
        buildah("run", container, "--", "sh", "-c", f"kill $(cat {pid})")
        sshd.wait(20)


def test_image_has_the_version_of_the_tested_package(container: str) -> None:
    output = run(container, "rackproof", "--version").stdout.split()
    assert output == ["rackproof", importlib.metadata.version("rackproof")]
