"""Versions of containerd and runc, and of the packages that own them.

The version of the package is needed too: a distribution can add a fix to a package without changing the version that the program
prints.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from collectors.base import Absent, Family, host_family
from collectors.programs import error_message, find_program, program_version, run_program

PROGRAMS: Mapping[str, str] = {
    "containerd": r"(?m)^containerd \S{1,200} v?(\d[\w.+~-]{0,60})",
    "runc": r"(?m)^runc version v?(\d[\w.+~-]{0,60})",
}
"""Program -> pattern for its version in the output of `--version`."""
UNOWNED = "no package"
"""Value for a program that no package owns, such as one from a release archive."""
_OWNER = re.compile(r"^([a-z0-9][a-z0-9+.-]{0,60})(?::[a-z0-9-]+)?: (/\S+)$", re.MULTILINE)
_PACKAGE = re.compile(r"^([\w.+-]{1,60}) ([\w.+~^:-]{1,60})$", re.MULTILINE)
_NOT_OWNED = ("no path found matching pattern", "is not owned by any package")


def version_families(root: Path) -> Iterable[Family]:
    """Yield the version and the package of each program in PROGRAMS. The programs are searched under `root`."""
    paths = {name: path for name in PROGRAMS if (path := find_program(root, name))}
    host_paths = {name: f"/{path.relative_to(root)}" for name, path in paths.items()}
    packages = _packages(root, list(host_paths.values())) if host_paths else {}
    for name, pattern in PROGRAMS.items():
        yield host_family(f"container.{name}.version", "1", f"Version of {name}", program_version(root, name, pattern))
        text = f"Package that owns {name}, and its version; {UNOWNED}: no package owns it"
        package = packages[host_paths[name]] if name in host_paths else Absent.unsupported(f"no {name}")
        yield host_family(f"container.{name}.package_version", "1", text, package)


def _packages(root: Path, paths: list[str]) -> Mapping[str, str | Absent]:
    """Return path -> name and version of the Debian or RPM package that owns the file.

    The value is UNOWNED if no package owns the file, or an Absent with the reason why the package is unknown.
    """
    if dpkg := find_program(root, "dpkg-query"):
        # Each search reads the file lists of all packages, so one search looks for all files.
        found = run_program(dpkg, "-S", *paths)
        owners = {} if isinstance(found, Absent) else {path: name for name, path in _OWNER.findall(found.stdout)}
        query = ("-W", "-f=${Package} ${Version}\\n", *dict.fromkeys(owners.values()))
        versions = run_program(dpkg, *query) if owners else found
        known = {} if isinstance(versions, Absent) else dict(_PACKAGE.findall(versions.stdout))
        return {
            path: f"{owners[path]} {known[owners[path]]}"
            if owners.get(path) in known
            else _why_unknown(versions if path in owners else found, path)
            for path in paths
        }
    if rpm := find_program(root, "rpm"):
        return {path: _rpm_package(rpm, path) for path in paths}
    return dict.fromkeys(paths, Absent.unsupported("neither dpkg-query nor rpm is installed"))


def _rpm_package(rpm: Path, path: str) -> str | Absent:
    process = run_program(rpm, "-qf", "--qf", "%{NAME} %{VERSION}-%{RELEASE}\\n", path)
    match = None if isinstance(process, Absent) else _PACKAGE.match(process.stdout)
    return " ".join(match.groups()) if match else _why_unknown(process, path)


def _why_unknown(process: subprocess.CompletedProcess[str] | Absent, path: str) -> str | Absent:
    """Return UNOWNED if the package manager reports that no package owns the file; otherwise an error with its output."""
    if isinstance(process, Absent):
        return process
    lines = (process.stdout + process.stderr).splitlines()
    if any(path in line.split() and text in line for line in lines for text in _NOT_OWNED):
        return UNOWNED
    return Absent.error(f"package of {path}: exit code {process.returncode}: {error_message(process)}")
