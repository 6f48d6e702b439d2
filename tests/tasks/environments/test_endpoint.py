"""The chat API of sessions, with the test in place of the model."""

import asyncio
import http.client
import json
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from laminar.config import ConfigError
from laminar.tasks.environments import endpoint
from laminar.tasks.environments.chat_messages import make_completion
from laminar.tasks.environments.endpoint import ChatEndpoint, TurnReply

LIMIT_S = 30
USER = [{"role": "user", "content": "a"}]
CALLS = [{"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
COMPLETIONS = "/chat/completions"


class Client:
    """A session, its model, and clients of it, each in a thread."""

    def __init__(self, url, gate):
        self.url, self.gate = urlsplit(url), gate

    async def send(self, method, path, body=None, *, key=None, root=None, **headers):
        """Send a request, and return its connection."""
        connection = http.client.HTTPConnection(self.url.netloc, timeout=LIMIT_S)
        headers = {"x-api-key": self.gate.key if key is None else key, **headers}
        path = (self.url.path if root is None else root) + path
        await asyncio.to_thread(connection.request, method, path, body, headers)
        return connection

    async def post(self, messages=USER, *, retry=0, path=COMPLETIONS, **more):
        body = json.dumps({"model": "any", "messages": messages, **more})
        return await self.send("POST", path, body, **{"x-stainless-retry-count": str(retry)})

    async def asked(self):
        async with asyncio.timeout(LIMIT_S):
            return (await self.gate.next_request()).messages

    def tell(self, text, **more):
        message = {"role": "assistant", "content": text, **more}
        body = make_completion({"id": "n"}, message, "", cut=False, tokens=(3, 2))
        self.gate.send_reply(TurnReply(body))


@asynccontextmanager
async def serving(model="m"):
    made = ChatEndpoint(model)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def client(name="t"):
    async with serving() as made:
        yield Client(*made.open_gate(name))


async def read(connection):
    def wait():
        reply = connection.getresponse()
        return reply.status, reply.read().decode()

    return await asyncio.to_thread(wait)


async def content(connection):
    status, body = await read(connection)
    assert status == 200, body
    return json.loads(body)["choices"][0]["message"]["content"]


async def test_a_session_has_its_own_address_and_key():
    async with serving() as made:
        one, two = Client(*made.open_gate("t")), Client(*made.open_gate("t"))
        assert one.url.netloc == two.url.netloc and one.url.hostname == "127.0.0.1"
        assert one.url.path != two.url.path and one.gate.key != two.gate.key

        async def get(path="/models", **more):
            status, body = await read(await one.send("GET", path, **more))
            return status, json.loads(body)

        for wrong in ("", "x", two.gate.key, "é"):
            status, body = await get(key=wrong.encode())
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            refused = await one.send("POST", COMPLETIONS, "{}", key=wrong.encode())
            assert (await read(refused))[0] == 401
        assert (await get(root="/other/v1"))[0] == 401
        found = await get(key="", Authorization=f"Bearer {one.gate.key}")
        assert found[1]["data"][0]["id"] == "m"
        status, body = await get("/other")
        assert (
            status == 404
            and "POST /v1/chat/completions, POST /v1/messages and GET" in body["error"]["message"]
        )
        connection = await one.send("POST", COMPLETIONS, "{")
        assert (await read(connection))[0] == 400
        long = await one.send("POST", COMPLETIONS, b" " * (endpoint.BODY_BYTES_MAX + 1))
        assert "must have a length" in (await read(long))[1]
        for known in (one, two):
            assert known.gate.key not in known.url.geturl()


async def test_requests_reach_their_session_only():
    async with serving() as made:
        sessions = [Client(*made.open_gate(name)) for name in "ab"]
        posted = [
            await each.post([{"role": "user", "content": "x" * 300_000}]) for each in sessions
        ]
        for number, each in enumerate(sessions):
            assert len((await each.asked())[0]["content"]) == 300_000
            each.tell(str(number))
        assert [await content(connection) for connection in posted] == ["0", "1"]


async def test_a_turn_as_json_and_as_a_stream():
    async with client() as served:
        first = await served.post(temperature=0.3)
        assert await served.asked() == USER
        served.tell("", tool_calls=CALLS)
        found = json.loads((await read(first))[1])
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

        options = {"include_usage": True}
        second = await served.post(USER * 2, stream=True, stream_options=options)
        await served.asked()
        served.tell("é", tool_calls=CALLS)
        events = (await read(second))[1].split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        begun, ended, counted = (json.loads(e.removeprefix("data: ")) for e in events[:-2])
        delta = begun["choices"][0]["delta"]
        assert (delta["content"], delta["tool_calls"][0]["index"]) == ("é", 0)
        assert ended["choices"][0]["finish_reason"] == "tool_calls"
        assert counted["usage"] == found["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_waits_is_shown_life(stream, monkeypatch):
    monkeypatch.setattr(endpoint, "ALIVE_S", 0.01)
    sign = b": the turn is under way\n\n" if stream else b" "

    def signs(connection):
        reply = connection.getresponse()  # its status comes before the turn
        return reply, reply.status, reply.read(2 * len(sign))

    async with client() as served:
        connection = await served.post(stream=stream)
        await served.asked()
        reply, *found = await asyncio.to_thread(signs, connection)
        assert found == [200, sign * 2]
        served.tell("late")
        rest = (await asyncio.to_thread(reply.read)).decode()
        assert rest.endswith("data: [DONE]\n\n") if stream else json.loads(rest)["id"] == "n"


async def test_a_retry_gets_the_turn_of_its_first_try():
    async with client() as served:
        left = await served.post()
        await served.asked()
        left.close()
        again = await served.post()  # while the turn is under way
        served.tell("one")
        assert await content(again) == "one"
        assert await content(await served.post(retry=1)) == "one"  # its client says so
        other = await served.post()  # the same words, once their reply was read: a new request
        assert await served.asked() == USER
        served.gate.send_reply(TurnReply('{"error": {}}', refused=True))
        assert (await read(other))[0] == 400

        left = await served.post(USER * 2)
        await served.asked()
        left.close()
        served.tell("two")
        assert await content(await served.post(USER * 2)) == "two"  # after the turn


async def test_a_client_that_leaves_before_its_turn_costs_none():
    async with client() as served:
        first = await served.post()
        await served.asked()
        left = await served.post(USER * 2)
        last = await served.post(USER * 3)
        left.close()
        served.tell("one")
        assert await content(first) == "one"
        assert await served.asked() == USER * 3
        served.tell("three")
        assert await content(last) == "three"


async def test_requests_have_turns_one_at_a_time():
    async with client() as served:
        connections = [await served.post([{"role": "user", "content": str(i)}]) for i in range(3)]
        for _ in connections:
            served.tell((await served.asked())[0]["content"])
        assert sorted([await content(c) for c in connections]) == ["0", "1", "2"]


async def test_after_its_end_an_agent_gets_no_turn():
    async with serving() as made:
        url, gate = made.open_gate("t")
        served = Client(url, gate)
        waiting = await served.post()
        await served.asked()
        made.close_gate(url)
        status, body = await read(waiting)
        assert status == 400 and "the agent has ended" in body
        assert (await read(await served.post(USER * 2)))[0] == 401


async def test_a_refusal_that_closes_is_repeated():
    async with client() as served:
        connection = await served.post()
        await served.asked()
        served.gate.send_reply(TurnReply('{"error": "full"}', refused=True, closed=True))
        again = await served.post(USER * 2)
        assert await read(connection) == await read(again) == (400, '{"error": "full"}')


async def test_without_the_extra_agents_are_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    async with serving() as made:
        with pytest.raises(ConfigError, match=r"agents need uvicorn: .*\[agents\]"):
            made.open_gate("t")
