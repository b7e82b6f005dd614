"""Remedies for errors of Ansible, ssh, sudo and pip that name the problem but not the fix."""

from __future__ import annotations

import re

REMEDIES = (
    (
        r"requires the locale encoding to be UTF-8|could not initialize the preferred locale",
        "set a UTF-8 locale that `locale -a` lists, for example: export LC_ALL=C.UTF-8",
    ),
    (
        r"is not a known host nor group",
        "check the indentation: hosts belong under `hosts`, variables under `vars`",
    ),
    (
        r"YAML inventory has invalid structure",
        "Ansible reads every file of an inventory directory as an inventory: move other files to another directory",
    ),
    (
        r"No such file or directory: b?'(ssh|sftp|scp)'",
        "the control node has no SSH client: install it (Debian: openssh-client)",
    ),
    (
        r"No matching distribution found for",
        "the host does not reach its package index, or no wheel in the index or in rackproof_wheelhouse fits this host's Python: "
        "docs/air-gapped.md describes how to collect wheels; if torch is installed on the host, set rackproof_system_torch",
    ),
    (
        r"Permission denied \((publickey|password|keyboard|gssapi|hostbased)",
        "the host refuses this account and key: set ansible_user and ansible_ssh_private_key_file, and try them with ssh",
    ),
    (
        r"Host key verification failed",
        "log in once by ssh, or put the host's key into ~/.ssh/known_hosts",
    ),
    (
        r"ssh: (connect to host .*: (Connection (refused|timed out)|No route to host)|Could not resolve hostname)",
        "check that ssh reaches the host: check ansible_host, ansible_port and the network of the host",
    ),
    (
        r"Missing sudo password|Incorrect sudo password|sudo: a password is required",
        "use --ask-become-pass (make acceptance ARGS=--ask-become-pass), or allow the account sudo without a password",
    ),
    (
        r"is not in the sudoers file",
        "allow the account sudo on the host, or set ansible_user to an account with sudo",
    ),
    (
        r"/bin/rackproof: No such file or directory",
        "the agent is not installed on the host, or rackproof_prefix has changed: run the playbook without --tags",
    ),
    (
        r"python[\d.]*'?: (not found|No such file or directory)|module interpreter .* was not found",
        "this Python is not on the host: install python3, or set ansible_python_interpreter and rackproof_python to an "
        "installed Python",
    ),
)


def with_remedy(message: str) -> str:
    """Return the message, followed by a remedy if one is known."""
    for pattern, remedy in REMEDIES:
        if re.search(pattern, message):
            return f"{message.rstrip('.')}: {remedy}"
    return message
