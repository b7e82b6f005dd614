"""The command `rackproof`. Importing this package puts Rackproof's packages before others of the same names on the import path.

Otherwise a PYTHONPATH could lead to other packages named `agent` or `schemas`, and in a checkout that is not installed, child
processes would not find Rackproof's packages at all. `sys.path[0]`, the directory of the script, stays first.
"""

import os
import sys
from pathlib import Path

PACKAGES = ("agent", "collectors", "fleet", "rackproof", "schemas")
_ROOT = str(Path(__file__).resolve().parents[1])


def _first_directory(path: list[str]) -> int | None:
    """Return the index of the first directory with a module named in PACKAGES; None if there is none."""
    for index, directory in enumerate(path):
        for name in PACKAGES:
            if Path(directory, name, "__init__.py").is_file() or Path(directory, f"{name}.py").is_file():
                return index
    return None


def _put_first() -> None:
    """Put the directory of Rackproof's packages before any other directory with modules of these names, except `sys.path[0]`."""
    first = _first_directory(sys.path[1:])  # sys.path[0], the directory of the script, differs between processes
    if first is not None and Path(sys.path[first + 1]).resolve() == Path(_ROOT):
        return
    sys.path.insert(1, _ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))


_put_first()
