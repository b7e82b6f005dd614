"""Write packages to disk: `rma/<serial>/`. A serial comes from a host, so it is sanitized before it names a file."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.report.stream import replacing, write_stream
from schemas.errors import RunError

DIRECTORY = "rma"
_LONGEST = 64
_REFUSED = re.compile(r"[^A-Za-z0-9._-]")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?$")
"""File names that Windows does not allow."""
_BEGINNING = (1980, 1, 1, 0, 0, 0)
"""Time of every file in an archive, so that equal packages are equal files."""


def names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a directory name for each document: the serial, or host and place; both if two parts report the same serial."""
    slot_names = [f"{item['slot']['host']}-{item['slot']['place']}" for item in entries]
    serials = [str(item["part"].get("serial", "")) for item in entries]
    chosen = [
        safe(serial) if serial.strip() else safe(slot_name)
        for serial, slot_name in zip(serials, slot_names, strict=True)
    ]
    counts = Counter(name.casefold() for name in chosen)
    return [
        safe(f"{name[:24]}-{slot_name}") if counts[name.casefold()] > 1 else name
        for name, slot_name in zip(chosen, slot_names, strict=True)
    ]


def safe(text: str) -> str:
    """Return `text` as a file name. A changed text gets a digest, so that two texts never share a name."""
    plain = _REFUSED.sub("_", text.replace("=", "-"))[:_LONGEST].lstrip(".-")
    if plain == text.replace("=", "-") and plain and not _RESERVED.match(plain):
        return plain
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain.rstrip('.') or 'part'}-{digest}" if not _RESERVED.match(plain) else f"part-{plain}-{digest}"


def write_package(run_dir: Path, name: str, files: Mapping[str, str], zipped: bool) -> Path:
    """Write one package under `run_dir`/rma and return its directory, or its archive.

    Other files in that directory, such as a vendor's answer, are kept.

    Raises:
        RunError: `rma` or the package in it is a link or not a directory.
    """
    directory = _directory(_directory(run_dir / DIRECTORY) / name)
    for file, text in files.items():
        write_stream(directory / file, [text])
    if not zipped:
        return directory
    archive = run_dir / DIRECTORY / f"{name}.zip"
    with replacing(archive) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as made:
        for file, text in files.items():
            entry = zipfile.ZipInfo(f"{name}/{file}", _BEGINNING)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o644) << 16
            made.writestr(entry, text)
    return archive


def _directory(path: Path) -> Path:
    if not path.is_symlink() and not path.exists():
        path.mkdir()
    if path.is_symlink() or not path.is_dir():
        raise RunError(f"{path}: a link or not a directory, so nothing is written to it: remove it")
    return path


def as_json(entries: Mapping[str, Any]) -> str:
    """Return the document as JSON text for part.json."""
    return json.dumps(entries, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
