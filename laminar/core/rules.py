"""Decision rules: the version of all decisions, and the changed ones that old logs replay without.

Reads   the logic version and the settings with which a log begins
Gives   LOGIC_VERSION, OLDEST_LOGIC, RULES, NEW_RUN; `applies`, `rules_of`, `known`, `unknown`
Raises  LogicError for a log whose rules this program does not have; it names what is missing

Before the first tagged release a changed decision raises LOGIC_VERSION (tools/make/golden.py does
so), and logs of other versions are refused. From that release on OLDEST_LOGIC stays its version,
and a changed decision is a Rule with LOGIC_VERSION + 1: the old decision stays beside the new one,
and the code asks `applies` where they part. A run logs the names of NEW_RUN with its settings when
it begins (the first `coordinator-started`); what is not named there is decided by the old rule,
also when a newer program goes on with the run. So no log of a release changes.
"""

from __future__ import annotations

from typing import NamedTuple

from laminar.events.base import Settings


class LogicError(RuntimeError):
    """The log was written by decision rules that this program does not have."""


class Rule(NamedTuple):
    """One changed decision."""

    name: str  #: as it is logged; never changed, never used again
    since: int  #: the logic version that introduced it
    old: str  #: what is decided without it
    new: str


LOGIC_VERSION = 9
"""The decisions of this program."""
OLDEST_LOGIC = LOGIC_VERSION
"""Logs of this version and of later ones, up to LOGIC_VERSION, are replayed and continued."""
RULES: tuple[Rule, ...] = ()
NEW_RUN = tuple(rule.name for rule in RULES)
"""What a run that begins now logs in `Settings.rules`."""


def is_rule_active(settings: Settings, rule: Rule) -> bool:
    """Whether this run decides by the new rule."""
    return rule.name in settings.rules


def rules_of(settings: Settings) -> list[str]:
    """Names of all rules that this run decides by."""
    return [rule.name for rule in RULES if is_rule_active(settings, rule)]


def is_known_logic(logic: int) -> bool:
    """Whether this program has the decisions of that version."""
    return OLDEST_LOGIC <= logic <= LOGIC_VERSION


def find_unsupported_reason(logic: int, settings: Settings) -> str:
    """What of the rules of a log this program does not have; empty when it has them all."""
    if not is_known_logic(logic):
        return f"logic version {logic}, this program has {LOGIC_VERSION}"
    names = {rule.name for rule in RULES}
    missing = next((name for name in settings.rules if name not in names), "")
    return f"the decision rule {missing!r}, which this program does not have" if missing else ""


def require_known(logic: int, settings: Settings) -> None:
    """Refuse a log of rules that this program does not have."""
    if reason := find_unsupported_reason(logic, settings):
        raise LogicError(f"this log was begun with {reason}")
