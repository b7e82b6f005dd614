"""The data block of the page while it is built: each text once, cleaned, and as JSON that nothing in it can end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fleet.report.format import clean, clean_log

_TAIL_CHARACTERS = 4000
"""Of each log on a host's page; the records have more."""


class Block:
    """The data of the page while it is built."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self.size = 0
        """Bytes of the texts so far."""

    def text(self, text: str, *, log: bool = False) -> int:
        """The number of a text."""
        harmless = clean_log(text, _TAIL_CHARACTERS) if log else clean(text)
        if harmless not in self._numbers:
            self._numbers[harmless] = len(self._texts)
            self._texts.append(harmless)
            self.size += len(as_json(harmless).encode()) + 1
        return self._numbers[harmless]

    def texts(self, texts: Iterable[str]) -> list[int]:
        """Their numbers."""
        return [self.text(text) for text in texts]

    def mark(self) -> tuple[int, int]:
        """How much there is now, for `back`."""
        return len(self._texts), self.size

    def back(self, mark: tuple[int, int]) -> None:
        """Forgets the texts that came since the mark."""
        for text in self._texts[mark[0] :]:
            del self._numbers[text]
        del self._texts[mark[0] :]
        self.size = mark[1]

    @property
    def all(self) -> list[str]:
        """The texts by number."""
        return self._texts


def as_json(data: Any) -> str:
    """JSON that can stand in an element of the page: nothing in it can end that, or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
