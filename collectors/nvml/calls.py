"""A call of NVML that may fail: what it gave, or why it gave nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml as nvml

from collectors.base import Absent

_UNSUPPORTED = (
    nvml.NVML_ERROR_NOT_SUPPORTED,
    nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    nvml.NVML_ERROR_DRIVER_NOT_LOADED,
    nvml.NVML_ERROR_INVALID_ARGUMENT,
)


def read(get: Callable[[], Any]) -> Any:
    """What `get` gives, or Absent."""
    try:
        return get()
    except nvml.NVMLError as error:
        return translate(error)
    except UnicodeDecodeError as error:  # pynvml decodes; a part with a damaged InfoROM answers with any bytes
        return Absent(status="error", reason=f"NVML: {error}")


def translate(error: nvml.NVMLError) -> Absent:
    """An NVML error as the reason why a reading is not there."""
    status = "unsupported" if error.value in _UNSUPPORTED else "error"
    return Absent(status=status, reason=f"NVML: {error}")


def text(value: Any) -> str:
    """A text as pynvml gives it: decoded, or in some versions not."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
