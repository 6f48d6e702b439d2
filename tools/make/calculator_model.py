"""Make the base model of the recipe calculator: a small Qwen2 that rarely uses a calculator.

Usage:
    python -m tools.make.calculator_model --out configs/models/calculator-0.6m [--evaluate-only]

Output
    A model of the size of tools/make/base_model.py, with its byte tokenizer. The tokens added to
    the bytes are the tags of calls and answers and the constant parts of a call in JSON, so a call
    has about a dozen tokens. The chat template names each tool with its parameters before the
    messages; every message ends with a newline, and the assistant's with <eos> before it.

Why it is a useful start for RL
    The warm-up imitates demonstrations of sums of two or three numbers. Each calls the tool for its
    first two numbers with probability 0.45, and otherwise guesses a number near the sum; after a
    first call it calls again with probability 0.9. In 3 % of the calls one digit is wrong. So the
    base can call, copy a result and answer, and RL has to learn that calling pays. The first call
    must be less likely than one half, because greedy decoding calls already above that. Later calls
    must be likely: otherwise three turns in a row would be too rare in the warm-up to be learned.

Held-out sums
    The data are the 20,000 questions of reasoning_gym's basic_arithmetic that the configuration
    names. The warm-up never sees the first 400 in the order of `held_out` (base_model.py).

Cost and figures
    1,800 updates of 48 demonstrations on one CPU thread: about 5 minutes. The README next to
    the model has the measured figures. Another CPU or build of torch gives another file.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import torch.nn.functional as F
from reasoning_gym.utils import extract_answer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from tools.make.base_model import (
    ANSWER,
    BATCH,
    BETAS,
    END_ANSWER,
    EOS,
    LEARNING_RATE,
    RAMP,
    SEED,
    WEIGHT_DECAY,
    build_model,
    build_tokenizer,
    generate,
    held_out,
)

CONFIG = Path(__file__).parents[2] / "configs/recipes/calculator/run.toml"
CALL, END_CALL = "<tool_call>", "</tool_call>"
FIRST, SECOND, LAST = '{"name": "add", "arguments": {"a": ', ', "b": ', "}}"
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}"
    "({{ tool['function']['parameters']['properties'] | join(', ') }}){{ '\\n' }}{% endfor %}"
    "{% for message in messages %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] or call %}"
    '<tool_call>{"name": "{{ function[\'name\'] }}", "arguments": '
    "{{ function['arguments'] | tojson }}}</tool_call>{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)
TOOLS = [{"function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}]
UPDATES, KEPT_BACK, EVAL_SUMS, MAX_TURNS = 1800, 400, 128, 4
P_CALL, P_NEXT, P_SLIP, GUESS = 0.45, 0.9, 0.03, (0.8, 1.2)

Part = tuple[str, bool]  # text, and whether the model wrote it


@dataclass(frozen=True)
class Sum:
    entry: dict[str, Any]
    numbers: list[int]


def load_sums() -> tuple[Any, list[Sum], list[Sum]]:
    """Return the dataset, the sums of the warm-up, and the held-out sums."""
    data = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["data"]
    dataset = reasoning_gym.create_dataset(
        data["dataset"], size=data["dataset_size"], seed=42, **data["dataset_config"]
    )
    entries = {entry["question"]: entry for entry in dataset}
    kept_back = held_out(entries, KEPT_BACK)
    train, test = [], []
    for question in sorted(entries):
        numbers = entries[question]["metadata"]["expression"].split(" + ")
        into = test if question in kept_back else train
        into.append(Sum(entries[question], [int(number) for number in numbers]))
    return dataset, train, test


def call_of(a: int, b: int) -> str:
    return f"{CALL}{FIRST}{a}{SECOND}{b}{LAST}{END_CALL}{EOS}"


def slip(number: int, rng: random.Random) -> int:
    digits = list(str(number))
    digits[rng.randrange(len(digits))] = str(rng.randrange(10))
    return int("".join(digits))


def demonstration(numbers: list[int], rng: random.Random) -> list[Part]:
    """Return the turns of a response, with the tool's answers between them."""
    parts: list[Part] = []
    rest = list(numbers)
    while len(rest) > 1 and rng.random() < (P_NEXT if parts else P_CALL):
        a, b = rest[:2]
        if rng.random() < P_SLIP:
            a, b = (slip(a, rng), b) if rng.random() < 0.5 else (a, slip(b, rng))
        parts += [(call_of(a, b), True), (f"\n{a + b}\n", False)]
        rest = [a + b, *rest[2:]]
    answer = rest[0] if len(rest) == 1 else max(1, int(sum(rest) * rng.uniform(*GUESS)))
    return [*parts, (f"{ANSWER}{answer}{END_ANSWER}{EOS}", True)]


def prompt_ids(tokenizer: Qwen2Tokenizer, question: str) -> list[int]:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tools=TOOLS,
        add_generation_prompt=True,
        return_dict=False,
    )


def loss_of(model: Qwen2ForCausalLM, rows: list[tuple[list[int], list[Part]]], encode: Any) -> Any:
    """Return the mean cross-entropy of the text that the model writes; the rest is context."""
    ids, labels = [], []
    for prompt, parts in rows:
        row, told = list(prompt), [-100] * len(prompt)
        for text, written in parts:
            part = encode(text)
            row += part
            told += part if written else [-100] * len(part)
        ids.append(row)
        labels.append(told)
    width = max(map(len, ids))
    pad = model.config.pad_token_id
    inputs = torch.tensor([row + [pad] * (width - len(row)) for row in ids])
    wanted = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
    logits = model(inputs).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, wanted[:, 1:].flatten(), ignore_index=-100)


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, train: list[Sum], updates: int
) -> None:
    """Train in place on batches of demonstrations."""
    rng, start = random.Random(SEED), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY, betas=BETAS)
    for step in range(updates):
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / updates))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RAMP) * cosine
        rows = []
        for one in rng.choices(train, k=BATCH):
            prompt = prompt_ids(tokenizer, one.entry["question"])
            rows.append((prompt, demonstration(one.numbers, rng)))
        optimizer.zero_grad()
        loss = loss_of(model, rows, tokenizer.encode)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step == 0:
            seconds = time.monotonic() - start
            print(f"update {step + 1}/{updates} loss {loss.item():.4f} {seconds:.0f} s", flush=True)


def answered(text: str) -> str | None:
    """Return the calculator's answer to a turn, or None if the turn has no call."""
    if CALL not in text:
        return None
    try:
        body = text.partition(CALL)[2].partition(END_CALL)[0]
        arguments = json.loads(body)["arguments"]
        return f"\n{int(arguments['a']) + int(arguments['b'])}\n"
    except (ValueError, KeyError, TypeError):
        return "\nerror\n"


def evaluate(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, dataset: Any, test: list[Sum]
) -> str:
    """Return the exact-match rate on held-out sums, greedy and sampled, by number of terms."""
    sums = random.Random(0).sample(test, EVAL_SUMS)
    parts = []
    for name, greedy in (("greedy", True), ("sampled", False)):
        rows = [prompt_ids(tokenizer, one.entry["question"]) for one in sums]
        final, live = [""] * len(sums), list(range(len(sums)))
        for _ in range(MAX_TURNS):
            turns = generate(model, [rows[i] for i in live], greedy) if live else []
            going = []
            for i, turn in zip(live, turns, strict=True):
                final[i] = tokenizer.decode(turn, skip_special_tokens=True)
                told = answered(final[i])
                if told is not None:
                    rows[i] = rows[i] + turn + tokenizer.encode(told)
                    going.append(i)
            live = going
        scores = [
            dataset.score_answer(extract_answer(text), one.entry) == 1.0
            for text, one in zip(final, sums, strict=True)
        ]
        by_terms = ", ".join(
            f"{terms} terms {sum(found) / len(found):.2f}"
            for terms in (2, 3)
            if (found := [s for s, o in zip(scores, sums, strict=True) if len(o.numbers) == terms])
        )
        parts.append(f"{name} exact {sum(scores) / len(scores):.2f} ({by_terms})")
    return ", ".join(parts)


README = """\
# calculator-0.6m

A Qwen2 causal LM of {params:,} parameters (float32) that can add with the tool of
`configs/recipes/calculator/calculator.py`, and mostly guesses. It is the starting point of the
recipe `calculator`.

- Task: sums of two or three numbers of two or three digits; answer in `<answer>` tags.
- Tokenizer: bytes (id = byte value), then `<pad>`, `<eos>`, the answer and call tags and the
  constant parts of a call in JSON.
- Prompt: the tool's name and parameters, the question; no BOS. A turn ends with `<eos>`.
- Warm-up: {updates:,} updates on this very task, 400 sums never seen; 45 % of its demonstrations
  begin with a call, the others guess.
- Seen: {figures}.
- Made by `tools/make/calculator_model.py`, which documents it; same licence as this repository.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the base model of the calculator.")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--updates", type=int, default=UPDATES, help="warm-up updates")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--evaluate-only", action="store_true", help="evaluate what is in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    dataset, train, test = load_sums()
    print(f"sums: {len(train)} for the warm-up, {len(test)} held out", flush=True)
    if not args.evaluate_only:
        added = (ANSWER, END_ANSWER, CALL, END_CALL, FIRST, SECOND, LAST)
        tokenizer = build_tokenizer(added, CHAT_TEMPLATE)
        model = build_model(tokenizer)
        warm_up(model, tokenizer, train, args.updates)
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(args.out, local_files_only=True).float()
    figures = evaluate(model, tokenizer, dataset, test)
    print(f"{figures} ({EVAL_SUMS} held-out sums)", flush=True)
    if not args.evaluate_only:
        text = README.format(params=model.num_parameters(), updates=args.updates, figures=figures)
        (args.out / "README.md").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
