"""Decision rules: the version of all decisions, and changes that old logs replay without.

Reads   the logic version and the settings with which a log begins
Gives   LOGIC_VERSION, OLDEST_LOGIC, RULES, NEW_RUN; `is_rule_active`, `rules_of`,
        `is_known_logic`, `find_unsupported_reason`
Raises  LogicError for a log whose rules this program does not have; it names the missing ones

Before the first tagged release a changed decision raises LOGIC_VERSION (tools/make/golden.py does
so), and logs of other versions are refused. From that release on, OLDEST_LOGIC keeps its version,
and a changed decision is a Rule with LOGIC_VERSION + 1: the code has both decisions and calls
`is_rule_active` where they part. A run logs the names of NEW_RUN with its settings when it begins
(the first `coordinator-started`); a rule that is not named there keeps its old decision, also when
a newer program continues the run. So no log of a release changes.
"""

from __future__ import annotations

from typing import NamedTuple

from laminar.events.base import Settings


class LogicError(RuntimeError):
    """The log was written by decision rules that this program does not have."""


class Rule(NamedTuple):
    """A changed decision."""

    name: str  #: logged name; never changed or reused
    since: int  #: the logic version that introduced it
    old: str  #: decision without it
    new: str


LOGIC_VERSION = 17  #: the version of this program's decisions
OLDEST_LOGIC = LOGIC_VERSION
"""The oldest version whose logs, up to LOGIC_VERSION, are replayed and continued."""
RULES: tuple[Rule, ...] = ()
NEW_RUN = tuple(rule.name for rule in RULES)  #: the value of `Settings.rules` that a new run logs


def is_rule_active(settings: Settings, rule: Rule) -> bool:
    """Return whether this run decides by the new rule."""
    return rule.name in settings.rules


def rules_of(settings: Settings) -> list[str]:
    """Return the names of all rules that this run decides by."""
    return [rule.name for rule in RULES if is_rule_active(settings, rule)]


def is_known_logic(logic: int) -> bool:
    """Return whether this program has the decisions of that version."""
    return OLDEST_LOGIC <= logic <= LOGIC_VERSION


def find_unsupported_reason(logic: int, settings: Settings) -> str | None:
    """Return the missing logic version or rule of a log; None: this program has them all."""
    if not is_known_logic(logic):
        return f"logic version {logic}, this program has {LOGIC_VERSION}"
    names = {rule.name for rule in RULES}
    missing = next((name for name in settings.rules if name not in names), None)
    return f"the decision rule {missing!r}, which this program does not have" if missing else None


def require_known(logic: int, settings: Settings) -> None:
    """Refuse a log of rules that this program does not have."""
    if reason := find_unsupported_reason(logic, settings):
        raise LogicError(f"this log was written with {reason}")
