"""Import figures from the outputs of nccl-tests, nvbandwidth, DCGM and SuperBench into the history.

A figure that Rackproof measures too gets Rackproof's name and settings, so that one query finds the measured and the imported
figures. Any other figure is named after the tool, such as `nvbandwidth.<test case>`; if the operation of nccl-tests is unknown,
the name is `collective.unknown.…`. Values are in SI units, but SuperBench metrics that Rackproof does not measure are unchanged.
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
"""Tool -> the function that reads its output. The arguments are the content and the name of the file."""


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
                f"{path}: output of {imported.source} without a figure: it may be cut off, or no test in it passed"
            )
        return imported, hashlib.sha256(content).hexdigest()
    raise UsageError(f"{path}: neither a run directory nor an output of {', '.join(READERS)}")


def import_output(directory: Path, kind: str, path: Path, now: str, model: str = "") -> tuple[Imported, str, list[str]]:
    """Add the figures of a file to the history; return them, the outcome of `add_imported`, and notes.

    Args:
        directory: the history.
        kind: `gpu` (real runs), `rehearsal` or `simulated`.
        path: the file.
        now: the present time in UTC, in the format of `rows.timestamp`.
        model: GPU model for figures without a model in the file. To correct it, import the file again with another `model`.

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
