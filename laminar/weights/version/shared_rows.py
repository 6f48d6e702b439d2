"""A version written by several processes, each of which writes its rows.

Reads   rows of tensors, as each process has them
Writes  a slot of an arena, or separate memory, which all processes map
Gives   RowWriter, `describe_rows`; ManifestError

The slot is committed, or the digest computed, only after every process has reported that it is
done. Readers and the manifest see the same bytes as if a single process had written them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import numpy as np

from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, build_manifest
from laminar.weights.version.restored import SharedBytes
from laminar.weights.version.slot_writer import WriteTarget, encode
from laminar.weights.version.tensors import NamedRows, write_rows

_decoder = msgspec.msgpack.Decoder(WriteTarget)


class RowWriter:
    """Writer of this process's rows; an arena stays mapped until another one replaces it."""

    def __init__(self) -> None:
        self._kept: tuple[str, Bytes] | None = None

    def __call__(self, target: bytes, rows: Iterable[NamedRows]) -> None:
        found = _decoder.decode(target)
        view = self._map_file(found)[found.offset : found.offset + found.nbytes]
        write_rows(view, found.specs, rows)

    def _map_file(self, target: WriteTarget) -> Bytes:
        """Map the whole file."""
        if self._kept is not None and self._kept[0] == target.path:
            return self._kept[1]
        fd = os.open(target.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            view: Bytes = np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8)
        finally:
            os.close(fd)
        if target.kept:
            self._kept = target.path, view
        return view


async def describe_rows(
    *,
    version: int,
    step: int,
    specs: tuple[mf.TensorSpec, ...],
    fill: Callable[[bytes], Awaitable[None]],
    probe: mf.Probe,
) -> mf.Manifest:
    """Build the manifest of a version as a relay would.

    `fill` has every process write its rows into the encoded WriteTarget.
    """
    shared = SharedBytes(f"describe-{version}", mf.check_tensors(specs))
    try:
        nbytes = shared.view.nbytes
        target = WriteTarget(path=shared.path, offset=0, nbytes=nbytes, specs=specs, kept=False)
        await fill(encode(target))
        return await asyncio.to_thread(
            build_manifest, shared.view, version=version, step=step, tensors=specs, probe=probe
        )
    finally:
        shared.close()
