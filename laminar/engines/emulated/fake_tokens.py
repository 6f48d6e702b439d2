"""Made-up tokens and log-probs of responses, by a trajectory's seed, and token ids of prompts.

Reads   nothing
Gives   make_prompt, make_tokens, make_logprobs, END_ID
"""

from __future__ import annotations

import numpy as np

from laminar.names.ids import Purpose

END_ID = 50_000
_STREAM = 1 << 16
_TOKENS = np.random.Generator(np.random.PCG64(1)).integers(0, END_ID, 2 * _STREAM).astype("<i4")
_TOKEN_BYTES = _TOKENS.tobytes()
_LOGPROB_BYTES = (-(_TOKENS % 1024 + 1) / 1024).astype("<f4").tobytes()
_END_BYTES = np.array([END_ID], "<i4").tobytes()
_NAN_BYTES = np.array([np.nan], "<f4").tobytes()


def make_prompt(purpose: str, row_index: int) -> tuple[int, ...]:
    """Return ids that no other prompt has."""
    return (int(purpose == Purpose.EVAL), row_index)


def make_tokens(seed: int, start: int, end: int, *, ends: bool = False) -> bytes:
    """Return tokens [start, end), int32; `ends`: the last of them ends the response."""
    offset = seed % _STREAM
    tokens = _TOKEN_BYTES[4 * (offset + start) : 4 * (offset + end)]
    return tokens[:-4] + _END_BYTES if ends and tokens else tokens


def make_logprobs(seed: int, start: int, end: int, *, spoiled: bool = False) -> bytes:
    """Return log-probs of tokens [start, end), float32; `spoiled`: one of them is NaN."""
    offset = seed % _STREAM
    logprobs = _LOGPROB_BYTES[4 * (offset + start) : 4 * (offset + end)]
    return logprobs[:-4] + _NAN_BYTES if spoiled and logprobs else logprobs
