"""The software collector reads versions from files and programs.

It compares the versions of the driver library and of the fabric manager with the version of the loaded driver module.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from collectors import programs
from collectors.base import HOST_LABELS, Absent, Value
from collectors.files import MissingError
from collectors.software import SoftwareCollector, is_open_module, module_version, release_field, toolkit_version
from tests.fakes import host

Readings = dict[str, Value | Absent]
PROPRIETARY_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.216.03  Fri Oct 25 22:43:06 UTC 2024\nGCC version:  12\n"
)
LIBRARY = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"

NO_COHERENT_GPU = Absent.unsupported("no GPU is attached to its processor by NVLink-C2C, as far as the PCI bus shows")


def readings(root: Path, *, full_snapshot: bool = True) -> Readings:
    """Return name of the reading without `software.` -> value."""
    families = list(SoftwareCollector(root, full_snapshot).collect())
    assert all([labels for labels, _ in family.readings] == [HOST_LABELS] for family in families)
    return {family.name.removeprefix("software."): family.readings[0][1] for family in families}


def changed(before: Readings, after: Readings) -> Readings:
    """Return the readings in `after` that have another value in `before`."""
    return {name: value for name, value in after.items() if before[name] != value}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Readings:
    return readings(host.build_tree(tmp_path_factory.mktemp("host")))


def test_healthy_host_reports_all_readings(healthy: Readings) -> None:
    assert healthy == {
        "driver_module.version": host.DRIVER,
        "driver_module.open": True,
        "driver_module.gpu_memory": NO_COHERENT_GPU,
        "driver_library.version": host.DRIVER,
        "driver_library.matches": True,
        "nccl.version": "2.28.9",
        "cuda_toolkit.version": "13.0.1",
        "mlx5.version": "24.10-1.1.4",
        "os.name": "Ubuntu 24.04.1 LTS",
        "os.id": "ubuntu",
        "os.version": "24.04",
        "glibc.version": platform.libc_ver()[1],
        "python.version": platform.python_version(),
        "fabric_manager.version": host.DRIVER,
        "fabric_manager.matches": True,
        "perftest.version": "6.06",
    }


def test_scrape_starts_no_program(tmp_path: Path) -> None:
    root = host.build_tree(tmp_path / "host")
    host.write_program(root / "usr/bin/nv-fabricmanager", f"touch {tmp_path}/started")
    names = readings(root, full_snapshot=False)
    assert "driver_library.matches" in names
    assert "fabric_manager.version" not in names
    assert not (tmp_path / "started").exists()


def test_upgraded_library_does_not_match_the_loaded_module(tmp_path: Path, healthy: Readings) -> None:
    root = host.build_tree(tmp_path)
    (root / LIBRARY).unlink()
    (root / LIBRARY).symlink_to("libnvidia-ml.so.580.105.08")
    assert changed(healthy, readings(root)) == {
        "driver_library.version": "580.105.08",
        "driver_library.matches": False,
    }


def test_fabric_manager_of_another_version_does_not_match(tmp_path: Path, healthy: Readings) -> None:
    root = host.build_tree(tmp_path)
    host.write_program(root / "usr/bin/nv-fabricmanager", "echo 'Fabric Manager version is : 570.86.15'")
    assert changed(healthy, readings(root)) == {
        "fabric_manager.version": "570.86.15",
        "fabric_manager.matches": False,
    }


@pytest.mark.parametrize("parameter", ["", "numa", "driver"])
@pytest.mark.parametrize(
    ("mode", "files", "bridge", "expected"),
    [
        ("numa", {}, host.NVIDIA, "numa"),
        ("numa", {}, "0x1b36", "numa"),  # a virtual machine, which has a port of QEMU above the GPU
        ("driver", {}, host.NVIDIA, "driver"),
        ("driver", {}, "0x1b36", NO_COHERENT_GPU),
        ("driver", {"proc/driver/nvidia/gpus/0009:01:00.0/information": None}, host.NVIDIA,
         Absent.unsupported("/proc/driver/nvidia/gpus does not list every GPU")),
    ],
)  # fmt: skip
def test_mode_of_gpu_memory_follows_from_its_effect_and_not_from_the_parameter(
    tmp_path: Path, parameter: str, mode: str, files: Mapping[str, str | None], bridge: str, expected: Value | Absent
) -> None:
    """If the parameter CoherentGPUMemoryMode is empty, the version of the driver decides the mode."""
    params = {"proc/driver/nvidia/params": f'CoherentGPUMemoryMode: "{parameter}"\n'}
    root = host.build_tree(tmp_path, gpus=0, files={**host.grace_files(mode), **params, **files})
    for address in host.GPU_NODES:
        port = f"{address[:4]}:00:00.0"
        host.add_pci_device(root, port, bridge, "0x060400")
        host.add_pci_device(root, address, host.NVIDIA, host.CONTROLLER_3D, above=port)
    assert readings(root)["driver_module.gpu_memory"] == expected


def test_missing_driver_is_not_a_mismatch(tmp_path: Path, healthy: Readings) -> None:
    observed = changed(healthy, readings(host.build_tree(tmp_path, files={"proc/driver/nvidia/version": None})))
    no_driver = Absent(status="unsupported", reason="no /proc/driver/nvidia/version")
    names = ("driver_module.version", "driver_module.open", "driver_library.matches", "fabric_manager.matches")
    assert observed == dict.fromkeys(names, no_driver)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"proc/driver/nvidia/version": "?\n"},
         {"driver_module.version", "driver_module.open", "driver_library.matches", "fabric_manager.matches"}),
        ({"usr/local/cuda/version.json": "{}"}, {"cuda_toolkit.version"}),
        ({"usr/local/cuda/version.json": "[" * 100_000}, {"cuda_toolkit.version"}),
    ],
    ids=["driver version invalid", "CUDA version missing", "CUDA file nested too deep"],
)  # fmt: skip
def test_invalid_file_affects_only_its_readings(
    tmp_path: Path, healthy: Readings, files: Mapping[str, str], names: set[str]
) -> None:
    observed = changed(healthy, readings(host.build_tree(tmp_path, files=files)))
    assert set(observed) == names
    assert {value.status for value in observed.values() if isinstance(value, Absent)} == {"error"}


def test_library_link_without_a_version_is_an_error(tmp_path: Path) -> None:
    root = host.build_tree(tmp_path)
    (root / LIBRARY).unlink()
    (root / LIBRARY).symlink_to("/opt/odd/libnvidia-ml.so")
    absent = readings(root)["driver_library.matches"]
    assert isinstance(absent, Absent)
    assert absent.status == "error"


def test_minimal_host_has_no_errors(tmp_path: Path) -> None:
    observed = readings(host.build_minimal_tree(tmp_path))
    assert [name for name, value in observed.items() if isinstance(value, Absent) and value.status == "error"] == []
    assert observed["os.id"] == "ubuntu"


def test_local_machine_has_no_errors() -> None:
    observed = readings(Path("/"))
    assert [name for name, value in observed.items() if isinstance(value, Absent) and value.status == "error"] == []


# ---- programs ----


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "tool --version: exit code 3, no version in ''"),
        ("echo broken >&2; exit 1", "tool --version: exit code 1, no version in 'broken'"),
        ("exec sleep 10", "tool --version: no answer within 0.3 s"),
    ],
)
def test_program_that_reports_no_version_is_an_error(tmp_path: Path, script: str, reason: str) -> None:
    host.write_program(tmp_path / "usr/bin/tool", script)
    assert programs.program_version(tmp_path, "tool", r"version (\S+)", 0.3) == Absent(status="error", reason=reason)


def test_program_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    host.write_program(tmp_path / "usr/sbin/tool", "")
    (tmp_path / "usr/sbin/tool").write_bytes(os.urandom(16))
    version = programs.program_version(tmp_path, "tool", r"version (\S+)")
    assert isinstance(version, Absent)
    assert version.status == "error"


def test_missing_program_is_unsupported(tmp_path: Path) -> None:
    assert programs.program_version(tmp_path, "tool", "x") == Absent(status="unsupported", reason="no tool")


# ---- parsers ----


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        (host.FILES["proc/driver/nvidia/version"], host.DRIVER, True),
        (PROPRIETARY_MODULE, "535.216.03", False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build\n", "580.65.06", True),
    ],
)
def test_version_and_kind_of_the_kernel_module_are_read(text: str, version: str, is_open: bool) -> None:
    assert module_version(text) == version
    assert is_open_module(text) is is_open


def test_cuda_toolkit_version_is_not_that_of_a_component() -> None:
    assert toolkit_version('{"cuda": {"version": "12.4.1"}, "nvcc": {"version": "12.4.131"}}') == "12.4.1"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("ID=debian\nVERSION_ID='12'\n", "VERSION_ID", "12"),
        ('VERSION_ID="9.4"\nID="rocky"\n', "ID", "rocky"),
    ],
)
def test_os_release_field_is_read_without_quotes(text: str, key: str, value: str) -> None:
    assert release_field(text, key) == value


def test_missing_os_release_field_is_reported_as_missing() -> None:
    with pytest.raises(MissingError):
        release_field("ID=arch\n", "VERSION_ID")


def test_chain_of_library_links_is_followed_and_a_loop_is_an_error(tmp_path: Path) -> None:
    root = host.build_tree(tmp_path / "host")
    link = root / LIBRARY
    target = link.readlink()
    intermediate = root / "usr/local/nvidia/lib64/libnvidia-ml.so.1"
    intermediate.parent.mkdir(parents=True)
    intermediate.symlink_to(target)
    link.unlink()
    link.symlink_to("/usr/local/nvidia/lib64/libnvidia-ml.so.1")
    assert readings(root)["driver_library.version"] == host.DRIVER
    intermediate.unlink()
    intermediate.symlink_to("libnvidia-ml.so.1")  # a link to itself
    absent = readings(root)["driver_library.version"]
    assert isinstance(absent, Absent)
    assert (absent.status, "has no version in its name" in absent.reason) == ("error", True)


@pytest.mark.parametrize(
    ("stdout", "stderr", "message"),
    [
        ("output", "\x07\n\x1b[31mno device\x1b[0m\x08\nmore", "no device"),
        ("output", "\x1b[0m\n", "output"),
        ("", "\x07", "no output"),
        ("", "x" * 300, "x" * 200),
    ],
    ids=["first line not printable", "standard error has only colours", "only control characters", "line too long"],
)
def test_error_message_is_the_first_printable_line(stdout: str, stderr: str, message: str) -> None:
    assert programs.error_message(subprocess.CompletedProcess([], 1, stdout, stderr)) == message


def test_error_names_the_missing_program(tmp_path: Path) -> None:
    assert programs.run_program(tmp_path / "tool") == Absent.error("tool: No such file or directory")
