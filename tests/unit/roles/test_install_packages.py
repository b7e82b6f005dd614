"""The script installs packages into the agent's environment, even if pip.conf sets another target. It names a broken pip.conf."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

SCRIPT = ROOT / "roles" / "agent" / "files" / "install_packages.py"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with pip."""
    path = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    return path


def wheel(directory: Path, name: str) -> Path:
    path = directory / f"{name}-1-py3-none-any.whl"
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


SETTINGS = (
    ("global", "user = true"),
    ("install", "user = true"),
    ("global", "target = elsewhere"),
    ("install", "require-hashes = true"),
    ("global", "no-binary = :all:"),
    ("install", "prefix = elsewhere"),
    ("global", "dry-run = true"),
    ("global", "constraint = /no/such/constraints.txt"),
    ("global", "python = /no/such/python"),
)
"""Section and setting of pip.conf. If pip obeyed any one of these settings, the installation in the next test would fail."""


@pytest.mark.parametrize("source", ["file", "variable"])
def test_settings_for_other_installations_do_not_apply(environment: Path, tmp_path: Path, source: str) -> None:
    """The settings `no-index` and `find-links`, which say where packages come from, do apply."""
    for directory in ("links", "empty"):
        (tmp_path / directory).mkdir()
    wheel(tmp_path / "links", f"needed_{source}")
    text = f"[global]\nno-index = true\nfind-links =\n  {tmp_path}/empty\n  {tmp_path}/links\n"
    variables = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PYTHONPATH": str(tmp_path)}
    if source == "file":
        by_section = {name: [line for section, line in SETTINGS if section == name] for name, _ in SETTINGS}
        text += "\n".join([*by_section["global"], "[install]", *by_section["install"]])
    else:
        settings = (line.partition(" = ") for _, line in SETTINGS)
        variables |= {f"PIP_{option.replace('-', '_').upper()}": value for option, _, value in settings}
    (tmp_path / "pip.conf").write_text(text)
    assert install(environment, tmp_path, f"needed_{source}", **variables) == (0, "")
    assert list(environment.glob(f"lib/python3*/site-packages/needed_{source}.py"))


def install(environment: Path, directory: Path, name: str, **variables: str) -> tuple[int, str]:
    """Run the script in the virtual environment, and return its exit code and standard error."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    command = [environment / "bin" / "python", "-I", "-", "--quiet", "--disable-pip-version-check", name]
    with SCRIPT.open() as script:
        done = subprocess.run(
            command,
            stdin=script,
            env={**inherited, **variables},
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
    return done.returncode, done.stderr


def test_broken_configuration_of_pip_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("no section\n")
    environment = {**os.environ, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    done = subprocess.run(
        [sys.executable, SCRIPT, "nothing"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip.conf" in done.stderr
    assert "correct or remove the file" in done.stderr
    assert "Traceback" not in done.stderr
