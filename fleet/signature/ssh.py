"""Signing and verifying by `ssh-keygen -Y`, so that the key which an operator has already is the one that signs."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import RackproofError, RunError, UsageError

NAMESPACE = "rackproof"
"""What a signature of this key is for: one of git or of a file is not taken for one of a run."""
TIMEOUT_S = 120.0
"""Enough to type a passphrase."""
_SIGNER = re.compile(r'Good "rackproof" signature for (.+) with (\S+) key (SHA256:\S+)')
_KEY = re.compile(r"Good \"rackproof\" signature with (\S+) key (SHA256:\S+)")


class SignatureError(RackproofError):
    """The signature does not hold: it is no signature of these bytes, or of nobody who is allowed to sign."""


@dataclass(frozen=True, kw_only=True)
class Signer:
    """Who signed."""

    identity: str
    kind: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.identity} ({self.kind} {self.fingerprint})"


def sign(data: bytes, key: Path) -> str:
    """An armoured signature of `data`.

    Args:
        data: what is signed.
        key: the private key, or a public one whose private half an agent has. A passphrase is asked for on the terminal.

    Raises:
        UsageError: there is no such key.
        RunError: ssh-keygen is missing or too old, or cannot use the key.
    """
    if not key.is_file():
        raise UsageError(
            f"--key {key}: no such file: give an SSH key, as ~/.ssh/id_ed25519 (ssh-keygen -t ed25519 makes one)"
        )
    done = _keygen("-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key), data=data)
    if done.returncode or not done.stdout.startswith("-----BEGIN SSH SIGNATURE-----"):
        raise RunError(f"{key}: {_why(done.stderr)}")
    return done.stdout


def verify(data: bytes, signature: Path, allowed: Path, identity: str | None) -> Signer:
    """Who signed `data`.

    Args:
        data: what was signed.
        signature: the armoured signature.
        allowed: an allowed_signers file, as ssh-keygen(1) has it.
        identity: whose signature it must be; None: anybody's in that file.

    Raises:
        SignatureError: it is not a signature of `data` by any of those.
        UsageError: there is no such file of signers.
        RunError: ssh-keygen is missing or too old.
    """
    if not allowed.is_file():
        raise UsageError(
            f"--allowed-signers {allowed}: no such file: each line is an identity and a public key, as "
            'alice@example.com namespaces="rackproof" ssh-ed25519 AAAA…'
        )
    of_whom = _keygen("-Y", "find-principals", "-s", str(signature), "-f", str(allowed), data=data)
    found = of_whom.stdout.splitlines()
    if identity is not None and found and identity not in found:
        raise SignatureError(f"signed by {', '.join(found)}, not by {identity}")
    refused = of_whom
    for principal in [identity] if identity is not None else found:
        refused = _keygen(
            *("-Y", "verify", "-n", NAMESPACE, "-s", str(signature), "-f", str(allowed), "-I", principal), data=data
        )
        if not refused.returncode and (match := _SIGNER.search(refused.stdout)):
            return Signer(identity=match[1], kind=match[2], fingerprint=match[3])
    raise SignatureError(_refused(refused, data, signature))


def _refused(done: subprocess.CompletedProcess[str], data: bytes, signature: Path) -> str:
    """Whether the bytes or the signer is the trouble."""
    alone = _keygen("-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature), data=data)
    if not alone.returncode and (match := _KEY.search(alone.stdout)):
        return f"it is of key {match[1]} {match[2]}, which the allowed signers do not hold, or not for this use or time"
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"no signature of these sums: {said[-1] if said else 'ssh-keygen refused it'}"


def _keygen(*arguments: str, data: bytes) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            ["ssh-keygen", *arguments],
            input=data,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise RunError("ssh-keygen is not installed: install OpenSSH 8.2 or newer (Debian: openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"ssh-keygen gave no answer in {TIMEOUT_S:.0f} s: is there a passphrase to type, or a token to touch?"
        ) from None
    out, err = (text.decode("utf-8", errors="replace") for text in (done.stdout, done.stderr))
    if "unknown option -- Y" in err or "illegal option -- Y" in err:
        raise RunError("this ssh-keygen cannot sign files: install OpenSSH 8.2 or newer")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def _why(said: str) -> str:
    """Why a key could not be used, and what to do."""
    if "incorrect passphrase" in said:
        return (
            "it has a passphrase, and there is no terminal to ask for it, or the one given is wrong: "
            "load it into an agent (ssh-add), or sign on a terminal"
        )
    if "bad permissions" in said or "UNPROTECTED PRIVATE KEY" in said:
        return "others may read this private key, so ssh-keygen does not use it: chmod 600"
    if "No private key found for public key" in said or "agent" in said:
        return f"a public key, and no agent has its private half: {said.strip().splitlines()[-1]}"
    if "No such file" in said or "invalid format" in said or "error in libcrypto" in said:
        # Of a file that is there and holds no key it says that the public key beside it is not there.
        return "it holds no SSH key: give one, as ~/.ssh/id_ed25519 (ssh-keygen -t ed25519 makes one)"
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return f"ssh-keygen: {lines[-1]}" if lines else "ssh-keygen refused it"
