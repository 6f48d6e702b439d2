"""The settings of tasks: rewards, environments and agents.

Gives   RewardConfig and its parts, EnvConfig, AgentsConfig; tree.py has [data], the rows
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from laminar.config.deciding import Decides
from laminar.config.declaring import Count, Natural, NonNegative, Seconds, Section, doc, path_form


class RewardFunctionConfig(Section, frozen=True, kw_only=True):
    path: Annotated[
        str,
        path_form("code"),
        doc("a Python file; empty: the dataset's own scorer, or math-verify"),
    ] = ""
    name: Annotated[
        str, doc("the function; empty: compute_score, else the file's only public function")
    ] = ""


class WeightedFunctionConfig(Section, frozen=True, kw_only=True):
    """An entry of reward.functions."""

    path: Annotated[str, path_form("code")] = (
        ""  #: a Python file; empty: name is a scorer that comes with Laminar
    )
    name: str = ""  #: name of the function, as above; or dataset, math, exact
    weight: float = 1.0  #: weight of its score in the sum; 0: only its metric


class OverlongBufferConfig(Section, frozen=True, kw_only=True):
    len: Annotated[
        Natural,
        doc("last tokens before data.max_response_length that cost a response reward; 0: none do"),
    ] = 0
    penalty_factor: Annotated[
        NonNegative, doc("reward that a response of full length loses; see docs/training.md")
    ] = 1.0


class RewardConfig(Section, frozen=True, kw_only=True):
    kind: Annotated[
        Literal["auto", "dataset", "math", "exact", "custom"],
        doc("the scorer; auto: your function, else the dataset's scorer, else math-verify"),
    ] = "auto"
    functions: Annotated[
        list[WeightedFunctionConfig],
        doc(
            "several scorers and their weights: "
            '[{ path = "a.py" }, { name = "math", weight = 0.5 }]'
        ),
    ] = []
    scope: Annotated[
        Literal["auto", "trajectory", "group"],
        doc("what one call scores: one response, or all responses to a prompt"),
        Decides("reward_scope"),
    ] = "auto"
    workers: Annotated[Count, doc("worker processes of each replica")] = 1
    timeout_s: Annotated[Seconds, doc("the longest call of the reward function")] = 30.0
    error_score: Annotated[
        float, doc("the score where the function raises, times out or gives no number")
    ] = 0.0
    max_retries: Annotated[Natural, doc("calls repeated after a worker process died")] = 2
    max_error_share: Annotated[
        float,
        Meta(ge=0, le=1),
        doc(
            "the run ends when a larger share of the last 4 x train_batch_size x group_size calls "
            "failed; 1: never"
        ),
        Decides("max_error_permille"),
    ] = 0.5
    trial: Annotated[bool, doc("true: try reward, and reset, on three rows first")] = True
    custom_reward_function: RewardFunctionConfig = RewardFunctionConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class EnvConfig(Section, frozen=True, kw_only=True):
    """Environment, in which a response has turns between tool calls; see docs/agents.md."""

    path: Annotated[str, path_form("code"), doc("a Python file with a class; empty: none")] = ""
    name: Annotated[str, doc("the class; empty: the file's only public class")] = ""
    call_semantics: Annotated[
        Literal["at-most-once", "retryable"],
        doc("tool calls of a lost session; at-most-once: never repeated; retryable: repeated"),
    ] = "at-most-once"
    max_turns: Annotated[Count, doc("turns of a response at most")] = 10
    max_context_tokens: Annotated[
        Count, doc("context tokens of one response: tool results or messages, with their template")
    ] = 2_048
    tool_timeout_s: Annotated[Seconds, doc("the longest call of a tool; then it is killed")] = 30.0
    memory_mb: Annotated[Natural, doc("memory of each process of a session; 0: no limit")] = 4_096
    unsafe_local_code: Annotated[bool, doc("let code of the model run without a sandbox")] = False
    turn_timeout_s: Annotated[
        Seconds, doc("time limit of all calls of one turn"), Decides(absent=0)
    ] = 120.0
    trajectory_timeout_s: Annotated[Seconds, doc("time limit of all calls of a response")] = 300.0
    tools: Annotated[
        str, doc("the JSON schemas of the tools, as the class declares them when a run starts")
    ] = ""


class AgentsConfig(Section, frozen=True, kw_only=True):
    """Agent, a program that calls a chat API, and the hosts of agents and environments.

    [env] has their limits; see docs/agents.md.
    """

    hosts: Annotated[
        Natural, doc("nodes with a host, from the first one; 0: those with replicas")
    ] = 0
    max_sessions: Annotated[
        Natural,
        doc("sessions of a host; 0: 2 x (max_num_seqs + group_size) per replica, in flight 4 x"),
    ] = 0
    run: Annotated[
        str,
        path_form("code:name"),
        doc("path.py:function, called with a row and its endpoint; empty: none"),
    ] = ""
    command: Annotated[
        list[str],
        path_form("word"),
        doc('a program in place of a function: ["python", "agent.py"]'),
    ] = []
    sampling: Annotated[
        Literal["replace", "refuse"],
        doc("temperature, top_p, ... of requests; replace: by those of the run"),
    ] = "replace"
    thinking: Annotated[
        Literal["keep", "template"],
        doc("old thoughts; keep: as sampled; template: in a branch where the template drops them"),
    ] = "keep"
    max_branches: Annotated[Count, doc("branches of a response at most: rows of training")] = 16

    @property
    def label(self) -> str:
        """The setting that names the agent, for messages; empty: none does."""
        if self.command:
            return f"agents.command = {self.command!r}"
        return f"agents.run = {self.run!r}" if self.run else ""
