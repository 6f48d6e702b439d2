"""The trainer with a real store and relay, in one process: the text of its probe, and rows that it
does not train."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from laminar.actors.system.roles import make
from laminar.actors.trainer import Trainer
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.ids import TrajectoryId
from laminar.rundir import TRAINER_BOOK_FILE
from laminar.storage import messages as m
from tests.actors.parts import FakeHost, order

ROOT = Path(__file__).parents[2]
SETTINGS = (
    f"model.name={ROOT / 'configs' / 'models' / 'spell-0.6m'}",
    "data.dataset=spell_backward",
    "data.dataset_size=64",
    "data.val_size=2",
    "data.max_response_length=16",
    "rollout.group_size=2",
    "optim.lr=1e-3",
)
RESPONSE = (40, 41, 42, 43)


@pytest_asyncio.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[Trainer]:
    hosts = [FakeHost(tmp_path, name, *SETTINGS) for name in ("store-0", "relay-0", "trainer-0")]
    actors = [make(host) for host in hosts]  # type: ignore[arg-type]
    for actor in actors:
        await actor.start()
    yield actors[-1]
    for actor in reversed(actors):
        await actor.stop()
    for host in hosts:
        host.end()


async def stored(trainer: Trainer, group: int, sibling: int, *parts: tuple[str, float]) -> str:
    """A rewarded row, moved from replica to replica, which sample equal parts of it.

    `parts`: a replica, and how far its engine's log-probs are below the trainer's.
    """
    name, ask = f"0.{group}.{sibling}", trainer.store.ask
    scores, count = np.zeros(0, "<f4"), len(RESPONSE) // len(parts)
    for placement, (replica, off) in enumerate(parts, 1):
        opening = m.OpenItem(
            trajectory_id=name,
            group_id=f"0.{group}",
            sibling=sibling,
            purpose="train",
            row_index=group,
            attempt=1,
            placement=placement,
            weight_version=0,
            version_step=0,
            replica=replica,
            temperature=1.0,
        )
        prompt = (await ask(m.Open(items=(opening,)), m.OpenReply)).results[0].prompt_ids
        if not len(scores):
            ids = [*np.frombuffer(prompt, "<i4").tolist(), *RESPONSE]
            scores = np.array((await trainer.learner.score([ids]))[0][-len(RESPONSE) :], "<f4")
        offset = (placement - 1) * count
        part = slice(offset, offset + count)
        chunk = m.AppendItem(
            trajectory_id=name,
            placement=placement,
            offset=offset,
            tokens=np.array(RESPONSE[part], "<i4").tobytes(),
            logprobs=(scores[part] - np.float32(off)).tobytes(),
        )
        await ask(m.Append(items=(chunk,)), m.AppendReply)
    who = {"trajectory_id": name, "placement": len(parts)}
    whole = m.FinishItem(**who, finish_reason="length", num_tokens=len(RESPONSE))
    await ask(m.Finish(items=(whole,)), m.FinishReply)
    reward = m.RewardItem(**who, score=float(sibling), reason="ok")
    await ask(m.PutRewards(items=(reward,)), m.PutRewardsReply)
    return name


async def test_the_probe_is_text_of_the_run_and_the_weights_score_it(trainer: Trainer) -> None:
    sample = m.SamplePrompts(count=256)
    prompts = (await trainer.store.ask(sample, m.SamplePromptsReply)).prompts
    text = b" ".join(prompts)
    probe = await trainer._probe()
    assert len(probe.sequences) >= 8 and sum(map(len, probe.sequences)) >= 200
    for sequence in probe.sequences:
        ids = np.array(sequence, "<i4").tobytes()
        assert ids in text or ids in b"".join(prompts)
    assert probe.mean_tolerance == 1e-4 and probe.tolerance == pytest.approx(1e-3)
    again = await trainer.learner.score([list(s) for s in probe.sequences])
    assert [list(row) for row in probe.logprobs] == again


async def test_a_replica_with_other_weights_is_named_before_its_rows_are_trained(
    trainer: Trainer,
) -> None:
    """In the event and in the trainer's book; the rows of the other one are trained, and it is not
    blamed for one that it has finished."""
    well, sick = ("rollout-0", 0.0), ("rollout-1", 0.5)
    rows = [
        await stored(trainer, group, sibling, *parts)
        for group, pair in enumerate([([well], [well]), ([sick], [sick, well])])
        for sibling, parts in enumerate(pair)
    ]
    batch = tuple(map(TrajectoryId, rows))
    command = cmd.TrainStep(to="trainer-0", step_index=0, version=1, trajectories=batch)
    trainer.handle(order(1, command))
    host: FakeHost = trainer.host  # type: ignore[assignment]
    done = await host.wait(ev.StepCompleted)
    (part,) = done.left_out
    assert (part.replica, part.version, part.trajectories) == ("rollout-1", 0, batch[2:])
    assert part.diff == pytest.approx(0.5, abs=1e-4) and part.limit < 0.01
    assert done.changed and done.metrics["mismatch/left_out"] == 2
    assert done.metrics["by_origin/mismatch_kl/rollout-1/0"] > 0.1
    (line,) = map(json.loads, (host.run_dir / TRAINER_BOOK_FILE).read_text().splitlines())
    assert line["ids"] == rows and line["left_out"] == rows[2:]
