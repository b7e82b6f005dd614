"""Makes the virtual environment with the Python that runs this, anew where it is another's or broke off. Argument: its directory.

`venv --clear` would take the wheels with it, which lie in that directory too.
"""

import pathlib
import shutil
import subprocess
import sys

base = pathlib.Path(getattr(sys, "_base_executable", sys.executable))
homes = [str(base.parent), str(base.resolve().parent)]  # which of them venv notes depends on its version
prefix = pathlib.Path(sys.argv[1])
MARK = "rackproof-environment"


def is_ours():
    """Whether it is whole, of the same interpreter and version: 3.12 installs where a 3.10 would not look."""
    if not (prefix / "bin" / "pip").exists():  # the last that is made
        return False
    lines = (prefix / "pyvenv.cfg").read_text().splitlines()
    told = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    version = told.get("version", "").split(".")[:2]
    return told.get("home") in homes and version == [str(number) for number in sys.version_info[:2]]


try:
    made = is_ours()
except OSError:
    made = False
if not made:
    there = [name for name in ("pyvenv.cfg", "bin/pip") if (prefix / name).exists()]
    if there and not any((prefix / name).exists() for name in (MARK, "bin/rackproof")):
        sys.exit(f"{prefix} has a {there[0]} of something else: give rackproof_prefix a directory of its own")
    for name in ("pyvenv.cfg", "bin", "include", "lib", "lib64", "share") if there else ():
        path = prefix / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    (prefix / MARK).touch()
    status = subprocess.run([sys.executable, "-m", "venv", str(prefix)], check=False).returncode
    if status:
        sys.exit(status)
    print("made")
