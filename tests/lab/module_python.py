#!/usr/bin/python3 -IS
"""Run Ansible modules on a lab host in forks of one server process, `module_server.py`.

A module takes 0.1 s of CPU time, three quarters of it for imports that all modules share, and the playbooks of the labs run
thousands of modules. The fork has the arguments, environment, umask, directory and standard streams of this process, and this
process exits with the exit code of the fork. So Ansible can use this file like /usr/bin/python3.
"""

import _socket
import os
import sys
import time

SERVER = f"{__file__.rpartition('/')[0]}/module_server.py"
SOCKET, PROGRAM = 3, 4
"""File descriptors that the server inherits: its socket, and its program.

The program is a descriptor, so that the arguments of the server do not contain the path of the checkout."""


def connect():
    """Return a connection to the server for this user and the namespaces of this process; start the server if it does not run.

    The name of the abstract socket contains the mount namespace, because the control node and a host with systemd share a
    network namespace, in which such names must be unique.
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
        except OSError:  # another process has started the server
            time.sleep(0.001)
            continue
        listener.listen(64)
        if os.fork() == 0:
            os.setsid()
            streams = [os.open("/dev/null", os.O_RDWR)] * 3
            for number, stream in enumerate([*streams, listener.fileno(), os.open(SERVER, os.O_RDONLY)]):
                os.dup2(stream, number + 100)  # so that the descriptors do not overwrite each other
            for number in (0, 1, 2, SOCKET, PROGRAM):
                os.dup2(number + 100, number)
            os.closerange(PROGRAM + 1, 200)
            os.execv(sys.executable, [sys.executable, "-I", f"/proc/self/fd/{PROGRAM}"])  # noqa: S606
        listener.close()


def main():
    """Run the module in the server and return its exit code."""
    wanted = repr((sys.argv, os.getcwd(), dict(os.environb), os.umask(0))).encode()  # noqa: PTH109
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    while True:
        channel, begun = connect(), False
        try:
            channel.sendmsg([wanted], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
            begun = bool(channel.recv(1))
            if begun:
                return (channel.recv(1) or b"\1")[0]
        except ConnectionError:  # the server was about to exit
            if begun:
                return 1


if __name__ == "__main__":
    sys.exit(main())
