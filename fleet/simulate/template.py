"""A document that is the same for every host but for some places: compiled once, filled in a millisecond."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST, GANG = "host", "gang"
"""Whose draw decides a slot."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for a drawn value: JSON text for each level. Under the key `**` it is several members of the object."""

    texts: Sequence[str]
    group: str
    """Slots of one group are of one part: they have the same level."""
    whose: str = HOST


@dataclass(frozen=True)
class Cell:
    """A placeholder that is filled in later: `%s` in `form`."""

    name: str
    form: str = '"%s"'


@dataclass(kw_only=True)
class Template:
    """JSON text with places to be filled."""

    pieces: list[str] = field(default_factory=lambda: [""])
    slots: list[tuple[Sequence[str], str, int]] = field(default_factory=list)
    cells: dict[str, list[str]] = field(default_factory=dict)
    groups: dict[str, dict[str, int]] = field(default_factory=lambda: {HOST: {}, GANG: {}})

    def __post_init__(self) -> None:
        self._plan: list[tuple[Sequence[str], int]] = []

    def text(self, values_by_key: Mapping[str, str], host: bytes, gang: bytes = b"") -> str:
        """Return the document. `values_by_key`: cell -> its text; `host`, `gang`: a level for each of their groups."""
        for name, box in self.cells.items():
            box[0] = values_by_key[name]
        drawn = bytes([0]) + host[: len(self.groups[HOST])] + gang[: len(self.groups[GANG])]
        result = [""] * (2 * len(self.slots) + 1)
        result[::2] = self.pieces
        result[1::2] = [texts[drawn[index]] for texts, index in self._plan]
        return "".join(result)

    def finished(self) -> Template:
        """Itself, when everything is in."""
        base = {"": 0, HOST: 1, GANG: 1 + len(self.groups[HOST])}
        self._plan = [(texts, base[whose] + index) for texts, whose, index in self.slots]
        return self

    def _slot(self, texts: Sequence[str], whose: str, index: int) -> None:
        self.slots.append((texts, whose, index))
        self.pieces.append("")

    def add(self, value: Any) -> None:
        """Appends a value of the document."""
        if isinstance(value, Slot):
            known = self.groups[value.whose]
            self._slot(value.texts, value.whose, known.setdefault(value.group, len(known)))
        elif isinstance(value, Cell):
            before, after = value.form.split("%s")
            self.pieces[-1] += before
            self._slot(self.cells.setdefault(value.name, [""]), "", 0)
            self.pieces[-1] += after
        elif isinstance(value, Mapping):
            self._mapping(value)
        elif isinstance(value, list | tuple):
            self.pieces[-1] += "["
            for index, item in enumerate(value):
                self.pieces[-1] += "," if index else ""
                self.add(item)
            self.pieces[-1] += "]"
        else:
            self.pieces[-1] += json.dumps(value, ensure_ascii=False)

    def _mapping(self, value: Mapping[str, Any]) -> None:
        self.pieces[-1] += "{"
        for index, (key, item) in enumerate(value.items()):
            self.pieces[-1] += "," if index else ""
            if key != "**":
                self.pieces[-1] += f"{json.dumps(key)}:"
            self.add(item)
        self.pieces[-1] += "}"


def compiled(document: Any) -> Template:
    """The template of a document with slots and cells in it."""
    template = Template()
    template.add(document)
    return template.finished()
