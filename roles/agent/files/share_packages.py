"""Make the packages of another Python importable in the virtual environment whose Python runs this script.

Argument: the path of the other Python.

`venv --system-site-packages` would only add packages of the base interpreter, but torch is often in another virtual environment
or in conda.
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
shared.chmod(0o644)  # independent of the umask, because the account of the exporter's service also reads this file
