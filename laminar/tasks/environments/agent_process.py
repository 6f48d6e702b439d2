"""An agent in its session: the user's function, and the chat API that it calls.

Reads   the user's Python file; requests on a port of this machine's loopback interface
Gives   Endpoint, the function's second argument; main, the fork server (session_process.py)
Sends   ChatReply per request that may become a turn, AgentReply at the end of the function

The function has the main thread, and may block it. The API is http.server of the standard library:
a session has a single client, and a process that is forked for each trajectory should have neither
an event loop nor half a second of imports. Requests are answered one at a time. If a client leaves
before its reply, the turn is kept for the same request: a client's retry.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple

from laminar.config import ConfigError
from laminar.run.child_channel import BlockingChannel
from laminar.run.user_code import import_file
from laminar.tasks.data.prompts import PromptRow, from_plain
from laminar.tasks.environments.chat_messages import (
    ChatRequest,
    RequestRefused,
    iter_stream,
    make_error,
    read_request,
)
from laminar.tasks.environments.session_process import (
    AgentReply,
    AgentRequest,
    ChatReply,
    ForkServerStart,
    Serve,
    TurnRequest,
    run_fork_server,
    seed_random,
    to_coroutine,
)
from laminar.tasks.rewards.results import call_guarded

BODY_BYTES_MAX = 16 << 20
ALIVE_S = 10.0  #: between two signs of life to a client that waits for its turn
COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/models"
UNKNOWN = f"unknown; this endpoint has POST {COMPLETIONS} and GET {MODELS}"
RETRY = "x-stainless-retry-count"  #: header of OpenAI's clients
HOSTS = "127.0.0.1,localhost"


class Endpoint(NamedTuple):
    """The second argument of an agent."""

    base_url: str
    api_key: str
    model: str

    def __repr__(self) -> str:
        """Return a text without the key, which agents may print."""
        return f"Endpoint(base_url={self.base_url!r}, model={self.model!r})"

    def export_variables(self) -> None:
        """Set the variables that clients read."""
        os.environ |= {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}
        for name in ("NO_PROXY", "no_proxy"):
            others = os.environ.get(name, "")
            os.environ[name] = f"{others},{HOSTS}" if others else HOSTS


def main(fd: str, parent: str) -> None:
    run_fork_server(fd, parent, _load_agent)


def _load_agent(start: ForkServerStart) -> tuple[Serve, bool]:
    """Import the user's file; raise ConfigError."""
    module = import_file(Path(start.path), what="agent", keys="agents.run")
    function = getattr(module, start.name, None)
    try:
        inspect.signature(function).bind({}, None)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"agents.run = '{start.path}:{start.name}' cannot be called with a row and an "
            f"endpoint: {error}; write {start.name}(task, endpoint) in the file"
        ) from None
    assert callable(function)
    return partial(_serve_session, function, start.path), True


def _serve_session(function: Callable[..., Any], path: str, channel: BlockingChannel) -> None:
    """Run the agent; its exceptions become results."""
    if (request := channel.receive(AgentRequest)) is None:
        return
    seed_random(request.seed)
    gate = _Gate(channel)
    endpoint = _Server(gate, request.model).start()
    endpoint.export_variables()
    task = _make_task(request.row)

    def run_agent() -> Any:
        value = function(task, endpoint)
        return asyncio.run(to_coroutine(value)) if inspect.isawaitable(value) else value

    gate.close(AgentReply(call_guarded(run_agent, path)))
    channel.receive(TurnRequest)  # until this process is killed, with what the agent has started


def _make_task(row: PromptRow) -> dict[str, Any]:
    """Return the row as the agent gets it."""
    answer = {} if row.ground_truth is None else {"answer": from_plain(row.ground_truth)}
    return {**answer, **from_plain(row.columns), "prompt": row.prompt}


class _Answered(NamedTuple):
    """A request and its reply."""

    asked: str
    reply: TurnRequest
    is_read: bool  #: the client was there when the reply was sent


class _Gate:
    """The order of a session's requests: one at a time has the channel."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel, self._turn = channel, threading.Lock()
        self._asking = ""  #: request whose turn is under way
        self._last: _Answered | None = None
        self._refusal: TurnRequest | None = None  #: reply to all requests from now on

    def answer_request(self, asked: str, client: _Client, *, is_retry: bool) -> None:
        """Answer a request by a turn; a retry gets that of its first try."""
        while not self._turn.acquire(timeout=ALIVE_S):
            if asked == self._asking:
                client.show_life()
        try:
            if not client.has_left():
                reply = self._find_reply(asked, is_retry) or self._request_turn(asked, client)
                self._last = _Answered(asked, reply, client.send_reply(reply))
        finally:
            self._turn.release()

    def close(self, end: AgentReply) -> None:
        """Send the end of the agent, after the turn that is under way."""
        with self._turn:
            self._refusal = TurnRequest(make_error("the agent has ended"), refused=True)
            self._channel.send(end)

    def _find_reply(self, asked: str, is_retry: bool) -> TurnRequest | None:
        last = self._last
        if self._refusal is None and last is not None and last.asked == asked:
            return last.reply if is_retry or not last.is_read else None
        return self._refusal

    def _request_turn(self, asked: str, client: _Client) -> TurnRequest:
        self._asking = asked
        self._channel.send(ChatReply(asked))
        while not select.select([self._channel.socket], [], [], ALIVE_S)[0]:
            client.show_life()
        reply: TurnRequest | None = self._channel.receive(TurnRequest)
        if reply is None:
            raise ConnectionError("the replica has ended")  # as this process is about to
        self._asking = ""
        if reply.closed:
            self._refusal = reply
        return reply


class _Server(ThreadingTCPServer):
    """The server of a session, with a thread for each connection."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, gate: _Gate, model: str) -> None:
        super().__init__(("127.0.0.1", 0), _Client)
        self.gate, self.model, self.key = gate, model, secrets.token_urlsafe(24)

    def start(self) -> Endpoint:
        """Serve in a thread."""
        threading.Thread(target=self.serve_forever, name="chat-api", daemon=True).start()
        return Endpoint(f"http://127.0.0.1:{self.server_address[1]}/v1", self.key, self.model)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the exception, unless the client has left."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Client(BaseHTTPRequestHandler):
    """A connection of a client."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    _stream: ChatRequest | None = None  #: request whose reply is a stream of events
    _has_begun = _has_left = False

    def do_GET(self) -> None:
        """Answer a request for the models."""
        if not self._is_permitted():
            return
        model = {"id": self.server.model, "object": "model", "created": 0, "owned_by": "laminar"}
        known = self.path == MODELS
        listed = json.dumps({"object": "list", "data": [model]})
        self._send_json(200 if known else 404, listed if known else make_error(UNKNOWN))

    def do_POST(self) -> None:
        """Answer a request for a turn."""
        if not self._is_permitted():
            return
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > BODY_BYTES_MAX:
            self.close_connection = True
            return self._send_json(
                400, make_error(f"the body must have a length of at most {BODY_BYTES_MAX} bytes")
            )
        body = self.rfile.read(int(size))
        if self.path != COMPLETIONS:
            return self._send_json(404, make_error(UNKNOWN))
        try:
            asked = read_request(body)
        except RequestRefused as refused:
            return self._send_json(400, refused.body)
        self._stream = asked if asked.stream else None
        self._has_begun = False
        is_retry = self.headers.get(RETRY, "0") != "0"
        self.server.gate.answer_request(asked.encode_turn(), self, is_retry=is_retry)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: agents print what they want to."""

    # --- while a turn is sampled, and after ------------------------------------------------------

    def has_left(self) -> bool:
        """Return whether the client has closed the connection."""
        if not self._has_left:
            try:
                readable, _, _ = select.select([self.connection], [], [], 0)
                self._has_left = bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
            except OSError:
                self._has_left = True
        return self._has_left

    def show_life(self) -> None:
        """Send what clients ignore, so that none gives up: the turn is sure to come."""
        if not self.has_left():
            self._send_part(": the turn is under way\n\n" if self._stream else " ")

    def send_reply(self, reply: TurnRequest) -> bool:
        """Send the reply; return whether the client was there."""
        if self.has_left():
            return False
        if not self._has_begun and (reply.refused or self._stream is None):
            self._send_json(400 if reply.refused else 200, reply.body)
            return not self._has_left
        events: Iterable[str] = [reply.body]
        if self._stream is not None and not reply.refused:
            events = iter_stream(reply.body, include_usage=self._stream.include_usage)
        for event in events:
            self._send_part(f"data: {event}\n\n" if self._stream else event)
        self._send_part("")  # the end of the body
        return not self._has_left

    def _send_part(self, text: str) -> None:
        """Send a part of a body whose length is unknown; the empty one ends it."""
        data = text.encode()
        with self._note_loss():
            if not self._has_begun:
                self._has_begun = True
                self.send_response(200)
                kind = "text/event-stream" if self._stream else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send_json(self, status: int, body: str) -> None:
        data = body.encode()
        with self._note_loss():
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    @contextmanager
    def _note_loss(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._has_left = self.close_connection = True

    def _is_permitted(self) -> bool:
        """Return whether the request has the session's key; refuse it if not."""
        given = self.headers.get("x-api-key") or self.headers.get("Authorization") or ""
        key = given.removeprefix("Bearer ").strip()
        if hmac.compare_digest(key.encode(), self.server.key.encode()):
            return True
        self.close_connection = True
        wrong = "the API key is not that of this session; use endpoint.api_key or OPENAI_API_KEY"
        self._send_json(401, make_error(wrong, kind="authentication_error", code="invalid_api_key"))
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
