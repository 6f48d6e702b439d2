"""Write the table of docs/failures.md: each process, made from names/roles.py and the texts here.

Usage: python -m tools.make.failures
Reads   laminar/names/roles.py; settings and constants that the texts name, for their values
Writes  docs/failures.md, only its table; a test compares it
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from laminar.config import Config
from laminar.names.roles import ACTOR_ROLES, ROLE_TABLE, Restart, Role

PAGE = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
HEAD = (
    "| role | noticed by | restarted by | resumes from | limit | if none comes back, the run |\n"
    "|---|---|---|---|---|---|\n"
)
LIMIT = "`recovery.max_restarts` within `recovery.restart_window_s`"


class Texts(NamedTuple):
    """The texts of a role that its record does not have."""

    noticed: str = ""  #: for an actor, other silence than that of its lease
    resumes_from: str = "nothing"
    limit: str = LIMIT


TEXTS = {
    Role.COORDINATOR: Texts(
        "`laminar train`: its exit, or no turn for `launch.supervisor.STILL_S`, then it is killed",
        "newest snapshot and event log, same state; the same port if free",
        "`coordinator.restarts.DEATHS_MAX` in a run, after pauses of "
        "`recovery.coordinator_restart_ms`, up to 10 s if it ends early; on a full disk "
        "`coordinator.disk_full_timeout_s`",
    ),
    Role.STRATEGY: Texts(
        "the coordinator: its exit, or no answer within `core.steps.batching.PROPOSAL_TIMEOUT_MS`",
        limit="none; that batch is chosen by deadline",
    ),
    Role.NODE: Texts(resumes_from="all its processes are restarted"),
    Role.STORE: Texts(
        "or for an order `core.store_orders.END_TIMEOUT_MS` plus `coordinator.disk_full_timeout_s`",
        "its database: acknowledged data is on disk",
    ),
    Role.TRAINER: Texts(
        "or `core.steps.batching.TRAIN_TIMEOUT_MS` for a step",
        "newest confirmed checkpoint; later steps are repeated",
        f"{LIMIT}; `core.steps.step_replay.DEATHS_MAX` for one batch",
    ),
    Role.RELAY: Texts(
        resumes_from="nothing: its arena is filled by the previous relay or the trainer"
    ),
    Role.ROLLOUT: Texts(
        "an engine not ready after `rollout.start_timeout_s`, or no progress",
        "newest weights; its work resumes elsewhere from saved tokens and the same weights, or "
        "starts over after `recovery.resume_timeout_ms`",
        f"{LIMIT}; a response that `core.scheduling.recovery.DEATHS_MAX` replicas died with is "
        "dropped; two equal engine failures before any replica has weights end the run",
    ),
}
OTHERS = """\
| rank of the trainer | the trainer (first rank): its exit, or silence for `coordinator.node_lease_ms`; other ranks: a collective missed for `trainer.collective_timeout_s` | with the trainer, which ends and names it | as the trainer | as the trainer | ends |
| reward worker | its replica: its exit, or a call longer than `reward.timeout_s` | its replica | nothing. Died: the call is retried. Too slow: it is killed, and the response gets `reward.error_score` | `reward.max_retries` for one call, then the response is dropped | continues |
| warm process | its node: its exit | its node | nothing: it imports again | `actors.system.warm.TRIES` failures in a row, then the node ends | as its node |
| `laminar train` | its daemons: their standard input is closed | you, with `--resume` once the run has ended | event log | none | ends, gracefully |
"""  # noqa: E501


def page() -> str:
    """Return the whole page, with a new table."""
    rows = "".join(f"| {' | '.join(_list_cells(role))} |\n" for role in Role)
    table = HEAD + re.sub(r"`([\w.]+\.\w+)`", _add_value, rows + OTHERS)
    return re.sub(r"(^\|.*\n)+", lambda _: table, PAGE.read_text(), count=1, flags=re.MULTILINE)


def _list_cells(role: Role) -> tuple[str, ...]:
    record, texts = ROLE_TABLE[role], TEXTS.get(role, Texts())
    noticed = texts.noticed
    if role in ACTOR_ROLES:
        by = "`laminar train`" if record.restart == Restart.BY_STARTER else "its node"
        lease = "node_lease_ms" if record.long_lease else "lease_ms"
        more = f", {noticed}" if noticed else ""
        noticed = f"{by}: its exit; the coordinator: silence for `coordinator.{lease}`{more}"
    return role, noticed, record.restart, texts.resumes_from, texts.limit, record.loss


def _add_value(name: re.Match[str]) -> str:
    return f"{name[0]} ({read_value(name[1]):.10g})"


def read_value(name: str) -> Any:
    """Return the default of a setting, or a constant by its module."""
    section, _, key = name.rpartition(".")
    if section in Config.__struct_fields__:
        return getattr(getattr(Config(), section), key)
    return getattr(importlib.import_module(f"laminar.{section}"), key)


if __name__ == "__main__":
    PAGE.write_text(page())
