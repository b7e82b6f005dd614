"""Store each text of the report page's embedded data once, cleaned.

The data is JSON in a `<script>` element of the page, and refers to a text by its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fleet.report.formatting import clean, clean_log

_LOG_CHARACTERS = 4000
"""Maximum number of characters of a log on a host's page. The page shows only the end of a longer log."""


class TextTable:
    """The texts of the embedded data, while the page is built."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self.size = 0
        """Size of the stored texts as JSON, in bytes."""

    def number(self, text: str, *, log: bool = False) -> int:
        """Return the number of a text, adding it if it is new."""
        cleaned = clean_log(text, _LOG_CHARACTERS) if log else clean(text)
        if cleaned not in self._numbers:
            self._numbers[cleaned] = len(self._texts)
            self._texts.append(cleaned)
            self.size += len(as_json(cleaned).encode()) + 1
        return self._numbers[cleaned]

    def numbers(self, texts: Iterable[str]) -> list[int]:
        """Return the numbers of several texts."""
        return [self.number(text) for text in texts]

    def mark(self) -> tuple[int, int]:
        """Return the current state, which can be passed to `restore`."""
        return len(self._texts), self.size

    def restore(self, mark: tuple[int, int]) -> None:
        """Remove the texts that were added after `mark` returned this state."""
        for text in self._texts[mark[0] :]:
            del self._numbers[text]
        del self._texts[mark[0] :]
        self.size = mark[1]

    @property
    def texts(self) -> list[str]:
        """Return the texts in the order of their numbers."""
        return self._texts


def as_json(data: Any) -> str:
    """Return JSON without `<`, `>` and `&`, so that in a `<script>` element it can neither end the element nor open one."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
