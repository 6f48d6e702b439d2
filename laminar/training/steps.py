"""What a learner is given and what it gives, as plain data.

Reads   nothing
Gives   ModelLayout of a loaded model; TrainSample for a step; StepResult of it, and its parts

Without torch: the trainer actor, which speaks for the learner, does not load it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar.names.ids import hash_batch
from laminar.storage.contents import Content
from laminar.storage.rules import Span

# Why an update is left out.
NO_SIGNAL = "no-signal"  #: every trained advantage is 0, and there is no KL or entropy term
NON_FINITE = "non-finite-gradient"
CRITIC_WARMUP = "critic-warmup"  #: of the first steps, which train the critic alone
MISMATCH = "mismatch"  #: no row of the batch came from the weights that it names

Ids = NDArray[np.int32]
Origin = tuple[str, int]
"""(replica, weight version): who sampled tokens, and with what."""


def get_origin(span: Span) -> Origin:
    return span.replica, span.weight_version


class SpanPart(NamedTuple):
    """Of what a span is a part, where trainer and engine are compared."""

    origin: Origin
    went_on: bool  #: its replica had sampled of the response before, with older weights


def parts_of(spans: Sequence[Span]) -> list[SpanPart]:
    """Of the spans of one response, in order."""
    before = [None, *spans[:-1]]
    return [
        SpanPart(get_origin(span), last is not None and last.replica == span.replica)
        for last, span in zip(before, spans, strict=True)
    ]


class ModelLayout(NamedTuple):
    """The tensors of a model, in the order in which they are published."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]  #: by name
    engine_dtype: str  #: "float32" or "bfloat16", what engines of such a device are given
    rows: str = "none"  #: for the log: how it reads the sequences of a step


class Mismatch(NamedTuple):
    """Trainer against engine over the trained tokens of one replica and version."""

    mean_abs_diff: float
    mean_k3: float
    mean_doubt: float  #: 1 - p, as the engine scored them
    tokens: int


class MismatchSource(NamedTuple):
    """The mean |log p(trainer) - log p(engine)| of an origin, and what it may be; nats."""

    diff: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One trajectory as it is trained: one token sequence, of one turn or of several.

    What its environment said between two turns is read and is nothing else: it is in no figure
    per token, since every one of these has the sampled tokens only.
    """

    sample_id: str
    group_id: str
    prompt_ids: Ids  #: at least one
    response_ids: Ids  #: at least one; all of them sampled, the stop token included
    logprobs: NDArray[np.float32]  #: behaviour: of the distribution sampled from, temperature in
    reward: float
    temperature: float  #: of the sampling; above 0
    truncated: bool  #: the engine's finish reason was the length limit
    spans: tuple[Span, ...]  #: who sampled which part of the response, in order
    correct: bool = False  #: the full score, and not truncated
    extras: Mapping[str, float] = field(default_factory=dict)  #: figures beside the reward
    penalty: float | None = None  #: at most 0, for its length; None: lengths cost nothing
    turns: tuple[int, ...] = ()  #: sampled tokens of each turn; (): there is one
    contexts: tuple[Ids, ...] = ()  #: what was read between each two of them, at least one token
    values: NDArray[np.float64] | None = None  #: of a critic, before each token of the response
    advantage: float | NDArray[np.float64] = 0.0  #: of all response tokens alike, or of each

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
        if not self.temperature > 0:
            raise ValueError(
                f"sample {self.sample_id} has temperature {self.temperature}; greedy samples "
                "cannot be trained"
            )

    @property
    def trained_reward(self) -> float:
        """What advantages and returns are made of."""
        return self.reward + (self.penalty or 0.0)

    @property
    def token_advantages(self) -> NDArray[np.float64]:
        return np.broadcast_to(np.float64(self.advantage), len(self.response_ids))

    @property
    def weight_version(self) -> int:
        """The oldest that sampled of it."""
        return self._oldest.weight_version

    @property
    def version_step(self) -> int:
        """Completed training steps when that version was made."""
        return self._oldest.version_step

    @property
    def _oldest(self) -> Span:
        return min(self.spans, key=lambda span: span.version_step)

    @property
    def length(self) -> int:
        """Tokens of prompt and response, and of what was read between turns."""
        return len(self.prompt_ids) + len(self.response_ids) + sum(map(len, self.contexts))

    @property
    def read_ids(self) -> Ids:
        """What stands behind the prompt: the turns, and what was read between them."""
        if not self.contexts:
            return self.response_ids
        turns = np.split(self.response_ids, np.cumsum(self.turns)[:-1])
        parts = [turns[0]]
        for context, turn in zip(self.contexts, turns[1:], strict=True):
            parts += [context, turn]
        return np.concatenate(parts)

    @property
    def sampled_at(self) -> NDArray[np.int64]:
        """Where each sampled token stands in `read_ids`."""
        places: NDArray[np.int64] = np.arange(len(self.response_ids))
        if not self.contexts:
            return places
        read = np.cumsum([0, *map(len, self.contexts)])
        places += np.repeat(read, self.turns)
        return places


@dataclass(frozen=True, slots=True)
class Update:
    """One mini-batch: an optimizer update, or the reason why there was none."""

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
    suspects: dict[Origin, MismatchSource]  #: whose rows were left out
    left_out: dict[str, tuple[Origin, ...]]  #: by sample id: the suspects that sampled of it
    num_tokens: int  #: response tokens consumed
    digest: str  #: xxh3_128 of the ids of the samples, in order

    @property
    def changed(self) -> bool:
        """Whether the optimizer touched the weights at all."""
        return any(u.skipped_reason is None for u in self.updates)

    @property
    def skipped_reason(self) -> str | None:
        """Why the first skipped update was skipped."""
        return next((u.skipped_reason for u in self.updates if u.skipped_reason), None)


def sampled_by(
    samples: Sequence[TrainSample], suspects: Container[Origin]
) -> dict[str, tuple[Origin, ...]]:
    """Sample id -> the suspects that sampled any of it; only of samples that have some."""
    found = {}
    for sample in samples:
        origins = dict.fromkeys(map(get_origin, sample.spans))
        if named := tuple(origin for origin in origins if origin in suspects):
            found[sample.sample_id] = named
    return found


def select_one_per_origin(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The first samples that have, together, spans of all origins of `samples`."""
    found, known = [], dict[Origin, None]()
    for sample in samples:
        origins = dict.fromkeys(map(get_origin, sample.spans))
        if not origins.keys() <= known.keys():
            known |= origins
            found.append(sample)
    return found


def ids_digest(samples: Sequence[TrainSample]) -> str:
    """xxh3_128 (hex) of the MessagePack array of the sample ids, in order."""
    return hash_batch([s.sample_id for s in samples])


def iter_contents(samples: Sequence[TrainSample]) -> Iterator[Content]:
    """What the learner is handed of each; advantages and figures are worked out from it."""
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
        )


def token_staleness(samples: Sequence[TrainSample], step: int) -> dict[str, float]:
    """Metrics of the tokens of a batch: how many steps after their own weights they are trained."""
    spans = [span for sample in samples for span in sample.spans]
    total = sum((step - span.version_step) * span.num_tokens for span in spans)
    return {
        "staleness/token_mean": total / sum(span.num_tokens for span in spans),
        "staleness/token_max": float(step - min(span.version_step for span in spans)),
    }
