"""The largest messages of the largest runs reach who they are for, and the event log.

200,000 trajectories a step, 10,000 replicas, ids as they are after a dozen passes over 100 million
prompts; and the limits that a configuration is refused above.
"""

import pytest
from msgspec import Raw

from laminar.config import load_config
from laminar.config.rollout import GROUP_SIZE_MAX
from laminar.config.rules import BUILT_IN_STRATEGIES, STEP_TRAJECTORIES_MAX
from laminar.coordinator.loop import COMMANDS_BYTES_MAX
from laminar.core.scheduling.groups import ENDINGS_PER_COMMAND
from laminar.core.steps.batching import STRATEGIES
from laminar.eventlog.record import DecisionRecord, EventRecord, encode_frame
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.codec import MessageTooLarge, decode_envelope, decode_event, encode
from laminar.events.families import MESSAGE_BYTES_MAX
from laminar.names import ids
from laminar.net.frames import Hello
from laminar.net.session import ClientLink, Limits, ServerLink
from laminar.storage.messages import MAX_ITEMS
from laminar.training.metrics import by_origin
from laminar.training.steps import Mismatch
from tools.kit.world_parts import group_of

SIBLINGS = 16


def trajectories(count: int, siblings: int = SIBLINGS) -> list[ids.TrajectoryId]:
    """Consecutive ones of the thirteenth pass."""
    first = 99_000_000
    groups = [ids.train_group(12, first + n) for n in range(-(-count // siblings))]
    return [ids.make_trajectory_id(g, s) for g in groups for s in range(siblings)][:count]


def links() -> tuple[ClientLink, ServerLink]:
    client = ClientLink("trainer-0", "trainer", "b1", heartbeat_ns=10**9, now_ns=0)
    hello = Hello("trainer-0", "trainer", "b1", 0, 1, {})
    limits = Limits(outbox_bytes=COMMANDS_BYTES_MAX)
    server = ServerLink(hello, server_boot="s1", incarnation=1, last_seq=0, limits=limits)
    for frame in server.poll(0):
        client.receive(frame, 0)
    return client, server


def delivered(commands: list[cmd.Command]) -> list[cmd.Command]:
    """What an actor gets of commands that are decided together."""
    client, server = links()
    for number, command in enumerate(commands):
        order = cmd.Envelope(command_id=number, cause=0, command=Raw(encode(command)))
        server.send(encode(order))
    bodies: list[bytes] = []
    while len(bodies) < len(commands):
        for frame in server.poll(0):
            bodies += client.receive(frame, 0)
        for frame in client.poll(0):
            server.receive(frame, 0)
    return [decode_envelope(body)[1] for body in bodies]


@pytest.mark.parametrize("count", [85_001, 200_000, STEP_TRAJECTORIES_MAX])
def test_a_batch_of_any_legal_size_reaches_the_trainer_whole(count: int) -> None:
    batch = tuple(trajectories(count))
    command = cmd.TrainStep(to="trainer-0", step_index=99_999, version=99_999, trajectories=batch)
    assert delivered([command]) == [command]
    encode_frame(DecisionRecord(cause=1, index=0, command=Raw(encode(command))), 0, settled=False)


def test_the_ends_of_a_million_trajectories_are_taken_at_once() -> None:
    """The end of a run that fails: everything that is under way ends with one event."""
    part = tuple(
        cmd.TrajectoryEnding(
            trajectory_id=trajectory,
            group=group_of(trajectory),
            sibling=15,
            purpose="train",
            row_index=99_000_000,
            placement=3,
            end="dropped",
            reason="group-reward-timeout",
            step=-1,
        )
        for trajectory in trajectories(ENDINGS_PER_COMMAND)
    )
    command = cmd.EndTrajectories(to="store-0", endings=part)
    count = 1_000_000 // ENDINGS_PER_COMMAND
    _, server = links()
    body = encode(cmd.Envelope(command_id=1 << 50, cause=1 << 30, command=Raw(encode(command))))
    for _ in range(count):
        server.send(body)
    assert len(server.outbox) == count


def test_the_largest_group_is_rewarded_with_one_message() -> None:
    items = tuple(
        cmd.PlacedTrajectory(trajectory_id=t, placement=9)
        for t in trajectories(GROUP_SIZE_MAX, GROUP_SIZE_MAX)
    )
    score = cmd.ScoreTrajectories(
        to="rollout-9999.0", group=ids.train_group(12, 1), row_index=1, purpose="train", items=items
    )
    assert delivered([score]) == [score]
    assert GROUP_SIZE_MAX <= MAX_ITEMS


def test_what_a_strategy_may_be_asked_is_refused_before_it_is_too_large() -> None:
    """The largest legal question is within the limit; so are its answer and their records."""
    settings = ["data.dataset=gcd", "model.name=m", "algorithm.batch_strategy=mine.py:choose"]
    sizes = ["data.train_batch_size=18000", "rollout.group_size=16", "async.max_staleness=2"]
    config = load_config([], [*settings, *sizes])
    waiting = config.data.train_batch_size * (config.async_.max_staleness + 1)
    candidates = tuple(
        cmd.BatchCandidate(
            group=ids.train_group(12, 99_000_000 + n),
            row_index=99_000_000 + n,
            deadline=99_999,
            step=99_999,
            order=1 << 40,
            num_tokens=1 << 40,
            rewards=(0.1,) * SIBLINGS,
        )
        for n in range(waiting)
    )
    question = cmd.ProposeBatch(to="strategy", step_index=99_999, count=9, candidates=candidates)
    assert len(encode(question)) > 12 << 20
    answer = ev.BatchProposed(step_index=99_999, groups=tuple(c.group for c in candidates))
    assert decode_event(encode(answer)) == answer
    encode_frame(
        EventRecord(
            seq=1, time_ns=1, peer="c", incarnation=0, peer_seq=0, event=Raw(encode(answer))
        ),
        0,
        settled=False,
    )
    assert set(STRATEGIES) == set(BUILT_IN_STRATEGIES)


def test_a_step_reports_the_worst_origins_of_ten_thousand_replicas_and_counts_the_others() -> None:
    names = [f"rollout-{n // 8}.{n % 8}" for n in range(10_000)]
    origins = {
        (name, version): Mismatch(0.1, k3, 0.5, 1)
        for k3, name in enumerate(names)
        for version in (7, 8, 9)
    }
    origins["rollout-5.5", 8] = Mismatch(0.1, float("nan"), 0.5, 1)
    figures = by_origin(origins, {}, dict.fromkeys(range(100), (0.5, 1)))
    shown = [name for name in figures if name.startswith("by_origin/mismatch_kl/")]
    assert shown[0] == "by_origin/mismatch_kl/rollout-5.5/8"
    assert {name.split("/")[2] for name in shown[1:]} == set(names[-11:])
    assert [n for n in figures if n.startswith("by_origin/reward/")][-1] == "by_origin/reward/99"
    assert figures["by_origin/left_out"] == 30_000 + 100 - len(figures) + 1
    step = ev.StepCompleted(
        step_index=9, version=9, changed=True, reason="", num_tokens=1, digest="", metrics=figures
    )
    assert len(encode(step)) < 10_000


def test_few_origins_are_all_reported() -> None:
    few = by_origin({("rollout-0", 3): Mismatch(0.1, 0.25, 0.5, 1)}, {}, {3: (1.0, 8)})
    assert few == {"by_origin/mismatch_kl/rollout-0/3": 0.25, "by_origin/reward/3": 1.0}


def test_a_message_that_nobody_would_take_is_named_with_its_size() -> None:
    failed = ev.ActorFailed(reason="x" * MESSAGE_BYTES_MAX, user_error=False)
    size = MESSAGE_BYTES_MAX + 57
    with pytest.raises(MessageTooLarge, match=rf"actor-failed has {size} bytes, above .*15728640"):
        encode(failed)
