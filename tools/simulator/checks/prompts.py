"""Checks of the training prompts: handed out in order, and each ends once.

Reads   commands as they are decided; the last state
Raises  Violation

An independent book: the first placement of a group hands its prompt out, EndTrajectories
end its siblings. Decisions that a crash of the coordinator loses never count. A fork first hands
out what the other run had left unfinished, then the rest of its pass, and never what it had ended.
"""

from __future__ import annotations

from laminar.core.scheduling.dispatch import permute_rows
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.events.of_coordinator import ForkOrigin
from laminar.names import ids
from laminar.names.ids import GroupId, Purpose
from tools.simulator.runtime.violation import Violation
from tools.simulator.scenario import DATA_DIGEST, Scenario
from tools.simulator.turns import made_of, prompt_with, read_before

ENDS = ("trained", "dropped")
RUN_ENDED = "run-ended"


def answers_its_prompt(
    scenario: Scenario, command: cmd.GenerateTrajectory, prompt_ids: tuple[int, ...]
) -> None:
    """Check answers_its_prompt: an engine begins with the prompt and all that precedes the turn."""
    prompt = prompt_with(scenario, command.purpose, command.row_index)
    turns = len(made_of(scenario, command.seed).counts)
    if prompt_ids not in [(*prompt, *read_before(scenario, command.seed, t)) for t in range(turns)]:
        what = f"{command.to} begins {command} with the prompt {prompt_ids}"
        raise Violation("answers_its_prompt", what, command.trajectory_id)


def _before(origin: ForkOrigin) -> dict[str, int]:
    """Return the row of each group that the other run has handed out."""
    rows = permute_rows(origin.seed, 0, origin.num_train)
    return {ids.train_group(0, at): rows[at] for at in range(origin.cursor)}


def _pass_of(group: str) -> str:
    return group.partition(".")[0]


class Prompts:
    """Record of the prompts handed out, and of how each trajectory ended."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, origin = scenario, scenario.origin
        if origin is not None and origin.data != DATA_DIGEST:
            origin = None
        self._again = [prompt.group for prompt in origin.unfinished] if origin is not None else []
        self._begin = origin.cursor if origin is not None else 0
        #: rows by group that the other run has handed out
        self._before = _before(origin) if origin is not None else {}
        #: event and row by group, in the order in which they were handed out
        self._given: dict[str, tuple[int, int]] = {}
        self._rows = self._rows_of({})  #: groups by pass and row
        #: (event of the decision, end, reason) by trajectory
        self._ended: dict[str, tuple[int, str, str]] = {}
        self._resumed: list[int] = []  #: events at which the run resumed

    def note(self, stamped: Stamped, commands: list[Command]) -> None:
        """Note what was decided at an event; a replay repeats it."""
        if isinstance(stamped.event, ev.RunResumed):
            self._resumed.append(stamped.seq)
        for command in commands:
            if isinstance(command, cmd.OpeningCommand) and command.purpose == Purpose.TRAIN:
                self._hand_out(stamped.seq, command)
            elif isinstance(command, cmd.EndTrajectories):
                for ending in command.endings:
                    if ending.purpose == Purpose.TRAIN:
                        self._end(stamped.seq, ending)

    def take_back(self, seq: int) -> None:
        """Forget what was decided after this event: a crash lost it."""
        self._given = {g: found for g, found in self._given.items() if found[0] <= seq}
        self._rows = self._rows_of({group: row for group, (_, row) in self._given.items()})
        for trajectory in [t for t, (since, _, _) in self._ended.items() if since > seq]:
            del self._ended[trajectory]
        self._resumed = [at for at in self._resumed if at <= seq]

    def _hand_out(self, seq: int, command: cmd.OpeningCommand) -> None:
        """Check prompts_in_order: the next prompt of the data, with a row new to its pass."""
        group, row = command.group, command.row_index
        if group in self._given:
            return  # a sibling, or another placement
        if group != (following := self._group(len(self._given))):
            what = f"{group} was handed out, {following} was not"
            raise Violation("prompts_in_order", what, command.trajectory_id)
        place = _pass_of(group), row
        if self._before.get(group, row) != row or self._rows.setdefault(place, group) != group:
            what = f"row {row} is handed out as {group}, but was another prompt of its pass"
            raise Violation("prompts_in_order", what, command.trajectory_id)
        self._given[group] = seq, row

    def _rows_of(self, given: dict[str, int]) -> dict[tuple[str, int], str]:
        """Return the groups of the other run and of this one, by pass and row."""
        return {(_pass_of(g), row): g for g, row in (self._before | given).items()}

    def _group(self, index: int) -> str:
        """Return the group that is handed out after `index` others."""
        if index < len(self._again):
            return self._again[index]
        number = self._begin + index - len(self._again)
        return ids.train_group(*divmod(number, self._scenario.world.num_train))

    def _end(self, seq: int, ending: cmd.TrajectoryEnding) -> None:
        """Check prompt_ends_once: every sibling is trained, or dropped with a reason."""
        known = self._ended.get(ending.trajectory_id)
        if known is not None and known[0] != seq:
            what = f"{ending.trajectory_id} ends as {ending.end}, and ended before as {known[1]}"
            raise Violation("prompt_ends_once", what, ending.trajectory_id)
        if ending.end not in ENDS or (ending.end == "dropped" and not ending.reason):
            what = f"{ending.trajectory_id} ends as {ending.end!r} for the reason {ending.reason!r}"
            raise Violation("prompt_ends_once", what, ending.trajectory_id)
        self._ended[ending.trajectory_id] = (seq, ending.end, ending.reason)

    # --- at the end -------------------------------------------------------------------------------

    def every_prompt_ends(self, state: State) -> None:
        """Check that every sibling handed out has an end, and a complete run hands out all data."""
        settings, num_train = self._scenario.settings, self._scenario.world.num_train
        for group in self._given:
            for sibling in range(settings.group_size):
                trajectory = ids.make_trajectory_id(GroupId(group), sibling)
                if trajectory not in self._ended:
                    what = f"{trajectory} was handed out but has no end"
                    raise Violation("every_prompt_ends", what, trajectory)
        if settings.total_steps or state.run.draining or state.run.failure:
            return
        given = len(self._given)
        there = settings.total_epochs * num_train - self._begin + len(self._again)
        # What a Ctrl-C dropped before the run resumed stays dropped.
        since = max(self._resumed, default=0)
        left = [t for t, (at, _, why) in self._ended.items() if why == RUN_ENDED and at > since]
        if given != there or left:
            what = f"{given} of {there} prompts were handed out, {len(left)} responses left over"
            raise Violation("every_prompt_ends", what, *left[:1])
