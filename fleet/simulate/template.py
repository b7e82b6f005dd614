"""Templates of JSON documents that differ in only a few values from host to host: compiled once, rendered for each host."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MARK = "\0"
"""Text that stands for a slot while a document is encoded. No other text of a document is equal to it."""
_SLOT = re.compile(r'(?:"\*\*":)?"\\u0000"')
"""JSON of _MARK, with the key `**` if it has this key."""
HOST, GANG = "host", "gang"
"""Values of `Slot.drawn_by`: a random value is drawn once for each host, or once for all hosts of a gang."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A random value in a document: one of several JSON texts. The index of the selected text is the level of the slot.

    If the slot is the value of the key `**` of an object, each text is one or more members of that object,
    such as `"value":1.5`.
    """

    texts: Sequence[str]
    """One text for each level."""
    group: str
    """Slots with the same group have the same level, because their values are of the same part (such as a GPU)."""
    drawn_by: str = HOST


@dataclass(frozen=True, kw_only=True)
class Greatest:
    """The greatest of the values of several slots, which are elsewhere in the document.

    These slots have equal `texts`. Each has a group of its own, and `drawn_by` HOST.
    """

    texts: Sequence[str]
    """One text for each level, with one member, such as `"value":1.5`."""
    groups: Sequence[str]
    """The groups of the slots."""


@dataclass(frozen=True)
class Placeholder:
    """A value whose text is passed to `Template.render` under `name`. The text replaces the `%s` in `form`."""

    name: str
    form: str = '"%s"'


@dataclass(kw_only=True)
class Template:
    """JSON text with slots. Here a placeholder and a `Greatest` are slots too."""

    pieces: list[str] = field(default_factory=lambda: [""])
    """The fixed text before, between and after the slots."""
    slots: list[tuple[Sequence[str], str, int]] = field(default_factory=list)
    """For each slot: its texts, `HOST` or `GANG` (empty for a placeholder or `Greatest`), and the number of its group."""
    placeholders: dict[str, list[str]] = field(default_factory=dict)
    """Name of a placeholder -> a list whose only item is the text. Placeholders with the same name share the list, so `render`
    sets all of them at once."""
    groups: dict[str, dict[str, int]] = field(default_factory=lambda: {HOST: {}, GANG: {}})
    """`HOST` or `GANG` -> group -> number of the group."""
    greatest: dict[int, Greatest] = field(default_factory=dict)
    """Index in `slots` -> the `Greatest` at this place."""

    def __post_init__(self) -> None:
        self._slot_levels: list[tuple[Sequence[str], int]] = []
        self._greatest: list[tuple[int, Sequence[str], Sequence[float], Sequence[int]]] = []

    def render(self, values: Mapping[str, str], host_levels: bytes, gang_levels: bytes = b"") -> str:
        """Return the document.

        Args:
            values: name of a placeholder -> its text.
            host_levels: a level for each group of `HOST`.
            gang_levels: a level for each group of `GANG`.
        """
        for name, text in self.placeholders.items():
            text[0] = values[name]
        levels = bytes([0]) + host_levels[: len(self.groups[HOST])] + gang_levels[: len(self.groups[GANG])]
        texts = [""] * (2 * len(self.slots) + 1)
        texts[::2] = self.pieces
        texts[1::2] = [slot_texts[levels[index]] for slot_texts, index in self._slot_levels]
        for slot, slot_texts, values_at, indexes in self._greatest:
            texts[2 * slot + 1] = slot_texts[max((levels[index] for index in indexes), key=values_at.__getitem__)]
        return "".join(texts)

    def finish(self) -> Template:
        """Prepare the template for `render`. Call this after the last `add`."""
        first_index = {"": 0, HOST: 1, GANG: 1 + len(self.groups[HOST])}
        self._slot_levels = [(texts, first_index[drawn_by] + group) for texts, drawn_by, group in self.slots]
        self._greatest = [
            (
                *(slot, item.texts, [float(text.rpartition(":")[2]) for text in item.texts]),
                [first_index[HOST] + self.groups[HOST][group] for group in item.groups],
            )
            for slot, item in self.greatest.items()
        ]
        return self

    def add(self, value: Slot | Greatest | Placeholder) -> None:
        """Append a slot to the JSON text."""
        if isinstance(value, Slot):
            groups = self.groups[value.drawn_by]
            self._add_slot(value.texts, value.drawn_by, groups.setdefault(value.group, len(groups)))
        elif isinstance(value, Greatest):
            self.greatest[len(self.slots)] = value
            self._add_slot(value.texts[:1], "", 0)
        else:
            before, after = value.form.split("%s")
            self.pieces[-1] += before
            self._add_slot(self.placeholders.setdefault(value.name, [""]), "", 0)
            self.pieces[-1] += after

    def _add_slot(self, texts: Sequence[str], drawn_by: str, group: int) -> None:
        self.slots.append((texts, drawn_by, group))
        self.pieces.append("")


def compile_template(document: Any) -> Template:
    """Return the template of a document that contains slots and placeholders."""
    found: list[Slot | Greatest | Placeholder] = []

    def mark(value: Any) -> str:
        if not isinstance(value, Slot | Greatest | Placeholder):
            raise TypeError(f"a record cannot contain {value!r}")
        found.append(value)
        return _MARK

    # The encoder calls `mark` for each slot, in the order of the text.
    text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=mark).encode(document)
    first, *others = _SLOT.split(text)
    template = Template(pieces=[first])
    for slot, piece in zip(found, others, strict=True):
        template.add(slot)
        template.pieces[-1] += piece
    return template.finish()
