"""The checks of prompts, silence and the log's time can fail, each by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.coordinator.detector import FailureDetector
from laminar.core.machine import StateMachine
from laminar.core.scheduling.dispatch import permute_rows
from laminar.core.state import forks
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.names.ids import GroupId, TrajectoryId, train_group
from laminar.run.directory import RESUME_FILE
from laminar.training.trainer_state import ResumeState, decode
from tools.kit.sim_worlds import calm, config, ran
from tools.simulator.checks.leases import Leases
from tools.simulator.checks.prompts import Prompts
from tools.simulator.checks.safety import LogTime
from tools.simulator.config import Choices
from tools.simulator.models.learner import SimTrainer
from tools.simulator.run import run_seed
from tools.simulator.runtime.violation import Violation
from tools.simulator.scenario import DATA_DIGEST, draw
from tools.simulator.world import World

SMALL = {"replicas": 4, "num_train": 20, "total_training_steps": 0, "val_size": 0}


@pytest.fixture(scope="module")
def world() -> World:
    return ran(calm(**SMALL), seed=3)


@pytest.fixture
def prompts(world: World) -> Prompts:
    return Prompts(world.scenario)


def broken(check: Callable[[], object]) -> str:
    with pytest.raises(Violation) as violation:
        check()
    return violation.value.invariant


def at(seq: int, event: Event | None = None, time_ns: int = 0) -> Stamped:
    return Stamped(
        seq=seq,
        time_ns=time_ns,
        peer="coordinator",
        incarnation=0,
        peer_seq=0,
        event=event or ev.TimerFired(timer="none"),
    )


def given(group: str, row: int, placement: int = 1) -> list[Command]:
    command = cmd.GenerateTrajectory(
        to="rollout-0",
        trajectory_id=TrajectoryId(f"{group}.0"),
        group=GroupId(group),
        sibling=0,
        purpose="train",
        row_index=row,
        attempt=1,
        placement=placement,
        version=0,
        version_step=0,
        seed=1,
    )
    return [command]


def ended(trajectory: str, end: str = "dropped", reason: str = "unscored") -> list[Command]:
    ending = cmd.TrajectoryEnding(
        trajectory_id=TrajectoryId(trajectory),
        group=GroupId(trajectory.rpartition(".")[0]),
        sibling=0,
        purpose="train",
        row_index=0,
        placement=1,
        end=end,
        reason=reason,
        step=-1,
    )
    return [cmd.EndTrajectories(to="store-0", endings=(ending,))]


def test_prompt_without_an_end_and_data_that_is_left(world: World) -> None:
    state, prompts = world.coordinator.state, world.checks.prompts
    assert state is not None
    prompts.every_prompt_ends(state)
    kept = prompts._ended.pop("0.3.0")
    assert broken(lambda: prompts.every_prompt_ends(state)) == "every_prompt_ends"
    prompts._ended["0.3.0"] = (kept[0], "dropped", "run-ended")
    assert broken(lambda: prompts.every_prompt_ends(state)) == "every_prompt_ends"
    prompts._ended["0.3.0"] = kept
    group, last = prompts._given.popitem()
    assert broken(lambda: prompts.every_prompt_ends(state)) == "every_prompt_ends"
    prompts._given[group] = last


FORKED = {**SMALL, "fork_step": 3}
SEED = 5
"""A fork with the data of the other run, in which several prompts had no end."""


def test_prompt_that_the_other_run_had_ended_or_that_goes_before_one_without_an_end() -> None:
    scenario = draw(calm(**FORKED), SEED)
    origin = scenario.origin
    assert origin is not None and origin.data == DATA_DIGEST and len(origin.unfinished) > 1
    first, second = origin.unfinished[:2]
    prompts = Prompts(scenario)
    later = given(f"0.{origin.cursor}", 0)
    assert broken(lambda: prompts.note(at(1), later)) == "prompts_in_order"
    early = given(second.group, second.row_index)
    assert broken(lambda: prompts.note(at(1), early)) == "prompts_in_order"
    other = given(first.group, second.row_index)
    assert broken(lambda: prompts.note(at(1), other)) == "prompts_in_order"
    for prompt in origin.unfinished:
        prompts.note(at(1), given(prompt.group, prompt.row_index))
    rows, left = (
        permute_rows(origin.seed, 0, origin.num_train),
        {p.group for p in origin.unfinished},
    )
    row = next(rows[at] for at in range(origin.cursor) if train_group(0, at) not in left)
    again = given(f"0.{origin.cursor}", row)
    assert broken(lambda: prompts.note(at(2), again)) == "prompts_in_order"


def test_a_fork_goes_on_with_the_data_and_counts_steps_on() -> None:
    world = ran(calm(**FORKED), SEED)
    state, origin = world.coordinator.state, world.scenario.origin
    assert state is not None and origin is not None
    assert (state.data.first_step, state.data.cursor) == (3, origin.num_train)
    assert state.steps.completed > 3 and not state.data.unfinished_prompts


@pytest.mark.parametrize(("part", "wrong"), [("cursor", 18), ("unfinished", ()), ("seed", 1)])
def test_a_fork_that_forgets_how_far_the_data_was_is_found(
    part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = forks.apply_origin
    monkeypatch.setattr(
        forks, "apply_origin", lambda s, o: begin(s, msgspec.structs.replace(o, **{part: wrong}))
    )
    assert run_seed(calm(**FORKED), SEED).invariant == "prompts_in_order"


def test_a_fork_that_begins_without_its_checkpoint_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimTrainer, "restore_checkpoint", _nothing)
    assert run_seed(calm(**FORKED), SEED).invariant == "loaded_is_trained"


async def _nothing(self: SimTrainer, directory: Path) -> ResumeState:
    """It says that it has the checkpoint, and has the model of the start."""
    return decode(self.world.models[str(directory)].extra[RESUME_FILE])


def test_log_time_that_stands_still_or_goes_back() -> None:
    log_time = LogTime()
    log_time.coordinator_started(StateMachine(), 50)
    log_time.observe(at(1, time_ns=0), 50)
    log_time.observe(at(2, time_ns=20), 70)
    assert broken(lambda: log_time.observe(at(3, time_ns=20), 80)) == "log_time_goes_on"
    assert broken(lambda: log_time.observe(at(3, time_ns=19), 70)) == "log_time_goes_on"


@pytest.mark.parametrize(
    ("swarm", "alone"),
    [
        (config("node-silent", **SMALL), None),  # its machine is given up while it speaks
        (config("machine-lost", seconds=60.0, **SMALL), 0),  # said to be alone, and is not
    ],
)
def test_node_whose_silence_is_misjudged(
    swarm: Choices, alone: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_node = FailureDetector._judge_node
    monkeypatch.setattr(
        FailureDetector, "_judge_node", lambda self, node, ms, _: judge_node(self, node, ms, alone)
    )
    found = [run_seed(swarm, seed) for seed in range(12)]
    assert "machine_is_silent" in [outcome.invariant for outcome in found]


def test_who_is_silent_for_the_long_lease_is_given_up_whoever_else_is_silent(world: World) -> None:
    """Its event says whole milliseconds: as many as the lease has, of silence beyond it."""
    leases, long_ms = Leases(world), world.scenario.config.coordinator.node_lease_ms
    leases._members = {f"node-{n}": [(f"relay-{n}/1", "relay")] for n in range(3)}
    leases._most_are_heard("relay-0", long_ms)
    early = broken(lambda: leases._most_are_heard("relay-0", long_ms - 1))
    assert early == "silent_majority_is_waited_for"
