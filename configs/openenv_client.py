"""The client of an OpenEnv server as an environment, in the style of TRL (docs/agents.md).

It needs `pip install openenv`, and OPENENV_URL, the server. The server decides the reward. It must
have as many places (max_concurrent_envs) as there are sessions: hosts x agents.max_sessions.
"""

import os

from openenv.core import GenericEnvClient


class OpenEnv:
    def __init__(self) -> None:
        """No session yet: the class is also made to be looked at."""
        url = os.environ.get("OPENENV_URL", "http://127.0.0.1:8000")
        self._client = GenericEnvClient(base_url=url).sync()
        self._reward = 0.0

    def reset(self, **row: object) -> str:
        """Start a new episode of the server."""
        observation = self._client.reset().observation
        self._reward = 0.0
        return str(observation.get("text") or "")

    def add(self, a: int, b: int) -> str:
        """Add two whole numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        result = self._client.step({"a": a, "b": b})
        self._reward = float(result.reward or 0.0)
        return str(result.observation["text"])

    def get_reward(self) -> float:
        return self._reward
