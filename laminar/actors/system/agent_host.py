"""The parts of a real host of agents: the tokenizer, sessions, reward workers.

Reads   the tokenizer, the agent or the environment, and the reward function of the run
Writes  output of the user's code: logs/latest/NAME.reward.log
Gives   RealHostParts, the HostParts of actors/agent_host.py
"""

from __future__ import annotations

import asyncio

from laminar.actors.host import Host
from laminar.actors.system.reward_output import make_reward_pool, user_output
from laminar.tasks.data.decoding import make_response_decoder
from laminar.tasks.data.tokenizer import end_ids, load_tokenizer
from laminar.tasks.environments.agents import Agents
from laminar.tasks.environments.pool import Environments
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.session_pool import SessionPool
from laminar.tasks.environments.tool_calls import CallParser
from laminar.tasks.environments.user_class import decode_tools
from laminar.tasks.rewards.reward_functions import reward_spec


class RealHostParts:
    """The parts of one real host."""

    def __init__(self, host: Host) -> None:
        self._config = host.config
        self._printed = user_output(host)
        self.rewards = make_reward_pool(host, self._printed)

    async def load_sessions(self) -> Environments | Agents:
        """Return the sessions, whose output goes with that of the reward functions."""
        config, printed = self._config, self._printed
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.name)
        stop_ids = end_ids(config.model.name, tokenizer)
        self._decode = make_response_decoder(tokenizer, stop_ids)
        if config.agents.label:
            return Agents(config, tokenizer, stop_ids, self._decode, printed)
        tools = decode_tools(config.env)
        return Environments(
            config,
            SessionPool(config.env, on_output=printed, reward=reward_spec(config)),
            Renderer(tokenizer, config.data, tools, stop_ids),
            CallParser(tokenizer, tools),
            self._decode,
        )

    def decode(self, tokens: list[int]) -> str:
        return self._decode(tokens)
