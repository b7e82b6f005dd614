"""Fixtures of the tests of the agent."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time

import pytest

from tests.gangs import FakeClock


@pytest.fixture
def port() -> int:
    """Return a free TCP port below the kernel's ephemeral ports; the port after it is free too."""
    while True:
        first = 15_000 + 2 * secrets.randbelow(7_500)
        with contextlib.suppress(OSError), socket.socket() as first_socket, socket.socket() as second_socket:
            first_socket.bind(("127.0.0.1", first))
            second_socket.bind(("127.0.0.1", first + 1))
            return first


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace `time.monotonic()` by a fake clock, and return the fake."""
    fake = FakeClock()
    monkeypatch.setattr(time, "monotonic", fake)
    return fake
