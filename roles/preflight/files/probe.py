"""Check that the host can be measured. Print facts as JSON, and each problem with its remedy on stderr; exit 1 if there is one.

It runs before anything is installed, so it needs only Python.
"""

import argparse
import json
import os
import shutil
import socket
import sys
import time


def problems(options):
    """Yield each reason why the host cannot be measured, with its remedy."""
    if sys.version_info < (3, 10):
        yield "Python {}.{} is too old: set rackproof_python to a Python 3.10 or newer".format(*sys.version_info[:2])
        return
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        yield f"{sys.executable} cannot create virtual environments ({error}): install python3-venv"
    skew = time.time() - options.now
    if abs(skew) > options.clock_skew:
        yield f"the clock is {skew:+.1f} s off the control node's: start chrony or systemd-timesyncd"
    for directory in (options.prefix, options.state):
        free = shutil.disk_usage(existing(directory)).free
        if free < options.free_bytes:
            yield f"{directory} has {free} of {options.free_bytes} bytes free: free space, or lower rackproof_minimum_free_bytes"
        if not os.access(existing(directory), os.W_OK):
            yield f"{directory} is not writable by this user: set ansible_become, or use another directory"
    names = os.listdir(options.prefix) if os.path.isdir(options.prefix) else []
    if names and not any(name == "wheels" or name.startswith("installed-") for name in names):
        yield f"{options.prefix} contains files that are not the agent's: set rackproof_prefix to a separate directory"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        yield f"the host does not resolve its own name {socket.gethostname()}: add it to /etc/hosts"
    rendezvous = [("rendezvous", options.rendezvous_port + offset) for offset in range(3)]  # the last two: heartbeats
    for service, port in (("exporter", options.exporter_port), *rendezvous):
        owner = listener(port)
        is_agent = options.prefix in owner and any(word in owner for word in (" export", "agent.benchmarks", " launch"))
        if owner and not is_agent:
            yield f"port {port} is in use by {owner[:150]}: stop it, or set rackproof_{service}_port"


def existing(path):
    """Return `path`, or its nearest parent directory that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    return path


def listener(port):
    """Return the command line of the process that listens on a TCP port; empty if there is none."""
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
        time.sleep(0.1)  # the process ended meanwhile, or is not visible to this user
    return "a process of another user"


def listening(port):
    """Return the sockets that listen on the port."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                for fields in (line.split() for line in list(lines)[1:]):
                    if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                        sockets.add(f"socket:[{fields[9]}]")
        except OSError:
            continue
    return sockets


def opened(pid):
    """Yield the open files of a process. It may close some meanwhile."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:
            continue


def main():
    """Print facts and problems. Return 1 if there is a problem."""
    parser = argparse.ArgumentParser()
    for name, kind in (("now", float), ("clock-skew", float), ("free-bytes", int), ("prefix", str), ("state", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("exporter-port", "rendezvous-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    reasons = list(problems(parser.parse_args()))
    writable = [path for path in ("/run/systemd/system", "/dev/kmsg") if os.access(path, os.W_OK)]
    print(json.dumps({"writable": writable}))
    print("; ".join(reasons), file=sys.stderr)
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
