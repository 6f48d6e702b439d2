"""The tick: one turn of the coordinator over the ports: receive, decide, make durable, send.

Reads   frames of peers, the coordinator's own events, the clock
Writes  the event log
Gives   frames to send, and commands that the coordinator's own process carries out

    frames -> sessions (number, dedupe) -> decode -> machine -> log (one sync) -> commands and acks

Nothing is sent before it, and its cause, are durable: a killed coordinator has never sent anything
that its log lacks. Bad frames are counted and change nothing. An exception of the core is not a bad
frame: it ends the turn and the coordinator (HandlingFailed). Pure: the same code runs behind a
ZeroMQ socket and in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from laminar.coordinator.detector import FailureDetector
from laminar.coordinator.hashes import StateHashes
from laminar.coordinator.stalls import StallDetector
from laminar.core.machine import StateMachine
from laminar.core.members.membership import REPLACED
from laminar.core.rules import LogicError
from laminar.core.state.indexes import due_timers, get_next_timer_ns, indexes_of, take_left
from laminar.core.state.statuses import Phase
from laminar.eventlog.record import DecisionRecord, EventRecord
from laminar.eventlog.replay import Observer
from laminar.eventlog.writer import LogWriter
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped
from laminar.events.codec import decode_event, encode
from laminar.events.families import WireError, to_kebab_case
from laminar.names.ports import Background, InlineBackground
from laminar.net.frames import (
    MAX_TEXT,
    Ack,
    Ask,
    ClientFrame,
    Heartbeat,
    Hello,
    Refused,
    decode_client,
)
from laminar.net.frames import encode as encode_frame
from laminar.net.links import Links
from laminar.net.session import PEERS_MAX, Limits, LinkState, OutboxFull, ServerLink

Frame = tuple[bytes, bytes]  #: (routing id, bytes)

INLINE_BACKGROUND = InlineBackground()
LOST = "it was declared lost; restart it"
ERROR_CHARS_MAX = 500


class HandlingFailed(Exception):
    """The core raised on an event, which is neither logged nor acknowledged.

    `__cause__` is the exception of the core."""

    def __init__(self, stamped: Stamped, cause: Exception) -> None:
        self.stamped = stamped
        self.what = _name_of(stamped)
        super().__init__(
            f"{self.what} cannot be handled: {_describe_error(cause)}. The event is not logged: "
            "resume the run with a build that handles it"
        )


class Tick:
    """The coordinator without its loop."""

    def __init__(
        self,
        machine: StateMachine,
        log: LogWriter,
        *,
        boot: str,
        lease_ms: int,
        node_lease_ms: int,
        stall_ms: int,
        clock_ns: int,
        observer: Observer,
        limits: Limits,
        peers_max: int = PEERS_MAX,
        background: Background = INLINE_BACKGROUND,
    ) -> None:
        """Start at the loop's clock `clock_ns`; `boot` names this coordinator process.

        `peers_max`: processes that are connected or ask to be admitted; `background`: for work on a
        large state."""
        self.machine, self.log = machine, log
        self.detector = FailureDetector(lease_ms * 1_000_000, node_lease_ms * 1_000_000, clock_ns)
        self.local: list[tuple[int, Command]] = []  #: commands for the coordinator's own process
        self.bad_frames = 0
        self._boot = boot
        self._background = background
        self._hashes = StateHashes(log, background)
        self._limits = limits
        self._observer = observer
        self._failed = False  #: whether a turn is under way, or raised
        self._clock_start_ns = clock_ns
        self._time_start_ns = machine.state.time_ns if machine.started else 0
        self.stalls = StallDetector(stall_ms * 1_000_000, self._time_start_ns)
        self._links = Links[ServerLink](peers_max)
        self._asking: dict[str, Hello] = {}  #: processes not admitted yet, by boot id
        self._to_acknowledge: dict[ServerLink, int] = {}  #: last number applied
        self._outgoing: list[tuple[int, Command, bytes]] = []  #: command id, command, encoding
        self._frames_out: list[Frame] = []

    # --- one turn -----------------------------------------------------------------------------

    def run_turn(
        self, frames: Sequence[Frame], own: Sequence[Event], now_ns: int, socket_empty: bool
    ) -> list[Frame]:
        """Handle all arrived frames; return the frames to send, in order.

        A turn that raised is the last one: the state may have half an event in it, and the next
        turn would log and acknowledge it."""
        if self._failed:
            raise RuntimeError("an earlier turn failed: end the process")
        self._failed = True
        time_ns = self._time_start_ns + now_ns - self._clock_start_ns
        self._background.collect_results()
        for event in own:
            self._apply_event(COORDINATOR, 0, 0, event, time_ns)
        for routing_id, frame in frames:
            self._receive(routing_id, frame, now_ns, time_ns)
        self._fire_timers(time_ns)
        peers = len(self._links) + len(self._asking)
        read_up_to_ns = self.detector.begin_turn(now_ns, len(frames), socket_empty, peers)
        if read_up_to_ns is not None and self.machine.started:
            actors = self.machine.state.members.actors
            for news in self.detector.judge_silence(read_up_to_ns, actors, self._links.heard_ns):
                self._apply_event(COORDINATOR, 0, 0, news, time_ns)
        if self.machine.started:
            state = self.machine.state
            if stalled := self.stalls.judge(state, max(time_ns, state.time_ns)):
                self._apply_event(COORDINATOR, 0, 0, stalled, time_ns)
        self._make_durable()
        out = self._send(now_ns)
        self._failed = False
        return out

    def _fire_timers(self, time_ns: int) -> None:
        if not self.machine.started:
            return
        for name in due_timers(self.machine.state, time_ns):
            self._apply_event(COORDINATOR, 0, 0, ev.TimerFired(timer=name), time_ns)

    def next_timer_ns(self) -> int | None:
        """Return when the earliest timer is due, in the loop's clock."""
        due_ns = get_next_timer_ns(self.machine.state)
        if due_ns is None:
            return None
        return due_ns - self._time_start_ns + self._clock_start_ns

    # --- receiving ----------------------------------------------------------------------------

    def _receive(self, routing_id: bytes, frame: bytes, now_ns: int, time_ns: int) -> None:
        try:
            message = self._decode_introduction(routing_id, frame)
            if isinstance(message, Ask):
                return self._handle_ask(routing_id, message, time_ns)
            if isinstance(message, Hello) and not self._register_peer(
                message, routing_id, now_ns, time_ns
            ):
                return
            link = self._links.find_link(routing_id)
            if message == Heartbeat("", 0):  # a client asks whether we live
                return self._frames_out.append((routing_id, encode_frame(Ack(self._boot, 0))))
            if link is None:
                self.bad_frames += 1  # an unknown peer says hello again when it gets no answer
                return
            delivered = self._links.receive(link, frame, now_ns)
        except WireError:
            self.bad_frames += 1
            return
        for peer_seq, body in delivered:
            self._deliver_message(link, peer_seq, body, time_ns)
        if not delivered or delivered[0][0]:  # a gauge needs no answer
            self._links.wake_link(link.boot_id)

    def _register_peer(self, hello: Hello, routing_id: bytes, now_ns: int, time_ns: int) -> bool:
        """Remember the connection of a process; return whether it has a link."""
        self._links.set_route(hello.boot_id, routing_id)
        known = self._links.get(hello.boot_id) is not None
        return known or self._admit_peer(hello, now_ns, time_ns)

    def _decode_introduction(self, routing_id: bytes, frame: bytes) -> ClientFrame | None:
        """Decode a frame that may introduce a peer; None for ordinary frames of a known one."""
        if self._links.find_link(routing_id) is not None and b"\xa5hello" not in frame[:16]:
            return None
        return decode_client(frame, self._limits.max_frame)

    def _handle_ask(self, routing_id: bytes, ask: Ask, time_ns: int) -> None:
        """Handle a request of the user; the answer confirms that it is logged."""
        self._apply_event(COORDINATOR, 0, 0, _decode_ask(ask), time_ns)
        self._frames_out.append((routing_id, encode_frame(Ack(self._boot, 0))))

    def _admit_peer(self, hello: Hello, now_ns: int, time_ns: int) -> bool:
        """Open the link of a process that the log knows; report one that it does not know."""
        state = self.machine.state
        actor = state.members.actors.get(hello.name)
        if actor is not None and actor.boot_id == hello.boot_id:
            if not actor.alive:
                self._refuse_peer(hello.boot_id, LOST, again=True)
                return False
            self._open_link(hello, actor.incarnation, actor.last_peer_seq)
            return True
        if hello.boot_id in self._asking:
            return False
        if reason := self._links.find_refusal_reason(waiting=len(self._asking)):
            self._refuse_peer(hello.boot_id, reason)
        else:
            self._asking[hello.boot_id] = hello
            self._apply_event(hello.name, 0, 0, _make_actor_joined(hello), time_ns)
            self._links.heard_ns[hello.boot_id] = now_ns
        return False

    def _open_link(self, hello: Hello, incarnation: int, last_seq: int) -> None:
        """Open a link and resend the actor's outstanding commands; it acts at most once per id."""
        link = ServerLink(
            hello,
            server_boot=f"{self._boot}:{hello.boot_id}",
            incarnation=incarnation,
            last_seq=last_seq,
            limits=self._limits,
        )
        self._links.add(link)
        state = self.machine.state
        addressed = [
            state.orders.commands[key] for key in indexes_of(state).commands.get(hello.name, ())
        ]
        outstanding = [o for o in addressed if o.incarnation == incarnation]
        for item in sorted(outstanding, key=lambda o: o.command_id):
            self._outgoing.append((item.command_id, item.command, encode(item.command)))

    def _deliver_message(self, link: ServerLink, peer_seq: int, body: bytes, time_ns: int) -> None:
        if peer_seq:
            self._to_acknowledge[link] = peer_seq
        try:
            event = decode_event(body)
        except WireError as error:
            self.bad_frames += 1
            self._links.wake_link(link.boot_id)
            return link.refuse_client(f"it sent an unreadable message: {error}")
        self._apply_event(link.name, link.incarnation, peer_seq, event, time_ns, body)

    # --- deciding -----------------------------------------------------------------------------

    def _apply_event(
        self,
        peer: str,
        incarnation: int,
        peer_seq: int,
        event: Event,
        time_ns: int,
        body: bytes | None = None,
    ) -> None:
        """Let the machine handle one event, and log it with its decisions.

        `body` is the encoding of the event, if known."""
        last = self.machine.state if self.machine.started else None
        stamped = Stamped(
            seq=last.seq + 1 if last else 1,
            time_ns=max(time_ns, last.time_ns) if last else time_ns,
            peer=peer,
            incarnation=incarnation,
            peer_seq=peer_seq,
            event=event,
        )
        try:
            commands = self.machine.handle_event(stamped)
            self._log_event(stamped, encode(event) if body is None else body, commands)
        except LogicError:
            raise
        except Exception as error:
            raise HandlingFailed(stamped, error) from error
        self.stalls.observe(stamped, self.machine.state)
        self._observer(stamped, commands, self.machine.state)

    def _log_event(self, stamped: Stamped, body: bytes, commands: list[Command]) -> None:
        self.log.append(EventRecord.from_stamped(stamped, body))
        for index, command in enumerate(commands):
            data = encode(command)
            self.log.append(
                DecisionRecord(cause=stamped.seq, index=index, command=msgspec.Raw(data))
            )
            self._outgoing.append(((stamped.seq << 20) + index, command, data))
        self._hashes.log_if_due(self.machine.state)

    def log_state_hash(self) -> None:
        """Log the hash that a replay must reach at the end of the log."""
        self._hashes.log_final_hash(self.machine.state)

    def _make_durable(self) -> None:
        """Sync once for the turn; gauges alone cause nothing and may wait for the next sync."""
        if self._outgoing or self._to_acknowledge or self._frames_out:
            self.log.commit()
            self.log.snapshot_if_due(self.machine.state, self._background)
        else:
            self.log.flush()

    # --- sending ------------------------------------------------------------------------------

    def _send(self, now_ns: int) -> list[Frame]:
        for link, peer_seq in self._to_acknowledge.items():
            link.mark_processed(peer_seq)
        self._to_acknowledge.clear()
        for command_id, command, data in self._outgoing:
            self._dispatch_command(command_id, command, data)
        self._outgoing.clear()
        fenced = self._fence_links()
        out, self._frames_out = self._frames_out, []
        for link in self._links.take_due(now_ns):
            out += self._links.poll_link(link, now_ns)
        for boot_id in fenced:
            self._links.drop_link(boot_id)
        return out

    def _fence_links(self) -> set[str]:
        """Refuse the links of processes that are no longer members; return their boot ids."""
        left = take_left(self.machine.state) if self.machine.started else []
        fenced: set[str] = set()
        for link in filter(None, map(self._links.get, left)):
            if self._is_fenced(link):
                lost = self._is_newest(link)
                link.refuse_client(LOST if lost else REPLACED, again=lost)
                self._links.wake_link(link.boot_id)
                fenced.add(link.boot_id)
        return fenced

    def _is_fenced(self, link: ServerLink) -> bool:
        """Return whether the link's process was given up, or replaced, while the run continues."""
        state = self.machine.state
        if self._is_newest(link):
            alive = state.members.actors[link.name].alive
            return not alive and state.run.phase not in (Phase.STOPPING, Phase.ENDED)
        return True

    def _is_newest(self, link: ServerLink) -> bool:
        """Return whether the link's process is the newest of its name."""
        actor = self.machine.state.members.actors.get(link.name)
        return actor is not None and actor.boot_id == link.boot_id

    def _dispatch_command(self, command_id: int, command: Command, data: bytes) -> None:
        if isinstance(command, cmd.AcceptActor):
            hello = self._asking.pop(command.boot_id, None)
            if hello is not None:
                self._open_link(hello, command.incarnation, 0)
        elif isinstance(command, cmd.RefuseActor):
            self._asking.pop(command.boot_id, None)
            self._refuse_peer(command.boot_id, command.reason)
        elif isinstance(command, cmd.ProposeBatch):
            self.local.append((command_id, command))
        else:
            self._queue_command(command_id, command, data)

    def _queue_command(self, command_id: int, command: Command, data: bytes) -> None:
        actor = self.machine.state.members.actors.get(command.to)
        link = self._links.get(actor.boot_id) if actor is not None else None
        if link is None or link.state is not LinkState.UP:
            return  # outstanding: it is sent when the actor comes back
        order = cmd.Envelope(
            command_id=command_id, cause=command_id >> 20, command=msgspec.Raw(data)
        )
        self._links.wake_link(link.boot_id)
        try:
            link.send(encode(order))
        except OutboxFull as error:
            link.refuse_client(f"it does not acknowledge orders: {error}")

    def _refuse_peer(self, boot_id: str, reason: str, *, again: bool = False) -> None:
        route = self._links.get_route(boot_id)
        self._frames_out.append((route, encode_frame(Refused(reason[:MAX_TEXT], again))))

    @property
    def everything_acknowledged(self) -> bool:
        """Whether no command is on its way any more (or its link is gone)."""
        return all(not link.outbox or link.state is not LinkState.UP for link in self._links)


def _make_actor_joined(hello: Hello) -> ev.ActorJoined:
    """Make the event of a process that the log does not know from its hello."""
    pid, restarts = hello.info.get("pid", ""), hello.info.get("job_restarts", "")
    start = hello.info.get("start", "")
    return ev.ActorJoined(
        name=hello.name,
        role=hello.role,
        boot_id=hello.boot_id,
        node=hello.info.get("node", ""),
        pid=int(pid) if pid.isdigit() else 0,
        node_boot=hello.info.get("node_boot", ""),
        start=int(start) if start.isdigit() else 0,
        job=hello.info.get("job", ""),
        job_restarts=int(restarts) if restarts.isdigit() else 0,
    )


def _decode_ask(ask: Ask) -> ev.DrainRequested:
    """Decode the only event that a user may send."""
    event = decode_event(ask.body)
    if not isinstance(event, ev.DrainRequested):
        raise WireError(f"the user does not ask for {type(event).__name__}")
    return event


def _name_of(stamped: Stamped) -> str:
    """Name an event briefly: by its number at the sender if it has one, else by its subject."""
    event, peer = stamped.event, stamped.peer
    tag = to_kebab_case(type(event).__name__)
    if stamped.peer_seq:
        return f"{tag}, message {stamped.peer_seq} of {peer} (incarnation {stamped.incarnation})"
    fields = ("name", "actor", "node", "timer")
    return f"{tag} of {next((n for f in fields if (n := getattr(event, f, ''))), peer)}"


def _describe_error(error: Exception) -> str:
    """Return the type, the message and the line that raised the error."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        _, package, file = trace.tb_frame.f_code.co_filename.rpartition("/laminar/")
        place = f" ({package.lstrip('/')}{file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX] + place
