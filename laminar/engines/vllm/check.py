"""Check that vLLM accepts a configuration: python -m laminar.engines.vllm.check < config.toml.

Reads   the resolved configuration as TOML, from standard input
Writes  to standard output one sentence on the problem, or TAKEN; starts no engine

A separate process, because importing vLLM takes seconds, starts threads and sets variables.
"""

from __future__ import annotations

import os
from pathlib import Path

from laminar.config import ConfigError, load_config
from laminar.engines.build import get_engine_dtype
from laminar.engines.check import TAKEN

STDIN = Path("/dev/stdin")


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # output of vLLM is not our answer
    config = load_config([], resolved=STDIN)
    from laminar.engines.vllm.start import engine_config

    try:
        engine_config(config, get_engine_dtype(config), seed=0)
    except ConfigError as error:
        os.write(out, str(error).encode())
    else:
        os.write(out, TAKEN)
    os._exit(0)  # threads of vLLM need not end


if __name__ == "__main__":
    main()
