"""laminar log why: what it says of stories that are known in every detail, on one golden page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from laminar.analysis.facts.idle_reasons import DOWN, NO_WEIGHTS, PULLING
from laminar.analysis.facts.reader import load_facts
from laminar.analysis.facts.training_facts import TrainerWaitReason
from laminar.analysis.report.summary import summary_of
from laminar.analysis.why.why import explain_subject
from laminar.config import ConfigError
from laminar.core.scheduling.admission import NotAdmittedReason
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId
from tests.analysis.conftest import Cli
from tests.analysis.told_bench import ToldBench
from tests.core.steps.test_batches import STRATEGY
from tools.kit.golden_pages import check

Ask = Callable[..., list[str]]
Asked = Iterator[tuple[ToldBench, str, str]]
"""A bench as it then is, the id and the time that are asked about."""
STORIES: list[Callable[[], Asked]] = []


def story(made: Callable[[], Asked]) -> Callable[[], Asked]:
    """Its docstring, the questions and the answers are a part of the page."""
    STORIES.append(made)
    return made


@pytest.fixture
def answer(tmp_path: Path) -> Ask:
    """Write the bench's log and ask."""

    def ask(bench: ToldBench, name: str, at: str = "") -> list[str]:
        run_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        return list(explain_subject(load_facts(bench.write(run_dir)), name, at))

    return ask


def test_the_answers_are_those_of_the_page(answer: Ask) -> None:
    lines = []
    for made in STORIES:
        lines += [f"## {made.__doc__}", ""]
        for bench, name, at in made():
            asked = f"{name} --at {at}" if at else name
            lines += [f"$ why {asked}", *answer(bench, name, at), ""]
    check("why", "\n".join(lines))


def pair(**changes: object) -> ToldBench:
    """Two replicas on version 0, one group of two siblings each, a batch is one group."""
    values: dict[str, object] = {
        "replicas": 2,
        "capacity": 2,
        "groups_per_step": 1,
        "max_staleness": 1,
        "resume_timeout_ms": 3000,
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


@story
def never_moved() -> Asked:
    """A trajectory that never moved says where it was and how it ended."""
    bench = pair()
    bench.complete("0.1")
    bench.train()
    bench.wait(100)
    bench.write_ends()
    yield bench, "0.1.0", ""
    yield bench, "0.0.0", ""


@story
def moved_at_once() -> Asked:
    """rollout-0 dies; rollout-1 has the same version and room."""
    bench = pair(capacity=4, max_staleness=0, groups_per_step=2)
    opened(bench, "0.0.0", 0)
    bench.wait(1500)
    bench.kill("rollout-0")
    bench.wait(20)
    opened(bench, "0.0.0", 7)
    yield bench, "0.0.0", ""


@story
def waited_for_a_place() -> Asked:
    """The survivor is full: it takes the lost answer when its own are done. Nothing was stored."""
    bench = pair(max_staleness=0, groups_per_step=2)
    bench.kill("rollout-0")
    bench.wait(250)
    bench.finish("0.1.0")
    bench.wait(10)
    opened(bench, "0.0.0", 0)
    yield bench, "0.0.0", ""
    yield bench, "0.0.1", ""


@story
def no_place_in_time() -> Asked:
    """It starts over because no place turned up in time."""
    bench = pair(capacity=4)
    bench.complete("0.1")
    bench.train()
    bench.load("rollout-1")
    bench.kill("rollout-0")
    bench.wait(3000)
    yield bench, "0.0.0", ""


@story
def version_missing() -> Asked:
    """It starts over because its version was gone."""
    bench = pair(capacity=4)
    bench.complete("0.1")
    bench.train(publish=False)
    bench.publish(1, 1, held=(1,))
    bench.load("rollout-1")
    bench.kill("rollout-0")
    yield bench, "0.0.0", ""


@story
def batch_had_waited() -> Asked:
    """It starts over because a batch had waited for it."""
    bench = pair(replicas=1, max_staleness=0, batch_timeout_ms=60_000)
    bench.wait(60_000)
    yield bench, "0.0.0", ""


@story
def batch_gives_up() -> Asked:
    """Its replica died and nobody was there; then the batch's wait ended; then it came back."""
    bench = pair(replicas=1, max_staleness=0, batch_timeout_ms=2000, resume_timeout_ms=60_000)
    bench.kill("rollout-0")
    bench.wait(2000)
    bench.come_back()
    bench.load("rollout-0")
    yield bench, "0.0.0", ""


@story
def batch_moves_what_is_slow() -> Asked:
    """A batch moves what is slow to a free replica."""
    bench = pair(max_staleness=0, batch_timeout_ms=60_000, total_steps=1)
    bench.wait(60_000)
    yield bench, "0.0.0", ""


@story
def repacked() -> Asked:
    """Two replicas with a straggler each; one gives its own to the other and loads version 1."""
    bench = pair(
        capacity=8,
        groups_per_step=2,
        groups_per_version=1,
        max_staleness=2,
        repack_policy="best-fit",
        repack_interval_ms=1_000,
        repack_release_timeout_ms=2_000,
    )
    stragglers = [sorted(replica.running)[-1] for replica in bench.state.members.replicas.values()]
    for name in list(bench.state.work.trajectories):
        opened(bench, name, 0)
        if name not in stragglers:
            bench.finish(name)
            bench.reward(name)
    bench.train(publish=False)
    for name in bench.names:
        there = bench.replica(name)
        assert there.repack is not None
        gauge = ev.TokenProgress(
            tokens_total=9, kv_used_tokens=9, running=len(there.running), waiting=0,
            kv_capacity_tokens=1_000, max_batch=8, as_of=there.repack.last_command_id,
        )  # fmt: skip
        bench.say(name, gauge)
    bench.publish(1, 1)
    source = next(r for r in bench.state.members.replicas.values() if r.outgoing)
    moved = next(iter(source.outgoing))
    number = bench.state.orders.commands[f"release:{source.name}"].command_id
    bench.say(source.name, ev.TrajectoriesReleased(command_id=number))
    opened(bench, moved, 9)
    yield bench, moved, ""


@story
def moved_twice() -> Asked:
    """It moved more than once."""
    bench = pair(replicas=3, capacity=4, max_staleness=0, groups_per_step=2)
    bench.kill("rollout-0")
    bench.kill(bench.trajectory("0.0.0").replica)
    yield bench, "0.0.0", ""


@story
def held_out_again() -> Asked:
    """A lost held-out answer runs again under another name."""
    bench = pair(num_eval=1, val_before_train=True, capacity=4)
    bench.kill(bench.trajectory("e0.0.0").replica)
    bench.finish("0.1.0")
    yield bench, "e0.0.0", ""
    yield bench, "e0.0-2.0", ""


@story
def fetched_from_another_machine() -> Asked:
    """Only the relay of the lost replica's machine has its version; then a checkpoint, too."""
    for saved in (False, True):
        bench = pair(replicas=1, nodes=2, max_staleness=2)
        _empty(bench, "rollout-1.0")
        if saved:
            path = "checkpoints/step_0"
            bench.say("trainer-0", ev.CheckpointSaved(version=0, step=0, path=path, kept=(0,)))
        for version in (1, 2):
            bench.say("trainer-0", bench.trained())
            bench.publish(version, version, held=(0, version))
            bench.receive("relay-1", version, held=(version,))
            loaded = msgspec.structs.replace(bench.loaded(version), num_bytes=4_000_000)
            bench.say("rollout-1.0", loaded)
            _empty(bench, "rollout-1.0")
        bench.kill("rollout-0")
        bench.wait(4_000)
        if saved:
            yield bench, "rollout-1.0", f"#{bench.seq}"
            return
        bench.receive("relay-1", 0, held=(0, 2))
        bench.load("rollout-1.0")
        bench.wait(20)
        opened(bench, "0.0.0", 7)
        yield bench, "0.0.0", ""


def _empty(bench: ToldBench, name: str) -> None:
    """It finishes what it has and is given until the staleness bound holds it."""
    while running := list(bench.replica(name).running):
        bench.complete(bench.trajectory(running[0]).group)


# --- why a replica was idle ---------------------------------------------------------------------


def bound(bench: ToldBench) -> str:
    """rollout-1 runs dry after 1.5 s, 0.0 still runs; the time of the event that emptied it."""
    bench.wait(1000)
    bench.finish("0.1.0")
    bench.finish("0.1.1")
    return bench.last


@story
def held_by_the_bound() -> Asked:
    """On-policy, a batch of two groups: nothing new until both are trained and published."""
    bench = pair(max_staleness=0, groups_per_step=2)
    bound(bench)
    bench.reward("0.1.0")
    bench.reward("0.1.1")
    bench.wait(2000)
    bench.complete("0.0")
    bench.wait(700)
    bench.train()
    bench.wait(30)
    bench.load("rollout-1")
    yield bench, "rollout-1", ""


@story
def trainer_works() -> Asked:
    """The trainer has the only batch that may be; the replica's next refusal says so."""
    bench = pair(replicas=1, max_staleness=0)
    bench.complete("0.0")
    yield bench, "rollout-0", f"#{bench.seq}"


@story
def other_reasons() -> Asked:
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
    yield bench, "rollout-1", "#12"
    yield bench, "rollout-0", f"#{bench.seq}"


@story
def never_idle() -> Asked:
    """A replica that always ran something."""
    bench = ToldBench(replicas=1, max_staleness=2)
    bench.start()
    yield bench, "rollout-0", ""


@story
def rejected_weights() -> Asked:
    """A replica that rejected its weights."""
    bench = ToldBench(replicas=1)
    for name in ("node-0", "store-0", "relay-0", "trainer-0", "rollout-0"):
        bench.join(name)
    for name in ("store-0", "relay-0", "trainer-0", "rollout-0"):
        bench.ready(name)
    bench.publish(0, 0)
    for _ in range(2):
        bench.say("rollout-0", ev.WeightsRejected(version=0, reason="probe"))
    yield bench, "rollout-0", f"#{bench.seq}"


@story
def asked_to_stop() -> Asked:
    """Idle because the user has asked the run to stop."""
    bench = pair(replicas=1, max_staleness=0)
    bench.complete("0.0")
    bench.own(ev.DrainRequested(reason="SIGINT"))
    yield bench, "rollout-0", f"#{bench.seq}"


def test_turns_are_neither_moves_nor_losses(answer: Ask, tmp_path: Path) -> None:
    """Also with a loss in the third one; the finish is the last turn's."""
    bench = pair(capacity=4, max_staleness=0, groups_per_step=2, max_sessions=99)
    name = TrajectoryId("0.0.0")
    bench.request_turns()

    def end_turn(turn: int) -> None:
        t = bench.trajectory(name)
        opened(bench, name, 5 * turn)
        bench.wait(100)
        ended = ev.TrajectoryFinished(
            trajectory_id=name, placement=t.placement, num_tokens=10 * turn, finish_reason="stop"
        )
        bench.say(t.replica, ended)
        bench.wait(10)
        if turn < 3:
            bench.request_turn(name, turn)

    end_turn(1)
    first = answer(bench, name)
    assert first[0] == "0.0.0 never moved." and "weights-loaded" in first[1]
    assert not any("finished on" in line for line in first)
    end_turn(2)
    bench.wait(100)
    bench.kill("rollout-0")
    end_turn(3)
    lines = answer(bench, name)
    assert lines[0] == "0.0.0 moved once." and lines[1] == first[1]
    assert [line for line in lines if line.startswith("Placement")] == ["Placement 5:"]
    assert "rollout-0 lost it at 0.820 s" in lines[3] and "process-exited" in lines[3]
    assert "It finished on rollout-1 at 0.920 s (#30) with 30 tokens in 3 turns (stop)." in lines
    stats = summary_of(bench.write(tmp_path / "last"))
    assert stats["latency_s_max"] == pytest.approx(0.42)
    assert stats["latency_s_mean"] == pytest.approx(0.42)


def test_the_time_that_is_asked_about(answer: Ask) -> None:
    bench = pair(max_staleness=0, groups_per_step=2)
    loaded = bench.seq
    begin = bound(bench)
    bench.wait(1000)
    bench.finish("0.0.0")
    assert f"from {begin}" in answer(bench, "rollout-1", "1.6")[0]
    assert f"from {begin}" in answer(bench, "rollout-1", f"#{bench.seq}")[0]
    for busy in ("0.9", f"#{loaded}"):
        assert f"was not idle at {busy}" in answer(bench, "rollout-1", busy)[0]
    assert "was not ready yet" in answer(bench, "rollout-1", "0")[0]
    for outside in ("2.6", "-1", "#0", f"#{bench.seq + 1}"):
        with pytest.raises(ConfigError, match="is outside the log"):
            answer(bench, "rollout-1", outside)
    for nonsense in ("soon", "#x"):
        with pytest.raises(ConfigError, match="is not a time: give seconds"):
            answer(bench, "rollout-1", nonsense)


# --- what a step waited for ---------------------------------------------------------------------


def waited_for_its_last_group() -> ToldBench:
    bench = pair(max_staleness=0, groups_per_step=2)
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
    return bench


@story
def last_group() -> Asked:
    """A step that waited for its last group."""
    yield waited_for_its_last_group(), "step-1", ""


@story
def did_not_wait() -> Asked:
    """0.0 is complete while the trainer works on 0.1; it was dispatched to an idle replica."""
    bench = pair()
    bench.complete("0.1")
    bench.wait(400)
    bench.complete("0.0")
    bench.wait(600)
    bench.train()
    yield bench, "step-2", ""


@story
def room_came_free() -> Asked:
    """A step for which room had to come free."""
    bench = pair(replicas=1, groups_per_version=8)
    bench.complete("0.0")
    bench.train()
    bench.wait(100)
    bench.complete("0.1")
    yield bench, "step-2", ""


@story
def had_moved() -> Asked:
    """A step whose trajectory had moved."""
    bench = pair(capacity=4, max_staleness=0, groups_per_step=2)
    bench.kill("rollout-0")
    bench.complete("0.0", "0.1")
    if bench.state.steps.batch is None:
        bench.complete(*bench.open_groups())
    yield bench, "step-1", ""


@story
def bound_held_the_step() -> Asked:
    """0.2 is complete, but training it next would leave 0.0 without a batch."""
    bench = pair()
    bench.complete("0.1")
    bench.train()
    bench.load("rollout-1")
    bench.complete("0.2")
    bench.wait(800)
    bench.complete("0.0")
    yield bench, "step-2", ""


@story
def owed_publish() -> Asked:
    """A step that an owed publish held."""
    bench = pair(max_staleness=0)
    bench.complete("0.0")
    bench.skip_publish()
    bench.train(publish=False)
    bench.wait(900)
    bench.publish(1, 1)
    bench.load_all()
    bench.complete(bench.open_groups()[0])
    yield bench, "step-2", ""


@story
def strategy_held() -> Asked:
    """A step that the batch strategy held."""
    bench = pair(batch_strategy=STRATEGY)
    bench.complete("0.0")
    bench.wait(5000)
    assert bench.state.steps.batch is not None
    yield bench, "step-1", ""


def test_a_step_may_be_named_by_its_number(answer: Ask) -> None:
    bench = waited_for_its_last_group()
    assert answer(bench, "1") == answer(bench, "step-1")


# --- what cannot be asked -----------------------------------------------------------------------


def test_ids_that_nothing_has(answer: Ask) -> None:
    """One sentence, with what ids look like."""
    bench = pair()
    for name in ("9.9.9", "rollout-7", "rollout-3.0", "step-99", "v3", "0.17"):
        with pytest.raises(ConfigError) as refused:
            answer(bench, name)
        message = str(refused.value)
        assert name.removeprefix("step-") in message.partition(";")[0]
        assert "0.17.3" in message and "rollout-0" in message and "step-57" in message
    with pytest.raises(ConfigError, match="--at applies to a replica"):
        answer(bench, "0.0.0", "3")
    bench.complete("0.0")
    with pytest.raises(ConfigError, match=r"never ordered \(the last is step 1\)"):
        answer(bench, "5")
    empty = ToldBench()
    with pytest.raises(ConfigError, match="known: none"):
        answer(empty, "rollout-0")


def test_of_the_command_line(made: Path, cli: Cli) -> None:
    code, out = cli("log", "why", made, "step-1")
    assert code == 0
    assert out.startswith("Step 1 ")
    code, out = cli("log", "why", made, "rollout-0", "--at", "#100")
    assert code == 0
    assert "rollout-0" in out
    code, message = cli("log", "why", made, "rollout-9")
    assert (code, "\n" in message) == (2, False)


def test_every_reason_is_explained() -> None:
    """By the names that the coordinator and the answers use."""
    document = (Path(__file__).parents[3] / "docs" / "debugging.md").read_text()
    idle = {DOWN, PULLING, NO_WEIGHTS, *NotAdmittedReason} - {NotAdmittedReason.NOT_SERVING}
    assert [reason for reason in idle if f"| `{reason}` |" not in document] == []
    assert [wait for wait in get_args(TrainerWaitReason) if f"`{wait}`" not in document] == []
