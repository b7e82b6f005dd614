"""The address and the account of the BMC of one host, the error if it cannot be read, and functions that clean its texts."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

REDFISH, IPMI = "redfish", "ipmi"
TEXT_LIMIT = 300
LABEL_LIMIT = 60
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9.:-]+")


class BmcError(Exception):
    """A BMC could not be read. The text of the error names the cause, and contains neither user nor password."""


@dataclass(frozen=True, kw_only=True)
class BmcTarget:
    """How to reach one BMC. `repr` shows neither user nor password."""

    host: str
    """Name of the host in the inventory."""
    address: str
    """Name or IP address of the BMC, with a port if it is not the default port of the protocol."""
    user: str = field(repr=False)
    password: str = field(repr=False)
    protocol: str = REDFISH
    verify: bool = True
    """Whether to check the certificate. If not, any machine that answers at the address receives the password."""
    ca: str = ""
    """File with the certificates of the CAs that signed the certificate of the BMC; empty: use the CAs of the system."""


def clean_text(value: object, limit: int = TEXT_LIMIT) -> str:
    """Return a text that a BMC sent, on one line, without control and format characters, cut at `limit` characters."""
    printable = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in str(value)[: 4 * limit])
    return " ".join(printable.split())[:limit]


def label(value: object) -> str:
    """Return a name that a BMC sent, reduced to the characters that are valid in a scope: `Fan_1` for `Fan 1`."""
    ascii_text = unicodedata.normalize("NFKD", str(value)[:LABEL_LIMIT]).encode("ascii", "ignore").decode()
    return _NOT_IN_LABEL.sub("_", ascii_text).strip("_") or "unnamed"
