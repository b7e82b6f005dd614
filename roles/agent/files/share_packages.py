"""Append the packages of another Python to the path of this virtual environment. Argument: that Python.

`venv --system-site-packages` only adds those of the base interpreter, but torch is often in a virtual environment or in conda.
"""

import pathlib
import subprocess
import sys
import sysconfig

paths = subprocess.run(
    [sys.argv[1], "-c", "import site; print(*site.getsitepackages(), sep='\\n')"],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
).stdout
shared = pathlib.Path(sysconfig.get_path("purelib"), "rackproof_shared.pth")
shared.write_text(paths)
shared.chmod(0o644)  # the user of the exporter's service reads it too, whatever the umask
