"""The state in the form of schemas 1 and 2, which their state hashes and snapshots name.

Reads   a state of today
Gives   encode_schema_2(state): the bytes that a coordinator of schema 2 would have hashed

Then every field was written, also one that equalled its default. The classes below are the parts of
the state as they were when schema 3 began, and are never changed: a field that came later is no
part of the old form, and one that is gone today has the default that it had.
"""

from __future__ import annotations

import msgspec

from laminar.core.state import State, encode


class _Settings(msgspec.Struct):
    seed: int
    groups_per_step: int
    group_size: int
    min_scored: int
    max_staleness: int
    groups_per_version: int
    total_steps: int
    total_epochs: int
    shuffle: bool
    drop_last: bool
    test_freq: int
    val_before_train: bool
    batch_strategy: str
    reward_scope: str
    resume_wait_ms: int
    batch_wait_ms: int
    start_timeout_ms: int
    stall_ms: int


class _Book(msgspec.Struct):
    issued: int = 0
    trained: int = 0
    evaluated: int = 0
    dropped: dict[str, int] = {}


class _Ledger(msgspec.Struct):
    groups: _Book = msgspec.field(default_factory=_Book)
    trajectories: _Book = msgspec.field(default_factory=_Book)
    tokens: _Book = msgspec.field(default_factory=_Book)


class _Actor(msgspec.Struct):
    name: str
    role: str
    node: str
    pid: int
    boot_id: str
    incarnation: int
    alive: bool = True
    ready: bool = False
    last_peer_seq: int = 0


class _Replica(msgspec.Struct):
    name: str
    relay: str
    capacity: int
    version: int = -1
    step: int = -1
    digest: str = ""
    took: int = 0
    loading: bool = False
    running: dict[str, int] = {}
    tokens_total: int = 0
    progress_ns: int = 0
    failed_loads: int = 0


class _Relay(msgspec.Struct):
    name: str
    node: str
    bulk: str
    incarnation: int
    ready_seq: int
    successor: str = ""
    held: list[int] = []
    newest: int = -1
    newest_digest: str = ""
    arrived: dict[int, int] = {}
    lags: int = 0
    unlinked: int = 0
    trouble: str = ""


class _Trajectory(msgspec.Struct):
    id: str
    group: str
    sibling: int
    status: str = "dispatched"
    replica: str = ""
    placement: int = 1
    attempt: int = 1
    version: int = 0
    step: int = 0
    num_tokens: int = 0
    score_bits: int = -1
    correct: bool = False
    deaths: int = 0
    waits: int = 0
    restart: bool = False


class _Group(msgspec.Struct):
    id: str
    purpose: str
    row_index: int
    step: int
    deadline: int
    order: int
    members: list[str]
    unfinished: int
    status: str = "open"
    end: str = ""
    end_reason: str = ""
    mixed: bool = False


class _Batch(msgspec.Struct):
    step: int
    version: int
    groups: list[str]


class _Evaluation(msgspec.Struct):
    index: int
    version: int
    step: int
    final: bool
    queue: list[int]
    total: int
    attempts: dict[int, int] = {}
    done: int = 0
    correct: int = 0


class _EvaluationResult(msgspec.Struct):
    index: int
    version: int
    step: int
    final: bool
    total: int
    correct: int


class _Outstanding(msgspec.Struct):
    command_id: int
    cause: int
    incarnation: int
    command: msgspec.Raw


class _State(msgspec.Struct):
    settings: _Settings
    logic: int
    phase: str = "starting"
    time_ns: int = 0
    seq: int = 0
    coordinator_incarnation: int = 0
    next_incarnation: int = 1
    actors: dict[str, _Actor] = {}
    replicas: dict[str, _Replica] = {}
    relays: dict[str, _Relay] = {}
    chain: list[str] = []
    num_train: int = -1
    num_eval: int = 0
    cursor: int = 0
    groups: dict[str, _Group] = {}
    trajectories: dict[str, _Trajectory] = {}
    next_order: int = 0
    ready: dict[str, None] = {}
    deadlines: dict[int, int] = {}
    lost: dict[str, None] = {}
    unscored: dict[str, None] = {}
    chosen: int = 0
    completed: int = 0
    batch: _Batch | None = None
    proposal: list[str] | None = None
    proposal_failed: bool = False
    newest: int = -1
    newest_step: int = -1
    newest_digest: str = ""
    fastest: int = -1
    next_version: int = 0
    owed: int = -1
    owed_step: int = -1
    exported: int = -1
    export_path: str = ""
    saved: dict[int, str] = {}
    evaluation: _Evaluation | None = None
    evaluation_due: int = -1
    evaluations: list[_EvaluationResult] = []
    next_evaluation: int = 0
    draining: bool = False
    failure: str = ""
    exit_code: int = 0
    commands: dict[str, _Outstanding] = {}
    timers: dict[str, int] = {}
    touched: dict[str, None] = {}
    ledger: _Ledger = msgspec.field(default_factory=_Ledger)
    ignored: dict[str, int] = {}
    staleness_sum: int = 0
    staleness_max: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_State).decode


def encode_schema_2(state: State) -> bytes:
    """One MessagePack value with every field that schema 2 had, in its order."""
    return _encode(_decode(encode(state)))
