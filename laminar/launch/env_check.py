"""Trial of the environment or agent before a run starts: its beginning for the first rows.

Reads   the first training rows, the user's file
Writes  the terminal: the text that follows each prompt, or an agent's first request and its end
Raises  ConfigError when it fails for all of them

A reset that always fails, or an agent that never asks the model, would end the run only after
models are loaded and replicas are up. Therefore it is tried first, in sessions as in the run, which
end at once, and the run is refused unless reward.trial = false. Output printed by the user's file
is discarded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rich.console import Console

from laminar.config import Config, ConfigError
from laminar.config.tasks import EnvConfig
from laminar.launch.agent_check import (
    SEED,
    STAND_IN,
    STAND_IN_S,
    AgentTrial,
    sample_text,
    try_agents,
)
from laminar.launch.reward_check import shorten_text
from laminar.run.child_channel import ChildLost
from laminar.tasks.data.decoding import make_response_decoder
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.data.tokenizer import end_ids, load_tokenizer
from laminar.tasks.environments.session_pool import SessionPool
from laminar.tasks.environments.session_process import TextReply
from laminar.tasks.environments.user_class import RESET


def show_beginnings(config: Config, rows: Sequence[PromptRow], console: Console) -> None:
    """Begin a session of the environment or agent for each of the rows and show the results."""
    env, agent = config.env, config.agents.label
    found, told = _try_agent(config, rows) if agent else (asyncio.run(_run_resets(env, rows)), [])
    lines = [
        f"agent      {agent}, tried on {len(rows)} rows whose turns say {STAND_IN!r}, begins with"
        if agent
        else f"reset      of {env.name or env.path}, tried on {len(rows)} rows, says"
    ]
    for row, said in zip(rows, found, strict=True):
        lines.append(f"  row {row.index:<5}  {_format_outcome(said)}")
    if all(said.failed for said in found):
        what = agent or f"{RESET} of the environment in {env.path}"
        raise ConfigError(
            f"{what} failed on all {len(rows)} rows tried (row {rows[0].index}: {found[0].text}); "
            "correct it, or skip the trial with reward.trial = false"
        )
    for line in [*lines, *(f"  {line}" for line in told)]:
        console.print(line, highlight=False, markup=False)


def _try_agent(config: Config, rows: Sequence[PromptRow]) -> tuple[list[TextReply], list[str]]:
    """Return the first request of each row with the end, and what the user should know."""
    tokenizer = load_tokenizer(config.model.name)
    ends = end_ids(config.model.name, tokenizer)
    sample, decode = sample_text(tokenizer, ends), make_response_decoder(tokenizer, ends)
    trials, told = asyncio.run(try_agents(config, tokenizer, rows, sample, STAND_IN_S))
    return [_summarize_trial(trial, decode) for trial in trials], told


def _summarize_trial(trial: AgentTrial, decode: Callable[[list[int]], str]) -> TextReply:
    if trial.is_failed:
        return TextReply(trial.outcome, failed=True)
    first = shorten_text(decode([*trial.turns[0].context]))
    return TextReply(f"{first}; after turn {len(trial.turns)}: {trial.outcome}")


def _format_outcome(said: TextReply) -> str:
    if said.failed:
        return f"FAILED: {said.text}"
    return "nothing" if said.text is None else said.text


async def _run_resets(env: EnvConfig, rows: Sequence[PromptRow]) -> list[TextReply]:
    """Reset for all rows concurrently, each in a separate session."""
    pool = SessionPool(env)
    try:
        return await asyncio.gather(*(_reset(pool, row, env.tool_timeout_s) for row in rows))
    finally:
        await pool.close()


async def _reset(pool: SessionPool, row: PromptRow, limit_s: float) -> TextReply:
    try:
        session = await pool.open()
    except ChildLost as died:
        return TextReply(str(died), failed=True)
    said = await session.reset(row, SEED, limit_s)
    if said.failed or said.text is None:
        return said
    return TextReply(shorten_text(said.text))
