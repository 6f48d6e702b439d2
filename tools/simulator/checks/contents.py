"""A check of what the store takes and the learner is handed: what the engines have made.

Reads   orders to generate as engines begin them, what engines sample with which weights; chunks of
        the store; the samples of a batch
Raises  Violation handed_as_made, sampled_as_said

The tokens, log-probs and length of a simulated response follow from its seed, its reward from its
tokens, and its versions from the weights that the engine had. So nothing of it is taken from what
the store, the replica or the trainer has made of it on the way.
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
    digest: str  #: of the weights
    start: int
    end: int


class Contents:
    """What the engines of one run were ordered to make."""

    def __init__(self, scenario: Scenario, made_as: Callable[[int, str], bool]) -> None:
        """`made_as(version, digest)`: whether these are weights of this version."""
        self._scenario, self._made_as = scenario, made_as
        #: the last attempt at each trajectory
        self._begun: dict[str, cmd.GenerateTrajectory] = {}
        #: by trajectory and attempt
        self._sampled: dict[tuple[str, int], list[Sampled]] = {}
        self._called: set[tuple[str, int, int]] = set()  #: trajectory, attempt, turn

    def called(self, trajectory_id: str, attempt: int, turn: int) -> None:
        """called_once: no tool is called twice for one turn, whoever is lost."""
        call = (trajectory_id, attempt, turn)
        if call in self._called:
            what = f"the call of turn {turn} of attempt {attempt} at {trajectory_id} is made twice"
            raise Violation("called_once", what, trajectory_id)
        self._called.add(call)

    def begun(self, command: cmd.GenerateTrajectory) -> None:
        """An engine takes it; one that is fenced may still begin an older attempt."""
        known = self._begun.get(command.trajectory_id)
        if known is None or known.attempt < command.attempt:
            self._begun[command.trajectory_id] = command

    def sampled(self, command: cmd.GenerateTrajectory, start: int, end: int, digest: str) -> None:
        """An engine with these weights gives tokens `start` to `end` of its response."""
        known = self._sampled.setdefault((command.trajectory_id, command.attempt), [])
        last = known[-1] if known else None
        if last is not None and last[:2] == (command.to, digest) and last.end == start:
            start = known.pop().start
        known.append(Sampled(command.to, digest, start, end))

    def stored(self, row: Row, chunk: Chunk) -> None:
        """sampled_as_said: the replica of a chunk sampled all of it with weights of its version."""
        assert chunk.source is not None
        made = made_of(self._scenario, self._scenario.seed_of(row))
        start = made.begins[chunk.segment] + chunk.offset
        end = start + len(chunk.tokens) // TOKEN_BYTES
        if not self._is_true((row.id, row.attempt), chunk.source, start, end):
            what = f"{row.id} has tokens {start} to {end} as of {chunk.source}"
            raise Violation("sampled_as_said", what, row.id)

    def _is_true(self, attempt: tuple[str, int], source: Source, start: int, end: int) -> bool:
        """Whether this replica sampled these tokens of it with weights of this version."""
        for part in sorted(self._sampled.get(attempt, ()), key=lambda part: part.start):
            fits = part.replica == source.replica and part.start <= start < part.end
            if fits and self._made_as(source.weight_version, part.digest):
                start = part.end
        return start >= end

    def handed(self, samples: Sequence[TrainSample], failed: Container[str]) -> None:
        """`failed`: samples whose reward function failed: they have 0."""
        for sample in samples:
            order = self._begun[sample.sample_id]
            wrong = self._differences(sample, order, sample.sample_id in failed)
            if wrong:
                what = f"the learner is handed {sample.sample_id} with other {', '.join(wrong)}"
                raise Violation("handed_as_made", what, sample.sample_id)

    def _differences(
        self,
        sample: TrainSample,
        order: cmd.GenerateTrajectory,
        failed: bool,
    ) -> list[str]:
        """The parts of it that are not what was made."""
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
        """Each part is of the weights that its engine had; of one version, or in flight of later
        ones, too."""
        end = 0
        for span in sample.spans:
            start, end = end, end + span.num_tokens
            if not self._is_true((sample.sample_id, attempt), Source(*span[:3]), start, end):
                return False
        weights = [span[1:3] for span in sample.spans]
        if not self._scenario.settings.in_flight:
            return len(set(weights)) == 1
        return all(b[0] >= a[0] and b[1] >= a[1] for a, b in pairwise(weights))
