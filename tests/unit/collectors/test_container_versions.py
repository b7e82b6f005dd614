"""Test the versions of containerd and runc, and the packages that own them.

Fake programs print what containerd, runc, dpkg-query and rpm would print.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.base import Absent, Value
from collectors.container_versions import version_families
from tests.fakes import links

RUNC = "runc version 1.3.3\ncommit: v1.3.3-0-gd842d771\nspec: 1.2.1\ngo: go1.24.9\nlibseccomp: 2.5.5"
DOCKER_CONTAINERD = "containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da"
UPSTREAM_CONTAINERD = "containerd github.com/containerd/containerd/v2 v2.1.4 75cb2b7193e4e490e9fbdc236c0e811ccaba3376"
UBUNTU_RUNC = "runc version 1.1.12-0ubuntu3.1\nspec: 1.0.2-dev\ngo: go1.22.2"


def program(root: Path, name: str, output: str, exit_code: int = 0, *, error: str = "") -> None:
    """Write a fake program. It ignores its arguments, prints `output`, prints `error` on standard error, and exits."""
    text = f"#!/bin/sh\ncat <<'END'\n{output}\nEND\ncat >&2 <<'END'\n{error}\nEND\nexit {exit_code}\n"
    links.write(root, f"usr/bin/{name}", text)
    (root / f"usr/bin/{name}").chmod(0o755)


def readings(root: Path) -> dict[str, Value | Absent]:
    """Return name (without `container.`) -> reading."""
    return {family.name.removeprefix("container."): family.readings[0][1] for family in version_families(root)}


def test_host_without_the_programs_has_no_versions(tmp_path: Path) -> None:
    assert readings(tmp_path) == {
        "containerd.version": Absent.unsupported("no containerd"),
        "containerd.package_version": Absent.unsupported("no containerd"),
        "runc.version": Absent.unsupported("no runc"),
        "runc.package_version": Absent.unsupported("no runc"),
    }


@pytest.mark.parametrize(
    ("name", "output", "expected"),
    [
        ("runc", RUNC, "1.3.3"),
        ("runc", UBUNTU_RUNC, "1.1.12-0ubuntu3.1"),
        ("containerd", DOCKER_CONTAINERD, "1.7.27"),
        ("containerd", UPSTREAM_CONTAINERD, "2.1.4"),
    ],
)
def test_version_is_read_from_the_output_of_each_program(tmp_path: Path, name: str, output: str, expected: str) -> None:
    program(tmp_path, name, output)
    assert readings(tmp_path)[f"{name}.version"] == expected


@pytest.mark.parametrize("output", ["", "Segmentation fault", "runc version \x1b[31m", "runc version v"])
def test_invalid_output_of_a_program_is_an_error(tmp_path: Path, output: str) -> None:
    program(tmp_path, "runc", output, exit_code=139)
    version = readings(tmp_path)["runc.version"]
    assert isinstance(version, Absent)
    assert version.status == "error"


def packages(root: Path, owners: str, versions: str, error: str = "") -> None:
    """Write a fake dpkg-query. -W prints `versions`. -S prints `owners` and `error`, and fails if `error` is not empty."""
    text = f"#!/bin/sh\n[ $1 = -W ] && exec cat <<'END'\n{versions}\nEND\ncat <<'END'\n{owners}\nEND\n"
    links.write(root, "usr/bin/dpkg-query", f"{text}echo '{error}' >&2\n[ -z '{error}' ]\n")
    (root / "usr/bin/dpkg-query").chmod(0o755)


@pytest.mark.parametrize(
    ("owner", "version", "expected"),
    [
        ("containerd.io", "1.7.27-1", "containerd.io 1.7.27-1"),
        ("runc", "1.1.12-0ubuntu3.1", "runc 1.1.12-0ubuntu3.1"),
        ("runc:amd64", "1:1.1.5+ds1-1+deb12u1", "runc 1:1.1.5+ds1-1+deb12u1"),
    ],
)
def test_debian_package_that_owns_runc_is_read(tmp_path: Path, owner: str, version: str, expected: str) -> None:
    program(tmp_path, "runc", RUNC)
    packages(tmp_path, f"{owner}: /usr/bin/runc", f"{owner.split(':')[0]} {version}")
    assert readings(tmp_path)["runc.package_version"] == expected


def test_program_without_a_package_does_not_hide_the_package_of_the_other_program(tmp_path: Path) -> None:
    program(tmp_path, "containerd", UPSTREAM_CONTAINERD)
    program(tmp_path, "runc", UBUNTU_RUNC)
    error = "dpkg-query: no path found matching pattern /usr/bin/containerd"
    packages(tmp_path, "runc: /usr/bin/runc", "runc 1.1.12-0ubuntu3.1", error)
    result = readings(tmp_path)
    assert result["containerd.package_version"] == "no package"
    assert result["runc.package_version"] == "runc 1.1.12-0ubuntu3.1"


@pytest.mark.parametrize(
    ("manager", "error"),
    [
        ("dpkg-query", "dpkg-query: no path found matching pattern /usr/bin/runc"),
        ("rpm", "file /usr/bin/runc is not owned by any package"),
    ],
)
def test_program_that_no_package_owns_is_reported_as_no_package(tmp_path: Path, manager: str, error: str) -> None:
    program(tmp_path, "runc", RUNC)
    program(tmp_path, manager, "", 1, error=error)
    assert readings(tmp_path)["runc.package_version"] == "no package"


def test_rpm_package_that_owns_containerd_is_read(tmp_path: Path) -> None:
    program(tmp_path, "containerd", DOCKER_CONTAINERD)
    program(tmp_path, "rpm", "containerd.io 1.7.27-3.1.el9")
    assert readings(tmp_path)["containerd.package_version"] == "containerd.io 1.7.27-3.1.el9"


@pytest.mark.parametrize("manager", ["dpkg-query", "rpm"])
@pytest.mark.parametrize(("output", "exit_code"), [("", 2), ("\x1b[2Jrunc; rm -rf /", 0), ("A" * 5000, 0)])
def test_failed_or_invalid_answer_of_the_package_manager_is_an_error(
    tmp_path: Path, manager: str, output: str, exit_code: int
) -> None:
    program(tmp_path, "runc", RUNC)
    program(tmp_path, manager, output, exit_code)
    package = readings(tmp_path)["runc.package_version"]
    assert isinstance(package, Absent)
    assert package.status == "error"
    assert len(package.reason) < 300
    assert package.reason.isprintable()


def test_package_is_unsupported_without_a_package_manager(tmp_path: Path) -> None:
    program(tmp_path, "runc", RUNC)
    assert readings(tmp_path)["runc.package_version"] == Absent.unsupported("neither dpkg-query nor rpm is installed")
