"""The chat API of a session, with the test in place of its replica."""

import http.client
import json
import socket
import threading

import pytest

from laminar.run.child_channel import BlockingChannel
from laminar.tasks.environments import agent_process
from laminar.tasks.environments.chat_messages import make_completion
from laminar.tasks.environments.session_process import AgentReply, ChatReply, TurnRequest
from laminar.tasks.rewards.results import RewardResult

LIMIT_S = 30
USER = [{"role": "user", "content": "a"}]
CALLS = [{"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


class Served:
    """A server, the replica's end of its channel, and clients of it."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_S)
        self.replica = BlockingChannel(ours)
        self.gate = agent_process._Gate(BlockingChannel(theirs))
        self.server = agent_process._Server(self.gate, "m")
        self.endpoint = self.server.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def connect(self):
        return http.client.HTTPConnection(*self.server.server_address, timeout=LIMIT_S)

    def post(self, messages=USER, *, retry=0, **more):
        """Send a request, and return its connection."""
        connection = self.connect()
        body = json.dumps({"model": "any", "messages": messages, **more})
        headers = {"x-api-key": self.endpoint.api_key, "x-stainless-retry-count": str(retry)}
        connection.request("POST", "/v1/chat/completions", body, headers)
        return connection

    def asked(self):
        return json.loads(self.replica.receive(ChatReply).body)[0]

    def tell(self, text, **more):
        message = {"role": "assistant", "content": text, **more}
        body = make_completion({"id": "n"}, message, "", cut=False, tokens=(3, 2))
        self.replica.send(TurnRequest(body))


@pytest.fixture
def served():
    with Served() as found:
        yield found


def read(connection):
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def content(connection):
    status, body = read(connection)
    assert status == 200, body
    return json.loads(body)["choices"][0]["message"]["content"]


def test_paths_and_keys(served):
    def get(path, **headers):
        connection = served.connect()
        connection.request("GET", path, headers=headers)
        status, body = read(connection)
        return status, json.loads(body)

    assert get("/v1/models")[1]["error"]["code"] == "invalid_api_key"
    assert get("/v1/models", Authorization="Bearer x")[0] == 401
    key = {"Authorization": f"Bearer {served.endpoint.api_key}"}
    assert get("/v1/models", **key)[1]["data"][0]["id"] == "m"
    assert get("/v1/other", **key)[0] == 404
    connection = served.connect()
    connection.request("POST", "/v1/messages", "{}", key)
    assert read(connection)[0] == 404
    connection.request("POST", "/v1/chat/completions", "{", key)  # of the same connection
    assert read(connection)[0] == 400
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("x-api-key", served.endpoint.api_key)
    connection.endheaders()
    assert "must have a length" in read(connection)[1]
    assert served.endpoint.api_key not in repr(served.endpoint)


def test_a_turn_as_json_and_as_a_stream(served):
    first = served.post(temperature=0.3)
    assert served.asked() == USER
    served.tell("", tool_calls=CALLS)
    found = json.loads(read(first)[1])
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    second = served.post(USER * 2, stream=True, stream_options={"include_usage": True})
    served.asked()
    served.tell("é", tool_calls=CALLS)
    events = read(second)[1].split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    begun, ended, counted = (json.loads(e.removeprefix("data: ")) for e in events[:-2])
    delta = begun["choices"][0]["delta"]
    assert (delta["content"], delta["tool_calls"][0]["index"]) == ("é", 0)
    assert (
        ended["choices"][0]["finish_reason"] == "tool_calls" and counted["usage"] == found["usage"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_waits_is_shown_life(served, stream, monkeypatch):
    monkeypatch.setattr(agent_process, "ALIVE_S", 0.01)
    connection = served.post(stream=stream)
    served.asked()
    reply = connection.getresponse()  # its status comes before the turn
    assert reply.status == 200
    sign = b": the turn is under way\n\n" if stream else b" "
    assert reply.read(2 * len(sign)) == sign * 2
    served.tell("late")
    rest = reply.read().decode()
    assert rest.endswith("data: [DONE]\n\n") if stream else json.loads(rest)["id"] == "n"


def test_a_retry_gets_the_turn_of_its_first_try(served):
    left = served.post()
    served.asked()
    left.close()
    again = served.post()  # while the turn is under way
    served.tell("one")
    assert content(again) == "one"
    assert content(served.post(retry=1)) == "one"  # its client says so
    other = served.post()  # the same words, once their reply was read, are a new request
    assert served.asked() == USER
    served.replica.send(TurnRequest('{"error": {}}', refused=True))
    assert read(other)[0] == 400

    left = served.post(USER * 2)
    served.asked()
    left.close()
    served.tell("two")
    assert content(served.post(USER * 2)) == "two"  # after the turn


def test_requests_have_turns_one_at_a_time(served):
    connections = [served.post([{"role": "user", "content": str(i)}]) for i in range(3)]
    for _ in connections:
        served.tell(served.asked()[0]["content"])
    assert [content(c) for c in connections] == ["0", "1", "2"]


def test_after_its_end_an_agent_gets_no_turn(served):
    connection = served.post()
    served.asked()
    end = threading.Thread(target=served.gate.close, args=[AgentReply(RewardResult(1.0))])
    end.start()
    served.tell("last")
    assert content(connection) == "last"
    end.join(LIMIT_S)
    assert served.replica.receive(AgentReply).result.reward == 1.0
    assert "the agent has ended" in read(served.post(USER * 2))[1]


def test_a_refusal_that_closes_is_repeated(served):
    connection = served.post()
    served.asked()
    served.replica.send(TurnRequest('{"error": "full"}', refused=True, closed=True))
    assert read(connection) == read(served.post(USER * 2)) == (400, '{"error": "full"}')
