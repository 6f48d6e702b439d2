"""What a death costs: the tokens of one progress interval, and of what was on its way."""

from __future__ import annotations

import pytest

from tools.kit.sim_worlds import config
from tools.simulator.models.replica import Replica
from tools.simulator.run import make_world
from tools.simulator.runtime.process import SimProcess

PROGRESS_MS = 500
ON_ITS_WAY_S = 0.05
"""An answer of the store takes two delays of at most 2 ms, and a step of the engine 10 ms."""
SEEDS = range(3)


@pytest.mark.parametrize(
    "fault", [pytest.param("replica-dies", marks=pytest.mark.long), "run-dies"]
)
def test_only_one_progress_interval_is_generated_again(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every sequence that an engine runs when its process dies, the store has all tokens but
    those that the engine can sample in an interval."""
    again: list[int] = []
    end = SimProcess._end

    def looked_at(self: SimProcess) -> None:
        if isinstance(self.model, Replica) and self.model.engine is not None:
            clock = self.model.engine.clock
            for sequence in clock.sequences.values():
                row = self.world.rows[sequence.id.rpartition("@")[0]]
                again.append(clock.count_tokens(sequence) - row.num_tokens)
        end(self)

    monkeypatch.setattr(SimProcess, "_end", looked_at)
    swarm = config(fault, progress_interval_ms=PROGRESS_MS, save_freq=1, median_response=200)
    for seed in SEEDS:
        world = make_world(swarm, seed)
        world.run()
    most = (PROGRESS_MS / 1000 + ON_ITS_WAY_S) * 1e9 / world.scenario.engine.step_ns(1)
    assert len(again) > 20
    assert min(again) >= 0 and max(again) <= most
