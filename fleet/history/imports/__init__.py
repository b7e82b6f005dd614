"""Figures from elsewhere: outputs of nccl-tests, nvbandwidth, DCGM and SuperBench, with their source.

A figure that Rackproof measures too has Rackproof's name and settings, so that one question finds the figures of the fleet and
the imported ones. The name of any other figure is the name of the tool followed by the tool's own name for the figure. Values are
in SI units, except those of SuperBench metrics that Rackproof does not measure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet.history.imports.common import Imported, NotThisTool
from fleet.history.imports.dcgm import read_dcgm
from fleet.history.imports.nccl_tests import read_json, read_text
from fleet.history.imports.nvbandwidth import read_nvbandwidth
from fleet.history.imports.superbench import read_superbench
from fleet.history.rows import clean_text
from fleet.history.store import add_imported
from schemas import documents
from schemas.errors import UsageError

MAX_BYTES = 64_000_000
READERS: Mapping[str, Callable[[str, str], Imported]] = {
    "nccl-tests": read_text,
    "nccl-tests (JSON)": read_json,
    "nvbandwidth": read_nvbandwidth,
    "DCGM": read_dcgm,
    "SuperBench": read_superbench,
}
"""Tool -> the function that reads its output, given the text and the name of the file."""


def read_output(path: Path) -> tuple[Imported, str]:
    """Return the figures of a file, and the SHA-256 of its content.

    Raises:
        DocumentError: the file cannot be read.
        UsageError: the file is not an output of any tool in READERS, or has no figure.
    """
    content = documents.read_bytes(path, max_bytes=MAX_BYTES)
    text = content.decode("utf-8", errors="replace")
    for reader in READERS.values():
        try:
            imported = reader(text, path.name)
        except NotThisTool:
            continue
        if not imported.rows:
            raise UsageError(
                f"{path}: output of {imported.source} without a figure: for example, it was cut off, or every result is wrong"
            )
        return imported, hashlib.sha256(content).hexdigest()
    raise UsageError(f"{path}: neither a run directory nor an output of {', '.join(READERS)}")


def import_output(directory: Path, kind: str, path: Path, now: str, model: str = "") -> tuple[Imported, str, list[str]]:
    """Add the figures of a file to the history; return them, the outcome of `add_imported`, and notes.

    Args:
        directory: the history.
        kind: kind of the history.
        path: the file.
        now: UTC, as in `rows.timestamp`.
        model: GPU model of the figures whose file names none. To correct a wrong model, import the file again with the right one.

    Raises:
        as `read_output` and `add_imported`.
    """
    imported, digest = read_output(path)
    model, own = clean_text(model), sorted({row["model"] for row in imported.rows})
    notes = []
    if model and "" not in own and own != [model]:
        notes.append(f"--model was not used: the file names the model of each figure: {', '.join(own)}")
    shared = {"source": imported.source, "version": imported.version, "file": clean_text(path.name)}
    rows = [{**shared, "sha256": digest, **row} for row in imported.rows]
    entry = {**shared, "imported": now, "count": len(rows), "model": model if "" in own else ""}
    return imported, add_imported(directory, kind, entry, digest, rows), notes
