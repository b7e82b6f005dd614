"""Puts the packages of another Python on the path of this virtual environment, behind its own. Argument: that Python.

`venv --system-site-packages` shows only the base interpreter's; torch often lies in a virtual environment or in conda.
"""

import pathlib
import subprocess
import sys
import sysconfig

theirs = subprocess.run(
    [sys.argv[1], "-c", "import site; print(*site.getsitepackages(), sep='\\n')"],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
).stdout
pathlib.Path(sysconfig.get_path("purelib"), "rackproof_shared.pth").write_text(theirs)
