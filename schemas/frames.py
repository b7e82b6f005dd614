"""Write records as log lines, and read them back from a log. Used for hosts that the control node cannot reach.

A record is compressed and split into parts, one per line. Each line has the host, the number of the part, the number of parts
and the checksum of the record. A line has at most 4096 bytes, because a pipe with several writers mixes longer lines. Only a line
with long names that are not ASCII may be longer: up to 16 KiB, at which container runtimes split lines. mpirun and srun may mix
lines of any length if several hosts print at once, so under them one host must print after the other.
Text before a part (a time, a pod name, a rank) is ignored, as is Docker's JSON around a line. Missing or changed parts are
reported.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from schemas import documents

MARK = "RACKPROOF-RECORD/1 "
LINE_BYTES = 4096
"""PIPE_BUF of Linux: the largest atomic write to a pipe."""
MOST_BYTES = 4 * LINE_BYTES
"""Maximum size of a line that is read. Names may need 12 KB of it, because JSON escapes a character that is not ASCII as six or
twelve bytes."""
DATA_BYTES, LEAST_BYTES = 3000, 500
"""Maximum and minimum number of bytes of the encoded record in each line except the last, which has the rest."""
MOST_PARTS = 20_000
"""Maximum number of parts of one record: 60 MB of base64, far more than a record may have."""
TEXTS = {"run_id": 256, "host": 253, "gang": 256, "node": 253, "sha256": 64}
"""Text fields of a line, and the maximum number of characters of each."""


@dataclass(frozen=True, kw_only=True)
class FramedRecord:
    """The text of a record, from the lines of a log or from a file, and whose record it is. The text is not validated."""

    run_id: str
    host: str
    gang: str
    """Gang (the hosts of one multi-node launch) whose launches the record has; empty: the record of the host alone."""
    node: str
    """Name of the machine in the cluster; empty if not reported."""
    text: bytes
    """The record, byte for byte as on the host."""
    source: str

    @property
    def sha256(self) -> str:
        """Return the checksum of the text."""
        return hashlib.sha256(self.text).hexdigest()


def lines(text: bytes, *, run_id: str, host: str, gang: str = "", node: str = "") -> Iterator[str]:
    """Yield the log lines that contain the record `text`."""
    data = base64.b64encode(gzip.compress(text, mtime=0)).decode()
    digest = hashlib.sha256(text).hexdigest()

    def line(number: int, count: int, part: str) -> str:
        frame = {
            "run_id": run_id,
            "host": host,
            "gang": gang,
            "node": node,
            "part": number,
            "parts": count,
            "bytes": len(text),
            "sha256": digest,
            "crc32": _check(digest, number, part),
            "data": part,
        }
        return MARK + json.dumps(frame, separators=(",", ":"))

    # With long names that are not ASCII, a line may be longer than an atomic write.
    size = max(LEAST_BYTES, min(DATA_BYTES, LINE_BYTES - len("\n") - len(line(MOST_PARTS, MOST_PARTS, ""))))
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    for number, part in enumerate(parts, 1):
        yield line(number, len(parts), part)


def read(log: Iterable[str], *, source: str) -> tuple[list[FramedRecord], list[str]]:
    """Return the complete records in a log, in order, and a message about each problem.

    Args:
        log: lines of the log. Lines without a part of a record are ignored.
        source: name of the log. Each message starts with it.
    """
    records: dict[tuple[str, ...], _Parts] = {}
    problems: list[str] = []
    for number, line in enumerate(log, 1):
        try:
            frame = _frame(line, f"{source} line {number}")
        except documents.DocumentError as error:
            problems.append(str(error))
            continue
        if frame:
            key = tuple(str(frame[name]) for name in (*TEXTS, "parts", "bytes"))
            records.setdefault(key, _Parts(frame)).add(frame)
    complete = []
    for parts in records.values():
        try:
            complete.append(parts.join(source))
        except documents.DocumentError as error:
            problems.append(str(error))
    return complete, problems


class _Parts:
    """The parts of one record that were read so far."""

    def __init__(self, first: dict[str, Any]) -> None:
        self._first = first
        self._found: dict[int, str] = {}

    def add(self, frame: dict[str, Any]) -> None:
        """Add a part. It may be added twice, because a log may be collected twice."""
        self._found[frame["part"]] = frame["data"]

    def join(self, source: str) -> FramedRecord:
        """Return the record. Raises DocumentError if a part is missing, or the record does not match its checksum."""
        first = self._first
        whose = f"{source}: the record of {first['host']}" + (f" in gang {first['gang']}" if first["gang"] else "")
        missing = [number for number in range(1, first["parts"] + 1) if number not in self._found]
        if missing:
            some = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            raise documents.DocumentError(
                f"{whose} is cut off: {len(missing)} of {first['parts']} parts are missing ({some}): "
                "the pod is still writing, or the log was rotated; collect the whole log, or the record from the volume"
            )
        text = _inflated("".join(self._found[number] for number in sorted(self._found)), first["bytes"])
        if text is None or hashlib.sha256(text).hexdigest() != first["sha256"]:
            raise documents.DocumentError(f"{whose} does not match its checksum: it was changed in transit")
        names = {name: first[name] for name in ("run_id", "host", "gang", "node")}
        return FramedRecord(**names, text=text, source=source)


def _frame(line: str, where: str) -> dict[str, Any] | None:
    """Return the part of a record in a line of a log; None if the line has none. Raises DocumentError if the part is damaged."""
    line = _unwrapped(line, where)
    _, mark, rest = line.partition(MARK)
    if not mark:
        return None
    try:
        frame = documents.parse(rest.strip(), source=where, max_bytes=MOST_BYTES)
    except documents.DocumentError as error:
        raise documents.DocumentError(f"{error}: the line of a record was cut off or mixed with another") from None
    if not isinstance(frame, dict) or not _well_formed(frame):
        raise documents.DocumentError(
            f"{where}: a line of a record lacks fields, or has invalid ones: it was changed in transit"
        )
    if frame["crc32"] != _check(frame["sha256"], frame["part"], frame["data"]):
        raise documents.DocumentError(
            f"{where}: part {frame['part']} of the record of {frame['host']} does not match its checksum: "
            "it was changed in transit"
        )
    return frame


def _unwrapped(line: str, where: str) -> str:
    """Return the text in a line of Docker's json-file log, or any other line unchanged.

    Raises:
        DocumentError: the line is JSON that is nested too deeply.
    """
    if MARK in line and line.startswith('{"log":'):
        try:
            result = json.loads(line)
        except RecursionError:
            raise documents.DocumentError(
                f"{where}: nested deeper than {documents.MAX_DEPTH} levels: no runtime writes such a line"
            ) from None
        except ValueError:
            return line
        return str(result.get("log", line))
    return line


def _well_formed(frame: dict[str, Any]) -> bool:
    texts = all(isinstance(frame.get(name), str) and len(frame[name]) <= most for name, most in TEXTS.items())
    numbers = all(type(frame.get(name)) is int and frame[name] > 0 for name in ("part", "parts", "bytes"))
    return (
        texts
        and numbers
        and frame["part"] <= frame["parts"] <= MOST_PARTS
        and frame["bytes"] <= documents.MAX_BYTES
        and isinstance(frame.get("crc32"), str)
        and isinstance(frame.get("data"), str)
        and frame["data"].isascii()
    )


def _check(digest: str, number: int, data: str) -> str:
    return f"{zlib.crc32(f'{digest} {number} {data}'.encode()):08x}"


def _inflated(data: str, size: int) -> bytes | None:
    """Return the decompressed text; None if it is invalid or not `size` bytes. At most `size` + 1 bytes are unpacked."""
    try:
        packed = base64.b64decode(data, validate=True)
        engine = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        text = engine.decompress(packed, size + 1)
    except (ValueError, zlib.error):
        return None
    return text if len(text) == size and engine.eof else None
