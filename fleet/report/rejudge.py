"""Compare the verdicts of an earlier report with the verdicts from judging the same run again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.quantities import counted
from schemas.records import to_json
from schemas.reports import PASS, FleetReport

Document = Mapping[str, Any]
_KEY = ("host", "scope", "name", "stage", "criterion")
MAX_LINES = 100


@dataclass(frozen=True, kw_only=True)
class VerdictChange:
    """A verdict that changed."""

    kind: str
    """`verdict`: another result; `waiver`: waived, no longer waived, or another waiver; `limit`: another detail, such as limit,
    value, reason, part or action; `new`; `gone`."""
    old: Document | None
    """None if only the new report lists the verdict."""
    new: Document | None
    """None if only the old report lists the verdict."""
    absent: str = "not judged"
    """Text for the report that lacks the verdict: `not listed` if that report leaves out verdicts, otherwise `not judged`."""

    @property
    def about(self) -> Document:
        """Return the new verdict, or the old verdict if there is no new verdict."""
        return self.new or self.old or {}

    def __str__(self) -> str:
        about = self.about
        params = ", ".join(f"{key}={value}" for key, value in about.get("params", {}).items())
        name = f"{about['name']}[{params}]" if params else about["name"]
        serial = f" (serial {about['serial']})" if about.get("serial") else ""
        was = _state(self.old) if self.old else self.absent
        now = _state(self.new) if self.new else self.absent
        change = f"{was} → {now}" if self.kind != "limit" else f"{now} in both reports, with different details"
        return f"{about['host']} {about['scope']}{serial}: {name}: {about['criterion']}: {change}: {about['reason']}"


def _absent_state(left_out: int | None) -> str:
    return "not listed" if left_out else "not judged"


def _state(document: Document) -> str:
    return f"{document['verdict']} (waived)" if "waiver" in document else str(document["verdict"])


def changed_verdicts(old: Document, report: FleetReport) -> tuple[VerdictChange, ...]:
    """Return the differences between the verdicts of a report.json (`old`) and those of `report`: changed results first, changed
    details last.

    Reasons are compared only if the same version of Rackproof wrote both, because versions word them differently.
    """
    before = _by_key(old["verdicts"])
    compared_fields = ("limit", "operator", "value", *(("reason",) if old["rackproof"] == report.rackproof else ()))
    after = _by_key(json.loads(json.dumps(to_json(verdict))) for verdict in report.verdicts)
    new_absent, gone_absent = _absent_state(old.get("left_out")), _absent_state(report.left_out)
    changes = []
    for key, documents in after.items():
        earlier = before.pop(key, [])
        for index, document in enumerate(documents):
            old_document = earlier[index] if index < len(earlier) else None
            if kind := _kind(old_document, document, compared_fields):
                changes.append(VerdictChange(kind=kind, old=old_document, new=document, absent=new_absent))
        before[key] = earlier[len(documents) :]
    gone = (document for documents in before.values() for document in documents)
    changes += [VerdictChange(kind="gone", old=document, new=None, absent=gone_absent) for document in gone]
    order = ("verdict", "waiver", "new", "gone", "limit")
    return tuple(sorted(changes, key=lambda item: order.index(item.kind)))


def _kind(old: Document | None, new: Document, compared_fields: Sequence[str]) -> str:
    """Return the kind of change; empty if there is none.

    Older versions did not write the fields `kind`, `user`, `part`, `serial` and `action`. Each of these is compared only if the
    old verdict has it. The waiver and `compared_fields` are always compared.
    """
    if old is None:
        return "new"
    if old["verdict"] != new["verdict"]:
        return "verdict"
    if old.get("waiver") != new.get("waiver"):
        return "waiver"
    known = [key for key in ("kind", "user", "part", "serial", "action") if key in old]
    return "limit" if any(old.get(key) != new.get(key) for key in (*compared_fields, *known)) else ""


def _by_key(verdicts: Iterable[Document]) -> dict[tuple[object, ...], list[Document]]:
    by_key: dict[tuple[object, ...], list[Document]] = {}
    for verdict in verdicts:
        params = tuple(sorted((key, str(value)) for key, value in verdict.get("params", {}).items()))
        by_key.setdefault((*(verdict.get(key, "") for key in _KEY), params), []).append(verdict)
    return by_key


def change_lines(old: Document, report: FleetReport, changes: Sequence[VerdictChange]) -> Iterator[str]:
    """Yield the changes as lines for a terminal."""
    was, now = old["acceptance"]["status"], report.acceptance.status
    yield f"{report.run_id}: {was} → {now}" if was != now else f"{report.run_id}: {now}, unchanged"
    if old["rackproof"] != report.rackproof:
        yield f"(Rackproof {old['rackproof']} wrote the earlier report; this is {report.rackproof}, which may judge differently)"
    if old.get("left_out"):
        yield f"(not compared: {counted(old['left_out'], 'verdict')} that the earlier report leaves out)"
    kinds = Counter(change.kind for change in changes)
    same = len(report.verdicts) - sum(count for kind, count in kinds.items() if kind != "gone")
    words = {
        "verdict": "with another result",
        "waiver": "with a changed waiver",
        "new": "new",
        "gone": "gone",
        "limit": "with different details",
    }
    counts = ", ".join(f"{count} {words[kind]}" for kind, count in kinds.items())
    yield f"{f'verdicts: {counts}' if counts else 'no verdict changed'}; {same} unchanged"
    for change in changes[:MAX_LINES]:
        yield f"{change.kind}: {change}"
    if len(changes) > MAX_LINES:
        yield f"… and {len(changes) - MAX_LINES} more (--json has all)"


def drop_omitted_passes(changes: Iterable[VerdictChange], old: Document) -> tuple[VerdictChange, ...]:
    """Return the changes. If the old report leaves out verdicts, omit new passes: it may have left them out."""
    if not old.get("left_out"):
        return tuple(changes)
    return tuple(item for item in changes if not (item.kind == "new" and item.about["verdict"] == PASS))
