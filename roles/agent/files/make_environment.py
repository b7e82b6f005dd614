"""Create the agent's virtual environment with the Python that runs this script, unless there is already a usable one.

An environment of the agent is replaced if it is incomplete or damaged, has another Python, or cannot be used by other users.

Argument: directory of the environment.

This script removes the old environment itself, because `venv --clear` would also remove the wheels in that directory.
"""

import csv
import pathlib
import shutil
import subprocess
import sys

base = pathlib.Path(getattr(sys, "_base_executable", sys.executable))
# The setting `home` in pyvenv.cfg is one of these directories, depending on the version of venv.
homes = [str(base.parent), str(base.resolve().parent)]
prefix = pathlib.Path(sys.argv[1])
MARK = "rackproof-environment"  # an empty file, which identifies the directory as the agent's


def is_current():
    """Return whether the environment is complete, usable by every user, and made with this minor version of this interpreter."""
    if not (prefix / "bin" / "pip").exists():  # of the files that the agent needs, venv creates this one last
        return False
    # If the environment was created with umask 027, the user of the exporter's service cannot run the programs in bin.
    if not (prefix / "bin").stat().st_mode & 0o001:
        return False
    lines = (prefix / "pyvenv.cfg").read_text().splitlines()
    settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    version = settings.get("version", "").split(".")[:2]
    return settings.get("home") in homes and version == [str(number) for number in sys.version_info[:2]]


def has_all_files():
    """Return whether each file of the installed packages has the size that pip recorded.

    After a power loss, files may be empty. pip would not install their packages again.
    """
    for package in prefix.glob("lib/python*/site-packages/*.dist-info"):
        rows = list(csv.reader((package / "RECORD").read_text(encoding="utf-8").splitlines()))
        if not rows or any(size and (package.parent / path).stat().st_size != int(size) for path, _, size in rows):
            return False
    return True


try:
    current = is_current() and has_all_files()
except (OSError, ValueError, csv.Error):  # a file is missing, or RECORD or pyvenv.cfg is damaged
    current = False
if not current:
    existing = [name for name in ("pyvenv.cfg", "bin/pip") if (prefix / name).exists()]
    if existing and not any((prefix / name).exists() for name in (MARK, "bin/rackproof")):
        sys.exit(f"{prefix} has a {existing[0]} that is not the agent's: set rackproof_prefix to a separate directory")
    for name in ("pyvenv.cfg", "bin", "include", "lib", "lib64", "share") if existing else ():
        path = prefix / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    (prefix / MARK).touch()
    status = subprocess.run([sys.executable, "-m", "venv", str(prefix)], check=False).returncode
    if status:
        sys.exit(status)
    print("created")
