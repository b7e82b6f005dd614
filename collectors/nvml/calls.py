"""A call of NVML that may fail: what it gave, or why it gave nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml as nvml

from collectors.base import Absent

_UNSUPPORTED = frozenset(
    {
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_INVALID_ARGUMENT,
        nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,  # the driver knows an older form of the structure only
        nvml.NVML_ERROR_DEPRECATED,
    }
)


class UnreadError(Exception):
    """A reading that cannot be had, and why."""

    def __init__(self, absent: Absent) -> None:
        super().__init__(absent.reason)
        self.absent = absent


def unsupported(reason: str) -> UnreadError:
    """This part, driver or library has no such thing."""
    return UnreadError(Absent(status="unsupported", reason=reason))


def binding(name: str) -> Any:
    """What nvidia-ml-py has under that name. Raises UnreadError where the installed version does not have it."""
    try:
        return getattr(nvml, name)
    except AttributeError:
        raise unsupported(f"the installed nvidia-ml-py has no {name}") from None


def call(function: str, *arguments: Any) -> Any:
    """What that function of nvidia-ml-py gives. Raises UnreadError."""
    try:
        return binding(function)(*arguments)
    except nvml.NVMLError as error:
        raise UnreadError(translate(error)) from None


def read(get: Callable[[], Any]) -> Any:
    """What `get` gives, or Absent."""
    try:
        return get()
    except UnreadError as missing:
        return missing.absent
    except nvml.NVMLError as error:
        return translate(error)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # pynvml decodes, and a part with a damaged InfoROM answers with any bytes; what a getter takes and gives has
        # changed between its versions too. One reading is lost by it, not the collector.
        return Absent(status="error", reason=f"NVML: {error}")


def translate(error: nvml.NVMLError) -> Absent:
    """An NVML error as the reason why a reading is not there."""
    status = "unsupported" if error.value in _UNSUPPORTED else "error"
    return Absent(status=status, reason=f"NVML: {error}")


def text(value: Any) -> str:
    """A text as pynvml gives it: decoded, or in some versions not."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
