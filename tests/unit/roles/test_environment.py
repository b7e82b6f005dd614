"""Test the scripts of the role `agent` that create the agent's virtual environment and install packages into it.

The packages must be installed into this environment even if pip.conf sets another target directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

SCRIPT = ROOT / "roles" / "agent" / "files" / "install_packages.py"


PYTHON_HOME = Path(getattr(sys, "_base_executable", sys.executable)).parent
PYTHON_VERSION = ".".join(map(str, sys.version_info[:3]))


def create_environment(prefix: Path, home: Path | str, version: str) -> Path:
    """Create files like those of an agent's virtual environment whose Python is in `home` and has this version."""
    for name in ("bin/pip", "bin/rackproof", "lib/python3.9/torch.pth", "wheels/rackproof-1-py3-none-any.whl"):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).touch()
    (prefix / "pyvenv.cfg").write_text(f"home = {home}\nversion = {version}")
    return prefix


def make_environment(prefix: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make_environment.py, which prints `created` if it creates a virtual environment in `prefix`."""
    command = [sys.executable, ROOT / "roles/agent/files/make_environment.py", prefix]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment that make_environment.py created in place of one with another Python."""
    prefix = create_environment(tmp_path_factory.mktemp("agent") / "rackproof", "/opt/another/bin", PYTHON_VERSION)
    assert make_environment(prefix).stdout == "created\n"
    return prefix


def test_environment_of_another_python_is_replaced(environment: Path) -> None:
    """The installed packages are removed, and the wheels are kept. A second call with the same Python changes nothing."""
    assert not (environment / "lib" / "python3.9").exists()
    assert (environment / "wheels/rackproof-1-py3-none-any.whl").exists()
    pip = subprocess.run(
        [environment / "bin/python", "-m", "pip", "--version"], capture_output=True, text=True, check=True
    )
    assert f"(python {sys.version_info[0]}.{sys.version_info[1]})" in pip.stdout
    second_call = make_environment(environment)
    assert (second_call.returncode, second_call.stdout) == (0, "")


@pytest.mark.parametrize(("version", "is_replaced"), [("3.9.2", True), (PYTHON_VERSION, False)])
def test_environment_is_kept_only_if_its_python_has_the_same_minor_version(
    tmp_path: Path, version: str, is_replaced: bool
) -> None:
    (tmp_path / "venv.py").touch()  # hides the module `venv` of the standard library, so that no environment is built
    prefix = create_environment(tmp_path / "rackproof", PYTHON_HOME, version)
    done = make_environment(prefix, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "created\n" if is_replaced else "")
    assert (prefix / "lib" / "python3.9").exists() is not is_replaced


@pytest.mark.parametrize(
    ("file", "content", "is_replaced"),
    [
        ("package.py", b"import os\n", False),
        ("package.py", b"", True),
        ("package.py", None, True),
        ("package-1.dist-info/RECORD", b"", True),
        ("package-1.dist-info/RECORD", b"\0" * 99, True),
        ("package-1.dist-info/RECORD", b"\xff\xfe,,\n", True),
        ("package-1.dist-info/RECORD", None, True),
    ],
)
def test_environment_with_files_that_a_power_loss_has_damaged_is_replaced(
    file: str, content: bytes | None, is_replaced: bool, tmp_path: Path
) -> None:
    """`content`: what is left in the file; None: the file is missing."""
    (tmp_path / "venv.py").touch()  # hides the module `venv` of the standard library, so that no environment is built
    prefix = create_environment(tmp_path / "rackproof", PYTHON_HOME, PYTHON_VERSION)
    site = prefix / "lib/python3.9/site-packages"
    (site / "package-1.dist-info").mkdir(parents=True)
    (site / "package.py").write_text("import os\n")
    (site / "package-1.dist-info/RECORD").write_text("package.py,sha256=0,10\npackage-1.dist-info/RECORD,,\n")
    if content is None:
        (site / file).unlink()
    else:
        (site / file).write_bytes(content)
    assert make_environment(prefix, PYTHONPATH=str(tmp_path)).stdout == ("created\n" if is_replaced else "")


@pytest.mark.parametrize("name", ["bin/pip", "pyvenv.cfg"])
def test_virtual_environment_of_other_software_is_refused_and_not_changed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("home = /opt/another/bin\n")
    done = make_environment(tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"{tmp_path} has a {name} that is not the agent's: set rackproof_prefix to a separate directory"
    )
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [name]


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a virtual environment that also uses packages of the user, and has no torch."""
    prefix = tmp_path_factory.mktemp("host")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", prefix], check=True)
    return prefix / "bin/python"


EDITABLE = """
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, "{0}/torch.py") if name == "torch" else None
sys.meta_path.append(Finder)
"""
"""Module that an editable installation of torch adds, with the directory of the source code in place of {0}."""


def install_torch(kind: str, python: Path, directory: Path) -> dict[str, str]:
    """Make torch importable for this Python; return the environment variables that it needs for that."""
    site = next(python.parents[1].glob("lib/python3*/site-packages"))
    user = directory / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    user.mkdir(parents=True)
    source = directory / "source"
    source.mkdir()
    home = {"site-packages": site, "packages of the user": user}.get(kind, source)
    (home / "torch.py").write_text("version = 'of the host'")
    if kind == "editable installation":
        (site / "editable_torch.py").write_text(EDITABLE.format(source))
        (site / "editable_torch.pth").write_text("import editable_torch\n")
    elif kind.startswith("path file"):
        ((user if kind.endswith("of the user") else site) / "torch.pth").write_text(f"{source}\n")
    return {"PYTHONUSERBASE": str(directory), **({"PYTHONPATH": str(source)} if kind == "PYTHONPATH" else {})}


def share_packages(agent: Path, python: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run share_packages.py with the Python of the agent's environment."""
    command = [agent / "bin/python", "-", python]
    script = (ROOT / "roles/agent/files/share_packages.py").read_text()
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False, **options)


FIND_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
"""Program with which the preflight checks whether the host's Python has torch."""


@pytest.mark.parametrize(
    "kind",
    [
        "site-packages",
        "packages of the user",
        "path file",
        "path file of the user",
        "editable installation",
        "PYTHONPATH",
    ],
)
def test_agent_imports_the_torch_of_the_host_wherever_its_python_finds_it(
    environment: Path, other_python: Path, tmp_path: Path, kind: str
) -> None:
    site = next(other_python.parents[1].glob("lib/python3*/site-packages"))
    before = set(site.iterdir())
    try:
        variables = {**os.environ, **install_torch(kind, other_python, tmp_path)}
        assert subprocess.run([other_python, "-c", FIND_TORCH], env=variables, check=False).returncode == 0
        done = share_packages(environment, other_python, env=variables)
        assert (done.returncode, done.stderr) == (0, "")
        show = "import sys, torch; print(torch.version, len(sys.path) - len(set(sys.path)))"
        result = subprocess.run(
            [environment / "bin/python", "-I", "-c", show], capture_output=True, text=True, check=True
        )
        assert result.stdout == "of the host 0\n"
    finally:
        for path in set(site.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_installation_fails_if_the_agent_would_find_no_torch(environment: Path, tmp_path: Path) -> None:
    """Here the preflight finds a torch, because it runs in a directory with a module of this name."""
    (tmp_path / "torch.py").touch()
    python = tmp_path / "host/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "host"], check=True)
    assert subprocess.run([python, "-c", FIND_TORCH], cwd=tmp_path, check=False).returncode == 0
    done = share_packages(environment, python, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"rackproof_system_torch is set, but the agent's environment {environment} finds no torch in the packages of "
        f"{python}: install torch there with pip, or set rackproof_python to a Python with torch"
    )


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
"""Section and setting of pip.conf. If pip obeyed any one of these settings, the next test would fail."""


@pytest.mark.parametrize("source", ["file", "variable"])
def test_settings_of_pip_apply_only_if_they_set_the_source_of_packages(
    environment: Path, tmp_path: Path, source: str
) -> None:
    """`no-index` and `find-links` set the source, so they apply. SETTINGS has settings that must not apply."""
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
    """Run install_packages.py with the Python of the virtual environment, and return its exit code and standard error."""
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


def setting_passed_to_pip(option: str, directory: Path, **variables: str) -> str:
    """Return the value of the option that install_packages.py passes to pip; empty if it passes none.

    `directory`: home directory of the user.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "XDG_"))}
    environment |= {"HOME": str(directory), "XDG_CONFIG_DIRS": str(directory / "etc"), **variables}
    fake = directory / "python"
    fake.write_text("#!/bin/sh\nenv\n")
    fake.chmod(0o755)
    script = f"import sys; sys.executable = {str(fake)!r}\n{SCRIPT.read_text()}"
    done = subprocess.run(
        [sys.executable, "-"], input=script, env=environment, capture_output=True, text=True, check=True
    )
    passed = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("PIP_"))
    assert passed["PIP_CONFIG_FILE"] == os.devnull
    return passed.get(f"PIP_{option.replace('-', '_').upper()}", "")


@pytest.mark.parametrize("place", ["file", "variable"])
@pytest.mark.parametrize("spelling", ["index-url", "index_url", "Index_URL", "--index-url"])
@pytest.mark.parametrize("option", ["index-url", "trusted-host", "extra-index-url", "client-cert"])
def test_settings_may_be_spelled_in_each_way_that_pip_accepts(
    tmp_path: Path, option: str, spelling: str, place: str
) -> None:
    spelled = {
        "index-url": option,
        "index_url": option.replace("-", "_"),
        "Index_URL": option.replace("-", "_").title(),
        "--index-url": f"--{option}",
    }[spelling]
    variables = {f"PIP_{spelled}": "given"} if place == "variable" else {}
    if place == "file":
        variables["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
        (tmp_path / "pip.conf").write_text(f"[global]\n{spelled} = given\n")
    assert setting_passed_to_pip(option, tmp_path, **variables) == "given"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[global]\nindex_url = old", "[global]\nindex-url = new", "new"),
        ("[global]\nindex-url = old", "[global]\nindex_url = new", "new"),
        ("[install]\nindex_url = old", "[global]\nindex-url = new", "old"),
        ("", "[global]\nindex-url = first\nindex_url = second", "second"),
        ("[global]\nindex_url = old", "[install]\nindex-url =", "old"),
    ],
)
def test_spelling_does_not_change_the_precedence_of_settings(tmp_path: Path, old: str, new: str, expected: str) -> None:
    for path, text in ((".pip/pip.conf", old), (".config/pip/pip.conf", new)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    assert setting_passed_to_pip("index-url", tmp_path) == expected


@pytest.mark.parametrize("variable", ["", "pip.conf", os.devnull], ids=["not set", "path of a file", "dev null"])
def test_configuration_files_have_the_same_precedence_as_in_pip(tmp_path: Path, variable: str) -> None:
    """If PIP_CONFIG_FILE is the path of a file, pip does not read the files of the user. If it is /dev/null, pip reads no file.

    Each file sets `find-links` to its key in `places`.
    """
    places = {
        "global": "etc/pip/pip.conf",
        "old user": ".pip/pip.conf",
        "user": ".config/pip/pip.conf",
        "named": "pip.conf",
    }
    for name, path in places.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"[global]\nfind-links = {name}\n")
    # `tmp_path / "/dev/null"` is /dev/null, because /dev/null is an absolute path.
    variables = {"PIP_CONFIG_FILE": str(tmp_path / variable)} if variable else {}
    expected = {"": "user", "pip.conf": "named", os.devnull: ""}[variable]
    assert setting_passed_to_pip("find-links", tmp_path, **variables) == expected
