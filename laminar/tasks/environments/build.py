"""The sessions of a config: those of its environment, or those of its agent.

Reads   Config, the tokenizer
Gives   make_sessions, make_agents; the parts of a replica that answer turns
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.config import Config
from laminar.run.child_process import Output
from laminar.tasks.environments.agents import Agents, ChatFormat
from laminar.tasks.environments.pool import Environments
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.session_pool import SessionPool
from laminar.tasks.environments.tool_calls import CallParser
from laminar.tasks.environments.user_class import decode_tools
from laminar.tasks.rewards.reward_functions import reward_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[list[int]], str]


def make_sessions(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
    decode: Decode,
    on_output: Output,
) -> Environments | Agents | None:
    """Return the sessions, not started; None if responses have a single turn."""
    if config.agents.run:
        return make_agents(config, tokenizer, end_ids, decode, on_output)
    if not config.env.path:
        return None
    tools = decode_tools(config.env)
    return Environments(
        config,
        SessionPool.from_config(config.env, on_output=on_output, reward=reward_spec(config)),
        Renderer(tokenizer, config.data, tools, end_ids),
        CallParser(tokenizer, tools),
        decode,
    )


def make_agents(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
    decode: Decode,
    on_output: Output = len,
) -> Agents:
    pool = SessionPool.from_config(config.env, agent=config.agents.run, on_output=on_output)
    model = Path(config.model.name).name
    return Agents(config, pool, ChatFormat(tokenizer, config.data, end_ids, decode, model))
