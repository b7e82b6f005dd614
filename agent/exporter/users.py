"""Basic authentication of the exporter's clients."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import bcrypt


class Users:
    """Basic authentication with bcrypt hashes. bcrypt is slow, so the fingerprint of a user's last correct header is kept."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = {name: text.encode() for name, text in hashes.items()}
        self._dummy_hash = bcrypt.hashpw(secrets.token_bytes(16), bcrypt.gensalt(10))
        self._salt = secrets.token_bytes(16)
        # User -> fingerprint of the last correct Authorization header. Only one is kept per user, so that the size is limited.
        self._verified: dict[str, bytes] = {}
        self._executor = ThreadPoolExecutor(1, "bcrypt")  # one thread, so that password guessing uses at most one core

    async def admits(self, header: str) -> bool:
        """Return whether the Authorization header is valid.

        An unknown user is answered as slowly as a known user with a wrong password (if the hashes of the users have cost 10), so
        response times do not show which users exist.
        """
        if not self._hashes:
            return True
        scheme, _, encoded = header.partition(" ")
        try:
            name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return False
        if scheme.lower() != "basic":
            return False
        known = self._hashes.get(name)
        fingerprint = hmac.digest(self._salt, encoded.encode(), hashlib.sha256)
        if known and hmac.compare_digest(fingerprint, self._verified.get(name, b"")):
            return True
        # bcrypt uses at most 72 bytes, and its newer versions reject longer passwords.
        loop, secret = asyncio.get_running_loop(), password.encode()[:72]
        try:
            correct = await loop.run_in_executor(self._executor, bcrypt.checkpw, secret, known or self._dummy_hash)
        except ValueError:  # the password contains a zero byte
            return False
        if known and correct:
            self._verified[name] = fingerprint
        return bool(known) and correct
