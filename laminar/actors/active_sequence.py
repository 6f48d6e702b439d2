"""A trajectory in a replica's engine: tokens that are not in the store yet.

Gives   ActiveSequence; LoadedWeights, the weights that sampled its tokens; request_id, the engine's
        name of a trajectory; digest_of_read
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from laminar.engines.protocol import STOP, GenerateRequest, TokenDelta
from laminar.events import commands as cmd
from laminar.storage import messages as m
from laminar.storage.rules import digest_read_ids
from laminar.tasks.environments.stop_strings import StopStrings


class LoadedWeights(NamedTuple):
    """The weights that an engine samples with from one load to the next."""

    load: int  #: number of the engine's load, as in TokenDelta
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
    """Tokens and log-probs that are not in the store yet, and their position."""

    command: cmd.GenerateTrajectory
    event_seq: int
    stored: int  #: tokens in the store
    turn: int = 0
    turn_begins: int = 0  #: tokens of earlier turns
    read: str = ""  #: digest of the tokens that the engine read first, until a chunk has it
    parts: list[_Part] = field(default_factory=list)
    finish_reason: str | None = None
    stop: StopStrings | None = None

    @property
    def sampled(self) -> int:
        """Tokens so far, including those of earlier replicas."""
        return self.stored + sum(len(part.tokens) for part in self.parts)

    def add(self, weights: LoadedWeights, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens that these weights sampled."""
        if not self.parts or self.parts[-1].weights != weights:
            self.parts.append(_Part(weights))
        self.parts[-1].tokens.extend(tokens)
        self.parts[-1].logprobs.extend(logprobs)

    def add_delta(self, weights: LoadedWeights, delta: TokenDelta) -> bool:
        """Append tokens; return whether a stop string ends the turn, unknown to the engine."""
        end = self.stop.find_end(delta.token_ids) if self.stop is not None else None
        self.add(weights, delta.token_ids[:end], delta.logprobs[:end])
        self.finish_reason = delta.finish_reason if end is None else STOP
        return end is not None

    def take_chunks(self, proved: int) -> list[m.AppendItem]:
        """Remove and return the tokens so far, as one chunk per weights.

        Tokens of a load after `proved` stay: their weights are not verified yet.
        """
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
    """Return the digest of the tokens that the engine reads before it samples."""
    ids = np.asarray(request.prompt_ids + request.done_ids, dtype="<i4")
    return digest_read_ids(ids.tobytes())


def request_id(command: cmd.GenerateTrajectory) -> str:
    """Return the engine's id for a placement, which identifies late tokens of an old one."""
    return f"{command.trajectory_id}@{command.placement}"
