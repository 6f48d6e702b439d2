"""Which links a turn looks at: those on which something came, goes, or is due."""

from __future__ import annotations

import itertools

import pytest

from laminar.coordinator.tick import Tick
from laminar.events import events as ev
from laminar.events.codec import encode
from laminar.net.frames import Hello, Refused, decode_server
from laminar.net.frames import encode as encode_frame
from laminar.net.session import MS, RESEND_MIN_NS, LinkState, ServerLink
from tests.coordinator.desk import LEASE_MS, Desk

NAMES = ("node-0", "store-0", "relay-0", "trainer-0", "rollout-0", "rollout-1")


def desk_of_all() -> Desk:
    desk = Desk()
    for name in NAMES:
        desk.client(name)
    desk.talk()
    return desk


@pytest.fixture
def polled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the clients whose links were polled."""
    names: list[str] = []
    poll = ServerLink.poll

    def noted(link: ServerLink, now_ns: int) -> list[bytes]:
        names.append(link.name)
        return poll(link, now_ns)

    monkeypatch.setattr(ServerLink, "poll", noted)
    return names


def test_quiet_links_cost_nothing(polled: list[str]) -> None:
    desk = desk_of_all()
    polled.clear()
    desk.now += RESEND_MIN_NS // 2
    assert desk.turn() == [] and polled == []
    progress = ev.TokenProgress(tokens_total=1, kv_used_tokens=0, running=0, waiting=0)
    link = desk.links[b"rollout-1/a"]
    link.send_gauge(encode(progress))
    assert desk.turn([(b"rollout-1/a", f) for f in link.poll(desk.now)]) == [] and polled == []
    link.send(encode(progress))
    assert len(desk.turn([(b"rollout-1/a", f) for f in link.poll(desk.now)])) == 1
    assert polled == ["rollout-1"]


def test_command_that_was_lost_goes_out_again_when_its_time_has_come(polled: list[str]) -> None:
    """Nobody speaks meanwhile: the link wakes by itself, each time later."""
    desk = desk_of_all()
    ready = ev.ReplicaReady(max_num_seqs=8, kv_capacity_tokens=1)
    loaded = ev.DataLoaded(num_train=4, num_eval=0, overlap=0, digest="")
    trainer = ev.TrainerReady(num_parameters=1, weights_bytes=4)
    for name, event in (
        ("rollout-0", ready),
        ("relay-0", ev.RelayReady(address="here", chain_address="here")),
        ("trainer-0", trainer),
    ):
        desk.links[f"{name}/a".encode()].send(encode(event))
    desk.talk()
    desk.links[b"store-0/a"].send(encode(loaded))
    frames = [(b"store-0/a", f) for f in desk.links[b"store-0/a"].poll(desk.now)]
    first = [frame for route, frame in desk.turn(frames) if route == b"trainer-0/a"]
    assert len(first) == 1  # publish the first weights
    polled.clear()
    desk.now += RESEND_MIN_NS - 1
    assert desk.turn() == [] and polled == []
    desk.now += 1
    assert desk.turn() == [(b"trainer-0/a", first[0])] and polled == ["trainer-0"]
    desk.now += 2 * RESEND_MIN_NS - 1
    assert desk.turn() == []
    desk.now += 1
    assert desk.turn() == [(b"trainer-0/a", first[0])]


def test_replaced_process_is_told_at_once_though_it_says_nothing() -> None:
    desk = desk_of_all()
    old = desk.links.pop(b"rollout-0/a")
    desk.client("rollout-0", "rollout-0/b")
    frames = [(b"rollout-0/b", f) for f in desk.links[b"rollout-0/b"].poll(desk.now)]
    for route, frame in desk.turn(frames):
        (old if route == b"rollout-0/a" else desk.links[route]).receive(frame, desk.now)
    assert old.state is LinkState.REFUSED
    assert desk.links[b"rollout-0/b"].state is LinkState.UP


def test_more_processes_than_files_allow_are_told_so() -> None:
    """What is connected and what asks to be admitted counts."""
    desk = desk_of_all()
    desk.tick._links.peers_max = len(NAMES)
    hello = Hello("rollout-2", "rollout", "rollout-2/a", 0, 1, {})
    ((_, answer),) = desk.turn([(b"rollout-2/a", encode_frame(hello))])
    refused = decode_server(answer, 10_000)
    assert isinstance(refused, Refused) and "the server has 6 clients" in refused.reason
    assert "rollout-2" not in desk.tick.machine.state.members.actors


def test_who_leaves_is_fenced_without_a_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that comes or goes is no news for the links of thousands of others."""
    desk = desk_of_all()
    looked: list[str] = []
    fenced = Tick._is_fenced

    def noted(tick: Tick, link: ServerLink) -> bool:
        looked.append(link.name)
        return fenced(tick, link)

    monkeypatch.setattr(Tick, "_is_fenced", noted)
    desk.client("rollout-2")
    desk.talk()
    assert looked == []
    left = desk.links[b"rollout-1/a"]
    left.send(encode(ev.ActorLeft()))
    frames = desk.turn([(b"rollout-1/a", frame) for frame in left.poll(desk.now)])
    assert looked == ["rollout-1"]
    assert [type(decode_server(f, 1 << 20)) for to, f in frames if to == b"rollout-1/a"] == [
        Refused
    ]


def test_words_that_wait_in_a_busy_socket_keep_their_speakers_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 120 processes that all speak, six are read in a turn: each once in more than a lease, and
    that is the coordinator's delay, not their silence. The one that is dead is found."""
    monkeypatch.setattr("laminar.coordinator.detector.ROUND_FRAMES", 0)
    desk = Desk()
    routes = [desk.client(f"rollout-{number}").boot_id.encode() for number in range(120)]
    desk.talk()
    living = routes[1:]
    speaking = itertools.cycle(living)
    for _ in range(100):
        desk.now += LEASE_MS * MS // 16
        said = [(r, f) for r in itertools.islice(speaking, 6) for f in desk.links[r].poll(desk.now)]
        for route, frame in desk.turn(said, empty=False):
            desk.links[route].receive(frame, desk.now)
    alive = [name for name, actor in desk.tick.machine.state.members.actors.items() if actor.alive]
    assert alive == [desk.links[route].name for route in living]
