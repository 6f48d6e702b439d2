"""Compaction of old segments: read in either form, compressed one at a time, finally removed.

Reads   events-00000001.log or, if it is gone, events-00000001.log.zst
Writes  the compressed form, and removes the plain one; raises DiskError as the log does
Raises  LogCorrupt for a compressed segment that cannot be read

Only segments that lie wholly before the older of the two snapshots are compacted, so a start never
needs them. The plain form is removed only after the compressed one is durable and was read back;
while both exist, the plain one counts. Removal begins at the oldest segment: a history may lose its
beginning, never its middle.
"""

from __future__ import annotations

import zstandard

from laminar.eventlog.record import LogCorrupt, compressed_name, segment_name, segment_numbers
from laminar.eventlog.whole_files import write_whole
from laminar.names.ports import Disk, DiskError


def read_segment(disk: Disk, number: int, size: int = -1) -> bytes:
    """Return the first `size` bytes of a segment (-1: all) in either form."""
    if segment_name(number) in disk.list_names():
        return disk.read(segment_name(number), 0, size)
    return _decompress_segment(disk, number, size)


def measure_segments(disk: Disk) -> dict[int, int]:
    """Return the bytes of each segment on the disk, by number, ascending."""
    names = disk.list_names()
    return {
        number: sum(disk.get_size(name) for name in _list_segment_files(number) if name in names)
        for number in segment_numbers(names)
    }


def compact_segments(disk: Disk, before: int, keep_bytes: int) -> None:
    """Remove segments below `before` beyond `keep_bytes` (0: none), then compress the oldest left.

    Only one is compressed per call, because the coordinator waits meanwhile."""
    if keep_bytes:
        _remove_oldest(disk, before, keep_bytes)
    names = disk.list_names()
    plain = [n for n in segment_numbers(names) if n < before and segment_name(n) in names]
    if plain:
        _compress_segment(disk, plain[0])


def _list_segment_files(number: int) -> tuple[str, str]:
    return segment_name(number), compressed_name(number)


def _remove_oldest(disk: Disk, before: int, keep_bytes: int) -> None:
    names, sizes = disk.list_names(), measure_segments(disk)
    excess = sum(sizes.values()) - keep_bytes
    for number in [n for n in sizes if n < before]:
        if excess <= 0:
            return
        for name in _list_segment_files(number):
            if name in names:
                disk.remove(name)
        excess -= sizes[number]


def _compress_segment(disk: Disk, number: int) -> None:
    plain = disk.read(segment_name(number))
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(plain)
    write_whole(disk, compressed_name(number), packed)
    if _decompress_segment(disk, number, -1) != plain:
        raise DiskError(f"{compressed_name(number)} reads back differently from what was written")
    disk.remove(segment_name(number))


def _decompress_segment(disk: Disk, number: int, size: int) -> bytes:
    """Decompress a segment as far as possible; the reader checks its length and CRC."""
    data = disk.read(compressed_name(number))
    try:
        return zstandard.ZstdDecompressor().stream_reader(data).read(size)
    except zstandard.ZstdError as error:
        hint = "restore the file from a copy, or start a new run"
        expected = f"zstd data in {compressed_name(number)}"
        raise LogCorrupt(number, 0, expected, str(error), hint) from error
