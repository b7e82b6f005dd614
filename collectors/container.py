"""Containers with GPUs: which runtimes there are, and whether NVIDIA's toolkit is set up for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from collectors.base import Absent, Family, Value
from collectors.host import programs
from collectors.host.files import Files, one
from collectors.software import DRIVER, module_version

RUNTIMES = ("docker", "containerd", "podman", "crio", "enroot", "apptainer")
CDI_DIRECTORIES = ("var/run/cdi", "run/cdi", "etc/cdi")
"""Where specifications lie; what stands in an earlier one hides the later ones."""
KIND = "nvidia.com/gpu"
_CONTAINERD = ("etc/containerd/config.toml", "etc/containerd/conf.d/99-nvidia.toml")


class ContainerCollector:
    """Reads files under `root`, `/` but in tests."""

    name = "container"

    def __init__(self, root: Path = Path("/"), thorough: bool = False) -> None:
        """`thorough`: the toolkit is asked for its version, and CDI specifications are read."""
        self._root = root
        self._thorough = thorough

    def collect(self) -> Iterable[Family]:
        files = Files(self._root)
        present = {runtime: programs.find(self._root, runtime) is not None for runtime in RUNTIMES}
        family = Family(name="container.runtime.present", unit="1", help="The container runtime is installed")
        for runtime, there in present.items():
            family.add({"runtime": runtime}, there)
        yield family
        toolkit = programs.find(self._root, "nvidia-ctk") is not None
        yield one("container.toolkit.present", "1", "NVIDIA's container toolkit is installed", toolkit)
        yield from _docker(files, present["docker"])
        has = _containerd(files) if present["containerd"] else Absent(status="unsupported", reason="no containerd")
        yield one("container.containerd.nvidia_runtime", "1", "containerd knows NVIDIA's runtime", has)
        if self._thorough:
            version = programs.version(self._root, "nvidia-ctk", r"CLI version (\S+)")
            yield one("container.toolkit.version", "1", "Version of NVIDIA's container toolkit", version)
            yield from _cdi(files)


def docker_runtimes(text: str) -> tuple[bool, str]:
    """(NVIDIA's runtime is known, the default runtime) out of daemon.json. Raises ValueError where it is no such file."""
    try:
        settings = json.loads(text) if text.strip() else {}
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    runtimes = settings.get("runtimes", {}) if isinstance(settings, dict) else None
    if not isinstance(runtimes, dict):
        raise ValueError("not the settings of docker")
    return "nvidia" in runtimes, str(settings.get("default-runtime", "runc"))


def devices(specification: str) -> list[str]:
    """Names of the devices in a CDI specification, JSON or YAML as `nvidia-ctk cdi generate` writes them."""
    if specification.lstrip().startswith("{"):
        return [str(device["name"]) for device in _object(specification).get("devices", [])]
    section = re.search(r"^devices:[ \t]*\n((?:[ \t-].*\n?|\n)*)", specification, re.MULTILINE)
    body = section.group(1) if section else ""
    first = re.match(r"\s*?([ \t]*)- ", body)
    if not first:
        return []
    indent = first.group(1)
    names = re.findall(rf"^{indent}(?:- |  )name:[ \t]*(.+?)[ \t]*$", body, re.MULTILINE)
    return [name.strip("\"'") for name in names]


def kind(specification: str) -> str:
    """`nvidia.com/gpu`, or empty where it names none."""
    found = re.search(r"(?:^|[{,])\s*\"?kind\"?:\s*\"?([\w./-]+)", specification, re.MULTILINE)
    return found.group(1) if found else ""


def driver_versions(specification: str) -> set[str]:
    """Driver versions in the names of the libraries that a specification mounts."""
    return set(re.findall(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)*)", specification))


def _docker(files: Files, present: bool) -> Iterable[Family]:
    told: tuple[bool, str] | Absent = Absent(status="unsupported", reason="no docker")
    if present and files.exists("etc/docker/daemon.json"):
        told = files.read("etc/docker/daemon.json", docker_runtimes)
    elif present:
        told = (False, "runc")
    known = told if isinstance(told, Absent) else told[0]
    default = told if isinstance(told, Absent) else told[1]
    yield one("container.docker.nvidia_runtime", "1", "Docker knows NVIDIA's runtime", known)
    yield one("container.docker.default_runtime", "1", "Docker's runtime where none is asked for", default)


def _containerd(files: Files) -> bool | Absent:
    found = [files.read(path, _names_nvidia) for path in _CONTAINERD if files.exists(path)]
    return next((told for told in found if told is not False), False)


def _names_nvidia(text: str) -> bool:
    return re.search(r"^[^#\n]*runtimes\.[\"']?nvidia[\"']?\]", text, re.MULTILINE) is not None


def _cdi(files: Files) -> Iterable[Family]:
    found = _specification(files)
    names = found if isinstance(found, Absent) else _parsed(found, devices)
    gpus = names if isinstance(names, Absent) else _gpus(names)
    yield one("container.cdi.gpus", "1", "GPUs that the CDI specification names", gpus)
    versions = found if isinstance(found, Absent) else driver_versions(found)
    if not versions:
        versions = Absent(status="unsupported", reason="the CDI specification names no version of the driver")
    told = versions if isinstance(versions, Absent) else ",".join(sorted(versions))
    yield one("container.cdi.driver_version", "1", "Driver of which the CDI specification speaks", told)
    loaded = files.read(DRIVER, module_version)
    current: Value | Absent = (
        told if isinstance(told, Absent) else loaded if isinstance(loaded, Absent) else told == loaded
    )
    yield one("container.cdi.current", "1", "The CDI specification speaks of the driver that is loaded", current)


def _specification(files: Files) -> str | Absent:
    """The specification of NVIDIA's GPUs that counts."""
    unreadable: Absent | None = None
    for directory in CDI_DIRECTORIES:
        names = files.names(directory, r".+\.(yaml|yml|json)", "none")
        for name in [] if isinstance(names, Absent) else names:
            content = files.read(f"{directory}/{name}", str)
            if isinstance(content, Absent):
                unreadable = content
            elif kind(content) == KIND:
                return content
    return unreadable or Absent(status="unsupported", reason=f"no CDI specification of {KIND}")


def _parsed(specification: str, parse: Any) -> list[str] | Absent:
    try:
        found: list[str] = parse(specification)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return Absent(status="error", reason=f"CDI specification: {error}")
    return found


def _gpus(names: list[str]) -> int:
    """A GPU may stand there by its index, by its UUID, or by both."""
    return max(sum(name.isdigit() for name in names), sum(name.startswith("GPU-") for name in names))


def _object(text: str) -> Mapping[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}
