"""A trajectory in a replica's engine: what the store does not have yet.

Gives   Running; Weights, what its tokens were sampled with; request_id, the engine's name of a
        trajectory; digest_of_read
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from laminar.engines.protocol import GenerateRequest
from laminar.events import commands as cmd
from laminar.storage import messages as m
from laminar.storage.rules import digest_read_ids


class LoadedWeights(NamedTuple):
    """What an engine samples with from one load to the next."""

    load: int  #: which load of the engine, as TokenDelta counts them
    version: int
    step: int


@dataclass
class _Part:
    """Consecutive tokens and log-probs of the same weights."""

    weights: LoadedWeights
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))


@dataclass
class ActiveSequence:
    """Tokens and log-probs that are not in the store yet, and where they begin."""

    command: cmd.GenerateTrajectory
    event_seq: int
    stored: int  #: tokens that the store has
    turn: int = 0
    turn_begins: int = 0  #: tokens of the turns before it
    read: str = ""  #: digest of what the engine was given to read, until a chunk has it
    parts: list[_Part] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def sampled(self) -> int:
        """Tokens so far, earlier replicas' included."""
        return self.stored + sum(len(part.tokens) for part in self.parts)

    def add(self, weights: LoadedWeights, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """More tokens, of these weights."""
        if not self.parts or self.parts[-1].weights != weights:
            self.parts.append(_Part(weights))
        self.parts[-1].tokens.extend(tokens)
        self.parts[-1].logprobs.extend(logprobs)

    def take_chunks(self, proved: int) -> list[m.AppendItem]:
        """Everything sampled since the last chunks, one for the weights of each; but nothing of a
        load after `proved`: whose weights those are is not known yet."""
        items = []
        while self.parts and self.parts[0].weights.load <= proved:
            items.append(self._build_chunk(self.parts.pop(0)))
        return items

    def _build_chunk(self, part: _Part) -> m.AppendItem:
        item = m.AppendItem(
            trajectory_id=self.command.trajectory_id,
            placement=self.command.placement,
            segment=self.turn,
            offset=self.stored - self.turn_begins,
            tokens=np.asarray(part.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(part.logprobs, dtype="<f4").tobytes(),
            weight_version=part.weights.version,
            version_step=part.weights.step,
            read=self.read,
        )
        self.stored += len(part.tokens)
        self.read = ""
        return item


def digest_of_read(request: GenerateRequest) -> str:
    """The digest of what the engine reads before it samples."""
    ids = np.asarray(request.prompt_ids + request.done_ids, dtype="<i4")
    return digest_read_ids(ids.tobytes())


def request_id(command: cmd.GenerateTrajectory) -> str:
    """A placement is part of the engine's name for it: so late tokens of an old one are
    recognised."""
    return f"{command.trajectory_id}@{command.placement}"
