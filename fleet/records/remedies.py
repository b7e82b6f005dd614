"""Remedies for errors of Ansible, ssh, sudo and pip that name the problem but not the fix."""

from __future__ import annotations

import re

REMEDIES = (
    (
        r"No matching distribution found for",
        "rackproof_wheelhouse or the package index has none for this host's Python: docs/air-gapped.md says how to gather them; "
        "where the host brings torch, set rackproof_system_torch",
    ),
    (
        r"Permission denied \((publickey|password|keyboard|gssapi|hostbased)",
        "the host does not take this account with this key: set ansible_user and ansible_ssh_private_key_file; try them by ssh",
    ),
    (
        r"Host key verification failed",
        "log in once by ssh, or put the host's key into ~/.ssh/known_hosts",
    ),
    (
        r"ssh: (connect to host .*: (Connection (refused|timed out)|No route to host)|Could not resolve hostname)",
        "check that ssh reaches the host: ansible_host, ansible_port, its network",
    ),
    (
        r"Missing sudo password|Incorrect sudo password|sudo: a password is required",
        "start it with --ask-become-pass (make acceptance ARGS=--ask-become-pass), or give the account sudo without a password",
    ),
    (
        r"is not in the sudoers file",
        "let the account use sudo on the host, or set ansible_user to one that may",
    ),
    (
        r"python[\d.]*'?: (not found|No such file or directory)|module interpreter .* was not found",
        "the host has no such Python: install python3 there, or name the one that it has by ansible_python_interpreter "
        "and rackproof_python",
    ),
)


def with_remedy(message: str) -> str:
    """Return the message with its remedy, if there is one."""
    for words, remedy in REMEDIES:
        if re.search(words, message):
            return f"{message.rstrip('.')}: {remedy}"
    return message
