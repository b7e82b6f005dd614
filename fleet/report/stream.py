"""Write files of any length atomically: a reader sees either the old file or the complete new file."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from schemas.documents import name_file

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")


def is_temporary(name: str) -> bool:
    """Return whether `name` has the form of the names that `replacing` and `documents.write_text` give to temporary files."""
    return bool(_TEMPORARY.fullmatch(name))


def write_stream(path: Path, pieces: Iterable[str | bytes]) -> None:
    """Write `pieces` one after the other, atomically. Text is written as UTF-8 with its line endings unchanged."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` when the block ends without an error.

    If `path` is a symbolic link, the link is replaced, not the file that it points to.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        name_file(error, path)
        raise
