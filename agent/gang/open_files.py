"""The limit on the open files of a process (`ulimit -n`).

The first host of a gang (the hosts of one multi-node launch) keeps a connection to each rank and to each other host, and each
connection counts as an open file. The usual soft limit of 1 024 is too small for 114 hosts with 8 GPUs each.
"""

from __future__ import annotations

import contextlib
import resource

OTHER_FILES = 128
"""Files that a process has open besides its connections: upper estimate."""
MAX_SOFT_LIMIT = 1 << 20
"""Highest soft limit that is set. The hard limit of a container may be 10^9, and some programs need time for each possible
file when they start."""


def raise_soft_limit(connections: int = MAX_SOFT_LIMIT) -> None:
    """Raise the soft limit of this process to `attainable_limit`, if it is too small for this number of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = attainable_limit()
    if soft != resource.RLIM_INFINITY and soft < min(connections + OTHER_FILES, raised):
        # Even root may not set this limit if the hard limit exceeds fs.nr_open.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def attainable_limit() -> int:
    """Return the highest soft limit that `raise_soft_limit` can set."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_SOFT_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_SOFT_LIMIT)


def reason_too_small(hosts: int, ranks: int) -> str:
    """Return why the first host of a launch cannot keep its connections open, with the remedy; empty if it can.

    Args:
        hosts, ranks: number of hosts and ranks of the launch.
    """
    needed, limit = hosts + ranks + OTHER_FILES, attainable_limit()
    if limit >= needed:
        return ""
    return (
        f"a process may have {limit} files open (ulimit -Hn), and the first host of a launch needs {needed}, because it keeps a "
        f"connection to each of {ranks} ranks and {hosts} hosts: raise the hard limit (of a user: `nofile` in "
        "/etc/security/limits.conf; of a systemd unit: LimitNOFILE; of a container: --ulimit nofile)"
    )
