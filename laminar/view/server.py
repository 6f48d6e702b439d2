"""Server of `laminar view`: the page of some runs on a port of 127.0.0.1.

Writes  nothing; listens on 127.0.0.1
Gives   PageServer
Raises  ConfigError for a port in use

All resources come from this port, so that the page needs no internet; the guard sees every request
before Bokeh does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from panel.io.application import build_applications
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets

from laminar.config import ConfigError
from laminar.view.access import Access, Guard, SafeHeaders

HOST = "127.0.0.1"
UNUSED_MS = 60_000  #: after which the data of a closed browser tab are dropped


class PageServer:
    """Server of one page; `access.address` is its address."""

    def __init__(
        self, make_page: Callable[[], Any], *, port: int = 0, origins: Sequence[str] = ()
    ) -> None:
        """Listen on the port (0: any that is free); requests are answered once the loop runs."""
        try:
            self.sockets = bind_sockets(port, HOST)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be used: {error.strerror}; give another --port"
            ) from error
        self.access = Access(self.sockets[0].getsockname()[1], origins)
        application = BokehTornado(
            build_applications({"/": make_page}, title="Laminar"),
            extra_websocket_origins=sorted(self.access.hosts),
            unused_session_lifetime_milliseconds=UNUSED_MS,
            check_unused_sessions_milliseconds=UNUSED_MS,
            include_cookies=[],
            transforms=[SafeHeaders],
        )
        self._http = HTTPServer(Guard(self.access, application))
        self._http.add_sockets(self.sockets)
        self._server = BaseServer(IOLoop.current(), application, self._http)
        self._server.start()

    async def serve(self) -> None:
        """Answer requests until the task is cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            self._server.stop()
            self._http.stop()
