"""Evaluation: when it is due, on which version, and what happens when its work is lost."""

from __future__ import annotations

from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import Bench, only


def asked(commands: list[cmd.Command]) -> list[cmd.GenerateTrajectory]:
    return [c for c in only(cmd.GenerateTrajectory, commands) if c.purpose == "eval"]


def answer_all(bench: Bench, score: float = 1.0) -> list[cmd.Command]:
    """Every held-out answer that is under way is finished and scored."""
    commands: list[cmd.Command] = []
    for trajectory in list(bench.state.work.trajectories.values()):
        in_engine = trajectory.status in ("dispatched", "running")
        if in_engine and bench.group(trajectory.group).purpose == "eval":
            commands += bench.finish(trajectory.id)
            commands += bench.reward(trajectory.id, score)
    return commands


def evaluated(**changes: object) -> Bench:
    values: dict[str, object] = {
        "num_eval": 3,
        "capacity": 8,
        "groups_per_step": 1,
        "max_staleness": 0,
        "total_steps": 4,
    }
    return Bench(**(values | changes))


def test_first_evaluation_is_of_the_base_model_and_comes_first() -> None:
    """val_before_train: the replica that has just loaded version 0 answers the held-out prompts
    before it takes training groups; the relay keeps the version meanwhile."""
    bench = evaluated(val_before_train=True)
    commands = bench.start()
    generated = only(cmd.GenerateTrajectory, commands)
    assert [c.purpose for c in generated] == ["eval"] * 3 + ["train"] * 2
    assert [c.group for c in asked(commands)] == ["e0.0", "e0.1", "e0.2"]
    assert [c.version for c in only(cmd.PinVersion, commands)] == [0]
    ended = answer_all(bench, score=1.0)
    assert [c.version for c in only(cmd.PinVersion, ended)] == [-1]
    result = bench.state.evaluations.results[0]
    assert (result.step, result.total, result.correct, result.final) == (0, 3, 3, False)
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.evaluated == 3


def test_evaluation_every_test_freq_steps() -> None:
    """test_freq=2 of 4 steps: after step 2 on version 2; after step 4 the export is evaluated
    instead, which has the same weights."""
    bench = evaluated(test_freq=2)
    commands = bench.start()
    for _ in range(4):
        commands += bench.complete(*bench.open_groups())
        commands += bench.train()
        commands += bench.load_all()
        answer_all(bench)
    assert [(r.step, r.version) for r in bench.state.evaluations.results] == [(2, 2)]
    bench.say("trainer-0", ev.ModelExported(version=5, path="export"))
    bench.publish(5, 4)
    final = asked(bench.load_all())
    assert {c.version for c in final} == {5}
    answer_all(bench, score=0.0)
    assert [(r.step, r.final, r.correct) for r in bench.state.evaluations.results] == [
        (2, False, 3), (4, True, 0),
    ]  # fmt: skip
    bench.stop()
    assert bench.state.run.phase == "ended" and bench.state.run.exit_code == 0


def test_skipped_version_is_evaluated_with_the_next_published() -> None:
    """The weights of step 2 were skipped for want of a slot, and step 3 published before they were
    paid: the evaluation that was due at step 2 moves to step 3, it is not forgotten."""
    bench = evaluated(test_freq=2, max_staleness=3)
    bench.start()
    bench.complete(*bench.open_groups())
    bench.train()
    bench.skip_publish()
    bench.train(publish=False)
    bench.train()
    bench.complete(*bench.open_groups())
    assert {c.version for c in asked(bench.load_all())} == {3}


def test_lost_answers_run_again_on_the_same_version() -> None:
    """The replica dies with two of three answers unfinished; when it is back, those two run again
    from the start on the same version, under new names (the old ones ended as dropped)."""
    bench = evaluated(val_before_train=True, num_train=0, total_steps=0)
    bench.start()
    bench.finish("e0.0.0")
    bench.reward("e0.0.0")
    bench.kill()
    bench.come_back()
    pull = bench.pull_of("rollout-0")
    assert pull is not None and (pull.version, pull.exact, pull.purpose) == (0, True, "evaluation")
    again = asked(bench.load_all())
    assert [(c.group, c.row_index) for c in again] == [("e0.1-2", 1), ("e0.2-2", 2)]
    answer_all(bench)
    assert bench.state.evaluations.results[0].correct == 3
    bench.write_ends()
    assert bench.state.work.ledger.groups.dropped == {"replica-lost": 2}


def test_evaluation_of_the_newest_version_stays_until_the_chain_brings_it() -> None:
    """Of two machines one has version 1, and its replica has answered one of three prompts when it
    is lost: the other replica is empty and would have no other version to go on with."""
    bench = evaluated(nodes=2, test_freq=1)
    bench.start()
    bench.complete(*bench.open_groups())
    bench.train()
    bench.load_all()
    assert bench.state.evaluations.running.version == 1
    bench.complete(*bench.open_groups())
    bench.finish("e0.0.0")
    bench.reward("e0.0.0")
    bench.kill("rollout-0")
    assert (bench.state.evaluations.running.version, bench.state.evaluations.running.done) == (1, 1)
    bench.receive("relay-1", 1)
    again = asked(bench.load("rollout-1.0"))
    assert [(c.group, c.version) for c in again] == [("e0.1-2", 1), ("e0.2-2", 1)]


def test_due_evaluation_waits_for_the_one_before() -> None:
    """test_freq=1 and a slow evaluation of version 0: one version is pinned at a time, the
    next evaluation begins when the first is done, on the version that is loaded then."""
    bench = evaluated(test_freq=1, val_before_train=True, max_staleness=1, replicas=2)
    commands = bench.start()
    commands += bench.complete("0.0")
    commands += bench.train()
    commands += bench.load_all()
    assert {c.version for c in asked(commands)} == {0}
    assert bench.state.evaluations.due == 1
    assert {c.version for c in asked(answer_all(bench) + bench.load_all())} == {1}


def test_open_answers_are_given_up_with_their_version() -> None:
    """One answer is generated and waits for its reward, one is lost, and the relay had evicted the
    version: nobody can give the second on it, so the first is dropped and both are asked anew."""
    bench = evaluated(val_before_train=True, num_eval=2, max_staleness=1)
    bench.start()
    bench.complete("0.0")
    bench.train(publish=False)
    bench.finish("e0.0.0")
    bench.publish(1, 1, held=(1,))
    commands = bench.kill() + bench.come_back()
    assert [(c.version, c.exact) for c in only(cmd.PullWeights, commands)] == [(1, False)]
    assert {(c.version, c.row_index) for c in asked(bench.load_all())} == {(1, 0), (1, 1)}
    answer_all(bench)
    assert [(r.version, r.total, r.correct) for r in bench.state.evaluations.results] == [(1, 2, 2)]
    bench.write_ends()
    dropped = bench.state.work.ledger.groups.dropped
    assert (dropped["version-missing"], dropped["replica-lost"]) == (1, 1)


def test_evaluation_moves_on_when_the_relay_comes_back_without_its_version() -> None:
    """Relay and replica were lost: the next publication is the first word of what can be had."""
    bench = evaluated(val_before_train=True, num_eval=2, max_staleness=1)
    bench.start()
    bench.complete("0.0")
    bench.train(publish=False)
    bench.kill("relay-0")
    bench.kill()
    bench.come_back()
    bench.come_back("relay-0")
    assert bench.state.evaluations.running is not None
    assert [p.version for p in only(cmd.PinVersion, bench.publish(1, 1, held=(1,)))][-1:] == [-1]
    assert bench.state.evaluations.due == 1


def test_run_that_is_ending_begins_no_evaluation() -> None:
    """The trainer fails while the weights that were to be evaluated are on their way: their load
    must not open groups that nobody would ever close."""
    bench = evaluated(test_freq=1, max_staleness=0)
    bench.start()
    bench.complete("0.0")
    bench.train(publish=False)
    bench.say("trainer-0", ev.ActorFailed(reason="out of memory", user_error=False))
    assert bench.state.run.phase == "ending"
    bench.publish(1, 1)
    assert bench.pull_of("rollout-0") is not None
    assert asked(bench.load("rollout-0")) == []
    bench.write_ends()
    bench.stop()
    assert bench.state.run.phase == "ended"
    assert bench.state.work.ledger.groups.live == 0
