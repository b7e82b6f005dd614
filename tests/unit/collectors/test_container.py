"""Test that the container collector reads runtimes, the NVIDIA Container Toolkit and CDI specifications from a tree of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from collectors.base import Absent, Value, scope
from collectors.cdi import device_names, driver_versions, specification_kind
from collectors.container import ContainerCollector, parse_docker_config
from collectors.container_versions import version_families
from tests.fakes import host

Readings = dict[str, Value | Absent]
DOCKER, CDI = "etc/docker/daemon.json", "var/run/cdi/nvidia.yaml"
OLD_CDI = host.CDI.replace(host.DRIVER, "570.86.15")
INDENTED_CDI = """cdiVersion: 0.6.0
devices:
    - name: "0"
      containerEdits:
        netDevices:
            - hostInterfaceName: eth0
              name: eth7
    - name: "1"
      containerEdits: {}

kind: nvidia.com/gpu
"""


def readings(root: Path, *, full_snapshot: bool = True) -> Readings:
    """Return key -> reading. The key is the name without `container.`, followed by the scope unless that is the whole host.

    The versions and packages of containerd and runc are left out: test_container_versions.py tests them.
    """
    names = {family.name for family in version_families(root)}
    families = [family for family in ContainerCollector(root, full_snapshot).collect() if family.name not in names]
    return {
        f"{family.name.removeprefix('container.')} {scope(labels)}".removesuffix(" host"): value
        for family in families
        for labels, value in family.readings
    }


def changed(before: Readings, after: Readings) -> Readings:
    """Return the readings of `after` that differ from those in `before`."""
    return {name: value for name, value in after.items() if before[name] != value}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Readings:
    return readings(host.build_tree(tmp_path_factory.mktemp("host")))


def test_healthy_host_reports_all_readings(healthy: Readings) -> None:
    assert healthy == {
        "runtime.present runtime=docker": True,
        "runtime.present runtime=containerd": False,
        "runtime.present runtime=podman": False,
        "runtime.present runtime=crio": False,
        "runtime.present runtime=enroot": False,
        "runtime.present runtime=apptainer": False,
        "toolkit.present": True,
        "toolkit.version": "1.17.8",
        "docker.nvidia_runtime": True,
        "docker.default_runtime": "nvidia",
        "containerd.nvidia_runtime": Absent(status="unsupported", reason="no containerd"),
        "cdi.gpus": 2,
        "cdi.driver_version": host.DRIVER,
        "cdi.current": True,
    }


def test_scrape_starts_no_program(tmp_path: Path) -> None:
    root = host.build_tree(tmp_path / "host")
    host.write_program(root / "usr/bin/nvidia-ctk", f"touch {tmp_path}/started")
    assert "toolkit.version" not in readings(root, full_snapshot=False)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("files", "change"),
    [
        ({CDI: OLD_CDI}, {"cdi.driver_version": "570.86.15", "cdi.current": False}),
        ({"etc/cdi/nvidia.yaml": OLD_CDI}, {}),  # the specification in /var/run/cdi takes precedence
        ({CDI: None, "etc/cdi/old.yaml": OLD_CDI}, {"cdi.driver_version": "570.86.15", "cdi.current": False}),
        ({CDI: host.CDI.replace('name: "1"', 'name: "1:0"')}, {"cdi.gpus": 1}),
        ({DOCKER: "{}"}, {"docker.nvidia_runtime": False, "docker.default_runtime": "runc"}),
        ({DOCKER: None}, {"docker.nvidia_runtime": False, "docker.default_runtime": "runc"}),
        ({"usr/local/bin/containerd": ""},
         {"runtime.present runtime=containerd": True, "containerd.nvidia_runtime": False}),
        ({"usr/bin/containerd": "", "etc/containerd/conf.d/99-nvidia.toml":
          '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]\n'},
         {"runtime.present runtime=containerd": True, "containerd.nvidia_runtime": True}),
        # config.toml is a directory, so it cannot be read
        ({"usr/bin/containerd": "", "etc/containerd/config.toml/directory": "",
          "etc/containerd/conf.d/99-nvidia.toml":
          '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]\n'},
         {"runtime.present runtime=containerd": True, "containerd.nvidia_runtime": True}),
        ({"usr/bin/containerd": "", "etc/containerd/config.toml": "# [plugins.cri.containerd.runtimes.nvidia]\n"},
         {"runtime.present runtime=containerd": True, "containerd.nvidia_runtime": False}),
        ({"proc/driver/nvidia/version": None},
         {"cdi.current": Absent(status="unsupported", reason="no /proc/driver/nvidia/version")}),
    ],
)  # fmt: skip
def test_changed_file_affects_only_its_readings(
    tmp_path: Path, healthy: Readings, files: Mapping[str, str | None], change: Readings
) -> None:
    """`files`: path -> content, None if the file is missing; `change`: the readings that differ from those of a healthy host."""
    assert changed(healthy, readings(host.build_tree(tmp_path, files=files))) == change


@pytest.mark.parametrize(
    ("names", "gpus"),
    [
        (("0", "1", "all"), 2),
        (("gpu0", "gpu1", "all"), 2),
        (("GPU-41b7e0c5", "all"), 1),
        (("0", "1", "GPU-41b7e0c5", "GPU-7c2a91d4", "gpu0", "gpu1", "all"), 2),
        (("0:0", "mig0:1", "MIG-41b7e0c5", "all"), 0),
    ],
)
def test_gpus_of_a_cdi_specification_are_counted_once_whatever_their_names(
    tmp_path: Path, names: tuple[str, ...], gpus: int
) -> None:
    specification = json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": name} for name in names]})
    assert readings(host.build_tree(tmp_path, files={CDI: specification}))["cdi.gpus"] == gpus


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({DOCKER: "{"}, {"docker.nvidia_runtime", "docker.default_runtime"}),
        ({DOCKER: "[" * 100_000}, {"docker.nvidia_runtime", "docker.default_runtime"}),
        ({DOCKER: '{"runtimes": []}'}, {"docker.nvidia_runtime", "docker.default_runtime"}),
        ({CDI: '{"devices": 3,\n"kind": "nvidia.com/gpu", "x": "/libcuda.so.580.95.05"}'}, {"cdi.gpus"}),
    ],
)
def test_invalid_file_affects_only_its_readings(
    tmp_path: Path, healthy: Readings, files: Mapping[str, str], names: set[str]
) -> None:
    observed = changed(healthy, readings(host.build_tree(tmp_path, files=files)))
    assert set(observed) == names
    assert {value.status for value in observed.values() if isinstance(value, Absent)} == {"error"}


def test_minimal_host_has_no_errors(tmp_path: Path) -> None:
    observed = readings(host.build_minimal_tree(tmp_path))
    assert [name for name, value in observed.items() if isinstance(value, Absent) and value.status == "error"] == []
    assert observed["toolkit.present"] is False


def test_local_machine_has_no_errors() -> None:
    observed = readings(Path("/"))
    assert [name for name, value in observed.items() if isinstance(value, Absent) and value.status == "error"] == []


# ---- parsers ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"default-runtime": "crun", "runtimes": {"crun": {}}}', (False, "crun")),
        ('{"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}}}', (True, "runc")),
        ("\n", (False, "runc")),
    ],
)
def test_nvidia_and_default_runtime_are_read_from_the_docker_configuration(
    text: str, expected: tuple[bool, str]
) -> None:
    assert parse_docker_config(text) == expected


@pytest.mark.parametrize(
    ("specification", "names"),
    [
        (host.CDI, ["0", "GPU-41b7e0c5-2d93-4f68-ba10-5c8e96f3d702", "1", "all"]),
        (INDENTED_CDI, ["0", "1"]),
        (json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": "0"}, {"name": "all"}]}), ["0", "all"]),
        ("kind: nvidia.com/gpu\ndevices: []\n", []),
        ("", []),
    ],
)
def test_cdi_device_names_are_read_from_yaml_and_json(specification: str, names: list[str]) -> None:
    assert device_names(specification) == names


@pytest.mark.parametrize(
    ("specification", "kind"),
    [
        (host.CDI, "nvidia.com/gpu"),
        ('{"kind": "nvidia.com/gpu"}', "nvidia.com/gpu"),
        ("kind: intel.com/gpu\n", "intel.com/gpu"),
    ],
)
def test_cdi_kind_is_read_from_yaml_and_json(specification: str, kind: str) -> None:
    assert specification_kind(specification) == kind


def test_cdi_driver_versions_are_those_in_the_names_of_the_driver_libraries() -> None:
    text = "/usr/lib64/libcuda.so.580.95.05 /usr/lib64/libcuda.so.1 /usr/lib64/libnvidia-ml.so.570.86.15 /libfoo.so.1.2"
    assert driver_versions(text) == {"580.95.05", "570.86.15"}
