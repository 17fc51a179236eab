"""Refuses requests by their Host and by the page that sent them, before anything else of them is looked at.

A browser lets any page send a POST to any server; the page only cannot read the answer. And a page whose own name is
made to point to this machine (DNS rebinding) may do both: the browser then takes the server for the page's own.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from radixrt.config import FrontendConfig
from radixrt.frontend.http.auth import headers_in, told
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.protocol import UPGRADE_HEADER
from radixrt.frontend.http.responses import send_error

HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(?::(?P<port>[0-9]{1,5})?)?")
MAX_KNOWN = 256
"""The most values of Host that are remembered as allowed."""
OTHER_SITES = ("cross-site", "same-site")
"""Values of Sec-Fetch-Site for pages that are not the server's own."""
DEFAULT_PORTS = {"http": "80", "https": "443"}


class Hosts:
    """The names that requests may use for this server. They are checked where only this machine can connect, since
    there are no keys there, and where --allowed-hosts names some."""

    def __init__(self, host: str, allowed: Collection[str]) -> None:
        self._checks = "*" not in allowed and bool(allowed or is_loopback(host))
        names = {name.lower().rstrip(".") for name in (host.strip("[]"), *allowed)}
        self._names = {"localhost"} | {name for name in names if name[:1] != "."}
        self._suffixes = (".localhost", *(name for name in names if name[:1] == "."))

    def check(self, value: str) -> None:
        """Raise ApiError (400) unless the value of Host is one or more characters of a host, and a port, and (403) if
        it is none of the names."""
        if (found := HOST.fullmatch(value)) is None:
            raise ApiError(400, "host: expected a name or an address, and a port", "host")
        name = found["name"].lower().rstrip(".").strip("[]")
        if not self._checks or name in self._names or name.endswith(self._suffixes) or is_loopback(name):
            return
        raise ApiError(403, f"host: {found['name']} is no name of this server; --allowed-hosts adds names", "host")


class RequestFilter:
    """An ASGI application that passes on what it does not refuse to `app`. `guarded`: paths that pages of others may
    not POST to, whatever they send."""

    def __init__(self, app: ASGIApp, config: FrontendConfig, guarded: Collection[str]) -> None:
        self._app = app
        self._hosts = Hosts(config.host, config.allowed_hosts)
        self._origins = frozenset(config.allowed_origins)
        self._guarded = frozenset(guarded)
        self._known: set[bytes] = set()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                return send_error(send, told(scope["path"], error))
        return self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1:  # RFC 9112, 3.2
            if hosts or scope["http_version"] == "1.1":
                raise ApiError(400, f"host: expected one Host header, not {len(hosts) or 'none'}", "host")
        elif hosts[0] not in self._known:
            self._hosts.check(headers_in(scope)[b"host"])
            if len(self._known) < MAX_KNOWN:
                self._known.add(hosts[0])
        headers = headers_in(scope)
        if headers.get(UPGRADE_HEADER, "").lower() == "websocket":
            raise ApiError(400, "upgrade: WebSocket is not served", "upgrade")
        if scope["method"] == "POST" and (scope["path"] in self._guarded or not _is_json(headers)):
            self._check_page(scope["scheme"], headers)

    def _check_page(self, scheme: str, headers: dict[bytes, str]) -> None:
        """Raise ApiError (403) for a request of a page that is neither the server's own nor allowed."""
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", "")
        if "*" in self._origins or origin in self._origins:
            return
        foreign = origin is not None and not _is_own(origin, headers.get(b"host", ""), scheme)
        if foreign or site in OTHER_SITES:
            who = f"pages of {origin}" if origin else "pages of other sites"
            raise ApiError(403, f"web {who} may not do this; --allowed-origins says whose may", "origin")


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_json(headers: dict[bytes, str]) -> bool:
    """Whether the body is sent as JSON: to that a browser asks for leave first, which only allowed origins get."""
    kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _is_own(origin: str, host: str, scheme: str) -> bool:
    """Whether pages of an origin come from the server that is addressed as `host`; perhaps through a proxy that speaks
    TLS in its place."""
    own_scheme, separator, authority = origin.lower().partition("://")
    if not separator or own_scheme not in DEFAULT_PORTS or not authority:
        return False
    port = DEFAULT_PORTS[own_scheme]
    return authority.removesuffix(f":{port}") == host.lower().removesuffix(f":{port}")
