"""Log-probs of tokens sampled while the weights changed, computed by transformers.

Gives   sampled_logprobs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from laminar.engines.protocol import KvOnUpdate


@torch.no_grad()
def sampled_logprobs(
    models: Mapping[int, Any],
    prompt: Sequence[int],
    tokens: Sequence[int],
    loads: Sequence[int],
    on_update: KvOnUpdate,
    *,
    temperature: float = 1.0,
    limit: int | None = None,
) -> list[float]:
    """Return the log-prob of each token; `loads[i]` is the key of the model that sampled token i.

    recompute: each model has read all tokens before. keep: a model has read only the tokens that
    were unread at its first step, so the first model has read the prompt."""
    ids, rows = [*prompt, *tokens], []
    first, cache = 0, None
    for load, span in groupby(range(len(tokens)), lambda index: loads[index]):
        begin, end = first, len(prompt) + list(span)[-1]
        begin = begin if on_update == "keep" else 0
        read = models[load](torch.tensor([ids[begin:end]]), past_key_values=cache, use_cache=True)
        cache = read.past_key_values if on_update == "keep" else None
        rows.append(read.logits[0, max(first, len(prompt) - 1) - begin :, :limit])
        first = end
    logprobs = torch.log_softmax(torch.cat(rows).float() / temperature, -1)
    return logprobs[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()  # type: ignore[no-any-return]
