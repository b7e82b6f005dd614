#!/usr/bin/python3
"""Runs Ansible's modules for `module_python.py`, each in a fork of this process, which has imported what they have in common.

It listens on the socket that it was started with, for its own user, and ends when nobody has asked for a while. What a module
brings beside that comes from its archive, compiled once and kept under /run until the machine goes. Started as the Python of a
module it runs that one itself, and compiles it once likewise.
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
SOCKET, IDLE_S, MOST_BYTES = 3, 60.0, 1 << 20
KEPT = Path("/run/rackproof-lab-modules")
CHECKOUT = Path(__file__).resolve().parents[2]
COMMON = (
    *("ansible.module_utils.basic", "ansible.module_utils._internal._ansiballz._loader"),
    *("base64", "json", "runpy", "shutil", "subprocess", "tempfile", "zipfile"),
)


class Brought:
    """Finds what is not there yet in the archive of the module that runs, which is the first place where Python looks."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        package = name.rpartition(".")[0].replace(".", "/")
        if package.partition("/")[0] == "ansible" and sys.path[0].endswith("_payload.zip"):
            with contextlib.suppress(zipimport.ZipImportError):
                return zipimport.zipimporter(f"{sys.path[0]}/{package}").find_spec(name)
        return None


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


def prepare():
    """Imports what modules import, where the checkout's own Ansible is at hand."""
    here = next(CHECKOUT.glob(".venv/lib/python3*/site-packages"), None)
    if here:
        sys.path.insert(0, str(here))
        for name in COMMON:
            with contextlib.suppress(ImportError):  # another version of Ansible: the module brings it
                importlib.import_module(name)
        sys.path.remove(str(here))
        sys.meta_path.insert(0, Brought)


def run(arguments):
    """The program that standard input brings, or that lies there with its arguments."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv, sys.path[0] = arguments, ""
    if arguments[1:]:
        del arguments[0]
        sys.path[0], program = str(Path(arguments[0]).parent), Path(arguments[0]).read_bytes()
    else:
        program = sys.stdin.buffer.read()
    exec(compile(program, arguments[0], "exec"), module.__dict__)  # noqa: S102


def serve(channel, request, streams):
    """Becomes the module, tells its exit code and ends."""
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
    """Serves until nobody has asked for a while."""
    listener = socket.socket(fileno=SOCKET)
    prepare()
    gc.freeze()
    while select.select([listener], [], [], IDLE_S)[0]:
        channel, _ = listener.accept()
        request, streams, _, _ = socket.recv_fds(channel, MOST_BYTES, 3)
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
    gc.disable()  # a module is over before there is any garbage
    compiled, zipimport._compile_source = zipimport._compile_source, once
    if sys.argv[0] == STARTED_AS:
        main()
    else:
        run(sys.argv)
