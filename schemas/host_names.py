"""Which host names can be looked up."""

from __future__ import annotations

import socket


def check_host_name(name: str) -> None:
    """Raise socket.gaierror if no host can have this name. Numeric addresses are accepted too.

    For such a name, Python's own functions that look up names raise UnicodeError, which is no OSError.
    """
    try:
        name.encode("idna")
    except UnicodeError:
        raise socket.gaierror(
            socket.EAI_NONAME, "not a valid host name: each part between dots must have 1 to 63 characters"
        ) from None
