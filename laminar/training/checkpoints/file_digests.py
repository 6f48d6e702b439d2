"""Digests of the files of a checkpoint, which detect damage.

Reads   a directory with digests.json, and the files that it names
Writes  digests.json
Gives   `write_digests`, `check_digests`; CheckpointError for damaged files

Without torch: a fork is checked before anything starts.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

from laminar.run.directory import RESUME_FILE
from laminar.training.model.lora_targets import ADAPTER_FILE
from laminar.training.trainer_state import CheckpointError

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
CRITIC_MODEL_FILE = f"critic/{MODEL_FILE}"
CRITIC_OPTIMIZER_FILE = f"critic/{OPTIMIZER_FILE}"
DIGESTS_FILE = "digests.json"
REQUIRED_FILES = (MODEL_FILE, OPTIMIZER_FILE, RESUME_FILE)
"""Files of every checkpoint."""
OPTIONAL_FILES = (ADAPTER_FILE, CRITIC_MODEL_FILE, CRITIC_OPTIMIZER_FILE)
BLOCK_BYTES = 1 << 24
"""Bytes per read."""


def write_digests(directory: Path) -> None:
    """Write the digests of all files that training resumes from; OSError from the disk."""
    names = [*REQUIRED_FILES, *(name for name in OPTIONAL_FILES if (directory / name).exists())]
    digests = {name: _digest_file(directory / name) for name in names}
    (directory / DIGESTS_FILE).write_bytes(msgspec.json.encode(digests))


def check_digests(directory: Path) -> None:
    """Check that every file is as it was written; raises CheckpointError, OSError."""
    try:
        digests = msgspec.json.decode((directory / DIGESTS_FILE).read_bytes(), type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"its {DIGESTS_FILE} is damaged: {error}") from error
    for name in [*REQUIRED_FILES, *(name for name in OPTIONAL_FILES if name in digests)]:
        digest = _digest_file(directory / name)
        if digest != digests.get(name):
            raise CheckpointError(
                f"its {name} is damaged: its digest is {digest}, but was "
                f"{digests.get(name, 'none')} when it was written"
            )


def _digest_file(path: Path) -> str:
    """Return xxh3_128 of a file."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()
