"""An agent in its session: the user's function or command, and the endpoint that it calls.

Reads   the user's Python file; the end of a command's output
Writes  the row of a command as JSON, in its working directory
Gives   Endpoint, the function's second argument; main, the fork server (session_process.py)
Sends   AgentReply at the end of the function

The function has the main thread, and may block it. A command is a function that runs it. The chat
API that it calls is in the process that holds the sessions (endpoint.py).
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401  of any connection; 2 MB, if each session imports it
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from laminar.config import ConfigError
from laminar.names.process_end import describe_exit
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
)
from laminar.tasks.rewards.results import call_guarded, to_coroutine

HOSTS = "127.0.0.1,localhost"
TASK_VARIABLE, TASK_FILE = "LAMINAR_TASK_FILE", "task.json"
OUTPUT_BYTES = 1 << 16  #: the end of a command's output that is read and printed


class CommandFailed(Exception):
    """The exit of a command with another code than 0."""


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
    """Import the user's file, or find the command; raise ConfigError."""
    if command := start.command:
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"agents.command = {command!r}: there is no program {command[0]!r} on the PATH; "
                "name one, or give its path"
            )
        return partial(_serve_session, partial(run_command, command), command[-1]), True
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
    if request.directory:
        os.chdir(request.directory)
        os.environ["TMPDIR"] = request.directory

    def run_agent() -> Any:
        value = function(task, endpoint)
        return asyncio.run(to_coroutine(value)) if inspect.isawaitable(value) else value

    channel.send(AgentReply(call_guarded(run_agent, path)))
    channel.receive(AgentRequest)  # until this process is killed, with what the agent has started


def _make_task(row: PromptRow) -> dict[str, Any]:
    """Return the row as the agent gets it."""
    answer = {} if row.ground_truth is None else {"answer": from_plain(row.ground_truth)}
    return {**answer, **from_plain(row.columns), "prompt": row.prompt}


def run_command(command: Sequence[str], task: dict[str, Any], endpoint: Endpoint) -> Any:
    """Run a command here and return its score: the last line of its output, if that is JSON."""
    file = Path(TASK_FILE).absolute()
    file.write_text(json.dumps(task, default=str))
    os.environ[TASK_VARIABLE] = str(file)
    with tempfile.TemporaryFile() as output:
        code = subprocess.call(command, stdin=subprocess.DEVNULL, stdout=output)
        output.seek(max(0, output.tell() - OUTPUT_BYTES))
        printed = output.read()
    sys.stderr.buffer.write(printed)
    sys.stderr.flush()
    if code:
        raise CommandFailed(f"{command[0]} ended with {describe_exit(code)}")
    lines = printed.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        found = json.loads(last)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, int | float | dict) else None


if __name__ == "__main__":
    main(*sys.argv[1:])
