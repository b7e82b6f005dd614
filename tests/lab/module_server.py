#!/usr/bin/python3
"""Run Ansible modules for `module_python.py`, each in a fork of this process, which has already imported their common code.

The server listens on a socket that it inherits, serves only processes of its own user, and exits after IDLE_S seconds without
requests. Code that the modules do not share comes from the archive of each module; it is compiled once and cached under /run.
If Ansible uses this file as the Python interpreter, the module runs in the process that Ansible started, with the same cache.
"""

import ast
import atexit
import contextlib
import gc
import importlib
import os
import select
import socket
import struct
import sys
import traceback
import types
import zipimport
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path

STARTED_AS = "/proc/self/fd/4"
SOCKET, IDLE_S, MAX_REQUEST_BYTES = 3, 60.0, 1 << 20
CACHE = Path("/run/rackproof-lab-modules")
CHECKOUT = Path(__file__).resolve().parents[2]
COMMON = (
    *("ansible.module_utils.basic", "ansible.module_utils._internal._ansiballz._loader"),
    *("base64", "json", "runpy", "shutil", "subprocess", "tempfile", "zipfile"),
)


class ArchiveFinder:
    """Import finder for Python modules below the package `ansible` that the server has not imported.

    It takes them from the archive of the running Ansible module. This archive is the first entry of sys.path.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        package = name.rpartition(".")[0].replace(".", "/")
        if package.partition("/")[0] == "ansible" and sys.path[0].endswith("_payload.zip"):
            with contextlib.suppress(zipimport.ZipImportError):
                return zipimport.zipimporter(f"{sys.path[0]}/{package}").find_spec(name)
        return None


def compile_cached(path, source):
    """Return compiled source code, from the cache if possible. This function replaces `zipimport._compile_source`."""
    name = sha256(source).hexdigest()
    cached = CACHE / f"{name}.py"
    with contextlib.suppress(OSError):  # a host that cannot write to the cache compiles the source each time
        if not cached.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            partial = cached.with_suffix(f".{os.getpid()}")
            partial.write_bytes(source)
            partial.replace(cached)
        return SourceFileLoader(name, str(cached)).get_code(name)
    return compile_source(path, source)


def prepare():
    """Import the common code of modules from the Ansible that is installed in the checkout, if any."""
    site_packages = next(CHECKOUT.glob(".venv/lib/python3*/site-packages"), None)
    if site_packages:
        sys.path.insert(0, str(site_packages))
        for name in COMMON:
            with contextlib.suppress(ImportError):  # missing in this version of Ansible
                importlib.import_module(name)
        sys.path.remove(str(site_packages))
        sys.meta_path.insert(0, ArchiveFinder)


def run(arguments):
    """Run the program in the file `arguments[1]`, or the program on standard input if there is no such argument."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv, sys.path[0] = arguments, ""
    if arguments[1:]:
        del arguments[0]
        sys.path[0], program = str(Path(arguments[0]).parent), Path(arguments[0]).read_bytes()
    else:
        program = sys.stdin.buffer.read()
    exec(compile(program, arguments[0], "exec"), module.__dict__)  # noqa: S102


def serve(channel, request, streams):
    """Run the module in this process (a fork of the server), send its exit code and exit."""
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        arguments, directory, environment, mask = ast.literal_eval(request.decode())
        os.environb.clear()
        os.environb.update(environment)
        os.umask(mask)
        os.chdir(directory)
        channel.send(b"\1")
        run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        channel.send(bytes([code & 0xFF]))
        os._exit(code & 0xFF)


def main():
    """Serve requests until none has arrived for IDLE_S seconds."""
    listener = socket.socket(fileno=SOCKET)
    prepare()
    gc.freeze()
    while select.select([listener], [], [], IDLE_S)[0]:
        channel, _ = listener.accept()
        request, streams, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 3)
        _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if request and user == os.getuid() and os.fork() == 0:
            listener.close()
            serve(channel, request, streams)
        for stream in streams:
            os.close(stream)
        channel.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    gc.disable()  # a module exits before garbage collection pays off
    compile_source, zipimport._compile_source = zipimport._compile_source, compile_cached
    if sys.argv[0] == STARTED_AS:
        main()
    else:
        run(sys.argv)
