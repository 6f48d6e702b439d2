"""Resumption of a run by a starting coordinator: on request, or when no process is left.

Reads   the state at the end of the log, the present settings, the processes that live
Gives   ResumeRequest, the user's request; decide_resume, the event of a resumption;
        check_unserved, check_resumable, which raise ConfigError in one sentence
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from laminar.config import ConfigError
from laminar.core.members import resumption
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events.base import Settings
from laminar.events.events import RunResumed
from laminar.net.auth import RunKeys
from laminar.net.client import read_address
from laminar.net.user_requests import is_coordinator_alive
from laminar.run.command_line import shell_command
from laminar.run.directory import COORDINATOR_FILE
from laminar.run.lock import AlreadyServed, holders, in_use

NOT_COMPARED = ("rules", "stall_ms")
"""Settings that come from the program: a later release may have others."""


class ResumeRequest(StrEnum):
    """The user's request about a stopped run, as a command-line option."""

    NOTHING = ""
    RESUME = "--resume"  #: resume it; an error if it cannot be
    RESUME_STOPPED = "--resume-stopped"  #: resume it if it was stopped; any other run continues

    def applies_to(self, run_dir: Path, state: State) -> bool:
        """Return whether the request applies to the run in this state.

        A run that was about to pause when its coordinator ended has paused, once its other
        processes left."""
        run = state.run
        ended = run.phase == Phase.ENDED or (run.paused and not _has_living_process(run_dir, state))
        stopped = ended and not resumption.is_run_over(state)
        return self == ResumeRequest.RESUME or (self == ResumeRequest.RESUME_STOPPED and stopped)


def check_unserved(run_dir: Path, keys: RunKeys) -> None:
    """Raise AlreadyServed if a coordinator responds: other machines' locks may be invisible."""
    try:
        address = read_address(run_dir / COORDINATOR_FILE)
    except ConfigError:  # it cannot be asked from here, and no process of this run can reach it
        return
    if address is not None and is_coordinator_alive(address, keys):
        raise AlreadyServed(
            f"{run_dir} already has a coordinator at {address}, so this one ends; "
            f"`{shell_command('stop', run_dir)}` ends the run"
        )


def decide_resume(
    run_dir: Path, state: State, settings: Settings, *, asked: bool
) -> RunResumed | None:
    """Return RunResumed, if all processes of the log are gone or the user has `asked` for it.

    Raise ConfigError if it cannot be resumed, or not with these settings."""
    if asked:
        check_resumable(run_dir, state)
    news = resumption.make_resume_event(state, settings, _list_living(run_dir), asked=asked)
    if news is not None:
        _check_settings(run_dir, state, settings)
    return news


def _list_living(run_dir: Path) -> set[tuple[str, int]]:
    return {(holder.name, holder.pid) for holder in holders(run_dir)}


def _has_living_process(run_dir: Path, state: State) -> bool:
    """Return whether a process of the log is running."""
    living = _list_living(run_dir)
    return any(a.alive and (a.name, a.pid) in living for a in state.members.actors.values())


def check_resumable(run_dir: Path, state: State) -> None:
    """Raise ConfigError for a run that is running, has ended for good, or cannot be resumed."""
    if _has_living_process(run_dir, state):
        raise ConfigError(in_use(run_dir))
    if resumption.is_run_over(state):
        how = f"has failed ({state.run.failure})" if state.run.failure else "is finished"
        raise ConfigError(
            f"the run {run_dir} {how} after step {state.steps.completed} and cannot be resumed; "
            f"{_suggest_instead(run_dir, state)}"
        )
    if not state.settings.keeps_checkpoints:
        raise ConfigError(
            f"the run {run_dir} keeps no checkpoints (trainer.save_freq = 0), so it cannot be "
            "resumed; start a new run"
        )


def _suggest_instead(run_dir: Path, state: State) -> str:
    saved = state.versions.saved_steps
    if not saved:
        return "start a new run"
    fork = shell_command("fork", run_dir, "--at-step", max(saved))
    return f"`{fork}` continues from its checkpoint"


def _check_settings(run_dir: Path, state: State, settings: Settings) -> None:
    """Raise ConfigError for the first setting of the configuration that differs from the log's."""
    for name in Settings.__struct_fields__:
        then, now = (getattr(each, name) for each in (state.settings, settings))
        if then != now and name not in (*NOT_COMPARED, *resumption.CHANGEABLE):
            raise ConfigError(
                f"{run_dir}/config.toml says {name} = {now!r}, but the run began with "
                f"{then!r}: restore that value"
            )
