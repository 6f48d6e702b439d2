"""The store's database in memory: the product's handlers over dictionaries; and its prompts.

Reads   requests of the store's actor
Writes  rows and chunks, which no death of a process takes away
Gives   MemoryDatabase; StoreDatabase, with the checks of what is written to it; StoreProcess,
        where its data comes from. Raises DiskFull while a fault has filled the disk, Violation

A commit takes no time here.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from laminar import ids
from laminar.actors.host import Actor, Host
from laminar.actors.store import READS, Store
from laminar.engines.made_up_tokens import prompt_of, tokens_of
from laminar.events.reasons import DropReason, FinishReason
from laminar.ids import Purpose
from laminar.ports import DiskFull
from laminar.sim.interfaces import World
from laminar.sim.models.idle import Idle
from laminar.sim.runtime.violation import Violation
from laminar.sim.scenario import DATA_DIGEST
from laminar.storage import messages as m
from laminar.storage.handlers import Handlers
from laminar.storage.rows import (
    DamageError,
    LoadedPrompts,
    NotTokenised,
    PayloadRemoved,
    PromptCount,
    PromptKey,
)
from laminar.storage.rules import Chunk, Row

_PROMPT = m.PromptPayload(prompt="", ground_truth=None, columns={}, data_source="made")
TOKENISE_S = 0.01
_KINDS = {m.AppendReply: "append", m.FinishReply: "finish", m.PutRewardsReply: "reward"}


class MemoryDatabase:
    """The rows of one run, as storage/database.py has them in SQLite."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.full = False  #: its disk
        self._chunks: dict[str, list[Chunk]] = {}
        self.removed: set[str] = set()  #: trajectories without their payload
        self._prompts: dict[PromptKey, bytes] = {}
        self._prompt_ids: dict[PromptKey, bytes] = {}
        self._extras: dict[str, m.Extras] = {}
        self._meta = {"data_digest": "", "train_prompts": "0", "eval_prompts": "0"}
        self._handlers = Handlers(self)

    # --- for the store's actor ----------------------------------------------------------------

    def load_prompts(
        self, train: Sequence[m.PromptPayload], held_out: Sequence[m.PromptPayload], digest: str
    ) -> None:
        self._must_have_room()
        for purpose, prompts in ((Purpose.TRAIN, train), (Purpose.EVAL, held_out)):
            for index, prompt in enumerate(prompts):
                self._prompts[PromptKey(str(purpose), index)] = m.encode_prompt(prompt)
                self._prompt_ids[PromptKey(str(purpose), index)] = prompt.prompt_ids
            self._meta[f"{purpose}_prompts"] = str(len(prompts))
        self._meta["data_digest"] = digest

    def prompt_count(self) -> PromptCount:
        meta = self._meta
        train, held_out = int(meta["train_prompts"]), int(meta["eval_prompts"])
        return PromptCount(train, held_out, meta["data_digest"])

    def keep_prompt_ids(self, ids: Mapping[PromptKey, bytes]) -> None:
        self._must_have_room()
        self._prompt_ids |= ids

    def handle_batch(self, requests: Sequence[m.Request]) -> list[m.Reply | NotTokenised]:
        if not all(isinstance(request, READS) for request in requests):
            self._must_have_room()
        return [self._handle(request) for request in requests]

    def close(self) -> None:
        """What is in it stays."""

    def _must_have_room(self) -> None:
        if self.full:
            raise DiskFull(errno.ENOSPC, "the disk of the store is full")

    def _handle(self, request: m.Request) -> m.Reply | NotTokenised:
        try:
            return self._handlers.answer(request)
        except NotTokenised as missing:
            return missing
        except DamageError as error:
            return m.ErrorReply(reason=str(error))

    # --- rows, for the handlers ---------------------------------------------------------------

    def meta(self) -> dict[str, str]:
        return self._meta

    def prompt(self, key: PromptKey) -> bytes | None:
        return self._prompts.get(key)

    def prompt_ids(self, key: PromptKey, payload: bytes) -> bytes:
        return self._prompt_ids[key]

    def row(self, trajectory_id: str) -> Row | None:
        return self.rows.get(trajectory_id)

    def save(self, before: Row | None, after: Row) -> None:
        self.rows[after.id] = after

    def set_reward_text(
        self, trajectory_id: str, score: float | None, text: str | None, extras: m.Extras
    ) -> None:
        self._extras[trajectory_id] = extras

    def extras(self, trajectory_id: str) -> m.Extras:
        return self._extras.get(trajectory_id, {})

    def add_chunk(self, row: Row, chunk: Chunk) -> None:
        self._chunks.setdefault(row.id, []).append(chunk._replace(source=row.source))

    def drop_chunks(self, trajectory_id: str) -> None:
        self._chunks.pop(trajectory_id, None)

    def chunk(self, row: Row, segment: int, offset: int) -> Chunk | None:
        chunks = self._chunks.get(row.id, [])
        return next((c for c in chunks if (c.segment, c.offset) == (segment, offset)), None)

    def chunks(self, trajectory_id: str) -> list[Chunk]:
        if trajectory_id in self.removed:
            raise PayloadRemoved(f"the tokens of {trajectory_id} are not in the store any more")
        return self._chunks.get(trajectory_id, [])

    def removable(self, before_step: int, keep_tokens: int, most: int) -> list[str]:
        ended = [row for row in self.rows.values() if row.end is not None and row.num_tokens]
        ended = [row for row in ended if row.id not in self.removed]
        kept = [row for row in ended if row.end_reason != DropReason.MISMATCH]
        beyond = sum(row.num_tokens for row in kept) - keep_tokens
        found: list[str] = []
        for step, row in sorted(((_needed_until(row), row) for row in kept), key=itemgetter(0)):
            if beyond <= 0 or step >= before_step or len(found) == most:
                break
            found.append(row.id)
            beyond -= row.num_tokens
        return found

    def remove_payload(self, trajectory_id: str) -> None:
        del self._chunks[trajectory_id]
        self.removed.add(trajectory_id)

    def totals(self) -> list[tuple[str, int, int, int]]:
        found: dict[str, list[int]] = {}
        for row in self.rows.values():
            total = found.setdefault(row.end or row.status, [0, 0, 0])
            for place, count in enumerate((1, row.num_tokens, row.tokens_lost)):
                total[place] += count
        return [(name, *counts) for name, counts in sorted(found.items())]  # type: ignore[misc]

    def database_bytes(self) -> int:
        return 0


def _needed_until(row: Row) -> int:
    step = row.end_step if row.end == "trained" else row.version_step
    assert step is not None, "what has tokens was opened"
    return step


class StoreDatabase(MemoryDatabase):
    """It tells the checks of a world who writes what, and under which placement."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._request: m.Request = m.Stats()  #: that is being handled, and
        self._placements: dict[str, int] = {}  #: by trajectory, what it writes to

    def _handle(self, request: m.Request) -> m.Reply | NotTokenised:
        self._request, self._placements = request, {}
        reply = super()._handle(request)
        if isinstance(reply, m.ErrorReply):
            raise Violation("nothing_is_damaged", reply.reason)
        trains = isinstance(request, m.Fetch) and not request.with_prompt  # not a late scorer
        if trains and isinstance(reply, m.FetchReply) and reply.removed:
            what = f"the tokens of {', '.join(reply.removed)} were removed"
            raise Violation("needed_payload_is_there", what)
        if isinstance(reply, m.EndReply):
            for result in reply.results:
                if result.answer != "ok":
                    what = f"{result.trajectory_id}: {result.reason}"
                    raise Violation("store_takes_every_end", what, result.trajectory_id)
        elif isinstance(reply, m.AppendReply | m.FinishReply | m.PutRewardsReply):
            for written in reply.results:
                if written.answer != "ok":
                    self._world.coverage.hit(f"store:{_KINDS[type(reply)]}-{written.answer}")
        return reply

    def remove_payload(self, trajectory_id: str) -> None:
        self._world.coverage.hit("store:payload-removed")
        super().remove_payload(trajectory_id)

    def save(self, before: Row | None, after: Row) -> None:
        if isinstance(self._request, m.Open):
            self._world.coverage.hit(f"store:open-{after.status}-{_change(before, after)}")
        if after.status == "generated" and (before is None or before.status == "open"):
            self._require_own_tokens(after)
        self._world.checks.stored(after, self._placement(after.id))
        super().save(before, after)

    def _placement(self, trajectory_id: str) -> int:
        """Under which the request that is being handled writes to this trajectory."""
        if not self._placements:
            items = self._request.items  # type: ignore[union-attr]
            self._placements = {item.trajectory_id: item.placement for item in reversed(items)}
        return self._placements[trajectory_id]

    def _require_own_tokens(self, row: Row) -> None:
        """Whichever replica generated which part: the response is the one of its seed."""
        group, sibling = ids.GroupId(row.group_id), row.sibling
        seed = ids.trajectory_seed(self._world.scenario.settings.seed, group, sibling, row.attempt)
        found = b"".join(chunk.tokens for chunk in self.chunks(row.id))
        if found != tokens_of(seed, 0, row.num_tokens, ends=row.finish_reason == FinishReason.STOP):
            raise Violation("tokens_continue", f"{row.id} has tokens of another seed", row.id)


def _change(before: Row | None, after: Row) -> str:
    """What an opening has made of a row."""
    if before is None:
        return "create"
    return "restart" if after.attempt > before.attempt else "move"


class StoreProcess(Idle):
    """The process of the store; where its prompts come from, and a tokenizer that takes a while."""

    def make_actor(self, host: Host) -> Actor:
        return Store(host, lambda: self.world.database, self)

    async def load(self) -> LoadedPrompts:
        await self._work(self.chance.uniform(0, self.scenario.start_s))
        train, held_out = self.scenario.num_train, self.scenario.num_eval
        return LoadedPrompts([_PROMPT] * train, [_PROMPT] * held_out, 0, DATA_DIGEST)

    async def tokenise(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        await self._work(self.chance.uniform(0, TOKENISE_S))
        return {key: np.array(prompt_of(*key), "<i4").tobytes() for key in prompts}

    async def _work(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s * self.process.slow)
