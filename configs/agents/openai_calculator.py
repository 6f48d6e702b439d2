"""The agent of openai_calculator.toml: the tool loop of the openai SDK, as users write it."""

import json
from typing import Any

from openai import BadRequestError, OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "description": "The second number."},
                },
                "required": ["a", "b"],
            },
        },
    }
]


def call_tool(name: str, arguments: dict[str, Any]) -> str:
    """Return the result of a call as text; the model reads its mistakes."""
    try:
        if name != "add":
            raise ValueError(f"there is no tool {name!r}")
        return str(arguments["a"] + arguments["b"])
    except Exception as error:
        return f"error: {error}"


def solve(task: dict[str, Any], endpoint: Any) -> None:
    """Let the model answer, with as many calls of the tool as it wants; its text is scored."""
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    while True:
        try:
            reply = client.chat.completions.create(
                model=endpoint.model, messages=messages, tools=TOOLS
            )
        except BadRequestError as error:  # no tokens or turns are left
            if error.code == "context_length_exceeded":
                return None
            raise
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return None
        for call in message.tool_calls:
            result = call_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
