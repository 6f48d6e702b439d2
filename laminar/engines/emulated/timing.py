"""Duration of generation and length of responses, for an engine without a model.

Reads   the seed of a trajectory, the number of sequences that decode together, their cache
Gives   durations in nanoseconds, response lengths in tokens

Pure. Decoding is bound by memory traffic: one step costs a base (reading the weights), a little for
each sequence and a little for each token of their caches, whatever the tokens are. Response lengths
are lognormal with p99 = 10 x median: the stragglers that make synchronous training wait.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec

from laminar.names.ids import hash64

P99_TO_MEDIAN = 10.0
_NORMAL = NormalDist()
P99_QUANTILE = _NORMAL.inv_cdf(0.99)
_HASHES = float(2**64)


class EngineTiming(msgspec.Struct, frozen=True):
    """Speed of an engine."""

    step_us: float = 8_000.0  #: base of a decode step, for any batch
    sequence_us: float = 60.0  #: added to a step by each sequence in it
    prefill_tokens_per_s: float = 20_000.0
    token_us: float = 0.0  #: added to a step by each token in the cache
    cache_tokens: int = 0  #: capacity of the cache; 0: no limit

    def step_ns(self, sequences: int, cached: int = 0) -> float:
        """Return the duration of a decode step with so many sequences and cached tokens."""
        return 1e3 * (self.step_us + self.sequence_us * sequences + self.token_us * cached)

    def prefill_ns(self, tokens: int) -> float:
        """Return the duration of a prefill of prompt and resumed tokens."""
        return 1e9 * tokens / self.prefill_tokens_per_s


class ResponseLengths(msgspec.Struct, frozen=True):
    """Lognormal lengths, cut at a limit."""

    median: int = 100  #: tokens
    limit: int = 2_000  #: tokens
    p99_to_median: float = P99_TO_MEDIAN

    def draw_length(self, seed: int) -> int:
        """Draw the length of the response for a trajectory's seed, in tokens, 1..limit."""
        uniform = (hash64(seed, "length") + 0.5) / _HASHES
        sigma = math.log(self.p99_to_median) / P99_QUANTILE
        drawn = self.median * math.exp(sigma * _NORMAL.inv_cdf(uniform))
        return max(1, min(self.limit, round(drawn)))
