"""Can this host be measured? Prints what was found, and each problem with its remedy on stderr; exits 1 where there is one.

Runs before anything is installed, so it needs nothing but Python.
"""

import argparse
import os
import shutil
import socket
import sys
import time


def problems(options):
    """Every reason why this host cannot be measured."""
    if sys.version_info < (3, 10):
        yield "Python {}.{} is too old: set rackproof_python to a Python 3.10 or newer".format(*sys.version_info[:2])
        return
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        yield f"{sys.executable} cannot make virtual environments ({error}): install python3-venv"
    skew = time.time() - options.now
    if abs(skew) > options.clock_skew:
        yield f"the clock is {skew:+.1f} s off the control node's: start chrony or systemd-timesyncd"
    for directory in (options.prefix, options.state):
        free = shutil.disk_usage(existing(directory)).free
        if free < options.free_bytes:
            yield f"{directory} has {free} of {options.free_bytes} bytes free: make room, or lower rackproof_minimum_free_bytes"
        if not os.access(existing(directory), os.W_OK):
            yield f"{directory} cannot be written by this user: set ansible_become, or another directory"
    held = os.listdir(options.prefix) if os.path.isdir(options.prefix) else []
    if held and not any(name == "wheels" or name.startswith("installed-") for name in held):
        yield f"{options.prefix} holds something that is not the agent: set rackproof_prefix to a directory of its own"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        yield f"the host does not resolve its own name {socket.gethostname()}: add it to /etc/hosts"
    meeting = [
        ("rendezvous", options.rendezvous_port + more) for more in range(3)
    ]  # the ranks', and two for heartbeats
    for what, port in (("exporter", options.exporter_port), *meeting):
        owner = listener(port)
        ours = options.prefix in owner and any(word in owner for word in (" export", "agent.benchmarks", " launch"))
        if owner and not ours:
            yield f"port {port} is taken by {owner[:150]}: end it, or set rackproof_{what}_port"


def existing(path):
    """The nearest directory above `path` that is there."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    return path


def listener(port):
    """Command line of the process that listens on a TCP port; empty where none does."""
    for _ in range(3):
        inodes = listening(port)
        if not inodes:
            return ""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if any(inode in inodes for inode in opened(pid)):
                    with open(f"/proc/{pid}/cmdline") as file:
                        return f"process {pid} ({file.read().replace(chr(0), ' ').strip()})"
            except OSError:
                continue
        time.sleep(0.1)  # it ended while it was looked for, or cannot be seen
    return "a process of another user"


def listening(port):
    """The sockets that listen on it."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                for fields in (line.split() for line in list(lines)[1:]):
                    if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                        found.add(f"socket:[{fields[9]}]")
        except OSError:
            continue
    return found


def opened(pid):
    """What a process has open now; it opens and closes more meanwhile."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:
            continue


def main():
    """Prints what was found; 1 where anything stands in the way."""
    parser = argparse.ArgumentParser()
    for name, kind in (("now", float), ("clock-skew", float), ("free-bytes", int), ("prefix", str), ("state", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("exporter-port", "rendezvous-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    found = list(problems(parser.parse_args()))
    print("systemd" if os.path.isdir("/run/systemd/system") else "no systemd")
    print("; ".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
