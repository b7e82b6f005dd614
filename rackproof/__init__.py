"""The command `rackproof`. Importing it makes its packages the first of their names, here and in the processes that it starts.

PYTHONPATH of a host may have packages called `agent` or `schemas`, which come before installed ones. And the processes of a
checkout that is not installed do not find its packages by themselves.
"""

import os
import sys
from pathlib import Path

PACKAGES = ("agent", "collectors", "fleet", "rackproof", "schemas")
_ROOT = str(Path(__file__).resolve().parents[1])


def _first_directory(path: list[str]) -> int | None:
    """Return the index of the first directory with a module of one of these names."""
    for index, directory in enumerate(path):
        for name in PACKAGES:
            if Path(directory, name, "__init__.py").is_file() or Path(directory, f"{name}.py").is_file():
                return index
    return None


def _put_first() -> None:
    """Put the directory of these packages before others that have modules of their names, in sys.path and PYTHONPATH."""
    first = _first_directory(sys.path[1:])  # the directory of the script is another one in each process
    if first is not None and Path(sys.path[first + 1]).resolve() == Path(_ROOT):
        return
    sys.path.insert(1, _ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))


_put_first()
