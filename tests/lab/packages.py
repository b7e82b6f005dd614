"""Build signed apt and dnf repositories, like the mirror of an air-gapped site.

tests/data/packages.yml lists the packages. Their programs are fakes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.lab import processes

RECORD = Path(__file__).parents[1] / "data" / "packages.yml"
MAINTAINER = "Rackproof's tests <nobody@example.org>"
PROGRAMS = {
    "nvidia-smi": """#!/bin/sh
case "$*" in
*driver_version,index,persistence_mode*) echo "VERSION, 0, Enabled" ;;
*driver_version*) echo VERSION ;;
*) echo GPU-00000000-0000-0000-0000-000000000000 ;;
esac
""",
    "nv-fabricmanager": '#!/bin/sh\necho "Fabric Manager version is : VERSION"\n',
    "nvidia-ctk": """#!/bin/sh
case "$*" in
--version) echo "NVIDIA Container Toolkit CLI version VERSION" ;;
"cdi generate --output="*) out=${3#--output=}; mkdir -p "${out%/*}"
  printf 'kind: nvidia.com/gpu\\nhostPath: /usr/lib/libcuda.so.%s\\n' "$(nvidia-smi --query-gpu=driver_version)" >"$out" ;;
*) echo "nvidia-ctk: $*" >&2; exit 2 ;;
esac
""",
}
"""Fake programs of the driver and of the container toolkit, with the answers that the roles need."""


@dataclass(frozen=True)
class Package:
    """One version of one package."""

    name: str
    version: str
    source: str = ""
    depends: Mapping[str, str] = field(default_factory=dict)
    """Required package -> relation of its version to that of this package: "=" or ">="."""
    conflicts: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    @property
    def upstream(self) -> str:
        """Return the version without the release: `580.105.08` for `580.105.08-1`."""
        return self.version.rpartition("-")[0]

    def install(self, root: Path) -> None:
        """Write the programs of the package under `root`."""
        for program in self.programs:
            path = root / "usr" / "bin" / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(PROGRAMS[program].replace("VERSION", self.upstream))
            path.chmod(0o755)


def recorded(name: str) -> Iterator[Package]:
    """Yield every version of the packages in RECORD under `name` (a distribution, or `container_toolkit`).

    A package with `from: 580` exists only in driver branch 580 and later. A package with `only: 570` exists only in branch 570.
    """
    record: dict[str, Any] = yaml.safe_load(RECORD.read_text())[name]
    for version in record["versions"]:
        branch = int(version.split(".")[0])
        for package, entry in record["packages"].items():
            if entry.get("from", 0) <= branch and entry.get("only", branch) == branch:
                fields = {key: value for key, value in entry.items() if key not in ("from", "only")}
                yield Package(name=package, version=version, **fields)


def headers(prefix: str) -> Package:
    """Return a package of the kernel headers of this machine. Its name is `prefix` and the kernel release."""
    return Package(name=prefix + platform.release(), version="1-1")


class Key:
    """A GPG key that signs repositories. It has its own GnuPG home directory."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        self._home = home
        self._gpg("--quick-generate-key", MAINTAINER, "rsa2048", "sign", "never")
        self.public = home / "key.asc"
        self._gpg("--armor", "--output", self.public, "--export")

    def clearsign(self, file: Path, signed: Path) -> None:
        """Write a clear-signed copy of a file. apt needs such a copy of the file Release."""
        self._gpg("--clearsign", "--output", signed, file)

    def detach(self, file: Path) -> None:
        """Write a detached signature beside a file. dnf needs such a signature of the file repomd.xml."""
        self._gpg("--armor", "--detach-sign", "--output", file.with_name(file.name + ".asc"), file)

    def sign_packages(self, files: Iterable[Path]) -> None:
        """Sign rpm packages."""
        gpg = shutil.which("gpg")
        defines = [f"--define=_gpg_name {MAINTAINER}", f"--define=_gpg_path {self._home}", f"--define=__gpg {gpg}"]
        _run("rpmsign", "--addsign", *defines, *files)

    def close(self) -> None:
        """Stop the gpg agent."""
        _run("gpgconf", "--homedir", self._home, "--kill", "all")

    def _gpg(self, *arguments: str | Path) -> None:
        _run("gpg", "--batch", "--quiet", "--homedir", self._home, "--passphrase=", *arguments)


def _run(*command: str | Path) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    processes.run(command, env=environment)


def apt_repository(directory: Path, packages: Iterable[Package], key: Key, architecture: str = "amd64") -> None:
    """Create a flat apt repository, like those of NVIDIA, with its public key in `key.asc`."""
    directory.mkdir(parents=True)
    (directory / "Packages").write_text("\n".join(_deb(directory, package, architecture) for package in packages))
    text = (directory / "Packages").read_bytes()
    release = f"Origin: NVIDIA\nSHA256:\n {hashlib.sha256(text).hexdigest()} {len(text)} Packages\n"
    (directory / "Release").write_text(release)
    key.clearsign(directory / "Release", directory / "InRelease")
    shutil.copy(key.public, directory)


def _deb(directory: Path, package: Package, architecture: str) -> str:
    """Build a package and return its entry for the index (the file Packages)."""
    versions = {"=": package.version, ">=": package.upstream}
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": architecture,
        "Maintainer": MAINTAINER,
        "Source": package.source,
        "Depends": ", ".join(f"{name} ({relation} {versions[relation]})" for name, relation in package.depends.items()),
        "Conflicts": ", ".join(package.conflicts),
        "Description": "A fake package of Rackproof's tests",
    }
    control = "".join(f"{name}: {value}\n" for name, value in fields.items() if value)
    file = directory / f"{package.name}_{package.version}_{architecture}.deb"
    with tempfile.TemporaryDirectory() as build:
        root = Path(build)
        root.chmod(0o755)
        (root / "DEBIAN").mkdir()
        (root / "DEBIAN" / "control").write_text(control)
        package.install(root)
        _run("dpkg-deb", "--root-owner-group", "-Znone", "--build", root, file)
    content = file.read_bytes()
    return f"{control}Filename: ./{file.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"


def dnf_repository(directory: Path, packages: Iterable[Package], key: Key, streams: Mapping[str, str]) -> None:
    """Create a dnf repository with its public key in `key.asc`.

    `streams` maps each stream of the dnf module `nvidia-driver` to the prefix of the package versions in the stream. If
    `streams` is empty, only the index is signed, as in NVIDIA's repository of the container toolkit.
    """
    directory.mkdir(parents=True)
    packages = list(packages)
    for version in sorted({package.version for package in packages}):
        _rpms(directory, [package for package in packages if package.version == version])
    if streams:
        key.sign_packages(directory.rglob("*.rpm"))
    _run("createrepo_c", "--quiet", directory)
    if streams:
        _modules(directory, packages, streams)
    key.detach(directory / "repodata" / "repomd.xml")
    shutil.copy(key.public, directory)


def _rpms(directory: Path, packages: list[Package]) -> None:
    """Build the packages of one version from one spec file."""
    version, release = packages[0].version.split("-")
    spec = f"Name: fakes\nVersion: {version}\nRelease: {release}\nSummary: Fakes\nLicense: MIT\nBuildArch: noarch\n"
    spec += "%description\nFake packages of Rackproof's tests\n"
    with tempfile.TemporaryDirectory() as build:
        for package in packages:
            spec += f"%package -n {package.name}\nSummary: A fake\nAutoReqProv: no\n"
            spec += "".join(f"Requires: {name} {relation} {version}\n" for name, relation in package.depends.items())
            spec += "".join(f"Conflicts: {name}\n" for name in package.conflicts)
            spec += f"%description -n {package.name}\nA fake\n%files -n {package.name}\n"
            spec += "".join(f"%attr(755,root,root) /usr/bin/{program}\n" for program in package.programs)
            package.install(Path(build) / "programs")
        (Path(build) / "programs").mkdir(exist_ok=True)
        spec += f"%install\nmkdir -p %{{buildroot}}\ncp -r {build}/programs/. %{{buildroot}}\n"
        (Path(build) / "fakes.spec").write_text(spec)
        defines = [f"--define=_topdir {build}", f"--define=_rpmdir {directory}"]
        _run("rpmbuild", "-bb", "--quiet", *defines, Path(build) / "fakes.spec")


def _modules(directory: Path, packages: list[Package], streams: Mapping[str, str]) -> None:
    documents = [
        {
            "document": "modulemd",
            "version": 2,
            "data": {
                "name": "nvidia-driver",
                "stream": stream,
                "version": 1,
                "context": "rackproof",
                "arch": platform.machine(),
                "summary": "NVIDIA driver",
                "description": "NVIDIA driver",
                "license": {"module": ["MIT"]},
                "artifacts": {
                    "rpms": [
                        f"{each.name}-0:{each.version}.noarch"
                        for each in packages
                        if each.version.startswith(beginning)
                    ]
                },
            },
        }
        for stream, beginning in streams.items()
    ]
    file = directory / "modules.yaml"
    file.write_text(yaml.safe_dump_all(documents, explicit_start=True, explicit_end=True))
    _run("modifyrepo_c", "--mdtype=modules", file, directory / "repodata")
