"""Checks of requests that any engine makes first: it refuses those that can never run.

Reads   a GenerateRequest, the limits of model and cache
Raises  EngineError, which names the request, the value and the limit
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from laminar.engines.protocol import EngineError, GenerateRequest

MIN_TEMPERATURE = 1e-6  #: below it logits / T may overflow float32; 0 is greedy


def check_request(request: GenerateRequest, max_model_len: int, vocab_limit: int) -> None:
    """Check a request's length, ids and sampling settings."""
    name = f"request {request.request_id}"
    length = len(request.prompt_ids) + request.max_new_tokens
    if not request.prompt_ids:
        raise EngineError(f"{name} has an empty prompt; give at least one token")
    if len(request.done_ids) >= request.max_new_tokens:
        raise EngineError(
            f"{name} has {len(request.done_ids)} tokens done of max_new_tokens = "
            f"{request.max_new_tokens}; there is nothing to generate"
        )
    if request.done_ids and request.done_ids[-1] in request.stop_ids:
        raise EngineError(f"{name} has already ended with stop id {request.done_ids[-1]}")
    if length > max_model_len:
        raise EngineError(
            f"{name} may grow to {length} tokens; max_model_len = {max_model_len} is the limit"
        )
    temperature = request.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
        raise EngineError(
            f"{name} has temperature {temperature}; use 0, or at least {MIN_TEMPERATURE}"
        )
    if not 0 <= request.seed < 1 << 64:
        raise EngineError(f"{name} has seed {request.seed}; use an unsigned 64-bit number")
    check_ids(name, request.prompt_ids + request.done_ids, vocab_limit)


def check_sequence(name: str, ids: Sequence[int], max_model_len: int, vocab_limit: int) -> None:
    """Check a sequence to be scored."""
    check_ids(name, ids, vocab_limit)
    if len(ids) > max_model_len:
        raise EngineError(
            f"{name} has {len(ids)} tokens; max_model_len = {max_model_len} is the limit"
        )


def check_ids(name: str, ids: Sequence[int], vocab_limit: int) -> None:
    if not ids:
        raise EngineError(f"{name} has no tokens; give at least one")
    if min(ids) < 0 or max(ids) >= vocab_limit:
        wrong = next(i for i in ids if not 0 <= i < vocab_limit)
        raise EngineError(
            f"{name} has token id {wrong}; the vocabulary has ids 0..{vocab_limit - 1}"
        )
