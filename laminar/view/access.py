"""Access to the page of `laminar view`: the token, its cookie, and the addresses of a browser.

Reads   the headers of every request, before the page's server sees it
Gives   Access, which knows the token; Guard, which answers 403 in the server's place; SafeHeaders

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
SAFE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; img-src 'self' data: blob:; "
    "font-src 'self' data:; frame-ancestors 'self'; form-action 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Bokeh needs inline scripts; whatever runs in the page, it can reach only this server."""


class Answer(NamedTuple):
    """Answer that the guard gives itself."""

    code: int
    body: str = ""
    headers: Mapping[str, str] = {}


class Access:
    """Token of one server, and the hosts by which a browser may name it."""

    def __init__(self, port: int, origins: Collection[str] = ()) -> None:
        self.token, self.port = secrets.token_urlsafe(24), port
        self.address = f"http://127.0.0.1:{port}/?{TOKEN}={self.token}"
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}", *map(str.lower, origins)}
        self._cookie = f"laminar-view-{port}"  # cookies are shared by the ports of a machine

    def find_answer(self, uri: str, headers: Mapping[str, str]) -> Answer | None:
        """Return the refusal of a request, or the reply that sets the cookie; None: let it in."""
        if headers.get("Host", "").lower() not in self.hosts:
            return Answer(403, "refused: for this address give --origin HOST:PORT\n")
        origins = {f"http://{host}" for host in self.hosts}
        if headers.get("Origin", min(origins)).lower() not in origins:
            return Answer(403, "refused: another site asks; if it is yours, give --origin\n")
        parts = urlsplit(uri)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if self._is_token(query.pop(TOKEN, "")):
            # Lax, not Strict: a link to an event in a chat or a notebook opens the page.
            cookie = f"{self._cookie}={self.token}; HttpOnly; SameSite=Lax; Path=/"
            address = f"/{parts.path.lstrip('/')}{'?' * bool(query)}{urlencode(query)}"
            return Answer(303, headers={"Set-Cookie": cookie, "Location": address})
        if self._is_token(self._find_cookie(headers.get("Cookie", ""))):
            return None
        return Answer(403, "refused: open the address that `laminar view` has printed\n")

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self.token.encode())

    def _find_cookie(self, text: str) -> str:
        try:
            return SimpleCookie(text)[self._cookie].value
        except (CookieError, KeyError):
            return ""


class Guard(Router):
    """Router that hands a request to the application only if it has access."""

    def __init__(self, access: Access, application: Router) -> None:
        self._access, self._application = access, application

    def find_handler(self, request: HTTPServerRequest, **options: Any) -> HTTPMessageDelegate:
        answer = self._access.find_answer(request.uri or "", request.headers)
        if answer is not None:
            return _Reply(request.connection, answer)
        return self._application.find_handler(request, **options)


class _Reply(HTTPMessageDelegate):
    """Delegate that sends an answer of the guard."""

    def __init__(self, connection: Any, answer: Answer) -> None:
        self._connection, self._answer = connection, answer

    def finish(self) -> None:
        body = self._answer.body.encode()
        headers = HTTPHeaders({"Content-Type": "text/plain", "Content-Length": str(len(body))})
        headers.update({"Cache-Control": "no-store", **self._answer.headers})
        start = ResponseStartLine("HTTP/1.1", self._answer.code, "")
        self._connection.write_headers(start, headers, body)
        self._connection.finish()


class SafeHeaders(OutputTransform):
    """Headers of every page: no request to another server, and no address given away."""

    def __init__(self, request: HTTPServerRequest) -> None:
        pass

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        headers.update(SAFE_HEADERS)
        return status_code, headers, chunk
