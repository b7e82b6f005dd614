"""Open DuckDB, which reads and writes the Parquet files of a history.

Its database is in memory, and it downloads no extensions.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.errors import RunError

LIBRARY, EXTRA = "duckdb", "history"


def connect() -> Any:
    """Return a connection to a new database in memory.

    Raises:
        RunError: DuckDB is not installed.
    """
    try:
        duckdb = importlib.import_module(LIBRARY)
    except ImportError:
        raise RunError(
            f"{LIBRARY} is not installed: install rackproof with the extra `{EXTRA}`: pip install 'rackproof[{EXTRA}]' "
            f"(in a checkout: pip install '.[{EXTRA}]')"
        ) from None
    settings = {"autoinstall_known_extensions": False, "autoload_known_extensions": False, "temp_directory": ""}
    connection = duckdb.connect(config=settings)
    connection.execute("set timezone = 'UTC'")
    connection.execute("set enable_progress_bar = false")
    return connection


def error_type() -> type[Exception]:
    """Return the base class of DuckDB's errors. Call it after `connect`, which reports if DuckDB is missing."""
    return importlib.import_module(LIBRARY).Error  # type: ignore[no-any-return]


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[Any]:
    """Yield a connection that writes to a history.

    Raises:
        RunError: DuckDB is not installed, or cannot write (the disk is full), or cannot read a file that must be rewritten.
    """
    with connect() as database:
        try:
            yield database
        except error_type() as error:
            raise RunError(
                f"the history in {directory} cannot be written, and is unchanged: {' '.join(str(error).split())}: "
                "free disk space, or give another directory with --history"
            ) from None
