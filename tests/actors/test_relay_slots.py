"""Who gets which slot of a relay: writers by process, other arenas, pins, limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from laminar.actors.relay_slots import CHAIN, CREATE_TRIES, FETCH, RelaySlots
from laminar.weights import messages as m
from laminar.weights.arena.arena import Arena
from laminar.weights.arena.region import ArenaError
from laminar.weights.arena.slots import SlotError
from laminar.weights.machine import ArenaMemory
from laminar.weights.version import manifest as mf
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.table import VersionTable
from laminar.weights.version.tensors import write_tensors
from tests.actors.parts import SPECS, VERSION_BYTES, commit, tensor

TRAINER = "trainer-0-a1"


class Slots(RelaySlots):
    """With real memory and nobody who sends."""

    def __init__(
        self, directory: Path, max_bytes: int, slots: int, on_shortage: Callable[[str], None]
    ) -> None:
        self.memory, self.versions = ArenaMemory(directory / "arena"), VersionTable(nullcontext())
        self.tasks: list[asyncio.Task[None]] = []
        super().__init__(self.memory, slots, max_bytes, self.versions, self.spawned, on_shortage)

    def spawned(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def take(self, manifest: mf.Manifest, slot: int) -> None:
        """What a plane does with a version that is complete."""
        region = self.memory.get_region(slot)
        self.versions.put(VersionCopy(manifest, slot, region, complete=True))

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.memory.close()


def slots_in(directory: Path, max_bytes: int = 1 << 20, slots: int = 3) -> Slots:
    return Slots(directory, max_bytes, slots, pytest.fail)


@pytest_asyncio.fixture
async def slots(tmp_path: Path) -> AsyncIterator[Slots]:
    made = slots_in(tmp_path)
    made.ensure_slots(VERSION_BYTES)
    yield made
    made.close()
    assert not (tmp_path / "arena").exists()


def arena_of(slots: Slots) -> str:
    return slots.ensure_slots(VERSION_BYTES).arena


def grant(slots: Slots, boot_id: str = TRAINER) -> int:
    granted = slots.grant_trainer_slot(boot_id, m.GrantSlot(arena=arena_of(slots)))
    assert isinstance(granted, m.SlotGranted)
    return granted.slot


async def publish(slots: Slots, version: int, boot_id: str = TRAINER) -> mf.Manifest | None:
    slot = grant(slots, boot_id)
    write_tensors(
        Arena.attach(Path(arena_of(slots))).get_slot(slot), SPECS, [("w", tensor(version))]
    )
    request = commit(arena_of(slots), slot, version)
    assert slots.begin_commit(boot_id, request)
    manifest = await slots.digest_slot(boot_id, request)
    if manifest is not None:
        slots.take(manifest, slot)
    return manifest


def held_over_chain(slots: Slots, manifest: mf.Manifest) -> bool:
    slot = slots.grant_to(CHAIN)
    slots.take(manifest, slot)
    return slots.commit_version(CHAIN, slot, manifest)


async def test_a_restarted_trainer_does_not_inherit_what_its_former_self_was_writing(
    slots: Slots,
) -> None:
    old = grant(slots)
    assert grant(slots) == old  # asked again
    new = grant(slots, "trainer-0-b2")
    with pytest.raises(SlotError, match="not granted to trainer-0-a1"):
        slots.begin_commit(TRAINER, commit(arena_of(slots), old, 5))
    assert slots.begin_commit("trainer-0-b2", commit(arena_of(slots), new, 6))
    assert len({grant(slots, f"trainer-{n}-x") for n in range(1, 3)}) == 2  # none was lost


async def test_a_slot_is_digested_to_the_end_also_when_its_writer_was_started_again(
    slots: Slots,
) -> None:
    slot = grant(slots)
    write_tensors(Arena.attach(Path(arena_of(slots))).get_slot(slot), SPECS, [("w", tensor(3))])
    request = commit(arena_of(slots), slot, 3)
    assert slots.begin_commit(TRAINER, request)
    assert grant(slots, "trainer-0-b2") not in (-1, slot)
    assert await slots.digest_slot(TRAINER, request) is not None
    assert slots.held == (3,)


async def test_no_second_slot_while_the_first_is_digested(slots: Slots) -> None:
    slot = grant(slots)
    request = commit(arena_of(slots), slot, 3)
    assert slots.begin_commit(TRAINER, request)
    assert grant(slots) == -1
    assert not slots.begin_commit(TRAINER, request)  # asked again after a reconnect
    await slots.digest_slot(TRAINER, request)
    assert grant(slots) >= 0


async def test_requests_about_a_former_relays_arena_change_nothing(slots: Slots) -> None:
    await publish(slots, 1)
    lease = slots.lease_version("rollout-0-x", m.LeaseVersion(version=1, exact=True))
    assert isinstance(lease, m.VersionLeased)
    other = arena_of(slots) + "-of-a-former-relay"
    assert isinstance(slots.grant_trainer_slot(TRAINER, m.GrantSlot(arena=other)), m.ArenaReplaced)
    void = slots.release(m.ReleaseLease(arena=other, lease_id=lease.lease_id))
    assert isinstance(void, m.ArenaReplaced)
    assert slots.is_other(other)
    assert slots.release(m.ReleaseLease(arena=arena_of(slots), lease_id=lease.lease_id)).valid


async def test_any_kept_version_is_leased_and_others_are_named(slots: Slots) -> None:
    for version in (4, 7):
        await publish(slots, version)
    for wanted, exact, found in ((4, True, 4), (7, True, 7), (4, False, 7), (0, False, 7)):
        lease = slots.lease_version("rollout-0-x", m.LeaseVersion(version=wanted, exact=exact))
        assert isinstance(lease, m.VersionLeased)
        assert mf.decode(lease.manifest).version == found
        slots.release(m.ReleaseLease(arena=lease.arena, lease_id=lease.lease_id))
    for wanted, exact in ((5, True), (8, False)):
        gone = slots.lease_version("rollout-0-x", m.LeaseVersion(version=wanted, exact=exact))
        assert gone == m.VersionUnavailable(held=(4, 7))


async def test_a_lease_ends_with_its_process_and_not_with_its_name(slots: Slots) -> None:
    await publish(slots, 1)
    old = slots.lease_version("rollout-0-x", m.LeaseVersion(version=1, exact=True))
    new = slots.lease_version("rollout-0-y", m.LeaseVersion(version=1, exact=True))
    assert isinstance(old, m.VersionLeased) and isinstance(new, m.VersionLeased)
    slots.revoke_reader("rollout-0-x")
    arena = arena_of(slots)
    assert not slots.release(m.ReleaseLease(arena=arena, lease_id=old.lease_id)).valid
    assert slots.release(m.ReleaseLease(arena=arena, lease_id=new.lease_id)).valid


async def test_a_pin_before_there_is_an_arena(tmp_path: Path) -> None:
    slots = slots_in(tmp_path)
    slots.pin_version(1)
    slots.ensure_slots(VERSION_BYTES)
    for version in (1, 2, 3, 4):
        await publish(slots, version)
    assert 1 in slots.held


async def test_a_version_that_came_over_the_chain_first_makes_the_written_one_useless(
    slots: Slots,
) -> None:
    manifest = await publish(slots, 1)
    assert manifest is not None
    slot = grant(slots)
    request = commit(arena_of(slots), slot, 2)
    assert slots.begin_commit(TRAINER, request)
    newer = mf.decode(mf.encode(manifest).replace(b"\xa7version\x01", b"\xa7version\x03"))
    assert held_over_chain(slots, newer)
    assert await slots.digest_slot(TRAINER, request) is None
    assert slots.held == (1, 3)
    assert grant(slots) >= 0  # the slot was given back
    with pytest.raises(SlotError, match="version 2 is older than 3"):
        slots.begin_commit(TRAINER, commit(arena_of(slots), grant(slots), 2))


async def test_a_slot_that_the_former_relay_granted_goes_to_no_other_relay(tmp_path: Path) -> None:
    """Its trainer may be writing to it until it asks this one for a slot."""
    former, now = slots_in(tmp_path), slots_in(tmp_path)
    former.memory.path, now.memory.path = str(tmp_path / "arena-a"), str(tmp_path / "arena-b")
    written = grant(former)
    former.memory.kept = True
    former.close()
    now.memory.claim_former()
    now.ensure_slots(VERSION_BYTES)
    others = {now.grant_to(CHAIN), now.grant_to(FETCH)}
    assert others == {0, 1, 2} - {written}
    assert grant(now) == written
    now.close()


async def test_slots_that_cannot_be_created_end_the_relay_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    slots = Slots(tmp_path, 1 << 20, 3, ended.append)

    def create(*_: object) -> Arena:
        raise ArenaError("no room")

    monkeypatch.setattr(Arena, "create", create)
    for _ in range(CREATE_TRIES):
        assert not ended
        with pytest.raises(ArenaError):
            slots.ensure_slots(VERSION_BYTES)
    assert ended == ["no room"]


async def test_fewer_slots_where_memory_is_short_and_a_clear_refusal(tmp_path: Path) -> None:
    fewer = slots_in(tmp_path, max_bytes=4 * VERSION_BYTES, slots=8)
    fewer.ensure_slots(VERSION_BYTES)
    assert Arena.attach(tmp_path / "arena").slots == 4
    with pytest.raises(
        ArenaError, match=f"have {VERSION_BYTES} bytes, the version {VERSION_BYTES + 64}"
    ):
        fewer.ensure_slots(VERSION_BYTES + 64)
    fewer.close()
    short = slots_in(tmp_path, max_bytes=2 * VERSION_BYTES)
    with pytest.raises(SlotError, match=r"raise weights\.max_bytes"):
        short.ensure_slots(VERSION_BYTES)
    assert not (tmp_path / "arena").exists()
    assert short.lease_version(
        "rollout-0-x", m.LeaseVersion(version=0, exact=False)
    ) == m.VersionUnavailable(held=())


async def test_slots_are_granted_at_once_and_get_their_memory_behind_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version may come, and be kept, while the filler has not begun."""
    may_fill, filled = threading.Event(), threading.Event()
    fill_all = Arena.populate_all

    def held_up(arena: Arena) -> None:
        assert may_fill.wait(20)
        fill_all(arena)
        filled.set()

    monkeypatch.setattr(Arena, "populate_all", held_up)
    slots = slots_in(tmp_path)
    slots.ensure_slots(VERSION_BYTES)
    assert (tmp_path / "arena").stat().st_blocks * 512 <= 4096
    slots.memory.get_region(slots.grant_to(CHAIN)).populate_pages()
    slots.abandon_slot(CHAIN)
    assert await publish(slots, 1) is not None
    may_fill.set()
    assert await asyncio.to_thread(filled.wait, 20)
    assert (tmp_path / "arena").stat().st_blocks * 512 >= 3 * VERSION_BYTES
    slots.close()


async def test_slots_that_cannot_get_their_memory_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(arena: Arena) -> None:
        raise ArenaError("there is no memory")

    monkeypatch.setattr(Arena, "populate_all", short)
    said: asyncio.Queue[str] = asyncio.Queue()
    slots = Slots(tmp_path, 1 << 20, 3, said.put_nowait)
    slots.ensure_slots(VERSION_BYTES)
    assert await asyncio.wait_for(said.get(), 20) == "there is no memory"
    slots.close()
    assert said.empty()


async def test_a_relay_that_ends_waits_for_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filling stops at the next piece, and that is nobody's failure."""
    monkeypatch.setattr("laminar.weights.arena.arena._POPULATE_BYTES", 4096)
    slots = slots_in(tmp_path, max_bytes=1 << 40)
    slots.ensure_slots(1 << 30)
    await asyncio.sleep(0)  # it begins
    slots.close()
    assert not (tmp_path / "arena").exists()
    await asyncio.sleep(0)
