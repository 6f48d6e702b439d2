"""The rules of the store: which writer may change what, decided from a row and a request. Pure.

Reads   a `Row` (the stored state of one trajectory) and the plain values of one request item
Gives   a verdict: the answer for the client and whether anything changes

One rule implies all others: a trajectory belongs to the highest placement that opened it.
Placements are fencing tokens (Kleppmann, "How to do distributed locking", 2016): the coordinator
raises the number each time it dispatches, resumes or migrates a trajectory, and the store refuses a
process with a lower one. Migration, crash recovery and a process that wakes up late are therefore
the same operation, and no lock or lease has to be released first. Every request may arrive twice;
a repeat gets the same answer and changes nothing. A finished response is never discarded: a process
that opens it again learns its progress.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from laminar.storage.branches import ROOT, Parents

Status = Literal["open", "generated", "rewarded"]
Ending = Literal["trained", "evaluated", "dropped"]
Answer = Literal["ok", "fenced", "refused"]
RewardAnswer = Literal["ok", "already", "fenced", "refused"]
OpenAnswer = Literal["open", "generated", "rewarded", "ended", "fenced", "refused"]
OpenChange = Literal["none", "create", "move", "restart"]

TOKEN_BYTES = 4  #: an int32 token id, or a float32 log-prob
MAX_TOKENS = 1_000_000  #: tokens of one trajectory, so that it always fits into one reply
MAX_LOGPROB = np.float32(1e-6)  #: rounding may push a log-prob just above 0


class Identity(NamedTuple):
    """The identity of a trajectory, fixed by the first request that names it."""

    group_id: str
    sibling: int
    purpose: str
    row_index: int


class Stamp(NamedTuple):
    """The initial weights and temperature of an attempt, fixed once it has tokens.

    Newer weights may continue these tokens only in flight.
    """

    weight_version: int | None
    version_step: int | None
    temperature: float | None


class Source(NamedTuple):
    """The replica that sampled tokens, and its weights."""

    replica: str
    weight_version: int
    version_step: int  #: the trainer step that made these weights


class TokenSpan(NamedTuple):
    """Consecutive tokens of a response from one source, whose fields come first."""

    replica: str
    weight_version: int
    version_step: int
    num_tokens: int


class Row(NamedTuple):
    """The stored state of a trajectory except payload and text; fields in column order."""

    id: str
    group_id: str
    sibling: int
    purpose: str
    row_index: int
    attempt: int  #: from 1; 0: ended without having been opened
    placement: int
    replica: str | None = None  #: replica that opened it last
    weight_version: int | None = None  #: version that sampled the first token, or will
    version_step: int | None = None
    temperature: float | None = None
    segments: int = 0  #: segments that have tokens
    segment_tokens: int = 0  #: tokens of the last segment
    num_tokens: int = 0  #: total of all segments; updated by every append
    tokens_lost: int = 0  #: tokens of all earlier attempts, discarded by restarts
    status: str = "open"
    finish_reason: str | None = None
    digest: str | None = None  #: `digest_payload`, set when generated
    reward_bits: bytes | None = None  #: float64 little-endian; None: not rewarded, or unscorable
    reward_reason: str | None = None
    reward_detail: str | None = None
    end: str | None = None
    end_reason: str | None = None
    end_step: int | None = None
    last_version: int | None = None  #: version that sampled the last token; None: weight_version
    last_step: int | None = None
    turns: int = 0  #: answered by the environment; later tokens belong to the next segment
    context_tokens: int = 0  #: tokens of the environment, read but not sampled

    @property
    def identity(self) -> Identity:
        return Identity(self.group_id, self.sibling, self.purpose, self.row_index)

    @property
    def all_tokens(self) -> int:
        """Sampled tokens and those of the environment."""
        return self.num_tokens + self.context_tokens

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.weight_version, self.version_step, self.temperature)

    @property
    def source(self) -> Source:
        """The replica that opened it last, with the version of its first token.

        Raises ValueError for a row that was never opened.
        """
        if self.replica is None or self.weight_version is None or self.version_step is None:
            raise ValueError(f"{self.id} was never opened")
        return Source(self.replica, self.weight_version, self.version_step)

    @property
    def latest(self) -> tuple[int | None, int | None]:
        """Version and step of the last token."""
        if self.last_version is None:
            return self.weight_version, self.version_step
        return self.last_version, self.last_step


class Chunk(NamedTuple):
    """Consecutive tokens of one segment: as many int32 ids as float32 log-probs, little-endian."""

    segment: int
    offset: int  #: tokens of this segment before the chunk
    tokens: bytes
    logprobs: bytes
    source: Source  #: of all its tokens
    read: str = ""  #: digest of all tokens that the engine read before; empty: it continued

    def has_same_tokens(self, other: Chunk) -> bool:
        """Return whether both have the same tokens at the same place, from any source."""
        return self[:4] == other[:4]


class Verdict(NamedTuple):
    """The answer to a writer; `changes` is False for a repeat and for a refusal."""

    answer: Answer
    reason: str = ""
    changes: bool = False


class OpenVerdict(NamedTuple):
    answer: OpenAnswer
    change: OpenChange = "none"
    reason: str = ""


class RewardVerdict(NamedTuple):
    answer: RewardAnswer
    reason: str = ""
    changes: bool = False


_WRITE = Verdict("ok", changes=True)
_REPEAT = Verdict("ok")


def judge_open(row: Row | None, asked: Row, in_flight: bool = False) -> OpenVerdict:
    """Decide whether the opener may work on the trajectory; `asked` is the row it would make.

    A higher placement takes over ("move"); with a higher attempt it discards the tokens so far
    ("restart"), unless the response is already complete. `in_flight`: newer weights may continue
    tokens of older ones.
    """
    if row is None:
        return OpenVerdict("open", "create")
    if row.identity != asked.identity:
        return OpenVerdict("refused", reason=_describe_identity(row))
    if asked.placement < row.placement:
        return OpenVerdict("fenced", reason=f"placement {row.placement} holds it")
    if row.end is not None:
        return OpenVerdict("ended", reason=f"{row.end}: {row.end_reason}")
    takes_over = asked.placement > row.placement
    if row.status == "generated":
        return OpenVerdict("generated", "move" if takes_over else "none")
    if row.status == "rewarded":
        return OpenVerdict("rewarded", "move" if takes_over else "none")
    return _judge_open_unfinished(row, asked, takes_over, in_flight)


def _judge_open_unfinished(row: Row, asked: Row, takes_over: bool, in_flight: bool) -> OpenVerdict:
    if asked.attempt > row.attempt and takes_over:
        return OpenVerdict("open", "restart")
    if asked.attempt != row.attempt:
        reason = f"attempt {asked.attempt} is not new, attempt {row.attempt} is stored"
        return OpenVerdict("refused", reason=reason)
    newer = in_flight and _can_continue(row, asked.weight_version, asked.version_step)
    goes_on = newer and bool(row.num_tokens) and asked.temperature == row.temperature
    if asked.stamp != row.stamp and not goes_on and (row.num_tokens or not takes_over):
        reason = (
            f"its {row.num_tokens} tokens were sampled with version {row.weight_version} of step "
            f"{row.version_step} at temperature {row.temperature}; raise the attempt to change that"
        )
        return OpenVerdict("refused", reason=reason)
    return OpenVerdict("open", "move" if takes_over else "none")


def apply_open(row: Row | None, change: OpenChange, asked: Row) -> Row:
    """Return the row after an allowed `judge_open`; a restart counts the tokens it discards."""
    if row is None:
        return asked
    if change == "restart":
        return asked._replace(tokens_lost=row.tokens_lost + row.num_tokens)
    stamp = row.stamp if row.num_tokens or row.status != "open" else asked.stamp
    return row._replace(placement=asked.placement, replica=asked.replica, **stamp._asdict())


def _can_continue(row: Row, version: int | None, step: int | None) -> bool:
    """Return whether these weights are no older than the last token (evaluation: the same)."""
    last_version, last_step = row.latest
    if None in (version, step, last_version, last_step) or row.purpose != "train":
        return (version, step) == (last_version, last_step)
    return version >= last_version and step >= last_step  # type: ignore[operator]


def is_behind(row: Row, segment: int, offset: int) -> bool:
    """Return whether a chunk at this position starts where tokens are already stored."""
    last = row.segments - 1
    return segment < last or (segment == last and offset < row.segment_tokens)


def judge_append(
    row: Row | None, placement: int, chunk: Chunk, stored: Chunk | None, in_flight: bool = False
) -> Verdict:
    """Decide whether a chunk may be added; `stored` is the chunk with the same key, if any."""
    barred = _check_placement(row, placement)
    if row is None or barred is not None:
        return barred or _refuse_unknown()
    if is_behind(row, chunk.segment, chunk.offset):
        if stored is not None and stored.has_same_tokens(chunk):
            return _REPEAT
        return Verdict("refused", f"{_format_position(chunk)} overlaps other stored tokens")
    if row.end is not None or row.status != "open":
        return Verdict("refused", f"the response is already {row.end or row.status}")
    if chunk.segment != row.turns:
        after = f"the environment has answered {row.turns} turns"
        return Verdict("refused", f"turn {chunk.segment} is not being sampled: {after}")
    if not _is_next(row, chunk):
        return Verdict("refused", f"{_format_position(chunk)} leaves a gap: {_next_position(row)}")
    room = MAX_TOKENS - row.num_tokens - row.context_tokens
    reason = _find_wrong_version_reason(row, chunk, in_flight)
    reason = reason or _find_invalid_chunk_reason(chunk, room)
    return Verdict("refused", reason) if reason else _WRITE


def _find_wrong_version_reason(row: Row, chunk: Chunk, in_flight: bool) -> str | None:
    """Return why the weights of a chunk are wrong: not the row's, or in flight older ones."""
    _, version, step = chunk.source
    if (version, step) == row.latest or (in_flight and _can_continue(row, version, step)):
        return None
    last_version, last_step = row.latest
    return (
        f"its tokens are of version {version} (step {step}), older than version {last_version} "
        f"(step {last_step}) before them"
    )


def _find_invalid_chunk_reason(chunk: Chunk, room: int) -> str | None:
    """Return why the bytes of a chunk are invalid; None: they are valid.

    Log-probs must be finite and at most 1e-6: anything else is not the log of a probability, and
    one NaN would silently spoil the loss of a whole step.
    """
    if reason := _find_invalid_ids_reason(chunk.tokens, room):
        return reason
    if len(chunk.tokens) != len(chunk.logprobs):
        tokens, logprobs = (len(part) / TOKEN_BYTES for part in (chunk.tokens, chunk.logprobs))
        return f"{tokens:g} tokens came with {logprobs:g} log-probs"
    values = np.frombuffer(chunk.logprobs, "<f4")
    if not (values.min() > -np.inf and values.max() <= MAX_LOGPROB):  # a NaN fails both
        return "a log-prob is not finite or above 1e-6"
    return None


def apply_append(row: Row, chunk: Chunk) -> Row:
    """Return the row after an accepted chunk."""
    count = len(chunk.tokens) // TOKEN_BYTES
    after = row._replace(
        segments=chunk.segment + 1,
        segment_tokens=chunk.offset + count,
        num_tokens=row.num_tokens + count,
    )
    if chunk.source[1:] == row.latest:
        return after
    _, version, step = chunk.source
    if not row.num_tokens:
        return after._replace(weight_version=version, version_step=step)
    return after._replace(last_version=version, last_step=step)


def judge_finish(row: Row | None, placement: int, finish_reason: str, num_tokens: int) -> Verdict:
    """Decide whether the response may be declared complete; the token counts must agree."""
    barred = _check_placement(row, placement)
    if row is None or barred is not None:
        return barred or _refuse_unknown()
    if row.num_tokens != num_tokens:
        return Verdict("refused", f"{row.num_tokens} tokens are stored, not {num_tokens}")
    if 0 < row.segments <= row.turns:
        return _REPEAT  # of the answered turn: the next one has no tokens yet
    if row.status != "open":
        if row.finish_reason == finish_reason:
            return _REPEAT
        return Verdict("refused", f"it already finished with {row.finish_reason!r}")
    if row.end is not None:
        return Verdict("refused", f"it is already {row.end}")
    return _WRITE


def judge_intend(
    row: Row | None, placement: int, turn: int, known: Sequence[object], asked: Sequence[object]
) -> Verdict:
    """Decide whether these calls of a turn may be made.

    They may not if there are `known` calls, except for a repeat: the same calls of the same
    process.
    """
    barred = _check_placement(row, placement)
    if row is None or barred is not None:
        return barred or _refuse_unknown()
    if row.status != "generated" or row.turns != turn or row.end is not None:
        what = row.end or row.status
        return Verdict(
            "refused", f"turn {turn} accepts no calls: the trajectory is {what} after {row.turns}"
        )
    if known and list(known) != list(asked):
        return Verdict("refused", "another process makes the calls of this turn, or made them")
    return _REPEAT if known else _WRITE


def judge_context(
    row: Row | None,
    placement: int,
    turn: int,
    tokens: bytes,
    stored: bytes | None,
    parent: int | None = None,
) -> Verdict:
    """Decide whether the environment's token ids may be added.

    They are the prompt (turn 0, before the first turn) or follow a turn that has ended: the last
    one, `parent`, or none (-1). The first ones are kept (`stored`), because the model may have read
    them.
    """
    barred = _check_placement(row, placement)
    if row is None or barred is not None:
        return barred or _refuse_unknown()
    if row.end is not None:
        return Verdict("refused", f"it is already {row.end}")
    if stored is not None:
        return _REPEAT
    due = ("generated", row.turns + 1, row.turns + 1) if turn else ("open", 0, 0)
    if (row.status, turn, row.segments) != due:
        after = f"{row.turns} answered turns, with tokens of {row.segments}"
        return Verdict("refused", f"no context {turn} is due: it is {row.status} after {after}")
    if parent is not None and not ROOT <= parent < turn:
        return Verdict("refused", f"context {turn} cannot follow turn {parent}")
    room = MAX_TOKENS - row.num_tokens - row.context_tokens
    reason = _find_invalid_ids_reason(tokens, room)
    return Verdict("refused", reason) if reason else _WRITE


def apply_context(row: Row, turn: int, tokens: bytes) -> Row:
    """Return the row after an accepted context, which is open again."""
    count = row.context_tokens + len(tokens) // TOKEN_BYTES
    return row._replace(
        turns=turn, context_tokens=count, status="open", finish_reason=None, digest=None
    )


def _find_invalid_ids_reason(tokens: bytes, room: int) -> str | None:
    """Return why token ids are invalid; None: they are valid."""
    if len(tokens) % TOKEN_BYTES or not tokens:
        return f"{len(tokens)} bytes of tokens are not a positive number of int32"
    if len(tokens) > room * TOKEN_BYTES:
        return f"a trajectory holds at most {MAX_TOKENS} tokens"
    if int(np.frombuffer(tokens, "<i4").min()) < 0:
        return "a token id is negative"
    return None


def judge_reward(
    row: Row | None, placement: int, score: float | None, reason: str, detail: str
) -> RewardVerdict:
    """Decide whether a reward may be stored; the first is kept, a batch may have used it."""
    barred = _check_placement(row, placement)
    if row is None or barred is not None:
        return RewardVerdict(*(barred or _refuse_unknown()))
    if score is not None and not math.isfinite(score):
        return RewardVerdict("refused", f"the score {score} is not finite")
    if row.status == "rewarded":
        stored = (row.reward_bits, row.reward_reason, row.reward_detail)
        same = stored == (encode_reward(score), reason, detail)
        return RewardVerdict("ok" if same else "already")
    if row.status != "generated" or row.end is not None:
        return RewardVerdict("refused", f"it is {row.end or row.status}, not generated")
    return RewardVerdict("ok", changes=True)


def judge_end(row: Row | None, asked: Row) -> Verdict:
    """Decide whether the trajectory may end this way; an end is final and stops all writes.

    `asked` is the row of a trajectory that was never opened.
    """
    how = (asked.end, asked.end_reason, asked.end_step)
    if asked.end not in ("dropped", "trained" if asked.purpose == "train" else "evaluated"):
        return Verdict("refused", f"purpose {asked.purpose} cannot end as {asked.end}")
    if row is None:
        return _WRITE if asked.end == "dropped" else _refuse_unknown()
    if row.identity != asked.identity:
        return Verdict("refused", _describe_identity(row))
    if row.end is not None:
        if (row.end, row.end_reason, row.end_step) == how:
            return _REPEAT
        ended = f"it is already {row.end} ({row.end_reason!r}, step {row.end_step})"
        return Verdict("refused", ended)
    if asked.placement < row.placement:
        return Verdict("fenced", f"placement {row.placement} holds it")
    if asked.end != "dropped" and row.status != "rewarded":
        return Verdict(
            "refused", f"it is {row.status}, and only a rewarded trajectory can be {asked.end}"
        )
    return _WRITE


def apply_end(row: Row | None, asked: Row) -> Row:
    """Return the row after an allowed `judge_end`; an unopened one has attempt 0."""
    if row is None:
        return asked
    return row._replace(
        placement=asked.placement,
        end=asked.end,
        end_reason=asked.end_reason,
        end_step=asked.end_step,
    )


def digest_payload(
    tokens: bytes, logprobs: bytes, contexts: Sequence[bytes] = (), parents: Parents = ()
) -> str:
    """Return the xxh3_128 (hex) of all tokens, then all log-probs, then the contexts.

    Each context is framed by its length; the digest does not depend on how the tokens were cut.
    The parents of turns follow if there are branches.
    """
    state = xxhash.xxh3_128(tokens)
    state.update(logprobs)
    for context in contexts:
        state.update(f"{len(context)}\n".encode())
        state.update(context)
    state.update(",".join(map(str, parents)).encode())
    return state.hexdigest()


def digest_read_ids(ids: bytes) -> str:
    """Return the xxh3_128 (hex) of the token ids (int32) that an engine is given to read."""
    return xxhash.xxh3_128_hexdigest(ids)


def segment_lengths(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Return the tokens per segment of chunks that are in order and without gaps."""
    lengths: list[int] = []
    for chunk in chunks:
        if chunk.segment == len(lengths):
            lengths.append(0)
        lengths[-1] += len(chunk.tokens) // TOKEN_BYTES
    return tuple(lengths)


def compute_spans(chunks: Sequence[Chunk]) -> tuple[TokenSpan, ...]:
    """Split a response by source, given all of its chunks in order."""
    parts = groupby(chunks, lambda chunk: chunk.source)
    return tuple(
        TokenSpan._make((*source, sum(len(chunk.tokens) for chunk in part) // TOKEN_BYTES))
        for source, part in parts
    )


def encode_reward(score: float | None) -> bytes | None:
    return None if score is None else struct.pack("<d", score)


def decode_reward(bits: bytes | None) -> float | None:
    return None if bits is None else float(struct.unpack("<d", bits)[0])


def _check_placement(row: Row | None, placement: int) -> Verdict | None:
    """Return the refusal of a writer that does not hold the trajectory; None if it does."""
    if row is None:
        return _refuse_unknown()
    if placement < row.placement:
        return Verdict("fenced", f"placement {row.placement} holds it")
    if placement > row.placement:
        return Verdict("refused", f"placement {placement} has not opened it")
    return None


def _refuse_unknown() -> Verdict:
    return Verdict("refused", "it was never opened")


def _describe_identity(row: Row) -> str:
    return f"it is stored as {', '.join(f'{k} {v}' for k, v in row.identity._asdict().items())}"


def _is_next(row: Row, chunk: Chunk) -> bool:
    return chunk.offset == (row.segment_tokens if chunk.segment < row.segments else 0)


def _format_position(chunk: Chunk) -> str:
    return f"segment {chunk.segment} offset {chunk.offset}"


def _next_position(row: Row) -> str:
    done = row.segment_tokens if row.turns < row.segments else 0
    return f"it continues at segment {row.turns} offset {done}"
