"""`rackproof judge`: an old run under other criteria, and what that changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.records import to_json
from schemas.reports import PASS, FleetReport

Document = Mapping[str, Any]
_PLACE = ("host", "scope", "name", "stage", "criterion")
MOST_LINES = 100


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """A verdict that is not what it was; empty where there was, or is, none."""

    kind: str
    """`verdict`: another verdict. `waiver`: the same, waived or no longer. `limit`: another limit or reason. `new`. `gone`."""
    old: Document | None
    new: Document | None

    @property
    def about(self) -> Document:
        """The verdict as it is now, or as it was."""
        return self.new or self.old or {}

    def __str__(self) -> str:
        about = self.about
        params = ", ".join(f"{key}={value}" for key, value in about.get("params", {}).items())
        name = f"{about['name']}[{params}]" if params else about["name"]
        serial = f" (serial {about['serial']})" if about.get("serial") else ""
        was = self.old["verdict"] if self.old else "not judged"
        now = _state(self.new) if self.new else "not judged"
        told = f"{was} → {now}" if self.kind != "limit" else f"{now}, with another limit or reason"
        return f"{about['host']} {about['scope']}{serial}: {name}: {about['criterion']}: {told}: {about['reason']}"


def _state(document: Document) -> str:
    return f"{document['verdict']} (waived)" if "waiver" in document else str(document["verdict"])


def rejudged(old: Document, report: FleetReport) -> tuple[Rejudged, ...]:
    """Return the verdicts of a report.json that differ in `report`: other verdicts first, other limits and reasons last.

    Reasons are compared only if one version made both: another version may word them in another way.
    """
    before = _by_place(old["verdicts"])
    compared_fields = ("limit", "operator", "value", *(("reason",) if old["rackproof"] == report.rackproof else ()))
    after = _by_place(json.loads(json.dumps(to_json(verdict))) for verdict in report.verdicts)
    found = []
    for place, documents in after.items():
        was = before.pop(place, [])
        for number, now in enumerate(documents):
            then = was[number] if number < len(was) else None
            if kind := _kind(then, now, compared_fields):
                found.append(Rejudged(kind=kind, old=then, new=now))
        found += [Rejudged(kind="gone", old=then, new=None) for then in was[len(documents) :]]
    found += [Rejudged(kind="gone", old=then, new=None) for documents in before.values() for then in documents]
    order = ("verdict", "waiver", "new", "gone", "limit")
    return tuple(sorted(found, key=lambda item: order.index(item.kind)))


def _kind(old: Document | None, new: Document, compared_fields: Sequence[str]) -> str:
    """What is another; empty where nothing is. What only an older report leaves unsaid is no change."""
    if old is None:
        return "new"
    if old["verdict"] != new["verdict"]:
        return "verdict"
    if old.get("waiver") != new.get("waiver"):
        return "waiver"
    known = [key for key in ("kind", "user", "part", "serial", "action") if key in old]
    return "limit" if any(old.get(key) != new.get(key) for key in (*compared_fields, *known)) else ""


def _by_place(verdicts: Iterable[Document]) -> dict[tuple[object, ...], list[Document]]:
    found: dict[tuple[object, ...], list[Document]] = {}
    for verdict in verdicts:
        params = tuple(sorted((key, str(value)) for key, value in verdict.get("params", {}).items()))
        found.setdefault((*(verdict.get(key, "") for key in _PLACE), params), []).append(verdict)
    return found


def lines(old: Document, report: FleetReport, changes: Sequence[Rejudged]) -> Iterator[str]:
    """What a terminal shows."""
    was, now = old["acceptance"]["status"], report.acceptance.status
    yield f"{report.run_id}: {was} → {now}" if was != now else f"{report.run_id}: {now}, as before"
    if old["rackproof"] != report.rackproof:
        yield f"(the report was made by Rackproof {old['rackproof']}, this by {report.rackproof}: that may change verdicts too)"
    if old.get("left_out"):
        yield f"(of the report {old['left_out']} verdicts that passed were left out, and are not compared)"
    kinds = Counter(change.kind for change in changes)
    same = len(report.verdicts) - sum(count for kind, count in kinds.items() if kind != "gone")
    words = {
        "verdict": "other verdicts",
        "waiver": "waivers",
        "new": "new",
        "gone": "gone",
        "limit": "other limits or reasons",
    }
    told = ", ".join(f"{count} {words[kind]}" for kind, count in kinds.items()) or "no verdict is another"
    yield f"{told}; {same} as they were"
    for change in changes[:MOST_LINES]:
        yield f"{change.kind}: {change}"
    if len(changes) > MOST_LINES:
        yield f"… and {len(changes) - MOST_LINES} more (--json has all)"


def compared(changes: Iterable[Rejudged], old: Document) -> tuple[Rejudged, ...]:
    """Without verdicts that pass and that a large fleet's report leaves out: they are not new."""
    if not old.get("left_out"):
        return tuple(changes)
    return tuple(item for item in changes if not (item.kind == "new" and item.about["verdict"] == PASS))
