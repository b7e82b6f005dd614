"""Make the packages of another Python, including torch, importable in the virtual environment whose Python runs this script.

Argument: the path of the other Python.

`venv --system-site-packages` would only add packages of the base interpreter, but torch is often in another virtual environment
or in conda.
"""

import json
import pathlib
import subprocess
import sys
import sysconfig

# Python reads .pth files only in its site directories. Such a file may name more directories, or run code that finds a package
# (an editable installation).
PATHS = "import json, site, sys; print(json.dumps([sys.path, [*site.getsitepackages(), site.getusersitepackages()]]))"
FIND_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def paths(*options):
    """Return `sys.path` of the other Python, and the directories whose .pth files it reads."""
    command = [sys.argv[1], *options, "-c", PATHS]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])  # a sitecustomize.py may print something before


standard_library, _ = paths("-I", "-S")
everything, site_directories = paths()
lines = []
for path in everything:
    if path and path not in standard_library:  # an empty path is the current directory
        add = "site.addsitedir" if path in site_directories else "sys.path.append"
        lines.append(f"import site, sys; {path!r} in sys.path or {add}({path!r})")
shared = pathlib.Path(sysconfig.get_path("purelib"), "rackproof_shared.pth")
shared.write_text("".join(f"{line}\n" for line in lines))
shared.chmod(0o644)  # independent of the umask, because the account of the exporter's service also reads this file
if subprocess.run([sys.executable, "-I", "-c", FIND_TORCH], check=False).returncode:
    sys.exit(
        f"rackproof_system_torch is set, but the agent's environment {sys.prefix} finds no torch in the packages of "
        f"{sys.argv[1]}: install torch there with pip, or set rackproof_python to a Python with torch"
    )
