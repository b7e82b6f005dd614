"""Test that known errors of Ansible, ssh, sudo and pip get a remedy, and other messages are unchanged."""

from __future__ import annotations

import pytest

from fleet.records.remedies import with_remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            "root@10.77.0.11: Permission denied (publickey).",
            "(publickey): the host refuses this account and key",
        ),
        ("Task failed: Missing sudo password", "sudo password: use --ask-become-pass"),
        ("/bin/sh: 1: /usr/bin/python3: not found", "not found: this Python is not on the host"),
        ("/opt/conda/bin/python: No such file or directory", "directory: this Python is not on the host"),
        ("ERROR: No matching distribution found for pyyaml<7,>=6.0", "docs/air-gapped.md"),
        ("on a controller: [Errno 2] No such file or directory: b'ssh'", "'ssh': the control node has no SSH client"),
        ("ERROR: Ansible requires the locale encoding to be UTF-8; Detected None.", "export LC_ALL=C.UTF-8"),
        (
            "/opt/rackproof/bin/rackproof: No such file or directory",
            "directory: the agent is not installed on the host",
        ),
        ("ssh: connect to host h1 port 22: Connection refused", "refused: check that ssh reaches the host"),
        (
            "NewConnectionError: [Errno 113] No route to host ERROR: No matching distribution found for torch==2.8.0",
            "docs/air-gapped.md",
        ),
    ],
)
def test_known_error_gets_a_remedy(error: str, remedy: str) -> None:
    assert remedy in with_remedy(error)


@pytest.mark.parametrize(
    "error",
    [
        "NCCL WARN Connection refused",
        "open: Permission denied (13)",
        "port 29501 is in use by process 114 (python3 -m http.server): stop it",
        "No space left on device",
    ],
)
def test_message_without_a_known_remedy_is_unchanged(error: str) -> None:
    assert with_remedy(error) == error
