"""A cache of bounded size for results that can be computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dictionary of at most `max_entries` entries. Setting an entry of a full cache removes all entries first."""

    def __init__(self, max_entries: int, on_removal: Callable[[V], None] | None = None) -> None:
        """`on_removal` is called with each value when the cache is emptied."""
        self.max_entries = max_entries
        self._on_removal = on_removal

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.max_entries:
            self.clear()
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the cache without its entries. Pickling does not call `on_removal`: if that is needed, call `clear` first."""
        return BoundedCache, (self.max_entries, self._on_removal)

    def clear(self) -> None:
        for value in self.values() if self._on_removal else ():
            if self._on_removal:
                self._on_removal(value)
        super().clear()
