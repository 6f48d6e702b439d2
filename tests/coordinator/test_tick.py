"""The tick over an in-memory disk, with real sessions on a wire that may lose frames."""

from __future__ import annotations

import pytest

from laminar.coordinator.exit_reason import find_failure
from laminar.coordinator.restarts import GiveUp, Restarts
from laminar.coordinator.tick import HandlingFailed
from laminar.core.machine import HANDLING
from laminar.core.state.failures import FailureKind
from laminar.core.state.state import hash_state
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.codec import decode_event, encode
from laminar.events.families import WireError
from laminar.names import exit_codes
from laminar.net.frames import Ack, Ask, Data, Hello, Refused, decode_server
from laminar.net.frames import encode as encode_frame
from laminar.net.session import MS, LinkState
from tests.coordinator.desk import NODE_LEASE_MS, READY, Desk, begin_tick
from tools.kit.memory_disk import MemoryDisk
from tools.kit.sim_worlds import LoggedRun
from tools.kit.world_parts import settings


def test_events_are_durable_before_they_are_acknowledged() -> None:
    """The sync fails: the turn raises, nothing is returned, and the process must end."""
    desk = Desk()
    link = desk.client("trainer-0")
    desk.talk()
    link.send(encode(READY))
    frames = [(b"trainer-0/a", frame) for frame in link.poll(0)]
    desk.disk.fail_at = desk.disk.calls + 2
    with pytest.raises(OSError, match="sync"):
        desk.turn(frames)
    desk.restart()
    assert not desk.tick.machine.state.members.actors["trainer-0"].ready
    desk.talk()
    assert desk.tick.machine.state.members.actors["trainer-0"].ready
    assert desk.events() == ["trainer-0", "trainer-0"]


def test_gauges_alone_cost_no_sync() -> None:
    """They cause nothing and are not acknowledged; they are written, and synced with the next
    turn that says something."""
    desk = Desk()
    link = desk.client("rollout-0")
    desk.talk()
    before = dict(desk.disk.durable)
    progress = ev.TokenProgress(tokens_total=1, kv_used_tokens=0, running=0, waiting=0)
    link.send_gauge(encode(progress))
    assert desk.turn([(b"rollout-0/a", frame) for frame in link.poll(0)]) == []
    assert desk.disk.durable == before
    name = desk.disk.list_names()[-1]
    assert desk.disk.get_size(name) > before[name]


def asked(event: Event) -> tuple[bytes, bytes]:
    return b"a user", encode_frame(Ask(encode(event)))


def test_a_user_without_a_link_is_answered_when_what_he_asks_for_is_durable() -> None:
    """Also the second time, which changes nothing more; he is no process of the run."""
    desk = Desk()
    desk.client("trainer-0")
    desk.talk()
    for _ in range(2):
        ((route, answer),) = desk.turn([asked(ev.DrainRequested(reason="stop"))])[:1]
        assert route == b"a user" and isinstance(decode_server(answer, 1 << 20), Ack)
        found = [r for _, r in read_log(desk.disk.crash(False)) if isinstance(r, EventRecord)]
        assert isinstance(decode_event(bytes(found[-1].event)), ev.DrainRequested)
    assert desk.tick.machine.state.run.draining
    assert list(desk.tick.machine.state.members.actors) == ["trainer-0"]


def test_a_user_can_ask_for_nothing_that_a_process_reports() -> None:
    desk = Desk()
    link = desk.client("trainer-0")
    desk.talk()
    assert desk.turn([asked(READY), (b"a user", encode_frame(Ask(b"\xc1")))]) == []
    as_member = (b"trainer-0/a", asked(ev.DrainRequested(reason="stop"))[1])
    desk.turn([as_member])
    assert desk.tick.bad_frames == 3 and not desk.tick.machine.state.run.draining
    assert desk.events() == ["trainer-0"] and link.state is LinkState.UP


@pytest.mark.parametrize("keep_unsynced", [True, False])
def test_restarted_coordinator_goes_on(keep_unsynced: bool) -> None:
    """Same state, same members with the same incarnations; what was outstanding goes out again and
    is acted on once (the links tell two servers apart, the actor's filter does the rest)."""
    desk = Desk()
    for name in ("store-0", "relay-0", "trainer-0"):
        desk.client(name)
    desk.talk()
    trainer = desk.links[b"trainer-0/a"]
    desk.links[b"store-0/a"].send(
        encode(ev.DataLoaded(num_train=4, num_eval=0, overlap=0, digest=""))
    )
    desk.links[b"relay-0/a"].send(encode(ev.RelayReady(address="here", chain_address="here")))
    trainer.send(encode(READY))
    desk.talk()
    publish = [cmd.PublishWeights(to="trainer-0", version=0, step=0)]
    assert desk.orders[b"trainer-0/a"] == publish
    before, incarnation = desk.tick_state, trainer.incarnation
    desk.disk = desk.disk.crash(keep_unsynced)
    restored = begin_tick(desk.disk, 0).machine
    assert restored.started and hash_state(restored.state) == before
    desk.restart()
    desk.talk()
    assert (trainer.state, trainer.incarnation) == (LinkState.UP, incarnation)
    assert desk.orders[b"trainer-0/a"] == publish * 2
    assert desk.tick.machine.state.members.coordinator_incarnation == 1


def test_hostile_frames_are_counted_and_change_nothing() -> None:
    """Garbage, a server's frame, a body that is no event, numbers from nowhere; from a member, from
    a stranger. The state stays as it is and the next honest event is heard."""
    desk = Desk()
    link = desk.client("trainer-0")
    desk.talk()
    before = desk.tick_state
    boot = link.server_boot
    hostile = [
        b"", b"\xc1", b"\x80" * 100, b"x" * 2_000_000, b"\x93" * 100_000,
        encode_frame(Data(boot, 1, 99, encode(READY))),
        encode_frame(Hello("trainer-0", "trainer", "", 0, 1, {}))[:-1],
    ]  # fmt: skip
    for route in (b"trainer-0/a", b"stranger"):
        assert desk.turn([(route, frame) for frame in hostile]) == []
    assert desk.tick.bad_frames == 2 * len(hostile)
    assert desk.tick_state == before
    link.send(encode(READY))
    desk.talk()
    assert desk.tick.machine.state.members.actors["trainer-0"].ready


def test_peer_that_speaks_another_language_is_refused() -> None:
    """A newer program's event: acknowledging it would lose it, resending it would not help."""
    desk = Desk()
    link = desk.client("trainer-0")
    desk.talk()
    link.send(b"\x81\xa4type\xa3odd")
    desk.talk()
    assert desk.tick.bad_frames == 1
    assert link.state is LinkState.REFUSED and "unreadable" in link.reason


def test_unknown_peer_says_hello_again() -> None:
    """Its frames arrive at a coordinator that does not know its connection (it was restarted): they
    are counted, nothing is answered, and its next hello finds it in the log."""
    desk = Desk()
    link = desk.client("trainer-0")
    desk.talk()
    desk.restart()
    link.send(encode(READY))
    data = [frame for frame in link.poll(0) if b"\xa4data" in frame[:16]]
    assert desk.turn([(b"trainer-0/a", frame) for frame in data]) == []
    assert desk.tick.bad_frames == 1
    desk.now += 5_000 * MS
    desk.talk()
    assert desk.events() == ["trainer-0", "trainer-0"]
    assert link.incarnation == 1


def test_peer_that_was_acknowledged_beyond_the_log_is_refused() -> None:
    """A disk lied about a sync: the log ends before what was acknowledged. The peer has forgotten
    those events, so it must start again and have its work recovered."""
    desk = Desk()
    link = desk.client("trainer-0")
    desk.talk()
    kept = desk.disk.crash(keep_unsynced=False)
    link.send(encode(READY))
    desk.talk()
    desk.disk = kept
    desk.restart()
    desk.talk()
    assert link.state is LinkState.REFUSED
    assert "log ends at 0" in link.reason


def test_late_hello_of_a_former_member_does_not_push_out_its_successor() -> None:
    """The first process says who it is while the network is cut, and ends; its words arrive on a
    connection of their own when the second one has joined."""
    desk = Desk()
    first = desk.client("rollout-0", "one")
    desk.talk()
    first.request_hello()
    late = first.poll(desk.now)
    second = desk.client("rollout-0", "two")
    desk.talk()
    told = desk.turn([(b"late", frame) for frame in late])
    desk.talk()
    assert second.state is LinkState.UP and desk.tick.machine.state.members.is_actor_alive(
        "rollout-0"
    )
    refused = Refused("another process has its place")
    assert [(route, decode_server(frame, len(frame))) for route, frame in told] == [
        (b"late", refused)
    ]


def test_who_was_given_up_for_its_silence_may_come_again() -> None:
    desk = Desk()
    link = desk.client("rollout-0")
    desk.client("rollout-1")
    desk.talk()
    lost = ev.HeartbeatLost(actor="rollout-0", actor_incarnation=link.incarnation, silent_ms=9)
    ((_, told),) = desk.turn(own=[lost])
    link.receive(told, desk.now)
    assert link.state is LinkState.REFUSED and link.again


def test_timers_of_the_log_are_due_in_time_for_a_successor() -> None:
    """Time in the log goes on where it ended: a timer that was set for the sixtieth second of the
    run is due then, also for a coordinator that is started in the twentieth."""
    desk = Desk()
    desk.now = 20_000 * MS
    desk.turn(own=[ev.TimerFired(timer="none")])
    desk.restart(keep_unsynced=True)
    due = settings().start_timeout_ms * MS
    assert desk.tick.next_timer_ns() == due
    desk.now = due
    desk.turn()
    assert "not started within" in desk.tick.machine.state.run.failure


@pytest.mark.parametrize(("silent_ms", "lost"), [(8_000, []), (15_000, ["trainer-0"])])
def test_node_that_is_paused_takes_nothing_with_it(silent_ms: int, lost: list[str]) -> None:
    """Of a lease of 12 s, it is silent for 8, or for 15 s. Its trainer and its replica speak all
    the time, and when it goes on it is a member as before; a trainer that stands still is lost."""
    for paused in ("node-0", "trainer-0"):
        desk = Desk()
        links = [desk.client(name) for name in ("node-0", "trainer-0", "rollout-0")]
        desk.talk()
        for _ in range(silent_ms // 500):
            desk.now += 500 * MS
            desk.talk(paused)
        desk.talk()
        gone = lost if paused == "trainer-0" else []
        state = desk.tick.machine.state
        assert [a.name for a in state.members.actors.values() if not a.alive] == gone
        assert bool(state.run.failure) == bool(gone)
        assert links[0].state is LinkState.UP


def test_silence_of_a_node_and_its_end_are_logged() -> None:
    """A restart of the coordinator in between is no word of the node."""
    desk = Desk()
    desk.client("node-0")
    desk.client("rollout-0")
    desk.talk()
    for i in range(30):
        desk.now += 500 * MS
        desk.talk("node-0")
        if i == 27:
            desk.restart(keep_unsynced=True)
    assert desk.tick.machine.state.members.actors["node-0"].silent
    for _ in range(8):
        desk.now += 500 * MS
        desk.talk()
    assert not desk.tick.machine.state.members.actors["node-0"].silent
    assert count_of(desk.disk, ev.NodeSilent) == count_of(desk.disk, ev.NodeRecovered) == 1


def test_silence_is_judged_by_the_tick() -> None:
    """Nothing is heard of an actor for longer than its lease, while the loop itself was awake."""
    desk = Desk()
    desk.client("store-0")
    desk.talk()
    for _ in range(2 * NODE_LEASE_MS // 500):
        desk.now += 500 * MS
        desk.turn()
    assert not desk.tick.machine.state.members.actors["store-0"].alive
    assert desk.tick.machine.state.run.failure.startswith("the store is lost: store-0: nothing")


def test_questions_to_the_users_strategy_stay_here() -> None:
    """The strategy's worker runs beside the coordinator: no frame for it, and its answer is an
    event of the coordinator's own. (A simulated process that is told to propose breaks the run.)"""
    run = LoggedRun(batch_strategy="strategies.py:mine").run()
    assert run.state.steps.completed > 1
    assert count_of(run.disk, ev.BatchProposed) >= run.state.steps.completed - 1


def count_of(disk: MemoryDisk, kind: type[Event]) -> int:
    records = [record for _, record in read_log(disk)]
    events = [decode_event(r.event) for r in records if isinstance(r, EventRecord)]
    return sum(isinstance(event, kind) for event in events)


def test_frames_of_the_same_turn_are_decoded_and_logged_in_order() -> None:
    """Two events in one drain: two records, in the order of their numbers."""
    desk = Desk()
    link = desk.client("trainer-0")
    desk.talk()
    link.send(encode(READY))
    link.send(encode(ev.ActorFailed(reason="r", user_error=True)))
    frames = [(b"trainer-0/a", frame) for frame in link.poll(0)]
    answers = desk.turn(frames)
    acks = [decode_server(frame, 1 << 20) for _, frame in answers]
    assert {getattr(m, "ack", None) for m in acks} == {2}
    assert desk.tick.machine.state.members.actors["trainer-0"].last_peer_seq == 2


def breaks_on(patch: pytest.MonkeyPatch, kind: type[Event], error: Exception) -> None:
    """The core's handler of such events raises."""

    def broken(turn: object, event: Event) -> None:
        raise error

    patch.setitem(HANDLING, kind, HANDLING[kind]._replace(handler=broken))


@pytest.mark.parametrize("error", [KeyError("0.3.1"), WireError("odd"), AssertionError("no fit")])
def test_an_exception_of_the_core_ends_the_coordinator(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of a kind that bad frames raise. The sentence names event and error, and the exit
    code is final. The event is neither logged nor acknowledged, and no number is skipped: a mended
    build gets it again and handles it."""
    desk = Desk()
    link = desk.client("trainer-0")
    desk.talk()
    link.send(encode(READY))
    with monkeypatch.context() as patch:
        breaks_on(patch, ev.TrainerReady, error)
        with pytest.raises(HandlingFailed) as raised:
            desk.talk()
    assert raised.value.__cause__ is error
    assert raised.value.stamped.event == READY
    failure, code = find_failure(raised.value), exit_codes.FAILED
    assert failure.kind == FailureKind.NOT_HANDLED and failure.kind.record.exit_code == code
    assert Restarts(0.0, 300.0, 300.0).decide_restart(code, 9.0, 9.0) == GiveUp(code)
    assert failure.detail.startswith(
        "trainer-ready, message 1 of trainer-0 (incarnation 1) cannot be handled"
    )
    assert f"{type(error).__name__}: {error}" in failure.detail
    with pytest.raises(RuntimeError, match="an earlier turn failed"):
        desk.turn()  # it would acknowledge, and log what the broken state decides
    assert desk.tick.bad_frames == 0 and link.outbox
    before = desk.tick.machine.state.seq - 1
    desk.restart(keep_unsynced=True)
    assert desk.events() == ["trainer-0"]  # that it joined
    assert desk.tick.machine.state.seq == before + 1  # coordinator-started took the number
    desk.talk()
    assert desk.tick.machine.state.members.actors["trainer-0"].ready and not link.outbox


def test_an_event_of_its_own_is_named_by_its_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    breaks_on(monkeypatch, ev.TimerFired, ValueError("no such timer"))
    desk.now = desk.tick.next_timer_ns() or 0
    with pytest.raises(HandlingFailed, match="timer-fired of start cannot be handled: ValueError"):
        desk.turn()
