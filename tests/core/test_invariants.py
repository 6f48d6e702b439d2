"""Every invariant can fail: a sound state, damaged in one place, is found by the right one."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from laminar.core import invariants
from laminar.core.state.evaluation_scores import EvaluationCounts, PromptScores
from laminar.core.state.evaluations import Evaluation
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase, TrajectoryStatus
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId
from laminar.names.roles import Role
from tests.core.repack.test_migration import moving
from tools.kit.bench import Bench, start_bench

FIRST = TrajectoryId("0.0.0")


def working() -> State:
    """Replicas on three machines generate; the trainer waits."""
    bench = start_bench(replicas=2, nodes=3, max_staleness=1, save_freq=1)
    return bench.state


def idle() -> State:
    """Nothing runs, nothing is finished, and prompts are left: what must never come about."""
    bench = start_bench(replicas=1, capacity=4, max_staleness=1, num_train=2, total_steps=0)
    bench.complete(*bench.open_groups())
    bench.train()
    bench.write_ends()
    bench.load_all()
    state = bench.state
    state.run.phase = "running"
    state.orders.timers["batch-timeout"] = 1
    state.orders.commands.clear()
    state.data.num_train = 40
    return state


def token_appears(state: State) -> None:
    state.work.ledger.tokens.issued += 1


def group_disappears(state: State) -> None:
    state.work.ledger.groups.issued -= 1


def runs_twice(state: State) -> None:
    one, two, *_ = state.members.replicas.values()
    two.running[FIRST] = one.running[FIRST]


def handed_over() -> State:
    """rollout-0 gives a trajectory away to rollout-1."""
    return moving().state


def comes_to_nobody(state: State) -> None:
    next(iter(state.repack.progress.values())).destination = "rollout-0"


def given_away_by_nobody(state: State) -> None:
    packing = state.members.replicas["rollout-0"].repack
    assert packing is not None
    packing.outgoing.clear()


def runs_under_an_old_placement(state: State) -> None:
    state.work.trajectories[FIRST].placement += 1


def runs_nowhere(state: State) -> None:
    del state.members.replicas["rollout-0"].running[FIRST]


def deadline_forgotten(state: State) -> None:
    state.work.deadlines.clear()


def flat_group_waits_for_a_batch(state: State) -> None:
    state.settings = msgspec.structs.replace(state.settings, filter_metric="score")
    group = next(iter(state.work.groups.values()))
    for member in group.members:
        trajectory = state.work.trajectories[member]
        trajectory.status, trajectory.reward_bits = TrajectoryStatus.REWARDED, 0
    state.work.ready[group.id] = None


def trained_too_late(state: State) -> None:
    state.steps.staleness_max = 9


def command_to_a_fenced_process(state: State) -> None:
    state.members.actors["rollout-0"].incarnation += 1


def command_to_another_role(state: State) -> None:
    state.members.actors["rollout-0"].role = Role.STORE


def work_without_a_command(state: State) -> None:
    del state.orders.commands[f"generate:{FIRST}"]


def work_that_nobody_watches(state: State) -> None:
    del state.orders.timers["progress:rollout-0"]


def command_without_a_deadline(state: State) -> None:
    command = cmd.PinVersion(to="relay-0", version=0)
    outstanding = state.orders.commands[f"generate:{FIRST}"]
    state.orders.commands["pin"] = msgspec.structs.replace(outstanding, command=command)


def loading_without_a_pull(state: State) -> None:
    state.members.replicas["rollout-1"].loading = True


def no_clock_for_the_batch(state: State) -> None:
    del state.orders.timers["batch-timeout"]


def lost_work_that_nobody_places(state: State) -> None:
    state.work.lost[FIRST] = None


def version_from_nowhere(state: State) -> None:
    state.versions.newest = 99


def replica_ahead(state: State) -> None:
    state.members.replicas["rollout-1"].version = 99
    state.members.replicas["rollout-1"].running.clear()


def batch_lost(state: State) -> None:
    state.steps.chosen += 1


def timer_set_by_hand(state: State) -> None:
    state.orders.timers["resume:0.0.0"] = 1


def relay_in_no_chain(state: State) -> None:
    state.members.relay_chain.remove("relay-1")


def relay_feeds_another(state: State) -> None:
    state.members.relays["relay-0"].successor = "relay-2"


def chain_begins_elsewhere(state: State) -> None:
    state.members.relay_chain.reverse()


def relay_that_nobody_watches(state: State) -> None:
    state.members.relays["relay-2"].newest = -1


def head_that_is_not_fed(state: State) -> None:
    state.members.relays["relay-0"].newest = -1


def trainer_without_a_relay(state: State) -> None:
    state.members.relay_chain.clear()
    state.members.relays.clear()


def relay_ahead(state: State) -> None:
    state.members.relays["relay-1"].newest = 99


def holder_forgotten(state: State) -> None:
    state.members.relays["relay-1"].held = []


def evaluation_of_two(state: State, **changes: object) -> None:
    """One answer was right, the other one is still to be asked for."""
    held = EvaluationCounts(prompts={0: PromptScores(answers=1, correct=1)})
    values = {"queue": [1], "total": 2, "done": 1, "correct": 1, "counts": held}
    found = Evaluation(index=0, version=0, step=0, final=False, **(values | changes))  # type: ignore[arg-type]
    state.evaluations.running = found


def answer_without_a_score(state: State) -> None:
    evaluation_of_two(state, done=2, queue=[])


def answer_counted_as_wrong(state: State) -> None:
    evaluation_of_two(state, correct=0)


def answer_that_nobody_is_asked_for(state: State) -> None:
    evaluation_of_two(state, queue=[])


def trainer_that_nobody_awaits(state: State) -> None:
    state.members.actors["trainer-0"].ready = False


def nothing_is_awaited(state: State) -> None:
    state.orders.timers.clear()


DAMAGES: dict[Callable[[State], None], Callable[[State], None]] = {
    token_appears: invariants.ledger_balances,
    group_disappears: invariants.ledger_balances,
    runs_twice: invariants.trajectory_in_one_place,
    runs_under_an_old_placement: invariants.trajectory_in_one_place,
    flat_group_waits_for_a_batch: invariants.batches_have_variance,
    runs_nowhere: invariants.trajectory_in_one_place,
    deadline_forgotten: invariants.staleness_within_bound,
    trained_too_late: invariants.staleness_within_bound,
    command_to_a_fenced_process: invariants.commands_have_living_owners,
    command_to_another_role: invariants.commands_have_living_owners,
    work_without_a_command: invariants.every_wait_has_an_owner,
    work_that_nobody_watches: invariants.every_wait_has_an_owner,
    command_without_a_deadline: invariants.commands_have_deadlines,
    loading_without_a_pull: invariants.every_wait_has_an_owner,
    nothing_is_awaited: invariants.some_wait_is_listed,
    no_clock_for_the_batch: invariants.no_standstill,
    lost_work_that_nobody_places: invariants.lost_work_takes_room,
    version_from_nowhere: invariants.versions_monotonic,
    replica_ahead: invariants.versions_monotonic,
    batch_lost: invariants.versions_monotonic,
    timer_set_by_hand: invariants.indexes_match_state,
    relay_in_no_chain: invariants.relay_chain_is_path,
    relay_feeds_another: invariants.relay_chain_is_path,
    chain_begins_elsewhere: invariants.relay_chain_is_path,
    relay_that_nobody_watches: invariants.every_wait_has_an_owner,
    head_that_is_not_fed: invariants.every_wait_has_an_owner,
    trainer_without_a_relay: invariants.every_wait_has_an_owner,
    relay_ahead: invariants.versions_monotonic,
    trainer_that_nobody_awaits: invariants.trainer_comes_back,
    comes_to_nobody: invariants.moves_are_whole,
    given_away_by_nobody: invariants.moves_are_whole,
    holder_forgotten: invariants.indexes_match_state,
    answer_without_a_score: invariants.evaluation_adds_up,
    answer_counted_as_wrong: invariants.evaluation_adds_up,
    answer_that_nobody_is_asked_for: invariants.evaluation_adds_up,
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_found(damage: Callable[[State], None]) -> None:
    invariant = DAMAGES[damage]
    state = handed_over() if invariant is invariants.moves_are_whole else working()
    invariant(state)
    damage(state)
    with pytest.raises(AssertionError):
        invariant(state)


def test_an_evaluation_that_adds_up_is_sound() -> None:
    state = working()
    evaluation_of_two(state)
    invariants.evaluation_adds_up(state)
    evaluation_of_two(state, counts=None, correct=0)  # of an older log
    invariants.evaluation_adds_up(state)


def test_every_invariant_is_damaged_here() -> None:
    assert set(DAMAGES.values()) == set(invariants.ALL)


def admits_and_got_nothing(state: State) -> str:
    return "an empty admitting replica got no work"


def newest_version_is_closed(state: State) -> str:
    """Three groups of an older version hold it back, and nobody works on them."""
    state.members.replicas["rollout-0"].step = -5
    return "the newest version does not admit"


def enough_unchosen_but_unfinished(state: State) -> str:
    state.work.deadlines = {9: 2}
    return "replicas and trainer are idle with data left"


@pytest.mark.parametrize(
    "situation", [admits_and_got_nothing, newest_version_is_closed, enough_unchosen_but_unfinished]
)
def test_standstill_is_found_and_named(situation: Callable[[State], str]) -> None:
    state = idle()
    reason = situation(state)
    with pytest.raises(AssertionError, match=re.escape(reason)):
        invariants.no_standstill(state)


def at_the_end(phase: Phase) -> State:
    """A run of one step that is in this phase."""
    bench = Bench(capacity=4, groups_per_step=1, max_staleness=0, total_steps=1, num_eval=1)
    if phase == Phase.STARTING:
        return bench.state
    bench.start()
    bench.complete(bench.open_groups()[0])
    if phase == Phase.RUNNING:
        return bench.state  # the batch is trained
    bench.train()
    if phase != Phase.EXPORTING:
        bench.say("trainer-0", ev.ModelExported(version=2, path="export"))
        bench.publish(2, 1)
    if phase in (Phase.ENDING, Phase.STOPPING):
        bench.own(ev.DrainRequested(reason="SIGINT"))
    if phase == Phase.STOPPING:
        bench.write_ends()
    assert bench.state.run.phase == phase
    return bench.state


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase != Phase.ENDED])
def test_a_run_in_which_nothing_is_under_way_stands_still_in_every_phase(phase: Phase) -> None:
    state = at_the_end(phase)
    invariants.no_standstill(state)
    state.orders.commands.clear()
    state.orders.timers.clear()
    for replica in state.members.replicas.values():
        replica.loading = False
    with pytest.raises(AssertionError):
        invariants.no_standstill(state)


def test_a_last_evaluation_of_other_weights_than_the_export_is_a_standstill() -> None:
    state = at_the_end(Phase.FINAL_EVALUATION)
    state.evaluations.due = -1
    evaluation_of_two(state)
    with pytest.raises(AssertionError, match="the export will not be evaluated"):
        invariants.no_standstill(state)


def test_without_a_replica_one_is_awaited() -> None:
    state = idle()
    state.members.replicas.clear()
    with pytest.raises(AssertionError, match="no replica serves, and none is awaited"):
        invariants.no_standstill(state)
