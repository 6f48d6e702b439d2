"""The chat API of a process's agents, at an address and with a key for each session.

Reads   requests on a port of this machine's loopback interface
Gives   ChatEndpoint; Gate, the order of a session's requests; TurnReply
Raises  ConfigError without the extra `agents`

The server starts with the first session, in the event loop of the process that holds the sessions,
so that a forked session has neither a server nor an event loop. The key is never in an address,
because clients log addresses. Requests of a session are answered one at a time. If a client leaves
before its reply, the turn is kept for the same request: a client's retry. Starlette and uvicorn are
an extra; only this file imports them.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

from laminar.config import ConfigError
from laminar.run.command_line import with_extra
from laminar.tasks.environments import anthropic_messages as messages
from laminar.tasks.environments import chat_messages as chat
from laminar.tasks.environments.chat_messages import ChatRequest, RequestRefused, Sampling

HOST = "127.0.0.1"
BODY_BYTES_MAX = 16 << 20
LARGE_BODY_BYTES = 1 << 18  #: above it, a request is read in a thread
ALIVE_S = 10.0  #: between two signs of life to a client that waits for its turn
UNCERTAIN_WAITS = 30  #: such times without one while another request has its turn
LOOP_TURNS = 6
"""Turns of the event loop until `_Client` knows that a connection was closed before them."""
BACKLOG = 2048  #: connections that may wait: clients give up after 5 s
SERVER: Any = dict.fromkeys(("access_log", "proxy_headers", "server_header"), False) | {
    "http": "h11",
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "log_level": "error",
    "backlog": BACKLOG,
    "timeout_keep_alive": 3600,  # longer than any client keeps an idle connection
}
MODELS = "/v1/models"
RETRY = "x-stainless-retry-count"  #: header of OpenAI's clients
ENDED = "the agent has ended"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
T = TypeVar("T")


class Api(NamedTuple):
    """The form of requests and replies at one path; the conversation knows OpenAI's alone."""

    path: str
    read: Callable[[bytes, Sampling], ChatRequest]
    format_reply: Callable[[str], str]
    iter_events: Callable[[str, ChatRequest], Iterable[str]]
    format_error: Callable[[str], str]


APIS = (
    Api("/v1/chat/completions", chat.read_request, str, chat.iter_events, str),
    Api("/v1/messages", *messages.FORM),
)
UNKNOWN = (
    f"unknown; this endpoint has POST {', POST '.join(api.path for api in APIS)} and GET {MODELS}"
)


class TurnReply(NamedTuple):
    """The answer to an agent's request: a turn of the model, or a refusal."""

    body: str  #: JSON
    refused: bool = False
    closed: bool = False  #: no later request can be answered: all get this body


class _Answered(NamedTuple):
    """A request and its reply."""

    asked: str
    reply: TurnReply
    is_read: bool  #: the client was there when the reply was sent


class Gate:
    """The order of a session's requests: one at a time is answered."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._turn = asyncio.Lock()
        self._requests: asyncio.Queue[ChatRequest] = asyncio.Queue()
        self._reply: asyncio.Future[TurnReply] | None = None  #: that of the turn under way
        self._asking = ""  #: request whose turn is under way
        self._last: _Answered | None = None
        self._refusal: TurnReply | None = None  #: reply to all requests from now on

    # --- for the session ------------------------------------------------------------------------

    async def next_request(self) -> ChatRequest:
        """Return the next request that needs a turn; `send_reply` answers it."""
        return await self._requests.get()

    def send_reply(self, reply: TurnReply) -> None:
        """Answer the last request; clients that have left are no error."""
        if reply.closed:
            self._refusal = reply
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def close(self) -> None:
        """Refuse all requests from now on."""
        self.send_reply(TurnReply(chat.make_error(ENDED), refused=True, closed=True))

    # --- for its clients ------------------------------------------------------------------------

    async def answer_request(
        self, request: ChatRequest, client: _Client, *, is_retry: bool
    ) -> None:
        """Answer a request by a turn; a retry gets that of its first try."""
        asked = request.encode_turn()
        await client.wait_for(self._turn.acquire(), lambda: asked == self._asking)
        try:
            if not client.has_left:
                reply = self._find_reply(asked, is_retry)
                reply = reply or await self._request_turn(asked, request, client)
                self._last = _Answered(asked, reply, await client.send_reply(reply))
        finally:
            self._turn.release()

    def _find_reply(self, asked: str, is_retry: bool) -> TurnReply | None:
        last = self._last
        if self._refusal is None and last is not None and last.asked == asked:
            return last.reply if is_retry or not last.is_read else None
        return self._refusal

    async def _request_turn(self, asked: str, request: ChatRequest, client: _Client) -> TurnReply:
        self._asking = asked
        self._reply = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        reply = await client.wait_for(self._reply)
        self._asking = ""
        return reply


class ChatEndpoint:
    """The server of all sessions of this process."""

    def __init__(
        self,
        model: str,
        sampling: Sampling = chat.REPLACING,
        on_replaced: Callable[[Mapping[str, Any]], object] = len,
    ) -> None:
        """Create it, not started; `model`: the name that clients are told.

        `on_replaced` gets the sampling parameters of requests that have no effect.
        """
        self._model, self._sampling, self._on_replaced = model, sampling, on_replaced
        self._gates: dict[str, Gate] = {}
        self._port = self._num_sessions = 0
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    def open_gate(self, name: str) -> tuple[str, Gate]:
        """Return the base URL and the gate of a new session; start with the first one.

        Raises ConfigError.
        """
        if self._serving is None:
            self._start()
        self._num_sessions += 1
        name = f"{name}-{self._num_sessions}"
        gate = self._gates[name] = Gate()
        return f"http://{HOST}:{self._port}/{name}/v1", gate

    def close_gate(self, base_url: str) -> None:
        """Refuse all further requests to this address."""
        if (gate := self._gates.pop(base_url.split("/")[3], None)) is not None:
            gate.close()

    async def close(self) -> None:
        """End all connections and the server."""
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    def _start(self) -> None:
        try:
            import uvicorn
        except ImportError as error:
            raise ConfigError(f"agents need {error.name}: {with_extra('agents')}") from None
        listening = socket.create_server((HOST, 0), backlog=BACKLOG)
        self._port = listening.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(self._make_app(), **SERVER))
        self._server.capture_signals = nullcontext  # this process handles its signals itself
        serving = self._server.serve(sockets=[listening])
        self._serving = asyncio.get_running_loop().create_task(serving)

    # --- requests -------------------------------------------------------------------------------

    def _make_app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route("/{session}" + MODELS, self._list_models, methods=["GET"])]
        for api in APIS:
            answer = partial(self._answer_request, api)
            routes.append(Route("/{session}" + api.path, answer, methods=["POST"]))
        return Starlette(routes=routes, exception_handlers={404: _refuse_path, 405: _refuse_path})

    async def _list_models(self, request: Any) -> Any:
        if self._find_gate(request) is None:
            return _make_response(401, WRONG_KEY)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "laminar"}
        return _make_response(200, json.dumps({"object": "list", "data": [model]}))

    async def _answer_request(self, api: Api, request: Any) -> Any:
        if (gate := self._find_gate(request)) is None:
            return _make_response(401, api.format_error(WRONG_KEY))
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > BODY_BYTES_MAX:
                long = f"the body must have a length of at most {BODY_BYTES_MAX} bytes"
                return _make_response(400, api.format_error(chat.make_error(long)))
        try:
            if len(body) > LARGE_BODY_BYTES:
                asked = await asyncio.to_thread(api.read, bytes(body), self._sampling)
            else:
                asked = api.read(bytes(body), self._sampling)
        except RequestRefused as refused:
            return _make_response(400, api.format_error(refused.body))
        self._on_replaced(asked.replaced or {})
        return _Client(gate, api, asked, is_retry=request.headers.get(RETRY, "0") != "0")

    def _find_gate(self, request: Any) -> Gate | None:
        """Return the session of a request that has its key."""
        given = request.headers.get("x-api-key") or request.headers.get("authorization") or ""
        key = given.removeprefix("Bearer ").strip()
        gate = self._gates.get(request.path_params["session"])
        known = gate is not None and hmac.compare_digest(key.encode(), gate.key.encode())
        return gate if known else None


WRONG_KEY = chat.make_error(
    "the API key is not that of this session; use endpoint.api_key or OPENAI_API_KEY",
    kind="authentication_error",
    code="invalid_api_key",
)


async def _refuse_path(request: Any, error: Any) -> Any:
    return _make_response(404, chat.make_error(UNKNOWN))


def _make_response(status: int, body: str) -> Any:
    """Make a reply that is known at once, of JSON."""
    from starlette.responses import Response

    return Response(body, status, media_type="application/json")


class _Client:
    """A client that waits for a turn: a reply that is known once the model has had it."""

    def __init__(self, gate: Gate, api: Api, asked: ChatRequest, *, is_retry: bool) -> None:
        self._gate, self._api, self._asked, self._is_retry = gate, api, asked, is_retry
        self._has_begun = self.has_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the turn and send it, or keep it if the client has left."""
        self._scope, self._receive, self._send = scope, receive, send
        watching = asyncio.create_task(self._watch_connection(receive))
        try:
            await self._gate.answer_request(self._asked, self, is_retry=self._is_retry)
        finally:
            watching.cancel()

    async def _watch_connection(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.has_left = True

    async def wait_for(
        self, work: Awaitable[T], is_certain: Callable[[], bool] = lambda: True
    ) -> T:
        """Await work, and send what clients ignore, so that none gives up.

        A request that may still be refused needs another status, so its client waits for longer.
        """
        task, waits = asyncio.ensure_future(work), 0
        while not (await asyncio.wait([task], timeout=ALIVE_S))[0]:
            waits += 1
            if self._asked.stream or is_certain() or waits > UNCERTAIN_WAITS:
                await self._send_part(": the turn is under way\n\n" if self._asked.stream else " ")
        return task.result()

    async def send_reply(self, reply: TurnReply) -> bool:
        """Send the reply; return whether the client was there."""
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)
        if self.has_left:
            return False
        api, stream = self._api, self._asked.stream
        body = (api.format_error if reply.refused else api.format_reply)(reply.body)
        if not self._has_begun and (reply.refused or not stream):
            response = _make_response(400 if reply.refused else 200, body)
            await response(self._scope, self._receive, self._send)
            return True
        if stream and reply.refused:
            body = f"event: error\ndata: {body}\n\n"
        elif stream:
            body = "".join(api.iter_events(reply.body, self._asked))
        await self._send_part(body, more=False)
        return not self.has_left

    async def _send_part(self, text: str, *, more: bool = True) -> None:
        """Send a part of a body whose length is unknown."""
        if not self._has_begun:
            self._has_begun = True
            kind = "text/event-stream" if self._asked.stream else "application/json"
            headers = [(b"content-type", kind.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})
