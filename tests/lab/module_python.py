#!/usr/bin/python3 -IS
"""Run Ansible modules on a lab host in forks of one server process, `module_server.py`.

The playbooks of the labs run thousands of modules. In a new process, a module takes 0.1 s of CPU time. Three quarters of this
time are imports that all modules share. The server imports this code only once.

The fork has the arguments, environment, umask, working directory and standard streams of this process, and this process exits
with the exit code of the fork. So Ansible can use this file as its Python.
"""

import _socket
import os
import sys
import time

SERVER = f"{__file__.rpartition('/')[0]}/module_server.py"
SOCKET, PROGRAM = 3, 4
"""File descriptors that the server inherits: its listening socket, and the open file module_server.py.

The server is started as /proc/self/fd/4, so that its command line does not contain the path of the checkout. That path could
match the patterns with which tests search for processes of the agent (`pgrep -f`)."""


def connect():
    """Return a connection to the server of this user in the namespaces of this process. Start the server if it does not run.

    The server listens on an abstract Unix socket, whose name is unique in a network namespace. A host with systemd shares its
    network namespace with the control node, but needs its own server. So the name contains the inode of the mount namespace.
    """
    status, mounts = os.stat(SERVER), os.stat("/proc/self/ns/mnt")  # noqa: PTH116 - importing pathlib would take longer
    name = f"\0rackproof-lab-modules {status.st_dev} {status.st_ino} {mounts.st_ino} {os.getuid()}"
    while True:
        channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            channel.connect(name)
            return channel
        except ConnectionRefusedError:
            pass
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            listener.bind(name)
        except OSError:  # another process has bound the name and is starting the server
            time.sleep(0.001)
            continue
        listener.listen(64)
        if os.fork() == 0:
            os.setsid()
            streams = [os.open("/dev/null", os.O_RDWR)] * 3
            # Copy all descriptors to high numbers first: otherwise the next loop could overwrite one that is still needed.
            for number, stream in enumerate([*streams, listener.fileno(), os.open(SERVER, os.O_RDONLY)]):
                os.dup2(stream, number + 100)
            for number in (0, 1, 2, SOCKET, PROGRAM):
                os.dup2(number + 100, number)
            os.closerange(PROGRAM + 1, 200)
            os.execv(sys.executable, [sys.executable, "-I", f"/proc/self/fd/{PROGRAM}"])  # noqa: S606
        listener.close()


def main():
    """Run the module in a fork of the server and return the exit code of the module."""
    wanted = repr((sys.argv, os.getcwd(), dict(os.environb), os.umask(0))).encode()  # noqa: PTH109
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    while True:
        channel, begun = connect(), False
        try:
            channel.sendmsg([wanted], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
            begun = bool(channel.recv(1))
            if begun:
                return (channel.recv(1) or b"\1")[0]
        except ConnectionError:  # the server has exited: try again, unless the module has begun
            if begun:
                return 1


if __name__ == "__main__":
    sys.exit(main())
