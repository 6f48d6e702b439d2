"""A BaseTextEnv of SkyRL-Gym as an environment: gsm8k_multi_turn (docs/agents.md).

It needs `pip install skyrl-gym`. A BaseTextEnv takes a step with a text of the model; here that is
a tool, so that the model says which of its words are meant.
"""

from typing import Any

import skyrl_gym


class Gsm8k:
    def reset(self, prompt: Any, answer: str, max_turns: int = 5, **row: Any) -> None:
        """Start a new task: its question is the prompt, `answer` a column of the data."""
        extras = {"reward_spec": {"ground_truth": str(answer)}, "max_turns": max_turns}
        self._task = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)
        self._task.init(prompt)
        self._reward, self._is_over = 0.0, False

    def submit(self, text: str) -> str:
        """Submit a solution, which ends with the number in the form '#### 42'.

        Args:
            text: The solution.
        """
        if self._is_over:
            return "The task is over."
        step = self._task.step(text)
        self._reward += float(step["reward"])
        self._is_over = bool(step["done"])
        told = " ".join(message["content"] for message in step["observations"])
        return told or "The task is over."

    def get_reward(self) -> float:
        return self._reward
