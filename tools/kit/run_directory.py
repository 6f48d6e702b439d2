"""A whole run directory from a run of the random world: log, store, trainer's book, timeline.

Reads   the log of tools.kit.world.World
Writes  events/, store.sqlite, trainer_book.jsonl, timeline/

The store is filled through storage.Database with the requests that the actors would have made, in
the order of the log, so log and store agree as they do in a real run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from laminar.actors.admission_requests import open_item
from laminar.actors.batch_fetch import sample_of
from laminar.actors.store import end_item
from laminar.analysis.audit.trainer_book import ids_digest
from laminar.core.state.scores import float_of
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.storage import messages as m
from laminar.storage.contents import digest_batch
from laminar.storage.database import Database
from laminar.training.steps import iter_contents
from tools.kit.logs import Log, write_log
from tools.kit.world import World
from tools.kit.world_parts import Faults, settings

CLOCK_NS = 1_700_000_000 * 10**9  #: time of day at the first event
TEMPERATURE = 1.0  #: sampling temperature of all responses


def world_log(leave_out: float = 0.0, *, in_flight: bool = False) -> Log:
    """Return a log of three steps, two evaluations, some unscored siblings and repeated events.

    `leave_out`: share of rows of batches that the trainer leaves out; `in_flight`: some
    responses take longer than a step, and continue with newer weights."""
    config = settings(total_steps=3, test_freq=2)
    if in_flight:
        config = settings(total_steps=3, test_freq=2, in_flight=True, groups_per_version=0)
    tail = 0.3 if in_flight else 0.0
    faults = Faults(fail_sibling=0.1, repeat_event=0.1, slow_tail=tail, leave_out=leave_out)
    world = World(config, num_train=30, num_eval=4, faults=faults, seed=3).run()
    ordered = {
        c.step_index: c
        for _, commands in world.log
        for c in commands
        if isinstance(c, cmd.TrainStep)
    }
    return [(_real(stamped, ordered), commands) for stamped, commands in world.log]


def _real(stamped: Stamped, ordered: dict[int, cmd.TrainStep]) -> Stamped:
    """Add data that the world leaves out: the time of day, digests and figures of a step."""
    event = stamped.event
    if isinstance(event, ev.CoordinatorStarted):
        event = msgspec.structs.replace(event, clock_ns=CLOCK_NS)
    elif isinstance(event, ev.StepCompleted):
        event = msgspec.structs.replace(
            event,
            digest=ids_digest(list(ordered[event.step_index].trajectories)),
            num_tokens=10 * (event.step_index + 1),
            metrics={"mismatch_kl/mean": 0.1 * event.step_index},
        )
    return msgspec.structs.replace(stamped, event=event)


def make_run(run_dir: Path, log: Log) -> None:
    """Write everything except the timeline."""
    run_dir.mkdir()
    write_log(run_dir, log)
    write_store(run_dir, log)
    write_book(run_dir, log)


def write_store(run_dir: Path, log: Log) -> None:
    begun = next(s.event for s, _ in log if isinstance(s.event, ev.CoordinatorStarted))
    in_flight = begun.settings.in_flight
    database = Database(run_dir / "store.sqlite", 1, in_flight=in_flight)
    loaded = next(s.event for s, _ in log if isinstance(s.event, ev.DataLoaded))
    prompts = [_prompt(index) for index in range(max(loaded.num_train, loaded.num_eval))]
    database.load_prompts(prompts[: loaded.num_train], prompts[: loaded.num_eval], loaded.digest)
    weights: dict[str, tuple[int, int]] = {}
    requests = []
    for stamped, commands in _without_repeats(log):
        if isinstance(stamped.event, ev.WeightsLoaded):
            weights[stamped.peer] = stamped.event.version, stamped.event.step
        requests += _requests(stamped, commands, weights)
        for command in commands:
            if isinstance(command, cmd.GenerateTrajectory):
                weights[command.trajectory_id] = command.version, command.version_step
    for reply in database.handle_batch(requests):
        for result in reply.results:
            assert result.answer in ("open", "ok"), result
    database.close()


def _without_repeats(log: Log) -> Log:
    """Drop repeated reports, which the store wrote only once."""
    seen: set[str] = set()
    first = []
    for stamped, commands in log:
        said = str(stamped.event)
        answer = isinstance(stamped.event, ev.TrajectoryFinished | ev.TrajectoryRewarded)
        if not (answer and said in seen):
            first.append((stamped, commands))
        seen.add(said)
    return first


def _requests(
    stamped: Stamped, commands: list[Command], weights: dict[str, tuple[int, int]]
) -> Iterable[m.Request]:
    """Yield the store requests that preceded this event, and those that follow from it.

    `weights`: version and step that a replica has, or that a trajectory began with."""
    event = stamped.event
    if isinstance(event, ev.TrajectoryFinished):
        yield from _finish(event, weights[event.trajectory_id], weights[stamped.peer])
    elif isinstance(event, ev.TrajectoryRewarded):
        score = float_of(event.reward_bits)
        item = m.RewardItem(
            trajectory_id=event.trajectory_id,
            placement=event.placement,
            reward=score,
            reason=event.reason,
        )
        yield m.PutRewards(items=(item,))
    for command in commands:
        if isinstance(command, cmd.GenerateTrajectory):
            yield m.Open(items=(open_item(command, TEMPERATURE),))
        elif isinstance(command, cmd.EndTrajectories):
            yield m.End(items=tuple(end_item(ending) for ending in command.endings))


def _finish(
    event: ev.TrajectoryFinished, first: tuple[int, int], last: tuple[int, int]
) -> Iterable[m.Request]:
    """Yield parts sampled with the first and then with the last weights (version, step)."""
    who = {"trajectory_id": event.trajectory_id, "placement": event.placement}
    n = event.num_tokens
    tokens, logprobs = (
        struct.pack(f"<{n}i", *range(n)),
        struct.pack(f"<{n}f", *(-0.5 - i / 64 for i in range(n))),
    )
    parts = [(0, n, last)] if first == last else [(0, n // 2, first), (n // 2, n, last)]
    for start, end, (version, step) in parts:
        chunk = m.AppendItem(
            **who,
            offset=start,
            tokens=tokens[4 * start : 4 * end],
            logprobs=logprobs[4 * start : 4 * end],
            weight_version=version,
            version_step=step,
        )
        yield m.Append(items=(chunk,))
    yield m.Finish(items=(m.FinishItem(**who, finish_reason=event.finish_reason, num_tokens=n),))


def _prompt(index: int) -> m.PromptPayload:
    return m.PromptPayload(
        prompt=str(index), ground_truth="", columns={}, data_source="made", prompt_ids=b"\1\0\0\0"
    )


def write_book(run_dir: Path, log: Log) -> None:
    left_out = {
        s.event.step_index: [t for part in s.event.left_out for t in part.trajectories]
        for s, _ in log
        if isinstance(s.event, ev.StepCompleted)
    }
    lines = [
        {
            "step": command.step_index,
            "version": command.version,
            "changed": True,
            "digest": ids_digest(list(command.trajectories)),
            "ids": list(command.trajectories),
            "left_out": left_out.get(command.step_index, []),
            "contents": _contents(run_dir, command),
        }
        for _, commands in log
        for command in commands
        if isinstance(command, cmd.TrainStep)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "trainer_book.jsonl").write_text(text)


def _contents(run_dir: Path, command: cmd.TrainStep) -> str:
    """Return the digest of the samples that the trainer gets from the store."""
    path = run_dir / "store.sqlite"
    if not path.exists():
        return ""
    database = Database(path, 1)
    request = m.Fetch(ids=command.trajectories)
    (reply,) = database.handle_batch([request])
    database.close()
    assert isinstance(reply, m.FetchReply), reply
    return digest_batch(iter_contents([sample_of(row) for row in reply.trajectories]))


def write_spans(run_dir: Path, process: str, spans: list[dict[str, object]]) -> None:
    (run_dir / "timeline").mkdir(exist_ok=True)
    text = "".join(json.dumps(span) + "\n" for span in spans)
    (run_dir / "timeline" / f"{process}.jsonl").write_text(text)


def write_steps(run_dir: Path, process: str, rows: list[tuple[int, int, int, int]]) -> None:
    (run_dir / "timeline").mkdir(exist_ok=True)
    np.array(rows, dtype="<i8").tofile(run_dir / "timeline" / f"{process}.steps")
