"""Gradients that are not finite: so many in a row end the run, which can be resumed."""

from __future__ import annotations

import msgspec
import pytest

from laminar.core.members import resumption
from laminar.core.state.failures import FailureKind
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import exit_codes
from tests.core.members.test_resumption import resumed
from tests.core.steps.test_step_replay import run
from tools.kit.bench import Bench, only


def step(bench: Bench, nonfinite: int, *, changed: bool = False) -> list[cmd.Command]:
    bench.complete(bench.open_groups()[0])
    done = msgspec.structs.replace(bench.trained(), changed=changed, nonfinite_updates=nonfinite)
    commands = bench.say("trainer-0", done)
    if bench.state.run.phase == Phase.RUNNING:
        bench.publish(done.version, done.step_index + 1)
        bench.write_ends()
        bench.load_all()
    return commands


def test_so_many_in_a_row_end_the_run_and_it_can_be_resumed() -> None:
    bench = run(1, max_nonfinite_updates=4)
    assert not only(cmd.StopActor, step(bench, 3))
    step(bench, 0)  # no signal: neither one of them nor an end of the row
    assert only(cmd.StopActor, step(bench, 1))
    for name in [a.name for a in bench.state.members.actors.values() if a.alive]:
        bench.say(name, ev.ActorLeft())
    state = bench.state
    assert (state.run.phase, state.run.exit_code) == (Phase.ENDED, exit_codes.FAILED)
    assert state.run.failed is not None and not state.run.paused
    assert (state.run.failed.kind, state.run.failed.subject) == (FailureKind.NON_FINITE, "gradient")
    assert "the last 4 updates were not finite" in state.run.failure
    assert "trainer.max_nonfinite_updates = 4" in state.run.failure
    assert not resumption.is_run_over(state)
    resumed(bench, asked=True)
    assert (bench.state.run.phase, bench.state.run.failure, bench.state.run.exit_code) == (
        Phase.RUNNING,
        "",
        0,
    )
    assert bench.state.signals.nonfinite_in_row == 0


def test_a_step_that_changes_the_weights_begins_the_row_again() -> None:
    bench = run(1, max_nonfinite_updates=4)
    step(bench, 3)
    step(bench, 1, changed=True)  # one of several mini-batches
    assert (bench.state.run.phase, bench.state.signals.nonfinite_in_row) == (Phase.RUNNING, 1)
    step(bench, 3)
    assert bench.state.run.failed is not None


def test_a_run_without_checkpoints_ends_and_one_without_a_limit_trains_on() -> None:
    bench = run(1, max_nonfinite_updates=1, save_freq=0)
    step(bench, 1)
    assert bench.state.run.failed is not None and not bench.state.run.stopped
    assert bench.state.run.phase == Phase.ENDING
    bench = run(1)
    step(bench, 100)
    assert bench.state.run.phase == Phase.RUNNING


def test_a_run_that_is_draining_ends_as_it_was_asked() -> None:
    bench = run(1, max_nonfinite_updates=1)
    bench.complete(bench.open_groups()[0])
    bench.own(ev.DrainRequested(reason="SIGINT"))
    bench.say("trainer-0", msgspec.structs.replace(bench.trained(), nonfinite_updates=1))
    assert bench.state.run.failed is None


@pytest.mark.parametrize("count", [-1, 1 << 70])
def test_a_number_that_is_no_count_is_refused(count: int) -> None:
    bench = run(1, max_nonfinite_updates=1, in_training=True)
    bench.say("trainer-0", msgspec.structs.replace(bench.trained(), nonfinite_updates=count))
    assert bench.state.steps.completed == 1 and bench.state.run.failed is None
