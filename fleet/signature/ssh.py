"""Sign and verify with `ssh-keygen -Y`, so that operators can use the SSH key they already have."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from schemas.errors import RackproofError, RunError, UsageError

NAMESPACE = "rackproof"
"""Namespace of the signature. A signature with another namespace, such as `git`, is not accepted for a run."""
TIMEOUT_S = 120.0
"""Limit for ssh-keygen, long enough for the operator to type a passphrase."""
_SIGNER = re.compile(r'Good "rackproof" signature for (.+) with (\S+) key (SHA256:\S+)')
_KEY = re.compile(r"Good \"rackproof\" signature with (\S+) key (SHA256:\S+)")


class SignatureError(RackproofError):
    """The signature is invalid: it does not match the data, or the signer is not allowed."""


@dataclass(frozen=True, kw_only=True)
class Signer:
    """The identity and key that signed."""

    identity: str
    kind: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.identity} ({self.kind} {self.fingerprint})"


def sign(data: bytes, key: Path) -> str:
    """Return an armoured signature of `data`.

    Args:
        data: the bytes to sign.
        key: file with the private key, or with a public key whose private key is in an SSH agent. If the private key has a
            passphrase, ssh-keygen asks for it.

    Raises:
        UsageError: the key file does not exist.
        RunError: ssh-keygen is missing or too old, or cannot use the key.
    """
    if not key.is_file():
        raise UsageError(
            f"--key {key}: no such file: give an SSH key, such as ~/.ssh/id_ed25519 (create one with ssh-keygen -t ed25519)"
        )
    done = _keygen("-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key), data=data)
    if done.returncode or not done.stdout.startswith("-----BEGIN SSH SIGNATURE-----"):
        raise RunError(f"{key}: {_key_problem(done.stderr)}")
    return done.stdout


def verify(data: bytes, signature: Path, allowed: Path, identity: str | None, at: float) -> Signer:
    """Return the allowed signer who signed `data`.

    Args:
        data: the signed bytes.
        signature: file with the armoured signature.
        allowed: an allowed_signers file, see ssh-keygen(1).
        identity: identity of the required signer; None: any signer in the file `allowed`.
        at: time at which the signer must be allowed (`valid-after` and `valid-before` in the file), in seconds since 1970.

    Raises:
        SignatureError: the signature does not match `data`, the signer is not allowed, or `identity` requires another signer.
        UsageError: there is no file of allowed signers.
        RunError: ssh-keygen is missing or too old.
    """
    if not allowed.is_file():
        raise UsageError(
            f"--allowed-signers {allowed}: no such file: give a file with an identity and a public key on each line, such as "
            'alice@example.com namespaces="rackproof" ssh-ed25519 AAAA…'
        )
    # Without a zone, ssh-keygen takes this as local time, like the times in the file. Versions before 9.1 know no zone.
    when = f"-Overify-time={datetime.fromtimestamp(at).astimezone():%Y%m%d%H%M%S}"
    done = _keygen("-Y", "find-principals", when, "-s", str(signature), "-f", str(allowed), data=data)
    principals = done.stdout.splitlines()
    # The principals may be patterns, such as *@example.com. ssh-keygen decides whether they match the identity.
    others = []
    for principal in principals if identity is None else [identity, *principals]:
        done = _keygen(
            *("-Y", "verify", when, "-n", NAMESPACE, "-s", str(signature), "-f", str(allowed), "-I", principal),
            data=data,
        )
        if not done.returncode and (match := _SIGNER.search(done.stdout)):
            if identity is None or principal == identity:
                return Signer(identity=match[1], kind=match[2], fingerprint=match[3])
            others.append(principal)
    if others:
        raise SignatureError(f"signed by {', '.join(others)}, not by {identity}")
    raise SignatureError(_reason_invalid(done, data, signature))


def _reason_invalid(done: subprocess.CompletedProcess[str], data: bytes, signature: Path) -> str:
    """Return why the signature is invalid: the data changed, or the signer is not allowed."""
    check = _keygen("-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature), data=data)
    if not check.returncode and (match := _KEY.search(check.stdout)):
        return (
            f"made with key {match[1]} {match[2]}: the allowed signers have no entry for this key "
            f"and the namespace {NAMESPACE}, or the entry was not valid when the run was signed"
        )
    output = (done.stderr or done.stdout).strip().splitlines()
    return f"does not match the checksums: {output[-1] if output else 'ssh-keygen rejected it'}"


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
            f"ssh-keygen did not answer within {TIMEOUT_S:.0f} s: does it wait for a passphrase or a security token?"
        ) from None
    out, err = (text.decode("utf-8", errors="replace") for text in (done.stdout, done.stderr))
    if "unknown option -- Y" in err or "illegal option -- Y" in err:
        raise RunError("this ssh-keygen cannot sign files: install OpenSSH 8.2 or newer")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def _key_problem(output: str) -> str:
    """Return why a key could not be used, and what to do."""
    if "incorrect passphrase" in output:
        return "wrong passphrase, or no terminal to ask for it: load the key into an SSH agent (ssh-add), or sign on a terminal"
    if "bad permissions" in output or "UNPROTECTED PRIVATE KEY" in output:
        return "other users can read this private key, so ssh-keygen does not use it: run chmod 600 on it"
    if "No private key found for public key" in output or "agent" in output:
        return f"this is a public key, and no SSH agent has its private key: {output.strip().splitlines()[-1]}"
    if "No such file" in output or "invalid format" in output or "error in libcrypto" in output:
        # If the file contains no key, ssh-keygen reports that the public key file next to it is missing.
        return "not an SSH key: give one, such as ~/.ssh/id_ed25519 (create one with ssh-keygen -t ed25519)"
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return f"ssh-keygen: {lines[-1]}" if lines else "ssh-keygen rejected it"
