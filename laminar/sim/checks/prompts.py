"""Checks of what becomes of the training prompts: handed out in order, and each ends once.

Reads   commands as they are decided; the last state
Raises  Violation

A book of its own, by the number of a prompt (pass x prompts + position): the first
GenerateTrajectory of a group hands its prompt out, EndTrajectories end its siblings. What a crash
of the coordinator takes back was never decided.
"""

from __future__ import annotations

from laminar import ids
from laminar.core.state import State
from laminar.engines.made_up_tokens import prompt_of
from laminar.events import commands as cmd
from laminar.events.base import Command, Stamped
from laminar.ids import Purpose
from laminar.sim.runtime.violation import Violation
from laminar.sim.scenario import Scenario

ENDS = ("trained", "dropped")
RUN_ENDED = "run-ended"


def answers_its_prompt(command: cmd.GenerateTrajectory, prompt_ids: tuple[int, ...]) -> None:
    """An engine begins with the prompt of the trajectory."""
    if prompt_ids != prompt_of(command.purpose, command.row_index):
        what = f"{command.to} begins {command} with the prompt {prompt_ids}"
        raise Violation("answers_its_prompt", what, command.trajectory_id)


class Prompts:
    """The data, as it was handed out, and how each answer ended."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        #: by number of the prompt: (event at which it was handed out, row)
        self._given: list[tuple[int, int]] = []
        #: by trajectory: (event at which its end was decided, end, reason)
        self._ended: dict[str, tuple[int, str, str]] = {}

    def note(self, stamped: Stamped, commands: list[Command]) -> None:
        """What was decided at an event; a replay tells it again."""
        for command in commands:
            if isinstance(command, cmd.GenerateTrajectory) and command.purpose == Purpose.TRAIN:
                self._hand_out(stamped.seq, command)
            elif isinstance(command, cmd.EndTrajectories):
                for ending in command.endings:
                    if ending.purpose == Purpose.TRAIN:
                        self._end(stamped.seq, ending)

    def take_back(self, seq: int) -> None:
        """What was decided after this event never was."""
        while self._given and self._given[-1][0] > seq:
            self._given.pop()
        for trajectory in [t for t, (since, _, _) in self._ended.items() if since > seq]:
            del self._ended[trajectory]

    def _hand_out(self, seq: int, command: cmd.GenerateTrajectory) -> None:
        """prompts_in_order: the next one of the data, with a row that its pass has not had."""
        number, following = self._number(command.group), len(self._given)
        if number < following:
            return  # a sibling of it, or another placement
        if number > following:
            what = f"prompt {number} ({command.group}) was handed out, prompt {following} was not"
            raise Violation("prompts_in_order", what, command.trajectory_id)
        begin = number - number % self._scenario.num_train
        if command.row_index in (row for _, row in self._given[begin:]):
            what = f"row {command.row_index} is handed out twice in a pass, now as {command.group}"
            raise Violation("prompts_in_order", what, command.trajectory_id)
        self._given.append((seq, command.row_index))

    def _end(self, seq: int, ending: cmd.Ending) -> None:
        """prompt_ends_once: every sibling, as trained, or as dropped with a reason."""
        known = self._ended.get(ending.trajectory_id)
        if known is not None and known[0] != seq:
            what = f"{ending.trajectory_id} ends as {ending.end}, and ended before as {known[1]}"
            raise Violation("prompt_ends_once", what, ending.trajectory_id)
        if ending.end not in ENDS or (ending.end == "dropped" and not ending.reason):
            what = f"{ending.trajectory_id} ends as {ending.end!r} for the reason {ending.reason!r}"
            raise Violation("prompt_ends_once", what, ending.trajectory_id)
        self._ended[ending.trajectory_id] = (seq, ending.end, ending.reason)

    def _number(self, group: str) -> int:
        pass_index, _, position = group.partition(".")
        return int(pass_index) * self._scenario.num_train + int(position)

    # --- at the end -------------------------------------------------------------------------------

    def every_prompt_ends(self, state: State) -> None:
        """Every sibling of what was handed out has its end; a run over all data hands out all of
        it, and leaves nothing over."""
        settings, num_train = self._scenario.settings, self._scenario.num_train
        for number in range(len(self._given)):
            group = ids.train_group(*divmod(number, num_train))
            for sibling in range(settings.group_size):
                trajectory = ids.trajectory(group, sibling)
                if trajectory not in self._ended:
                    what = f"{trajectory} was handed out and has no end"
                    raise Violation("every_prompt_ends", what, trajectory)
        if settings.total_steps or state.draining or state.failure:
            return
        given, there = len(self._given), settings.total_epochs * num_train
        left = [t for t, (_, _, reason) in self._ended.items() if reason == RUN_ENDED]
        if given != there or left:
            what = f"{given} of {there} prompts were handed out, {len(left)} answers left over"
            raise Violation("every_prompt_ends", what, *left[:1])
