"""What is remembered so that it is not worked out again, and never grows beyond a size."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dictionary that begins anew when it would hold more than so many: what is lost is worked out again."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)
