"""The state table of a link, row by row, and the cases that random faults reach too rarely."""

import pytest

from laminar.events.families import WireError
from laminar.net import session
from laminar.net.frames import (
    Ack,
    Ask,
    Bye,
    Data,
    Gauge,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
    decode_client,
    decode_server,
    encode,
)

HEARTBEAT = 1_000 * session.MS
HELLO = Hello("rollout-0", "rollout", "c1", 0, 1, {})


def client(heartbeat_ns=HEARTBEAT, **options):
    return session.ClientLink(
        "rollout-0", "rollout", "c1", heartbeat_ns=heartbeat_ns, now_ns=0, **options
    )


def server(hello=HELLO, boot="s1", last_seq=0, **options):
    return session.ServerLink(hello, server_boot=boot, incarnation=4, last_seq=last_seq, **options)


def up_client(boot="s1", **options):
    link = client(**options)
    link.poll(0)
    link.receive(encode(Welcome(boot, 4, 0)), 0)
    return link


def said(link, now):
    decode = decode_client if isinstance(link, session.ClientLink) else decode_server
    return [decode(frame, link.limits.max_frame) for frame in link.poll(now)]


def hear(link, frame, now=0):
    return link.receive(encode(frame), now)


# Joining.


def test_hello_is_repeated_with_growing_pauses_until_welcomed():
    link, times = client(info={"host": "n1"}), []
    for ms in range(0, 8_000, 10):
        if said(link, ms * session.MS):
            times.append(ms)
    assert times == [0, 200, 600, 1400, 3000, 5000, 7000]


def test_data_waits_for_the_welcome():
    link = client()
    link.send(b"a")
    assert said(link, 0) == [HELLO]
    hear(link, Welcome("s1", 4, 0))
    assert said(link, 0) == [Data("s1", 1, 0, b"a")]
    assert (link.state, link.incarnation) == (session.LinkState.UP, 4)


def test_the_assigned_incarnation_is_repeated():
    link = up_client()
    link.request_hello()
    assert said(link, 0) == [Hello("rollout-0", "rollout", "c1", 4, 1, {})]


def test_a_refused_client_keeps_silent_and_says_why():
    link = client()
    hear(link, Refused("fenced: a newer rollout-0 joined"))
    assert (link.state, said(link, 10**12)) == (session.LinkState.REFUSED, [])
    with pytest.raises(session.LinkClosed, match="fenced: a newer rollout-0 joined"):
        link.send(b"a")
    hear(link, Welcome("s1", 4, 0))
    assert link.state is session.LinkState.REFUSED


def test_data_before_the_welcome_is_not_taken():
    link = client()
    assert hear(link, Data("", 1, 0, b"x")) == []


# Order and acknowledgement.


def test_a_server_acknowledges_only_what_is_processed():
    link = server()
    said(link, 0)
    assert hear(link, Data("s1", 1, 0, b"a")) == [(1, b"a")]
    assert hear(link, Data("s1", 2, 0, b"b")) == [(2, b"b")]
    assert said(link, 0) == []
    link.mark_processed(1)
    assert said(link, 0) == [Ack("s1", 1)]
    assert hear(link, Data("s1", 2, 0, b"b")) == []
    assert said(link, 0) == [Ack("s1", 1)]


def test_processed_beyond_delivered_is_our_mistake():
    with pytest.raises(ValueError, match="5 is marked processed, but only 0 were delivered"):
        server().mark_processed(5)


def test_an_acknowledgement_of_what_was_never_sent_changes_nothing():
    link = up_client()
    link.send(b"a")
    for frame in (Ack("s1", 2), Welcome("s2", 4, 2)):
        with pytest.raises(WireError, match="2 is acknowledged, but only 1 were sent"):
            hear(link, frame)
    assert (len(link.outbox), link.server_boot) == (1, "s1")


def test_resend_goes_back_to_the_first_missing_with_hello_and_doubling_pauses():
    link, times = up_client(heartbeat_ns=10 * HEARTBEAT), []
    link.send(b"a")
    link.send(b"b")
    for ms in range(0, 6_000, 10):
        frames = said(link, ms * session.MS)
        if frames:
            times.append(ms)
            assert [f.seq for f in frames if isinstance(f, Data)] == [1, 2]
            assert isinstance(frames[0], Hello) == (ms > 0)
    assert times == [0, 200, 600, 1400, 3000, 5000]


def test_progress_resets_the_pause_and_only_the_rest_is_resent():
    link = up_client()
    link.send(b"a")
    link.send(b"b")
    for ms in (0, 200, 600):
        said(link, ms * session.MS)
    hear(link, Ack("s1", 1), 700 * session.MS)
    assert said(link, 899 * session.MS) == []
    assert said(link, 900 * session.MS)[1:] == [Data("s1", 2, 0, b"b")]


def test_window_limits_messages_in_flight():
    link = up_client()
    for n in range(session.WINDOW_MESSAGES + 10):
        link.send(b"%d" % n)
    assert len(link.poll(0)) == session.WINDOW_MESSAGES
    assert link.poll(0) == []
    hear(link, Ack("s1", 4))
    assert [f.seq for f in said(link, 0)] == [session.WINDOW_MESSAGES + n for n in (1, 2, 3, 4)]


def test_window_limits_bytes_in_flight_but_lets_a_large_body_go_alone():
    limits = session.Limits(max_frame=16 * 1024 * 1024)
    outbox = session.Outbox(limits)
    for size in (6, 1, 2, 2):
        outbox.append(b"x" * size * 1024 * 1024)
    assert [seq for seq, _ in outbox.take_due(0)] == [1]
    outbox.acknowledge_up_to(1, 0)
    assert [seq for seq, _ in outbox.take_due(0)] == [2, 3]


# Bounds.


def test_a_full_outbox_raises_and_has_room_again_after_an_acknowledgement():
    link = client(limits=session.Limits(outbox_messages=2))
    link.send(b"a")
    link.send(b"b")
    with pytest.raises(session.OutboxFull, match="2 messages"):
        link.send(b"c")
    hear(link, Welcome("s1", 4, 1))
    assert link.send(b"c") == 3


def test_the_outbox_is_bounded_in_bytes():
    outbox = session.Outbox(session.Limits(max_frame=20_000, outbox_bytes=10_000))
    outbox.append(b"x" * 12_000)
    with pytest.raises(session.OutboxFull, match="12000 bytes"):
        outbox.append(b"x")
    outbox.acknowledge_up_to(1, 0)
    outbox.append(b"x" * 6_000)
    with pytest.raises(session.OutboxFull):
        outbox.append(b"x" * 6_000)


def test_a_body_that_no_peer_would_take_is_refused_at_once():
    link = up_client()
    largest = link.limits.max_body
    for send in (link.send, link.send_gauge):
        with pytest.raises(ValueError, match=f"limit of {largest}"):
            send(b"x" * (largest + 1))
        send(b"x" * largest)
    assert all(len(frame) <= link.limits.max_frame for frame in link.poll(0))


# Restarts.


def test_a_new_server_gets_the_rest_and_starts_its_own_numbers():
    link = up_client("s1")
    for body in (b"a", b"b", b"c"):
        link.send(body)
    link.poll(0)
    hear(link, Data("s1", 1, 1, b"old command"))
    hear(link, Welcome("s2", 4, 2))
    assert said(link, 0) == [Data("s2", 3, 0, b"c")]
    assert hear(link, Data("s2", 1, 2, b"new command")) == [b"new command"]


def test_a_late_welcome_of_a_dead_server_costs_a_pause_but_no_place_in_the_numbers():
    """Refusing every server that was left once would lock the living one out here."""
    link = up_client("s2")
    assert hear(link, Data("s2", 1, 0, b"first")) == [b"first"]
    hear(link, Welcome("s1", 4, 0))
    said(link, 0)
    said(link, HEARTBEAT)
    assert isinstance(said(link, 2 * HEARTBEAT)[0], Hello)
    hear(link, Welcome("s2", 4, 0))
    assert hear(link, Data("s2", 1, 0, b"first")) == []
    assert hear(link, Data("s2", 2, 0, b"second")) == [b"second"]


def test_an_acknowledgement_for_a_former_server_does_not_count():
    link = server(boot="s2")
    link.send(b"command")
    assert hear(link, Data("s1", 1, 1, b"a")) == [(1, b"a")]
    hear(link, Ack("s1", 1))
    hear(link, Heartbeat("s1", 1))
    assert len(link.outbox) == 1
    said(link, 0)
    hear(link, Ack("s2", 1))
    assert len(link.outbox) == 0


def test_a_server_without_a_record_starts_where_the_client_says():
    link = server(Hello("rollout-0", "rollout", "c1", 0, 5, {}), last_seq=None)
    assert said(link, 0) == [Welcome("s1", 4, 4)]
    hear(link, Hello("rollout-0", "rollout", "c1", 0, 9, {}))
    assert said(link, 0) == [Welcome("s1", 4, 8)]


def test_a_client_acknowledged_beyond_the_record_is_refused():
    """The disk lost the end of the log: going on would lose the client's events in silence."""
    link = server(Hello("rollout-0", "rollout", "c1", 4, 9, {}), last_seq=6)
    (frame,) = said(link, 0)
    assert "acknowledged up to 8, but the log ends at 6: restart it" in frame.reason
    assert link.state is session.LinkState.REFUSED


# Silence.


def test_heartbeats_keep_an_idle_link_alive_and_are_answered():
    link, peer = up_client(), server()
    said(peer, 0)
    assert said(link, HEARTBEAT - 1) == []
    assert said(link, HEARTBEAT) == [Heartbeat("s1", 0)]
    hear(peer, Heartbeat("s1", 0), HEARTBEAT)
    assert said(peer, HEARTBEAT) == [Ack("s1", 0)]
    hear(link, Ack("s1", 0), HEARTBEAT)
    assert link.silent_ns(HEARTBEAT + 5) == 5


def test_an_unanswered_heartbeat_is_followed_by_hello():
    link = up_client()
    said(link, HEARTBEAT)
    assert isinstance(said(link, 2 * HEARTBEAT)[0], Hello)
    assert isinstance(said(link, 3 * HEARTBEAT)[0], Hello)


def test_gauges_do_not_hide_a_silent_server():
    link, kinds = up_client(), []
    for ms in range(0, 2_500, 500):
        link.send_gauge(b"tokens")
        kinds += [type(frame) for frame in said(link, ms * session.MS)]
    assert kinds.count(Heartbeat) == 1
    assert kinds.count(Hello) == 1


def test_a_gauge_is_sent_once_and_not_numbered():
    link, peer = up_client(), server()
    link.send_gauge(b"tokens")
    assert said(link, 0) == [Gauge(b"tokens")]
    assert [f for ms in range(0, 900, 50) for f in said(link, ms * session.MS)] == []
    assert hear(peer, Gauge(b"tokens")) == [(0, b"tokens")]


def test_a_gauge_before_the_welcome_is_forgotten():
    link = client()
    link.send_gauge(b"tokens")
    hear(link, Welcome("s1", 4, 0))
    assert said(link, 0) == []


# Endings.


def test_bye_closes_both_ends():
    link, peer = up_client(), server()
    link.close()
    assert said(link, 0) == [Bye()]
    assert said(link, 0) == []
    hear(peer, Bye())
    assert peer.state is session.LinkState.CLOSED
    for end in (link, peer):
        with pytest.raises(session.LinkClosed):
            end.send(b"a")
    assert hear(peer, Data("s1", 1, 0, b"a")) == []


def test_one_connection_speaks_for_one_process():
    link = server()
    with pytest.raises(WireError, match="Hello of rollout-1 on the link of rollout-0"):
        hear(link, Hello("rollout-1", "rollout", "c1", 0, 1, {}))


def test_a_process_does_not_ask_as_the_user_does():
    with pytest.raises(WireError, match="rollout-0 sent a user's request"):
        hear(server(), Ask(b"stop"))


# When to poll.


def test_next_due_is_when_poll_has_something():
    link, peer = up_client(), server()
    assert link.next_due_ns() == HEARTBEAT
    link.send(b"a")
    assert link.next_due_ns() == 0
    link.poll(0)
    assert link.next_due_ns() == 200 * session.MS
    assert peer.next_due_ns() == 0
    peer.poll(0)
    assert peer.next_due_ns() == session.NEVER_NS
    link.send_gauge(b"g")
    assert link.next_due_ns() == 0
    link.poll(0)
    peer.refuse_client("lost")
    assert peer.next_due_ns() == 0
    peer.poll(0)
    assert peer.next_due_ns() == session.NEVER_NS
    link.close()
    assert link.next_due_ns() == 0
    link.poll(0)
    assert link.next_due_ns() == session.NEVER_NS


def test_client_forgets_the_numbers_of_the_oldest_servers():
    """A late Welcome of the server before takes up its numbers; a server from long ago is a new
    one, so that a client keeps no more however often its server restarts."""
    link = up_client("s1")
    assert hear(link, Data("s1", 1, 0, b"a")) == [b"a"]
    hear(link, Welcome("s2", 4, 0))
    hear(link, Welcome("s1", 4, 0))
    assert hear(link, Data("s1", 1, 0, b"a")) == []
    for number in range(session.SERVERS_KNOWN):
        hear(link, Welcome(f"other {number}", 4, 0))
    hear(link, Welcome("s1", 4, 0))
    assert hear(link, Data("s1", 1, 0, b"a")) == [b"a"]
