"""Read thousands of records quickly, with compiled schemas and with caches of the parts that many hosts have in common.

`documents` and jsonschema decide which records are valid. This reader accepts a record only if `documents` accepts it
with the same result; a fuzz test compares the two. In every other case the reader returns `None`, and the caller must use
`documents`, which has the error messages. Without msgspec and jsonschema-rs, which only the control node has, the reader always
returns `None`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from schemas import documents
from schemas.decode import record_from_parts
from schemas.documents import MAX_BYTES, compiled, part
from schemas.records import Metric, Observation, Record, Samples, instance_of
from schemas.semantic_validation import metric_problem, observation_problem, record_problem, scope_problem

try:
    import msgspec
except ImportError:  # it is not installed on GPU hosts, which read only their own records
    msgspec = None  # type: ignore[assignment]

_METRIC = "record#/$defs/snapshot/properties/metrics/items"
MAX_CACHED = 5_000
"""Maximum number of entries of a cache. Hosts may send any number of different texts, so a full cache is replaced."""

_Key = TypeVar("_Key")
_Entry = TypeVar("_Entry")

_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else 32 for byte in range(256))
_LONG = b"0" * 20
_LONG_NUMBER = re.compile(rb"[\s:,[-][0-9]{20}")
"""The first 20 digits of a JSON number and the character before them. Digits within a word, such as a nonce, do not match."""


def available() -> bool:
    """Return whether msgspec and jsonschema-rs are installed."""
    return msgspec is not None and documents.COMPILES


def text(value: documents.Json) -> str:
    """Return a large document as JSON text, like `documents.text`, but numbers may be formatted differently."""
    if not available():
        return documents.text(value)
    encoded: bytes = msgspec.json.format(msgspec.json.encode(value), indent=1)
    return documents.escaped(encoded.decode()) + "\n"


class Reader:
    """Reads the records of one run. Equal metrics become the same object, and observations share equal fields."""

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[Metric, int]] = {}
        self._older: dict[bytes, tuple[Metric, int]] = {}
        """The previous cache. A metric in it that a host sends again moves to the new cache and keeps its token
        (`Metric.token`, the number by which equal metrics are recognized)."""
        self._heads: dict[tuple[Any, ...], dict[str, Any]] = {}
        """All fields of an observation except scope, value, reason and samples -> these fields, validated."""
        self._scopes: dict[str, str] = {}
        self._tokens = 0
        if available():
            self._decode = msgspec.json.Decoder(_frame())
            limits = part("observation", "properties")
            self._longest_reason = int(limits["reason"]["maxLength"])
            self._longest_value = int(part("observation", "$defs/measured")["maxLength"])
            self._most_observations = int(part("record", "properties/observations")["maxItems"])
            metrics = part("record", "$defs/snapshot/properties/metrics")
            self._absent = re.compile(metrics["items"]["properties"]["absent"]["additionalProperties"]["pattern"])
            self._most_metrics = int(metrics["maxItems"])

    def record(self, text: bytes, *, is_checked: bool = False) -> Record | None:
        """Return the record in `text`; None if `documents` must decide. `is_checked`: a reader accepted these bytes before."""
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
            raws = list(map(bytes, taken.metrics))
            # `_metric` may replace `self._kept`, so `self._kept` is read again for each metric.
            entries = [self._kept.get(raw) or self._metric(raw, is_checked) for raw in raws]
            if None in entries:
                return None
            metrics, numbers = zip(*entries, strict=True) if entries else ((), ())
            colons += sum(numbers)
            snapshots.append((_without(taken), metrics))
        items = document.get("observations", ())
        whole = document | {"snapshots": [taken for taken, _ in snapshots]} if snapshots else document
        outer = whole | {"observations": []} if items else whole
        if not is_checked:
            if len(items) > self._most_observations or not compiled("record").is_valid(outer):
                return None
            # The decoder keeps only one value of a duplicate key. The encoded content then has fewer colons than `text`.
            encoded = msgspec.json.encode(whole)
            if encoded.count(b":") + colons != text.count(b":") or _has_long_number(encoded):
                return None
        observations = self._observations(items)
        if observations is None:
            return None
        record = record_from_parts(outer, snapshots, observations)
        return None if not is_checked and record_problem(record, checks_figures_only=True) else record

    def _observations(self, items: Iterable[Any]) -> list[Observation] | None:
        """Return the observations; None if one is invalid. Fields that are equal in several observations are validated once."""
        observations = []
        heads, scopes, unset = self._heads, self._scopes, msgspec.UNSET
        for item in items:
            value, reason, params = item.value, item.reason, item.params
            raw = b"" if params is unset else bytes(params)
            key = (item.name, item.stage, item.unit, item.status, raw, value is unset, reason is unset)
            head = heads.get(key) or self._head(key, item, raw)
            scope = scopes.get(item.scope) or self._scope(item.scope)
            if head is None or scope is None:
                return None
            own = head.copy()
            own["scope"] = scope
            if value is not unset:
                if value.__class__ is str and len(value) > self._longest_value:
                    return None
                own["value"] = value
            if reason is not unset:
                if not 0 < len(reason) <= self._longest_reason:
                    return None
                own["reason"] = reason
            if item.samples is not unset:
                own["samples"] = instance_of(Samples, msgspec.structs.asdict(item.samples))
            observations.append(instance_of(Observation, own))
        return observations

    def _head(self, key: tuple[Any, ...], item: Any, raw: bytes) -> dict[str, Any] | None:
        """Return the fields of an observation except its scope, value, reason and samples, with a new token.

        Return None if `documents` must decide.
        """
        document = msgspec.json.decode(msgspec.json.encode(item))
        params = document.setdefault("params", {})
        if not compiled("observation").is_valid(document):
            return None
        if msgspec.json.encode(params).count(b":") != raw.count(b":"):  # a duplicate key
            return None
        if observation_problem(item.name, params):
            return None
        self._tokens += 1
        common = {name: document[name] for name in ("name", "stage", "unit", "status", "params")}
        head = {**common, "value": None, "reason": "", "samples": None, "token": self._tokens}
        return _cache(self._heads, key, head)

    def _scope(self, text: str) -> str | None:
        """Return the scope; None if it is not valid. Equal scopes become the same object."""
        if not compiled("observation#/$defs/scope").is_valid(text) or scope_problem(text):
            return None
        return _cache(self._scopes, text, text)

    def _metric(self, raw: bytes, is_checked: bool) -> tuple[Metric, int] | None:
        """Return a metric that is not in the cache, and its number of colons; None if `documents` must decide."""
        if known := self._older.get(raw):
            return self._keep(raw, known)
        document = msgspec.json.decode(raw)
        if not is_checked and not self._is_valid_metric(document, raw):
            return None
        metric = Metric(**document)
        if not is_checked and metric_problem(metric):
            return None
        self._tokens += 1
        vars(metric)["token"] = self._tokens  # a token is never reused
        return self._keep(raw, (metric, raw.count(b":")))

    def _keep(self, raw: bytes, entry: tuple[Metric, int]) -> tuple[Metric, int]:
        if len(self._kept) >= MAX_CACHED:
            self._older, self._kept = self._kept, {}
        self._kept[raw] = entry
        return entry

    def _is_valid_metric(self, document: Any, raw: bytes) -> bool:
        if not compiled(_METRIC).is_valid(document) or _has_long_number(raw):
            return False
        # Search with Python's `re` too, because Rust's regular expressions may match differently.
        if not all(map(self._absent.search, document.get("absent", {}).values())):
            return False
        colons: int = msgspec.json.encode(document).count(b":")
        return colons == raw.count(b":")


def _cache(cache: dict[_Key, _Entry], key: _Key, entry: _Entry) -> _Entry:
    """Add an entry to a cache, which is cleared when it is full, and return the entry."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = entry
    return entry


def _is_suspicious(text: bytes) -> bool:
    """Return whether the text is too large, or may have an escaped colon."""
    return len(text) > MAX_BYTES or (b"\\" in text and b"\\u003" in text)  # the search for one byte is fast


def _has_long_number(text: bytes) -> bool:
    """Return whether the text may have a number of more than 64 bits, which `documents` refuses."""
    # The test of the translated digits is fast and excludes most texts.
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
    """Return a struct type of a record, made from its schema. Metrics and parameters are not decoded."""
    names = part("record", "properties")
    taken = part("record", "$defs/snapshot/properties")
    snapshot = msgspec.defstruct(
        "Snapshot",
        [(name, list[msgspec.Raw] if name == "metrics" else Any) for name in taken],
        forbid_unknown_fields=True,
    )
    types = {"snapshots": list[snapshot], "observations": list[_observation()]}  # type: ignore[misc, valid-type]
    fields = [(name, types.get(name, Any) | msgspec.UnsetType, msgspec.UNSET) for name in names]
    return msgspec.defstruct("Frame", fields, forbid_unknown_fields=True)


def _observation() -> Any:
    """Return a struct type of an observation. `Reader._observations` checks what the types do not."""
    number = float | int
    not_negative = Annotated[float, msgspec.Meta(ge=0)] | Annotated[int, msgspec.Meta(ge=0)]
    samples = msgspec.defstruct(
        "Samples",
        [
            ("n", Annotated[int, msgspec.Meta(ge=1)]),
            *((name, number) for name in ("min", "p50", "max")),
            ("cv", not_negative),
            ("precision", not_negative, None),
            ("stopped", Literal["precision", "time"], ""),
        ],
        forbid_unknown_fields=True,
        omit_defaults=True,
    )
    types = {
        "value": float | int | bool | str,
        "params": msgspec.Raw,
        "samples": samples,
    }
    required = part("observation", "required")
    fields = [
        (name, types.get(name, str))
        if name in required
        else (name, types.get(name, str) | msgspec.UnsetType, msgspec.UNSET)
        for name in part("observation", "properties")
    ]
    return msgspec.defstruct("Observation", fields, forbid_unknown_fields=True)
