"""A task, a tool loop and a reward of verifiers.v1, unchanged: pip install verifiers.

verifiers starts a server of its own between the loop and the model, which passes requests on.
"""

import json
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

TURNS_MAX = 6
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """Return whether the last reply has the answer."""
        return float(self.data.answer in (trace.last_reply or ""))


class ToolLoop(vf.Harness[NullHarnessConfig]):
    """The loop of the agent, in the process of the session."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Let the model answer, with as many calls of the tool as it wants."""
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for _ in range(TURNS_MAX):
            reply = await client.chat.completions.create(
                model=ctx.model, messages=messages, tools=TOOLS
            )
            message = reply.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                result = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
        return ProgramResult(0, "", "")


async def solve(task: dict[str, Any], endpoint: Any) -> float:
    """Return the reward of verifiers."""
    agent = vf.Agent(
        vf.AgentConfig(
            model=endpoint.model,
            client=vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var="OPENAI_API_KEY"),
            harness=NullHarnessConfig(id="null"),
            runtime=SubprocessConfig(),
        )
    )
    agent.harness = ToolLoop(agent.config.harness)
    trace = await agent.run(SumTask(SumData(prompt=task["prompt"], answer=str(task["answer"]))))
    if trace.errors:
        raise RuntimeError(str(trace.errors[-1]))
    return float(trace.reward)
