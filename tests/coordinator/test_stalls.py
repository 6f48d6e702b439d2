"""Stalls: a run that stands still is noticed, a run that works or waits in time is not."""

from __future__ import annotations

import msgspec
import pytest

from laminar.coordinator.stalls import StallDetector
from laminar.core.state.failures import FailureKind
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Event, Stamped
from tests.core.steps.test_step_replay import checkpoint, come_back, save
from tests.core.steps.test_step_replay import run as trained_bench
from tools.kit.bench import Bench, only, start_bench
from tools.kit.sim_worlds import calm, ran

SECOND = 1_000_000_000
STALL_S = 300


class Watched:
    """A run under test, watched as by a coordinator that makes a turn each second."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.detector = StallDetector(STALL_S * SECOND, self.time_ns)

    @property
    def time_ns(self) -> int:
        return self.bench.now_ms * 1_000_000

    def note(self, peer: str, event: Event) -> None:
        """Let the core handle an event, and the detector note it."""
        if peer == COORDINATOR:
            self.bench.own(event)
        else:
            self.bench.say(peer, event)
        stamped = Stamped(
            seq=self.bench.seq, time_ns=self.time_ns, peer=peer, incarnation=1, peer_seq=0,
            event=event,
        )  # fmt: skip
        self.detector.observe(stamped, self.bench.state)

    def pass_time(self, seconds: int) -> list[tuple[int, ev.RunStalled]]:
        """Let time pass; return the stalls with the seconds after which each was found."""
        found = []
        for second in range(1, seconds + 1):
            self.bench.wait(1_000)
            if stalled := self.detector.judge(self.bench.state, self.time_ns):
                found.append((second, stalled))
                self.note(COORDINATOR, stalled)
        return found


def training(**settings: int) -> Watched:
    """The trainer has a batch; no replica may begin another group."""
    bench = start_bench(max_staleness=0, **{"save_freq": 1, **settings})
    bench.complete("0.0", "0.1")
    bench.write_ends()
    return Watched(bench)


def test_a_trainer_that_does_nothing_is_named_and_restarted_after_the_stalls_time() -> None:
    run = training()
    ((second, stalled),) = run.pass_time(STALL_S + 1)
    assert second == STALL_S and stalled.idle_ms == STALL_S * 1000
    assert (stalled.awaited, stalled.owner, stalled.waiter) == (
        "step-completed", "trainer-0", "step 1",
    )  # fmt: skip
    (order,) = only(cmd.RestartActor, run.bench.commands)
    assert order.actor == "trainer-0" and "coordinator.stall_timeout_s" in order.reason


def test_a_second_stall_at_the_same_step_ends_the_run_which_can_be_resumed() -> None:
    run = training()
    run.pass_time(STALL_S)
    run.bench.kill("trainer-0")
    run.bench.come_back("trainer-0")
    assert run.bench.state.orders.commands.keys() >= {"train"}
    run.detector.observe(_joined(run.bench), run.bench.state)
    assert run.pass_time(STALL_S - 1) == []
    assert len(run.pass_time(2)) == 1
    failed = run.bench.state.run.failed
    assert failed is not None and failed.kind == FailureKind.STALLED
    assert failed.subject == "trainer-0" and run.bench.state.run.stopped


def _joined(bench: Bench) -> Stamped:
    return Stamped(
        seq=bench.seq, time_ns=bench.now_ms * 1_000_000, peer="trainer-0", incarnation=2,
        peer_seq=1, event=bench.trainer_ready(),
    )  # fmt: skip


def test_without_checkpoints_the_first_stall_ends_the_run() -> None:
    run = training(save_freq=0)
    run.pass_time(STALL_S)
    failed = run.bench.state.run.failed
    assert failed is not None and failed.kind == FailureKind.STALLED
    assert only(cmd.RestartActor, run.bench.commands) == []


def test_a_step_of_twenty_minutes_is_no_stall_as_long_as_passes_are_counted() -> None:
    run = training()
    for count in range(1, 17):
        assert run.pass_time(STALL_S // 4) == []
        run.note("trainer-0", ev.WorkProgress(count=count))
    assert run.bench.now_ms >= 1_200_000
    ((second, _),) = run.pass_time(STALL_S)
    assert second == STALL_S


@pytest.mark.parametrize(("reports", "noticed"), [(0, STALL_S), (1, STALL_S + 200)])
def test_a_checkpoint_is_loaded_as_long_as_its_bytes_are_counted(
    reports: int, noticed: int
) -> None:
    bench = trained_bench(3, in_training=True, max_staleness=0)
    bench.load_all()
    save(bench, 1)
    bench.kill("trainer-0")
    come_back(bench, checkpoint(bench, 1))
    run = Watched(bench)
    for count in range(1, reports + 1):
        assert run.pass_time(200) == []
        run.note("trainer-0", ev.WorkProgress(count=count))
    ((second, stalled),) = run.pass_time(STALL_S)
    assert second + 200 * reports == noticed
    assert (stalled.awaited, stalled.owner) == ("checkpoint-loaded", "trainer-0")


def test_a_run_in_which_nothing_is_awaited_is_held_up_by_the_coordinator() -> None:
    run = training()
    run.bench.state.orders.timers.clear()
    ((second, stalled),) = run.pass_time(STALL_S)
    assert second == STALL_S and (stalled.owner, stalled.waiter) == (COORDINATOR, "step 2")
    failed = run.bench.state.run.failed
    assert failed is not None and "none is outstanding" in failed.detail


def test_a_wait_within_its_own_deadline_is_no_stall_but_one_that_is_set_again_is() -> None:
    """The trainer waits for a batch, the replica for a reward: both are limited by settings."""
    bench = start_bench(max_staleness=0, save_freq=1, batch_timeout_ms=500_000, stall_ms=10**9)
    for trajectory in list(bench.state.work.trajectories):
        bench.finish(trajectory)
    run = Watched(bench)
    assert run.pass_time(499) == []
    found = run.pass_time(700)
    assert found, "a reward that never comes is noticed in the end"
    assert found[0][1].owner == "rollout-0"


@pytest.mark.parametrize(("total", "noticed"), [(5, 400), (6, 600)])
def test_tokens_are_movement_and_an_equal_gauge_is_not(total: int, noticed: int) -> None:
    """The wait for the batch, set again each 200 s, excuses until it has begun too late."""
    run = Watched(start_bench(max_staleness=0, stall_ms=10**9, batch_timeout_ms=200_000))
    gauge = ev.TokenProgress(tokens_total=5, kv_used_tokens=0, running=4, waiting=0)
    run.note("rollout-0", gauge)
    assert run.pass_time(250) == []
    run.note("rollout-0", msgspec.structs.replace(gauge, tokens_total=total))
    ((second, stalled),) = run.pass_time(noticed - 250)
    assert second == noticed - 250 and stalled.owner == "rollout-0"


@pytest.mark.parametrize("pause_s", [60, 3_000])
def test_a_coordinator_that_was_paused_has_seen_nothing(pause_s: int) -> None:
    run = training()
    run.pass_time(10)
    run.bench.now_ms += pause_s * 1000
    assert run.pass_time(STALL_S - 1) == []
    assert len(run.pass_time(2)) == 1


def test_a_simulated_run_with_steps_of_twenty_minutes_ends_without_a_stall() -> None:
    """Real actors in virtual time: the trainer reports its passes by itself."""
    settings = {"train_s": 1_200.0, "total_training_steps": 2, "save_freq": 1, "num_train": 16}
    world = ran(calm(**settings, test_freq=0, quiet_s=1e4))
    counts = world.coverage.counts
    assert world.scheduler.now > 1_200 * SECOND and counts["event:WorkProgress"] > 4
    assert not counts.get("event:RunStalled") and world.coordinator.state is not None
    assert not world.coordinator.state.run.failed


def test_trouble_is_no_movement_and_a_stale_report_changes_nothing() -> None:
    run = training()
    run.pass_time(STALL_S - 1)
    run.note("relay-0", ev.RelayLinked(command_id=1, successor=""))
    assert len(run.pass_time(1)) == 1
    before = len(run.bench.commands)
    run.bench.own(
        ev.RunStalled(
            awaited="step-completed", owner="trainer-0", owner_incarnation=77, waiter="step 1",
            what="a batch", idle_ms=1,
        )
    )  # fmt: skip
    assert len(run.bench.commands) == before
    assert run.bench.state.run.ignored["RunStalled: old-incarnation"] == 1


def test_a_run_that_starts_or_has_ended_is_not_watched() -> None:
    run = Watched(Bench(start_timeout_ms=10**9))
    assert run.pass_time(2 * STALL_S) == []
