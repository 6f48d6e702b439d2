"""The store actor: prompts, partial responses and experience of the run, over a socket.

Reads   the prompts of the configuration; requests of rollouts and trainer; EndTrajectories commands
Writes  the database of the run (through StoreBackend), its address
Emits   DataLoaded, TrajectoriesEnded

All requests of one turn of the loop are one transaction, and replies follow once it is durable. The
database is opened when the previous store has ended. While the disk is full, writing requests wait
and reading ones are answered. A prompt is tokenised in the background when it is first needed,
because a run of a few steps needs few of them; only requests that need it wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from laminar.actors.disk_full_retry import DiskFullRetry
from laminar.actors.host import Host
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names.ports import DatabaseHeld, DiskError
from laminar.net.calls import Batch, RpcError
from laminar.storage import messages as m
from laminar.storage.rows import LoadedPrompts, NotTokenised, PromptCount, PromptKey

HELD_PAUSE_S = 0.1  #: interval between attempts to open a database that another process still has
READS = (m.Fetch, m.SamplePrompts, m.Stats)  #: requests that need no disk space


class StoreBackend(Protocol):
    """The database of the store. A write raises DiskError; DiskFull leaves nothing of it."""

    async def fill(self, prompts: LoadedPrompts) -> PromptCount:
        """Store the data once, with the event loop free; ConfigError if other data is stored."""

    def save_prompt_ids(self, ids: Mapping[PromptKey, bytes]) -> None:
        """Save token ids (int32 little-endian) of prompts that had none; durable on return."""

    def handle_batch(self, requests: Sequence[m.Request]) -> list[m.Reply | NotTokenised]:
        """Answer requests in order; all changes are durable on return.

        A request that needs missing token ids is left undone and answered with NotTokenised.
        """

    def close(self) -> None: ...


class PromptSource(Protocol):
    """The prompts and the tokenizer; both are slow and work outside the event loop."""

    async def load(self) -> LoadedPrompts:
        """Read and check all prompts; ConfigError names the user's mistake."""

    async def tokenise_prompts(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        """Return the token ids (int32 little-endian) of payloads; ConfigError."""


class Store:
    """The actor that serves the database over a socket."""

    def __init__(
        self, host: Host, open_database: Callable[[], StoreBackend], prompts: PromptSource
    ) -> None:
        """Create the actor.

        `open_database`: opens the run's, or creates it; raises ConfigError, DiskError, and
        DatabaseHeld while another process of the store has it.
        """
        self.host = host
        self.database: StoreBackend | None = None
        self._open_database, self._prompts = open_database, prompts
        self._disk = DiskFullRetry(host, "the store")
        self._endings: list[tuple[cmd.Envelope, cmd.EndTrajectories]] = []  #: not on disk yet
        self._ending = False  #: whether a task writes them
        self._ready = False  #: whether the data is loaded
        self._wanted: dict[PromptKey, bytes] = {}  #: payloads that have to be tokenised
        self._tokenising = False
        self.server = host.make_server(
            self._handle_batch, lambda name: host.log.info("peer-lost", peer=name)
        )

    async def start(self) -> None:
        prompts = await self._prompts.load()
        loaded = await self._disk.until_room(partial(self._load_prompts, prompts))
        await self.host.hit_failpoint("store-filled")
        await self.server.start()
        await self._disk.until_room(partial(self.host.publish_address, self.server.address))
        self.host.spawn(self.server.wait_closed())
        self.host.emit(loaded, train=loaded.num_train, held_out=loaded.num_eval)
        self._ready = True
        self._write_endings()

    async def _load_prompts(self, prompts: LoadedPrompts) -> ev.DataLoaded:
        if self.database is None:
            self.database = await self._open_when_free()
        count = await self.database.fill(prompts)
        return ev.DataLoaded(
            num_train=count.train,
            num_eval=count.held_out,
            overlap=prompts.overlap,
            digest=count.digest,
        )

    async def _open_when_free(self) -> StoreBackend:
        """Open the database, once the previous store has ended.

        That was replaced; its node, or the coordinator at its next request, tells it to end.
        """
        told = ""
        while True:
            try:
                return self._open_database()
            except DatabaseHeld as held:
                if told != str(held):
                    told = str(held)
                    self.host.notify_user(f"{told}: waiting for its end")
            await self.host.sleep_for(HELD_PAUSE_S)

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        """Write all ends that arrived together in one transaction.

        Those left by an earlier process of the store come before this one has its database.
        """
        self._endings += [(o, c) for o, c in orders if isinstance(c, cmd.EndTrajectories)]
        self._write_endings()

    def _write_endings(self) -> None:
        if self._endings and self._ready and not self._ending:
            self._ending = True
            self.host.spawn(self._end_trajectories())

    async def _end_trajectories(self) -> None:
        while self._endings:
            ending, self._endings = self._endings, []
            requests = [m.End(items=tuple(end_item(e) for e in c.endings)) for _, c in ending]
            await self.host.hit_failpoint("store-end")
            replies = await self._disk.until_room(partial(self._handle_ends, requests))
            await self.host.hit_failpoint("store-ended")
            for (order, _), reply in zip(ending, replies, strict=True):
                if not isinstance(reply, m.EndReply):
                    return self.host.fail_process(f"the store could not end trajectories: {reply}")
                self._report_ends(order, reply)
        self._ending = False

    async def _handle_ends(self, requests: list[m.End]) -> list[m.Reply | NotTokenised]:
        assert self.database is not None, "orders come after the data is loaded"
        return self.database.handle_batch(requests)

    def _report_ends(self, order: cmd.Envelope, reply: m.EndReply) -> None:
        for result in reply.results:
            if result.answer != "ok":
                return self.host.fail_process(
                    f"the store could not end {result.trajectory_id}: {result.reason}"
                )
        ended = tuple(
            ev.EndedTrajectory(
                trajectory_id=r.trajectory_id,  # type: ignore[arg-type]
                num_tokens=r.num_tokens,
                tokens_lost=r.tokens_lost,
            )
            for r in reply.results
        )
        event = ev.TrajectoriesEnded(command_id=order.command_id, ended=ended)
        self.host.emit(event, event_seq=order.cause, count=len(ended))

    async def stop(self) -> None:
        await self.server.close()
        if self.database is not None:
            self.database.close()

    def _handle_batch(self, batch: Batch) -> list[bytes | RpcError | None]:
        """Answer invalid bytes with an error; the others share one commit, or wait for space."""
        answers: list[bytes | RpcError | None] = [None] * len(batch)
        requests: list[m.Request] = []
        places = []
        for index, (_, _, body) in enumerate(batch):
            try:
                requests.append(m.decode_request(body))
                places.append(index)
            except m.StoreWireError as error:
                answers[index] = RpcError(str(error))
        for index, reply in zip(places, self._answer_requests(requests), strict=True):
            answers[index] = None if reply is None else m.encode(reply)
        return answers

    def _answer_requests(self, requests: list[m.Request]) -> list[m.Reply | None]:
        """Answer requests; None for one that has to wait.

        Writes wait while the disk is full, and all while it fails (raises if that takes too long);
        requests that need untokenised prompts wait for them.
        """
        assert self.database is not None, "the server starts after the database is filled"
        if not requests:
            return []
        try:
            found = self.database.handle_batch(requests)
        except DiskError as error:
            self._disk.handle_failure(error)
            if not self._disk.full:
                return [None] * len(requests)
            reads = [request for request in requests if isinstance(request, READS)]
            answers = iter(self.database.handle_batch(reads))
            return [
                self._reply_or_tokenise(next(answers)) if isinstance(r, READS) else None
                for r in requests
            ]
        if not (self._disk.full and all(isinstance(request, READS) for request in requests)):
            self._disk.record_success()
        return [self._reply_or_tokenise(answer) for answer in found]

    # --- prompts ------------------------------------------------------------------------------

    def _reply_or_tokenise(self, answer: m.Reply | NotTokenised) -> m.Reply | None:
        if not isinstance(answer, NotTokenised):
            return answer
        self._wanted |= answer.prompts
        if not self._tokenising:
            self._tokenising = True
            self.host.spawn(self._tokenise_missing())
        return None

    async def _tokenise_missing(self) -> None:
        """Tokenise, in batches, until no request waits for a prompt."""
        while self._wanted:
            ids = await self._prompts.tokenise_prompts(self._wanted.copy())
            await self._disk.until_room(partial(self._save_prompt_ids, ids))
            for key in ids:
                del self._wanted[key]
            self.server.retry_held()
        self._tokenising = False

    async def _save_prompt_ids(self, ids: Mapping[PromptKey, bytes]) -> None:
        assert self.database is not None, "it listed the prompts without ids"
        self.database.save_prompt_ids(ids)


def end_item(ending: cmd.TrajectoryEnding) -> m.EndItem:
    """Convert the coordinator's order for one trajectory to a request item."""
    return m.EndItem(
        trajectory_id=ending.trajectory_id,
        group_id=ending.group,
        sibling=ending.sibling,
        purpose=ending.purpose,
        row_index=ending.row_index,
        placement=ending.placement,
        end=ending.end,  # type: ignore[arg-type]
        reason=ending.reason,
        step=max(ending.step, 0),
    )
