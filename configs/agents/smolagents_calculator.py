"""An agent of smolagents, unchanged, with the calculator's tool: pip install 'smolagents[openai]'.

smolagents writes the model's calls into the history in its own words, so that each request begins a
branch. It forces calls unless told otherwise, which would change how the model is sampled.
"""

from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent, tool

STEPS_MAX = 5


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def solve(task: dict[str, Any], endpoint: Any) -> float:
    """Return whether the agent's final answer is that of the row."""
    model = OpenAIModel(
        endpoint.model, endpoint.base_url, api_key=endpoint.api_key, tool_choice="auto"
    )
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=STEPS_MAX, verbosity_level=0)
    return float(str(agent.run(task["prompt"])).strip() == str(task["answer"]).strip())
