"""Call NVML, and convert its exceptions: `call` raises ReadingError, and `try_read` returns an Absent, both with the reason."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml as nvml

from collectors.base import Absent, ReadingError

# NVML's errors for a reading that this GPU, driver or library does not have. An Absent for them has the status `unsupported`.
_UNSUPPORTED = frozenset(
    {
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_INVALID_ARGUMENT,
        nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,  # the driver has an older version of the structure
        nvml.NVML_ERROR_DEPRECATED,
    }
)
MAX_GPUS = 1024
"""More GPUs than any host has. A higher count from NVML is rejected as a driver error, because a list of so many GPUs could use
all memory."""
_ALL_BITS = (2**32 - 1, 2**64 - 1)
NOT_AVAILABLE = Absent.error("NVML: the value is not available (all bits are set)")


class ResetRequired(Absent):
    """The reason why a reading is missing: the driver refuses it until the GPU is reset."""


class NotOpened(Absent):
    """The reason why NVML cannot be opened, for causes that NVML's own error does not name. `reason` ends with what to do."""


_ROOT = Path("/")
_CONTROL, _DRIVER = "dev/nvidiactl", "proc/driver/nvidia/version"
_DRIVER_CONTAINER = "run/nvidia/driver/usr"
"""Exists if NVIDIA's GPU operator runs the driver in a container: it mounts the root of this container on the host."""


def open_nvml(root: Path = _ROOT) -> None:
    """Open NVML; nvmlShutdown closes it. Raises ReadingError with the reason if it cannot be opened."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ReadingError(_why_not_opened(error, root)) from None


def _why_not_opened(error: nvml.NVMLError, root: Path) -> Absent:
    """Return why NVML cannot be opened.

    The result is NotOpened if the library is damaged, if it is missing although the driver is loaded, or if /dev/nvidiactl is
    missing or access to it is denied. NVML's own error does not name these causes. For any other cause, such as a host without a
    driver, the result is a plain Absent.
    """
    absent = translate(error)
    why = _why_not_loaded(root) if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND else _why_denied(root)
    return NotOpened.error(f"{absent.reason}: {why}") if why else absent


def _why_not_loaded(root: Path) -> str:
    """Return why the NVML library cannot be loaded; empty if it can be loaded, or if this host has no driver."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        if "cannot open shared object file" not in str(error):
            return f"{error}: install the libraries of the driver again"
        if (root / _DRIVER).exists() and (root / _DRIVER_CONTAINER).exists():
            return (
                "the driver and its libraries are in a container (/run/nvidia/driver), as with NVIDIA's GPU operator: measure "
                "this host with the manifests for Kubernetes"
            )
        if (root / _DRIVER).exists():
            return (
                "the driver is loaded, but its libraries are not installed: install them; a container needs --gpus all"
            )
    return ""


def _why_denied(root: Path) -> str:
    """Return why this process cannot open /dev/nvidiactl, through which NVML uses the driver.

    Empty if the process can open it, or if NVML's own error already names the cause.
    """
    try:
        os.close(os.open(root / _CONTROL, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as error:
        # NVIDIA/nvidia-container-toolkit issue 48: systemd revokes a container's access to devices that systemd does not manage.
        return (
            f"/{_CONTROL}: {error.strerror}: no permission to use the GPUs; a job of Slurm or a service of systemd has only the "
            "devices that it is given: start this command outside of it; a container loses its access if `systemctl "
            "daemon-reload` runs on its host: start the container again"
        )
    except FileNotFoundError:
        if (root / _DRIVER).exists():
            return (
                f"the driver is loaded, but there is no /{_CONTROL}: run nvidia-modprobe; a container needs --gpus all"
            )
    except OSError:
        pass  # NVML's own text states the reason
    return ""


def unsupported_error(reason: str) -> ReadingError:
    """Return the error for a value that this GPU, driver or library does not have."""
    return ReadingError(Absent.unsupported(reason))


def binding(name: str) -> Any:
    """Return nvidia-ml-py's function or structure with this name. Raises ReadingError if the installed version lacks it."""
    try:
        return getattr(nvml, name)
    except AttributeError:
        raise unsupported_error(f"the installed nvidia-ml-py has no {name}") from None


def call(function: str, *arguments: Any) -> Any:
    """Call the function of nvidia-ml-py with this name. Raises ReadingError if nvidia-ml-py lacks it or NVML returns an error."""
    try:
        return binding(function)(*arguments)
    except nvml.NVMLError as error:
        raise ReadingError(translate(error)) from None


def try_read(get: Callable[[], Any]) -> Any:
    """Return the result of `get`, or an Absent with the reason why it failed."""
    try:
        return get()
    except ReadingError as error:
        return error.absent
    except nvml.NVMLError as error:
        return translate(error)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # A GPU with a damaged InfoROM can return bytes that pynvml cannot decode, and versions of pynvml differ in their
        # signatures. In both cases only this reading is lost.
        return Absent.error(f"NVML: {error}")


def gpu_count() -> int:
    """Return how many GPUs NVML lists. Raises NVMLError if NVML fails, and ReadingError if there are more than MAX_GPUS."""
    count: int = nvml.nvmlDeviceGetCount()
    if count > MAX_GPUS:
        raise ReadingError(Absent.error(f"NVML lists {count} GPUs, more than a host can have ({MAX_GPUS})"))
    return count


def translate(error: nvml.NVMLError) -> Absent:
    """Convert an NVML error to the reason for an absent reading."""
    if error.value == nvml.NVML_ERROR_RESET_REQUIRED:
        return ResetRequired(status="error", reason="NVML: the GPU requires a reset")
    status = "unsupported" if error.value in _UNSUPPORTED else "error"
    return Absent(status=status, reason=f"NVML: {error}")


def available(value: Any) -> Any:
    """Return the value. Raises ReadingError if all of its bits are set (NVML_VALUE_NOT_AVAILABLE, or an unreadable register)."""
    if type(value) is int and value in _ALL_BITS:
        raise ReadingError(NOT_AVAILABLE)
    return value


def decode(value: Any) -> str:
    """Return a text from pynvml as `str`. Some versions of pynvml return texts as `bytes`."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
