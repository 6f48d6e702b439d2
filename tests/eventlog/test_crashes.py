"""What coordinators crashed on: counted by event, from small files that may be damaged."""

from __future__ import annotations

from laminar.eventlog.crashes import CRASHES_MAX, KEPT, Crash, crashes, given_up, record_crash
from tools.kit.memory_disk import MemoryDisk

EVENT, OTHER = "step-completed, message 3 of trainer-0", "timer-fired batch-wait"


def disk_with(*events: str) -> MemoryDisk:
    disk = MemoryDisk()
    for incarnation, event in enumerate(events, 1):
        record_crash(disk, Crash(incarnation, event, f"KeyError: {incarnation}"))
    return disk


def test_an_event_is_given_up_after_so_many_crashes_on_it_alone() -> None:
    few = disk_with(*[EVENT] * (CRASHES_MAX - 1), OTHER)
    assert [crash.incarnation for crash in crashes(few)] == [1, 2, 3]
    assert given_up(crashes(few)) == {}
    enough = disk_with(EVENT, OTHER, *[EVENT] * (CRASHES_MAX - 1))
    last = Crash(CRASHES_MAX + 1, EVENT, f"KeyError: {CRASHES_MAX + 1}")
    assert given_up(crashes(enough)) == {EVENT: last}


def test_a_crash_is_durable_and_a_damaged_file_tells_nothing() -> None:
    disk = disk_with(EVENT, OTHER).crash(keep_unsynced=False)
    disk.files["crash-00000001.json"][:] = b"{"
    disk.files["crash-00000002.json.old"] = bytearray(b"{}")
    assert [crash.what for crash in crashes(disk)] == [OTHER]


def test_the_oldest_go_first() -> None:
    disk = disk_with(*[EVENT] * (KEPT + 3))
    found = crashes(disk)
    assert len(found) == KEPT and found[0].incarnation == 4
