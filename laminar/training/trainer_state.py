"""What a checkpoint says of the training that made it: trainer.json.

Reads   the bytes of that file
Gives   Resume, LearnerFacts; `encode`, `decode`; CheckpointError for a file that is none

Without torch: the trainer actor, which writes and reads the file, does not load it. What was
consumed is there by id since the checkpoint before, and as one digest that is chained over all
batches before, so that it can be compared with the log.
"""

from __future__ import annotations

import msgspec

from laminar.names import ids


class CheckpointError(RuntimeError):
    """This directory cannot be trained on from: it is damaged."""


class ForeignError(RuntimeError):
    """The checkpoint is another model's, or was trained with another reference."""


class LearnerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a learner was, besides parameters and optimizer."""

    torch: str  #: its version; another one may round otherwise
    threads: int
    ranks: int = 1
    micro_batch_tokens: int
    logit_chunk_tokens: int = 0  #: 0: all of a pass in one
    prompts_once: bool = (
        False  #: siblings share the tokens of their prompt (training/model/packing.py)
    )
    reference: str  #: digest of the weights that the KL term compares with; empty: there is none
    base: str = ""  #: digest of the weights beside the adapters; empty: all are trained
    adapters: str = ""  #: of what kind; empty: none
    functions: dict[str, str] = {}  #: of the user, by setting: digest of the file
    critic: str = ""  #: the model that it began as; empty: there is none
    #: by step: how far its updates moved the log-probs, nats per doubt
    #: (training/engine_mismatch.py)
    moved: dict[int, float]


def check_same(before: LearnerFacts, now: LearnerFacts) -> None:
    """ForeignError for other adapters, another base or another reference. A fork may have a KL term
    where the other run had none."""
    if before.adapters != now.adapters:
        raise ForeignError(
            f"it has {before.adapters or 'no adapters'}, and this run has "
            f"{now.adapters or 'none'} (lora.rank, lora.alpha, lora.target_modules)"
        )
    if before.base != now.base:
        raise ForeignError(
            f"its adapters belong to a base of digest {before.base}, and model.name has "
            f"{now.base} now"
        )
    if before.reference and now.reference not in ("", before.reference):
        raise ForeignError(
            f"its KL term compares with a reference of digest {before.reference}, and model.name "
            f"has {now.reference} now"
        )


class ResumeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint."""

    version: int
    step: int  #: completed
    before: str  #: chained digest of all batches before these; empty: there are none
    batches: tuple[tuple[str, ...], ...]  #: ids in order, since the checkpoint before
    learner: LearnerFacts

    @property
    def digest(self) -> str:
        """Chained over all batches that made these weights."""
        return ids.extend_chain_digest(self.before, *self.batches)


def encode(resume: ResumeState) -> bytes:
    return msgspec.json.encode(resume)


def decode(data: bytes) -> ResumeState:
    try:
        return msgspec.json.decode(data, type=ResumeState)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"its trainer.json is damaged: {error}") from error
