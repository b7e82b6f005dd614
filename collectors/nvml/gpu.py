"""One GPU during one collection. `query` and `field` call NVML only once for a result that several readings use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pynvml as nvml

from collectors.base import Absent, ReadingError, Value
from collectors.nvml.calls import available, call, translate

S = TypeVar("S")

KINDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of the union that holds a field's value. A member's index here is its value type in NVML (nvmlValueType_t)."""
WIDE = KINDS.index("ullVal")
"""Value type of 64-bit unsigned numbers."""

POWER_POLICY, THERMAL_POLICY, SYNC_BOOST, BOARD_LIMIT, RELIABILITY, MEMORY_TEMPERATURE = 74, 75, 76, 77, 79, 82
SW_THERMAL, HW_THERMAL, POWER_BRAKE = (269, 251), (270, 252), (271, 253)
"""Each counter has two field numbers. Current drivers use the first number. Early drivers of R575 and R580 use the second."""
RECOVERY_ACTION = 230
GROUPED = (
    POWER_POLICY, THERMAL_POLICY, SYNC_BOOST, BOARD_LIMIT, RELIABILITY, *SW_THERMAL, *HW_THERMAL, *POWER_BRAKE,
)  # fmt: skip
"""Fields that are read together in one call. This file has the numbers of NVML's fields (NVML_FI_DEV_*), because older versions
of nvidia-ml-py lack the names."""


class NvmlGpu:
    """NVML's device handle of a GPU, with a cache of the results that NVML returned for it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.denied_fields: dict[int, float] = {}
        """Number of an NVLink field -> how often NVML denied it; -infinity once the field has been read, so that it never counts
        as denied. The collector replaces this dictionary with one that it keeps between collections."""
        self._answers: dict[Hashable, Any] = {}

    def without_cache(self) -> NvmlGpu:
        """Return a new NvmlGpu for the same GPU, with an empty cache."""
        copy = NvmlGpu(self.handle)
        copy.denied_fields = self.denied_fields
        return copy

    def cached(self, key: Hashable, get: Callable[[], S]) -> S:
        """Return the result of the first call of `get` for this key. If that raised ReadingError, raise it again."""
        if key not in self._answers:
            try:
                self._answers[key] = get()
            except ReadingError as error:
                self._answers[key] = error.absent
        answer: S | Absent = self._answers[key]
        if isinstance(answer, Absent):
            raise ReadingError(answer)
        return answer

    def query(self, getter: str, *arguments: int) -> Any:
        """Return the result of NVML's function `nvmlDeviceGet{getter}`. Raises ReadingError."""
        return self.cached(
            (getter, *arguments), lambda: available(call(f"nvmlDeviceGet{getter}", self.handle, *arguments))
        )

    def query_into(self, getter: str, *targets: Any) -> None:
        """Call NVML's function `nvmlDeviceGet{getter}`, which writes its result into `targets`. Raises ReadingError.

        The targets are ctypes objects. Without targets, pynvml would write into a default object that all threads share.
        """
        _check(call(f"nvmlDeviceGet{getter}", self.handle, *map(ctypes.byref, targets)))

    def query_into_with(self, function: str, *targets: Any) -> None:
        """Do the same as `query_into`, without pynvml's wrapper, which may declare a wrong structure. Raises ReadingError.

        `function` is the full name of the C function.
        """
        _check(call("_nvmlGetFunctionPointer", function)(self.handle, *map(ctypes.byref, targets)))

    def fields(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """Return NVML's structure of each field, read in one call. Raises ReadingError.

        A key is the number of a field and its scope: the number of an NVLink, or 0 for the whole GPU.
        """
        pairs = list(keys)
        return dict(zip(pairs, call("nvmlDeviceGetFieldValues", self.handle, pairs), strict=True))

    def field(self, number: int) -> Any:
        """Return NVML's structure of one field of the whole GPU; `field_value` returns its value. Raises ReadingError."""
        if number not in GROUPED:
            return self.cached(("field", number), lambda: self.fields([(number, 0)]))[number, 0]
        return self.cached("grouped", lambda: self.fields((each, 0) for each in GROUPED))[number, 0]


def _check(code: int) -> None:
    """Raise ReadingError for an error code. Needed because some functions of pynvml return the code and raise no error."""
    if code:
        raise ReadingError(translate(nvml.NVMLError(code)))


def field_value(field: Any) -> Value:
    """Return the value in NVML's structure of a field. Raises ReadingError."""
    _check(field.nvmlReturn)
    number: Value = available(getattr(field.value, KINDS[field.valueType]))
    return number
