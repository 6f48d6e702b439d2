"""Model of a client and a server over a network that loses, repeats, delays and reorders frames.

Reads   choices that hypothesis draws
Gives   LossyLink, LossyLinkWithoutRecord; `run_model` tries many runs of one of them

Either process may restart at any moment. At all times messages are processed in order and exactly
once within one pair of boots, only processed messages are acknowledged, and the outbox stays within
its limit. Once the faults stop, every message arrives.
"""

from collections import defaultdict

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from laminar.net.frames import Hello, decode_client
from laminar.net.session import MS, ClientLink, Limits, LinkState, OutboxFull, ServerLink

HEARTBEAT_NS = 1_000 * MS
LIMITS = Limits(outbox_messages=6)
HEAL_NS = 60_000 * MS  #: far longer than any chain of timeouts on a healthy network


class LossyLink(RuleBasedStateMachine):
    """Both ends of a link, the wire between them, and a record of what each side saw."""

    with_record = True  #: whether the server remembers processed messages across restarts

    def __init__(self):
        super().__init__()
        self.now = 0
        self.boots = 0
        self.wire = []  #: (to the server?, client boot, frame)
        self.sent = defaultdict(list)  #: client boot -> bodies
        self.record = defaultdict(list)  #: client boot -> (number, body), as processed
        self.server_sent = defaultdict(list)  #: (client boot, server boot) -> bodies
        self.received = defaultdict(list)  #: the same, at the client
        self.gauges = defaultdict(set)  #: client boot -> bodies
        self.start_server()
        self.start_client()

    def next_boot(self, kind):
        self.boots += 1
        return f"{kind}{self.boots}"

    def start_client(self):
        boot = self.next_boot("c")
        self.client = ClientLink(
            "rollout-0", "rollout", boot, heartbeat_ns=HEARTBEAT_NS, now_ns=self.now, limits=LIMITS
        )

    def start_server(self):
        self.links = {}  #: client boot -> ServerLink
        self.waiting = []  #: (client boot, number, body) delivered and not durable yet

    # Actions of the processes; each action polls, as a real process does after every turn.

    @rule(count=st.integers(1, 4))
    def client_sends(self, count):
        sent = self.sent[self.client.boot_id]
        for _ in range(count):
            body = b"up %d" % len(sent)
            if self.queue(self.client, body):
                sent.append(body)
        self.poll()

    @rule(value=st.integers(0, 255))
    def client_measures(self, value):
        body = b"gauge %d" % value
        self.gauges[self.client.boot_id].add(body)
        self.client.send_gauge(body)
        self.poll()

    @precondition(lambda self: self.client.boot_id in self.links)
    @rule(count=st.integers(1, 4))
    def server_sends(self, count):
        link = self.links[self.client.boot_id]
        sent = self.server_sent[link.boot_id, link.server_boot]
        for _ in range(count):
            body = f"{link.server_boot} {len(sent)}".encode()
            if self.queue(link, body):
                sent.append(body)
        self.poll()

    def queue(self, link, body):
        """Queue a message until it is acknowledged; return False if the outbox is full."""
        before = len(link.outbox)
        try:
            number = link.send(body)
        except OutboxFull:
            assert len(link.outbox) == before == LIMITS.outbox_messages
            return False
        assert number == link.outbox.next - 1
        return True

    @rule(count=st.integers(1, 3))
    def server_processes(self, count):
        for boot, seq, body in self.waiting[:count]:
            self.record[boot].append((seq, body))
            self.links[boot].mark_processed(seq)
            assert body == self.sent[boot][seq - 1]
        del self.waiting[:count]
        self.poll()

    @rule(ms=st.sampled_from([1, 50, 200, 1_000, 3_000]))
    def time_passes(self, ms):
        self.now += ms * MS
        self.poll()

    def poll(self):
        boot = self.client.boot_id
        self.wire += [(True, boot, frame) for frame in self.client.poll(self.now)]
        for boot, link in self.links.items():
            self.wire += [(False, boot, frame) for frame in link.poll(self.now)]

    # Faults.

    @precondition(lambda self: self.wire)
    @rule(index=st.integers(0, 10_000), keep=st.booleans())
    def deliver(self, index, keep):
        index %= len(self.wire)
        frame = self.wire[index] if keep else self.wire.pop(index)
        self.arrive(*frame)
        self.poll()

    @precondition(lambda self: self.wire)
    @rule(index=st.integers(0, 10_000))
    def delay_one(self, index):
        """Deliver all other frames before one."""
        late = self.wire.pop(index % len(self.wire))
        self.deliver_all()
        self.wire.append(late)

    @rule()
    def deliver_all(self):
        frames, self.wire = self.wire, []
        for frame in frames:
            self.arrive(*frame)
        self.poll()

    @precondition(lambda self: self.wire)
    @rule(index=st.integers(0, 10_000))
    def lose(self, index):
        self.wire.pop(index % len(self.wire))

    @rule()
    def lose_all_answers(self):
        """Drop all frames to the client, so that it does not learn what was processed."""
        self.wire = [frame for frame in self.wire if frame[0]]

    @precondition(lambda self: self.client.boot_id in self.links)
    @rule()
    def server_restarts(self):
        self.start_server()

    @precondition(lambda self: self.waiting)
    @rule()
    def server_restarts_before_its_acks_arrive(self):
        """Restart the server with processed messages whose acknowledgements are lost."""
        self.server_processes(len(self.waiting))
        self.lose_all_answers()
        self.start_server()

    @precondition(lambda self: len(self.record[self.client.boot_id]) > 2)
    @rule()
    def client_restarts(self):
        self.start_client()

    # Delivery to the owners.

    def arrive(self, to_server, boot, frame):
        if to_server:
            self.arrive_at_server(boot, frame)
        elif boot == self.client.boot_id:
            bodies = self.client.receive(frame, self.now)
            self.received[boot, self.client.server_boot] += bodies

    def arrive_at_server(self, boot, frame):
        if boot not in self.links:
            hello = decode_client(frame, LIMITS.max_frame)
            if isinstance(hello, Hello):
                self.links[boot] = self.admit(hello)
            return
        for seq, body in self.links[boot].receive(frame, self.now):
            if seq:
                self.waiting.append((boot, seq, body))
            else:
                assert body in self.gauges[boot]

    def admit(self, hello):
        last = len(self.record[hello.boot_id]) if self.with_record else None
        return ServerLink(
            hello, server_boot=self.next_boot("s"), incarnation=1, last_seq=last, limits=LIMITS
        )

    # Invariants at every moment.

    @invariant()
    def processed_in_order_exactly_once(self):
        for boot, record in self.record.items():
            numbers = [seq for seq, _ in record]
            if self.with_record:
                assert numbers == list(range(1, len(numbers) + 1)), boot

    @invariant()
    def acknowledged_only_what_is_processed(self):
        processed = {seq for seq, _ in self.record[self.client.boot_id]}
        assert processed >= set(range(1, self.client.outbox.first))

    @invariant()
    def client_sees_a_prefix_of_what_each_server_sent(self):
        for pair, bodies in self.received.items():
            assert bodies == self.server_sent[pair][: len(bodies)], pair

    @invariant()
    def nobody_keeps_more_than_allowed(self):
        for link in (self.client, *self.links.values()):
            assert len(link.outbox) <= LIMITS.outbox_messages

    @invariant()
    def nobody_is_refused(self):
        assert self.client.state in (LinkState.JOINING, LinkState.UP)

    def teardown(self):
        """Check that everything arrives in bounded time once the faults stop."""
        end = self.now + HEAL_NS
        while not self.settled():
            assert self.now < end, f"undelivered messages: {self.client.outbox.__dict__}"
            self.deliver_all()
            self.server_processes(len(self.waiting))
            self.time_passes(50)
        boot = self.client.boot_id
        assert {body for _, body in self.record[boot]} == set(self.sent[boot])
        pair = boot, self.client.server_boot
        assert self.received[pair] == self.server_sent[pair]

    def settled(self):
        link = self.links.get(self.client.boot_id)
        if link is None or self.client.server_boot != link.server_boot:
            return False
        return not (self.client.outbox or link.outbox or self.waiting)


class LossyLinkWithoutRecord(LossyLink):
    """Variant in which the server forgets at each restart, with idempotent handlers."""

    with_record = False

    @invariant()
    def in_order_within_one_server(self):
        for boot, link in self.links.items():
            waiting = [seq for b, seq, _ in self.waiting if b == boot]
            last = link.inbox.delivered
            assert waiting == list(range(last - len(waiting) + 1, last + 1))


def run_model(model, examples, steps, number, shrink=True):
    """Run examples of a model, the same for the same number; raise the error of the shortest."""
    seeded = seed(number)(type(model.__name__, (model,), {}))
    checks = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seeded, settings=checks)
