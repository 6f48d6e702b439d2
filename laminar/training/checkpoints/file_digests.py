"""Digests of the files of a checkpoint, which detect damage.

Reads   a directory with digests.json, and the files that it names
Writes  digests.json
Gives   `write_digests`, `check_digests`; CheckpointError for damaged files

Each process digests what it writes, so no file is read again. A file that one process wrote in
order has one digest, of the whole; else it has one for each span of it.
Without torch: a fork is checked before anything starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import xxhash

from laminar.run.directory import RESUME_FILE
from laminar.run.work_counter import count_work
from laminar.training.model.lora_targets import ADAPTER_FILE
from laminar.training.trainer_state import CheckpointError

if TYPE_CHECKING:
    from laminar.training.shared_safetensors import WrittenFiles

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
CRITIC_MODEL_FILE = f"critic/{MODEL_FILE}"
CRITIC_OPTIMIZER_FILE = f"critic/{OPTIMIZER_FILE}"
DIGESTS_FILE = "digests.json"
REQUIRED_FILES = (MODEL_FILE, OPTIMIZER_FILE, RESUME_FILE)  #: files of every checkpoint
OPTIONAL_FILES = (ADAPTER_FILE, CRITIC_MODEL_FILE, CRITIC_OPTIMIZER_FILE)
BLOCK_BYTES = 1 << 24  #: bytes per read
NO_BYTES = xxhash.xxh3_128_hexdigest(b"")
_Digests = dict[str, str | list[tuple[int, str]]]
"""By file: the digest of the whole, or lengths and digests of its spans, in order."""


def write_digests(directory: Path, written: WrittenFiles | None = None) -> None:
    """Write the digests of all files that training resumes from; OSError from the disk.

    Files that are not in `written` are read."""
    names = [*REQUIRED_FILES, *(name for name in OPTIONAL_FILES if (directory / name).exists())]
    digests: _Digests = {}
    for name in names:
        if spans := sorted((written or {}).get(name, ())):
            digests[name] = [span[1:] for span in spans] if spans[1:] else spans[0].digest
            continue
        with (directory / name).open("rb") as file:
            digests[name] = _digest_bytes(file)
    (directory / DIGESTS_FILE).write_bytes(msgspec.json.encode(digests))


def check_digests(directory: Path) -> None:
    """Check that every file is as it was written; raises CheckpointError, OSError."""
    try:
        digests = msgspec.json.decode((directory / DIGESTS_FILE).read_bytes(), type=_Digests)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"its {DIGESTS_FILE} is damaged: {error}") from error
    for name in [*REQUIRED_FILES, *(name for name in OPTIONAL_FILES if name in digests)]:
        known = digests.get(name, "none")
        spans = [(-1, known)] if isinstance(known, str) else [*known, (-1, NO_BYTES)]
        with (directory / name).open("rb") as file:
            for nbytes, expected in spans:
                if (digest := _digest_bytes(file, nbytes)) != expected:
                    raise CheckpointError(
                        f"its {name} is damaged: its digest is {digest}, but was {expected} when "
                        "it was written"
                    )


def _digest_bytes(file: BinaryIO, nbytes: int = -1) -> str:
    """Return xxh3_128 of the next bytes of a file; -1: of all that are left."""
    found = xxhash.xxh3_128()
    while block := file.read(min(BLOCK_BYTES, nbytes) if nbytes >= 0 else BLOCK_BYTES):
        found.update(block)
        count_work()
        nbytes -= len(block) if nbytes >= 0 else 0
    return found.hexdigest()
