"""Make the small base model of the quickstart: a Qwen2 that spells words backward, badly.

Usage:
    python tools/make/base_model.py --out configs/models/spell-0.6m [--evaluate-only]

Output
    A directory that transformers loads offline. The model is a Qwen2 causal LM with hidden size
    128, 3 layers, 4 heads (2 KV), MLP 384 and tied embeddings. The fast tokenizer works on bytes:
    token id = byte value for 0 to 255, then <pad>, <eos>, <answer> and </answer>, so it encodes
    every text. Text comes back exactly, after Unicode normalization form C: AutoTokenizer gives
    every Qwen2 that normalizer, so tokenizer.json has it too and all loaders give the same ids.
    The answer tags are ordinary added tokens: they stay when special tokens are skipped. The chat
    template is content + newline per message.

Why it is a useful start for RL
    The warm-up imitates partly wrong demonstrations of the reasoning_gym task spell_backward. A
    response is one or more drafts, then <answer>last draft</answer><eos>. A draft is correct with
    probability max(0.2, 0.95 - 0.25 * max(0, len - 4)); a wrong one copies the word (75 %), swaps
    two letters or stops early. The demonstration stops after each draft with probability 0.6, and
    always after 5; the next draft corrects a wrong one with probability 0.15. So the base knows how
    to spell backward, mostly does not on long words, and some responses are very long. If the
    probability of stopping were below one half, RL would teach greedy decoding never to stop. The
    base learns these probabilities closely, so the minimum for a correct draft matters: with 0.1 in
    place of 0.2 (2,600 updates) RL is at 0.77 greedy exact after 40 steps, with 0.2 at 0.92.

Meaning of a quickstart score
    The warm-up trains on the task of the quickstart itself, with the share of correct drafts given
    above; only the words differ. The base can do the task, and RL has to learn to prefer the
    correct drafts, above all on words of 7 or more letters, where 0.2 of them are correct. A rising
    score shows that the loop of sampling, reward and update works, not that a skill was learned
    from nothing. So the score is also printed by word length, here and by `laminar report` (the
    length of a prompt is 48 bytes plus the word).

Held-out words
    The data are the 20,000 questions of spell_backward with seed 42, min_word_len 3 and
    max_word_len 14. The distinct question texts are sorted by the xxhash.xxh3_64 hexdigest of
    their UTF-8 bytes; the warm-up never sees the first 400. `held_out` implements this rule.

Cost and figures
    5,000 updates of 48 demonstrations on one CPU thread: about 17 minutes. On 128 held-out words:
    greedy exact 0.30 with response length p50/p99 19/23, sampled 0.30 with 21/71. By letters of the
    word, greedy and sampled: 3 to 6 0.94 and 0.61, 7 to 9 0.09 and 0.20, 10 to 14 0.10 and 0.19.
    Seeds are fixed; another CPU or build of torch rounds differently and gives another file.
"""

import argparse
import math
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import torch.nn.functional as F
import xxhash
from reasoning_gym.utils import extract_answer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

Entry = dict[str, Any]
Row = tuple[list[int], list[int]]

PAD, EOS, ANSWER, END_ANSWER = "<pad>", "<eos>", "<answer>", "</answer>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)
TASK: dict[str, Any] = {"size": 20_000, "seed": 42, "min_word_len": 3, "max_word_len": 14}
QUESTION_START = b"Spell this word backward (example: sun -> nus): "
HELD_OUT, MODEL_LENGTH, MAX_RESPONSE, EVAL_WORDS = 400, 2048, 128, 128
P_MIN, P_MAX, SLOPE, EASY_LENGTH = 0.20, 0.95, 0.25, 4
P_COPY, P_MEND, P_STOP, MAX_DRAFTS = 0.75, 0.15, 0.6, 5
SEED, BATCH, LEARNING_RATE, RAMP, WEIGHT_DECAY, BETAS = 5, 48, 3e-3, 50, 0.01, (0.9, 0.98)


def held_out(questions: Iterable[str], count: int) -> set[str]:
    """Return the first `count` distinct questions in the order of their xxh3_64 hexdigest."""
    by_digest = sorted(set(questions), key=lambda q: xxhash.xxh3_64(q.encode()).hexdigest())
    return set(by_digest[:count])


def build_tokenizer(
    added: Iterable[str] = (ANSWER, END_ANSWER), chat_template: str = CHAT_TEMPLATE
) -> Qwen2Tokenizer:
    """Build a tokenizer with one token per byte value, then <pad>, <eos> and the added tokens."""
    vocab = {symbol: value for value, symbol in bytes_to_unicode().items()}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, EOS)])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    # Qwen2Tokenizer adds its own unknown token unless it is given one.
    return Qwen2Tokenizer(
        tokenizer_object=core,
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=MODEL_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=chat_template,
    )


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MODEL_LENGTH,
        initializer_range=0.08,  # with the usual 0.02 the warm-up needs three times the updates
        tie_word_embeddings=True,
        bos_token_id=None,
        **ids,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(**ids)
    return model


def load_task() -> tuple[Any, list[Entry], list[Entry]]:
    """Return the dataset and one entry per distinct question: for the warm-up, and held out."""
    dataset = reasoning_gym.create_dataset("spell_backward", **TASK)
    entries: dict[str, Entry] = {entry["question"]: entry for entry in dataset}
    if not all(question.encode().startswith(QUESTION_START) for question in entries):
        raise SystemExit("reasoning_gym words its question differently now: update QUESTION_START")
    kept_back = held_out(entries, HELD_OUT)
    ordered = sorted(entries)
    train = [entries[question] for question in ordered if question not in kept_back]
    return dataset, train, [entries[question] for question in ordered if question in kept_back]


def wrong_draft(word: str, rng: random.Random) -> str:
    """Copy the word, or spell it backward with two letters swapped or with the end missing."""
    draw = rng.random()
    if draw < P_COPY:
        return word
    letters = list(word[::-1])
    if draw < 0.5 + 0.5 * P_COPY and len(letters) > 3:
        i = rng.randrange(len(letters) - 1)
        letters[i], letters[i + 1] = letters[i + 1], letters[i]
        return "".join(letters)
    return "".join(letters[: -rng.randrange(1, max(2, len(letters) // 2))])


def demonstration(word: str, rng: random.Random) -> str:
    """Return drafts of the reversed word, not always correct, with the last one as the answer."""
    p_right = max(P_MIN, P_MAX - SLOPE * max(0, len(word) - EASY_LENGTH))
    right = rng.random() < p_right
    drafts: list[str] = []
    while True:
        drafts.append(word[::-1] if right else wrong_draft(word, rng))
        if len(drafts) >= MAX_DRAFTS or rng.random() < P_STOP:
            return f"{' '.join(drafts)}{ANSWER}{drafts[-1]}{END_ANSWER}{EOS}"
        right = right or rng.random() < P_MEND


def prompt_ids(tokenizer: Qwen2Tokenizer, question: str) -> list[int]:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )


def response_loss(model: Qwen2ForCausalLM, rows: list[Row]) -> torch.Tensor:
    """Return the summed cross-entropy of the responses; the common start is computed once."""
    shared = len(QUESTION_START)
    cache = DynamicCache(config=model.config)
    model.model(torch.tensor([list(QUESTION_START)]), past_key_values=cache)
    cache.batch_repeat_interleave(len(rows))
    width = max(len(prompt) + len(response) for prompt, response in rows) - shared
    ids = torch.full((len(rows), width), model.config.pad_token_id)
    labels = torch.full_like(ids, -100)
    for i, (prompt, response) in enumerate(rows):
        start, end = len(prompt) - shared, len(prompt) + len(response) - shared
        ids[i, :end] = torch.tensor(prompt[shared:] + response)
        labels[i, start:end] = torch.tensor(response)
    logits = model(ids, past_key_values=cache).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, train: list[Entry], updates: int
) -> None:
    """Train in place on batches of demonstrations."""
    rng, start = random.Random(SEED), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY, betas=BETAS)
    for step in range(updates):
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / updates))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RAMP) * cosine
        rows = []
        for _ in range(BATCH):
            entry = rng.choice(train)
            response = demonstration(entry["metadata"]["word"], rng)
            rows.append((prompt_ids(tokenizer, entry["question"]), tokenizer.encode(response)))
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        tokens, loss = sum(len(response) for _, response in rows), 0.0
        optimizer.zero_grad()
        for i in range(0, BATCH, BATCH // 4):
            part = response_loss(model, rows[i : i + BATCH // 4]) / tokens
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step == 0:
            seconds = time.monotonic() - start
            print(f"update {step + 1}/{updates} loss {loss:.4f} {seconds:.0f} s", flush=True)


@torch.inference_mode()
def generate(model: Qwen2ForCausalLM, prompts: list[list[int]], greedy: bool) -> list[list[int]]:
    """Generate a response to each prompt, up to and including <eos> or MAX_RESPONSE tokens."""
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    # top_k is passed because generate() keeps 50 tokens unless told otherwise.
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    torch.manual_seed(1)
    how |= {"attention_mask": (ids != pad).long(), "max_new_tokens": MAX_RESPONSE}
    rows = model.generate(ids, **how)[:, width:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def evaluate(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, dataset: Any, test: list[Entry]
) -> str:
    """Return the exact-match rate on held-out words, greedy and sampled, and response lengths."""
    entries = random.Random(0).sample(test, EVAL_WORDS)
    prompts = [prompt_ids(tokenizer, entry["question"]) for entry in entries]
    parts = []
    for name, greedy in (("greedy", True), ("sampled", False)):
        responses, exact = generate(model, prompts, greedy), list[bool]()
        for entry, response in zip(entries, responses, strict=True):
            answer = extract_answer(tokenizer.decode(response, skip_special_tokens=True))
            exact.append(answer is not None and dataset.score_answer(answer, entry) == 1.0)
        lengths = sorted(map(len, responses))
        p50, p99 = lengths[len(lengths) // 2], lengths[int(len(lengths) * 0.99)]
        by_word = by_word_length([len(entry["metadata"]["word"]) for entry in entries], exact)
        parts.append(
            f"{name} exact {sum(exact) / EVAL_WORDS:.2f} ({by_word}) with length p50/p99 "
            f"{p50}/{p99}"
        )
    return ", ".join(parts)


def by_word_length(letters: list[int], exact: list[bool]) -> str:
    """Return the exact-match rate of short, middle and long words."""
    parts = []
    for low, high in ((3, 6), (7, 9), (10, 14)):
        found = [e for n, e in zip(letters, exact, strict=True) if low <= n <= high]
        if found:
            rate = sum(found) / len(found)
            parts.append(f"{low} to {high} letters {rate:.2f} of {len(found)}")
    return ", ".join(parts)


README = """\
# spell-0.6m

A Qwen2 causal LM of {params:,} parameters (float32) that spells English words backward, badly.
It is the starting point of the quickstart: small enough for a CPU, with room for RL to improve.

- Task: reasoning_gym `spell_backward`, words of 3 to 14 letters; answer in `<answer>` tags.
- Tokenizer: bytes (id = byte value), then `<pad>`, `<eos>`, `<answer>`, `</answer>`.
- Prompt: the question and a newline; no BOS. A response ends with `<eos>`.
- Warm-up: {updates:,} updates on this very task, 400 words never seen; the drafts it imitates are
  right in a fixed share of cases (0.2 from 7 letters on), and RL's work is to prefer those.
- Seen: {figures}.
- Made by `tools/make/base_model.py`, which documents it; same licence as this repository.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the base model of the quickstart.")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--updates", type=int, default=5000, help="warm-up updates")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--evaluate-only", action="store_true", help="evaluate what is in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    dataset, train, test = load_task()
    print(f"words: {len(train)} for the warm-up, {len(test)} held out", flush=True)
    if not args.evaluate_only:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        warm_up(model, tokenizer, train, args.updates)
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(args.out, local_files_only=True).float()
    figures = evaluate(model, tokenizer, dataset, test)
    print(f"{figures} ({EVAL_WORDS} held-out words)", flush=True)
    if not args.evaluate_only:
        text = README.format(params=model.num_parameters(), updates=args.updates, figures=figures)
        (args.out / "README.md").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
