"""Requests to open trajectories in the store, which fences older placements and returns tokens.

Reads   orders of GenerateTrajectory or StartSession, the answers of the store
Gives   each answer to `opened`; as_of, up to which order the engine is complete

A trajectory that was taken back is neither opened nor reported, whatever the store answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.actors.service_clients import StoreClient
from laminar.config.rollout import RolloutConfig
from laminar.events import commands as cmd
from laminar.names.ids import Purpose
from laminar.storage import messages as m

Ordered = tuple[cmd.Envelope, cmd.OpeningCommand]


class AdmissionRequests:
    """The trajectories that one replica or host has yet to open in the store."""

    def __init__(
        self,
        rollout: RolloutConfig,
        store: StoreClient,
        opened: Callable[[cmd.Envelope, Any, m.OpenResult], None],
    ) -> None:
        """Report to `opened`, which must call `complete_opening` when it acts on an answer.

        `opened` is called with the store's answer for each trajectory that was not taken back.
        """
        self._rollout, self.store, self._opened = rollout, store, opened
        #: orders by trajectory, until the store has answered and its session has started
        self._waiting: dict[str, Ordered] = {}
        self._asked = 0  #: highest id of an order to generate
        self._unsettled: dict[int, None] = {}  #: ids of orders that the engine may not have yet

    @property
    def as_of(self) -> int:
        """Highest order id up to which the engine has all orders that it will ever get."""
        return min(self._unsettled, default=self._asked + 1) - 1

    def add_pending(self, order: cmd.Envelope, command: cmd.OpeningCommand) -> None:
        """Note a trajectory that is to be opened, so that from now on it can be taken back."""
        self._waiting[command.trajectory_id] = (order, command)
        self._unsettled[order.command_id] = None
        self._asked = max(self._asked, order.command_id)

    def mark_settled(self, order: cmd.Envelope) -> None:
        """Note that the engine has the order, or will never get it."""
        self._unsettled.pop(order.command_id, None)

    def take_back(self, trajectory_id: str, placement: int) -> None:
        """Drop a trajectory that is not wanted under this placement or an older one."""
        waiting = self._waiting.get(trajectory_id)
        if waiting is not None and waiting[1].placement <= placement:
            self.mark_settled(self._waiting.pop(trajectory_id)[0])

    def withdraw_all(self) -> None:
        for order, _ in self._waiting.values():
            self.mark_settled(order)
        self._waiting.clear()

    async def open(self, ordered: list[Ordered]) -> None:
        """Open trajectories; return once the store has answered for all still wanted."""
        wanted: dict[str, Ordered] = {command.trajectory_id: (o, command) for o, command in ordered}
        while wanted := {t: pair for t, pair in wanted.items() if self._is_wanted(pair[1])}:
            items = tuple(self._build_item(command) for _, command in wanted.values())
            reply = await self.store.send_request(m.Open(items=items[: m.MAX_ITEMS]), m.OpenReply)
            for result in reply.results:
                order, command = wanted.pop(result.trajectory_id)
                if self._is_wanted(command):
                    self._opened(order, command, result)

    def complete_opening(self, command: cmd.OpeningCommand) -> bool:
        """End the opening; return False if it was taken back since it was reported."""
        wanted = self._is_wanted(command)
        if wanted:
            del self._waiting[command.trajectory_id]
        return wanted

    def _is_wanted(self, command: cmd.OpeningCommand) -> bool:
        """Return whether this command was not taken back or replaced."""
        waiting = self._waiting.get(command.trajectory_id)
        return waiting is not None and waiting[1] is command

    def _build_item(self, command: cmd.OpeningCommand) -> m.OpenItem:
        return open_item(command, choose_temperature(self._rollout, command.purpose))


def open_item(command: cmd.OpeningCommand, temperature: float) -> m.OpenItem:
    """Build the request to the store for a trajectory that is to be generated."""
    return m.OpenItem(
        trajectory_id=command.trajectory_id,
        group_id=command.group,
        sibling=command.sibling,
        purpose=command.purpose,
        row_index=command.row_index,
        attempt=command.attempt,
        placement=command.placement,
        weight_version=command.version,
        version_step=command.version_step,
        replica=command.to,
        temperature=temperature,
    )


def choose_temperature(rollout: RolloutConfig, purpose: str) -> float:
    """Return the sampling temperature of a purpose."""
    return rollout.val_kwargs.temperature if purpose == Purpose.EVAL else rollout.temperature
