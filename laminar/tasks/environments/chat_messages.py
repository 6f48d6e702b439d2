"""Chat completions as JSON: what a client may ask for, and the form of replies and errors.

Reads   the body of a request to POST chat/completions
Gives   read_request, ChatRequest; compare_form, in which messages that clients have sent back equal
        those of before; make_completion, iter_events, make_error
Raises  RequestRefused, which the client gets as the provider's error object with status 400

The model's name is accepted and ignored; sampling parameters are replaced by those of the run, or
refused. What would change the distribution that is trained, or cannot be answered, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from laminar.run.user_file import replace_surrogates
from laminar.storage.messages import TurnOptions
from laminar.tasks.environments.tool_calls import CALL_ID, TurnMessage, format_call

ROLES = ("system", "user", "assistant", "tool")
TOO_LONG = "context_length_exceeded"
_REFUSED = {  #: values that are allowed, by key; others are refused
    "n": (None, 1),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "functions": (None,),
    "function_call": (None,),
}
#: sampling parameters, with the values that change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "seed": (None,),
    "logit_bias": (None, {}),
}
STOPS_MAX, STOP_CHARS_MAX = 16, 256  #: as storage/messages.py bounds them

Message = dict[str, Any]


class RequestRefused(Exception):
    """A request that is answered by an error."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        full = f"This model's maximum context length is exceeded: {message}"  # as clients know it
        self.body = make_error(full if code == TOO_LONG else message, code=code, param=param)


class ChatRequest(NamedTuple):
    """A request for a turn."""

    messages: list[Message]  #: in the form that chat templates read
    tools: list[dict[str, Any]]
    may_call: bool = True
    stream: bool = False
    include_usage: bool = False
    options: TurnOptions = TurnOptions()
    logprobs: bool = False  #: of sampled tokens, in the reply
    replaced: Mapping[str, Any] | None = None  #: sampling parameters that have no effect

    def encode_turn(self) -> str:
        """Return what decides the turn, as JSON."""
        options = self.options.max_tokens, self.options.stop
        return json.dumps([self.messages, self.tools, self.may_call, options, self.logprobs])


class Sampling(NamedTuple):
    """The treatment of sampling parameters of requests (agents.sampling)."""

    is_refused: bool = False
    temperature: float = 1.0  #: that of the run, which requests may have

    def find_replaced(self, given: Message) -> dict[str, Any]:
        """Return the parameters that differ from those of the run; raise RequestRefused."""
        allowed = {"temperature": (None, self.temperature), **_NEUTRAL}
        found = {key: given[key] for key in allowed if given.get(key) not in allowed[key]}
        for key, value in found.items() if self.is_refused else ():
            raise RequestRefused(
                f"{key} = {json.dumps(value)[:200]} is not that of the run, whose settings decide "
                'how the model is sampled: leave it out, or set agents.sampling = "replace"',
                param=key,
            )
        return found


REPLACING = Sampling()


def make_error(
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    param: str | None = None,
) -> str:
    """Return the provider's error object."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error})


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; raise RequestRefused."""
    try:
        given = json.loads(replace_surrogates(json.dumps(json.loads(body), ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise RequestRefused("the body is not a JSON object")
    return given


def read_request(body: bytes, sampling: Sampling = REPLACING) -> ChatRequest:
    """Check a request; raise RequestRefused."""
    return check_request(read_object(body), sampling)


def check_request(given: dict[str, Any], sampling: Sampling) -> ChatRequest:
    """Check the object of a request; raise RequestRefused."""
    for key, allowed in _REFUSED.items():
        if given.get(key) not in allowed:
            known = " or ".join(json.dumps(value) for value in allowed if value is not None)
            raise RequestRefused(
                f"{key} = {json.dumps(given[key])[:200]} is not supported: "
                f"{f'give {known}, or ' if known else ''}leave it out",
                param=key,
            )
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages must be a list with at least one message", param="messages")
    options = given.get("stream_options") or {}
    return ChatRequest(
        [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        _read_tools(given.get("tools") or []),
        given.get("tool_choice") != "none",
        bool(given.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
        _read_options(given),
        bool(given.get("logprobs")),
        sampling.find_replaced(given),
    )


def _read_options(given: Message) -> TurnOptions:
    """Return the limits of the turn."""
    limit = 0
    for key in ("max_tokens", "max_completion_tokens"):
        value = given.get(key)
        if value is not None and (type(value) is not int or not 0 < value < 1 << 31):
            wrong = f"{key} = {json.dumps(value)[:200]} must be a positive number of tokens"
            raise RequestRefused(wrong, param=key)
        limit = value or limit
    stop = given.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    fits = isinstance(stop, list) and all(isinstance(each, str) for each in stop)
    if not fits or len(stop) > STOPS_MAX or any(len(each) > STOP_CHARS_MAX for each in stop):
        raise RequestRefused(
            f"stop must be a text of at most {STOP_CHARS_MAX} characters, or a list of at most "
            f"{STOPS_MAX} of them",
            param="stop",
        )
    return TurnOptions(max_tokens=limit, stop=tuple(each for each in stop if each))


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    for tool in tools if isinstance(tools, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) else None
        function = function if isinstance(function, dict) else {}
        parameters = function.setdefault("parameters", {"type": "object", "properties": {}})
        properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
        fits = isinstance(properties, dict) and all(
            isinstance(p, dict) for p in properties.values()
        )
        if not isinstance(function.get("name"), str) or not fits:
            raise RequestRefused(
                "tools must be a list of functions with a name, whose parameters are a JSON schema",
                param="tools",
            )
    return list(tools)


def _read_message(message: Any, at: str) -> Message:
    if not isinstance(message, dict):
        raise RequestRefused(f"{at} is not an object", param=at)
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise RequestRefused(f"{at}.role = {role!r} is not one of {', '.join(ROLES)}", param=at)
    found: Message = {"role": role, "content": _read_content(message.get("content"), at)}
    if role == "assistant" and message.get("tool_calls"):
        found["tool_calls"] = _read_calls(message["tool_calls"], f"{at}.tool_calls")
    kept = ("tool_call_id", "name") if role == "tool" else ("name",)
    found |= {key: str(message[key]) for key in kept if message.get(key)}
    return found


def _read_content(content: Any, at: str) -> str:
    """Return the text of a message, whose parts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"
    ]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise RequestRefused(
            f"{at}.content is neither text nor a list of parts of the type text; images and audio "
            "are not supported",
            param=at,
        )
    return "".join(map(str, texts))


def _read_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    found = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        try:
            arguments = function["arguments"]  # type: ignore[index]
            read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            made = format_call(str(call["id"]), str(function["name"]), dict(read))  # type: ignore[index]
        except (KeyError, TypeError, ValueError, RecursionError):
            raise RequestRefused(
                f"{at} must be a list of calls with an id and a function, whose arguments are a "
                "JSON object",
                param=at,
            ) from None
        found.append(made)
    return found


def compare_form(message: Message) -> tuple[str, ...]:
    """Return what clients keep of a message: no ids of calls, no reasoning, no white space."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    content = message["content"]
    return (
        message["role"],
        content.strip() if message["role"] == "assistant" else content,
        *(f"{call['name']} {json.dumps(call['arguments'], sort_keys=True)}" for call in calls),
    )


def make_turn_message(turn: TurnMessage, first_call: int) -> Message:
    """Return a turn in the form that chat templates read; `first_call`: number of its first id."""
    calls = [
        format_call(CALL_ID.format(i), call.tool, call.arguments)
        for i, call in enumerate(turn.calls, first_call)
    ]
    return {
        "role": "assistant",
        "content": turn.content,
        **({"tool_calls": calls} if calls else {}),
    }


def make_completion(
    head: Message,
    message: Message,
    reasoning: str,
    *,
    cut: bool,
    tokens: tuple[int, int],
    stop: str | None = None,
    logprobs: Sequence[tuple[str, float]] | None = None,
) -> str:
    """Return the reply to a request.

    `tokens`: numbers read and sampled; `stop`: the stop string that ended the turn; `logprobs`:
    text and log-prob of each token.
    """
    calls = [
        format_call(c["id"], c["function"]["name"], json.dumps(c["function"]["arguments"]))
        for c in message.get("tool_calls", ())
    ]
    content = None if calls and not message["content"].strip() else message["content"]
    told = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
    told |= {"tool_calls": calls} if calls else {}
    choice = {
        "index": 0,
        "message": told,
        "logprobs": None if logprobs is None else {"content": [*map(_format_token, logprobs)]},
        "finish_reason": "length" if cut else "tool_calls" if calls else "stop",
        "stop_reason": stop,
    }
    read, sampled = tokens
    usage = {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
    found = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    return json.dumps(found)


def _format_token(token: tuple[str, float]) -> Message:
    text, logprob = token
    data = None if "\ufffd" in text else list(text.encode())  # a part of a character
    return {"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []}


def iter_events(body: str, asked: ChatRequest) -> Iterator[str]:
    """Yield the events of a stream for a completion: a whole turn, its end, its usage."""
    found = json.loads(body)
    usage, (choice,) = found.pop("usage"), found["choices"]
    delta = choice.pop("message")
    for i, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = i
    found["object"] = "chat.completion.chunk"
    ended = {**choice, "delta": {}, "logprobs": None}
    for one in ({**choice, "delta": delta, "finish_reason": None}, ended):
        yield format_event(json.dumps({**found, "choices": [one]}))
    if asked.include_usage:
        yield format_event(json.dumps({**found, "choices": [], "usage": usage}))
    yield format_event("[DONE]")


def format_event(data: str) -> str:
    return f"data: {data}\n\n"
