"""The simulated disk keeps its promises and no others: what is synced stays, the rest may go."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from laminar.names.ports import DiskError
from tools.simulator.disk import CRASH_MODES, SECTOR_BYTES, CrashMode, PowerCut, SimDisk

SYNCED, VOLATILE = b"s" * 700, b"v" * 2_000


def unsynced_tail() -> SimDisk:
    disk = SimDisk()
    file = disk.create_file("a")
    file.append(SYNCED)
    file.sync()
    file.append(VOLATILE)
    return disk


def contents(disk: SimDisk) -> dict[str, bytes]:
    return {name: disk.read(name) for name in disk.list_names()}


def drawn(disk: SimDisk, mode: CrashMode, count: int = 200) -> list[dict[str, bytes]]:
    """What each of some crashes left."""
    return [contents(disk.after_crash(mode, random.Random(seed))) for seed in range(count)]


# --- an ordinary disk -------------------------------------------------------------------------


def test_what_does_not_exist_is_told_like_a_real_disk_does() -> None:
    disk = SimDisk({"a": b""})
    with pytest.raises(FileExistsError):
        disk.create_file("a")
    for read in (disk.read, disk.get_size, disk.sync):
        with pytest.raises(FileNotFoundError):
            read("b")
    with pytest.raises(DiskError, match="there is no b"):
        disk.remove("b")
    with pytest.raises(DiskError, match="there is no b"):
        disk.replace_file("b", "a")


# --- what a crash leaves ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", CRASH_MODES)
def test_what_was_synced_stays(mode: CrashMode) -> None:
    disk = unsynced_tail()
    for left in drawn(disk, mode):
        assert left["a"].startswith(SYNCED)
        assert len(left["a"]) <= len(SYNCED + VOLATILE)
    disk.sync("a")
    assert drawn(disk, mode, 20) == [{"a": SYNCED + VOLATILE}] * 20


@pytest.mark.parametrize("mode", CRASH_MODES)
def test_a_crash_leaves_a_disk_on_which_everything_is_durable(mode: CrashMode) -> None:
    disk = unsynced_tail().after_crash(mode, random.Random(1))
    assert disk.durable_size("a") == disk.get_size("a")
    assert drawn(disk, "none", 1) == [contents(disk)]


def test_a_prefix_is_one_of_all_files_and_names_together() -> None:
    disk = SimDisk({"a": b"", "b": b"", "c": b""})
    for name in ("a", "b"):
        disk.plan(disk.calls + 2, "eio")  # the directory's sync: its name may be lost later
        with pytest.raises(DiskError):
            disk.replace_file(name, f"{name}-new")
    written = SimDisk({"c": b""})
    first, second = written.create_file("x"), written.create_file("y")
    first.append(b"1" * 100)
    second.append(b"2" * 100)
    first.append(b"3" * 100)
    order = b"1" * 100 + b"2" * 100 + b"3" * 100
    seen = set()
    for left in drawn(written, "prefix"):
        x, y = left["x"], left["y"]
        assert x[:100] + y + x[100:] == order[: len(x) + len(y)]
        seen.add((len(x), len(y)))
    assert len(seen) > 50
    names = {tuple(left) for left in drawn(disk, "prefix")}
    assert names == {("a", "b", "c"), ("a-new", "b", "c"), ("a-new", "b-new", "c")}


def sectors(data: bytes) -> list[bytes]:
    """The volatile part of each sector of unsynced_tail's file."""
    bounds = [len(SYNCED), *range(2 * SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


def test_a_torn_write_lacks_one_sector_or_ends_there() -> None:
    zeroed, ended = set(), set()
    for left in drawn(unsynced_tail(), "torn"):
        if len(left["a"]) == len(SYNCED + VOLATILE):
            lost = [number for number, part in enumerate(sectors(left["a"])) if not any(part)]
            kept = [part for part in sectors(left["a"]) if set(part) == set(b"v")]
            assert len(lost) == 1 and len(kept) == len(sectors(left["a"])) - 1
            zeroed.add(lost[0])
        else:
            assert left["a"] == (SYNCED + VOLATILE)[: len(left["a"])]
            ended.add(len(left["a"]))
    assert zeroed == set(range(5))
    assert ended == {700, 1024, 1536, 2048, 2560}


def test_reordered_sectors_are_there_or_zeros_each_by_itself() -> None:
    seen = set()
    for left in drawn(unsynced_tail(), "reordered", 500):
        parts = [set(part) for part in sectors(left["a"].ljust(2_700, b"\0"))]
        assert all(part in ({0}, set(b"v")) for part in parts)
        seen.add((len(left["a"]), tuple(part == {0} for part in parts)))
    assert len({lost for _, lost in seen}) == 2**5
    lengths = {length for length, _ in seen}
    assert {700, 1024, 2_700} <= lengths, "a file may end early, or be zeros to its end"


def test_reordered_files_do_not_wait_for_each_other() -> None:
    disk = SimDisk()
    for name in ("x", "y"):
        disk.create_file(name).append(b"1" * 10)
    found = {tuple(any(data) for data in left.values()) for left in drawn(disk, "reordered")}
    assert found == {(True, True), (True, False), (False, True), (False, False)}


# --- names ------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[Callable[[SimDisk], object], dict[str, bytes]]] = {
    "create": (lambda disk: disk.create_file("c"), {"a": b"1", "b": b"2", "c": b""}),
    "replace": (lambda disk: disk.replace_file("a", "b"), {"b": b"1"}),
    "remove": (lambda disk: disk.remove("a"), {"b": b"2"}),
}


#: The directory is synced first, for the names that a killed process left.
CALLS_BEFORE = {"create": 1, "replace": 0, "remove": 0}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", [1, 2])
def test_a_name_may_be_lost_until_its_directory_is_synced(change: str, call: int) -> None:
    act, done = CHANGES[change]
    call += CALLS_BEFORE[change]
    before = {"a": b"1", "b": b"2"}
    disk = SimDisk(before)
    disk.plan(call, "crash")
    with pytest.raises(PowerCut):
        act(disk)
    assert disk.calls == call
    assert drawn(disk, "none", 1) == [before]
    assert drawn(disk, "all", 1) == [done]
    for mode in ("prefix", "reordered"):
        left = drawn(disk, mode)
        assert before in left and done in left
        assert all(each in (before, done) for each in left), "one or the other, no mixture"


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_name_is_two_calls_and_then_durable(change: str) -> None:
    act, done = CHANGES[change]
    disk = SimDisk({"a": b"1", "b": b"2"})
    act(disk)
    assert disk.calls == CALLS_BEFORE[change] + 2
    assert drawn(disk, "none", 1) == [done]


def test_a_new_name_never_outlives_one_that_was_there_before() -> None:
    """A killed process created `a` and did not sync the directory."""
    killed = SimDisk()
    killed.plan(2, "crash")
    with pytest.raises(PowerCut):
        killed.create_file("a")
    disk = killed.after_kill()
    disk.plan(disk.calls + 2, "crash")
    with pytest.raises(PowerCut):
        disk.create_file("b")
    for mode in CRASH_MODES:
        assert {tuple(left) for left in drawn(disk, mode)} <= {("a",), ("a", "b")}


def test_a_synced_file_with_a_volatile_name_is_lost_with_it() -> None:
    disk = SimDisk()
    disk.plan(3, "eio")
    with pytest.raises(DiskError):
        disk.create_file("a")
    disk.sync("a")
    assert disk.durable_size("a") == 0
    assert drawn(disk, "none", 1) == [{}]
    disk.create_file("b")  # syncs the directory, and so the older name
    assert drawn(disk, "none", 1) == [{"a": b"", "b": b""}]


def test_content_that_was_not_synced_before_its_name_changed_may_be_lost_under_it() -> None:
    disk = SimDisk({"final": b"before"})
    disk.create_file("temp").append(b"after")
    disk.replace_file("temp", "final")
    assert disk.durable_size("final") == 0
    assert drawn(disk, "none", 1) == [{"final": b""}]


# --- calls that go wrong ----------------------------------------------------------------------


def scenario(disk: SimDisk) -> None:
    file = disk.create_file("a")
    file.append(b"0123456789")
    file.sync()
    disk.sync("a")
    disk.replace_file("a", "b")
    disk.remove("b")


CALLS = 10


def test_every_call_can_be_cut_and_nothing_works_after_it() -> None:
    whole = SimDisk()
    scenario(whole)
    assert whole.calls == CALLS
    for call in range(1, CALLS + 1):
        disk = SimDisk()
        disk.plan(call, "crash")
        with pytest.raises(PowerCut):
            scenario(disk)
        assert disk.calls == call
        for act in (
            disk.list_names,
            lambda disk=disk: disk.read("a"),
            lambda disk=disk: scenario(disk),
        ):
            with pytest.raises(PowerCut, match=f"no power since call {call}"):
                act()
        assert disk.calls == call


def test_a_failed_sync_made_nothing_durable() -> None:
    disk = unsynced_tail()
    disk.plan(disk.calls + 1, "eio")
    with pytest.raises(DiskError):
        disk.sync("a")
    assert disk.durable_size("a") == len(SYNCED)
    assert drawn(disk, "none", 1) == [{"a": SYNCED}]


# --- a process that dies on a machine that does not -------------------------------------------


def test_after_a_kill_everything_written_is_there_and_still_volatile() -> None:
    disk = SimDisk()
    file = disk.create_file("a")
    file.append(SYNCED)
    file.sync()
    disk.plan(disk.calls + 1, "crash")
    with pytest.raises(PowerCut):
        file.append(VOLATILE)
    heir = disk.after_kill()
    assert heir.read("a") == SYNCED + VOLATILE
    assert drawn(heir, "none", 1) == [{"a": SYNCED}]
    with pytest.raises(PowerCut):
        file.append(b"from the grave")
    heir.sync("a")
    assert drawn(heir, "none", 1) == [{"a": SYNCED + VOLATILE}]
