"""Support for GPUs in containers: the installed container runtimes, NVIDIA's container toolkit, and their configuration.

The sources are the configuration files of Docker and containerd, and the specifications of CDI (Container Device Interface).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from collectors.base import Absent, Family, first_absent, host_family, mark_varying
from collectors.cdi import CDI_DIRECTORIES, CDI_KIND, device_names, driver_versions, specification_kind
from collectors.container_versions import version_families
from collectors.files import Files
from collectors.programs import find_program, program_version
from collectors.software import DRIVER, module_version

RUNTIMES = ("docker", "containerd", "podman", "crio", "enroot", "apptainer")
_DOCKER = "etc/docker/daemon.json"
_CONTAINERD = ("etc/containerd/config.toml", "etc/containerd/conf.d/99-nvidia.toml")
_GPU_NAMES = (re.compile(r"\d+"), re.compile(r"gpu\d+"), re.compile(r"GPU-.+"))
"""Patterns of names of GPUs in a CDI specification. `nvidia-ctk cdi generate --device-name-strategy` has a strategy for each:
`index`, `type-index` and `uuid`."""


class ContainerCollector:
    """Reads files under `root`. With `full_snapshot` it also reads versions and the CDI specifications."""

    name = "container"

    def __init__(self, root: Path = Path("/"), full_snapshot: bool = False) -> None:
        self._root = root
        self._full_snapshot = full_snapshot

    def collect(self) -> Iterable[Family]:
        return mark_varying(self._families())

    def _families(self) -> Iterable[Family]:
        files = Files(self._root, cached=True)
        installed = {runtime: find_program(self._root, runtime) is not None for runtime in RUNTIMES}
        family = Family(name="container.runtime.present", unit="1", help="The container runtime is installed")
        for runtime, is_installed in installed.items():
            family.add({"runtime": runtime}, is_installed)
        yield family
        toolkit = find_program(self._root, "nvidia-ctk") is not None
        yield host_family("container.toolkit.present", "1", "NVIDIA's container toolkit is installed", toolkit)
        yield from _docker(files, installed["docker"])
        has_runtime = _containerd(files) if installed["containerd"] else Absent.unsupported("no containerd")
        yield host_family(
            "container.containerd.nvidia_runtime", "1", "containerd is configured with NVIDIA's runtime", has_runtime
        )
        if self._full_snapshot:
            version = program_version(self._root, "nvidia-ctk", r"CLI version (\d[\w.+~-]{0,63})")
            yield host_family("container.toolkit.version", "1", "Version of NVIDIA's container toolkit", version)
            yield from version_families(self._root)
            yield from _cdi(files)


def parse_docker_config(text: str) -> tuple[bool, str]:
    """Return whether a daemon.json configures NVIDIA's runtime, and the name of its default runtime. Raises ValueError."""
    try:
        settings = json.loads(text) if text.strip() else {}
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    runtimes = settings.get("runtimes", {}) if isinstance(settings, dict) else None
    if not isinstance(runtimes, dict):
        raise ValueError("not a Docker configuration")
    return "nvidia" in runtimes, str(settings.get("default-runtime", "runc"))


def _docker(files: Files, installed: bool) -> Iterable[Family]:
    config: tuple[bool, str] | Absent = Absent.unsupported("no docker")
    if installed and files.exists(_DOCKER):
        config = files.read(_DOCKER, parse_docker_config)
    elif installed:
        config = (False, "runc")
    configured, default = (config, config) if isinstance(config, Absent) else config
    yield host_family("container.docker.nvidia_runtime", "1", "Docker is configured with NVIDIA's runtime", configured)
    yield host_family("container.docker.default_runtime", "1", "Docker's default runtime", default)


def _containerd(files: Files) -> bool | Absent:
    answers = [files.read(path, _configures_nvidia) for path in _CONTAINERD if files.exists(path)]
    return True in answers or first_absent(*answers) or False


def _configures_nvidia(text: str) -> bool:
    return re.search(r"^[^#\n]*runtimes\.[\"']?nvidia[\"']?\]", text, re.MULTILINE) is not None


def _cdi(files: Files) -> Iterable[Family]:
    specification = _specification(files)
    gpus = specification if isinstance(specification, Absent) else _count_gpus(specification)
    yield host_family("container.cdi.gpus", "1", "GPUs in the CDI specification", gpus)
    version: str | Absent
    if isinstance(specification, Absent):
        version = specification
    else:
        version = ",".join(sorted(driver_versions(specification))) or Absent.unsupported(
            "the CDI specification names no driver version"
        )
    yield host_family("container.cdi.driver_version", "1", "Driver version in the CDI specification", version)
    loaded = files.read(DRIVER, module_version)
    current = first_absent(version, loaded) or version == loaded
    yield host_family("container.cdi.current", "1", "The CDI specification matches the loaded driver", current)


def _specification(files: Files) -> str | Absent:
    """Return the text of the first CDI specification of NVIDIA's GPUs, in the order of precedence of CDI_DIRECTORIES.

    If there is none, return `unsupported`, or an `error` if a specification could not be read.
    """
    unreadable: Absent | None = None
    for directory in CDI_DIRECTORIES:
        names = files.matching(directory, r".+\.(yaml|yml|json)", "none")
        for name in [] if isinstance(names, Absent) else names:
            content = files.read(f"{directory}/{name}", str)
            if isinstance(content, Absent):
                unreadable = content
            elif specification_kind(content) == CDI_KIND:
                return content
    return unreadable or Absent.unsupported(f"no CDI specification of {CDI_KIND}")


def _count_gpus(specification: str) -> int | Absent:
    """Return the number of GPUs in a specification. A GPU that has several names counts once."""
    try:
        names = device_names(specification)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return Absent.error(f"CDI specification: {error}")
    return max(sum(bool(pattern.fullmatch(name)) for name in names) for pattern in _GPU_NAMES)
