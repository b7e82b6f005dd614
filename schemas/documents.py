"""Read JSON documents strictly, and write them atomically.

The standard library accepts `NaN`, `1e999`, duplicate keys and unlimited nesting. With any of these, a broken record could make
a host accepted. So Rackproof reads every record and plan with `parse`, or with the equally strict reader in `quick`, and
validates it with a JSON Schema.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import itertools
import json
import math
import operator
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from schemas.errors import RackproofError

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

try:
    import jsonschema_rs
except ImportError:  # GPU hosts do not have jsonschema-rs, because they validate few documents
    jsonschema_rs = None  # type: ignore[assignment]
COMPILES = jsonschema_rs is not None
"""Whether schemas can be compiled: jsonschema-rs is installed."""

READABLE, SECRET = 0o644, 0o600
"""Permissions of a written file: readable by everyone, or by its owner only."""
MAX_BYTES = 8_000_000
"""Default limit of the size of a document. A record of 8 GPUs with the profile `standard` has about 0.8 MB, a record of
16 GPUs about 1.5 MB."""
MAX_DEPTH = 12
"""Maximum number of nested levels of a document."""
FORM = "x-form"
"""Keyword next to a `pattern`: the form that the pattern allows, in words that follow "write". Every pattern for files that
operators write has it."""
CONFIDENTIAL = "x-secret"
"""Keyword of a schema whose values must not be in a message. The schemas within it need the keyword too."""
MAX_SHOWN = 150
"""Maximum number of characters of a value or name in a message. A host may send text of any length."""
MAX_NAMES = 10
"""Maximum number of unknown names in a message."""
MAX_FAULTS = 100
"""Maximum number of faults that are reported for the elements of a list, or for the values or names of a mapping."""
_PER_ELEMENT = ("items", "additionalProperties", "propertyNames")
"""Keywords of schemas that are checked for each element. The check of a list or mapping ends after MAX_FAULTS faults."""
_DEVICES = Path("/dev")
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXPONENTIAL = re.compile(r"([0-9]+)(\.[0-9]*)?[eE]([+-]?)([0-9]+)")
_CODES = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""DEL, C1 control characters, line separators and marks of text direction. JSON itself escapes all characters below U+0020."""

Json = Any


class DocumentError(RackproofError, ValueError):
    """A document is unreadable, ambiguous, or belongs to another schema or run."""


def parse(text: str | bytes, *, source: str, max_bytes: int = MAX_BYTES) -> Json:
    """Return the JSON value in `text`.

    Raises:
        DocumentError: the text is larger than `max_bytes`, nested deeper than MAX_DEPTH, not UTF-8 or not JSON; or it has NaN, an
            infinity, an integer of more than 64 bits, a lone surrogate or a duplicate key. The message starts with `source` (a
            path or a host).
    """
    size = len(text)
    if size > max_bytes:
        raise DocumentError(f"{source}: {size} bytes, more than the allowed {max_bytes}")

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        value = dict(pairs)
        if len(value) < len(pairs):
            keys: set[str] = set()
            for key, _ in pairs:
                if key in keys:
                    raise DocumentError(f"{source}: duplicate key {_shown(key)}")
                keys.add(key)
        return value

    def constant(word: str) -> float:
        raise DocumentError(f"{source}: {word} is not JSON")

    try:
        # Decoded here, because json would also accept UTF-16, a BOM and lone surrogates.
        whole = text if isinstance(text, str) else text.decode()
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
    """Raise DocumentError if `value` has more than MAX_DEPTH levels, or an element that is not allowed.

    Not allowed are numbers that are not finite, integers of more than 64 bits, and lone surrogates.
    """
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise DocumentError(f"{source}: nested deeper than {MAX_DEPTH} levels")
        below: list[Json] = []
        for item in level:  # the most frequent types first, because records have hundreds of thousands of items
            if isinstance(item, str):
                if not item.isascii() and _SURROGATE.search(item):
                    raise DocumentError(f"{source}: has half a character (a lone surrogate)")
            elif isinstance(item, dict):
                below.extend(item.values())
                below.extend(key for key in item if not key.isascii())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise DocumentError(f"{source}: has a number that is not finite")
            elif isinstance(item, int) and abs(item) >= 1 << 64:
                raise DocumentError(f"{source}: has a number of more than 64 bits")
        level, depth = below, depth + 1


def read(path: Path, schema: str, *, max_bytes: int = MAX_BYTES) -> Json:
    """Return the document at `path`, validated with schemas/`schema`.schema.json.

    A link, a FIFO or a device is refused, because a host may have created it.

    Raises:
        DocumentError: as in `parse` and `validate`, or the file is missing, unreadable or not a regular file.
    """
    return checked(read_bytes(path, max_bytes=max_bytes), schema, source=str(path), max_bytes=max_bytes)


def checked(text: bytes, schema: str, *, source: str, max_bytes: int = MAX_BYTES) -> Json:
    """Return the document in `text`, validated with schemas/`schema`.schema.json. Raises DocumentError."""
    value = parse(text, source=source, max_bytes=max_bytes)
    validate(value, schema, source=source)
    return value


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file. Raises DocumentError like `read`.

    If the file grows beyond `max_bytes` while it is read, return only `max_bytes` + 1 bytes, which `parse` refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DocumentError(f"{path}: not a regular file")
            if status.st_size > max_bytes:
                raise DocumentError(f"{path}: {status.st_size} bytes, more than the allowed {max_bytes}")
            # Do not pass `max_bytes`: allocating so much memory takes longer than reading a small file.
            content = file.read(status.st_size + 1)
            if len(content) > status.st_size:  # the file has grown
                content += file.read(max_bytes + 1 - len(content))
            return content
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from error


def write(path: Path, value: Json, *, mode: int = READABLE) -> None:
    """Write `value` as JSON atomically: a reader sees either the old or the new file. `mode`: permissions of the file.

    Raises:
        ValueError: `value` has NaN or an infinity.
        OSError: the file could not be written; `path` is unchanged.
    """
    write_text(path, text(value), mode=mode)


def text(value: Json) -> str:
    """Return `value` as JSON text. Raises ValueError if it has NaN or an infinity."""
    return escaped(json.dumps(value, allow_nan=False, ensure_ascii=False, indent=1, default=_plain)) + "\n"


def escaped(text: str) -> str:
    """Return JSON text with _CODES escaped, because a host may send text that controls a terminal or the text direction."""
    if text.isascii() and "\x7f" not in text:
        return text
    return _CODES.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def write_text(path: Path, text: str, *, durable: bool = True, mode: int = READABLE) -> None:
    """Write `text` atomically, through a temporary file in the same directory.

    Args:
        durable: whether the content is synced to the disk before it replaces the file.
        mode: permissions of the file. `SECRET`: only its owner may read it.

    Raises:
        OSError: the file cannot be written; or `path` is a device, a pipe, a socket, or directly in /dev.
    """
    refuse_special(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        name_file(error, path)
        raise


def name_file(error: BaseException, path: Path | str) -> None:
    """Add the path to the error of a failed write if the error names no file. The error of a full disk names none."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


def refuse_special(path: Path) -> None:
    """Raise OSError if `path` is a device, pipe or socket, or directly in /dev. Root could replace /dev/null with a file."""
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    if is_special or path.absolute().parent == _DEVICES:
        raise OSError(errno.EINVAL, "not a regular file, and would be replaced by one", str(path))


def _plain(value: object) -> Json:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def validate(value: Json, schema: str, *, source: str) -> None:
    """Raise DocumentError if `value` does not match the schema.

    Of several faults, the error names a wrong version of the document, or else the fault at the innermost location.
    """
    errors = sorted(faults(value, schema), key=lambda error: (not _of_version(error), -len(error.absolute_path)))
    if errors:
        raise DocumentError(f"{source}: {explain(errors[0])}")


def faults(value: Json, schema: str) -> list[ValidationError]:
    """Return an error for each location at which `value` does not match the schema. Of a list or mapping, see MAX_FAULTS.

    If jsonschema-rs is installed, jsonschema runs only for a value that the compiled schema does not accept.
    """
    with contextlib.suppress(ValueError, OverflowError):  # `is_valid` raises these if the value is not JSON
        if COMPILES and compiled(schema).is_valid(value):
            return []
    return list(validator(schema).iter_errors(value))


def _of_version(error: ValidationError) -> bool:
    return list(error.absolute_path) == ["schema"]


def _version(value: object) -> tuple[str, int]:
    """Return name and number of a schema's version, such as `rackproof.record` and 2."""
    found = re.fullmatch(r"(rackproof\.\w{1,32})/(\d{1,6})", str(value))
    return (found[1], int(found[2])) if found else (str(value), 0)


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "empty",
}
"""Type in a schema -> its name in a message."""


def explain(error: ValidationError) -> str:
    """Return a schema error as a message for the operator, with the nearest valid name for an invalid name.

    Long values are shortened, and secret values are left out.
    """
    where = ".".join(str(step)[:MAX_SHOWN] for step in error.absolute_path) or "the document"
    if is_secret(error) and error.instance is not None:
        wanted = error.schema.get("type") if isinstance(error.schema, dict) else None
        return f"{where}: the value, which is secret and not shown, is not {_KINDS.get(str(wanted), 'valid')}"
    shown = _shown(error.instance)
    if _of_version(error) and error.validator in ("enum", "const"):
        wanted = error.validator_value
        readable = [str(choice) for choice in (wanted if isinstance(wanted, list) else [wanted])]
        name, number = _version(error.instance)
        newest_name, newest = _version(readable[0])
        if name == newest_name and number > newest:
            return f"schema: {shown} is of a newer Rackproof: read it with that version, or upgrade this one"
        return f"schema: {shown}, expected {' or '.join(readable)}"
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        return f"{where}: unknown {_unknown(error.instance, known)}"
    if error.validator == "enum":
        choices = [str(choice) for choice in cast("list[Any]", error.validator_value)]
        return f"{where}: {shown} is not one of {', '.join(choices)}{nearest(str(error.instance), choices)}"
    if error.validator == "const":
        return f"{where}: {shown}, expected {error.validator_value!r}"
    if error.validator == "minLength":
        least = int(str(error.validator_value))
        return f"{where}: {shown} is too short: give {least} character{'s' * (least > 1)} or more"
    if error.validator == "type":
        wanted = [error.validator_value] if isinstance(error.validator_value, str) else error.validator_value
        kinds = " or ".join(_KINDS[str(kind)] for kind in cast("list[Any]", wanted))
        if error.instance is None:
            return f"{where}: no value: give {kinds}"
        return f"{where}: {shown} is not {kinds}{_as_text(where, error)}"
    if error.validator == "pattern" and isinstance(error.schema, dict) and FORM in error.schema:
        return f"{where}: {shown} has the wrong form: write {error.schema[FORM]}"
    if error.validator in ("oneOf", "anyOf"):
        return _explain_alternatives(where, error)
    if error.schema is False:
        return f"{where}: {shown} is not allowed here: remove it"
    message = error.message.replace(repr(error.instance), shown, 1)
    return f"{where}: {message[: 2 * MAX_SHOWN]}{_as_text(where, error)}"


def is_secret(error: ValidationError) -> bool:
    """Return whether the value of the error must not be in a message."""
    return isinstance(error.schema, dict) and error.schema.get(CONFIDENTIAL) is True


def _shown(value: Json) -> str:
    """Return a value for a message: shortened, and without the user name and password of a URL."""
    text = repr(value)
    before, slashes, after = text.partition("//")
    if slashes and "@" in after:
        text = f"{before}//***@{after.rpartition('@')[2]}"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def _unknown(names: Iterable[object], known: Iterable[str]) -> str:
    """Return the names that are not known, shortened, and the known name that is most similar to the first of them."""
    unknown = sorted(set(map(str, names)).difference(known))
    shown = ", ".join(name[:MAX_SHOWN] for name in unknown[:MAX_NAMES])
    more = f" and {len(unknown) - MAX_NAMES} more" if len(unknown) > MAX_NAMES else ""
    return f"{shown}{more}{nearest(unknown[0], known)}"


def _explain_alternatives(where: str, error: ValidationError) -> str:
    """Return the message for a value that does not match exactly one (oneOf) or at least one (anyOf) of several schemas."""
    schemas = cast("list[Any]", error.validator_value)
    keys = [schema["required"][0] for schema in schemas if [*schema] == ["required"]]
    if len(keys) == len(schemas):
        given = [key for key in keys if isinstance(error.instance, dict) and key in error.instance]
        if given:
            return f"{where}: has {' and '.join(given)}: keep only one of them"
        number = "one" if error.validator == "oneOf" else "at least one"
        return f"{where}: has none of {', '.join(keys)}: add {number} of them"
    # A schema of another type than the value says nothing about what is wrong with it.
    context = error.context or []
    others = {item.schema_path[0] for item in context if not item.path and item.validator in ("type", "enum", "const")}
    if alike := [item for item in context if item.schema_path[0] not in others]:
        return explain(max(alike, key=lambda item: len(item.path)))
    wanted = [str(word) for schema in schemas for word in schema.get("enum", [_kind(schema)])]
    return f"{where}: {_shown(error.instance)} is not {' or '.join(wanted)}{nearest(str(error.instance), wanted)}"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the name of the type that a schema asks for; for a mapping, also its keys."""
    keys = ", ".join(schema.get("properties", {}))
    return f"{_KINDS.get(str(schema.get('type')), 'another value')}{f' of {keys}' if keys else ''}"


def _as_text(where: str, error: ValidationError) -> str:
    """Return the remedy for a scalar of the wrong type, such as 8.0 in place of a whole number, or text in place of a flag."""
    wanted, text = error.validator_value, error.instance
    if error.validator == "type" and wanted == "string" and isinstance(text, bool | int | float):
        return ": write it in quotes"
    if wanted == "integer" and isinstance(text, float) and text.is_integer():
        return f": write {text:.0f}"
    if error.validator != "type" or not isinstance(text, str) or wanted not in ("integer", "number", "boolean"):
        return ""
    if len(text) > MAX_SHOWN:
        return ""
    name = where.rpartition(".")[2]
    if text.lower() in ("true", "false") or text.isdecimal():
        return f": -e {name}={text} passes text; use -e '{{\"{name}\": {text.lower()}}}', or remove the quotes in YAML"
    number = number_for_yaml(text)
    return f": YAML reads it as text; write {number}" if number else ""


def number_for_yaml(text: str) -> str:
    """Rewrite a number such as 4e12, which YAML reads as text, so that YAML reads it as a number: `4.0e+12`.

    Return an empty string for any other text.
    """
    if number := _EXPONENTIAL.fullmatch(text):
        # YAML 1.1 needs both a dot and a sign.
        return f"{number[1]}{number[2] or '.0'}e{number[3] or '+'}{number[4]}"
    return ""


VERY_SIMILAR = 0.85
"""Lowest similarity (0 to 1) at which a word counts as the right word with one or two typing errors."""
MAX_SUGGESTIONS = 6
"""Maximum number of suggested words that begin with the wrong word or share a part with it."""


def nearest(word: str, known: Iterable[str], *, same_letters: bool = False) -> str:
    """Return ` (did you mean …?)`, or an empty string if no known word is similar; case is ignored.

    A word's parts are separated by `-`, `_` or other punctuation. The first of these that exists is suggested:

    * All known words that begin with the word, or have all of its parts (for `h200`: h200-nvl, h200-sxm).
    * All known words whose first part is one of the word's parts (for `nvidia-h200`: h200-nvl, h200-sxm), unless a known word
      is very similar.
    * The most similar known word. This word is suggested instead if more than MAX_SUGGESTIONS words fit one of the rules above.
      With `same_letters`, its letters before the first digit must be those of the word, because `gh200` and `h200` are
      different hardware.
    """
    if len(word) > MAX_SHOWN:  # no known word is as long, and comparing long words takes long
        return ""
    names, folded = {name.casefold(): name for name in known}, word.casefold()
    parts = set(_parts(folded))
    longer = [name for name in names if name.startswith(folded)] if parts else []
    longer = longer or [name for name in names if len(parts) > 1 and parts <= set(_parts(name))]
    similar = [name for name in names if not same_letters or _letters(name) == _letters(folded)]
    close = difflib.get_close_matches(folded, similar)
    if not longer and len(parts) > 1 and (not close or _likeness(folded, close[0]) < VERY_SIMILAR):
        distinctive = {part for part in parts if len(part) > 2}
        longer = [name for name in names if distinctive.intersection(_parts(name)[:1])]
    if 0 < len(longer) <= MAX_SUGGESTIONS:
        *most, last = [names[name] for name in longer]
        return f" (did you mean {', '.join(most)}{' or ' if most else ''}{last}?)"
    # Among equally similar words, prefer one with the same last letter: `gte` is ge, not gt.
    best = max(close, key=lambda name: (_likeness(folded, name), name[-1:] == folded[-1:]), default="")
    return f" (did you mean {names[best]}?)" if close else ""


def _letters(name: str) -> str:
    """Return the letters before the first digit."""
    return name[: next((index for index, character in enumerate(name) if character.isdigit()), len(name))]


def _parts(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name)


def _likeness(word: str, other: str) -> float:
    """Return the ratio by which difflib.get_close_matches sorts."""
    return difflib.SequenceMatcher(None, other, word).ratio()


@cache
def compiled(schema: str) -> Any:
    """Return the compiled validator of schemas/`schema`.schema.json, or of a part of it (`record#/$defs/gpu`).

    Needs jsonschema-rs.
    """
    return jsonschema_rs.Draft202012Validator(_marked(part(*schema.split("#/"))), keywords={"whole": _Whole})


class _Whole:
    """The schema keyword `whole`, which rejects 2.0. It is needed because jsonschema-rs accepts 2.0 as an integer."""

    def __init__(self, *_: object) -> None: ...

    def validate(self, instance: Json) -> None:
        if isinstance(instance, float):
            raise ValueError("no integer")  # jsonschema-rs expects a ValueError


def _marked(node: Json) -> Json:
    """Return the schema with `whole` added to every `"type": "integer"`."""
    if isinstance(node, list):
        return [_marked(item) for item in node]
    if not isinstance(node, dict):
        return node
    whole = "integer" in node["type"] if isinstance(node.get("type"), str | list) else False
    return {key: _marked(item) for key, item in node.items()} | ({"whole": True} if whole else {})


@cache
def validator(schema: str) -> Draft202012Validator:
    """Return the jsonschema validator of schemas/`schema`.schema.json, or of a part of it. It rejects 2.0 as an integer."""
    from jsonschema import Draft202012Validator, validators  # imported here, because the import is slow

    extend: Any = validators.extend  # jsonschema declares no types for `extend`
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    bounded = {keyword: _bounded(Draft202012Validator.VALIDATORS[keyword]) for keyword in _PER_ELEMENT}
    return cast(
        "Draft202012Validator", extend(Draft202012Validator, bounded, type_checker=checker)(part(*schema.split("#/")))
    )


def _bounded(check: Callable[..., Iterable[ValidationError]]) -> Callable[..., Iterable[ValidationError]]:
    """Return `check`, the implementation of a keyword in jsonschema, ended after MAX_FAULTS errors."""
    return lambda *arguments: itertools.islice(check(*arguments), MAX_FAULTS)


def part(name: str, pointer: str = "") -> Json:
    """Return the part of schemas/`name`.schema.json at `pointer`, such as `$defs/gpu`, with its references resolved."""
    return _inlined(functools.reduce(operator.getitem, pointer.split("/") if pointer else [], _schema(name)), name)


@cache
def _schema(name: str) -> Json:
    return json.loads((Path(__file__).parent / f"{name}.schema.json").read_text(encoding="utf-8"))


def _inlined(node: Json, name: str) -> Json:
    """Return a part of schemas/`name`.schema.json with its references resolved: jsonschema is then twice as fast.

    References must not be recursive, and must not have sibling keywords other than a description.
    """
    if isinstance(node, list):
        return [_inlined(item, name) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" not in node:
        return {key: _inlined(item, name) for key, item in node.items()}
    if siblings := node.keys() - {"$ref", "description"}:
        raise ValueError(f"{name}.schema.json: {', '.join(sorted(siblings))} next to a $ref would be lost")
    file, _, pointer = node["$ref"].partition("#/")
    return {"description": node.get("description", "")} | part(file.removesuffix(".schema.json") or name, pointer)
