"""Read the exporter's TLS settings and users from a `web.config.yml`, in the format of Prometheus and its exporters.

The format: https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. Supported are
`tls_server_config` with `cert_file`, `key_file`, `client_ca_file`, `client_auth_type` and `min_version`, and `basic_auth_users`
with bcrypt hashes.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from schemas.errors import RackproofError

# The format's other types, RequestClientCert and RequireAnyClientCert, are rejected: they request a client certificate without
# verifying it, and Python's ssl module always verifies it.
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_BCRYPT = re.compile(r"\$2[aby]\$\d\d\$[./A-Za-z0-9]{53}")


class WebConfigError(RackproofError, ValueError):
    """The configuration file, or a file that it names, cannot be used. The message says which file, and why."""


@dataclass(frozen=True, kw_only=True)
class WebConfig:
    """TLS settings and users of the exporter. The defaults are plain HTTP without authentication."""

    cert_file: Path | None = None
    """PEM file with the exporter's certificate. None: plain HTTP."""
    key_file: Path | None = None
    """PEM file with the private key of the certificate."""
    client_ca_file: Path | None = None
    """PEM file with the CA that signs client certificates."""
    client_auth_type: str = "NoClientCert"
    """A key of CLIENT_AUTH: whether clients need a certificate."""
    min_version: str = "TLS12"
    """A key of VERSIONS: the oldest TLS version that is accepted."""
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """User -> bcrypt hash."""

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the server; None for plain HTTP.

        Raises:
            WebConfigError: the certificate, key or CA cannot be read, or certificate and key do not match.
        """
        if self.cert_file is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[self.min_version]
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise WebConfigError(f"certificate {self.cert_file} with key {self.key_file}: {_reason(error)}") from error
        if self.client_ca_file is not None:
            try:
                context.load_verify_locations(self.client_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise WebConfigError(f"client_ca_file {self.client_ca_file}: {_reason(error)}") from error
        context.verify_mode = CLIENT_AUTH[self.client_auth_type]
        return context


def read_web_config(path: Path) -> WebConfig:
    """Return the configuration in the file at `path`. Relative paths in it are relative to the directory of the file.

    Raises:
        WebConfigError: the file cannot be read, or has settings that this exporter does not support.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WebConfigError(f"{path}: {_reason(error)}") from error
    sections = _section(path, document, "the file", {"tls_server_config", "basic_auth_users", "http_server_config"})
    tls = _section(
        path,
        sections.get("tls_server_config", {}),
        "tls_server_config",
        {"cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version"},
    )
    # `http2` is accepted and has no effect: only HTTP/1.1 is served.
    _section(path, sections.get("http_server_config", {}), "http_server_config", {"http2"})
    users = _section(path, sections.get("basic_auth_users", {}), "basic_auth_users", None)
    for name, hashed in users.items():
        if not _BCRYPT.fullmatch(str(hashed)):
            raise WebConfigError(
                f"{path}: the password of {name} is not a bcrypt hash: create one with `htpasswd -nBC 10 {name}`"
            )
    auth, version = str(tls.get("client_auth_type", "NoClientCert")), str(tls.get("min_version", "TLS12"))
    for key, value, known in (("client_auth_type", auth, CLIENT_AUTH), ("min_version", version, VERSIONS)):
        if value not in known:
            raise WebConfigError(f"{path}: {key} is {value}: use one of {', '.join(known)}")
    files = {key: path.parent / str(tls[key]) for key in ("cert_file", "key_file", "client_ca_file") if tls.get(key)}
    if tls and not {"cert_file", "key_file"} <= files.keys():
        raise WebConfigError(f"{path}: tls_server_config needs both cert_file and key_file")
    if auth in ("VerifyClientCertIfGiven", "RequireAndVerifyClientCert") and "client_ca_file" not in files:
        raise WebConfigError(
            f"{path}: client_auth_type {auth} needs client_ca_file, with the CA that signs client certificates"
        )
    return WebConfig(
        **files,
        client_auth_type=auth,
        min_version=version,
        users={str(name): str(text) for name, text in users.items()},
    )


def _section(path: Path, value: Any, name: str, known: set[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WebConfigError(f"{path}: {name} is not a mapping")
    unknown = sorted(str(key) for key in value if known is not None and key not in known)
    if unknown:
        raise WebConfigError(
            f"{path}: {name} has an unknown key {unknown[0]}: use one of {', '.join(sorted(known or ()))}"
        )
    return value


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
