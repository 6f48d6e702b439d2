"""Make a Qwen2 of any size with random weights, and a tokenizer that fits: to measure, not to use.

Usage: python tools/make/random_model.py --out DIR [--layers 24] [--hidden 896] [--vocab 151936] ...

What it makes
    A directory that transformers, the embedded engine and vLLM load offline; the defaults are the
    sizes of Qwen2.5-0.5B (494 M parameters, tied head). The tokenizer is the quickstart's, which
    works on bytes, and its vocabulary is filled up to --vocab with tokens that no text gives, so
    that the model may sample from all of it.

How sharp it is
    As transformers initialises them, all tokens are about equally probable, and rounding hardly
    shows in a log-prob. The weight of the last norm is therefore multiplied: with --sharpness 1
    the standard deviation of the logits is about 0.6, with the default of 6 it is about 3.6, and
    the largest of them is some 16 above the mean, as in a trained model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

BASE = Path(__file__).resolve().parents[2] / "configs" / "models" / "spell-0.6m"
TOKENIZER_FILES = ("chat_template.jinja", "tokenizer_config.json")
HEAD_DIM = 64


def make_model(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    base = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.inner or 16 * args.hidden // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_DIM,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.positions,
        tie_word_embeddings=not args.untied,
        bos_token_id=None,
        eos_token_id=base["eos_token_id"],
        pad_token_id=base["pad_token_id"],
    )
    with torch.device(args.device):
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.mul_(args.sharpness)
    model.generation_config.eos_token_id = base["eos_token_id"]
    model.to(torch.bfloat16).save_pretrained(args.out)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")


def make_tokenizer(out: Path, vocab: int) -> None:
    """Write the base model's tokenizer, with names for the ids that it lacks."""
    for name in TOKENIZER_FILES:
        shutil.copy(BASE / name, out / name)
    tokenizer = json.loads((BASE / "tokenizer.json").read_text(encoding="utf-8"))
    names = tokenizer["model"]["vocab"]
    names |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    names |= {f"<|{index}|>": index for index in range(len(names), vocab)}
    (out / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=896, help="a multiple of 64")
    parser.add_argument("--inner", type=int, default=4864, help="of the MLP; 0: 16/3 of --hidden")
    parser.add_argument("--kv-heads", type=int, default=2, help="divides --hidden / 64")
    parser.add_argument("--vocab", type=int, default=151_936, help="at least 260")
    parser.add_argument("--positions", type=int, default=32_768)
    parser.add_argument("--untied", action="store_true", help="a separate output head")
    parser.add_argument("--sharpness", type=float, default=6.0, help="see above")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="device that draws the random numbers")
    args = parser.parse_args()
    if args.hidden % HEAD_DIM or (args.hidden // HEAD_DIM) % args.kv_heads:
        parser.error(f"--hidden {args.hidden} has no {args.kv_heads} groups of heads of {HEAD_DIM}")
    if args.vocab < 260:
        parser.error(f"--vocab {args.vocab} is less than the 260 tokens of the tokenizer")
    return args


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    make_model(args)
    make_tokenizer(args.out, args.vocab)


if __name__ == "__main__":
    main()
