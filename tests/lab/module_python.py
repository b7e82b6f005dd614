#!/usr/bin/python3 -IS
"""The Python of Ansible's modules on a lab host: has each run in a fork of one process there, which `module_server.py` is.

A module takes a tenth of a second of a processor, three quarters of it to import what every module imports; the labs' playbooks
run thousands. The fork has this process's arguments, environment, directory and standard streams; all else is as /usr/bin/python3
does it.
"""

import _socket
import os
import sys
import time

SERVER = f"{__file__.rpartition('/')[0]}/module_server.py"
SOCKET, PROGRAM = 3, 4
"""The descriptors on which the server finds its socket and its program: where the checkout lies is not in its arguments."""


def connected():
    """A connection to the server of this user in this network namespace, which is started where there is none."""
    status = os.stat(SERVER)  # noqa: PTH116 - importing pathlib takes longer than all else here
    name = f"\0rackproof-lab-modules {status.st_dev} {status.st_ino} {os.getuid()}"
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
        except OSError:  # another was quicker
            time.sleep(0.001)
            continue
        listener.listen(64)
        if os.fork() == 0:
            os.setsid()
            streams = [os.open("/dev/null", os.O_RDWR)] * 3
            for number, stream in enumerate([*streams, listener.fileno(), os.open(SERVER, os.O_RDONLY)]):
                os.dup2(stream, number + 100)  # out of the way of each other
            for number in (0, 1, 2, SOCKET, PROGRAM):
                os.dup2(number + 100, number)
            os.closerange(PROGRAM + 1, 200)
            os.execv(sys.executable, [sys.executable, "-I", f"/proc/self/fd/{PROGRAM}"])  # noqa: S606
        listener.close()


def main():
    """Runs it there; the exit code."""
    wanted = repr((sys.argv, os.getcwd(), dict(os.environb), os.umask(0))).encode()  # noqa: PTH109
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    while True:
        channel, begun = connected(), False
        try:
            channel.sendmsg([wanted], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
            begun = bool(channel.recv(1))
            if begun:
                return (channel.recv(1) or b"\1")[0]
        except ConnectionError:  # it was about to end
            if begun:
                return 1


if __name__ == "__main__":
    sys.exit(main())
