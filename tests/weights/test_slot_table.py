"""The slot table: each rule alone, then all of them against a model under random use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from laminar.weights.arena.slots import (
    FreeSlot,
    HeldSlot,
    ReadLease,
    SlotError,
    SlotGrant,
    SlotTable,
    VersionNotHeld,
    WritingSlot,
    slots_within,
)


def allow(version: int) -> bool:
    """Let any version be forgotten."""
    return True


def publish(table: SlotTable, version: int) -> SlotGrant:
    grant = table.grant_slot("trainer")
    assert grant is not None
    table.commit(grant.slot, "trainer", version)
    return grant


def filled() -> SlotTable:
    table = SlotTable(3, allow)
    assert [publish(table, version).evicted for version in range(3)] == [None] * 3
    return table


def test_at_least_three_slots() -> None:
    with pytest.raises(SlotError, match="at least 3"):
        SlotTable(2, allow)


def test_wrong_use_names_the_state() -> None:
    table = filled()
    grant = table.grant_slot("trainer")
    assert grant is not None
    with pytest.raises(SlotError, match=r"not above the latest, 2: SlotTable\(\[Writing"):
        table.commit(grant.slot, "trainer", 2)
    with pytest.raises(SlotError, match="has a slot already"):
        table.grant_slot("trainer")
    with pytest.raises(SlotError, match="no slot 3"):
        table.commit(3, "trainer", 9)
    with pytest.raises(SlotError, match="no slot -1"):
        table.get_state(-1)
    with pytest.raises(SlotError, match="unknown lease 0"):
        table.release(0)


def test_a_version_that_is_being_sent_is_passed_over() -> None:
    asked: list[int] = []
    table = SlotTable(3, forget=lambda version: asked.append(version) is None and version != 0)
    for version in range(3):
        publish(table, version)
    assert publish(table, 3).evicted == 1
    assert asked == [0, 1]  # the oldest first, and nobody is told to forget what then stays
    table = SlotTable(3, forget=lambda version: False)
    for version in range(3):
        publish(table, version)
    assert table.grant_slot("trainer") is None
    assert table.versions_held == (0, 1, 2)


@pytest.mark.parametrize(
    ("slots", "max_bytes", "fitting"), [(5, 1000, 5), (5, 499, 4), (5, 300, 3), (3, 10_000, 3)]
)
def test_slots_within_a_limit(slots: int, max_bytes: int, fitting: int) -> None:
    assert slots_within(100, slots, max_bytes) == fitting


def test_too_little_for_three_slots_is_an_error() -> None:
    with pytest.raises(SlotError, match=r"over the limit of 299 bytes; raise weights\.max_bytes"):
        slots_within(100, 5, 299)


NAMES = st.sampled_from(["a", "b", "c"])


class Slots(RuleBasedStateMachine):
    """The table beside a model that keeps only what each caller was promised."""

    @initialize(num_slots=st.integers(3, 5))
    def start(self, num_slots: int) -> None:
        self.table = SlotTable(num_slots, allow)
        self.num_slots = num_slots
        self.writing: dict[str, int] = {}
        self.held: dict[int, int] = {}  # version -> slot
        self.leases: dict[int, ReadLease] = {}
        self.ended: set[int] = set()
        self.pinned: int | None = None
        self.last: set[int] = set()
        self.newest = -1

    def protected(self) -> set[int]:
        kept = {lease.version for lease in self.leases.values()} | {self.newest}
        return kept | ({self.pinned} if self.pinned is not None else set())

    @rule(writer=NAMES)
    def grant(self, writer: str) -> None:
        if writer in self.writing:
            with pytest.raises(SlotError):
                self.table.grant_slot(writer)
            return
        idle = sorted(set(self.held) - self.protected(), key=lambda v: (v in self.last, v))
        full = len(self.held) + len(self.writing) == self.num_slots
        grant = self.table.grant_slot(writer)
        if grant is None:
            assert full and not idle
            return
        assert grant.slot not in self.writing.values()
        assert grant.evicted == (idle[0] if full else None)
        if grant.evicted is not None:
            assert self.held.pop(grant.evicted) == grant.slot
        assert grant.slot not in self.held.values()
        self.writing[writer] = grant.slot

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), gap=st.integers(1, 3))
    def commit(self, data: st.DataObject, gap: int) -> None:
        writer = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(writer)
        self.newest += gap
        self.table.commit(slot, writer, self.newest)
        self.held[self.newest] = slot

    @rule(writer=NAMES, slot=st.integers(-1, 5), version=st.integers(0, 9))
    def commit_wrongly(self, writer: str, slot: int, version: int) -> None:
        if self.writing.get(writer) == slot and version > self.newest:
            return
        before = repr(self.table)
        with pytest.raises(SlotError) as raised:
            self.table.commit(slot, writer, version)
        assert repr(self.table) == before
        assert before in str(raised.value)

    @rule(writer=NAMES)
    def abandon(self, writer: str) -> None:
        assert self.table.abandon_slot(writer) == self.writing.pop(writer, None)

    @rule(reader=NAMES, back=st.integers(-1, 6), exact=st.booleans())
    def lease(self, reader: str, back: int, exact: bool) -> None:
        wanted = max(0, self.newest - back)
        answer = self.table.lease_version(wanted, reader, exact=exact)
        version = wanted if exact else self.newest
        if version not in self.held or version < wanted:
            assert answer == VersionNotHeld(wanted=wanted, held=tuple(sorted(self.held)))
            return
        assert isinstance(answer, ReadLease)
        assert (answer.version, answer.slot) == (version, self.held[version])
        assert answer.lease_id not in self.leases.keys() | self.ended
        self.leases[answer.lease_id] = answer

    @precondition(lambda self: self.leases or self.ended)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases.keys() | self.ended)))
        assert self.table.release(lease_id) == (self.leases.pop(lease_id, None) is not None)
        self.ended.add(lease_id)

    @rule(reader=NAMES)
    def revoke(self, reader: str) -> None:
        mine = {key: lease for key, lease in self.leases.items() if lease.reader == reader}
        assert set(self.table.revoke_leases(reader)) == set(mine.values())
        self.leases = {key: lease for key, lease in self.leases.items() if key not in mine}
        self.ended |= set(mine)

    @rule(back=st.integers(0, 5))
    def pin(self, back: int) -> None:
        wanted = max(0, self.newest - back)
        answer = self.table.pin(wanted)
        assert (answer is None) == (wanted in self.held)
        self.pinned = wanted if answer is None else self.pinned

    @rule(back=st.sets(st.integers(0, 5)))
    def evict_last(self, back: set[int]) -> None:
        self.last = {self.newest - b for b in back}
        self.table.set_evict_last(self.last)

    @rule()
    def unpin(self) -> None:
        self.table.unpin()
        self.pinned = None

    @invariant()
    def table_agrees(self) -> None:
        expected: list[FreeSlot | WritingSlot | HeldSlot] = [FreeSlot()] * self.num_slots
        for writer, slot in self.writing.items():
            expected[slot] = WritingSlot(writer)
        for version, slot in self.held.items():
            expected[slot] = HeldSlot(version)
        assert [self.table.get_state(slot) for slot in range(self.num_slots)] == expected
        assert self.table.versions_held == tuple(sorted(self.held))
        assert self.table.latest == (self.newest if self.newest >= 0 else None)

    @invariant()
    def what_is_promised_is_held(self) -> None:
        assert {lease.version for lease in self.leases.values()} <= set(self.held)
        assert all(self.held[lease.version] == lease.slot for lease in self.leases.values())
        assert self.pinned is None or self.pinned in self.held


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
