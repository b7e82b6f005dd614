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
"""Members of the union that holds a field's value. The index is the type of the value (nvmlValueType_t)."""
WIDE = KINDS.index("ullVal")

POWER_POLICY, THERMAL_POLICY, SYNC_BOOST, BOARD_LIMIT, RELIABILITY, MEMORY_TEMPERATURE = 74, 75, 76, 77, 79, 82
SW_THERMAL, HW_THERMAL, POWER_BRAKE = (269, 251), (270, 252), (271, 253)
"""The second number of each pair was used by the first drivers of R575 and R580."""
RECOVERY_ACTION = 230
GROUPED = (
    POWER_POLICY, THERMAL_POLICY, SYNC_BOOST, BOARD_LIMIT, RELIABILITY, *SW_THERMAL, *HW_THERMAL, *POWER_BRAKE,
)  # fmt: skip
"""Fields that are read together in one call. They are numbers, because older versions of nvidia-ml-py lack the names."""


class NvmlGpu:
    """A device handle with a cache of its answers."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.denied_fields: dict[int, float] = {}
        """NVLink field -> how often NVML denied it; -infinity if it was ever read. The counts are kept between collections."""
        self._answers: dict[Hashable, Any] = {}

    def without_cache(self) -> NvmlGpu:
        """Return the same GPU with an empty cache."""
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
        """Return the result of nvmlDeviceGet…. Raises ReadingError."""
        return self.cached(
            (getter, *arguments), lambda: available(call(f"nvmlDeviceGet{getter}", self.handle, *arguments))
        )

    def query_into(self, getter: str, *targets: Any) -> None:
        """Call nvmlDeviceGet…, which writes into these ctypes objects. Raises ReadingError.

        The targets are needed because without them pynvml returns an object that all threads share.
        """
        _check(call(f"nvmlDeviceGet{getter}", self.handle, *map(ctypes.byref, targets)))

    def query_into_with(self, function: str, *targets: Any) -> None:
        """Do the same as `query_into` with a C function for which pynvml declares a wrong structure. Raises ReadingError."""
        _check(call("_nvmlGetFunctionPointer", function)(self.handle, *map(ctypes.byref, targets)))

    def fields(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """Return the fields by (number, scope), read in one call. Raises ReadingError."""
        pairs = list(keys)
        return dict(zip(pairs, call("nvmlDeviceGetFieldValues", self.handle, pairs), strict=True))

    def field(self, number: int) -> Any:
        """Return one field of the GPU. Raises ReadingError."""
        if number not in GROUPED:
            return self.cached(("field", number), lambda: self.fields([(number, 0)]))[number, 0]
        return self.cached("grouped", lambda: self.fields((each, 0) for each in GROUPED))[number, 0]


def _check(code: int) -> None:
    """Raise ReadingError for an error code. Needed because some functions of pynvml return the code without a check."""
    if code:
        raise ReadingError(translate(nvml.NVMLError(code)))


def field_value(field: Any) -> Value:
    """Return the value of a field. Raises ReadingError."""
    _check(field.nvmlReturn)
    number: Value = available(getattr(field.value, KINDS[field.valueType]))
    return number
