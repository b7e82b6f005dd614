"""A key-value store for the ranks of a launch whose benchmarks do not use torch: a server on the first host, and its clients.

Like torch's store, it carries small texts between ranks. A client must first send the name of the launch, which only the
supervisors (the processes that launch the ranks) and their ranks know. All later messages are lines of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import time
from typing import Any

from schemas import documents

MAX_BYTES = 1 << 22
"""Maximum size of a message."""
ANSWER_S = 60.0
"""Seconds that a client waits for an answer, and that the server waits for the name of the launch."""
REDIAL_S = 0.2
"""Pause between two attempts of a client to connect."""


class KeyServer:
    """Serves the keys of one launch."""

    def __init__(self, name: str) -> None:
        self._name, self._values = name, dict[str, str]()

    async def serve(self, listener: socket.socket) -> None:
        """Serve clients on a listening socket until cancelled."""
        server = await asyncio.start_server(self._serve_client, sock=listener, limit=MAX_BYTES)
        async with server:
            await server.serve_forever()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name = (await asyncio.wait_for(reader.readline(), ANSWER_S)).strip()
            if not hmac.compare_digest(name, self._name.encode()):
                return
            while line := await reader.readline():
                request = documents.parse(line, source="a message to the store", max_bytes=MAX_BYTES)
                writer.write(json.dumps(self._answer(request)).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, TimeoutError, documents.DocumentError):  # ValueError: the line is too long
            return  # the client sees that the connection has ended
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, request: Any) -> Any:
        """Return the answer to a request; None if the request is not valid, or asks for a key that was not set."""
        match request:
            case {"set": str(key), "value": str(value)}:
                self._values[key] = value
                return True
            case {"get": str(key)}:
                return self._values.get(key)
            case {"check": list(keys)}:
                return all(isinstance(key, str) and key in self._values for key in keys)
        return None


class KeyStore:
    """A client of the store.

    Every method that sends a message raises RuntimeError if the store does not answer, as the methods of torch's store do.
    """

    def __init__(self, address: str, port: int, name: str, *, limit_s: float) -> None:
        """Connect to the store of the launch `name`. Try for `limit_s` seconds, because the first host may open it later."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self._socket = socket.create_connection((address, port), timeout=ANSWER_S)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no store at {address} port {port}: {error.strerror or error}") from error
                time.sleep(REDIAL_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._socket.makefile("rb")
        self._send(f"{name}\n".encode())

    def set(self, key: str, value: str) -> None:
        """Store the value."""
        self._ask({"set": key, "value": value})

    def get(self, key: str) -> bytes:
        """Return the value. Raises RuntimeError if the key was not set."""
        value = self._ask({"get": key})
        if not isinstance(value, str):
            raise RuntimeError(f"the store has no key {key}")
        return value.encode()

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys were set."""
        return self._ask({"check": keys}) is True

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._socket.close()

    def _send(self, line: bytes) -> None:
        try:
            self._socket.sendall(line)
        except OSError as error:
            raise _no_answer(error) from error

    def _ask(self, request: dict[str, Any]) -> Any:
        self._send(json.dumps(request).encode() + b"\n")
        try:
            line = self._lines.readline(MAX_BYTES)
        except OSError as error:
            raise _no_answer(error) from error
        if not line.endswith(b"\n"):
            raise RuntimeError("the store of the launch closed the connection")
        return json.loads(line)


def _no_answer(error: OSError) -> RuntimeError:
    return RuntimeError(f"the store of the launch does not answer: {error.strerror or error}")
