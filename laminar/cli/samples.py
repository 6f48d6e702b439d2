"""laminar samples RUN: print the model's responses, with prompts and rewards.

Reads   the store of a run, active or ended; its configuration and tokenizer
Writes  standard output: text, or one JSON object per line; stderr: a note if more exist, or none
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from laminar.analysis.report.samples import Sample, SampleFilter, find_samples
from laminar.cli.log import parse_positive
from laminar.events.reasons import RewardOutcome
from laminar.launch.emulated_note import list_notes
from laminar.launch.exit_handling import print_error
from laminar.run.directory import run_config
from laminar.tasks.data.decoding import make_decoder

SHOWN = 10  #: number of samples printed as text by default


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("samples", epilog="By default, training samples, latest first.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=parse_positive, metavar="N", help="samples trained by step N")
    which.add_argument(
        "--eval", type=_parse_count, metavar="N", help="evaluation samples after N completed steps"
    )
    which.add_argument("--id", default="", metavar="ID", help="trajectory 0.17.3 or group 0.17")
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--worst", type=parse_positive, default=0, metavar="K", help="lowest rewards first"
    )
    order.add_argument(
        "--best", type=parse_positive, default=0, metavar="K", help="highest rewards first"
    )
    parser.add_argument(
        "--search", default="", metavar="TEXT", help="only samples with TEXT in prompt or response"
    )
    limit = f"maximum number of samples (as text {SHOWN}, unless --worst, --best or --id is given)"
    parser.add_argument("-n", type=parse_positive, metavar="N", help=limit)
    parser.add_argument("--jsonl", action="store_true", help="one JSON object per line")
    parser.set_defaults(function=run_samples)


def run_samples(arguments: argparse.Namespace) -> int:
    """Print the selected samples; docs/debugging.md explains the JSON fields."""
    config = run_config(arguments.run)
    choice = SampleFilter(
        step=arguments.step,
        evaluation=arguments.eval,
        name=arguments.id,
        search=arguments.search,
        worst=arguments.worst,
        best=arguments.best,
    )
    found = find_samples(arguments.run, choice, make_decoder(arguments.run, config))
    for note in list_notes(arguments.run):
        print_error("laminar", note)
    limit = _choose_limit(arguments)
    shown = 0
    for sample in islice(found, limit):
        _write(
            json.dumps(sample.to_dict()) if arguments.jsonl else "\n".join(format_sample(sample))
        )
        shown += 1
    if not shown:
        print_error("laminar", f"no sample{_describe_missing(arguments.search)}")
    elif limit is not None and arguments.n is None and next(found, None) is not None:
        print_error("laminar", f"more than these {limit} match: -n N shows N of them")
    return 0


def _choose_limit(arguments: argparse.Namespace) -> int | None:
    said = arguments.worst or arguments.best or arguments.id
    return arguments.n or (None if said or arguments.jsonl else SHOWN)


def _describe_missing(search: str) -> str:
    return f" has {search!r} in its prompt or response" if search else " yet"


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of completed steps")
    return int(text)


def _write(text: str) -> None:
    """Print text, with escapes for characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


# --- as text ----------------------------------------------------------------------------------


def format_sample(sample: Sample) -> Iterator[str]:
    """Yield a header, then prompt, response and reference answer, each indented."""
    row = sample.row
    yield f"{row.id}  {_describe_use(sample)}"
    yield f"  reward {_format_reward(sample)}"
    if sample.extras:
        yield f"  {', '.join(f'{name} {_format_value(v)}' for name, v in sample.extras.items())}"
    cut = f", truncated ({sample.truncated_by})" if sample.truncated else ""
    yield f"  {row.num_tokens} tokens{cut}, by {sample.sampled_by} on {sample.sampled_on}"
    yield from _format_block("prompt", sample.prompt)
    yield from _format_block("response", sample.response)
    if sample.answer not in (None, ""):
        yield from _format_block("correct answer", str(sample.answer))
    yield ""


def _describe_use(sample: Sample) -> str:
    if sample.step is not None:
        return f"trained by step {sample.step}"
    if sample.row.end == "dropped":
        return f"dropped: {sample.row.end_reason}"
    if sample.evaluation is not None:
        return f"evaluated after step {sample.evaluation}"
    return {"open": "being generated", "generated": "not scored yet"}.get(
        sample.row.status, "not trained yet"
    )


def _format_reward(sample: Sample) -> str:
    """Return the reward of a sample, with the error, if any."""
    reward = "-" if sample.reward is None else f"{sample.reward:.4g}"
    reason = sample.row.reward_reason or RewardOutcome.OK
    failed = "" if reason == RewardOutcome.OK else f"  reward FAILED: {reason}"
    return reward + failed + (f", {sample.row.reward_detail}" if sample.row.reward_detail else "")


def _format_value(value: float | str) -> str:
    return escape_text(value) if isinstance(value, str) else f"{value:g}"


def _format_block(title: str, text: str) -> Iterator[str]:
    yield f"  {title}"
    for line in text.split("\n"):
        yield f"    | {escape_text(line)}"


def escape_text(text: str) -> str:
    """Escape control characters, so that a response cannot control the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in text)
