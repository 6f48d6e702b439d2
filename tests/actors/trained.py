"""A trainer with a real store and relay, in one process, and rows for it.

The trainer can be killed and started again; `stored` writes a rewarded row, as replicas would.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from laminar.actors.system.roles import make_actor
from laminar.actors.trainer import Trainer
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.storage import messages as m
from tests.actors.parts import FakeHost

ROOT = Path(__file__).parents[2]
SETTINGS = (
    f"model.name={ROOT / 'configs' / 'models' / 'spell-0.6m'}",
    "data.dataset=spell_backward",
    "data.dataset_size=64",
    "data.val_size=2",
    "data.max_response_length=16",
    "rollout.group_size=2",
    "optim.lr=1e-3",
    "trainer.save_freq=1",
)
RESPONSE = (40, 41, 42, 43)


class Processes:
    """Store, relay and trainer; the trainer is killed and started again."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.hosts: list[FakeHost] = []
        self.actors: list[Any] = []

    async def start(self, name: str) -> Any:
        host = FakeHost(self.run_dir, name, *SETTINGS, incarnation=len(self.hosts) + 1)
        actor = make_actor(host)  # type: ignore[arg-type]
        self.hosts.append(host)
        self.actors.append(actor)
        await actor.start()
        return actor

    async def kill(self) -> None:
        """The last one that was started: none of its tasks goes on."""
        host, actor = self.hosts.pop(), self.actors.pop()
        host.end()
        await asyncio.gather(actor.store.close(), actor.publisher.close())

    async def stop(self) -> None:
        for actor in reversed(self.actors):
            await actor.stop()
        for host in self.hosts:
            host.end()


async def stored(trainer: Trainer, group: int, sibling: int, *parts: tuple[str, float]) -> str:
    """A rewarded row, moved from replica to replica, which sample equal parts of it.

    `parts`: a replica, and how far its engine's log-probs are below the trainer's.
    """
    name, ask = f"0.{group}.{sibling}", trainer.store.send_request
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
            scores = np.array(
                (await trainer.learner.compute_logprobs([ids]))[0][-len(RESPONSE) :], "<f4"
            )
        offset = (placement - 1) * count
        part = slice(offset, offset + count)
        chunk = m.AppendItem(
            trajectory_id=name,
            placement=placement,
            offset=offset,
            tokens=np.array(RESPONSE[part], "<i4").tobytes(),
            logprobs=(scores[part] - np.float32(off)).tobytes(),
            weight_version=0,
            version_step=0,
        )
        await ask(m.Append(items=(chunk,)), m.AppendReply)
    who = {"trajectory_id": name, "placement": len(parts)}
    whole = m.FinishItem(**who, finish_reason="length", num_tokens=len(RESPONSE))
    await ask(m.Finish(items=(whole,)), m.FinishReply)
    reward = m.RewardItem(**who, reward=float(sibling), reason="ok")
    await ask(m.PutRewards(items=(reward,)), m.PutRewardsReply)
    return name


def load(found: ev.Checkpoint) -> cmd.LoadCheckpoint:
    return cmd.LoadCheckpoint(
        to="trainer-0", version=found.version, step=found.step, path=found.path, kept=(1,)
    )
