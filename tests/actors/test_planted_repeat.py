"""A trainer that comes back and does a step again wrongly is found out: by the digest of that step,
and by `laminar retrain`, which names the first step that was published with what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from laminar.actors import trainer
from laminar.analysis.facts.trained_steps import TrainedStep
from laminar.cli.retrain import RetrainStart, _compare_steps, _Retraining
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import exit_codes
from laminar.names.ids import TrajectoryId
from laminar.run.directory import STORE_FILE
from laminar.storage.books import open_tables
from laminar.storage.handlers import Handlers
from laminar.training.checkpoints import checkpoint
from tests.actors.parts import FakeHost, order
from tests.actors.trained import Processes, load, stored

Plant = Callable[[pytest.MonkeyPatch], None]
GROUPS = 2


def _rows(change: Callable[[list[Any]], list[Any]]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        fetch = trainer.fetch_batch

        async def planted(client: Any, command: Any) -> list[Any]:
            samples = await fetch(client, command)
            return change(samples) if isinstance(command, cmd.RepeatStep) else samples

        patch.setattr(trainer, "fetch_batch", planted)

    return plant


def nothing(patch: pytest.MonkeyPatch) -> None:
    """No bug."""


def moments_are_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "restore_moments", lambda *args: None)


async def train(processes: Processes, trainer: Any, step: int) -> TrainedStep:
    """A batch of two groups; its weights are published."""
    relay: FakeHost = processes.hosts[1]
    await trainer.publisher._granted.wait()
    groups = range(GROUPS * step, GROUPS * (step + 1))
    names = [
        await stored(trainer, group, sibling, ("rollout-0", 0.0))
        for group in groups
        for sibling in (0, 1)
    ]
    rows = tuple(map(TrajectoryId, names))
    command = cmd.TrainStep(to="trainer-0", step_index=step, version=step + 1, trajectories=rows)
    trainer.handle_orders(order(100 + step, command))
    published = await relay.wait(ev.WeightsPublished, step + 1)
    assert published.version == step + 1
    await trainer.host.wait(ev.CheckpointSaved, step + 1 if step < 2 else 1)
    return TrainedStep(
        step_index=step, version=step + 1, trajectories=rows, digest=published.digest
    )


@pytest.mark.parametrize(
    ("plant", "verdict"),
    [
        (nothing, "identical: 3 steps repeated, 3 published versions compared"),
        *(
            (plant, "NOT identical: step 3 of 3, version 3 is the first to differ")
            for plant in (
                _rows(lambda samples: samples[:-1]),
                _rows(lambda samples: samples[::-1]),
                moments_are_not_restored,
            )
        ),
    ],
    ids=["no bug", "a row left out", "order changed", "moments not restored"],
)
async def test_what_was_done_again_wrongly_is_named(
    processes: Processes,
    plant: Plant,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = await processes.start("trainer-0")
    steps = [await train(processes, trainer, step) for step in (0, 1)]
    await processes.kill()
    with monkeypatch.context() as patch:
        plant(patch)
        again = await processes.start("trainer-0")
        host = processes.hosts[-1]
        again.handle_orders(order(10, load(host.all(ev.TrainerReady)[0].checkpoints[0])))
        done = steps[1]
        repeat = cmd.RepeatStep(
            to="trainer-0",
            step_index=1,
            version=2,
            trajectories=done.trajectories,
            digest=done.digest,
        )
        again.handle_orders(order(11, repeat))
        repeated = await host.wait(ev.StepRepeated)
        assert (repeated.digest == repeated.published) == (plant is nothing)
        steps.append(await train(processes, again, 2))
    with open_tables(processes.run_dir / STORE_FILE) as tables:
        retrained = _Retraining(host.config, Handlers(tables), processes.run_dir, {})
        begin = RetrainStart(0, 0, "", "the initial model of the run")
        code = await _compare_steps(retrained, tuple(steps), begin)
    assert capsys.readouterr().out.splitlines()[-1] == verdict
    assert code == (exit_codes.COMPLETE if plant is nothing else exit_codes.FAILED)
