"""Access to the page of `laminar view`: the token, its cookie, and the addresses of a browser.

Reads   the headers of every request, before the page's server sees it
Gives   Access, which knows the token; Guard, which answers 403 in the server's place

Other users of this machine, and pages of other sites in the user's browser, can reach a loopback
port too. A request therefore needs the token, an expected Host (a foreign name that resolves to
127.0.0.1 has another one) and, if it has an Origin, an expected one; websockets are requests here.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, HTTPServerRequest, ResponseStartLine
from tornado.routing import Router
from tornado.web import OutputTransform

TOKEN = "token"  #: parameter of the first address
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "frame-ancestors 'self'; form-action 'none'; base-uri 'none'"
)
"""Bokeh needs inline scripts; whatever runs in the page, it can reach only this server."""


class Answer(NamedTuple):
    """Answer that the guard gives itself."""

    code: int
    reason: str
    body: str
    headers: Mapping[str, str] = {}


class Access:
    """Token of one server, and the hosts by which a browser may name it."""

    def __init__(self, port: int, origins: Collection[str] = ()) -> None:
        self.token = secrets.token_urlsafe(24)
        self.port = port
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}", *(o.lower() for o in origins)}
        self._cookie = f"laminar-view-{port}"  # cookies are shared by the ports of a machine

    @property
    def address(self) -> str:
        """Address to open, with the token."""
        return f"http://127.0.0.1:{self.port}/?{TOKEN}={self.token}"

    def find_answer(self, uri: str, headers: Mapping[str, str]) -> Answer | None:
        """Return the refusal of a request, or the reply that sets the cookie; None: let it in."""
        if headers.get("Host", "").lower() not in self.hosts:
            return _refuse("this address is not that of the server: name it with --origin")
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return _refuse("another site asks: name its address with --origin if it is yours")
        parts = urlsplit(uri)
        query = parse_qsl(parts.query, keep_blank_values=True)
        given = [value for name, value in query if name == TOKEN]
        if given and self._is_token(given[-1]):
            rest = urlencode([(name, value) for name, value in query if name != TOKEN])
            return self._set_cookie(f"/{parts.path.lstrip('/')}{'?' * bool(rest)}{rest}")
        if not self._is_token(self._find_cookie(headers.get("Cookie", ""))):
            return _refuse("open the address with the token that `laminar view` has printed")
        return None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self.token.encode())

    def _find_cookie(self, text: str) -> str:
        try:
            found = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found else ""

    def _set_cookie(self, address: str) -> Answer:
        # Lax, not Strict: a link to an event in a chat or a notebook opens the page.
        cookie = f"{self._cookie}={self.token}; HttpOnly; SameSite=Lax; Path=/"
        return Answer(303, "See Other", "", {"Set-Cookie": cookie, "Location": address})


class Guard(Router):
    """Router that hands a request to the application only if it has access."""

    def __init__(self, access: Access, application: Router) -> None:
        self._access, self._application = access, application

    def find_handler(self, request: HTTPServerRequest, **options: Any) -> HTTPMessageDelegate:
        answer = self._access.find_answer(request.uri or "", request.headers)
        if answer is not None:
            return _Reply(request, answer)
        found: HTTPMessageDelegate = self._application.find_handler(request, **options)
        return found


class SafeHeaders(OutputTransform):
    """Headers of every page: no request to another server, and no address given away."""

    def __init__(self, request: HTTPServerRequest) -> None:
        pass

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        headers["Content-Security-Policy"] = POLICY
        headers["Referrer-Policy"] = "no-referrer"
        headers["X-Content-Type-Options"] = "nosniff"
        return status_code, headers, chunk


class _Reply(HTTPMessageDelegate):
    """Answer of the guard to one request."""

    def __init__(self, request: HTTPServerRequest, answer: Answer) -> None:
        self._connection, self._answer = request.connection, answer

    def finish(self) -> None:
        body = self._answer.body.encode()
        headers = HTTPHeaders({"Content-Type": "text/plain", "Content-Length": str(len(body))})
        headers.update({"Cache-Control": "no-store", **self._answer.headers})
        start = ResponseStartLine("HTTP/1.1", self._answer.code, self._answer.reason)
        self._connection.write_headers(start, headers, body)
        self._connection.finish()


def _refuse(why: str) -> Answer:
    return Answer(403, "Forbidden", f"refused: {why}\n")
