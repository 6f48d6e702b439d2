"""laminar log why: what it says of stories that are known in every detail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.analysis.idleness import DOWN, NO_DATA, NO_WEIGHTS, PULLING, REPACKED, RUN_ENDING
from laminar.analysis.why import why
from laminar.analysis.windows import STALENESS_BOUND
from laminar.config import ConfigError
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId
from tests.analysis.conftest import Cli
from tests.analysis.told_bench import ToldBench
from tests.core.test_batches import STRATEGY

Ask = Callable[..., list[str]]


@pytest.fixture
def answer(tmp_path: Path) -> Ask:
    """Write the bench's log and ask."""

    def ask(bench: ToldBench, name: str, at: str = "") -> list[str]:
        run_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        return list(why(bench.write(run_dir), name, at))

    return ask


def pair(**changes: object) -> ToldBench:
    """Two replicas on version 0, one group of two siblings each, a batch is one group."""
    values: dict[str, object] = {
        "replicas": 2,
        "capacity": 2,
        "groups_per_step": 1,
        "max_staleness": 1,
        "resume_wait_ms": 3000,
    }
    bench = ToldBench(**(values | changes))
    bench.wait(500)
    bench.start()
    return bench


def opened(bench: ToldBench, trajectory: str, tokens: int) -> None:
    """Its replica has it, with tokens of the store."""
    t = bench.trajectory(trajectory)
    bench.say(
        t.replica,
        ev.TrajectoryStarted(
            trajectory_id=TrajectoryId(trajectory), placement=t.placement, tokens_resumed=tokens
        ),
    )


# --- why a trajectory moved ---------------------------------------------------------------------


def test_what_never_moved_says_where_it_was_and_how_it_ended(answer: Ask) -> None:
    bench = pair()
    bench.complete("0.1")
    bench.train()
    bench.wait(100)
    bench.write_ends()
    lines = answer(bench, "0.1.0")
    assert lines[0] == "0.1.0 never moved."
    assert "on rollout-1 with v0 at 0.500 s" in lines[1]
    assert "because of weights-loaded version=0 step=0 of rollout-1" in lines[1]
    assert "with 10 tokens (stop)" in lines[2]
    assert lines[3].startswith("It ended as trained by step 1 at 0.500 s")
    assert "At the end of the log it is open." in answer(bench, "0.0.0")


def test_a_move_at_once_names_the_loss_and_the_new_place(answer: Ask) -> None:
    """rollout-0 dies; rollout-1 has the same version and room."""
    bench = pair(capacity=4, max_staleness=0, groups_per_step=2)
    opened(bench, "0.0.0", 0)
    bench.wait(1500)
    bench.kill("rollout-0")
    lost = bench.last
    bench.wait(20)
    opened(bench, "0.0.0", 7)
    lines = answer(bench, "0.0.0")
    assert lines[0] == "0.0.0 moved once."
    assert lines[2] == "Placement 2:"
    assert lines[3] == (
        f"  rollout-0 lost it at {lost}: process-exited actor=rollout-0 code=-9 of node-0."
    )
    assert lines[4] == "  rollout-1 got it at once, by the same event."
    assert lines[5] == (
        "  It resumed: rollout-1 had v0, with which it was begun, and room. "
        f"It went on from 7 tokens of the store at {bench.last}."
    )


def test_a_move_that_had_to_wait_for_a_place(answer: Ask) -> None:
    """The survivor is full; it takes the lost answer when its own are done. Nothing was stored."""
    bench = pair(max_staleness=0, groups_per_step=2)
    bench.kill("rollout-0")
    lost = bench.last
    bench.wait(250)
    bench.finish("0.1.0")
    placed = bench.last
    bench.wait(10)
    opened(bench, "0.0.0", 0)
    lines = answer(bench, "0.0.0")
    assert f"rollout-0 lost it at {lost}" in lines[3]
    assert lines[4] == (
        f"  rollout-1 got it 0.250 s later, at {placed}, "
        "because of trajectory-finished trajectory=0.1.0 of rollout-1."
    )
    assert "The store held no token of it yet: the same attempt began again" in lines[5]
    assert "0.0.1" in answer(bench, "0.0.1")[0]
    assert answer(bench, "0.0.1")[-1] == "At the end of the log it is lost."


def test_started_over_because_no_place_turned_up_in_time(answer: Ask) -> None:
    bench = pair(capacity=4)
    bench.complete("0.1")
    bench.train()
    bench.load("rollout-1")
    bench.kill("rollout-0")
    bench.wait(3000)
    lines = answer(bench, "0.0.0")
    assert lines[4] == (
        f"  rollout-1 got it 3.000 s later, at 3.500 s (#{bench.seq - 1}), "
        "because of timer-fired timer=resume:0.0.0."
    )
    assert lines[5] == (
        "  It started over as attempt 2 with v1: no replica of v0 had room for it within 3 s "
        "(recovery.resume_wait_ms)."
    )


def test_started_over_because_its_version_was_gone(answer: Ask) -> None:
    bench = pair(capacity=4)
    bench.complete("0.1")
    bench.train(publish=False)
    bench.publish(1, 1, held=(1,))
    bench.load("rollout-1")
    bench.kill("rollout-0")
    lines = answer(bench, "0.0.0")
    assert lines[4] == "  rollout-1 got it at once, by the same event."
    assert "attempt 2 with v1: the relay no longer held v0" in lines[5]


def test_started_over_because_a_batch_had_waited_for_it(answer: Ask) -> None:
    bench = pair(replicas=1, max_staleness=0, batch_wait_ms=60_000)
    bench.wait(60_000)
    lines = answer(bench, "0.0.0")
    assert "rollout-0 lost it at 60.500 s" in lines[3]
    assert "timer-fired timer=batch-wait" in lines[3]
    assert "a batch had waited 60 s (trainer.batch_wait_s) for it" in lines[5]


def test_a_batch_gives_up_on_what_is_lost_already(answer: Ask) -> None:
    """Its replica died and nobody was there; then the batch's wait ended; then it came back."""
    bench = pair(replicas=1, max_staleness=0, batch_wait_ms=2000, resume_wait_ms=60_000)
    bench.kill("rollout-0")
    bench.wait(2000)
    bench.come_back()
    bench.load("rollout-0")
    lines = answer(bench, "0.0.0")
    assert "process-exited" in lines[3]
    assert "because of weights-loaded" in lines[4]
    assert "a batch had waited 2 s (trainer.batch_wait_s) for it" in lines[5]


def test_a_batch_moves_what_is_slow_to_a_free_replica(answer: Ask) -> None:
    bench = pair(max_staleness=0, batch_wait_ms=60_000, total_steps=1)
    bench.wait(60_000)
    lines = answer(bench, "0.0.0")
    assert "timer-fired timer=batch-wait" in lines[3]
    assert lines[5].startswith("  It resumed: rollout-1 had v0")
    assert "It was not opened there." in lines[5]


def test_a_move_by_repack_says_who_gave_it_away_and_why(answer: Ask) -> None:
    """Two replicas with a straggler each; one gives its own to the other and loads version 1."""
    bench = pair(
        capacity=8,
        groups_per_step=2,
        groups_per_version=1,
        max_staleness=2,
        repack_policy="best-fit",
        repack_interval_ms=1_000,
        repack_release_ms=2_000,
    )
    stragglers = [sorted(replica.running)[-1] for replica in bench.state.replicas.values()]
    for name in list(bench.state.trajectories):
        opened(bench, name, 0)
        if name not in stragglers:
            bench.finish(name)
            bench.reward(name)
    bench.train(publish=False)
    for name in bench.names:
        there = bench.replica(name)
        assert there.packing is not None
        gauge = ev.TokenProgress(
            tokens_total=9, kv_used_tokens=9, running=len(there.running), waiting=0,
            kv_capacity_tokens=1_000, max_batch=8, as_of=there.packing.asked,
        )  # fmt: skip
        bench.say(name, gauge)
    bench.publish(1, 1)
    source = next(r for r in bench.state.replicas.values() if r.given)
    moved = next(iter(source.given))
    number = bench.state.commands[f"release:{source.name}"].command_id
    bench.say(source.name, ev.TrajectoriesReleased(command_id=number))
    opened(bench, moved, 9)
    lines = answer(bench, moved)
    assert lines[0] == f"{moved} moved once."
    assert any(f"{source.name} gave it away at" in line for line in lines)
    assert any("kept room for it (repack). It went on from 9 tokens" in line for line in lines)


def test_moved_more_than_once(answer: Ask) -> None:
    bench = pair(replicas=3, capacity=4, max_staleness=0, groups_per_step=2)
    bench.kill("rollout-0")
    there = bench.trajectory("0.0.0").replica
    bench.kill(there)
    lines = answer(bench, "0.0.0")
    assert lines[0] == "0.0.0 moved 2 times."
    assert [line for line in lines if line.startswith("Placement")] == [
        "Placement 2:",
        "Placement 3:",
    ]


def test_a_lost_held_out_answer_runs_again_under_another_name(answer: Ask) -> None:
    bench = pair(num_eval=1, val_before_train=True, capacity=4)
    first = bench.trajectory("e0.0.0").replica
    bench.kill(first)
    bench.finish("0.1.0")
    lines = answer(bench, "e0.0.0")
    assert lines[0] == "e0.0.0 never moved."
    assert "ended as dropped (replica-lost)" in lines[-2]
    assert lines[-1] == "The evaluation ran its prompt again as e0.0-2.0."
    assert answer(bench, "e0.0-2.0")[0] == "e0.0-2.0 never moved."


# --- why a replica was idle ---------------------------------------------------------------------


def bound(bench: ToldBench) -> str:
    """rollout-1 runs dry after 1.5 s, 0.0 still runs; the time of the event that emptied it."""
    bench.wait(1000)
    bench.finish("0.1.0")
    bench.finish("0.1.1")
    return bench.last


def test_a_replica_that_the_bound_kept_idle(answer: Ask) -> None:
    """On-policy, a batch of two groups: nothing new until both are trained and published."""
    bench = pair(max_staleness=0, groups_per_step=2)
    begin = bound(bench)
    bench.reward("0.1.0")
    bench.reward("0.1.1")
    bench.wait(2000)
    bench.complete("0.0")
    chosen = bench.last
    bench.wait(700)
    bench.train()
    pull = bench.last
    bench.wait(30)
    bench.load("rollout-1")
    lines = answer(bench, "rollout-1")
    assert lines[0] == (
        f"rollout-1 ran nothing from {begin} to {bench.last}: 2.730 s, its longest idle time in "
        "the run."
    )
    assert lines[1] == "It began with trajectory-finished trajectory=0.1.1."
    assert lines[2] == (
        f"  {begin}, for 2.000 s, staleness-bound: a new group of its weights (made by 0 steps) "
        "would be due by step 1; the next batch to be chosen is that of step 1, so 2 groups fit "
        "until step 1, and 2 are there already"
    )
    assert lines[3].startswith(f"  {chosen}, for 0.700 s, staleness-bound: ")
    assert (
        "the next batch to be chosen is that of step 2, so 0 groups fit until step 1, and 0"
        in lines[3]
    )
    assert lines[4] == (
        f"  {pull}, for 0.030 s, pulling: it loads v1 or newer (purpose newer), ordered by "
        f"#{bench.seq - 1}"
    )
    assert lines[5] == (
        "It ended with weights-loaded version=1 step=1 of rollout-1: 0.2.0 and 1 more were "
        "dispatched to it."
    )
    assert "staleness-bound 2.700 s" in lines[6]


def test_what_it_waits_for_while_the_trainer_works(answer: Ask) -> None:
    """The trainer has the only batch that may be; the replica's next refusal says so."""
    bench = pair(replicas=1, max_staleness=0)
    bench.complete("0.0")
    ordered = bench.seq
    lines = answer(bench, "rollout-0", f"#{ordered}")
    assert f"the trainer has been working on step 1 since #{ordered}" in lines[3]
    assert lines[4] == "It lasts to the end of the log."


def test_the_time_that_is_asked_about(answer: Ask) -> None:
    bench = pair(max_staleness=0, groups_per_step=2)
    loaded = bench.seq
    begin = bound(bench)
    bench.wait(1000)
    bench.finish("0.0.0")
    assert f"from {begin}" in answer(bench, "rollout-1", "1.6")[0]
    assert f"from {begin}" in answer(bench, "rollout-1", f"#{bench.seq}")[0]
    busy = "rollout-1 was not idle at {}: it ran 2 trajectories of v0."
    assert answer(bench, "rollout-1", "0.9")[0] == busy.format("0.9")
    assert answer(bench, "rollout-1", f"#{loaded}")[0] == busy.format(f"#{loaded}")
    early = answer(bench, "rollout-1", "0")[0]
    assert early.startswith("rollout-1 was not there yet: it was ready at 0.500 s")
    for outside in ("2.6", "-1", "#0", f"#{bench.seq + 1}"):
        with pytest.raises(
            ConfigError, match=r"is outside the log: it goes from 0 s \(#1\) to 2.5"
        ):
            answer(bench, "rollout-1", outside)
    for nonsense in ("soon", "#x"):
        with pytest.raises(ConfigError, match="is no time: give seconds"):
            answer(bench, "rollout-1", nonsense)


def test_other_reasons_to_be_idle(answer: Ask) -> None:
    """No weights, no further data, the end of the run, no process; each is named."""
    bench = ToldBench(replicas=2, groups_per_step=1, capacity=2, total_steps=1, max_staleness=0)
    for name in ("node-0", "store-0", "relay-0", "trainer-0", *bench.names):
        bench.join(name)
    for name in ("relay-0", "trainer-0", *bench.names):
        bench.ready(name)
    bench.wait(100)
    bench.ready("store-0")
    bench.publish(0, 0)
    bench.wait(100)
    bench.load_all()
    bench.wait(100)
    bench.kill("rollout-1")
    bench.wait(100)
    bench.complete("0.0")
    bench.wait(100)
    bench.train()
    lines = answer(bench, "rollout-1", "#12")
    assert "for 0.100 s, no-weights: it has no weights: its relay holds none yet" in lines[2]
    assert "for 0.100 s, pulling: it loads v0 or newer (purpose start)" in lines[3]
    assert "for 0.100 s, no-data: the run needs no further group: 1 are on their way" in lines[4]
    assert "for 0.200 s, down: its process is gone" in lines[5]
    ended = answer(bench, "rollout-0", f"#{bench.seq}")
    assert "run-ending: the run is exporting" in "\n".join(ended)


def test_never_idle(answer: Ask) -> None:
    bench = ToldBench(replicas=1, max_staleness=2)
    bench.start()
    lines = answer(bench, "rollout-0")
    assert lines[0].endswith("was never idle in the run.")


def test_a_replica_that_rejected_its_weights(answer: Ask) -> None:
    bench = ToldBench(replicas=1)
    for name in ("node-0", "store-0", "relay-0", "trainer-0", "rollout-0"):
        bench.join(name)
    for name in ("store-0", "relay-0", "trainer-0", "rollout-0"):
        bench.ready(name)
    bench.publish(0, 0)
    for _ in range(2):
        bench.say("rollout-0", ev.WeightsRejected(version=0, reason="probe"))
    lines = answer(bench, "rollout-0", f"#{bench.seq}")
    assert "no-weights: it has no weights: it rejected what it loaded" in lines[-3]


def test_idle_while_the_user_has_asked_to_stop(answer: Ask) -> None:
    bench = pair(replicas=1, max_staleness=0)
    bench.complete("0.0")
    bench.own(ev.DrainRequested(reason="SIGINT"))
    lines = answer(bench, "rollout-0", f"#{bench.seq}")
    assert "run-ending: the run is draining on request" in "\n".join(lines)


# --- what a step waited for ---------------------------------------------------------------------


def test_a_step_that_waited_for_its_last_group(answer: Ask) -> None:
    bench = pair(max_staleness=0, groups_per_step=2)
    free = bench.seq - 2
    opened(bench, "0.0.1", 0)
    bench.wait(1000)
    bench.complete("0.1")
    bench.wait(200)
    bench.finish("0.0.0")
    bench.reward("0.0.0")
    bench.wait(300)
    bench.finish("0.0.1", num_tokens=42)
    bench.wait(50)
    bench.reward("0.0.1", 0.25)
    lines = answer(bench, "step-1")
    assert lines[0] == (
        "Step 1 waited 1.550 s: the trainer was free at 0.500 s (#10), by trainer-ready of "
        f"trainer-0, and got its batch at {bench.last}, "
        "by trajectory-rewarded trajectory=0.0.1 of rollout-0."
    )
    assert "start: the first weights were not published yet" in lines[1]
    assert lines[2] == (
        f"  0.500 s (#{free}), for 1.550 s, groups: 0 of 2 groups were complete, 0 were open"
    )
    assert lines[3] == "2 of its 2 groups were not complete at first."
    assert lines[4] == (
        "While the trainer waited, 0.0.1, the last, was generated for 1.500 s, rewarded for "
        "0.050 s."
    )
    assert lines[5] == f"Group 0.0 was complete at {bench.last}, with 0.0.1 as its last:"
    assert lines[6].startswith("  dispatched at 0.500 s")
    assert lines[6].endswith(
        "to rollout-0 with v0, by weights-loaded version=0 step=0 of rollout-0"
    )
    assert lines[7].strip().startswith("rollout-0 had run nothing since 0.500 s")
    assert lines[8].strip().startswith("v0 was published at 0.500 s")
    assert lines[9].startswith("  started 0.000 s later")
    assert lines[10].endswith("42 tokens, stop") and "finished 1.500 s later" in lines[10]
    assert lines[11].endswith("by rollout-0, score 0.25") and "0.050 s later" in lines[11]
    assert lines[12] == f"  chosen 0.000 s later (#{bench.seq}): for step 1"
    assert "Group 0.1 was complete at 1.500 s" in lines[13]
    assert answer(bench, "1") == lines


def test_a_step_that_did_not_wait(answer: Ask) -> None:
    """0.0 is complete while the trainer works on 0.1; it was dispatched to an idle replica."""
    bench = pair()
    bench.complete("0.1")
    bench.wait(400)
    bench.complete("0.0")
    bench.wait(600)
    bench.train()
    lines = answer(bench, "2")
    assert lines[0] == (
        "Step 2 did not wait: its batch was complete when the trainer was free, at "
        f"1.500 s (#{bench.seq - 1}) by step-completed version=1 step=1 of trainer-0."
    )
    assert not any("not complete at first" in line for line in lines)
    assert "  chosen 0.600 s later" in lines[-1]


def test_a_step_for_which_room_had_to_come_free(answer: Ask) -> None:
    bench = pair(replicas=1, groups_per_version=8)
    bench.complete("0.0")
    bench.train()
    bench.wait(100)
    bench.complete("0.1")
    lines = answer(bench, "2")
    assert "    rollout-0 had no room for it before" in lines
    assert lines[1].endswith("groups: 0 of 1 groups were complete, 1 were open")


def test_a_step_whose_trajectory_had_moved(answer: Ask) -> None:
    bench = pair(capacity=4, max_staleness=0, groups_per_step=2)
    bench.kill("rollout-0")
    bench.complete("0.0", "0.1")
    if bench.state.batch is None:
        bench.complete(*bench.open_groups())
    lines = answer(bench, "1")
    assert "    it was placement 2: ask why the trajectory moved" in lines


def test_a_step_that_the_bound_held(answer: Ask) -> None:
    """0.2 is complete, but training it next would leave 0.0 without a batch."""
    bench = pair()
    bench.complete("0.1")
    bench.train()
    bench.load("rollout-1")
    bench.complete("0.2")
    bench.wait(800)
    bench.complete("0.0")
    lines = answer(bench, "2")
    spells = [line for line in lines if ", for 0.800 s, " in line]
    assert len(spells) == 1
    assert "staleness-bound: the complete groups could not be taken" in spells[0]


def test_a_step_that_an_owed_publish_held(answer: Ask) -> None:
    bench = pair(max_staleness=0)
    bench.complete("0.0")
    bench.skip_publish()
    bench.train(publish=False)
    bench.wait(900)
    bench.publish(1, 1)
    bench.load_all()
    bench.complete(bench.open_groups()[0])
    lines = answer(bench, "2")
    assert "for 0.900 s, publish: v1 was owed and had to be published first" in lines[1]


def test_a_step_that_the_strategy_held(answer: Ask) -> None:
    bench = pair(batch_strategy=STRATEGY)
    bench.complete("0.0")
    bench.wait(5000)
    assert bench.state.batch is not None
    lines = answer(bench, "1")
    assert any("for 5.000 s, strategy: the batch strategy had been asked" in x for x in lines)


# --- what cannot be asked -----------------------------------------------------------------------


def test_ids_that_nothing_has(answer: Ask) -> None:
    """One sentence, with what ids look like."""
    bench = pair()
    for name, said in (
        ("9.9.9", "the log has no trajectory 9.9.9"),
        ("rollout-7", "the log has no replica rollout-7, it has rollout-0, rollout-1"),
        ("rollout-3.0", "the log has no replica rollout-3.0"),
        ("step-99", "step 99 was never ordered, none was"),
        ("v3", "'v3' is nothing that can be asked about"),
        ("0.17", "'0.17' is nothing that can be asked about"),
    ):
        with pytest.raises(ConfigError) as refused:
            answer(bench, name)
        message = str(refused.value)
        assert message.startswith(said)
        assert "0.17.3" in message and "rollout-0" in message and "step-57" in message
    with pytest.raises(ConfigError, match="--at is a time for a replica"):
        answer(bench, "0.0.0", "3")
    bench.complete("0.0")
    with pytest.raises(ConfigError, match="never ordered, the last one is step 1"):
        answer(bench, "5")
    empty = ToldBench()
    with pytest.raises(ConfigError, match="it has none that was ready"):
        answer(empty, "rollout-0")


def test_of_the_command_line(made: Path, cli: Cli) -> None:
    code, out = cli("log", "why", "step-1", made)
    assert code == 0
    assert out.startswith("Step 1 ")
    code, out = cli("log", "why", "rollout-0", made, "--at", "#100")
    assert code == 0
    assert "rollout-0" in out
    code, message = cli("log", "why", "rollout-9", made)
    assert (code, "\n" in message) == (2, False)


def test_every_reason_is_explained() -> None:
    """By the names that the coordinator and the answers use."""
    document = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text()
    reasons = (
        DOWN,
        PULLING,
        NO_WEIGHTS,
        NO_DATA,
        RUN_ENDING,
        REPACKED,
        STALENESS_BOUND,
        "draining",
    )
    assert [reason for reason in reasons if f"| `{reason}` |" not in document] == []
    assert [wait for wait in ("groups", "publish", "strategy") if f"`{wait}`" not in document] == []
