"""One GPU during one collection: every getter is asked once, however many readings come of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pynvml as nvml

from collectors.base import Absent, Value
from collectors.nvml.calls import UnreadError, call, translate

S = TypeVar("S")

KINDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Where a field's value stands, by its type (nvmlValueType_t)."""
WIDE = KINDS.index("ullVal")

POWER_POLICY, THERMAL_POLICY, SYNC_BOOST, BOARD_LIMIT, RELIABILITY, MEMORY_TEMPERATURE = 74, 75, 76, 77, 79, 82
SW_THERMAL, HW_THERMAL, POWER_BRAKE = (269, 251), (270, 252), (271, 253)
"""The numbers of the second column are those of the first R575 and R580 drivers."""
RECOVERY_ACTION = 230
TOGETHER = (
    POWER_POLICY, THERMAL_POLICY, SYNC_BOOST, BOARD_LIMIT, RELIABILITY, *SW_THERMAL, *HW_THERMAL, *POWER_BRAKE,
)  # fmt: skip
"""Fields that are read in one call. Numbers, because older versions of nvidia-ml-py lack the names."""


class Gpu:
    """A device handle, and what it has answered so far."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.never: set[int] = set()
        """Fields of links that the part does not have; kept from one collection to the next."""
        self._answers: dict[Hashable, Any] = {}

    def again(self) -> Gpu:
        """The same GPU, which has answered nothing yet."""
        fresh = Gpu(self.handle)
        fresh.never = self.never
        return fresh

    def once(self, key: Hashable, get: Callable[[], S]) -> S:
        """What `get` gave when it was first asked under this key. Raises UnreadError, as `get` did then."""
        if key not in self._answers:
            try:
                self._answers[key] = get()
            except UnreadError as missing:
                self._answers[key] = missing.absent
        answer: S | Absent = self._answers[key]
        if isinstance(answer, Absent):
            raise UnreadError(answer)
        return answer

    def ask(self, getter: str, *arguments: int) -> Any:
        """What nvmlDeviceGet… gives. Raises UnreadError."""
        return self.once((getter, *arguments), lambda: call(f"nvmlDeviceGet{getter}", self.handle, *arguments))

    def fill(self, getter: str, *places: Any) -> None:
        """Has nvmlDeviceGet… write into these ctypes objects. Raises UnreadError.

        What pynvml hands out where it is given no place of ours is shared by all threads.
        """
        _checked(call(f"nvmlDeviceGet{getter}", self.handle, *map(ctypes.byref, places)))

    def fill_by(self, function: str, *places: Any) -> None:
        """As `fill`, by the library's own function, where pynvml has the structure wrong. Raises UnreadError."""
        _checked(call("_nvmlGetFunctionPointer", function)(self.handle, *map(ctypes.byref, places)))

    def fields(self, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """(field, scope) -> what NVML put there, by one call. Raises UnreadError."""
        pairs = list(wanted)
        return dict(zip(pairs, call("nvmlDeviceGetFieldValues", self.handle, pairs), strict=True))

    def field(self, number: int) -> Any:
        """One field of the GPU as NVML filled it in. Raises UnreadError."""
        if number not in TOGETHER:
            return self.once(("field", number), lambda: self.fields([(number, 0)]))[number, 0]
        return self.once("together", lambda: self.fields((each, 0) for each in TOGETHER))[number, 0]


def _checked(code: int) -> None:
    """Of some getters pynvml returns the code and does not look at it."""
    if code:
        raise UnreadError(translate(nvml.NVMLError(code)))


def value(field: Any) -> Value:
    """The value of a field. Raises UnreadError."""
    _checked(field.nvmlReturn)
    number: Value = getattr(field.value, KINDS[field.valueType])
    return number
