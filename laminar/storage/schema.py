"""The tables of the store database, and the settings of its connections.

Gives   SQL text and the column list of `rules.Row`

`prompts` and `meta` are written once; `prompt_ids` has the token ids that were not known then;
`trajectories` keeps one row per issued trajectory and never removes it; `chunks` holds the tokens
of its latest attempt by segment (a single-turn response is segment 0), each with its source: after
a migration the row names the last replica only. Only SQL of SQLite 3.24 is used: clusters run old
systems.
"""

from __future__ import annotations

from laminar.events.reasons import DropReason
from laminar.storage.rules import Row

FORMAT = "1"  #: format of these tables; others are rejected

META = {
    "format": FORMAT,
    "data_digest": "",  #: digest of the data, as given to load_prompts; "" until then
    "train_prompts": "0",
    "eval_prompts": "0",
    "prompts_digest": "",  #: digest of the stored prompt rows, so that an audit needs no data file
}

PAGE_CACHE_KIB = 64 << 10

WRITER_PRAGMAS = (
    # One writer appends to the log while readers (an audit of a live run) continue undisturbed.
    "PRAGMA journal_mode = WAL",
    # The log is synced at every commit: acknowledged data survives a power cut.
    "PRAGMA synchronous = FULL",
    # An old store process may still be in its last transaction when its successor starts.
    "PRAGMA busy_timeout = 30000",
    # The undo copies of savepoints need not touch the disk.
    "PRAGMA temp_store = MEMORY",
    # The rows of the live trajectories stay in memory.
    f"PRAGMA cache_size = -{PAGE_CACHE_KIB}",
)

#: Trajectories whose payload may be removed. A batch may be trained again including the rows
#: left out for mismatch, and nothing records which batch that was, so those are kept.
PAYLOAD_KEPT = (
    f"\"end\" IS NOT NULL AND end_reason IS NOT '{DropReason.MISMATCH}' AND payload_removed IS NULL"
)
#: Completed steps from which on no trainer needs the payload.
PAYLOAD_STEP = "CASE \"end\" WHEN 'trained' THEN end_step ELSE version_step END"

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """
    CREATE TABLE prompts (
        purpose TEXT NOT NULL CHECK (purpose IN ('train', 'eval')),
        row_index INTEGER NOT NULL,
        payload BLOB NOT NULL,
        PRIMARY KEY (purpose, row_index)
    )
    """,
    """
    CREATE TABLE trajectories (
        id TEXT PRIMARY KEY,
        group_id TEXT NOT NULL,
        sibling INTEGER NOT NULL,
        purpose TEXT NOT NULL CHECK (purpose IN ('train', 'eval')),
        row_index INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        placement INTEGER NOT NULL,
        replica TEXT,
        weight_version INTEGER,
        version_step INTEGER,
        temperature REAL,
        segments INTEGER NOT NULL DEFAULT 0,
        segment_tokens INTEGER NOT NULL DEFAULT 0,
        num_tokens INTEGER NOT NULL DEFAULT 0,
        tokens_lost INTEGER NOT NULL DEFAULT 0,
        status TEXT NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'generated', 'rewarded')),
        finish_reason TEXT,
        digest TEXT,
        reward_bits BLOB,
        reward REAL,
        reward_reason TEXT,
        reward_detail TEXT,
        "end" TEXT CHECK ("end" IN ('trained', 'evaluated', 'dropped')),
        end_reason TEXT,
        end_step INTEGER,
        text TEXT,
        extras TEXT,
        last_version INTEGER,
        last_step INTEGER,
        turns INTEGER NOT NULL DEFAULT 0,
        context_tokens INTEGER NOT NULL DEFAULT 0,
        payload_removed INTEGER  -- 1: its chunks have no bytes any more
    )
    """,
    """
    CREATE TABLE chunks (
        trajectory_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        segment INTEGER NOT NULL,
        "offset" INTEGER NOT NULL,
        placement INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL,
        tokens BLOB,
        logprobs BLOB,
        file TEXT,
        replica TEXT,
        weight_version INTEGER,
        version_step INTEGER,
        read TEXT NOT NULL DEFAULT '',  -- digest of all ids that were read before it
        PRIMARY KEY (trajectory_id, attempt, segment, "offset")
    )
    """,
    "CREATE INDEX chunk_files ON chunks (file) WHERE file IS NOT NULL",
    """
    CREATE TABLE prompt_ids (
        purpose TEXT NOT NULL CHECK (purpose IN ('train', 'eval')),
        row_index INTEGER NOT NULL,
        ids BLOB NOT NULL,
        digest TEXT NOT NULL,
        PRIMARY KEY (purpose, row_index)
    )
    """,
    # Tokens that the model reads before a turn and did not sample: after the turn that it follows,
    # or (0) in place of the row's prompt. NULL: removed, like the tokens of chunks.
    """
    CREATE TABLE contexts (
        trajectory_id TEXT NOT NULL,
        turn INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL,
        tokens BLOB,
        parent INTEGER,  -- turn that it follows, -1: none; NULL: the turn before
        options TEXT,  -- messages.TurnOptions as JSON; NULL: none
        PRIMARY KEY (trajectory_id, turn)
    )
    """,
    # Tool calls. An at-most-once call is recorded with its owner before it is made.
    """
    CREATE TABLE effects (
        trajectory_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        turn INTEGER NOT NULL,
        call INTEGER NOT NULL,
        owner TEXT NOT NULL,
        tool TEXT NOT NULL,
        arguments TEXT NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('intended', 'done', 'failed', 'timed-out', 'lost')),
        result TEXT NOT NULL,
        seconds REAL NOT NULL DEFAULT 0,
        PRIMARY KEY (trajectory_id, attempt, turn, call)
    )
    """,
    f"CREATE INDEX payloads ON trajectories ({PAYLOAD_STEP}, num_tokens) WHERE {PAYLOAD_KEPT}",
)

#: Columns of `rules.Row`, in its order. Further columns: `reward` (readable), `text` and `extras`
#: (further values of the reward function, as JSON).
ROW_COLUMNS = ", ".join(f'"{name}"' for name in Row._fields)
