"""Which host names can be looked up."""

from __future__ import annotations

import socket


def check_host_name(name: str) -> None:
    """Raise socket.gaierror if no host can have this name. Numeric addresses are accepted too.

    Python's own look-up functions raise UnicodeError for an invalid name, which callers that catch OSError would miss.
    """
    try:
        name.encode("idna")
    except UnicodeError:
        raise socket.gaierror(
            socket.EAI_NONAME, "not a valid host name: each part between dots must have 1 to 63 characters"
        ) from None
