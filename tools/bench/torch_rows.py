"""What one long row costs the embedded engine: a decode step beside one of equal rows.

Usage: python tools/bench/torch_rows.py [--rows 32] [--short 400] [--times 10] [--device cpu] ...
Prints one JSON line per figure; exit code 1 when a figure misses its limit.

attention_share   of a step of equal rows: 1 - (step of rows of one token / step of equal rows)
long_row_ratio    step with one row `--times` as long as the others / step of equal rows that hold
                  as many tokens together; the long row stands among the others, not at an end

Three engines with the same random weights take turns, one step each, in rounds; each ratio is the
median of its rounds. All rows grow by one token in a step, so the totals stay the same. On a model
whose share is below a half the ratio says little, and the run fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.engines.protocol import GenerateRequest  # noqa: E402
from laminar.engines.torch_engine import TorchEngine  # noqa: E402

VOCAB = 512
RATIO_MAX = 1.3
SHARE_MIN = 0.5
MARGIN = 256  #: tokens that a row may grow by, warm-up included


def model_of(args: argparse.Namespace, longest: int) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(args.hidden // 128, 1),
        max_position_embeddings=longest + MARGIN,
    )
    return Qwen2ForCausalLM(config)


def engine_of(model: Any, lengths: Sequence[int], args: argparse.Namespace) -> TorchEngine:
    """An engine whose rows hold `lengths` tokens, in that order."""
    engine = TorchEngine(
        model.config.to_dict(),
        max_num_seqs=len(lengths),
        max_model_len=max(lengths) + MARGIN,
        dtype=getattr(torch, args.dtype),
        device=args.device,
    )
    engine.load_weights(model.named_parameters())
    for row, length in enumerate(lengths):
        ids = torch.randint(VOCAB, (length,)).tolist()
        engine.add(GenerateRequest(str(row), tuple(ids), (), MARGIN, 1.0, row, frozenset()))
        engine.step()  # one by one, so that slots are in this order
    return engine


def seconds_of_a_step(engine: TorchEngine, steps: int) -> float:
    """Of `steps` steps in a row; a step ends when its tokens are on the host."""
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - start) / steps


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    long = args.times * args.short
    tail = [args.short] * args.rows
    tail[args.rows // 2] = long
    equal = [sum(tail) // args.rows] * args.rows
    model = model_of(args, long)
    engines = [engine_of(model, rows, args) for rows in (tail, equal, [1] * args.rows)]
    rounds = []
    for _ in range(args.rounds):
        rounds.append([seconds_of_a_step(engine, args.steps) for engine in engines])
    kept = rounds[1:]  # the first one warms up
    share = statistics.median(1 - bare / same for _, same, bare in kept)
    ratio = statistics.median(one_long / same for one_long, same, _ in kept)
    yield figure("attention_share", share, share >= SHARE_MIN)
    yield figure("long_row_ratio", ratio, ratio <= RATIO_MAX)
    for name, index in (("long_row_step_ms", 0), ("equal_rows_step_ms", 1)):
        yield figure(name, 1e3 * statistics.median(row[index] for row in kept), True)


def figure(name: str, value: float, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "ok": ok}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--short", type=int, default=400, help="tokens of all rows but one")
    parser.add_argument("--times", type=int, default=10, help="how much longer that one is")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11, help="the first one warms up")
    parser.add_argument("--steps", type=int, default=5, help="of a round, for each engine")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    for name, least in (("rows", 2), ("short", 1), ("times", 1), ("rounds", 2), ("steps", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} = {getattr(args, name)} is too small; give at least {least}")
    if args.hidden < 64 or args.hidden % 64:
        parser.error(f"--hidden = {args.hidden} is not a multiple of 64; heads have 64 dimensions")
    if args.rounds * args.steps + args.rows > MARGIN:
        parser.error(f"--rounds x --steps + --rows is above {MARGIN}; give fewer")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use cpu")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    ok = True
    for line in figures(args):
        print(json.dumps(line), flush=True)
        ok &= line["ok"]
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
