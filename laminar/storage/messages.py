"""The requests and replies of the store, and their codec.

Reads   bytes of a frame (`decode_request`, `decode_reply`)
Gives   frozen structs; bytes of at most MESSAGE_BYTES_MAX (`encode`); StoreWireError otherwise

Payloads are blobs: token ids int32, log-probs float32, both little-endian, segments one after the
other in order. A request is a list of items and its reply lists their results in the same order, so
that one commit covers many trajectories. Every request may be sent twice. Numbers and ids are
bounded, so that a decoded request cannot overflow a column and a reply cannot outgrow a frame.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from laminar.events.families import MESSAGE_BYTES_MAX, Family, Item, Message
from laminar.names.ids import Purpose
from laminar.storage.rules import Answer, Ending, OpenAnswer, RewardAnswer, TokenSpan

PROMPT_LIMIT = 2 * 2**20  #: bytes of a row, without token ids; with MAX_TOKENS, a message holds it
REPLY_BUDGET = 12 * 2**20  #: bytes of payload in one reply; the excess is left out
MAX_ITEMS = 4096  #: items of one request
SPAN_BYTES = 320  #: upper bound of the bytes of a span in a reply

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Attempt = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=1e6)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Reason = Annotated[str, Meta(max_length=256)]
Detail = Annotated[str, Meta(max_length=16_384)]
Many = Meta(max_length=MAX_ITEMS)
#: further values that a reward function returned with the score
Extras = Annotated[dict[str, float | str], Meta(max_length=64)]


class StoreWireError(ValueError):
    """Bytes that are not a message of the store, or a message too large for a frame."""


# --- requests ---------------------------------------------------------------------------------


class OpenItem(Item, frozen=True, kw_only=True):
    trajectory_id: Name
    group_id: Name
    sibling: Count
    purpose: Purpose
    row_index: Count  #: index of the prompt within its purpose
    attempt: Attempt
    placement: Count
    weight_version: Count
    version_step: Count  #: the trainer step that made these weights
    replica: Name
    temperature: Temperature


class Open(Message, frozen=True, kw_only=True):
    """Take over trajectories: fence every lower placement and return their progress."""

    items: Annotated[tuple[OpenItem, ...], Many]


class AppendItem(Item, frozen=True, kw_only=True):
    """A chunk to append; resend it unchanged, because a different cut overlaps and is refused."""

    trajectory_id: Name
    placement: Count
    segment: Count = 0
    offset: Count  #: tokens of this segment before the chunk
    tokens: bytes
    logprobs: bytes
    weight_version: Count  #: the version that sampled all tokens
    version_step: Count
    #: digest of all tokens that the engine read when it began here; empty if it continued
    read: Annotated[str, Meta(max_length=32)] = ""


class Append(Message, frozen=True, kw_only=True):
    """Add sampled tokens and their log-probs."""

    items: Annotated[tuple[AppendItem, ...], Many]


class FinishItem(Item, frozen=True, kw_only=True):
    trajectory_id: Name
    placement: Count
    finish_reason: Name
    num_tokens: Count  #: total of all segments; must agree with the stored tokens


class Finish(Message, frozen=True, kw_only=True):
    """Declare responses complete."""

    items: Annotated[tuple[FinishItem, ...], Many]


class EffectItem(Item, frozen=True, kw_only=True):
    """A tool call by the model (tasks/environments/turns.py)."""

    call: Annotated[int, Meta(ge=0, lt=MAX_ITEMS)]  #: index within the turn
    tool: Annotated[str, Meta(max_length=256)]
    arguments: Detail
    status: Literal["intended", "done", "failed", "timed-out", "lost"]
    """"lost" is set by the store only: the trajectory ended or restarted before the call did."""
    result: Detail = ""
    seconds: Annotated[float, Meta(ge=0)] = 0.0  #: duration of the call


class Intend(Message, frozen=True, kw_only=True):
    """Record calls of a turn before they are made, so that no other process makes them."""

    trajectory_id: Name
    placement: Count
    turn: Count
    owner: Name  #: process that makes the calls
    effects: Annotated[tuple[EffectItem, ...], Many]


class TurnOptions(Item, frozen=True, kw_only=True):
    """The limits of one turn that its request sets."""

    max_tokens: Count = 0  #: sampled tokens; 0: no limit but that of the response
    #: texts that end the turn
    stop: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=16)] = ()


class ContextItem(Item, frozen=True, kw_only=True):
    trajectory_id: Name
    placement: Count
    turn: Count  #: turn that reads it; 0: as the prompt, in place of the row's
    #: turn that it follows; -1: none, its tokens are all that the turn reads; None: the turn before
    parent: Annotated[int, Meta(ge=-1)] | None = None
    tokens: bytes
    options: TurnOptions = TurnOptions()
    #: calls of the turn before, each with its outcome
    effects: Annotated[tuple[EffectItem, ...], Many] = ()


class Continue(Message, frozen=True, kw_only=True):
    """Add environments' answers to finished turns, which reopens the trajectories.

    The first answer to a turn is kept.
    """

    items: Annotated[tuple[ContextItem, ...], Many]


class Fetch(Message, frozen=True, kw_only=True):
    """Read trajectories for scoring (with their prompts) or for training."""

    ids: Annotated[tuple[Name, ...], Many]
    with_prompt: bool = False


class RewardItem(Item, frozen=True, kw_only=True):
    trajectory_id: Name
    placement: Count
    reward: float | None  #: finite; None: no reward function could score it
    reason: Reason = ""
    detail: Detail = ""
    text: str | None = None  #: the response as text, for people who read the run
    extras: Extras = msgspec.field(default_factory=dict)
    #: the environment's reason for the end, in place of the engine's; empty: the engine's
    finish_reason: Annotated[str, Meta(max_length=64)] = ""
    #: calls of the last turn, each with its outcome
    effects: Annotated[tuple[EffectItem, ...], Many] = ()


class PutRewards(Message, frozen=True, kw_only=True):
    """Store rewards; the first one of a trajectory is kept."""

    items: Annotated[tuple[RewardItem, ...], Many]


class EndItem(Item, frozen=True, kw_only=True):
    """An end; it repeats the identity, because an unopened trajectory may end."""

    trajectory_id: Name
    group_id: Name
    sibling: Count
    purpose: Purpose
    row_index: Count
    placement: Count
    end: Ending
    reason: Reason = ""
    step: Count


class End(Message, frozen=True, kw_only=True):
    """End trajectories, one row each, and return how many tokens they had."""

    items: Annotated[tuple[EndItem, ...], Many]


class SamplePrompts(Message, frozen=True, kw_only=True):
    """Return some prompts, spread over the training data, else over the held-out data."""

    count: Annotated[int, Meta(ge=1, le=256)]


class RemovePayloads(Message, frozen=True, kw_only=True):
    """Remove the oldest payloads (tokens and log-probs) beyond `keep_bytes`, some per request.

    Only of ended trajectories that were trained in an earlier batch than `before_step`, or sampled
    by weights of fewer steps. Rows are kept.
    """

    before_step: Count  #: completed steps that no trainer will have to repeat
    keep_bytes: Count


class Stats(Message, frozen=True, kw_only=True):
    """Return totals. Scans all trajectories: meant for reports, not for every step."""


Request = (
    Open
    | Append
    | Finish
    | Intend
    | Continue
    | Fetch
    | PutRewards
    | End
    | SamplePrompts
    | RemovePayloads
    | Stats
)


# --- replies ----------------------------------------------------------------------------------


class OpenResult(Item, frozen=True, kw_only=True):
    """A trajectory's stored state.

    `tokens` and `contexts` are set only for "open"; the other fields unless "fenced" or
    "refused".
    """

    trajectory_id: str
    answer: OpenAnswer
    reason: str = ""
    prompt_ids: bytes = b""
    tokens: bytes = b""
    segment_lengths: tuple[int, ...] = ()
    num_tokens: int = 0  #: stored tokens, which is also the number of stored log-probs
    tokens_lost: int = 0  #: total of all earlier attempts
    attempt: int = 0
    weight_version: int | None = None
    version_step: int | None = None
    finish_reason: str | None = None
    reward: float | None = None
    reward_reason: str | None = None
    contexts: tuple[bytes, ...] = ()  #: token ids after each turn that the environment answered
    parents: tuple[int, ...] = ()  #: as `branches.Parents`
    #: whether `prompt_ids` are the environment's instead of the row's
    own_prompt: bool = False
    options: TurnOptions = TurnOptions()  #: of the turn to sample


class OpenReply(Message, frozen=True, kw_only=True):
    results: tuple[OpenResult, ...]
    left_out: tuple[str, ...] = ()  #: not opened because the reply is full; request them again


class Result(Item, frozen=True, kw_only=True):
    trajectory_id: str
    answer: Answer
    reason: str = ""


class AppendReply(Message, frozen=True, kw_only=True):
    results: tuple[Result, ...]


class FinishReply(Message, frozen=True, kw_only=True):
    results: tuple[Result, ...]


class IntendReply(Message, frozen=True, kw_only=True):
    results: tuple[Result, ...]  #: always one


class ContinueReply(Message, frozen=True, kw_only=True):
    results: tuple[Result, ...]


class StoredTrajectory(Item, frozen=True, kw_only=True):
    trajectory_id: str
    group_id: str
    sibling: int
    purpose: str
    row_index: int
    attempt: int
    placement: int
    replica: str | None  #: replica that opened it last
    weight_version: int | None
    version_step: int | None
    temperature: float | None
    status: str
    finish_reason: str | None
    digest: str | None
    reward: float | None
    reward_reason: str | None
    reward_detail: str | None
    end: str | None
    prompt_ids: bytes
    tokens: bytes
    logprobs: bytes
    segment_lengths: tuple[int, ...]
    spans: tuple[TokenSpan, ...]  #: sources of the tokens, in order
    prompt: bytes | None = None  #: for `decode_prompt`
    extras: dict[str, float | str] = msgspec.field(default_factory=dict)
    #: token ids after each turn that the environment answered; `tokens` are only the sampled ones,
    #: split into turns by `segment_lengths`
    contexts: tuple[bytes, ...] = ()
    parents: tuple[int, ...] = ()  #: as `branches.Parents`
    effects: tuple[EffectItem, ...] = ()  #: calls of the last turn; only with the prompt
    call_seconds: float = 0.0  #: total duration of the calls of earlier turns; only with the prompt


class FetchReply(Message, frozen=True, kw_only=True):
    trajectories: tuple[StoredTrajectory, ...]
    left_out: tuple[str, ...] = ()  #: the reply is full; request them again
    unknown: tuple[str, ...] = ()  #: neither opened nor ended
    removed: tuple[str, ...] = ()  #: ended, and their tokens were removed by RemovePayloads


class StoredReward(Item, frozen=True, kw_only=True):
    """The stored reward, if the answer is "ok" or "already"."""

    trajectory_id: str
    answer: RewardAnswer
    reason: str = ""
    reward: float | None = None
    reward_reason: str | None = None
    finish_reason: str | None = None


class PutRewardsReply(Message, frozen=True, kw_only=True):
    results: tuple[StoredReward, ...]


class EndResult(Item, frozen=True, kw_only=True):
    trajectory_id: str
    answer: Answer
    reason: str = ""
    num_tokens: int = 0  #: stored tokens of the last attempt
    tokens_lost: int = 0  #: total of all earlier attempts


class EndReply(Message, frozen=True, kw_only=True):
    results: tuple[EndResult, ...]


class SamplePromptsReply(Message, frozen=True, kw_only=True):
    prompts: tuple[bytes, ...]  #: int32 little-endian; prompts that do not fit are left out


class RemovePayloadsReply(Message, frozen=True, kw_only=True):
    removed: int  #: trajectories; 0: nothing more can be removed


class Total(Item, frozen=True, kw_only=True):
    """Totals of the trajectories with the same end, or without an end and with the same status."""

    state: str
    trajectories: int
    tokens: int
    tokens_lost: int


class StatsReply(Message, frozen=True, kw_only=True):
    train_prompts: int
    eval_prompts: int
    totals: tuple[Total, ...]
    database_bytes: int  #: size of the database, without payload files


class ErrorReply(Message, frozen=True, kw_only=True):
    """The refusal of a whole request, which changed nothing."""

    reason: str


Reply = (
    OpenReply
    | AppendReply
    | FinishReply
    | IntendReply
    | ContinueReply
    | FetchReply
    | PutRewardsReply
    | EndReply
    | SamplePromptsReply
    | RemovePayloadsReply
    | StatsReply
    | ErrorReply
)


class PromptPayload(Item, frozen=True, kw_only=True):
    """A row of the data set, as the store keeps it for scoring and dispatch."""

    prompt: Any  #: a string or a list of chat messages
    ground_truth: Any
    columns: dict[str, Any]
    data_source: str
    prompt_ids: bytes = b""  #: int32 little-endian; empty: tokenised later and stored separately


# --- codec ------------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode


def encode(message: Request | Reply) -> bytes:
    data = _encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        raise StoreWireError(
            f"a {type(message).__name__} of {len(data)} bytes is over the limit of "
            f"{MESSAGE_BYTES_MAX}; send its items in several messages"
        )
    return data


def encode_prompt(prompt: PromptPayload) -> bytes:
    """Encode a prompt as MessagePack; TypeError for a column that MessagePack cannot hold."""
    return _encode(prompt)


_ERROR = (
    "{size} bytes are not a message of the store: {error}",
    "{size} bytes are over the limit of {limit}",
    StoreWireError,
)
decode_request = Family[Request](Request, *_ERROR).decode
decode_reply = Family[Reply](Reply, *_ERROR).decode
decode_prompt = Family[PromptPayload](PromptPayload, *_ERROR).decode
