"""A host starts sessions, and requests a first turn once the store has what the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.actors.agent_host import AgentHost
from laminar.actors.scoring import Scorer
from laminar.actors.turns import Turns
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import GroupId
from laminar.storage import messages as m
from laminar.tasks.environments.turns import NextTurn, Session, SessionLost
from tests.actors.held_replica import HeldStore, T, ids
from tests.actors.parts import FakeHost, until
from tests.actors.test_several_turns import LIMITS, stored


class FakeSessions:
    """Sessions that start once the test lets them."""

    def __init__(self) -> None:
        self.may_start, self.ended = asyncio.Event(), list[str]()
        self.fails, self.begun = "", False

    async def reset(self, session: Session) -> NextTurn:
        self.begun = True
        await self.may_start.wait()
        if self.fails:
            raise SessionLost(self.fails)
        return NextTurn((5, 6))

    def end_session(self, trajectory_id: str) -> None:
        self.ended.append(trajectory_id)


class FetchingStore(HeldStore):
    async def fetch(self, names: Any, *, with_prompt: bool) -> list[m.StoredTrajectory]:
        return [stored(trajectory_id=name) for name in names]


class Hosted:
    """A host that has been told to start the session of trajectory T."""

    def __init__(self, run_dir: Path) -> None:
        self.host = FakeHost(run_dir, "agent-0", *LIMITS)
        self.store, self.sessions = FetchingStore(), FakeSessions()
        self.actor = AgentHost(self.host, None)  # type: ignore[arg-type]
        self.actor.store = self.actor.openings.store = self.store  # type: ignore[assignment]
        self.actor.turns = Turns(self.host, self.store, self.sessions)  # type: ignore[arg-type]
        unused: Any = None
        self.actor.scorer = Scorer(self.host, self.store, unused, unused)  # type: ignore[arg-type]
        self.tell(
            cmd.StartSession(
                to="agent-0", trajectory_id=T, group=GroupId("0.1"), sibling=0, purpose="train",
                row_index=1, attempt=1, placement=3, version=2, version_step=2,
            )
        )  # fmt: skip

    def tell(self, command: Any) -> None:
        order = cmd.Envelope(command_id=1, cause=1, command=msgspec.Raw(b""))
        self.actor.handle_orders([(order, command)])

    async def answer_prompt(self, answer: str) -> m.Continue:
        request, reply = await self.store.next(m.Continue)
        result = m.Result(trajectory_id=T, answer=answer, reason="told so")  # type: ignore[arg-type]
        reply.set_result(m.ContinueReply(results=(result,)))
        return request  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answer", "told"),
    [("ok", [ev.TurnRequested]), ("fenced", []), ("refused", [ev.TrajectoryFailed])],
)
async def test_a_first_turn_is_requested_once_the_store_has_its_prompt(
    tmp_path: Path, answer: str, told: list[type]
) -> None:
    hosted = Hosted(tmp_path)
    opened = await hosted.store.answer_open()
    assert (opened.items[0].placement, opened.items[0].replica) == (3, "agent-0")
    hosted.sessions.may_start.set()
    await until(lambda: bool(hosted.store.asked))
    assert not hosted.host.events
    (item,) = (await hosted.answer_prompt(answer)).items
    assert (item.turn, item.placement, item.tokens) == (0, 3, ids(5, 6))
    await until(lambda: hosted.actor.openings.as_of == 1)
    assert list(map(type, hosted.host.events)) == told


async def test_what_was_taken_back_while_it_started_is_not_reported(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    await hosted.store.answer_open()
    await until(lambda: hosted.sessions.begun)
    placed = cmd.PlacedTrajectory(trajectory_id=T, placement=3)
    hosted.tell(cmd.AbortTrajectories(to="agent-0", items=(placed,)))
    assert hosted.sessions.ended == [T]
    hosted.sessions.may_start.set()
    await hosted.answer_prompt("ok")
    for _ in range(20):
        await asyncio.sleep(0)
    assert hosted.host.events == []


@pytest.mark.parametrize(
    ("begin", "told"),
    [
        (lambda h: h.store.answer_open("ended"), []),
        (lambda h: h.store.answer_open("refused"), [ev.TrajectoryFailed]),
        (lambda h: h.store.answer_open(own_prompt=True), [ev.TurnRequested]),
    ],
)
async def test_what_the_store_has_of_it_decides_what_starts(
    tmp_path: Path, begin: Callable[[Hosted], Any], told: list[type]
) -> None:
    """A session whose report was lost has its prompt already."""
    hosted = Hosted(tmp_path)
    await begin(hosted)
    await until(lambda: hosted.actor.openings.as_of == 1)
    assert list(map(type, hosted.host.events)) == told


async def test_a_session_that_does_not_start_fails_its_trajectory(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path)
    hosted.sessions.fails = "the file is gone"
    hosted.sessions.may_start.set()
    await hosted.store.answer_open()
    failed = await hosted.host.wait(ev.TrajectoryFailed)
    assert (failed.trajectory_id, failed.placement) == (T, 3)
    assert (failed.reason, failed.detail) == ("env-lost", "the file is gone")
