"""Access to the page: without the token, or from elsewhere, nothing is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx
import pytest

pytest.importorskip("panel", reason="the extra `view` is not installed")

import panel as pn
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from laminar.config import ConfigError
from laminar.view.server import PageServer

SECRET_TEXT = "text of the page"


@pytest.fixture
async def server() -> AsyncIterator[PageServer]:
    made = PageServer(lambda: pn.Column(SECRET_TEXT), origins=["localhost:9"])
    task = asyncio.create_task(made.serve())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def get(server: PageServer, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=150) as client:
        return await client.get(f"http://127.0.0.1:{server.access.port}{path}", headers=headers)


async def log_in(server: PageServer) -> str:
    """The cookie that the token gives."""
    found = await get(server, f"/?event=7&token={server.access.token}")
    assert found.status_code == HTTPStatus.SEE_OTHER and found.headers["Location"] == "/?event=7"
    cookie = found.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite" in cookie
    return str(cookie.partition(";")[0])


async def test_only_the_token_opens_the_page(server: PageServer) -> None:
    wrong = server.access.token[:-1] + "~"
    for path in ("/", f"/?token={wrong}", "/static/js/bokeh.min.js", "/ws", "/nothing"):
        for cookie in ("", f"laminar-view-{server.access.port}={wrong}", "=;;"):
            refused = await get(server, path, Cookie=cookie)
            assert refused.status_code == HTTPStatus.FORBIDDEN and SECRET_TEXT not in refused.text
    cookie = await log_in(server)
    page = await get(server, "/", Cookie=cookie)
    assert page.status_code == HTTPStatus.OK and "bokeh" in page.text
    assert server.access.token not in page.text, "scripts of the page cannot read it"
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for elsewhere in ("cdn.", "https://fonts"):
        assert f'src="https://{elsewhere}' not in page.text


async def test_another_origin_or_host_is_refused_even_with_the_cookie(server: PageServer) -> None:
    cookie = await log_in(server)
    port = server.access.port
    for origin in (
        "http://evil.example",
        "null",
        f"https://127.0.0.1:{port}",
        "http://localhost:8",
    ):
        assert (await get(server, "/", Cookie=cookie, Origin=origin)).status_code == 403
    for host in ("evil.example", f"evil.example:{port}", "localhost:8", ""):
        assert (await get(server, "/", Cookie=cookie, Host=host)).status_code in (400, 403)
    for host in ("localhost:9", f"localhost:{port}"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert (await get(server, "/", Cookie=cookie, **headers)).status_code == HTTPStatus.OK


@pytest.mark.parametrize(
    ("cookie", "origin"),
    [(False, None), (False, "http://127.0.0.1:{port}"), (True, "http://evil.example")],
)
async def test_a_websocket_needs_both(server: PageServer, cookie: bool, origin: str | None) -> None:
    port = server.access.port
    headers: dict[str, Any] = {"Cookie": await log_in(server)} if cookie else {}
    if origin:
        headers["Origin"] = origin.format(port=port)
    with pytest.raises(HTTPClientError) as refused:
        await websocket_connect(HTTPRequest(f"ws://127.0.0.1:{port}/ws", headers=headers))
    assert refused.value.code == HTTPStatus.FORBIDDEN


async def test_it_listens_on_loopback_only_and_names_a_port_in_use(server: PageServer) -> None:
    addresses = [sock.getsockname()[0] for sock in server.sockets]
    assert addresses == ["127.0.0.1"]
    with pytest.raises(ConfigError, match=f"port {server.access.port} .*--port"):
        PageServer(lambda: pn.Column(), port=server.access.port)
