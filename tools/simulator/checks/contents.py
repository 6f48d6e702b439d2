"""Check that the store and the learner receive exactly what the engines sampled.

Reads   orders to generate as engines begin them, what engines sample with which weights; chunks of
        the store; the samples of a batch
Raises  Violation called_once, handed_as_made, sampled_as_said

The tokens, log-probs and length of a simulated response follow from its seed, its reward from its
tokens, and its versions from the weights that the engine had. So the expected content never
depends on what the store, the replica or the trainer made of it on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import pairwise
from typing import NamedTuple

from laminar.events import commands as cmd
from laminar.names.ids import GroupId, trajectory_seed
from laminar.storage.rules import TOKEN_BYTES, Chunk, Row, Source
from laminar.training.steps import TrainSample
from tools.simulator.runtime.violation import Violation
from tools.simulator.scenario import Scenario
from tools.simulator.turns import made_of, prompt_with


class Sampled(NamedTuple):
    """Consecutive tokens of a response that one engine sampled with the same weights."""

    replica: str
    digest: str  #: digest of the weights
    start: int
    end: int


class Contents:
    """Record of what the engines of one run were ordered to generate and what they sampled."""

    def __init__(self, scenario: Scenario, made_as: Callable[[int, str], bool]) -> None:
        """`made_as(version, digest)`: whether these are weights of this version."""
        self._scenario, self._made_as = scenario, made_as
        #: latest order, by trajectory
        self._begun: dict[str, cmd.GenerateTrajectory] = {}
        #: parts sampled, by trajectory and attempt
        self._sampled: dict[tuple[str, int], list[Sampled]] = {}
        self._called: set[tuple[str, int, int]] = set()  #: trajectory, attempt, turn

    def called(self, trajectory_id: str, attempt: int, turn: int) -> None:
        """Check called_once: no tool is called twice for one turn, whatever process is lost."""
        call = (trajectory_id, attempt, turn)
        if call in self._called:
            what = f"the call of turn {turn} of attempt {attempt} at {trajectory_id} is made twice"
            raise Violation("called_once", what, trajectory_id)
        self._called.add(call)

    def begun(self, command: cmd.GenerateTrajectory) -> None:
        """Note that an engine begins an order; a fenced engine may still begin an older attempt."""
        known = self._begun.get(command.trajectory_id)
        if known is None or known.attempt < command.attempt:
            self._begun[command.trajectory_id] = command

    def sampled(self, command: cmd.GenerateTrajectory, start: int, end: int, digest: str) -> None:
        """Note that an engine sampled tokens `start` to `end` of a response with these weights."""
        known = self._sampled.setdefault((command.trajectory_id, command.attempt), [])
        last = known[-1] if known else None
        if last is not None and last[:2] == (command.to, digest) and last.end == start:
            start = known.pop().start
        known.append(Sampled(command.to, digest, start, end))

    def stored(self, row: Row, chunk: Chunk) -> None:
        """Check sampled_as_said: a chunk's replica sampled it with weights of its version."""
        assert chunk.source is not None
        made = made_of(self._scenario, self._scenario.seed_of(row))
        start = made.begins[chunk.segment] + chunk.offset
        end = start + len(chunk.tokens) // TOKEN_BYTES
        if not self._is_true((row.id, row.attempt), chunk.source, start, end):
            what = f"{row.id} has tokens {start} to {end} as of {chunk.source}"
            raise Violation("sampled_as_said", what, row.id)

    def _is_true(self, attempt: tuple[str, int], source: Source, start: int, end: int) -> bool:
        """Return whether this replica sampled all these tokens with weights of this version."""
        for part in sorted(self._sampled.get(attempt, ()), key=lambda part: part.start):
            fits = part.replica == source.replica and part.start <= start < part.end
            if fits and self._made_as(source.weight_version, part.digest):
                start = part.end
        return start >= end

    def handed(self, samples: Sequence[TrainSample], failed: Container[str]) -> None:
        """Check handed_as_made; the reward of samples in `failed` (reward function failed) is 0."""
        for sample in samples:
            order = self._begun[sample.sample_id]
            wrong = self._differences(sample, order, sample.sample_id in failed)
            if wrong:
                what = f"the learner is handed {sample.sample_id} with other {', '.join(wrong)}"
                raise Violation("handed_as_made", what, sample.sample_id)

    def _differences(
        self, sample: TrainSample, order: cmd.GenerateTrajectory, failed: bool
    ) -> list[str]:
        """Return the names of the parts of a sample that differ from what was generated."""
        seed = trajectory_seed(
            self._scenario.settings.seed, GroupId(order.group), order.sibling, order.attempt
        )
        made = made_of(self._scenario, seed)
        prompt = prompt_with(self._scenario, order.purpose, order.row_index)
        given = sample.response_ids.astype("<i4")
        same = {
            "group": sample.group_id == order.group,
            "prompt": tuple(sample.prompt_ids) == prompt,
            "tokens": given.tobytes() == made.tokens,
            "log-probs": sample.logprobs.astype("<f4").tobytes() == made.logprobs,
            "contexts": tuple(map(tuple, sample.contexts)) == made.contexts,
            "turns": (sample.turns or (len(given),)) == made.counts,
            "cut-off": sample.truncated == made.cut_off,
            "reward": sample.reward == (0.0 if failed else float(int(given.sum()) % 2)),
            "versions": self._versions_are_right(sample, order.attempt),
            "spans": sum(span.num_tokens for span in sample.spans) == len(given),
        }
        return [part for part, is_same in same.items() if not is_same]

    def _versions_are_right(self, sample: TrainSample, attempt: int) -> bool:
        """Return whether each span has its engine's weights, of one version unless in flight.

        In flight the versions of later spans may only be higher.
        """
        end = 0
        for span in sample.spans:
            start, end = end, end + span.num_tokens
            if not self._is_true((sample.sample_id, attempt), Source(*span[:3]), start, end):
                return False
        weights = [span[1:3] for span in sample.spans]
        if not self._scenario.settings.in_flight:
            return len(set(weights)) == 1
        return all(b[0] >= a[0] and b[1] >= a[1] for a, b in pairwise(weights))
