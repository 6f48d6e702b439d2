"""laminar export RUN --to DIR: write a run's model to serve or upload.

Reads   RUN/export or a checkpoint of RUN
Writes  DIR: sharded safetensors, tokenizer, config, model card
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from laminar.launch.model_export import export_model
from laminar.names import exit_codes

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("export")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--to", type=Path, metavar="DIR", required=True, help="a new directory")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    merge = "the whole model, if adapters were trained; without it the adapters"
    parser.add_argument("--merge-adapters", action="store_true", help=merge)
    parser.set_defaults(function=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    names = export_model(
        arguments.run,
        arguments.to,
        step=arguments.step,
        dtype=DTYPES[arguments.dtype],
        merge=arguments.merge_adapters,
    )
    print(f"wrote {arguments.to}: {', '.join(names)}")
    return exit_codes.COMPLETE
