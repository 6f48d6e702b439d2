"""State of the training that made a checkpoint: trainer.json.

Reads   the bytes of that file; the checkpoints of a run
Gives   ResumeState, LearnerFacts; `encode`, `decode`, `iter_checkpoints`; CheckpointError for an
        invalid file

Without torch: the trainer actor, which writes and reads the file, does not load it. Consumed
samples are listed by id since the previous checkpoint; one digest, chained over all batches before,
allows a comparison with the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from laminar.names import ids
from laminar.run.directory import CHECKPOINTS_DIR, ORIGIN_DIR, RESUME_FILE


class CheckpointError(RuntimeError):
    """The directory is damaged and cannot be trained from."""


class ForeignError(RuntimeError):
    """The checkpoint belongs to another model, or was trained with another reference."""


class LearnerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of a learner in addition to parameters and optimizer."""

    torch: str  #: version of torch; another may round differently
    threads: int
    nodes: int = 1
    ranks: int = 1  #: of each node
    shard: str = "node"  #: RankLayout.shard, which says what is summed in which order
    micro_batch_tokens: int
    logit_chunk_tokens: int = 0  #: 0: a whole pass in one chunk
    prompts_once: bool = (
        False  #: siblings share the tokens of their prompt (training/model/packing.py)
    )
    reference: str  #: digest of the KL term's reference weights; empty: there are none
    base: str = ""  #: digest of the frozen base of the adapters; empty: all are trained
    adapters: str = ""  #: description of the adapters; empty: none
    functions: dict[str, str] = {}  #: digests of the user's files, by setting
    critic: str = ""  #: initial model of the critic; empty: there is no critic
    #: movement of the log-probs by step, nats per doubt (training/engine_mismatch.py)
    moved: dict[int, float]


def check_same(before: LearnerFacts, now: LearnerFacts) -> None:
    """Raise ForeignError for other adapters, another base or another reference.

    A fork may add a KL term where the other run had none."""
    if before.adapters != now.adapters:
        raise ForeignError(
            f"it has {before.adapters or 'no adapters'}, but this run has "
            f"{now.adapters or 'none'} (lora.rank, lora.alpha, lora.target_modules)"
        )
    if before.base != now.base:
        raise ForeignError(
            f"its adapters belong to a base of digest {before.base}, but model.name now has "
            f"{now.base}"
        )
    if before.reference and now.reference not in ("", before.reference):
        raise ForeignError(
            f"its KL term compares with a reference of digest {before.reference}, but model.name "
            f"now has {now.reference}"
        )


class ResumeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of trainer.json."""

    version: int
    step: int  #: completed steps
    before: str  #: chained digest of all earlier batches; empty: there are none
    batches: tuple[tuple[str, ...], ...]  #: ids in order, since the previous checkpoint
    learner: LearnerFacts

    @property
    def digest(self) -> str:
        """Digest chained over all batches that made these weights."""
        return ids.extend_chain_digest(self.before, *self.batches)


def encode(resume: ResumeState) -> bytes:
    return msgspec.json.encode(resume)


def decode(data: bytes) -> ResumeState:
    try:
        return msgspec.json.decode(data, type=ResumeState)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"its trainer.json is damaged: {error}") from error


def iter_checkpoints(run_dir: Path) -> Iterator[tuple[Path, ResumeState]]:
    """Yield the directories of readable checkpoints, that of a fork's origin last, with states."""
    files = sorted(run_dir.glob(f"{CHECKPOINTS_DIR}/[!.]*/{RESUME_FILE}"))
    for file in (*files, run_dir / ORIGIN_DIR / RESUME_FILE):
        with suppress(CheckpointError, OSError):  # damaged, none, or removed by the running run
            yield file.parent, decode(file.read_bytes())
