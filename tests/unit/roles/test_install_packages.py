"""Packages are installed into the agent's environment, whatever the host's pip is set to."""

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


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ("global", "user = true"),
        ("install", "user = true"),
        ("global", "target = elsewhere"),
        ("install", "require-hashes = true"),
        ("global", "no-binary = :all:"),
        ("install", "prefix = elsewhere"),
        ("global", "dry-run = true"),
        ("global", "constraint = /no/such/constraints.txt"),
        ("global", "python = /no/such/python"),
    ],
)
@pytest.mark.parametrize("source", ["file", "variable"])
def test_settings_for_other_installations_do_not_apply(
    environment: Path, tmp_path: Path, section: str, setting: str, source: str
) -> None:
    """The settings that say where packages come from do apply."""
    name = f"needed_{abs(hash((section, setting, source)))}"
    for directory in ("links", "empty"):
        (tmp_path / directory).mkdir()
    wheel(tmp_path / "links", name)
    option, _, value = setting.partition(" = ")
    text = f"[global]\nno-index = true\nfind-links =\n  {tmp_path}/empty\n  {tmp_path}/links\n"
    variables = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PYTHONPATH": str(tmp_path)}
    if source == "file":
        text = text + setting if section == "global" else f"{text}[{section}]\n{setting}\n"
    else:
        variables[f"PIP_{option.replace('-', '_').upper()}"] = value
    (tmp_path / "pip.conf").write_text(text)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    command = [environment / "bin" / "python", "-I", "-", "--quiet", "--disable-pip-version-check", name]
    with SCRIPT.open() as script:
        done = subprocess.run(
            command,
            stdin=script,
            env={**inherited, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(environment.glob(f"lib/python3*/site-packages/{name}.py"))
