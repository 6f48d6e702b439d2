"""The table of events: in every phase of a run, from every kind of sender, each has a verdict.

Reads   situations that random worlds really reach
Gives   `try_out`, which tries every cell and gives the verdicts

A verdict is "handled" (the state changes, or a command goes out), "ignored" (nothing changes, the
event is counted with its reason) or "quiet" (nothing changes, which is what such an event means).
Everything else is a failure: an exception, a broken invariant, a change that was also counted as
ignored, or an event that vanishes without a trace.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

from laminar.core import invariants
from laminar.core.machine import StateMachine
from laminar.core.state.members import ActorState
from laminar.core.state.state import State, decode, encode, hash_state
from laminar.core.state.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped
from laminar.names.roles import ACTOR_ROLES, Role
from tests.core.event_probes import fitting, spoiled
from tools.kit.event_cells import PHASES, TRAJECTORY_EVENTS, Cell, StatusCell
from tools.kit.random_worlds import environment_world, failing_world, random_world
from tools.kit.world import World

#: Nothing changes and nothing is counted: a gauge (or a note) whose value is the last one's.
QUIET = (ev.TokenProgress, ev.TransferProblem)
#: Counted as ignored and yet not without effect: the default chooses this batch; the timer is gone.
IGNORED_WITH_EFFECT = ("BatchProposed: unusable-proposal", "TimerFired: nothing-awaited")
SPOILED_PER_SENDER = 40


Verdicts = dict[Cell | StatusCell, Counter[str]]


def try_out(situations: int, seed: int = 0) -> Verdicts:
    """Try all sorts of events in so many situations of random runs, spread over their phases.

    AssertionError with the situation and the event for the first that gets no legal verdict.
    """
    sampler = Sampler(situations, seed)
    world_seed = seed
    while sampler.wanting():
        for make in (random_world, failing_world, environment_world):
            world = make(world_seed, ProbedWorld)
            assert isinstance(world, ProbedWorld)
            world.sampler = sampler
            sampler.begin_run()
            world.run()
        world_seed += 1
    return sampler.verdicts


class Sampler:
    """Chooses situations, a third of them in the phase `running`, and most of those with work that
    is lost or handed over, a question to the strategy, relays to connect, a batch in training, or a
    silent node; some at the start with all roles there. Keeps the verdicts."""

    def __init__(self, situations: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.verdicts: Verdicts = {}
        rare = max(1, situations * 2 // (3 * (len(PHASES) - 1)))
        self._left = dict.fromkeys((p for p in PHASES if p != Phase.RUNNING), rare)
        kinds = (Phase.RUNNING, "silent", "lost", "asking", "linking", "training")
        self._left |= dict.fromkeys(kinds, situations // 13 + 1)
        self._left["releasing"] = situations // 40 + 1  # seldom met
        self._left["joined"] = 2
        self._left |= {f"{phase} with hosts": 3 for phase in PHASES}
        self._left["loading"] = self._left["repeating"] = 2
        self._seen: Counter[str] = Counter()

    def begin_run(self) -> None:
        self._seen.clear()

    def wanting(self) -> bool:
        return any(self._left.values())

    def take(self, state: State) -> bool:
        """Whether to look at this situation: two of a kind in one run at most."""
        orders = state.orders
        kind = state.run.phase
        roles = {actor.role for actor in state.members.actors.values()}
        if Role.AGENT in roles and self._left[f"{kind} with hosts"]:
            kind = f"{kind} with hosts"
        elif kind == Phase.STARTING and roles >= {*ACTOR_ROLES} - {Role.AGENT, Role.RANKS}:
            kind = "joined"
        elif "load" in orders.commands or "repeat" in orders.commands:
            kind = "loading" if "load" in orders.commands else "repeating"
        elif kind == Phase.RUNNING and any(actor.silent for actor in state.members.actors.values()):
            kind = "silent"
        elif kind == Phase.RUNNING and any(key.startswith("release:") for key in orders.commands):
            kind = "releasing"
        elif kind == Phase.RUNNING and (state.work.lost or "propose" in orders.commands):
            kind = "lost" if state.work.lost else "asking"
        elif kind == Phase.RUNNING and any(key.startswith("forward:") for key in orders.commands):
            kind = "linking"
        elif kind == Phase.RUNNING and state.steps.batch is not None:
            kind = "training"
        likely = 0.02 if kind == Phase.RUNNING else 0.3
        if self.chance.random() > likely or not self._left[kind] or self._seen[kind] == 2:
            return False
        self._seen[kind] += 1
        self._left[kind] -= 1
        return True

    def note(self, cell: Cell | StatusCell, verdict: str) -> None:
        self.verdicts.setdefault(cell, Counter())[verdict] += 1


class ProbedWorld(World):
    """A random world; now and then all sorts of events are tried on a copy of its state."""

    sampler: Sampler

    def deliver(self, peer: str, incarnation: int, peer_seq: int, event: Event) -> list[Command]:
        commands = super().deliver(peer, incarnation, peer_seq, event)
        if self.sampler.take(self.state):
            self._probe()
        return commands

    def _probe(self) -> None:
        trial, phase = Trial(self.state), self.state.run.phase
        for sender, role, liveness in _senders(self.state):
            fits = fitting(self.state, sender.name)
            own = [kind for kind in fits if liveness == "alive" and role in ev.REPORTED_BY[kind]]
            for kind, events in fits.items():
                may = kind in own or kind is ev.ActorJoined
                for event in events if may else events[:1]:
                    verdict = trial.verdict(sender.name, sender.incarnation, event)
                    self.sampler.note(Cell(phase, kind, role, liveness), verdict)
                    if may and isinstance(event, TRAJECTORY_EVENTS):
                        self._note_status(event, verdict)
            if own:
                self._try_spoiled(trial, sender, [e for kind in own for e in fits[kind]])
        trial.end()

    def _try_spoiled(self, trial: Trial, sender: ActorState, told: list[Event]) -> None:
        """What a broken process would say. (The coordinator does not lie about its start.)"""
        told = [event for event in told if not isinstance(event, ev.CoordinatorStarted)]
        for event in self.sampler.chance.choices(told, k=SPOILED_PER_SENDER):
            wrong = spoiled(event, self.sampler.chance)
            trial.verdict(sender.name, sender.incarnation, wrong)

    def _note_status(self, event: Any, verdict: str) -> None:
        trajectory = self.state.work.trajectories.get(event.trajectory_id)
        if trajectory is not None and trajectory.placement == event.placement:
            self.sampler.note(StatusCell(trajectory.status, type(event)), verdict)


def _senders(state: State) -> list[tuple[ActorState, str, str]]:
    """(who, role, liveness): the coordinator; of each role one of every liveness."""
    nobody = ActorState(name="", role="", node="node-0", pid=1, boot_id="b", incarnation=0)
    found = [(_named(nobody, COORDINATOR, 0), COORDINATOR, "alive")]
    for role in ACTOR_ROLES:
        of_role = [actor for actor in state.members.actors.values() if actor.role == role]
        alive = [actor for actor in of_role if actor.alive]
        found += [(actor, role, "alive") for actor in alive[:2]]
        found += [(_named(a, a.name, a.incarnation - 1), role, "fenced") for a in of_role[:1]]
        found.append((_named(nobody, f"{role}-77", 3), role, "unknown"))
    return found


def _named(actor: ActorState, name: str, incarnation: int) -> ActorState:
    other = copy.copy(actor)
    other.name, other.incarnation = name, incarnation
    return other


class Trial:
    """Tries events on a copy of a state; each finds the state as it was."""

    def __init__(self, state: State) -> None:
        self._original, self._encoded = state, encode(state)
        self._essence = essence(state)
        self._renew()

    def _renew(self) -> None:
        self._machine = StateMachine(decode(self._encoded))

    def verdict(self, peer: str, incarnation: int, event: Event) -> str:
        """How the machine takes it; AssertionError when it is none of the legal ways."""
        state = self._machine.state
        stamped = Stamped(
            seq=self._original.seq + 1,
            time_ns=self._original.time_ns + 1,
            peer=peer,
            incarnation=incarnation,
            peer_seq=0,
            event=event,
        )
        ignored = dict(state.run.ignored)
        try:
            commands = self._machine.handle_event(stamped)
            changed = bool(commands) or essence(state) != self._essence
            if changed:
                invariants.check_invariants(state)
        except Exception as error:
            raise AssertionError(self._original.run.phase, stamped) from error
        counted = [name for name, n in state.run.ignored.items() if n != ignored.get(name, 0)]
        if changed:
            self._renew()
            silent = not counted or counted[0] in IGNORED_WITH_EFFECT
            assert silent, ("counted as ignored, but it changed something", counted, stamped)
            return "handled"
        assert counted or isinstance(event, QUIET), ("nothing happened in silence", stamped)
        return "ignored" if counted else "quiet"

    def end(self) -> None:
        """What changed nothing has not spoiled the indexes either, which no encoding has. (What
        came before a change was checked with it.)"""
        invariants.check_invariants(self._machine.state)


def essence(state: State) -> str:
    """The state without its clock and its count of ignored events."""
    kept = state.seq, state.time_ns, state.run.ignored
    state.seq, state.time_ns, state.run.ignored = 0, 0, {}
    found = hash_state(state)
    state.seq, state.time_ns, state.run.ignored = kept
    return found
