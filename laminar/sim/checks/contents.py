"""A check of what the learner is handed: for every sample, what the engines have made.

Reads   orders to generate as engines begin them; the samples of a batch
Raises  Violation handed_as_made

The tokens, log-probs and length of a simulated response follow from its seed, its reward from its
tokens, and its versions from the orders. So nothing of it is taken from what the store, the replica
or the trainer has made of it on the way.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from laminar.engines.made_up_tokens import logprobs_of, prompt_of, tokens_of
from laminar.events import commands as cmd
from laminar.names.ids import GroupId, trajectory_seed
from laminar.sim.runtime.violation import Violation
from laminar.sim.scenario import Scenario
from laminar.training.steps import TrainSample

Origin = tuple[str, int, int]  #: replica, weight version, the step that made it


class Contents:
    """What the engines of one run were ordered to make."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        #: the last attempt at each trajectory: the order, and who has had one of it
        self._begun: dict[str, tuple[cmd.GenerateTrajectory, set[Origin]]] = {}

    def begun(self, command: cmd.GenerateTrajectory) -> None:
        """An engine takes it; one that is fenced may still begin an older attempt."""
        known = self._begun.get(command.trajectory_id)
        if known is None or known[0].attempt < command.attempt:
            known = self._begun[command.trajectory_id] = (command, set())
        if known[0].attempt == command.attempt:
            known[1].add((command.to, command.version, command.version_step))

    def handed(self, samples: Sequence[TrainSample], failed: Container[str]) -> None:
        """`failed`: samples whose reward function failed: they have 0."""
        for sample in samples:
            order, origins = self._begun[sample.sample_id]
            wrong = self._differences(sample, order, origins, sample.sample_id in failed)
            if wrong:
                what = f"the learner is handed {sample.sample_id} with other {', '.join(wrong)}"
                raise Violation("handed_as_made", what, sample.sample_id)

    def _differences(
        self,
        sample: TrainSample,
        order: cmd.GenerateTrajectory,
        origins: set[Origin],
        failed: bool,
    ) -> list[str]:
        """The parts of it that are not what was made."""
        seed = trajectory_seed(
            self._scenario.settings.seed, GroupId(order.group), order.sibling, order.attempt
        )
        lengths = self._scenario.lengths
        count = lengths.of(seed)
        cut_off = count >= lengths.limit
        tokens = tokens_of(seed, 0, count, ends=not cut_off)
        given = sample.response_ids.astype("<i4")
        same = {
            "group": sample.group_id == order.group,
            "prompt": tuple(sample.prompt_ids) == prompt_of(order.purpose, order.row_index),
            "tokens": given.tobytes() == tokens,
            "log-probs": sample.logprobs.astype("<f4").tobytes() == logprobs_of(seed, 0, count),
            "cut-off": sample.truncated == cut_off,
            "reward": sample.reward == (0.0 if failed else float(int(given.sum()) % 2)),
            "versions": {span[:3] for span in sample.spans} <= origins,
            "spans": sum(span.num_tokens for span in sample.spans) == count,
        }
        return [part for part, is_same in same.items() if not is_same]
