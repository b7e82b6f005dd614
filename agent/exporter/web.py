"""The exporter's HTTP server. Many scrapers share one reading of the hardware; slow or unauthorized clients cost little.

prometheus_client's own server has a thread per client, no timeout and a backlog of 5. Measured with that server: if 100 scrapers
request a page of 57 KB at the same time, 5 % of them wait for more than 3.3 s; with 300 half-open connections it has 302 threads.
The server in this module has a single event loop and closes each connection after its answer.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import logging
import math
import re
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from agent.exporter.defaults import COLLECT_S, FRESH_S
from agent.exporter.users import Users
from agent.exporter.web_config import WebConfig
from schemas.host_names import check_host_name

log = logging.getLogger(__name__)

HEAD_BYTES, HEAD_S, WRITE_S = 16_384, 5.0, 10.0
"""Maximum bytes of a request's head; seconds for the client to send the head; seconds for the client to read the answer."""
COLLECT_SHARE, MIN_COLLECT_S = 0.8, 2.0
"""Share of the scraper's timeout within which the collectors must finish, and the least time that they have: clients share a
page, so a client with a very short timeout must not make the collectors fail for the others."""
MAX_CONNECTIONS = 2048
BACKLOG = 1024
OPENMETRICS, TEXT = openmetrics.CONTENT_TYPE_LATEST, "text/plain; version=0.0.4; charset=utf-8"
ENCODERS: Mapping[str, Callable[[CollectorRegistry], bytes]] = {
    OPENMETRICS: openmetrics.generate_latest,
    TEXT: generate_latest,
}
"""Content type -> encoder. Only these two are offered, so that the cache has a bounded size."""
INDEX = b"<!doctype html><html><head><title>Rackproof exporter</title></head><body><a href=/metrics>Metrics</a></body></html>"


class Page:
    """The page /metrics, rendered in another thread and cached for `fresh_s` seconds, separately by format and compression."""

    def __init__(self, registry: CollectorRegistry, fresh_s: float) -> None:
        self._registry = registry
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._cache: dict[tuple[str, bool], tuple[float, float, float, bytes]] = {}
        """Format and compression -> when the rendering began and ended, the time limit of the collectors, and the page."""
        self.last_request = time.monotonic()

    async def get(self, accept: str, zipped: bool, timeout: str = "") -> tuple[str, bytes]:
        """Return the content type and the body.

        Args:
            accept: Accept header of the client, which chooses the format.
            zipped: whether to compress the body with gzip.
            timeout: seconds after which the client closes the connection; empty or not a number: unknown.
        """
        limit_s = _collect_s(timeout)
        kind = OPENMETRICS if "application/openmetrics-text" in accept.lower() else TEXT
        arrived = self.last_request = time.monotonic()
        async with self._lock:
            began, ended, given_s, body = self._cache.get((kind, zipped), (0.0, 0.0, 0.0, b""))
            # A page that was being rendered when the request arrived is fresh, however long the hardware took to answer. A page
            # of a client with a shorter timeout may lack collectors that need longer.
            if limit_s > given_s or (arrived > ended and arrived - began > self._fresh_s):
                began = time.monotonic()
                # Rounded, because the limit is in the reason of a failure, and each new reason is logged.
                COLLECT_S.set(round(max(MIN_COLLECT_S, limit_s - (began - arrived)), 1))  # to_thread copies the context
                body = await asyncio.to_thread(self._render, kind, zipped)
                self._cache[(kind, zipped)] = (began, time.monotonic(), limit_s, body)
        return kind, body

    def _render(self, kind: str, zipped: bool) -> bytes:
        text = ENCODERS[kind](self._registry)
        return gzip.compress(text, 1) if zipped else text


def _collect_s(timeout: str) -> float:
    """Return the time limit for the collectors, given the timeout of the scraper: at most the default."""
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.inf
    limit_s = COLLECT_S.get()
    return min(limit_s, COLLECT_SHARE * seconds) if seconds > 0 else limit_s


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of a client."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


class Server:
    """Serves a registry until `close` is called. Raises OSError if the server cannot listen on the address."""

    def __init__(
        self,
        registry: CollectorRegistry,
        address: str,
        port: int,
        web: WebConfig | None = None,
        fresh_s: float = FRESH_S,
    ) -> None:
        self._web = web or WebConfig()
        self._page = Page(registry, fresh_s)
        self._users = Users(self._web.users)
        self._connections = 0
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = min(MAX_CONNECTIONS, most_files // 2)  # the collectors open files too
        self._tls = self._web.context()
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(self._listen(address, port))
        except OSError:
            self._loop.close()
            raise
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="web")
        self._thread.start()

    async def _listen(self, address: str, port: int) -> asyncio.Server:
        check_host_name(address)
        # asyncio accepts up to `backlog` connections before `_client` runs and counts them. They use file descriptors in addition
        # to the counted connections.
        backlog = min(BACKLOG, self._max_connections // 2)
        if _is_every_address(address) and socket.has_dualstack_ipv6():
            # As in node_exporter, `::` includes IPv4. asyncio would create a socket for IPv6 only.
            listener = socket.create_server((address, port), family=socket.AF_INET6, dualstack_ipv6=True)
            return await asyncio.start_server(self._client, sock=listener, limit=HEAD_BYTES, backlog=backlog)
        return await asyncio.start_server(self._client, address, port, limit=HEAD_BYTES, backlog=backlog)

    @property
    def last_request(self) -> float:
        """Time (monotonic clock) of the last request for /metrics; before the first request, of the server's start."""
        return self._page.last_request

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "https" if self._tls else "http"

    def close(self) -> None:
        """Close every connection, and end the thread."""
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= self._max_connections:
            writer.transport.abort()
            return
        self._connections += 1
        connection = writer.transport
        try:
            if self._tls:  # the handshake is here and not in start_server, so that the connection is already counted
                reader, writer = await _start_tls(connection, self._tls)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
            try:
                answer = await self._answer(_parsed(head))
            except Exception:
                log.exception("a request cannot be answered")
                answer = _response(500, b"the request cannot be answered: see the log of the exporter\n")
            writer.write(answer)
            await asyncio.wait_for(writer.drain(), WRITE_S)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), WRITE_S)
        except asyncio.LimitOverrunError:
            writer.write(_response(431, b"the request is too long\n"))
            writer.close()
        except (OSError, EOFError, asyncio.TimeoutError, ssl.SSLError):
            pass  # the client disconnected, or was too slow to send its request or to read the answer
        finally:
            connection.abort()
            self._connections -= 1

    async def _answer(self, request: Request | None) -> bytes:
        if request is None:
            return _response(400, b"not an HTTP request\n")
        if not await self._users.admits(request.headers.get("authorization", "")):
            return _response(401, b"unauthorized\n", {"WWW-Authenticate": 'Basic realm="rackproof"'})
        if request.method not in ("GET", "HEAD"):
            return _response(405, b"only GET and HEAD are allowed\n", {"Allow": "GET, HEAD"})
        zipped = _accepts_gzip(request.headers.get("accept-encoding", ""))
        headers = {"Vary": "Accept, Accept-Encoding"}
        if request.path == "/":
            kind, body = "text/html; charset=utf-8", INDEX
        elif request.path == "/metrics":
            # Prometheus and compatible scrapers send their timeout.
            timeout = request.headers.get("x-prometheus-scrape-timeout-seconds", "")
            kind, body = await self._page.get(request.headers.get("accept", ""), zipped, timeout)
            headers |= {"Content-Encoding": "gzip"} if zipped else {}
        else:
            return _response(404, b"not found: see /metrics\n")
        return _response(200, body, {"Content-Type": kind, **headers}, silent=request.method == "HEAD")


def _is_every_address(address: str) -> bool:
    """Return whether the address is the unspecified address of IPv6, in any notation."""
    try:
        return ipaddress.IPv6Address(address).is_unspecified
    except ValueError:
        return False


def _accepts_gzip(accepted: str) -> bool:
    """Return whether an Accept-Encoding header lists gzip with a quality other than zero (RFC 9110, section 12.5.3)."""
    codings = (each.replace(" ", "").partition(";q=") for each in accepted.lower().split(","))
    return any(
        coding in ("gzip", "x-gzip") and re.fullmatch(r"0(\.0*)?", quality) is None for coding, _, quality in codings
    )


async def _start_tls(
    transport: asyncio.WriteTransport, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Make the handshake on a new connection, and return its streams. Raises OSError if the client does not complete it.

    Call this before any other await, because the transport must not have read the client's first bytes. (Python 3.11 and later
    have StreamWriter.start_tls for this.)
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(HEAD_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    secure = await loop.start_tls(
        cast(asyncio.Transport, transport), protocol, context, server_side=True, ssl_handshake_timeout=HEAD_S
    )
    if secure is None:
        raise ConnectionAbortedError("the client disconnected during the handshake")
    protocol.connection_made(secure)
    return reader, asyncio.StreamWriter(secure, protocol, reader, loop)


def _parsed(head: bytes) -> Request | None:
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}
    return Request(method=words[0], path=words[1].partition("?")[0], headers=headers)


_PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


def _response(status: int, body: bytes, headers: Mapping[str, str] | None = None, silent: bool = False) -> bytes:
    fields = {"Content-Type": "text/plain; charset=utf-8", **(headers or {})}
    fields |= {"Content-Length": str(len(body)), "Connection": "close", "X-Content-Type-Options": "nosniff"}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} {_PHRASES[status]}\r\n{head}\r\n".encode() + (b"" if silent else body)
