"""The audit: silent on three books that agree, never silent on a damaged one."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from laminar.actors.batch_fetch import sample_of
from laminar.analysis.audit import trainer_book
from laminar.analysis.audit.audit import audit_run
from laminar.analysis.audit.ledger_book import Account, ClosedTrajectory, ledger_problems
from laminar.analysis.audit.store_book import StoreBook, store_problems
from laminar.analysis.report.summary import summary_of
from laminar.core.machine import StateMachine
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.state.work import Trajectory
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId
from laminar.storage import messages as m
from laminar.storage.rules import Row
from laminar.training.steps import TrainSample
from tests.analysis.conftest import Cli
from tests.analysis.told_bench import ToldBench
from tools.kit import run_directory
from tools.kit.logs import Log, write_log
from tools.kit.run_directory import make_run, world_log
from tools.kit.world import World
from tools.kit.world_parts import Faults, group_of, settings, step_completed


def execute(run_dir: Path, sql: str) -> None:
    """One statement that changes one row."""
    with sqlite3.connect(run_dir / "store.sqlite") as db:
        assert db.execute(sql).rowcount == 1, sql
    db.close()


def test_books_of_a_sound_run_agree(made: Path, cli: Cli) -> None:
    code, out = cli("audit", made)
    assert code == 0, out
    lines = {line[:28].strip(): line[28:].split() for line in out.splitlines()}
    assert "books agree" in lines
    assert lines[""] == ["groups", "trajectories", "tokens"]
    assert lines["live"] == ["0", "0", "0"]
    ended: Counter[str] = Counter()
    with sqlite3.connect(made / "store.sqlite") as db:
        for end, reason, count in db.execute(
            'SELECT "end", end_reason, COUNT(*) FROM trajectories GROUP BY 1, 2'
        ):
            ended[end if end != "dropped" else f"dropped: {reason}"] += count
    assert ended["trained"] >= 3 * 4 * 2
    assert ended["evaluated"] == 3 * 4  # the base model, step 2, the export
    assert ended["dropped: unscored"] > 0
    for name, count in ended.items():
        assert int(lines[name][1]) == count
    assert int(lines["issued"][1]) == ended.total()


def test_a_store_that_is_gone_or_no_database_is_a_problem(copy: Path, cli: Cli) -> None:
    (copy / "store.sqlite").write_bytes(b"not a database" * 1000)
    assert cli("audit", copy)[0] == 1
    (copy / "store.sqlite").unlink()
    assert cli("audit", copy)[0] == 1


@pytest.mark.parametrize("column", ["weight_version", "version_step"])
def test_a_stamp_that_is_not_what_was_dispatched_is_found(copy: Path, column: str) -> None:
    """A replica that names other weights than it was told to use: staleness and the correction of
    off-policy data would be wrong, and nothing else."""
    for table, name in (("trajectories", "id"), ("chunks", "trajectory_id")):
        execute(copy, f"UPDATE {table} SET {column} = {column} + 1 WHERE {name} = '0.1.1'")
    (problem,) = audit_run(copy).problems
    assert "0.1.1" in problem and "weights (version, step)" in problem


def test_bad_rewards_are_counted_by_reason(tmp_path: Path, cli: Cli) -> None:
    log = world_log()
    index, stamped = next(
        (i, s) for i, (s, _) in enumerate(log) if isinstance(s.event, ev.TrajectoryRewarded)
    )
    timeout = msgspec.structs.replace(stamped.event, reason="timeout")
    log = [
        (s if s.event != stamped.event else msgspec.structs.replace(s, event=timeout), commands)
        for s, commands in log
    ]
    assert log[index][0].event == timeout
    make_run(tmp_path / "run", log)
    code, out = cli("audit", tmp_path / "run")
    assert code == 0, out
    assert "reward timeout: 1" in out


# --- the trainer's book -------------------------------------------------------------------------


def _first_line(change: Callable[[dict], object]) -> Callable[[list[dict]], list[dict]]:
    def apply(lines: list[dict]) -> list[dict]:
        change(lines[0])
        return lines

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines[1:], "step 1 is completed in the log but"),
        (lambda lines: [*lines, lines[0]], "times"),
        (lambda lines: [*lines, {**lines[0], "step": 9, "ids": []}], "step 10 was never ordered"),
        (_first_line(lambda line: line["ids"].reverse()), "other ids"),
        (_first_line(lambda line: line["ids"].pop()), "trained other ids"),
        (_first_line(lambda line: line.update(version=5)), "another version"),
        (_first_line(lambda line: line.update(digest="0")), "do not match their digest"),
        (_first_line(lambda line: line.update(changed=False)), "reported with other values"),
        (_first_line(lambda line: line.update(ids=3)), "line 1 of"),
    ],
)
def test_any_change_of_the_trainers_book_is_found(
    copy: Path, change: Callable[[list[dict]], list[dict]], words: str
) -> None:
    path = copy / "trainer_book.jsonl"
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert any(words in problem for problem in audit_run(copy).problems), audit_run(copy).problems


def test_an_id_trained_by_two_steps_is_found(copy: Path) -> None:
    path = copy / "trainer_book.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    twice = lines[1]["ids"][0] = lines[0]["ids"][0]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert f"trainer: {twice} was trained 2 times" in audit_run(copy).problems


def accounted(log: Log) -> tuple[State, Account]:
    machine, account = StateMachine(), Account()
    for stamped, _ in log:
        account(stamped, machine.handle_event(stamped), machine.state)
    return machine.state, account


# --- runs that have not ended -------------------------------------------------------------------


def cut(log: Log, wanted: type) -> Log:
    """The log up to the first event of a type, without it."""
    return log[: next(i for i, (s, _) in enumerate(log) if isinstance(s.event, wanted))]


@pytest.mark.parametrize("last", [ev.StepCompleted, ev.TrajectoriesEnded, ev.ModelExported])
def test_a_run_that_was_cut_off_has_live_books_that_agree(tmp_path: Path, last: type) -> None:
    make_run(tmp_path / "run", cut(world_log(), last))
    found = audit_run(tmp_path / "run")
    assert found.problems == []
    (live,) = [row for row in found.ledger if row.name == "live"]
    assert live.trajectories > 0 or last is ev.ModelExported
    if last is ev.StepCompleted:  # it was trained, and not reported
        (note,) = found.notes
        assert "step 1" in note


def test_a_step_that_was_reported_when_the_run_had_failed_does_not_count() -> None:
    """Its batch was dropped by then; the trainer's book has it all the same."""
    bench = ToldBench(groups_per_step=1)
    bench.start()
    bench.complete(*bench.open_groups()[:1])
    batch = bench.state.steps.batch
    assert batch is not None
    bench.kill("relay-0", restarting=False)
    assert bench.state.run.failure
    done = step_completed(0, batch.version)
    bench.say("trainer-0", done)
    _, account = accounted(bench.log)
    assert account.steps[0].completed is None and account.list_trained(0) == []
    ids = list(account.steps[0].command.trajectories)
    line = trainer_book.BookLine(
        step=0, version=batch.version, changed=True, digest=trainer_book.ids_digest(ids), ids=ids
    )
    assert trainer_book.book_problems([line], account, account) == []
    (note,) = trainer_book.find_unreported([line], account)
    assert "arrived after the run failed" in note


def test_a_line_that_was_rolled_back_is_explained_and_not_counted() -> None:
    """Two trainers have entered the step; the log has what the second one reported."""
    bench = ToldBench(groups_per_step=1, save_freq=1)
    bench.start()
    bench.complete(*bench.open_groups()[:1])
    bench.kill("trainer-0")
    bench.come_back("trainer-0")
    bench.train()
    _, account = accounted(bench.log)
    ids = list(account.steps[0].command.trajectories)

    def line(version: int, rows: list[TrajectoryId]) -> trainer_book.BookLine:
        digest = trainer_book.ids_digest(rows)
        return trainer_book.BookLine(
            step=0, version=version, changed=True, digest=digest, ids=rows, incarnation=version
        )

    lines = [line(1, ids), line(2, ids)]
    problems = trainer_book.book_problems(lines, account, account)
    assert problems == [
        p for p in problems if "reported with other values" in p
    ]  # of a made-up digest
    (note,) = trainer_book.rolled_back(lines, account)
    assert "version 1, by incarnation 1 of the trainer" in note and "version 2" in note
    assert trainer_book.find_unreported(lines, account) == []
    other = [line(1, ids[::-1]), line(2, ids)]
    assert any("other ids" in p for p in trainer_book.book_problems(other, account, account))
    third = [line(3, ids), line(2, ids)]
    assert any("other ids" in p for p in trainer_book.book_problems(third, account, account))


def test_what_a_lost_store_could_not_close_is_told_with_the_failure() -> None:
    """Open books of an ended run are a problem, and whoever reads of it reads why."""
    bench = ToldBench(groups_per_step=1)
    bench.start()
    bench.open_groups()
    bench.kill("store-0", restarting=False)
    state, account = accounted(bench.log)
    state.run.phase = Phase.ENDED
    (problem,) = ledger_problems(state, account)
    assert "tokens live" in problem and state.run.failure in problem
    assert "store-0" in problem
    state.run.stopped = True  # as by trainer.max_nonfinite_updates: a resume continues it
    assert ledger_problems(state, account) == []


def test_rows_that_were_left_out_close_the_books(tmp_path: Path) -> None:
    """They are in the batch, in no other book as trained, and named in the summary."""
    make_run(tmp_path / "run", world_log(leave_out=0.4))
    found = audit_run(tmp_path / "run")
    assert (found.problems, found.notes) == ([], [])
    (row,) = (row for row in found.ledger if row.name == "dropped: mismatch")
    assert row.trajectories > 5
    summary = summary_of(tmp_path / "run")
    assert summary["trajectories_left_out"] == row.trajectories
    told = summary["left_out"]
    assert sum(part["trajectories"] for part in told) == row.trajectories
    first = {"replica": "rollout-0", "version": 0, "diff": 0.5, "limit": 0.1}
    assert told[0].items() >= first.items() and {part["step"] for part in told} <= {1, 2, 3}


def test_a_trainer_that_trained_what_it_says_it_left_out_is_found(tmp_path: Path) -> None:
    make_run(tmp_path / "run", world_log(leave_out=0.4))
    book = tmp_path / "run" / "trainer_book.jsonl"
    lines = [json.loads(line) | {"left_out": []} for line in book.read_text().splitlines()]
    book.write_text("".join(json.dumps(line) + "\n" for line in lines))
    problems = audit_run(tmp_path / "run").problems
    assert "trainer: step 1 reported other left-out ids than it recorded" in problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE trajectories SET \"end\" = 'trained' WHERE id = '{}'", "did not decide that"),
        ("DELETE FROM trajectories WHERE id = '{}'", "store: trajectory {} is missing"),
    ],
)
def test_a_row_that_the_log_does_not_know_so_is_found(
    tmp_path: Path, change: str, words: str
) -> None:
    """An end that nobody decided; a trajectory that was started and has no row."""
    log = cut(world_log(), ev.StepCompleted)
    make_run(tmp_path / "run", log)
    live = next(c for s, cs in log for c in cs if isinstance(c, cmd.TrainStep)).trajectories[0]
    execute(tmp_path / "run", change.format(live))
    found = audit_run(tmp_path / "run").problems
    assert any(words.format(live) in problem for problem in found)


@pytest.mark.parametrize(("turns", "agree"), [(2, True), (1, False)])
def test_a_host_may_be_lost_between_a_context_and_its_request(turns: int, agree: bool) -> None:
    """The store has what the next turn would have read, and the log only the turn before."""
    name, account = TrajectoryId("0.1.2"), Account()
    place = {"group": "0.1", "sibling": 2, "purpose": "train", "row_index": 1, "step": 0}
    ending = cmd.TrajectoryEnding(
        trajectory_id=name, placement=1, end="dropped", reason="env-lost", **place
    )
    account.issued[name], account.closed[name] = "train", ClosedTrajectory(ending, 9, 0)
    account.finished[name] = ev.TrajectoryFinished(
        trajectory_id=name, placement=1, num_tokens=9, finish_reason="stop"
    )
    row = Row(
        name, "0.1", 2, "train", 1, attempt=1, placement=1, segments=2, num_tokens=9,
        end="dropped", end_reason="env-lost", end_step=0, turns=turns,
    )  # fmt: skip
    problems = store_problems(StoreBook({name: row}, {}, set(), {}), account, account)
    assert problems == [] if agree else "finish reason is None" in problems[0]


def test_the_ledger_counts_what_losses_threw_away() -> None:
    """Replicas die, publishes are skipped, siblings fail: the counters equal their items."""
    faults = Faults(lose_every_s=4, skip_publish=0.2, fail_sibling=0.1, repeat_event=0.1)
    restarted = 0
    for seed in (0, 5, 10):
        world = World(settings(total_steps=3, resume_timeout_ms=10), faults=faults, seed=seed).run()
        state, account = accounted(world.log)
        assert ledger_problems(state, account) == []
        restarted += state.work.ledger.tokens.dropped.get("restarted", 0)
        state.work.ledger.tokens.trained += 1
        assert len(ledger_problems(state, account)) >= 1
    assert restarted > 0


@pytest.mark.parametrize("fenced", [True, False])
def test_an_answer_that_the_machine_refused_ends_nothing(fenced: bool) -> None:
    """A late word of a store that was given up: the state keeps the trajectory."""
    log = world_log()
    machine, account = StateMachine(), Account()
    for stamped, commands in log:
        machine.handle_event(stamped)
        state = machine.state
        if isinstance(stamped.event, ev.TrajectoriesEnded):
            name = stamped.event.ended[0].trajectory_id
            if fenced:
                state.work.trajectories[name] = Trajectory(id=name, group=group_of(name), sibling=0)
            account(stamped, commands, state)
            assert (name in account.closed) is not fenced
            return
        account(stamped, commands, state)


def test_a_run_may_go_on_while_it_is_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is read, then it grows, then the other books are read: nothing is wrong."""
    log = world_log()
    make_run(tmp_path / "run", log)
    shutil.rmtree(tmp_path / "run" / "events")
    write_log(tmp_path / "run", cut(log, ev.StepCompleted))
    read_book = trainer_book.read_book

    def later(run_dir: Path) -> object:
        shutil.rmtree(run_dir / "events")
        write_log(run_dir, log)
        return read_book(run_dir)

    monkeypatch.setattr(trainer_book, "read_book", later)
    found = audit_run(tmp_path / "run")
    assert found.problems == []
    assert next(row for row in found.ledger if row.name == "live").trajectories > 0


def test_a_store_with_more_than_the_log_is_found(tmp_path: Path) -> None:
    """Somebody cut the log: the store knows trajectories that it does not."""
    log = world_log()
    make_run(tmp_path / "run", log)
    shutil.rmtree(tmp_path / "run" / "events")
    write_log(tmp_path / "run", cut(log, ev.StepCompleted))
    assert any("never issued" in problem for problem in audit_run(tmp_path / "run").problems)


Sample = Callable[[m.StoredTrajectory], TrainSample]


def rewards_of_siblings_swapped(row: m.StoredTrajectory) -> TrainSample:
    return dataclasses.replace(sample_of(row), reward=1.0 - (row.reward or 0.0))


def logprobs_shifted(row: m.StoredTrajectory) -> TrainSample:
    sample = sample_of(row)
    return dataclasses.replace(sample, logprobs=np.roll(sample.logprobs, 1))


def cut_off_forgotten(row: m.StoredTrajectory) -> TrainSample:
    sample = sample_of(row)
    return dataclasses.replace(sample, truncated=not sample.truncated)


def version_of_the_last_replica(row: m.StoredTrajectory) -> TrainSample:
    (*spans, last) = sample_of(row).spans
    moved = (*spans, last._replace(weight_version=last.weight_version + 1))
    return dataclasses.replace(sample_of(row), spans=moved)


def end_token_lost(row: m.StoredTrajectory) -> TrainSample:
    sample = sample_of(row)
    return dataclasses.replace(sample, response_ids=np.roll(sample.response_ids, 1))


@pytest.mark.parametrize(
    "mistake",
    [
        rewards_of_siblings_swapped,
        logprobs_shifted,
        cut_off_forgotten,
        version_of_the_last_replica,
        end_token_lost,
    ],
)
def test_a_batch_that_is_put_together_wrongly_is_found(
    copy: Path, monkeypatch: pytest.MonkeyPatch, mistake: Sample
) -> None:
    """The trainer enters what it was handed; the store has what the engines made."""
    monkeypatch.setattr(run_directory, "sample_of", mistake)
    assert not audit_run(copy).problems
    run_directory.write_book(copy, world_log())
    problems = audit_run(copy).problems
    assert [p for p in problems if "was trained on contents that differ from the store" in p]


def test_a_batch_whose_tokens_are_gone_is_counted(copy: Path) -> None:
    sql = "(SELECT MIN(id) FROM trajectories WHERE \"end\" = 'trained')"
    gone = "tokens = NULL, logprobs = NULL, file = NULL"
    execute(copy, f"UPDATE chunks SET {gone} WHERE trajectory_id = {sql}")
    execute(copy, f"UPDATE trajectories SET payload_removed = 1 WHERE id = {sql}")
    found = audit_run(copy)
    assert [n for n in found.notes if "input for 1 of 3 batches cannot be checked" in n]
