"""Check that the host meets the requirements of a run.

Print facts as JSON, and each problem with its remedy on stderr; exit 1 if there is a problem, and MAY_BE_AHEAD if the only
problem is that the clock may be ahead of the control node's. Interfaces, addresses and files that the inventory names must exist
on the host: otherwise ranks would fail later, which would look like a hardware fault.

The role `preflight` runs this file as a script, before anything is installed. So it imports only the standard library. It also
runs on a Python that is too old, and then reports that as a problem. The agent imports some of these checks.
"""

import argparse
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

NETWORK = "/sys/class/net"
INFINIBAND = "/sys/class/infiniband"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""Hosts with the same boot ID are one machine. Except in a rehearsal, playbooks/callback_plugins/rackproof_events.py warns
about them."""
SHM = "/dev/shm"
NCCL_FILE, NCCL_USER_FILE = "/etc/nccl.conf", "~/.nccl.conf"
DISTORTING = {
    **dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), r"(?!0?$)"),
    **dict.fromkeys(("NCCL_P2P_USE_CUDA_MEMCPY", "PYTORCH_NO_CUDA_MEMORY_CACHING"), r"(?!0?$)"),
    **dict.fromkeys(("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE"), r"."),
    **dict.fromkeys(("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"), r"(?i:0|LOC)$"),
}
"""Environment variables that make a healthy GPU look slow or faulty -> regular expression for the values that do. `distorts` also
applies LEAST.

Measured on H200 with torch 2.11: NVIDIA_TF32_OVERRIDE=1 makes fp32 products wrong. With CUBLAS_WORKSPACE_CONFIG, torch starts
each product more slowly: bf16 products of 1024 x 1024 reach 44 instead of 174 TFLOP/s. With NCCL_P2P_USE_CUDA_MEMCPY, all_reduce
reaches a third of its rate. With PYTORCH_NO_CUDA_MEMORY_CACHING, a rank aborts in `peer_copy`."""
LEAST = {
    **dict.fromkeys(("NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_MAX_CTAS", "NCCL_MAX_P2P_NCHANNELS"), 32),
    "NCCL_BUFFSIZE": 4 << 20,
    "NCCL_NTHREADS": 512,
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": 100,
}
"""Environment variables that make a healthy GPU look slow if their number is lower than this one. The numbers of NCCL_BUFFSIZE
and NCCL_NTHREADS are NCCL's defaults. Within a host of Hopper GPUs, NCCL uses fewer than 32 channels (CTAs) for collectives, and
32 for send and receive (two H200: all_to_all reaches two thirds of its rate with 16)."""
OWN_ENVIRONMENT = "the environment of this command (its shell, job or pod template)"
MAY_BE_AHEAD = 3
"""Exit code if the clock is ahead of the time at which the control node began to connect. The connection may have taken that
long, so the role `preflight` compares `time` of the facts with the time at which the script has ended."""
INVALID_NAME = "not a valid host name (each part between dots must have 1 to 63 characters)"
FILES, FILES_OF_TORCH = 5_000, 20_000
"""FILES: estimated number of files of the agent, its virtual environment and its runs. FILES_OF_TORCH: that of torch and its
dependencies (17 000 for torch 2.13)."""


def problems(options: argparse.Namespace) -> "Iterator[str]":
    """Yield each problem with its remedy."""
    yield from options.problem
    if sys.version_info < (3, 10):
        yield "Python {}.{} is too old: set rackproof_python to a Python 3.10 or newer".format(*sys.version_info[:2])
        return
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        yield f"{sys.executable} cannot create virtual environments ({error}): install python3-venv"
    if options.system_torch and importlib.util.find_spec("torch") is None:
        yield f"rackproof_system_torch is set, but {sys.executable} has no torch: set rackproof_python to a Python with torch"
    behind_s = options.now - time.time()
    if behind_s > options.clock_skew:
        yield f"the clock is {behind_s:.1f} s behind the control node's: start chrony or systemd-timesyncd"
    yield from directory_problems(options)
    yield from own_name_problems()
    yield from network_problems(options)
    yield from environment_problems(os.environ, options.environment)
    # A gang (the hosts of one multi-node launch) uses three ports, in this order: for the rendezvous on its first host, for
    # status messages on its first host, and for status messages on its second host.
    rendezvous = [("rendezvous", options.rendezvous_port + offset) for offset in range(3)]
    for service, port in (("exporter", options.exporter_port), *rendezvous):
        owner = listening_process(port)
        is_agent = options.prefix in owner and any(word in owner for word in (" export", "agent.benchmarks", " launch"))
        if owner and not is_agent:
            where = " for all hosts of the gang" if service == "rendezvous" else ""
            yield f"port {port} is in use by {owner[:150]}: stop it, or set rackproof_{service}_port{where}"


def own_name_problems() -> "Iterator[str]":
    """Yield the problem of this host's own name: it cannot be resolved."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        yield f"the host does not resolve its own name {name}: add it to /etc/hosts"
    except UnicodeError:
        yield f"the host's own name {name} is {INVALID_NAME}: change it with `hostnamectl set-hostname`"


def directory_problems(options: argparse.Namespace) -> "Iterator[str]":
    """Yield the problems of the agent's directories and of the directory for temporary files."""
    for name, directory in (("rackproof_prefix", options.prefix), ("rackproof_state_directory", options.state)):
        parent = nearest_directory(directory)
        mount = os.statvfs(parent)
        free = mount.f_bavail * mount.f_frsize
        if free < options.free_bytes:
            yield (
                f"{directory} has {free} bytes free, and {options.free_bytes} are required: free up space, or lower "
                "rackproof_minimum_free_bytes"
            )
        files = FILES if options.system_torch else FILES + FILES_OF_TORCH
        if mount.f_files > 0 and mount.f_favail < files:
            yield f"{directory} has {mount.f_favail} free inodes, and {files} are required: remove files, or set {name}"
        if mount.f_flag & os.ST_NOEXEC:
            yield f"{directory} is on a file system that is mounted noexec: set {name} to a directory on another file system"
        if not os.access(parent, os.W_OK):
            yield f"{directory} is not writable by this user: set ansible_become, or use another directory"
        elif os.path.exists(directory) and not os.path.isdir(directory):
            yield f"{directory} is not a directory: correct {name}"
    names = os.listdir(options.prefix) if os.path.isdir(options.prefix) else []
    if names and not any(name == "wheels" or name.startswith("installed-") for name in names):
        yield f"{options.prefix} contains files that are not the agent's: set rackproof_prefix to a separate directory"
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        yield f"no temporary file can be written ({error}): free up space in /tmp, or make /tmp writable"
    yield from shared_memory_problems(SHM)


def shared_memory_problems(directory: str) -> "Iterator[str]":
    """Yield the problem of the directory for shared memory, /dev/shm: no file can be written in it."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        yield (
            f"{directory}: no file can be written ({error.strerror or error}), and torch, NCCL and data loaders need shared "
            "memory: remove old files in it, or mount a tmpfs with mode 1777 there"
        )


def network_problems(options: argparse.Namespace) -> "Iterator[str]":
    """Yield the problems of the interface and the addresses that the inventory names."""
    if options.interface:
        yield from interface_problems("rackproof_fabric_interface", options.interface)
    yield from address_problems("rackproof_fabric_address", options.address)
    yield from address_problems("rackproof_exporter_listen", options.exporter_address)


def address_problems(variable: str, address: str) -> "Iterator[str]":
    """Yield the problem of an address on which this host is to listen; none if no address is given."""
    if not address:
        return
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        yield (
            f"{variable} {address} cannot be resolved on this host ({error.strerror or error}): set it to a numeric address"
        )
        return
    except UnicodeError:
        yield f"{variable} {address} is {INVALID_NAME}: correct it, or set it to a numeric address"
        return
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(target)
        except OSError:
            yield f"{variable} is {address}, but no interface of this host has this address: set it to an address of this host"


def interface_problems(variable: str, name: str) -> "Iterator[str]":
    """Yield the problems of a network interface."""
    if not os.path.isdir(f"{NETWORK}/{name}"):
        yield (
            f"{variable} is {name}, but this host has only {', '.join(sorted(names_in(NETWORK)))}: set it to "
            "the interface of the network between the hosts, or leave it empty"
        )
    elif content(f"{NETWORK}/{name}/operstate") in ("down", "lowerlayerdown", "notpresent"):
        yield f"{variable} is {name}, but this interface is down: check `ip link show {name}`, or set another interface"


def environment_problems(
    environment: "Mapping[str, str]",
    given: "Mapping[str, str]",
    *,
    network: bool = True,
    source: str = "the environment of this host",
    given_source: str = "rackproof_environment",
    remedy: str = "remove it there, or set it in rackproof_environment to measure with it",
) -> "Iterator[str]":
    """Yield the problems of the environment variables that the ranks get.

    The variables come from NCCL's configuration files, `environment` and `given`. If several of them set a variable, the last one
    in this order counts.

    Args:
        environment: variables of the process that starts the ranks.
        given: variables that the operator or Rackproof sets for the ranks.
        network: whether the ranks use the network between hosts.
        source, given_source: where `environment` and `given` are set, in words.
        remedy: what to do about a variable that distorts measurements and is not in `given`.
    """
    variables, sources = nccl_files({**environment, **given})
    for values, name in ((environment, source), (given, given_source)):
        variables.update(values)
        sources.update(dict.fromkeys(values, name))
    if network:
        yield from network_selection_problems(variables, sources)
    for name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE"):
        path = variables.get(name, "")
        if path and not os.path.isfile(path):
            yield (
                f"{name} is {path} in {sources[name]}, but this host has no such file: copy it to this host, or remove "
                "the variable"
            )
    for name in (*DISTORTING, *LEAST):
        if distorts(name, variables.get(name)) and name not in given:
            where = f"{name} is {variables[name]} in {sources[name]}"
            yield f"{where}, which makes a healthy GPU look slow or faulty: {remedy}"


def distorts(name: str, value: "str | None") -> bool:
    """Return whether this value of an environment variable makes a healthy GPU look slow or faulty. `value`: None if not set."""
    if value is None or name not in LEAST:
        return value is not None and bool(re.match(DISTORTING.get(name, r"(?!)"), value))
    # NCCL reads whole numbers like strtoll with base 0, and ignores other texts.
    number = re.match(r"\s*(0[xX][0-9a-fA-F]+|\d+(\.\d+)?)\s*$", value)
    if not number:
        return False
    text = number[1]
    return (int(text, 16) if text[:2] in ("0x", "0X") else float(text)) < LEAST[name]


def network_selection_problems(variables: "Mapping[str, str]", sources: "Mapping[str, str]") -> "Iterator[str]":
    """Yield the problems of the variables that select interfaces and adapters. `sources`: where each variable is set."""
    for name, directory, kind in (("NCCL_SOCKET_IFNAME", NETWORK, "interface"), ("NCCL_IB_HCA", INFINIBAND, "adapter")):
        wanted, known = variables.get(name, ""), names_in(directory)
        is_unused = name == "NCCL_IB_HCA" and variables.get("NCCL_IB_DISABLE") == "1"
        reason = selection_problem(wanted, known, kind) if wanted and not is_unused else ""
        if reason:
            yield f"{name} is {wanted} in {sources[name]}, {reason}"
    for name in filter(None, variables.get("GLOO_SOCKET_IFNAME", "").split(",")):
        yield from interface_problems(f"GLOO_SOCKET_IFNAME in {sources['GLOO_SOCKET_IFNAME']}", name)


def nccl_files(environment: "Mapping[str, str]") -> "tuple[dict[str, str], dict[str, str]]":
    """Return the variables of NCCL's configuration files on this host, and the file of each.

    The user's file takes precedence over the system's. NCCL_CONF_FILE names another file of the user.
    """
    variables, sources = {}, {}
    for path in (NCCL_FILE, environment.get("NCCL_CONF_FILE") or os.path.expanduser(NCCL_USER_FILE)):
        for line in content(path).splitlines():
            name, equals, value = line.partition("#")[0].partition("=")
            if equals:
                variables[name.strip()] = value.strip()
                sources[name.strip()] = path
    return variables, sources


def selection_problem(wanted: str, known: "Sequence[str]", kind: str) -> str:
    """Return why NCCL selects none of the names in `known`, with the remedy.

    The result is empty if NCCL selects at least one name, or if `wanted` excludes names and `known` is empty.

    Args:
        wanted: value of the environment variable NCCL_SOCKET_IFNAME or NCCL_IB_HCA.
        known: names of this host's interfaces or adapters.
        kind: `interface` or `adapter`.
    """
    excludes = wanted.startswith("^")
    if nccl_selection(wanted, known) or (excludes and not known):
        return ""
    available = ", ".join(sorted(known))
    if excludes:
        return f"which excludes every {kind} of this host ({available}): exclude fewer"
    if not known:
        return f"but this host has no {kind}: load its driver, or remove the variable"
    return f"but this host has {available}: name an {kind} of this host"


def nccl_selection(wanted: str, known: "Sequence[str]") -> "list[str]":
    """Return the known names that NCCL selects for `wanted`.

    `mlx5,ib` selects the names that begin with `mlx5` or `ib`, `=mlx5_0` only the name `mlx5_0`, `^ib` the names that do not
    begin with `ib`, and `^=ib0` all names but `ib0`. A `:PORT` after a name is ignored.
    """
    excludes, whole = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    parts = [part.partition(":")[0] for part in wanted.lstrip("^=").split(",")]
    matches = [name for name in known if any(name == part if whole else name.startswith(part) for part in parts)]
    return [name for name in known if name not in matches] if excludes else matches


def names_in(directory: str) -> "list[str]":
    """Return the names in a directory; empty if it does not exist."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def content(path: str) -> str:
    """Return the text of a file without white space at its beginning and end; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def nearest_directory(path: str) -> str:
    """Return `path`, or its nearest parent directory that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    return path


def listening_process(port: int) -> str:
    """Return process id and command line of the process that listens on a TCP port.

    Return an empty text if no process listens, and "a process of another user" if this user cannot see the process.
    """
    for _ in range(3):
        inodes = listening_sockets(port)
        if not inodes:
            return ""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if any(inode in inodes for inode in open_files(pid)):
                    with open(f"/proc/{pid}/cmdline") as file:
                        return f"process {pid} ({file.read().replace(chr(0), ' ').strip()})"
            except OSError:
                continue
        time.sleep(0.1)  # the process has ended, or this user cannot see it
    return "a process of another user"


def listening_sockets(port: int) -> "set[str]":
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


def open_files(pid: str) -> "Iterator[str]":
    """Yield the open files of a process, except those that the process closes meanwhile."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:
            continue


def main() -> int:
    """Print facts and problems. Return the exit code."""
    parser = argparse.ArgumentParser()
    for name, kind in (("now", float), ("clock-skew", float), ("free-bytes", int), ("prefix", str), ("state", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("exporter-port", "rendezvous-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--interface", default="")
    parser.add_argument("--address", default="")
    parser.add_argument("--exporter-address", default="")
    parser.add_argument("--environment", type=json.loads, default={})
    parser.add_argument("--system-torch", action="store_true")
    parser.add_argument("--problem", action="append", default=[], help="a problem that the control node found")
    options = parser.parse_args()
    reasons = list(problems(options))
    code = 1 if reasons else 0
    now = time.time()
    if not reasons and now - options.now > options.clock_skew:
        # Beside another problem, this is left out: the role does not find out whether the connection took that long.
        ahead = f"{now - options.now:.1f} s ahead of the control node's, less the time that the connection took"
        reasons.append(f"the clock is {ahead}: start chrony or systemd-timesyncd")
        code = MAY_BE_AHEAD
    writable = [path for path in ("/run/systemd/system", "/dev/kmsg") if os.access(path, os.W_OK)]
    print(json.dumps({"writable": writable, "boot_id": content(BOOT_ID), "time": now}))
    print("; ".join(reasons), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
