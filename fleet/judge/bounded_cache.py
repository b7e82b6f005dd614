"""A cache of bounded size for results that can be computed again."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dictionary that is emptied when it would exceed its size."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.max_entries:
            self.clear()
        super().__setitem__(key, value)
