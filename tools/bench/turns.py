"""Check that a model reads and is trained on exactly the sampled tokens, over many turns.

Usage: python -m tools.bench.turns [--turns 10000] [--directory DIR]
Prints one JSON line, and exits with 1 if a token differs.

A real run on this machine, with a tiny random model whose turns mostly end in a tool call, at
temperature 1 and with a learning rate of 0. Its tokenizer is a byte-level BPE whose merges depend
on the neighbours of a piece, so that a text can be split in many ways: tokenizing the text of a
history again gives different ids.

engine, trainer   largest difference of a sampled token's log-prob: between the engine and a forward
                  pass here over exactly the ids in the store, and between the trainer and the
                  engine, as the run measured it. Both compute log-probs to 1e-4, so one different
                  id in the history of a token would show
turns             turns that follow another turn; `again`: those whose history has other ids when
                  its text is tokenized again; `seen_by`: the smallest, over the first 200 of them,
                  of the largest log-prob difference that the other ids would cause in the turn
audit             exit code of `laminar audit`: the store's tokens, the trainer's book, the log
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tools.kit.real_run import laminar
from tools.kit.tool_models import END, tokenizer

CLOSE = 1e-4
BIASES = {"<tool_call>": 1.4, END: 1.1}
"""Log-odds added to tokens, for turns of about a dozen tokens that mostly end in a call."""
GROUPS, GROUP_SIZE, TURNS_MAX = 16, 8, 8
TURNS_PER_STEP = 220  #: low estimate
SEEN_MAX = 200
ENVIRONMENT = '''
import random

class Words:
    """Most calls of a random model are no JSON, which is an answer too."""

    def reset(self, **row):
        return f" {random.randrange(10**6)} + 7 ="

    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    def get_reward(self) -> float:
        return random.SystemRandom().random()  # siblings have one seed
'''


class Sampled(NamedTuple):
    """A trajectory in the store: the tokens that were read and those that were sampled."""

    ids: list[int]
    at: list[int]  #: positions of the sampled tokens
    logprobs: np.ndarray
    begins: list[int]  #: positions where turns begin


def make_model(directory: Path) -> None:
    """Make a random model whose first dimension makes the tokens of BIASES likelier."""
    torch.manual_seed(0)
    pieces = tokenizer()
    config = Qwen2Config(
        vocab_size=len(pieces),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=pieces.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.5
        head = model.lm_head.weight
        head[:, 0] = 0.0
        for token, bias in BIASES.items():
            head[pieces.convert_tokens_to_ids(token), 0] = bias
    model.generation_config.eos_token_id = pieces.eos_token_id
    model.save_pretrained(directory)
    pieces.save_pretrained(directory)


def train(directory: Path, turns: int) -> Path:
    """Make the run and return its directory."""
    make_model(directory / "model")
    (directory / "words.py").write_text(ENVIRONMENT)
    done = subprocess.run(
        laminar(
            *("train", "-c", "configs/recipes/calculator/run.toml", f"run.output_dir={directory}"),
            *("run.name=run", f"model.name={directory / 'model'}"),
            *(f"env.path={directory / 'words.py'}", "env.name=Words"),
            *(f"env.max_turns={TURNS_MAX}", "env.max_context_tokens=1024"),
            *("data.max_prompt_length=512", "data.max_response_length=256"),
            *(f"data.train_batch_size={GROUPS}", f"rollout.group_size={GROUP_SIZE}"),
            *("rollout.temperature=1.0", "optim.lr=0.0", "data.val_size=0"),
            *("trainer.test_freq=0", "trainer.val_before_train=false", "trainer.save_freq=0"),
            f"trainer.total_training_steps={-(-turns // TURNS_PER_STEP)}",
        )
    )
    if done.returncode:
        sys.exit(f"the run exited with code {done.returncode}")
    return directory / "run"


def stored(run: Path) -> Iterator[Sampled]:
    """Yield every trajectory with tokens in the store."""
    with sqlite3.connect(run / "store.sqlite") as database:
        names = database.execute("SELECT id, attempt, row_index FROM trajectories ORDER BY id")
        for name, attempt, row in names.fetchall():
            (prompt,) = database.execute(
                "SELECT ids FROM prompt_ids WHERE purpose = 'train' AND row_index = ?", (row,)
            ).fetchone()
            contexts = dict(
                database.execute(
                    "SELECT turn, tokens FROM contexts WHERE trajectory_id = ?", (name,)
                )
            )
            chunks = database.execute(
                "SELECT segment, tokens, logprobs FROM chunks WHERE trajectory_id = ? AND "
                'attempt = ? ORDER BY segment, "offset"',
                (name, attempt),
            ).fetchall()
            if chunks and all(tokens is not None for _, tokens, _ in chunks):
                yield _joined(contexts.get(0, prompt), contexts, chunks)


def _joined(
    prompt: bytes, contexts: dict[int, bytes], chunks: list[tuple[int, bytes, bytes]]
) -> Sampled:
    read, at, begins, segment = _ints(prompt), list[int](), list[int](), -1
    for turn, tokens, _ in chunks:
        if turn != segment:
            read += _ints(contexts[turn]) if turn else []
            begins.append(len(read))
            segment = turn
        at += range(len(read), len(read) + len(tokens) // 4)
        read += _ints(tokens)
    logprobs = np.concatenate([np.frombuffer(chunk, "<f4") for _, _, chunk in chunks])
    return Sampled(read, at, logprobs, begins)


def _ints(raw: bytes) -> list[int]:
    found: list[int] = np.frombuffer(raw, "<i4").tolist()
    return found


@torch.no_grad()
def logprobs_of(model: Qwen2ForCausalLM, ids: list[int]) -> torch.Tensor:
    """Return the log-prob of each id except the first, given the ids before it."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.directory or Path(temporary)
        figures = compared(train(directory, given.turns), directory / "model")
    print(json.dumps(figures))
    wrong = max(figures["engine"], figures["trainer"]) > CLOSE or figures["audit"]
    sys.exit(1 if wrong or not figures["again"] else 0)


def compared(run: Path, model_directory: Path) -> dict[str, float]:
    """Compute the figures of a run."""
    model, pieces = Qwen2ForCausalLM.from_pretrained(model_directory).eval(), tokenizer()
    engine, tokens, turns, again, seen = 0.0, 0, 0, 0, list[float]()
    for one in stored(run):
        known = logprobs_of(model, one.ids)
        own = known[[at - 1 for at in one.at]]
        engine = max(engine, float((own - torch.tensor(one.logprobs)).abs().max()))
        tokens, turns = tokens + len(one.at), turns + len(one.begins) - 1
        for begin, end in list(pairwise([*one.begins, len(one.ids)]))[1:]:
            history = pieces.encode(pieces.decode(one.ids[:begin]), add_special_tokens=False)
            if history == one.ids[:begin]:
                continue
            again += 1
            turn = [at for at in one.at if begin <= at < end]
            if len(seen) < SEEN_MAX and turn:
                other = logprobs_of(model, [*history, *one.ids[begin : turn[-1] + 1]])
                here = known[[at - 1 for at in turn]]
                seen.append(float((other[-len(turn) :] - here).abs().max()))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = "train_rollout_logprob_abs_diff/max"
    return {
        "tokens": tokens,
        "turns": turns,
        "again": again,
        "seen_by": min(seen, default=0.0),
        "engine": engine,
        "trainer": max(step[key] for step in steps if key in step),
        "audit": subprocess.run(laminar("audit", str(run)), stdout=subprocess.DEVNULL).returncode,
    }


if __name__ == "__main__":
    main()
