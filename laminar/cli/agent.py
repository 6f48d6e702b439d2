"""laminar agent try: show an agent's conversations about three rows, turn by turn.

Reads   the config files and overrides; three training rows; the model's files
Writes  the conversations, tokens and branches on stdout, the agent's output on stderr
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from typing import Any

from laminar.config import ConfigError
from laminar.launch import agent_check
from laminar.launch.reward_check import ROWS
from laminar.launch.sizing import load_sized_config
from laminar.names import exit_codes
from laminar.storage.branches import ROOT
from laminar.tasks.data.hub import localize_config


def add_parser(subparsers: Any) -> None:
    commands = subparsers.add_parser("agent").add_subparsers(required=True, metavar="COMMAND")
    tried = commands.add_parser("try", help="show its conversations about three rows")
    text = "the agent, in place of agents.run"
    tried.add_argument("agent", nargs="?", metavar="FILE.py:FUNCTION", help=text)
    tried.add_argument("-c", "--config", action="append", default=[], metavar="FILE")
    text = f"load no model: each turn says {agent_check.STAND_IN!r}"
    tried.add_argument("--without-model", action="store_true", help=text)
    tried.take_settings()
    tried.set_defaults(function=run_try)


def run_try(arguments: argparse.Namespace) -> int:
    """Try the agent; the exit code is 1 if no row had a request."""
    from laminar.tasks.data.decoding import make_response_decoder
    from laminar.tasks.data.prompts import load_prompts
    from laminar.tasks.data.tokenizer import end_ids, load_tokenizer

    named = [f"agents.run={arguments.agent}", "agents.command=[]"] if arguments.agent else []
    config = localize_config(load_sized_config(arguments.config, [*arguments.overrides, *named]))
    if not config.agents.label:
        raise ConfigError("there is no agent: give FILE.py:FUNCTION, or set agents.run")
    tokenizer = load_tokenizer(config.model.name)
    ends = end_ids(config.model.name, tokenizer)
    rows = load_prompts(config.data, with_columns=True).train[:ROWS]
    limit_s = agent_check.STAND_IN_S if arguments.without_model else None
    sample = (
        agent_check.sample_text(tokenizer, ends)
        if limit_s
        else agent_check.ModelSampler(config, ends)
    )
    work = agent_check.try_agents(config, tokenizer, rows, sample, limit_s, sys.stderr.buffer.write)
    trials, _ = asyncio.run(work)  # of which its output has told
    decode = make_response_decoder(tokenizer, frozenset())
    print("\n".join(line for trial in trials for line in _format_trial(trial, decode)))
    failed = all(trial.is_failed for trial in trials)
    return exit_codes.FAILED if failed else exit_codes.COMPLETE


def _format_trial(trial: agent_check.AgentTrial, decode: Callable[[list[int]], str]) -> list[str]:
    branches = len(trial.branches)
    lines = [f"row {trial.row.index}"]
    for number, turn in enumerate(trial.turns):
        branch = "" if turn.parent == number - 1 else f", follows turn {turn.parent}"
        branch = ", reads all again" if number and turn.parent == ROOT else branch
        read, sampled = len(turn.context), len(turn.sampled)
        lines.append(f"  turn {number}: {read} tokens read, {sampled} sampled{branch}")
        lines += [f"    < {line}" for line in decode([*turn.context]).splitlines()]
        lines += [f"    > {line}" for line in decode([*turn.sampled]).splitlines()]
    ended = f"{branches} branches" if branches > 1 else "one branch"
    return [*lines, f"  {trial.outcome}" + (f" ({ended})" if trial.turns else "")]
