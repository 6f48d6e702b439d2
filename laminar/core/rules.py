"""Decision rules that have changed: a table of named flags. An old log replays by its old rules.

Reads   the logic version and the settings with which a log begins
Gives   RULES, LOGIC_VERSION, NEW_RUN; `applies(settings, RULE)`, `rules_of(settings)`, `unknown`
Raises  LogicError for a log whose rules this program does not have; it names what is missing

To change a decision: add a Rule with LOGIC_VERSION + 1, keep the old decision beside the new one,
and ask `applies` where they part. A run logs the names of NEW_RUN with its settings when it begins
(the first `coordinator-started`); what is not named there is decided by the old rule, also when a
newer program goes on with the run. So no kept log changes.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from laminar.events.base import Settings


class LogicError(RuntimeError):
    """The log was written by decision rules that this program does not have."""


class Rule(NamedTuple):
    """One changed decision."""

    name: str  #: as it is logged; never changed, never used again
    since: int  #: the logic version that introduced it
    old: str  #: what is decided without it
    new: str
    #: instead of by its name it is on when this setting differs from its default
    setting: str = ""


REWARD_ERRORS = Rule(
    "reward-errors",
    1,
    "rewards that fail are not counted and end no run",
    "they are counted by reason; too large a share of them ends the run",
    setting="max_error_permille",
)
HELD_OUT_FIGURES = Rule(
    "held-out-figures",
    1,
    "of a held-out prompt only right or wrong is kept; an answer lost three times is wrong",
    "scores, lengths and agreement of all its answers are kept; such an answer is missing",
    setting="eval_answers",
)
TROUBLE_NOT_KEPT = Rule(
    "trouble-not-kept",
    2,
    "a relay's entry in the state has the kind of the last trouble that it reported",
    "it has not: no decision asks for it, and the report itself is in the log",
)
REPACK = Rule(
    "repack",
    3,
    "a trajectory stays where it is until its replica is lost or a batch waits for it",
    "stragglers are packed on few replicas; what that needs is kept in the state",
    setting="repack_policy",
)
UNFINISHED_KEPT = Rule(
    "unfinished-kept",
    4,
    "a relay evicts the oldest version that is not pinned",
    "it is told which versions have unfinished work, and evicts those last",
)
STORE_RESTARTS = Rule(
    "store-restarts",
    4,
    "the loss of the store ends the run",
    "its node starts it again, and what it is to write waits for it",
)
TRAINER_RESUMES = Rule(
    "trainer-resumes",
    4,
    "the loss of the trainer ends the run",
    "it goes on from a checkpoint that the log confirms; what that needs is kept in the state",
    setting="save_freq",
)
START_NEEDS_REPLICA = Rule(
    "start-needs-replica",
    4,
    "the time for the start ends with the first weights, also if no replica has ever joined",
    "then it goes on until one joins",
)
END_NEEDS_NO_TRAINER = Rule(
    "end-needs-no-trainer",
    4,
    "without checkpoints the loss of the trainer fails the run also when its last ends are written",
    "then the run goes on to its end without a trainer, as one with checkpoints does",
)
RUN_RESUMES = Rule(
    "run-resumes",
    4,
    "a run whose processes have all ended is over",
    "it goes on with new ones: what they had is lost work, to be redone or started again",
)
NODE_RESTARTS = Rule(
    "node-restarts",
    4,
    "a machine that is lost does not come back; the loss of that of store or trainer ends the run",
    "its processes have the time of a start to come back, with a new process of its node",
)
REPLICA_SHARE = Rule(
    "replica-share",
    4,
    "a replica takes as many new groups as it has room for, whatever that leaves to others",
    "with repack.policy gain it runs no more than its part of what the staleness bound admits",
)
MOVES_SPREAD = Rule(
    "moves-spread",
    4,
    "one look of repack empties as many replicas as it can",
    "it empties a number of them, and the next look others",
)
MOVES_END = Rule(
    "moves-end",
    4,
    "a replica may be emptied of what another one has handed to it and it has not begun yet",
    "it has to begin it first: until then the other one waits for it",
)
ENGINE_START = Rule(
    "engine-start",
    4,
    "a replica that has joined has all the time it takes to be ready",
    "it is started again when that takes too long",
    setting="engine_start_ms",
)
LESS_HEADROOM = Rule(
    "less-headroom",
    4,
    "a destination keeps room for half of what it and what moves there are expected to sample yet",
    "for an eighth: others end meanwhile, and what does not fit then waits, which costs less",
)
ENDING_STAYS_OPEN = Rule(
    "ending-stays-open",
    4,
    "a run that the user drains is over when it is stopped at once while its last ends are written",
    "it can go on, as it could without that",
)
RULES = (
    REWARD_ERRORS,
    HELD_OUT_FIGURES,
    TROUBLE_NOT_KEPT,
    REPACK,
    UNFINISHED_KEPT,
    STORE_RESTARTS,
    TRAINER_RESUMES,
    START_NEEDS_REPLICA,
    END_NEEDS_NO_TRAINER,
    RUN_RESUMES,
    NODE_RESTARTS,
    REPLICA_SHARE,
    MOVES_SPREAD,
    MOVES_END,
    ENGINE_START,
    LESS_HEADROOM,
    ENDING_STAYS_OPEN,
)
LOGIC_VERSION = 4
"""The highest `since` of the table: logs of this version and of earlier ones can be continued."""
NEW_RUN = tuple(rule.name for rule in RULES if not rule.setting)
"""What a run that begins now logs in `Settings.rules`."""
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Settings)}


def applies(settings: Settings, rule: Rule) -> bool:
    """Whether this run decides by the new rule."""
    if rule.setting:
        return bool(getattr(settings, rule.setting) != _DEFAULTS[rule.setting])
    return rule.name in settings.rules


def can_resume(settings: Settings) -> bool:
    """Whether a run that was begun with these can go on when all its processes have ended."""
    needed = (RUN_RESUMES, STORE_RESTARTS, TRAINER_RESUMES)
    return all(applies(settings, rule) for rule in needed)


def rules_of(settings: Settings) -> list[str]:
    """Names of all rules that this run decides by."""
    return [rule.name for rule in RULES if applies(settings, rule)]


def unknown(logic: int, settings: Settings) -> str:
    """What of the rules of a log this program does not have; empty when it has them all."""
    if logic > LOGIC_VERSION:
        return f"logic version {logic}, this program has {LOGIC_VERSION}"
    known = {rule.name for rule in RULES}
    missing = next((name for name in settings.rules if name not in known), "")
    return f"the decision rule {missing!r}, which this program does not have" if missing else ""


def require_known(logic: int, settings: Settings) -> None:
    """Refuse a log of rules that this program does not have."""
    if reason := unknown(logic, settings):
        raise LogicError(f"this log was begun with {reason}")
