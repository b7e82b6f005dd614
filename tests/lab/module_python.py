#!/usr/bin/python3
"""The Python of Ansible's modules on a lab host: it compiles what they bring once, and not each of them anew.

A module brings sixty files of Ansible as source in an archive, and compiling them is a third of what a task costs a host.
They are kept under /run until the machine goes, each under a name made of what stands in it; all else is as /usr/bin/python3
does it.
"""

import contextlib
import gc
import os
import sys
import zipimport
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path

KEPT = Path("/run/rackproof-lab-modules")


def once(path, source):
    """Stands before zipimport's own compiler."""
    name = sha256(source).hexdigest()
    kept = KEPT / f"{name}.py"
    with contextlib.suppress(OSError):  # a host that cannot write compiles each time
        if not kept.exists():
            KEPT.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_bytes(source)
            part.replace(kept)
        return SourceFileLoader(name, str(kept)).get_code(name)
    return compiled(path, source)


if __name__ == "__main__":
    gc.disable()  # a module is over before there is any garbage
    compiled, zipimport._compile_source = zipimport._compile_source, once
    if sys.argv[1:]:  # a program that lies there, with its arguments
        del sys.argv[0]
        sys.path[0], program = str(Path(sys.argv[0]).parent), Path(sys.argv[0]).read_bytes()
    else:
        sys.path[0], program = "", sys.stdin.buffer.read()
    exec(compile(program, sys.argv[0], "exec"), {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
