"""A read-only Redfish session: DMTF's client, with limits on time and size, and without requests to any host but the BMC."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import ssl
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import redfish
import requests
from redfish.rest.v1 import AuthMethod, HttpClient, InvalidCredentialsError, SessionCreationError
from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.exceptions import InsecureRequestWarning

from fleet.bmc.target import BmcError, BmcTarget, clean_text

# The log of the client would contain the answers of BMCs, and the password in the body of a login.
logging.getLogger("redfish").setLevel(logging.CRITICAL)

Resource = Mapping[str, Any]
REQUEST_TIMEOUT_S = 10.0
"""Maximum time in seconds to wait for the next bytes of an answer."""
LOGOUT_S = 5.0
"""Minimum time in seconds that the logout gets, even if the deadline has passed."""
MAX_BYTES = 8_000_000
"""Maximum size of an answer in bytes. A page of 1000 log entries has less than 2 MB."""
MAX_MEMBERS, MAX_PAGES = 1024, 64
"""Maximum numbers of members and of pages of a collection. A larger collection is an error: its rest would not be read."""
ROOT = "/redfish/v1/"
_PATH = re.compile(r"/redfish/v1(/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)*(\?[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*)?(#.*)?")
_NO_SESSIONS = re.compile(r"HTTP (404|405|501):")
"""Text of the login error of a service without sessions. Such a service expects the credentials in each request."""


class _BoundedAdapter(HTTPAdapter):
    """Sends requests to one BMC only, and none after the deadline. Refuses redirects and answers of more than MAX_BYTES."""

    def __init__(self, address: str, deadline: float) -> None:
        self._address, self.deadline = address, deadline
        super().__init__()

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise BmcError("not read in time")
        if urlsplit(str(request.url)).netloc.lower() != self._address.lower():
            raise BmcError("an answer refers to another host, which is not contacted")
        kwargs |= {"timeout": min(REQUEST_TIMEOUT_S, remaining), "stream": True}
        response = super().send(request, *args, **kwargs)
        if response.is_redirect:
            response.close()
            raise BmcError(f"HTTP {response.status_code}: redirects are not followed")
        response._content = self._read(response)
        response._content_consumed = True
        return response

    def _read(self, response: requests.Response) -> bytes:
        content = bytearray()
        with contextlib.closing(response.raw):
            while block := response.raw.read1(1 << 16, decode_content=True):
                content += block
                if len(content) > MAX_BYTES:
                    raise BmcError(f"an answer has more than {MAX_BYTES} bytes")
                if time.monotonic() > self.deadline:
                    raise BmcError("not read in time")
        return bytes(content)


class RedfishSession:
    """The resources of one BMC."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        features = (self.get(ROOT) or {}).get("ProtocolFeaturesSupported")
        expand = features.get("ExpandQuery") if isinstance(features, dict) else None
        self._expands = isinstance(expand, dict) and expand.get("NoLinks") is True and expand.get("Levels") is True

    def get(self, path: object) -> Resource | None:
        """Return the resource at a path; None if it does not exist, or if `path` is not a Redfish path. Raises BmcError."""
        if not isinstance(path, str) or len(path) > 512 or not _PATH.fullmatch(path) or "/.." in path:
            return None
        with _named_errors():
            response = self._client.get(path.split("#")[0])
        if response.status in (404, 410, 501):
            return None
        if response.status == 401:
            raise BmcError("credentials refused (HTTP 401)")
        if response.status == 403:
            raise BmcError(f"access denied (HTTP 403) to {clean_text(path, 120)}: the account needs the role ReadOnly")
        if response.status != 200:
            raise BmcError(f"HTTP {response.status} at {clean_text(path, 120)}")
        return _parse(response.text, path)

    def linked(self, resource: Resource | None, name: str) -> Resource | None:
        """Return the resource that the property `name` links to; None if there is no such link or resource."""
        link = (resource or {}).get(name)
        return self.get(link.get("@odata.id")) if isinstance(link, dict) else None

    def members(self, collection: Resource | None) -> Iterator[Resource]:
        """Yield the members of a collection. Raises BmcError if it has more than MAX_MEMBERS members or MAX_PAGES pages."""
        count, pages = 0, 0
        if collection and self._expands and isinstance(path := collection.get("@odata.id"), str) and "?" not in path:
            collection = self._expanded(path, len(members_of(collection))) or collection
        while collection:
            for member in members_of(collection):
                count += 1
                if count > MAX_MEMBERS:
                    raise BmcError(
                        f"{clean_text(collection.get('@odata.id'), 120)} has more than {MAX_MEMBERS} members"
                    )
                whole = self._member(member)
                if whole:
                    yield whole
            pages += 1
            following = self.get(collection.get("Members@odata.nextLink"))
            if following and pages >= MAX_PAGES:
                raise BmcError(f"{clean_text(collection.get('@odata.id'), 120)} has more than {MAX_PAGES} pages")
            collection = following

    def _expanded(self, path: str, count: int) -> Resource | None:
        """Return a collection with its members; None if the service does not return all `count` members whole.

        After an error, the members of this and of all later collections are read one by one. Some services refuse the option for
        some collections, need too long, or answer with the error of a single member.
        """
        try:
            collection = self.get(f"{path}?$expand=.($levels=1)") or {}
        except BmcError:
            self._expands = False
            return None
        members = members_of(collection)
        is_complete = len(members) >= count or "Members@odata.nextLink" in collection
        # Each resource has an `Id`. A link does not, nor does an error in place of a member.
        is_whole = all(isinstance(member, dict) and "Id" in member for member in members)
        return collection if is_complete and is_whole else None

    def expanded(self, collection: Resource) -> Resource | None:
        """Return a collection of links with its members; None if the service does not return all of them whole.

        The depth is left out, because not all services that return members with a collection accept a depth (HPE).
        """
        try:
            page = self.get(f"{collection.get('@odata.id')}?$expand=.") or {}
        except BmcError:
            return None
        members = members_of(page)
        is_whole = all(isinstance(member, dict) and "Id" in member for member in members)
        return page if is_whole and len(members) >= len(members_of(collection)) else None

    def _member(self, member: object) -> Resource | None:
        if not isinstance(member, dict):
            return None
        return member if len(member) > 1 else self.get(member.get("@odata.id"))


def members_of(page: Resource | None) -> list[object]:
    """Return the members of one page of a collection, as the service lists them: whole, or as links."""
    members = (page or {}).get("Members")
    return members if isinstance(members, list) else []


@contextlib.contextmanager
def open_session(target: BmcTarget, deadline: float) -> Iterator[RedfishSession]:
    """Log in and yield the session; log out at the end, because a BMC allows few sessions at a time (iDRAC: 8).

    Args:
        target: the BMC.
        deadline: value of time.monotonic() after which nothing more is read.

    Raises:
        BmcError: the BMC cannot be reached, its certificate is not accepted, or it refuses the credentials.
    """
    # Suppress the client's warnings about services that do not follow the standard.
    warnings.filterwarnings("ignore", module=r"redfish\.")
    if not target.verify:
        warnings.filterwarnings("ignore", category=InsecureRequestWarning)
    adapter = _BoundedAdapter(target.address, deadline)
    client = redfish.redfish_client(
        base_url=f"https://{target.address}",
        username=target.user,
        password=target.password,
        cafile=_cafile(target),
        timeout=REQUEST_TIMEOUT_S,
        max_retry=0,
        check_connectivity=False,
        https_adapter=adapter,
    )
    client._session.trust_env = False  # use neither a proxy of the environment nor credentials in ~/.netrc
    with _named_errors():
        _log_in(client)
    try:
        yield RedfishSession(client)
    finally:
        # If the deadline has passed, the logout is sent all the same, so that the session does not stay open.
        adapter.deadline = max(deadline, time.monotonic() + LOGOUT_S)
        with contextlib.suppress(Exception):
            client.logout()


def _cafile(target: BmcTarget) -> str | None:
    if not target.verify:
        return None
    return target.ca or ssl.get_default_verify_paths().cafile or DEFAULT_CA_BUNDLE_PATH


def _log_in(client: HttpClient) -> None:
    """Log in with a session. If the service has no sessions, send the credentials in each request."""
    try:
        client.login(auth=AuthMethod.SESSION)
    except SessionCreationError as error:
        if not _NO_SESSIONS.match(str(error)):
            raise
    except KeyError:  # the client raises it if the answer to the login contains no session
        client.set_session_key(None)
    if not client.get_session_key():
        client.login(auth=AuthMethod.BASIC)


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Replace any exception of the client by a BmcError that names the cause in words."""
    try:
        yield
    except BmcError:
        raise
    except InvalidCredentialsError:
        raise BmcError("credentials refused (HTTP 401)") from None
    except Exception as error:  # noqa: BLE001 - the client can raise any exception when it parses an answer
        raise BmcError(_describe(error)) from None


def _describe(error: BaseException) -> str:
    causes: list[BaseException] = [error]
    while len(causes) < 10 and (cause := causes[-1].__cause__ or causes[-1].__context__):
        causes.append(cause)
    named = next((item for item in causes if isinstance(item, BmcError)), None)
    if named:
        return str(named)
    if refused := next((item for item in causes if isinstance(item, ssl.SSLCertVerificationError)), None):
        return f"certificate not accepted: {clean_text(refused.verify_message, 120)}: {certificate_remedy(refused.verify_code)}"
    for kind, text in _CAUSES:
        if any(isinstance(item, kind) for item in causes):
            return text
    if status := re.search(r"(?:HTTP |return code: )(\d{3})", str(error)):
        return f"the service answers with HTTP {status[1]}"
    return f"no valid answer ({type(causes[-1]).__name__})"


def certificate_remedy(verify_code: int) -> str:
    """Return the remedy for an error in the verification of a certificate, by its OpenSSL code (X509_V_ERR_…)."""
    if verify_code in (62, 64):  # HOSTNAME_MISMATCH, IP_ADDRESS_MISMATCH
        return "set rackproof_bmc_address to a name that is in the certificate"
    if verify_code in (9, 10):  # CERT_NOT_YET_VALID, CERT_HAS_EXPIRED
        return "renew the certificate, and check the clocks of the BMC and of this machine"
    return "set rackproof_bmc_ca"


_CAUSES: tuple[tuple[type[BaseException], str], ...] = (
    (requests.exceptions.Timeout, "no answer in time"),
    (TimeoutError, "no answer in time"),
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "connection reset"),
    (requests.exceptions.InvalidURL, "rackproof_bmc_address is not an address"),
    (requests.exceptions.SSLError, "no TLS connection"),
    (OSError, "not reachable: check rackproof_bmc_address and the management network"),
)


def _parse(text: object, path: str) -> Resource:
    try:
        document = json.loads(str(text), parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        raise BmcError(f"answers with invalid JSON at {clean_text(path, 120)}") from None
    if not isinstance(document, dict):
        raise BmcError(f"answers with invalid JSON at {clean_text(path, 120)}")
    return document
