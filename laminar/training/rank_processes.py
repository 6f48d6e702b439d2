"""The processes of a trainer with several ranks: rank 0 starts the others, and all end together.

Reads   replies of the other ranks, their heartbeats, their exits; a lock file of the run
Writes  orders to them; the lock file: their process ids, as long as one of them lives
Starts  the ranks of this machine, as its children: on rank 0, which alone is the trainer of the
        run, and on the host of another node's ranks (actors/rank_host.py)
Gives   RankProcesses; RankLink, for a rank; Member, for what else carries out orders
Raises  RankError, which names the rank

Orders go over channels (run/child_channel.py), not through a collective, in which an idle rank
would reach the time limit. The end of its channel tells a rank that its starter is gone.

An exit of a rank is noticed at once, a frozen rank by its heartbeats, which it returns from its
event loop while a thread computes. A rank ends itself when its starter is frozen. All processes of
the group hold the lock through one inherited descriptor: the ranks of the next trainer start when
it is free, so former ranks never write at the same time.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from laminar.config import Config, ConfigError
from laminar.names.process_end import describe_exit
from laminar.run.child_channel import Channel, ChildLost, Ready
from laminar.run.child_process import Child, Spawned, print_output, spawn_child
from laminar.run.lock import describe_dead_owner, try_lock
from laminar.run.permissions import open_private
from laminar.training.rank_store import StoreForward, StoreReply, StoreRequest, StoreTable, Submit
from laminar.training.trainer_state import CheckpointError

BEAT_S = 1.0
ORDER_BYTES_MAX = (1 << 32) - 1  #: limit of an order or reply, of which batches are parts
SETTLE_S = 0.5
"""Wait for the exit of a rank after another one fails, as it may be the cause: a collective fails
on all other ranks at once."""
LOCK_POLL_S = 0.05
LOCK_QUIET_S = 1.0
"""Wait for former ranks after which a message is logged: mostly they end within milliseconds."""
Result = TypeVar("Result")
DISK = "disk"
"""The kind of an OSError, after which the ranks continue: a full disk may have room later."""
_KINDS: dict[str, type[Exception]] = {"config": ConfigError, "checkpoint": CheckpointError}


class RankError(RuntimeError):
    """A rank has failed or is gone; the others were ended."""


class OrderMessage(msgspec.Struct, tag="order", frozen=True, kw_only=True):
    """An order from rank 0."""

    number: int
    body: bytes


class BeatMessage(msgspec.Struct, tag="beat", frozen=True):
    """Heartbeat of a starter, which a rank returns."""


class DoneMessage(msgspec.Struct, tag="done", frozen=True, kw_only=True):
    """Reply to rank 0 with the results of an order, by rank."""

    number: int
    bodies: tuple[bytes, ...]


class FailedMessage(msgspec.Struct, tag="failed", frozen=True, kw_only=True):
    """Reply to rank 0 with the reason why an order failed."""

    number: int
    kind: str  #: a key of _KINDS, or DISK; empty: RankError
    reason: str
    errno: int  #: set with DISK


Reply = DoneMessage | FailedMessage
Answer = Reply | StoreRequest | BeatMessage
"""What a rank sends to its starter."""
Order = OrderMessage | StoreReply | BeatMessage
"""What a starter sends to a rank."""


class Member(Protocol):
    """The ranks that one link reaches: one of this machine, or those of another node."""

    name: str  #: "rank 3 of the trainer"
    is_ready: bool  #: whether it must be heard
    heard: bool  #: whether it was, since this was reset
    silent_s: float
    waiting: dict[int, asyncio.Future[tuple[bytes, ...]]]  #: results, by number of the order

    def send(self, message: Any) -> None: ...

    def kill(self) -> None: ...


class RankHosts(Protocol):
    """The hosts of the ranks of other nodes (actors/rank_link.py)."""

    async def start_ranks(self, group: RankProcesses, deadline: float) -> Sequence[Member]:
        """Have the hosts start their ranks, and return when all take orders; RankError."""
        ...

    async def close(self) -> None:
        """End those ranks."""


class RankProcesses:
    """The ranks of one machine, and on rank 0 those of all others."""

    def __init__(
        self,
        config: Config,
        program: Sequence[str],
        *,
        lock: Path | None,
        lost: Callable[[str], None],
        say: Callable[[str], None],
        numbers: Sequence[int] | None = None,
        hosts: RankHosts | None = None,
        submit: Submit | None = None,
    ) -> None:
        """Set the group up without starting it.

        `program`: the module of a rank and its words; its number follows. `lock`: a file of the
        run. `lost` is called once with the reason why the ranks are gone, `say` with the reason of
        a wait. `numbers`: the ranks of this machine; None: all but rank 0. `hosts`: of the other
        ranks. `submit`: the way to the table of rank 0, if this is not rank 0."""
        self.size = config.trainer.total_ranks
        self._start_s = config.coordinator.start_timeout_s
        self._lease_s = config.coordinator.node_lease_ms / 1000
        self._program, self._lock_path = program, lock
        self._tell_lost, self.say, self._hosts = lost, say, hosts
        self._numbers = range(1, self.size) if numbers is None else numbers
        self.submit: Submit = submit or StoreTable().submit
        self._ranks: list[_Rank] = []
        self._members: list[Member] = []
        self._error: Exception | None = None
        self._gone = asyncio.Event()  #: set with the error, after which no rank lives
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0
        self._closing = False
        self._lock = -1
        self.former_hosts: list[str] = []  #: of the ranks of the former trainer

    async def start(self) -> None:
        """Start the ranks, and return when all take orders.

        Raises RankError if one does not, or if former ranks do not end."""
        deadline = time.monotonic() + self._start_s
        if self._lock_path is not None:
            await self._take_lock(self._lock_path, deadline)
        for number in self._numbers:
            self._launch_rank(number)
        self.note_hosts(self.former_hosts)
        self._tasks.append(asyncio.ensure_future(self._watch_beats()))
        await asyncio.gather(self._await_ranks(deadline), self._await_hosts(deadline))
        self._raise_if_failed()

    async def call_ranks(self, body: bytes) -> list[bytes]:
        """Send an order to all ranks; return their replies, by rank, once all have answered.

        Ranks begin orders in the order of the calls. Raises RankError, and errors of a rank of the
        types in _KINDS or OSError."""
        self._raise_if_failed()
        self._number += 1
        order, loop = OrderMessage(number=self._number, body=body), asyncio.get_running_loop()
        for member in self._members:
            member.waiting[self._number] = loop.create_future()
            member.send(order)
        waiting = [member.waiting[self._number] for member in self._members]
        replies = await asyncio.gather(*waiting, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return [body for reply in replies if isinstance(reply, tuple) for body in reply]

    async def run_on_all_ranks(
        self, body: bytes, own: Awaitable[Result]
    ) -> tuple[Result, list[bytes]]:
        """Have all ranks carry out an order while `own` does the same here; return both results.

        Raises what `call_ranks` raises. If `own` fails: the loss of a rank if that was the cause,
        else its error, in the form that an error of another rank takes."""
        asked, here = asyncio.ensure_future(self.call_ranks(body)), asyncio.ensure_future(own)
        await asyncio.wait((asked, here), return_when=asyncio.FIRST_EXCEPTION)
        if here.done() and here.exception() is not None:
            await self._wait_for_rank_end()
        if self._error is not None:
            here.add_done_callback(_ignore_exception)  # maybe in a collective until that fails
            asked.add_done_callback(_ignore_exception)
            raise self._error
        if here.done() and (error := here.exception()) is not None:
            asked.add_done_callback(_ignore_exception)
            if isinstance(error, (OSError, *_KINDS.values())):
                raise error
            reason = f"rank 0 of the trainer failed: {type(error).__name__}: {error}"
            raise RankError(reason) from error
        return await here, await asked

    async def close(self) -> None:
        """End the ranks, and return when those of this machine have exited."""
        self._closing = True
        if self._hosts is not None:
            await self._hosts.close()
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        for task in self._tasks:
            task.cancel()
        if self._lock >= 0:
            if self._hosts is None:
                os.ftruncate(self._lock, 0)  # a trainer elsewhere reads that none is left
            os.close(self._lock)

    # --- starting -----------------------------------------------------------------------------

    async def _take_lock(self, path: Path, deadline: float) -> None:
        """Wait until every process of a former trainer is gone."""
        self._lock = open_private(path)
        say_at: float = time.monotonic() + LOCK_QUIET_S
        while not self._closing and not try_lock(self._lock, fcntl.LOCK_EX):
            now, who = time.monotonic(), path.read_text().partition("\n")[0] or "unknown"
            if now > deadline:
                dead = _describe_dead_ranks(path, who)
                raise RankError(
                    f"ranks of the former trainer (pids {who}) still lock {path} after "
                    f"{self._start_s:g} s (coordinator.start_timeout_s){dead}"
                )
            if now > say_at:
                say_at = deadline + 1.0  # say it once
                self.say(f"waiting for ranks of the former trainer to end (pids {who})")
            await asyncio.sleep(LOCK_POLL_S)
        if self._closing:
            raise RankError("the ranks were ended before they had started")
        self.former_hosts = path.read_text().splitlines()[1:]

    async def _await_ranks(self, deadline: float) -> None:
        left = max(0.0, deadline - time.monotonic())
        starts = [rank.await_ready(left) for rank in self._ranks]
        found = await asyncio.gather(*starts, return_exceptions=True)
        late = [r.number for r in self._ranks if not (r.is_ready or r.channel.ended.done())]
        for error in filter(None, found):
            reason = f"a rank of the trainer cannot start: {error}"
            if late:
                reason = (
                    f"rank {', '.join(map(str, late))} of the trainer has not started within "
                    f"{self._start_s:g} s (coordinator.start_timeout_s)"
                )
            self.fail_group(RankError(reason))

    async def _await_hosts(self, deadline: float) -> None:
        if self._hosts is None:
            return
        try:
            self._members += await self._hosts.start_ranks(self, deadline)
        except Exception as error:
            self.fail_group(error)

    def note_hosts(self, names: Sequence[str] = ()) -> None:
        """Write the members of this group to the lock file, for a trainer that waits.

        `names`: the hosts of its other ranks."""
        if self._lock >= 0:
            pids = (os.getpid(), *(rank.pid for rank in self._ranks))
            os.ftruncate(self._lock, 0)
            text = f"{', '.join(map(str, pids))} on {socket.gethostname()}"
            os.pwrite(self._lock, "\n".join((text, *names)).encode(), 0)

    def _launch_rank(self, number: int) -> None:
        spawned = spawn_child(
            *self._program,
            str(number),
            stderr=subprocess.PIPE,
            descriptors=[self._lock] if self._lock >= 0 else [],
        )
        rank = _Rank(spawned, number, self.handle_answer)
        rank.channel.ended.add_done_callback(partial(self._handle_end, rank))
        self._ranks.append(rank)
        self._members.append(rank)

    # --- watching -----------------------------------------------------------------------------

    def handle_answer(self, member: Member, answer: Answer) -> None:
        """Handle a message of a rank, or of another node's ranks."""
        member.heard = True
        if isinstance(answer, StoreRequest):
            loop = asyncio.get_running_loop()
            found = self.submit(answer)
            found.add_done_callback(
                lambda done: loop.call_soon_threadsafe(
                    member.send, answer.make_reply(done.result())
                )
            )
        elif isinstance(answer, FailedMessage):
            self._tasks.append(asyncio.ensure_future(self._handle_failure(member, answer)))
        elif isinstance(answer, DoneMessage) and not member.waiting[answer.number].done():
            member.waiting.pop(answer.number).set_result(answer.bodies)

    async def _handle_failure(self, member: Member, reply: FailedMessage) -> None:
        if reply.kind == DISK:
            member.waiting.pop(reply.number).set_exception(OSError(reply.errno, reply.reason))
        elif error := _KINDS.get(reply.kind):
            self.fail_group(error(reply.reason))
        else:
            await self._wait_for_rank_end()  # another rank may be the cause
            self.fail_group(RankError(f"{member.name} failed: {reply.reason}"))

    async def _wait_for_rank_end(self) -> None:
        """Wait shortly for the exit of a rank to be noticed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._gone.wait()

    def _handle_end(self, rank: _Rank, ended: asyncio.Future[ChildLost]) -> None:
        how = str(ended.result())
        if rank.returncode is not None:
            how = describe_exit(rank.returncode) + rank.last_lines
        self.fail_group(RankError(f"rank {rank.number} of the trainer has ended ({how})"))

    async def _watch_beats(self) -> None:
        """Fail the group if a member is silent; counted in polls: our own pauses do not count."""
        while self._error is None:
            await asyncio.sleep(BEAT_S)
            for member in self._members:
                member.send(BeatMessage())
                heard = member.heard or not member.is_ready  # its imports take long
                member.silent_s = 0.0 if heard else member.silent_s + BEAT_S
                member.heard = False
                if member.silent_s > self._lease_s:
                    self.fail_group(RankError(f"{member.name} {describe_silence(self._lease_s)}"))

    def fail_group(self, error: Exception) -> None:
        """Record the loss of a rank, kill the others, and fail all pending waits."""
        if self._error is not None or self._closing:
            return
        self._error = error
        self._gone.set()
        for member in self._members:
            member.kill()
            for future in member.waiting.values():
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # mark as retrieved, for futures without a waiter
        if isinstance(error, RankError):
            self._tell_lost(str(error))

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


class _Rank(Child):
    """A rank of this machine, as its starter sees it."""

    def __init__(
        self, spawned: Spawned, number: int, handle_answer: Callable[[Member, Answer], None]
    ) -> None:
        super().__init__(
            spawned,
            Answer,
            on_message=lambda answer: handle_answer(self, answer),
            on_output=print_output,
            bytes_max=ORDER_BYTES_MAX,
        )
        self.name, self.number = f"rank {number} of the trainer", number
        self.heard, self.silent_s = True, 0.0
        self.waiting: dict[int, asyncio.Future[tuple[bytes, ...]]] = {}

    def send(self, message: Any) -> None:
        self.channel.send(message)


class RankLink:
    """The link of a rank to its starter."""

    def __init__(self, end: socket.socket, lease_s: float) -> None:
        """Set up without a running event loop; `lease_s`: longest silence of the starter."""
        self._end, self._lease_s = end, lease_s
        self._silent_s = 0.0

    def submit(self, request: StoreRequest) -> Future[bytes]:
        """Send a request to the table of rank 0, from any thread; see Submit."""
        return self._stored.submit(request)

    async def serve_orders(self, handle: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Carry out orders until the starter closes its end, is gone or silent.

        Each order is a task; tasks start in the order of arrival."""
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel = Channel(
            self._end, Order, on_message=self._receive, bytes_max=ORDER_BYTES_MAX, hang_up_s=0.0
        )
        self._stored = StoreForward(self._channel.send)
        self._channel.send(Ready())
        while not self._channel.ended.done() and self._silent_s <= self._lease_s:
            await asyncio.wait({self._channel.ended}, timeout=BEAT_S)
            self._silent_s += BEAT_S  # in polls: the pauses of this process do not count

    def _receive(self, order: Order) -> None:
        self._silent_s = 0.0
        if isinstance(order, BeatMessage):
            self._channel.send(order)
        elif isinstance(order, StoreReply):
            self._stored.handle_reply(order)
        else:
            task = asyncio.ensure_future(self._carry_out(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, order: OrderMessage) -> None:
        reply: Reply
        try:
            reply = DoneMessage(number=order.number, bodies=(await self._handle(order.body),))
        except Exception as error:
            reply = make_failure(order.number, error)
        self._channel.send(reply)


def make_failure(number: int, error: Exception) -> FailedMessage:
    """Make the reply from which rank 0 can raise this error."""
    if isinstance(error, OSError) and error.errno:
        reason = error.strerror or str(error)
        return FailedMessage(number=number, kind=DISK, reason=reason, errno=error.errno)
    kind = next((name for name, known in _KINDS.items() if isinstance(error, known)), "")
    known = kind or isinstance(error, RankError)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return FailedMessage(number=number, kind=kind, reason=text, errno=0)


def make_error(failure: FailedMessage) -> Exception:
    """Make the error of a failure that ends the group."""
    return _KINDS.get(failure.kind, RankError)(failure.reason)


def _ignore_exception(task: asyncio.Future[Any]) -> None:
    """Mark the exception of an abandoned task as retrieved."""
    if not task.cancelled():
        task.exception()


def describe_silence(lease_s: float) -> str:
    return f"has been silent for {lease_s:g} s (coordinator.node_lease_ms)"


def _describe_dead_ranks(path: Path, recorded: str) -> str:
    """Return what to do about a lock whose recorded processes, "1, 2 on host", are all dead."""
    pids, _, host = recorded.partition(" on ")
    return describe_dead_owner(path, host, *map(int, pids.split(", "))) if host else ""
