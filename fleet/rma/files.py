"""Write RMA packages (the evidence on one failed part, for its vendor) to `rma/<serial>/` in the run directory.

Serials come from hosts, so they are sanitized before they become file names.
"""

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
_MAX_READABLE_CHARACTERS = 64
"""Maximum number of characters of a text that `safe_file_name` keeps. `-` and a digest of eight characters may follow."""
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?$")
"""Matches file names that Windows does not allow."""
_ARCHIVE_TIME = (1980, 1, 1, 0, 0, 0)
"""Modification time of every file in an archive. It is constant, so that equal packages give equal bytes."""


def package_names(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a directory name for the package of each document (`part_document`).

    The name is the serial of the part. A part without a serial is named `HOST-PLACE`. If several names are equal apart from case,
    each is cut to 24 characters, and `-HOST-PLACE` is appended. All names are sanitized (`safe_file_name`).
    """
    locations = [f"{item['slot']['host']}-{item['slot']['place']}" for item in documents]
    serials = [str(item["part"].get("serial", "")) for item in documents]
    candidates = [
        safe_file_name(serial) if serial.strip() else safe_file_name(location)
        for serial, location in zip(serials, locations, strict=True)
    ]
    counts = Counter(name.casefold() for name in candidates)
    return [
        safe_file_name(f"{name[:24]}-{location}") if counts[name.casefold()] > 1 else name
        for name, location in zip(candidates, locations, strict=True)
    ]


def safe_file_name(text: str) -> str:
    """Return `text` as a file name, with `-` instead of `=`.

    If anything else must be changed, a digest of `text` is appended. So only texts such as `a=b` and `a-b` give the same name.
    """
    cleaned = _UNSAFE_CHARACTERS.sub("_", text.replace("=", "-"))[:_MAX_READABLE_CHARACTERS].lstrip(".-")
    if cleaned == text.replace("=", "-") and cleaned and not _RESERVED.match(cleaned):
        return cleaned
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{cleaned.rstrip('.') or 'part'}-{digest}" if not _RESERVED.match(cleaned) else f"part-{cleaned}-{digest}"


def write_package(run_dir: Path, name: str, files: Mapping[str, str], zipped: bool) -> Path:
    """Write one package to the directory `rma/NAME` in `run_dir`, and return the path of the directory.

    If `zipped`, also write the archive `rma/NAME.zip`, and return the path of the archive. Other files in the directory,
    such as an answer from the vendor, are kept.

    Args:
        run_dir: directory of the run.
        name: name of the package.
        files: file name -> text.
        zipped: whether to write the archive.

    Raises:
        RunError: `rma` or `rma/NAME` is a symbolic link, or exists and is not a directory.
    """
    directory = _directory(_directory(run_dir / DIRECTORY) / name)
    for file, text in files.items():
        write_stream(directory / file, [text])
    if not zipped:
        return directory
    archive = run_dir / DIRECTORY / f"{name}.zip"
    with replacing(archive) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as zip_file:
        for file, text in files.items():
            entry = zipfile.ZipInfo(f"{name}/{file}", _ARCHIVE_TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o644) << 16
            zip_file.writestr(entry, text)
    return archive


def _directory(path: Path) -> Path:
    """Create the directory if it does not exist, and return it.

    Raises:
        RunError: the path is a symbolic link, or exists and is not a directory.
    """
    if not path.is_symlink() and not path.exists():
        path.mkdir()
    if path.is_symlink() or not path.is_dir():
        raise RunError(f"{path} is a link or not a directory, so the package was not written; remove it")
    return path


def to_json_text(document: Mapping[str, Any]) -> str:
    """Return the document as JSON text for part.json."""
    return json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
