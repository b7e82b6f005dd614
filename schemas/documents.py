"""Reading and writing JSON documents so that nothing ambiguous gets in and nothing partial gets out.

The standard library takes `NaN`, `1e999`, duplicate keys and bottomless nesting without a word, and each of them can turn
a broken record into an accepted host. Everything that Rackproof reads goes through `parse` and a JSON Schema.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import operator
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from schemas.errors import RackproofError

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

try:
    import jsonschema_rs
except ImportError:  # a GPU host checks few documents
    jsonschema_rs = None  # type: ignore[assignment]
COMPILES = jsonschema_rs is not None

MAX_BYTES = 8_000_000
"""A host record of 8 GPUs under `standard` is about 0.8 MB, one of 16 about 1.5 MB; what is far more is not one of ours."""
MAX_DEPTH = 12
_SURROGATE = re.compile("[\ud800-\udfff]")

Json = Any


class DocumentError(RackproofError, ValueError):
    """A document that cannot be trusted: unreadable, ambiguous, of another schema or another run."""


def parse(text: str | bytes, *, source: str, max_bytes: int = MAX_BYTES) -> Json:
    """The JSON value in `text`.

    Raises:
        DocumentError: it is larger than `max_bytes`, nested deeper than MAX_DEPTH, not JSON, or holds NaN, an infinity or
            the same key twice. `source` (a path or a host) opens the message.
    """
    size = len(text)
    if size > max_bytes:
        raise DocumentError(f"{source}: {size} bytes, more than the {max_bytes} that a record may have")

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:i]))
            raise DocumentError(f"{source}: the key {twice!r} stands twice in one object")
        return found

    def constant(word: str) -> float:
        raise DocumentError(f"{source}: {word} is not JSON")

    try:
        whole = text if isinstance(text, str) else text.decode()  # or json would take UTF-16, a BOM and lone surrogates
        value = json.loads(whole, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise DocumentError(f"{source}: nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        if not whole.strip():
            raise DocumentError(f"{source}: empty, which is not JSON") from None
        raise DocumentError(
            f"{source}: not JSON at offset {error.pos} of {size}: {error.msg.removesuffix(' starting at')}"
        ) from None
    except UnicodeDecodeError as error:
        raise DocumentError(f"{source}: not UTF-8 at offset {error.start}") from None
    except ValueError as error:
        raise error if isinstance(error, DocumentError) else DocumentError(f"{source}: {error}") from None
    refuse_unbounded(value, source=source)
    return value


def refuse_unbounded(value: Json, *, source: str) -> None:
    """Raises DocumentError where `value` holds a number that is not finite, half a character, or nests deeper than MAX_DEPTH."""
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise DocumentError(f"{source}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, float) and not math.isfinite(item):
            raise DocumentError(f"{source}: holds a number that is not finite")
        if isinstance(item, int) and abs(item) >= 1 << 64:
            raise DocumentError(f"{source}: holds a number of more than 64 bits")
        if isinstance(item, str) and not item.isascii() and _SURROGATE.search(item):
            raise DocumentError(f"{source}: holds half a character (a lone surrogate), which is no text")
        if isinstance(item, dict):
            pending.extend((child, depth + 1) for child in item.values())
            pending.extend((key, depth + 1) for key in item if not key.isascii())
        elif isinstance(item, list):
            pending.extend((child, depth + 1) for child in item)


def read(path: Path, schema: str, *, max_bytes: int = MAX_BYTES) -> Json:
    """The document at `path`, checked against schemas/`schema`.schema.json.

    A link, a FIFO or a device is refused unopened: a host may have put it there.

    Raises:
        DocumentError: as `parse` and `validate`; also where the file is missing, unreadable or not a regular file.
    """
    return checked(read_bytes(path, max_bytes=max_bytes), schema, source=str(path), max_bytes=max_bytes)


def checked(text: bytes, schema: str, *, source: str, max_bytes: int = MAX_BYTES) -> Json:
    """The document in `text`, checked against schemas/`schema`.schema.json. Raises DocumentError as `parse` and `validate`."""
    value = parse(text, source=source, max_bytes=max_bytes)
    validate(value, schema, source=source)
    return value


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """What stands in a regular file; one byte more than `max_bytes` of it at most. Raises DocumentError as `read`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            there = os.fstat(descriptor)
            if not stat.S_ISREG(there.st_mode):
                raise DocumentError(f"{path}: not a regular file")
            if there.st_size > max_bytes:
                raise DocumentError(f"{path}: {there.st_size} bytes, more than the {max_bytes} that it may have")
            return file.read(max_bytes + 1 if max_bytes <= MAX_BYTES else there.st_size + 1)
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from error


def write(path: Path, value: Json) -> None:
    """Writes `value` as JSON in one step: a reader sees the old file or the new one, never a part.

    Raises:
        ValueError: `value` holds NaN or an infinity.
        OSError: the file system refused; `path` is as it was.
    """
    write_text(path, text(value))


def text(value: Json) -> str:
    """`value` as we write JSON. Raises ValueError where it holds NaN or an infinity."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=1, default=_plain) + "\n"


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes `text` in one step, through a temporary file beside `path`; `durable`: it survives a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plain(value: object) -> Json:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def validate(value: Json, schema: str, *, source: str) -> None:
    """Raises DocumentError naming the innermost place where `value` is not what the schema says."""
    errors = sorted(faults(value, schema), key=lambda error: -len(error.absolute_path))
    if errors:
        raise DocumentError(f"{source}: {explain(errors[0])}")


def faults(value: Json, schema: str) -> list[ValidationError]:
    """Everything in which `value` is not what the schema says.

    jsonschema has the word. What the compiled schema accepts, where there is one, jsonschema accepts too, and is not asked.
    """
    with contextlib.suppress(ValueError, OverflowError):  # of what is no JSON
        if COMPILES and compiled(schema).is_valid(value):
            return []
    return list(validator(schema).iter_errors(value))


def explain(error: ValidationError) -> str:
    """A schema error in a user's words, with the nearest valid name where a name is wrong."""
    where = ".".join(str(step) for step in error.absolute_path) or "the document"
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        unknown = sorted(str(key) for key in error.instance if key not in known)
        return f"{where}: unknown {', '.join(unknown)}{nearest(unknown[0], known)}"
    if error.validator == "enum":
        choices = [str(choice) for choice in cast("list[Any]", error.validator_value)]
        return f"{where}: {error.instance!r} is not one of {', '.join(choices)}{nearest(str(error.instance), choices)}"
    if error.validator == "const":
        return f"{where}: {error.instance!r} where {error.validator_value!r} is expected"
    if error.validator == "minLength":
        least = int(str(error.validator_value))
        return f"{where}: {error.instance!r} is too short: give {least} character{'s' * (least > 1)} or more"
    about = str(error.schema.get("description", "")) if isinstance(error.schema, dict) else ""
    if error.validator == "pattern" and about:
        return f"{where}: {error.instance!r}: {about}"
    return f"{where}: {error.message[:200]}{_as_text(where, error)}"


def _as_text(where: str, error: ValidationError) -> str:
    """What to do where a number or a flag came as text: by `-e name=value`, or in YAML's eyes."""
    wanted, text = error.validator_value, error.instance
    if wanted == "integer" and isinstance(text, float) and text.is_integer():
        return f": write {text:.0f}"
    if error.validator != "type" or not isinstance(text, str) or wanted not in ("integer", "number", "boolean"):
        return ""
    name = where.rpartition(".")[2]
    if text.lower() in ("true", "false") or text.isdecimal():
        return (
            f": what -e {name}={text} gives is text; give -e '{{\"{name}\": {text.lower()}}}', or leave the quotes out"
        )
    if re.fullmatch(r"[0-9.]+e[0-9]+", text):
        return f": YAML takes it for text; write {text.replace('e', 'e+')}"
    return ""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing where no known word is near; capitals are no difference."""
    there, folded = {name.casefold(): name for name in known}, word.casefold()
    close = difflib.get_close_matches(folded, there)
    # Of several that are as near the one that also ends so: `gte` is ge, not gt.
    best = max(close, key=lambda name: (_likeness(folded, name), name[-1:] == folded[-1:]), default="")
    return f" (did you mean {there[best]}?)" if close else ""


def _likeness(word: str, other: str) -> float:
    """As difflib.get_close_matches sorts by it."""
    return difflib.SequenceMatcher(None, other, word).ratio()


@cache
def compiled(schema: str) -> Any:
    """The compiled validator of schemas/`schema`.schema.json, or of a part of it (`record#/$defs/gpu`).

    Only where jsonschema-rs is installed.
    """
    return jsonschema_rs.Draft202012Validator(_marked(part(*schema.split("#/"))), keywords={"whole": _Whole})


class _Whole:
    """The keyword `whole` of jsonschema-rs, which takes 2.0 for an integer."""

    def __init__(self, *_: object) -> None: ...

    def validate(self, instance: Json) -> None:
        if isinstance(instance, float):
            raise ValueError("no integer")  # what jsonschema-rs asks for


def _marked(node: Json) -> Json:
    """The schema with `whole` beside every `"type": "integer"`."""
    if isinstance(node, list):
        return [_marked(item) for item in node]
    if not isinstance(node, dict):
        return node
    whole = "integer" in node["type"] if isinstance(node.get("type"), str | list) else False
    return {key: _marked(item) for key, item in node.items()} | ({"whole": True} if whole else {})


@cache
def validator(schema: str) -> Draft202012Validator:
    """jsonschema's validator of schemas/`schema`.schema.json, built once; to it 2.0, which names no GPU, is no integer."""
    from jsonschema import Draft202012Validator, validators  # takes as long to import as the rest of most commands

    extend: Any = validators.extend  # it has no types
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return cast("Draft202012Validator", extend(Draft202012Validator, type_checker=checker)(part(schema)))


def part(name: str, place: str = "") -> Json:
    """What stands at `place` of schemas/`name`.schema.json, such as `$defs/gpu`, with all that it refers to."""
    return _inlined(functools.reduce(operator.getitem, place.split("/") if place else [], _schema(name)), name)


@cache
def _schema(name: str) -> Json:
    return json.loads((Path(__file__).parent / f"{name}.schema.json").read_text(encoding="utf-8"))


def _inlined(node: Json, name: str) -> Json:
    """A part of schemas/`name`.schema.json with what it refers to in its place: jsonschema takes half of its time to look
    references up. They come with a description at most, and none leads back to itself.
    """
    if isinstance(node, list):
        return [_inlined(item, name) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" not in node:
        return {key: _inlined(item, name) for key, item in node.items()}
    if beside := node.keys() - {"$ref", "description"}:
        raise ValueError(f"{name}.schema.json: {', '.join(sorted(beside))} beside a $ref would be lost")
    file, _, place = node["$ref"].partition("#/")
    return {"description": node.get("description", "")} | part(file.removesuffix(".schema.json") or name, place)
