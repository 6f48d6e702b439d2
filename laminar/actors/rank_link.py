"""The links between rank 0 and the hosts of other nodes' ranks: messages over request and reply.

Reads   polls of the hosts, on rank 0; its answers, on a host
Emits   orders, results and requests to the table of keys, both ways
Gives   TrainerLink, of a host (actors/rank_host.py); TrainerLinks, on rank 0: the RankHosts of
        training/rank_processes.py
Raises  LinkEnded

A host asks, rank 0 answers: at once if it has something to say, else after a second, so that each
hears the other. Both send their messages as a stream of bytes in parts, since a batch is larger
than a frame. Requests of one process arrive once and in order, so a part needs no number.

A host begins a link only when none of its ranks lives, and chooses a new session for it. A group is
started on hosts that are free; more hosts than nodes are spares. Hosts of the former group, which
the trainer's lock file names, must say that they are free, have left, or be silent for so long that
their ranks have ended: their lease, and as long again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from laminar.actors.host import Host
from laminar.events.families import Family, Item, WireError
from laminar.net.calls import Batch, Client, RpcError
from laminar.run.child_channel import ChildLost, FrameBuffer, Ready, encode_frame
from laminar.training import rank_processes
from laminar.training.rank_processes import (
    BEAT_S,
    ORDER_BYTES_MAX,
    Answer,
    FailedMessage,
    Member,
    Order,
    RankError,
    RankProcesses,
    describe_silence,
)

PART_BYTES = 1 << 20  #: of a stream, in one request or reply
WAIT_NOTE_S = 5.0  #: wait for hosts after which the user is told


class StartRanks(msgspec.Struct, tag="start-ranks", frozen=True):
    """The first message to a host: start the ranks of this node of the trainer."""

    node: int


class Poll(Item, frozen=True):
    """A host's question, with the next part of what it has to say."""

    session: str
    node: str  #: machine of the host
    trainer: str  #: boot id of the trainer that it knows; empty: none yet
    data: bytes


class Reply(Item, frozen=True):
    """The answer to a poll."""

    trainer: str
    data: bytes = b""
    ended: str = ""  #: why the link has ended; empty: it has not


ToHost = StartRanks | Order
FromHost = Answer | Ready
_polls = Family[Poll](Poll, "a request is not a poll of a rank host: {error}")
_replies = Family[Reply](Reply, "a reply is not that of a trainer: {error}")
_encode = msgspec.msgpack.Encoder().encode


class LinkEnded(Exception):
    """The link of a host has ended; its ranks must end, too."""


class _Outbox:
    """Messages to send, cut into parts."""

    def __init__(self) -> None:
        self._parts = deque[memoryview]()

    def put(self, message: Any) -> None:
        frame = memoryview(encode_frame(message))
        self._parts.extend(frame[at : at + PART_BYTES] for at in range(0, len(frame), PART_BYTES))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take_part(self) -> bytes:
        part = bytearray()
        while self._parts and len(part) + len(self._parts[0]) <= PART_BYTES:
            part += self._parts.popleft()
        return bytes(part)


class TrainerLink:
    """The link of a host to rank 0, from the time at which it has no ranks to their end."""

    def __init__(
        self, client: Client, node: str, lease_s: float, on_message: Callable[[ToHost], object]
    ) -> None:
        """`lease_s`: longest silence of the trainer."""
        self._client, self._node, self._lease_s = client, node, lease_s
        self._outbox, self._received = _Outbox(), FrameBuffer(ToHost, ORDER_BYTES_MAX)
        self._on_message = on_message
        self._session, self._trainer = secrets.token_hex(8), ""
        self._news = asyncio.Event()

    def send(self, message: FromHost) -> None:
        self._outbox.put(message)
        self._news.set()

    async def run(self) -> None:
        """Exchange messages until the link ends; LinkEnded says why."""
        polls = deque[asyncio.Task[bytes]]()
        try:
            while True:
                # A second poll carries what came up while the first one waits for an answer.
                if not polls or (self._outbox and len(polls) == 1):
                    polls.append(asyncio.ensure_future(self._poll()))
                    continue
                self._news.clear()
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({polls[0], news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                while polls and polls[0].done():
                    self._take(polls.popleft())
        finally:
            for poll in polls:
                poll.cancel()

    async def _poll(self) -> bytes:
        part = self._outbox.take_part()
        poll = Poll(session=self._session, node=self._node, trainer=self._trainer, data=part)
        return await self._client.call(_encode(poll), self._lease_s)

    def _take(self, answered: asyncio.Task[bytes]) -> None:
        try:
            reply = _replies.decode(answered.result())
            if reply.ended:
                raise LinkEnded(reply.ended)
            self._trainer = reply.trainer
            for message in self._received.feed(reply.data):
                self._on_message(message)
        except TimeoutError:
            raise LinkEnded(f"the trainer {describe_silence(self._lease_s)}") from None
        except (RpcError, ChildLost) as error:
            raise LinkEnded(str(error)) from error


class _HostLink:
    """The link to one host, as rank 0 sees it: a Member once its ranks are started."""

    def __init__(self, poll: Poll, name: str, wake: Callable[[], None]) -> None:
        """`wake`: answers polls that wait."""
        self.session, self.host, self._wake = poll.session, name, wake
        self.name = f"the host {name} of the ranks on {poll.node}"
        self.is_ready, self.silent_s = True, 0.0
        self.waiting: dict[int, asyncio.Future[tuple[bytes, ...]]] = {}
        self.ended = ""  #: why it has ended
        self.ready: asyncio.Future[None] | None = None
        self.group: RankProcesses | None = None
        self.outbox, self._received = _Outbox(), FrameBuffer(FromHost, ORDER_BYTES_MAX)
        self.last, self.asked_s, self.heard = 0, 0.0, True  #: of the newest poll

    def send(self, message: Any) -> None:
        self.outbox.put(message)
        self._wake()

    def kill(self) -> None:
        self.end("the ranks of the trainer were ended")

    def end(self, reason: str) -> None:
        """End the link; if its ranks are a part of a group, that fails."""
        self.ended = self.ended or reason
        if self.group is not None:
            self.group.fail_group(RankError(f"{self.name} is gone: {reason}"))
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(None)
        self._wake()

    def hear(self, number: int, poll: Poll) -> None:
        """Take what a poll says; it may be passed to the handler several times."""
        if number > self.last:
            self.last, self.asked_s, self.heard = number, time.monotonic(), True
            try:
                for message in self._received.feed(poll.data):
                    self._receive(message)
            except ChildLost as error:
                self.end(str(error))

    def _receive(self, message: FromHost) -> None:
        assert self.group is not None and self.ready is not None
        if isinstance(message, Ready):
            self.ready.set_result(None)
        elif isinstance(message, FailedMessage) and not message.number:
            self.group.fail_group(rank_processes.make_error(message))
        else:
            self.group.handle_answer(self, message)


class TrainerLinks:
    """The hosts of all other nodes' ranks."""

    def __init__(self, host: Host) -> None:
        self._host, trainer = host, host.config.trainer
        self._wanted, self._lease_s = trainer.nodes - 1, host.config.coordinator.node_lease_ms / 1e3
        self._links: dict[str, _HostLink] = {}  #: newest by name of the host
        self._members: list[_HostLink] = []
        self._changed = asyncio.Event()
        self._server = host.make_server(self._answer, lambda boot: None)

    async def start_ranks(self, group: RankProcesses, deadline: float) -> Sequence[Member]:
        """Start the ranks of the other nodes; RankError."""
        await self._server.start()
        self._host.spawn(self._server.wait_closed())
        await self._host.publish_address(self._server.address)
        loop = asyncio.get_running_loop()
        self._members = await self._await_free(group, deadline)
        group.note_hosts([link.host for link in self._members])
        for node, link in enumerate(self._members, start=1):
            link.group, link.ready = group, loop.create_future()
            link.send(StartRanks(node))
        for link in self._members:
            assert link.ready is not None
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await link.ready
            except TimeoutError:
                raise RankError(f"{link.name} has not started them in time") from None
        return self._members

    async def close(self) -> None:
        for link in self._members:
            link.group = None
            link.end("the trainer has ended")
        await self._server.close()

    async def _await_free(self, group: RankProcesses, deadline: float) -> list[_HostLink]:
        """Wait for enough free hosts, and until no rank of a former group can live."""
        former, begun_s, noted = group.former_hosts, time.monotonic(), ""
        while True:
            free = {link.host: link for link in self._links.values() if not link.ended}
            now_s = time.monotonic()
            late = now_s - begun_s > 2 * self._lease_s
            alive = [] if late else [n for n in former if n not in free and self._may_live(n)]
            if len(free) >= self._wanted and not alive:
                first = sorted(free, key=lambda name: (name not in former, name))
                return [free[name] for name in first[: self._wanted]]
            text = self._describe_wait(free, alive)
            if now_s > deadline:
                raise RankError(f"{text} (coordinator.start_timeout_s)")
            if text != noted and now_s - begun_s > WAIT_NOTE_S:
                noted = text
                group.say(text)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._changed.wait()

    def _may_live(self, host: str) -> bool:
        """Return whether ranks of this host may live: its lock file names them until they end."""
        try:
            return (self._host.run_dir / f"{host}.lock").stat().st_size > 0
        except FileNotFoundError:
            return False

    def _describe_wait(self, free: dict[str, _HostLink], alive: list[str]) -> str:
        if alive:
            return f"waiting for the ranks of the former trainer on {', '.join(alive)} to end"
        here = f"{len(free)} {'is' if len(free) == 1 else 'are'} here ({', '.join(free)})"
        return (
            f"waiting for {self._wanted} trainer nodes in addition to the first: "
            f"{here if free else 'none is here'}; start laminar-node RUN --name trainer-node-K"
        )

    def _wake(self) -> None:
        """Answer the polls that wait, after the present turn of the server."""
        asyncio.get_running_loop().call_soon(self._server.retry_held)

    def _answer(self, batch: Batch) -> list[bytes | RpcError | None]:
        """Answer polls; of those of one host only the newest waits, if it says nothing.

        A poll that waits is not acknowledged, and large ones would block the session."""
        newest = {boot: number for boot, number, _ in batch}
        return [
            self._answer_one(boot, number, body, waits=newest[boot] == number)
            for boot, number, body in batch
        ]

    def _answer_one(
        self, boot: str, number: int, body: bytes, *, waits: bool
    ) -> bytes | RpcError | None:
        own, name = self._host.boot_id, boot.rpartition("-")[0]
        try:
            poll = _polls.decode(body, 2 * PART_BYTES)
        except WireError as error:
            return RpcError(str(error))
        if poll.trainer not in ("", own):
            return _encode(Reply(trainer=own, ended="another trainer has taken its place"))
        link = self._links.get(name)
        if link is None or link.session != poll.session:
            if link is not None:
                link.end("it has started a new link")
            link = self._links[name] = _HostLink(poll, name, self._wake)
            self._changed.set()
        link.hear(number, poll)
        if link.ended:
            return _encode(Reply(trainer=own, ended=link.ended))
        if waits and not (poll.data or link.outbox) and time.monotonic() - link.asked_s < BEAT_S:
            return None
        return _encode(Reply(trainer=own, data=link.outbox.take_part() if waits else b""))
