"""Input and output of a learner's step, as plain data.

Reads   nothing
Gives   ModelLayout of a loaded model; TrainSample for a step; StepResult of it, and its parts

Without torch, which the trainer actor, the learner's front end, does not load.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.names.ids import hash_batch
from laminar.storage.branches import ROOT, Parents, count_read_again, list_paths
from laminar.storage.contents import Content
from laminar.storage.rules import TokenSpan

# Reasons why an update is skipped.
NO_SIGNAL = "no-signal"  #: every trained advantage is 0, and there is no KL or entropy term
NON_FINITE = "non-finite-gradient"
CRITIC_WARMUP = "critic-warmup"  #: the first steps train the critic alone
MISMATCH = "mismatch"  #: no row of the batch came from the weights that its version names

Ids = NDArray[np.int32]
Origin = tuple[str, int]
"""(replica, weight version) that sampled tokens."""


def get_origin(span: TokenSpan) -> Origin:
    return span.replica, span.weight_version


class SpanPart(NamedTuple):
    """Part that a span belongs to in the comparison of trainer and engine."""

    origin: Origin
    went_on: bool  #: whether its replica had begun the response with older weights


def parts_of(spans: Sequence[TokenSpan]) -> list[SpanPart]:
    """Return the parts of the spans of one response, in order."""
    before = [None, *spans[:-1]]
    return [
        SpanPart(get_origin(span), last is not None and last.replica == span.replica)
        for last, span in zip(before, spans, strict=True)
    ]


class ModelLayout(NamedTuple):
    """The tensors of a model, in the order in which they are published."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]  #: by name
    engine_dtype: str  #: "float32" or "bfloat16", for engines of such a device
    rows: str = "none"  #: way in which a step reads sequences, for the log


class Mismatch(NamedTuple):
    """Trainer against engine over the trained tokens of one replica and version."""

    mean_abs_diff: float
    mean_k3: float
    mean_doubt: float  #: 1 - p, as the engine scored the tokens
    tokens: int


class MismatchSource(NamedTuple):
    """The mean |log p(trainer) - log p(engine)| of an origin, and its limit; nats."""

    diff: float
    limit: float


class SampleRow(NamedTuple):
    """A sequence that the model reads, and the sampled tokens that it trains."""

    prompt: int  #: tokens before the first turn
    ids: Ids
    tokens: NDArray[np.int64]  #: indices of these tokens in the response
    places: NDArray[np.int64]  #: their positions in `ids`


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """A trajectory as training sees it: one token sequence, or the rows of its branches.

    Context tokens are read and nothing more: per-token figures cover the sampled tokens only, each
    once, in the order of the turns, however many rows read it.
    """

    sample_id: str
    group_id: str
    prompt_ids: Ids  #: at least one
    response_ids: Ids  #: at least one; all sampled tokens, the stop token included
    logprobs: NDArray[np.float32]  #: of the distribution sampled from, temperature included
    reward: float
    temperature: float  #: of the sampling; above 0
    truncated: bool  #: whether a limit of the engine or of its environment ended it
    spans: tuple[TokenSpan, ...]  #: parts of the response by origin, in order
    truncated_by: str = "length"  #: that limit, if one did: length, or as in EndedBy
    correct: bool = False  #: full score, and not truncated
    extras: Mapping[str, float] = field(default_factory=dict)  #: extra figures of the reward
    penalty: float | None = None  #: penalty for length, at most 0; None: there is none
    turns: tuple[int, ...] = ()  #: sampled tokens of each turn; (): a single turn
    contexts: tuple[Ids, ...] = ()  #: context tokens before each later turn, at least one each
    parents: Parents = ()  #: turn that each turn follows; (): the one before it
    values: NDArray[np.float64] | None = None  #: a critic's, before each token of the response
    advantage: NDArray[np.float64] | None = None  #: for all response tokens, or for each

    def __post_init__(self) -> None:
        if not len(self.prompt_ids) or not len(self.response_ids):
            raise ValueError(f"sample {self.sample_id} has an empty prompt or response")
        if len(self.logprobs) != len(self.response_ids):
            raise ValueError(
                f"sample {self.sample_id} has {len(self.logprobs)} log-probs for "
                f"{len(self.response_ids)} response tokens"
            )
        counts = [span.num_tokens for span in self.spans]
        if min(counts, default=0) < 1 or sum(counts) != len(self.response_ids):
            raise ValueError(
                f"sample {self.sample_id} has spans of {counts} tokens for "
                f"{len(self.response_ids)} response tokens"
            )
        if self.turns and (
            min(self.turns) < 1
            or sum(self.turns) != len(self.response_ids)
            or len(self.contexts) != len(self.turns) - 1
        ):
            raise ValueError(
                f"sample {self.sample_id} has turns of {self.turns} tokens and "
                f"{len(self.contexts)} contexts for {len(self.response_ids)} response tokens"
            )
        if self.parents and (
            len(self.parents) != len(self.turns)
            or not all(ROOT <= parent < turn for turn, parent in enumerate(self.parents))
        ):
            raise ValueError(
                f"sample {self.sample_id} has turns that follow {self.parents}, for "
                f"{len(self.turns)} turns"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"sample {self.sample_id} has temperature {self.temperature}; greedy samples "
                "cannot be trained"
            )

    @property
    def trained_reward(self) -> float:
        """Reward that advantages and returns are computed from."""
        return self.reward + (self.penalty or 0.0)

    @property
    def token_advantages(self) -> NDArray[np.float64]:
        found = 0.0 if self.advantage is None else self.advantage
        return np.broadcast_to(np.float64(found), len(self.response_ids))

    @property
    def weight_version(self) -> int:
        """Oldest version that sampled tokens of the response."""
        return self._oldest.weight_version

    @property
    def version_step(self) -> int:
        """Completed training steps when that version was made."""
        return self._oldest.version_step

    @property
    def _oldest(self) -> TokenSpan:
        return min(self.spans, key=lambda span: span.version_step)

    @property
    def length(self) -> int:
        """Tokens of prompt and response, and of the contexts; of all rows if there are branches."""
        contexts = [len(context) for context in (self.prompt_ids, *self.contexts)]
        again = count_read_again(self.parents, [*map(add, contexts, self.turns)])
        return sum(contexts) + len(self.response_ids) + again

    def list_rows(self) -> list[SampleRow]:
        """Return the sequences that the model reads, one for each branch.

        A sampled token is trained at its place in the first row that has it.
        """
        turns = self.turns or (len(self.response_ids),)
        contexts = (self.prompt_ids, *self.contexts)
        sampled = np.split(np.arange(len(self.response_ids)), np.cumsum(turns)[:-1])
        rows, known = [], set[int]()
        for path in list_paths(self.parents, len(turns)):
            parts, tokens, places, length = list[Ids](), [], [], 0
            for turn in path:
                parts += [contexts[turn], self.response_ids[sampled[turn]]]
                length += len(contexts[turn])
                if turn not in known:
                    tokens.append(sampled[turn])
                    places.append(length + np.arange(turns[turn]))
                length += turns[turn]
            known.update(path)
            joined = map(np.concatenate, (parts, tokens, places))
            rows.append(SampleRow(len(contexts[path[0]]), *joined))
        return rows


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one mini-batch: an optimizer update, or the reason why it was skipped."""

    sample_ids: tuple[str, ...]
    skipped_reason: str | None
    grad_norm: float  #: before clipping; 0 without signal
    pg_loss: float
    kl_loss: float | None


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    updates: tuple[Update, ...]
    metrics: dict[str, float]
    mismatch: dict[Origin, Mismatch]  #: of the whole batch
    suspects: dict[Origin, MismatchSource]  #: origins whose rows were left out
    left_out: dict[str, tuple[Origin, ...]]  #: by sample id: the suspects that sampled tokens of it
    num_tokens: int  #: response tokens consumed
    digest: str  #: xxh3_128 of the ids of the samples, in order

    @property
    def changed(self) -> bool:
        """Whether the optimizer touched the weights at all."""
        return any(u.skipped_reason is None for u in self.updates)

    @property
    def nonfinite_updates(self) -> int:
        return sum(u.skipped_reason == NON_FINITE for u in self.updates)

    @property
    def skipped_reason(self) -> str | None:
        """Reason of the first skipped update."""
        return next((u.skipped_reason for u in self.updates if u.skipped_reason), None)


def sampled_by(
    samples: Sequence[TrainSample], suspects: Container[Origin]
) -> dict[str, tuple[Origin, ...]]:
    """Return by sample id the suspects that sampled tokens of it, for samples that have any."""
    found = {}
    for sample in samples:
        origins = dict.fromkeys(map(get_origin, sample.spans))
        if named := tuple(origin for origin in origins if origin in suspects):
            found[sample.sample_id] = named
    return found


def select_one_per_origin(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Select the first samples that together have spans of all origins of `samples`."""
    found, known = [], dict[Origin, None]()
    for sample in samples:
        origins = dict.fromkeys(map(get_origin, sample.spans))
        if not origins.keys() <= known.keys():
            known |= origins
            found.append(sample)
    return found


def ids_digest(samples: Sequence[TrainSample]) -> str:
    """Return xxh3_128 (hex) of the MessagePack array of the sample ids, in order."""
    return hash_batch([s.sample_id for s in samples])


def iter_contents(samples: Sequence[TrainSample]) -> Iterator[Content]:
    """Yield the learner's input for each sample, from which advantages and figures are computed."""
    for sample in samples:
        yield Content(
            trajectory_id=sample.sample_id,
            group_id=sample.group_id,
            prompt_ids=sample.prompt_ids.astype("<i4").tobytes(),
            tokens=sample.response_ids.astype("<i4").tobytes(),
            logprobs=sample.logprobs.astype("<f4").tobytes(),
            reward=sample.reward,
            temperature=sample.temperature,
            truncated=sample.truncated,
            spans=sample.spans,
            turns=sample.turns,
            contexts=tuple(context.astype("<i4").tobytes() for context in sample.contexts),
            parents=sample.parents,
        )


def token_staleness(samples: Sequence[TrainSample], step: int) -> dict[str, float]:
    """Return metrics of the token staleness: steps between a token's weights and its training."""
    spans = [span for sample in samples for span in sample.spans]
    total = sum((step - span.version_step) * span.num_tokens for span in spans)
    return {
        "staleness/token_mean": total / sum(span.num_tokens for span in spans),
        "staleness/token_max": float(step - min(span.version_step for span in spans)),
    }
