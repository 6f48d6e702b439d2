"""The table of waits: each wait of a run has an owner, an event, a beginning and an end."""

from __future__ import annotations

from laminar.core.waits import MS, Wait, list_awaited_processes, list_waits
from laminar.events import events as ev
from laminar.names.roles import Role
from tools.kit.bench import Bench, start_bench


def waits_of(bench: Bench) -> dict[str, Wait]:
    """The waits by event; the first of each."""
    found: dict[str, Wait] = {}
    for wait in list_waits(bench.state):
        found.setdefault(wait.event, wait)
    return found


def test_a_start_waits_for_every_role_that_is_missing() -> None:
    bench = Bench()
    owners = {wait.owner: wait for wait in list_waits(bench.state)}
    assert set(owners) == {Role.STORE, Role.RELAY, Role.TRAINER, Role.ROLLOUT}
    assert {wait.event for wait in owners.values()} == {"actor-joined"}
    bench.join("store-0")
    store = next(wait for wait in list_waits(bench.state) if wait.owner == "store-0")
    assert (store.event, store.then) == ("data-loaded", "the run ends")
    assert store.key == "coordinator.start_timeout_s"
    assert store.until_ns == bench.settings.start_timeout_ms * MS and store.since_ns == 0


def test_generation_is_one_wait_per_replica_and_feeds_the_batch() -> None:
    bench = start_bench(replicas=2)
    waits = list_waits(bench.state)
    tokens = {w.owner: w for w in waits if w.event == "trajectory-finished"}
    assert set(tokens) == {"rollout-0", "rollout-1"}
    running = len(bench.replica("rollout-0").running)
    assert tokens["rollout-0"].what == f"tokens of {running} responses of version 0"
    assert tokens["rollout-0"].then == "rollout-0 is restarted"
    assert tokens["rollout-0"].cause in range(1, bench.seq + 1)
    batch = next(w for w in waits if w.key == "trainer.batch_timeout_s")
    assert (batch.waiter, batch.event) == ("step 1", "trajectory-rewarded")
    assert batch.owner == bench.trajectory("0.0.0").replica and "group 0.0" in batch.what


def test_the_deadline_of_a_silent_replica_is_when_it_is_restarted() -> None:
    bench = start_bench(stall_ms=30_000)
    wait = waits_of(bench)["trajectory-finished"]
    assert wait.until_ns is not None
    bench.wait((wait.until_ns - bench.now_ms * MS) // MS)
    restart = waits_of(bench)["process-exited"]
    assert (restart.owner, restart.then) == ("node-0", "rollout-0 is given up")
    assert "rollout-0: sampled nothing" in restart.what
    assert restart.since_ns == bench.now_ms * MS


def test_a_step_waits_for_the_trainer_and_begins_with_its_cause() -> None:
    bench = start_bench(save_freq=1)
    bench.wait(1_000)
    bench.complete("0.0", "0.1")
    wait = waits_of(bench)["step-completed"]
    assert (wait.waiter, wait.owner) == ("step 1", "trainer-0")
    assert wait.what == "a batch of 4 responses" and wait.then == "trainer-0 is restarted"
    assert wait.since_ns == bench.now_ms * MS and wait.cause == bench.seq and not wait.key


def test_without_checkpoints_a_late_step_ends_the_run() -> None:
    bench = start_bench(save_freq=0)
    bench.complete("0.0", "0.1")
    assert waits_of(bench)["step-completed"].then == "the run ends"


def test_a_lost_process_is_awaited_from_its_node_and_then_from_itself() -> None:
    bench = start_bench(save_freq=1)
    bench.kill("trainer-0")
    lost = waits_of(bench)["actor-joined"]
    assert (lost.owner, lost.what) == ("node-0", "trainer-0, which was lost")
    assert lost.then == "the run ends"
    assert list_awaited_processes(bench.state) == ["trainer-0"]
    bench.join("trainer-0", "b")
    assert waits_of(bench)["trainer-ready"].owner == "trainer-0"
    assert list_awaited_processes(bench.state) == []


def test_lost_work_waits_for_its_version() -> None:
    bench = start_bench(replicas=2)
    bench.complete(*bench.open_groups()[:2])
    bench.train()
    bench.write_ends()
    running = len(bench.replica("rollout-1").running)
    bench.kill("rollout-1")
    waits = [w for w in list_waits(bench.state) if w.key == "recovery.resume_timeout_ms"]
    assert running and len(waits) == len(bench.state.work.lost)
    assert all(w.then == "it starts over" and w.event == "weights-loaded" for w in waits)


def test_ends_wait_for_the_store_and_a_publish_for_the_relay() -> None:
    bench = start_bench()
    bench.complete("0.0", "0.1")
    bench.train(publish=False)
    ends, weights = (
        waits_of(bench)[event] for event in ("trajectories-ended", "weights-published")
    )
    assert (ends.owner, ends.what) == ("store-0", "the ends of 4 responses")
    assert (weights.owner, weights.what) == ("relay-0", "version 1 from the trainer")


def test_a_pause_waits_for_the_responses_and_an_ended_run_for_nothing() -> None:
    bench = start_bench(save_freq=2, max_staleness=1)
    bench.complete("0.0", "0.1")
    bench.train()
    bench.own(ev.DrainRequested(reason="limit", pause=True, response_timeout_ms=5_000))
    assert bench.replica().running
    pausing = [w for w in list_waits(bench.state) if w.waiter == "the pause"]
    assert {w.until_ns for w in pausing} == {bench.now_ms * MS + 5_000 * MS}
    bench.own(ev.DrainRequested(reason="now", at_once=True))
    bench.stop()
    assert list_waits(bench.state) == []
