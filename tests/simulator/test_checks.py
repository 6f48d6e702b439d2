"""Each check can fail: what it looks at is falsified, and it says so by its name.

Promises that a planted bug of the product breaks are in tools/check/rows/planted.txt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from laminar.actors.admission_requests import AdmissionRequests
from laminar.actors.rollout import Rollout
from laminar.actors.service_clients import StoreClient
from laminar.actors.store import Store
from laminar.core.state.failures import Failure, FailureKind
from laminar.core.state.scores import bits_of
from laminar.core.state.state import State
from laminar.engines.emulated.fake_tokens import make_tokens
from laminar.engines.protocol import WeightSource
from laminar.eventlog.record import EventRecord
from laminar.eventlog.replay import decode_stamped
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Event, Stamped
from laminar.names import exit_codes
from laminar.names.ids import Purpose, TrajectoryId
from laminar.storage import messages as m
from laminar.storage import rules
from tools.kit.bench import Bench, only
from tools.kit.sim_worlds import PACKED, calm, config, ran, records
from tools.simulator.checks import final_checks
from tools.simulator.checks.durability import reported_is_stored
from tools.simulator.checks.moves import share_is_kept
from tools.simulator.faults.effects import LOST
from tools.simulator.machine.memory import ReachableWeights
from tools.simulator.run import make_world, run_seed
from tools.simulator.runtime.coordinator import SimCoordinator
from tools.simulator.runtime.violation import Violation
from tools.simulator.world import World

SMALL = {"replicas": 4, "num_train": 40, "total_training_steps": 3, "val_size": 5}


@pytest.fixture(scope="module")
def world() -> World:
    return ran(calm(**SMALL), seed=3)


def broken(check: Callable[[], object]) -> str:
    with pytest.raises(Violation) as violation:
        check()
    return violation.value.invariant


def test_a_run_that_kept_everything_passes_again(world: World) -> None:
    assert world.checks.judge()


def test_row_without_an_end(world: World) -> None:
    rows = dict(world.rows)
    name = next(iter(rows))
    rows[name] = rows[name]._replace(end=None)
    state = world.coordinator.state
    assert state is not None
    assert broken(lambda: final_checks.books_are_closed(state, rows)) == "books_are_closed"


def test_words_that_the_store_does_not_bear_out(world: World) -> None:
    """Of what is not there, is not so far, or has other numbers; and none of what is right."""
    row = next(row for row in world.rows.values() if row.end == "trained")
    score, reason = rules.decode_reward(row.reward_bits) or 0.0, row.reward_reason or ""
    name = TrajectoryId(row.id)
    finished = ev.TrajectoryFinished(
        trajectory_id=name, placement=1, num_tokens=row.num_tokens, finish_reason="stop"
    )
    rewarded = ev.TrajectoryRewarded(
        trajectory_id=name,
        placement=1,
        reward_bits=bits_of(score),
        correct=False,
        reason=reason,
        num_tokens=row.num_tokens,
        truncated=False,
    )
    ended = ev.EndedTrajectory(trajectory_id=name, num_tokens=row.num_tokens, tokens_lost=0)
    cases = (
        (finished, {"status": "open"}, {"num_tokens": 99_999}),
        (rewarded, {"reward_bits": None}, {"reward_reason": "x"}, {"reward_bits": b"\1" * 8}),
        (ev.TrajectoriesEnded(command_id=1, ended=(ended,)), {"end": None}, {"num_tokens": 0}),
    )
    for event, *changes in cases:
        reported_is_stored(event, world.rows, False)
        wrong = [{}, *({row.id: row._replace(**change)} for change in changes)]
        for rows in wrong:
            assert broken(partial(reported_is_stored, event, rows, False)) == "reported_is_stored"


@pytest.mark.parametrize(
    ("environment", "change", "stored"),
    [
        (True, {"placement": 4, "num_tokens": 0, "tokens_lost": 50}, True),
        (True, {"placement": 4, "num_tokens": 70, "turns": 1}, True),
        (True, {"placement": 4, "num_tokens": 20, "tokens_lost": 20}, False),
        (True, {"placement": 1, "num_tokens": 0, "tokens_lost": 50}, False),
        (True, {"placement": 1, "num_tokens": 49, "turns": 1}, False),
        (False, {"placement": 4, "num_tokens": 0, "tokens_lost": 50}, False),
    ],
)
def test_a_late_report_of_a_turn(
    world: World, environment: bool, change: dict[str, object], stored: bool
) -> None:
    """Its response may have begun again behind that turn, in another placement; its tokens are
    lost then, and counted."""
    row = next(row for row in world.rows.values() if row.end == "trained")
    finished = ev.TrajectoryFinished(
        trajectory_id=TrajectoryId(row.id), placement=1, num_tokens=50, finish_reason="stop"
    )
    rows = {row.id: row._replace(status="open", end=None, **change)}
    check = partial(reported_is_stored, finished, rows, environment)
    if stored:
        check()
    else:
        assert broken(check) == "reported_is_stored"


@pytest.mark.parametrize(
    "change", [{"num_tokens": 99_999}, {"end": "dropped"}, {"end": "trained"}, {}]
)
def test_books_that_differ(world: World, change: dict[str, object]) -> None:
    """One row has other tokens, or another end: of a trained one, and of an evaluated one; or the
    store does not know it."""
    purpose = "eval" if change.get("end") == "trained" else "train"
    rows = dict(world.rows)
    name = next(n for n, row in rows.items() if row.purpose == purpose and row.end != "dropped")
    row = rows.pop(name)
    if change:
        rows[name] = row._replace(**change)
    state, book = world.coordinator.state, world.checks.training.book
    assert state is not None
    assert broken(lambda: final_checks.two_books(state, rows, book)) == "two_books"


@pytest.mark.parametrize(
    ("metric", "scores", "end", "sound"),
    [
        ("score", (0.5, 0.5), "dropped", True),
        ("acc", (1.0, 2.0), "dropped", True),
        ("score", (1.0, 2.0), "dropped", False),
        ("acc", (0.5, 1.0), "dropped", False),
        ("score", (0.5,), "dropped", False),
        ("", (0.5, 0.5), "dropped", False),
        ("score", (1.0, 2.0), "trained", True),
        ("acc", (1.0, 2.0), "trained", False),
        ("score", (0.5, 0.5), "trained", False),
        ("score", (0.5,), "trained", True),
        ("", (0.5, 0.5), "trained", True),
    ],
)
def test_groups_that_a_filter_drops_and_keeps(
    world: World, metric: str, scores: tuple[float, ...], end: str, sound: bool
) -> None:
    """A group of siblings with these scores, all of them ended alike."""
    one = next(row for row in world.rows.values() if row.end == "trained")
    one = one._replace(end=end, end_reason="no-variance" if end == "dropped" else None)
    rows = {
        str(i): one._replace(id=str(i), reward_bits=rules.encode_reward(score))
        for i, score in enumerate(scores)
    }
    settings = replace(world.scenario.settings, filter_metric=metric)
    if sound:
        final_checks.groups_are_filtered(settings, rows)
    else:
        found = broken(lambda: final_checks.groups_are_filtered(settings, rows))
        assert found == "groups_are_filtered"


def test_work_that_is_missing() -> None:
    world = ran(calm(**SMALL), seed=3)
    state = world.coordinator.state
    assert state is not None
    state.steps.completed -= 1
    assert broken(lambda: final_checks.work_is_done(state)) == "work_is_done"
    state.steps.completed += 1
    state.evaluations.results.clear()
    assert broken(lambda: final_checks.work_is_done(state)) == "work_is_done"


def failed(world: World, kind: FailureKind, subject: str, cause: int) -> State:
    """Its last state says that it has failed so."""
    state = world.coordinator.state
    assert state is not None
    state.run.failed = Failure(kind, subject, cause)
    return state


def seq_of(world: World, wanted: type[Event], peer: str = "") -> int:
    """The first event of this kind in the log."""
    found = [decode_stamped(record) for record in records(world) if isinstance(record, EventRecord)]
    return next(s.seq for s in found if isinstance(s.event, wanted) and peer in ("", s.peer))


@pytest.mark.parametrize(
    ("kind", "cause", "said"),
    [
        (FailureKind.PROCESS_LOST, ev.ActorLeft, ""),
        (FailureKind.STOPPED, ev.ActorLeft, "ActorLeft causes no"),
        (FailureKind.PROCESS_LOST, None, "nothing in the log causes no"),
    ],
)
def test_failure_of_a_run_names_an_event_that_can_cause_it(
    kind: FailureKind, cause: type[Event] | None, said: str
) -> None:
    world = ran(calm(**SMALL), seed=3)
    seq = seq_of(world, cause, "store-0") if cause is not None else 10**6
    state = failed(world, kind, "store-0", seq)
    if not said:
        return world.checks.recoveries.run_failed_for_a_cause(state)
    with pytest.raises(Violation, match=said):
        world.checks.recoveries.run_failed_for_a_cause(state)


def test_books_stay_open_only_where_a_fault_has_ended_the_store() -> None:
    """The run had failed before; nobody can write what had no end by then."""
    with make_world(calm(**SMALL), 3) as world:
        world.begin()
        while not world.rows:
            world.scheduler.step()
        world.coordinator.report(ev.DrainRequested(reason="SIGINT", at_once=True))
        while not (world.coordinator.state and world.coordinator.state.run.failure):
            world.scheduler.step()
        world.processes["store-0"].die(exit_codes.FAILED)
        while not world.finished:
            world.scheduler.step()
        assert broken(lambda: world.checks.judge()) == "books_are_closed"
        world.faults.harm("store-0", LOST)
        assert world.checks.judge()


def test_relay_that_dies_too_often_before_it_has_joined() -> None:
    with make_world(calm(max_restarts=0, **SMALL), 3) as world:
        world.begin()
        world.network.cut("relay-0", COORDINATOR, +1)
        world.faults.harm("relay-0")
        relay = world.processes["relay-0"]
        while not relay.alive:
            world.scheduler.step()
        relay.die(exit_codes.KILLED)
        while not world.finished:
            world.scheduler.step()
        state = world.coordinator.state
        assert state is not None and state.run.failed is not None
        assert (state.run.failed.kind, state.run.failed.subject) == (
            FailureKind.NEVER_JOINED,
            "relay-0",
        )
        assert world.checks.judge()


def test_state_that_the_log_does_not_lead_to() -> None:
    world = ran(calm(**SMALL), seed=3)
    state = world.coordinator.state
    assert state is not None
    state.steps.staleness_sum += 1
    disk = world.coordinator.disk
    assert broken(lambda: final_checks.replay_equal(world.checks, disk, state)) == "replay_equal"


def test_event_that_was_sent_otherwise() -> None:
    world = ran(calm(**SMALL), seed=3)
    world.checks.bodies["rollout-0/1"][2] = b"another"
    assert (
        broken(lambda: final_checks.events_once(world.checks, world.coordinator.disk))
        == "events_once"
    )


def test_successor_in_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predecessor's state is changed behind its log's back just before it dies."""
    kill = SimCoordinator.kill

    def planted(coordinator: SimCoordinator) -> None:
        if coordinator.state is not None:
            coordinator.state.steps.staleness_sum += 1
        kill(coordinator)

    monkeypatch.setattr(SimCoordinator, "kill", planted)
    outcome = run_seed(config("coordinator-killed", **SMALL), 3)
    assert outcome.invariant == "same_state_as_before"


def test_tokens_of_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store loses the beginning of a response that goes on."""
    monkeypatch.setattr(
        "laminar.engines.emulated.clock_engine.make_tokens",
        lambda seed, start, end, ends: make_tokens(seed + (start > 0), start, end, ends=ends),
    )
    assert run_seed(calm(**SMALL), 3).invariant == "tokens_continue"


def test_work_that_was_taken_back_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's answer comes after the abort and the pull, and the replica does not look."""

    def planted(openings: AdmissionRequests, command: cmd.GenerateTrajectory) -> bool:
        order = cmd.Envelope(command_id=0, cause=0, command=command)
        openings._waiting[command.trajectory_id] = (order, command)
        return True

    ask = StoreClient.send_request

    async def late(client: StoreClient, request: Any, answer: Any) -> Any:
        reply = await ask(client, request, answer)
        if isinstance(request, m.Open):
            await asyncio.sleep(3.0)
        return reply

    monkeypatch.setattr(StoreClient, "send_request", late)
    monkeypatch.setattr(AdmissionRequests, "_is_wanted", planted)
    swarm = config("replica-dies", events_max=8_000)
    outcomes = (run_seed(swarm, seed) for seed in range(20))
    found = next(outcome for outcome in outcomes if outcome.invariant)
    assert found.invariant == "nothing_raises" and "needs version" in found.details


def test_a_release_is_reported_before_the_store_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def planted(rollout: Rollout, *, everything: bool = True) -> None:
        if not everything:
            await flush(rollout, everything=everything)

    flush = Rollout._flush
    monkeypatch.setattr(Rollout, "_flush", planted)
    assert run_seed(calm(**PACKED), 1).invariant == "released_is_stored"


def test_an_engine_that_keeps_its_former_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    digest_of = ReachableWeights.digest_of

    def planted(weights: ReachableWeights, source: WeightSource) -> str:
        kept[weights] = kept.get(weights, "") or digest_of(weights, source)
        return kept[weights]

    kept: dict[ReachableWeights, str] = {}  #: of each boot
    monkeypatch.setattr(ReachableWeights, "digest_of", planted)
    assert run_seed(calm(**SMALL), 3).invariant == "generated_by_its_version"


def test_a_share_is_kept_by_what_runs_when_new_groups_are_given() -> None:
    """Held-out prompts that are given after them take what room there is."""
    bench = Bench(repack_policy="gain", groups_per_step=1, num_eval=2)
    given = only(cmd.GenerateTrajectory, bench.start())
    asked = [replace(c, purpose=Purpose.EVAL, trajectory_id=f"e{c.trajectory_id}") for c in given]
    bench.replica().running |= dict.fromkeys((c.trajectory_id for c in asked), 1)
    share_is_kept([*given, *asked], bench.state)
    assert broken(lambda: share_is_kept([*asked, *given], bench.state)) == "share_is_kept"


@pytest.mark.parametrize("end", ["cut off", "silent", "left"])
def test_a_death_on_a_silent_machine_or_after_leaving_is_blamed_on_no_prompt(end: str) -> None:
    """One replica died while its machine was silent, or left; three others of the same prompt."""
    with make_world(calm(nodes=1, **SMALL), 3) as world:
        world.begin()
        checks, names = world.checks, [f"rollout-{i}" for i in range(4)]
        while not {name for name, _ in checks.boots} >= set(names):
            assert world.scheduler.step()
        (key,) = (key for key in checks.boots if key[0] == names[0])
        lost = coordinator_says(
            ev.HeartbeatLost(
                actor=key[0], actor_incarnation=key[1], silent_ms=8_000, cut_off=end == "cut off"
            )
        )
        if end == "left":
            lost = replace(lost, peer=key[0], incarnation=key[1], event=ev.ActorLeft())
        state = world.coordinator.state
        assert state is not None
        checks._learn_fences(lost, state)
        for placement, name in enumerate(names[:3], 1):
            checks.poisoned(generates(name, placement), "node-0")
        if end != "silent":
            checks.poisoned(generates(names[3], 4), "node-0")
        else:
            last = generates(names[3], 4)
            assert broken(lambda: checks.poisoned(last, "node-0")) == "poison_is_quarantined"


def coordinator_says(event: Event) -> Stamped:
    return Stamped(seq=1, time_ns=0, peer=COORDINATOR, incarnation=0, peer_seq=0, event=event)


def generates(to: str, placement: int) -> cmd.GenerateTrajectory:
    (first, *_) = only(cmd.GenerateTrajectory, Bench().start())
    return replace(first, to=to, placement=placement)


def test_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers no EndTrajectories, and nothing gives up on it in time."""
    monkeypatch.setattr(Store, "handle_orders", lambda *_: None)
    outcome = run_seed(calm(quiet_s=60.0, **SMALL), 3)
    assert outcome.invariant == "progress" and "outstanding: end:" in outcome.details


def test_endless_run() -> None:
    outcome = run_seed(calm(events_max=100, **SMALL), 3)
    assert outcome.invariant == "progress" and "within 100 events" in outcome.details


def test_a_slow_run_with_many_gauges_is_not_endless() -> None:
    outcome = run_seed(calm(events_max=400, **SMALL | {"progress_interval_ms": 200}), 3)
    assert not outcome.invariant and outcome.events > 400


def test_processes_that_only_wake_up() -> None:
    """A clock that something pushes on by a nanosecond at a time never comes to a quiet end."""
    world = make_world(calm(**SMALL), 3)

    def wake() -> None:
        world.scheduler.after(1, wake)

    world.scheduler.after(1, wake)
    with pytest.raises(Violation, match="calls led to"):
        world.run()
