"""An agent of the OpenAI Agents SDK with the calculator's tool: pip install openai-agents."""

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

TURNS_MAX = 6

set_tracing_disabled(True)  # or it sends traces to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def solve(task: dict[str, Any], endpoint: Any) -> None:
    """Run the agent; the text of its last turn is scored."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = OpenAIChatCompletionsModel(endpoint.model, client)
    agent = Agent(name="calculator", model=model, tools=[add])
    await Runner.run(agent, task["prompt"], max_turns=TURNS_MAX)
