"""Trial of the environment or agent before a run starts: its beginning for the first rows.

Reads   the first training rows, the user's file
Writes  the terminal: the text that follows each prompt, or an agent's first request
Raises  ConfigError when it fails for all of them

A reset that always fails, or an agent that never asks the model, would end the run only after
models are loaded and replicas are up. Therefore it is tried first, in sessions as in the run, which
end at once, and the run is refused unless reward.trial = false. Output printed by the user's file
is discarded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console

from laminar.config import Config, ConfigError
from laminar.config.tasks import EnvConfig
from laminar.launch.reward_check import shorten_text
from laminar.names.ids import Purpose
from laminar.run.child_channel import ChildLost
from laminar.tasks.data.decoding import make_response_decoder
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.data.tokenizer import end_ids, load_tokenizer
from laminar.tasks.environments.agents import Agents
from laminar.tasks.environments.session_pool import SessionPool
from laminar.tasks.environments.session_process import TextReply
from laminar.tasks.environments.turns import Session, SessionLost
from laminar.tasks.environments.user_class import RESET

SEED = 0  #: of all rows


def show_beginnings(config: Config, rows: Sequence[PromptRow], console: Console) -> None:
    """Begin a session of the environment or agent for each of the rows and show the results."""
    env, run = config.env, config.agents.run
    found = asyncio.run(_start_agents(config, rows) if run else _run_resets(env, rows))
    lines = [
        f"agent      {run}, tried on {len(rows)} rows, begins with"
        if run
        else f"reset      of {env.name or env.path}, tried on {len(rows)} rows, says"
    ]
    for row, said in zip(rows, found, strict=True):
        lines.append(f"  row {row.index:<5}  {_format_outcome(said)}")
    if all(said.failed for said in found):
        what = f"agents.run = {run!r}" if run else f"{RESET} of the environment in {env.path}"
        raise ConfigError(
            f"{what} failed on all {len(rows)} rows tried (row {rows[0].index}: {found[0].text}); "
            "correct it, or skip the trial with reward.trial = false"
        )
    for line in lines:
        console.print(line, highlight=False, markup=False)


async def _start_agents(config: Config, rows: Sequence[PromptRow]) -> list[TextReply]:
    """Run the agent for all rows concurrently until its first request, and test its template."""
    tokenizer = load_tokenizer(config.model.name)
    ends = end_ids(config.model.name, tokenizer)
    decode = make_response_decoder(tokenizer, ends)
    agents = Agents(config, tokenizer, ends, decode)

    async def start(row: PromptRow) -> TextReply:
        session = Session(f"trial-{row.index}", 1, SEED, row, Purpose.TRAIN)
        try:
            first = await agents.reset(session)
            return TextReply(decode([*first.context]) if first else None)
        except SessionLost as failed:
            return TextReply(str(failed), failed=True)

    try:
        await agents.start()
        found = await asyncio.gather(*map(start, rows))
        agents.check_templates()
        return found
    except SessionLost as failed:
        raise ConfigError(f"{failed}; correct the file in agents.run") from None
    finally:
        await agents.close()


def _format_outcome(said: TextReply) -> str:
    if said.failed:
        return f"FAILED: {said.text}"
    return "nothing" if said.text is None else shorten_text(said.text)


async def _run_resets(env: EnvConfig, rows: Sequence[PromptRow]) -> list[TextReply]:
    """Reset for all rows concurrently, each in a separate session."""
    pool = SessionPool.from_config(env)
    try:
        return await asyncio.gather(*(_reset(pool, row, env.tool_timeout_s) for row in rows))
    finally:
        await pool.close()


async def _reset(pool: SessionPool, row: PromptRow, limit_s: float) -> TextReply:
    try:
        session = await pool.open()
    except ChildLost as died:
        return TextReply(str(died), failed=True)
    return await session.reset(row, SEED, limit_s)
