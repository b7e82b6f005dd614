"""Kernel namespaces of this process."""

from __future__ import annotations

from collectors.files import Files

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The initial PID namespace of every Linux kernel (PROC_PID_INIT_INO)."""


def has_own_pid_namespace(files: Files) -> bool:
    """Return whether this process is outside the initial PID namespace, as in a container. False if that cannot be read."""
    try:
        return files.target("proc/self/ns/pid") != _FIRST_PID_NAMESPACE
    except OSError:
        return False
