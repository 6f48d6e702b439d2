"""An agent in its session: the user's function, and the endpoint that it calls.

Reads   the user's Python file
Gives   Endpoint, the function's second argument; main, the fork server (session_process.py)
Sends   AgentReply at the end of the function

The function has the main thread, and may block it. The chat API that it calls is in the process
that holds the sessions (endpoint.py).
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from laminar.config import ConfigError
from laminar.run.child_channel import BlockingChannel
from laminar.run.user_code import import_file
from laminar.tasks.data.prompts import PromptRow, from_plain
from laminar.tasks.environments.session_process import (
    AgentReply,
    AgentRequest,
    ForkServerStart,
    Serve,
    run_fork_server,
    seed_random,
    to_coroutine,
)
from laminar.tasks.rewards.results import call_guarded

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
        os.environ |= {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }
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
    endpoint = Endpoint(request.base_url, request.api_key, request.model)
    endpoint.export_variables()
    task = _make_task(request.row)

    def run_agent() -> Any:
        value = function(task, endpoint)
        return asyncio.run(to_coroutine(value)) if inspect.isawaitable(value) else value

    channel.send(AgentReply(call_guarded(run_agent, path)))
    channel.receive(AgentRequest)  # until this process is killed, with what the agent has started


def _make_task(row: PromptRow) -> dict[str, Any]:
    """Return the row as the agent gets it."""
    answer = {} if row.ground_truth is None else {"answer": from_plain(row.ground_truth)}
    return {**answer, **from_plain(row.columns), "prompt": row.prompt}


if __name__ == "__main__":
    main(*sys.argv[1:])
