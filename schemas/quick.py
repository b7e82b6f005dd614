"""Read thousands of records quickly: with compiled schemas, and with a cache of metrics that many hosts share.

`documents` and jsonschema are the authority. A record that this reader accepts, they accept with the same result; a fuzz test
compares them. For any record that is not plainly valid the reader returns `None`; the caller then uses the authority, which
has the error messages. Without msgspec and jsonschema-rs, which only the control node has, the reader always returns `None`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from schemas import documents
from schemas.decode import record_from_parts
from schemas.documents import MAX_BYTES, compiled, part
from schemas.records import Metric, Record
from schemas.semantic_validation import metric_problem, record_problem

try:
    import msgspec
except ImportError:  # a GPU host reads no records but its own
    msgspec = None  # type: ignore[assignment]

_METRIC = "record#/$defs/snapshot/properties/metrics/items"
_OBSERVATIONS = "record#/properties/observations"
MAX_CACHED_METRICS = 100_000
"""Number of different metrics that are cached. Then the cache is cleared, since hosts may send any number."""


_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else 32 for byte in range(256))
_LONG = b"0" * 20
_LONG_NUMBER = re.compile(rb"[\s:,[-][0-9]{20}")
"""A JSON number of 20 digits, with the character before it. Digits in a string do not match: some nonces have 20 in a row."""


def available() -> bool:
    """Return whether msgspec and jsonschema-rs are installed."""
    return msgspec is not None and documents.COMPILES


def text(value: documents.Json) -> str:
    """Return a large document as JSON text, as `documents.text` does; numbers may be formatted differently."""
    if not available():
        return documents.text(value)
    encoded: bytes = msgspec.json.format(msgspec.json.encode(value), indent=1)
    return documents.escaped(encoded.decode()) + "\n"


class Reader:
    """Reads records of one run. Metrics with the same bytes are the same object."""

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[Metric, int]] = {}
        self._tokens = 0
        if available():
            self._decode = msgspec.json.Decoder(_frame())
            metrics = part("record", "$defs/snapshot/properties/metrics")
            self._absent = re.compile(metrics["items"]["properties"]["absent"]["additionalProperties"]["pattern"])
            self._most_metrics = int(metrics["maxItems"])

    def record(self, text: bytes, *, is_checked: bool = False) -> Record | None:
        """Return the record in `text`; None if the authority must decide. `is_checked`: a reader accepted these bytes before."""
        if not available() or (not is_checked and _is_suspicious(text)):
            return None
        try:
            return self._record(text, is_checked)
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, ValueError, RecursionError):
            return None

    def _record(self, text: bytes, is_checked: bool) -> Record | None:
        frame = self._decode.decode(text)
        document = {name: value for name in frame.__struct_fields__ if (value := getattr(frame, name)) is not _unset()}
        colons = 0
        snapshots = []
        for taken in document.get("snapshots", ()):
            if len(taken.metrics) > self._most_metrics:
                return None
            metrics = []
            for raw in taken.metrics:
                known = self._kept.get(bytes(raw)) or self._metric(bytes(raw), is_checked)
                if known is None:
                    return None
                metrics.append(known[0])
                colons += known[1]
            snapshots.append((_without(taken), tuple(metrics)))
        observations = document.get("observations", ())
        whole = document | {"snapshots": [taken for taken, _ in snapshots]} if snapshots else document
        outer = whole | {"observations": []} if observations else whole
        if is_checked:
            return record_from_parts(outer, snapshots, observations)
        if not compiled("record").is_valid(outer) or not compiled(_OBSERVATIONS).is_valid(list(observations)):
            return None
        # Every colon of the text is in what was decoded: no key is duplicate, or one of its two values would be lost.
        if msgspec.json.encode(whole).count(b":") + colons != text.count(b":"):
            return None
        record = record_from_parts(outer, snapshots, observations)
        return None if record_problem(record) else record

    def _metric(self, raw: bytes, is_checked: bool) -> tuple[Metric, int] | None:
        document = msgspec.json.decode(raw)
        if not is_checked and not self._is_valid_metric(document, raw):
            return None
        if len(self._kept) >= MAX_CACHED_METRICS:
            self._kept.clear()
        metric = Metric(**document)
        if not is_checked and metric_problem(metric):
            return None
        self._tokens += 1
        vars(metric)["token"] = self._tokens  # a number is never reused
        kept = self._kept[raw] = (metric, raw.count(b":"))
        return kept

    def _is_valid_metric(self, document: Any, raw: bytes) -> bool:
        if not compiled(_METRIC).is_valid(document):
            return False
        if not all(map(self._absent.search, document.get("absent", {}).values())):  # two regular expressions disagree
            return False
        colons: int = msgspec.json.encode(document).count(b":")
        return colons == raw.count(b":")


def _is_suspicious(text: bytes) -> bool:
    """Return whether the text is too large, or may hold an escaped colon or a number of more than 64 bits."""
    if len(text) > MAX_BYTES or b"\\u003" in text:
        return True
    # The first search is the faster one.
    return _LONG in text.translate(_DIGITS) and _LONG_NUMBER.search(text) is not None


def _without(taken: Any) -> dict[str, Any]:
    """Return a snapshot without its metrics."""
    return {
        "stage": taken.stage,
        "phase": taken.phase,
        "at": taken.at,
        "duration_s": taken.duration_s,
        "metrics": [],
    }


def _unset() -> Any:
    return msgspec.UNSET


@cache
def _frame() -> Any:
    """Return a struct type of a record, made from its schema. Only metrics in snapshots stay undecoded."""
    names = part("record", "properties")
    taken = part("record", "$defs/snapshot/properties")
    snapshot = msgspec.defstruct(
        "Snapshot",
        [(name, list[msgspec.Raw] if name == "metrics" else Any) for name in taken],
        forbid_unknown_fields=True,
    )
    types = {"snapshots": list[snapshot], "observations": list[Any]}  # type: ignore[valid-type]
    fields = [(name, types.get(name, Any) | msgspec.UnsetType, msgspec.UNSET) for name in names]
    return msgspec.defstruct("Frame", fields, forbid_unknown_fields=True)
