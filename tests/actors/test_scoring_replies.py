"""A replica's scorer between reward function and coordinator: what each reply becomes.

The pool gives what the test says, the store answers what the test says; no worker is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.actors.scoring import Scorer
from laminar.actors.service_clients import StoreClient
from laminar.core.state.scores import bits_of
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import EndedBy
from laminar.names.ids import GroupId, TrajectoryId
from laminar.storage import messages as m
from laminar.tasks.environments.turns import Effect, NextTurn, TrajectoryDone
from laminar.tasks.rewards.results import RewardCall, RewardResult, RewardWorkerLost
from tests.actors.parts import FakeHost, removed

RIGHT = RewardResult(1.0, extras={"acc": 1.0, "pred": "seven"})
PROMPT = msgspec.msgpack.encode(
    {"prompt": "q", "ground_truth": "a", "columns": {}, "data_source": "s", "prompt_ids": b""}
)


class Store:
    """It has every trajectory as `row` says, and answers every reward as `reply` says."""

    def __init__(self, row: dict[str, Any], reply: dict[str, Any]) -> None:
        self.row, self.reply = row, reply
        self.rows: dict[str, dict[str, Any]] = {}  #: fields of single trajectories
        self.asked: list[m.PutRewards] = []

    async def fetch(self, ids: Sequence[str], *, with_prompt: bool) -> list[m.StoredTrajectory]:
        fields = {field.name: None for field in msgspec.structs.fields(m.StoredTrajectory)}
        fields |= {"purpose": "train", "finish_reason": "stop", "version_step": 4, "row_index": 0}
        fields |= {"tokens": b"\5\0\0\0\7\0\0\0", "prompt": PROMPT} | self.row
        own = {name: {"trajectory_id": name} | self.rows.get(name, {}) for name in ids}
        return [m.StoredTrajectory(**(fields | own[name])) for name in ids]

    async def send_request(self, request: m.PutRewards, answer: object) -> m.PutRewardsReply:
        self.asked.append(request)
        results = []
        for item in request.items:
            stored = {"answer": "ok", "reward": item.reward, "reward_reason": item.reason}
            results.append(m.StoredReward(trajectory_id=item.trajectory_id, **stored | self.reply))
        return m.PutRewardsReply(results=tuple(results))


class Pool:
    """Gives the same result for every completion, or raises."""

    def __init__(self, result: RewardResult | Exception) -> None:
        self.result = result
        self.calls: list[RewardCall] = []
        self.scores: dict[str, float] = {}  #: by text, where they differ

    async def start(self) -> None:
        pass

    async def compute_rewards(self, call: RewardCall) -> list[RewardResult]:
        self.calls.append(call)
        if isinstance(self.result, Exception):
            raise self.result
        if self.scores:
            return [RewardResult(self.scores[text]) for text, _ in call.completions]
        return [self.result] * len(call.completions)


class Scored:
    """One command to score, carried out."""

    def __init__(self, run_dir: Path, result: RewardResult | Exception) -> None:
        self.host = FakeHost(run_dir, "rollout-0", "reward.kind=math")
        self.pool = Pool(result)
        self.scorer = Scorer(self.host, None, self.pool, lambda ids: f"text of {ids}")  # type: ignore[arg-type]

    async def run(
        self,
        *,
        row: Any = None,
        reply: Any = None,
        names: Any = ("0.0.0",),
        tokens: dict[str, bytes] | None = None,
        client: StoreClient | None = None,
    ) -> Store:
        store = Store(row or {}, reply or {})
        store.rows = {name: {"tokens": tokens} for name, tokens in (tokens or {}).items()}
        self.scorer.store = client or store  # type: ignore[assignment]
        items = tuple(
            cmd.PlacedTrajectory(trajectory_id=TrajectoryId(n), placement=3) for n in names
        )
        command = cmd.ScoreTrajectories(
            to="rollout-0", group=GroupId("0.0"), row_index=0, purpose="train", items=items
        )
        order = cmd.Envelope(command_id=1, cause=1, command=msgspec.Raw(b""))
        await self.scorer.start()
        await self.scorer.score_trajectories(order, command)
        return store

    def rewarded(self) -> ev.TrajectoryRewarded:
        (event,) = self.host.events
        assert isinstance(event, ev.TrajectoryRewarded)
        return event


async def test_the_answer_is_scored_as_text_and_reported_once_the_store_has_it(
    tmp_path: Path,
) -> None:
    scored = Scored(tmp_path, RIGHT)
    store = await scored.run()
    (call,) = scored.pool.calls
    assert (call.completions, call.step) == ([("text of [5, 7]", [5, 7])], 4)
    (item,) = store.asked[0].items
    assert (item.trajectory_id, item.placement, item.reward) == ("0.0.0", 3, 1.0)
    assert (item.text, item.extras) == ("text of [5, 7]", {"acc": 1.0, "pred": "seven"})
    event = scored.rewarded()
    assert (event.trajectory_id, event.placement, event.num_tokens) == ("0.0.0", 3, 2)
    assert (event.reward_bits, event.correct, event.reason) == (bits_of(1.0), True, "ok")


@pytest.mark.parametrize(
    ("score", "finish_reason", "correct"),
    [
        (1.0, "stop", True),
        (1.0, "length", False),
        (0.99, "stop", False),
        (1.5, "stop", True),
        (1.0, "turn-timeout", False),
    ],
)
async def test_right_is_a_full_score_of_an_answer_that_was_not_cut(
    tmp_path: Path, score: float, finish_reason: str, correct: bool
) -> None:
    """Whoever is cut off has not ended his answer, whatever it says so far."""
    scored = Scored(tmp_path, RewardResult(score))
    await scored.run(row={"purpose": "eval"}, reply={"finish_reason": finish_reason})
    event = scored.rewarded()
    assert (event.correct, event.truncated) == (correct, finish_reason != "stop")
    assert event.ended_by == (finish_reason if "timeout" in finish_reason else "")


@pytest.mark.parametrize(("purpose", "told"), [("eval", {"acc": 1.0}), ("train", {})])
async def test_figures_beside_the_score_travel_with_held_out_answers(
    tmp_path: Path, purpose: str, told: dict[str, float]
) -> None:
    """Those of a training answer reach the trainer through the store; text is no figure."""
    scored = Scored(tmp_path, RIGHT)
    await scored.run(row={"purpose": purpose})
    assert scored.rewarded().extras == told


async def test_the_reward_that_the_store_had_first_is_the_one_reported(tmp_path: Path) -> None:
    """Another replica scored it before it died: a batch may have been chosen by that score."""
    scored = Scored(tmp_path, RIGHT)
    await scored.run(reply={"answer": "already", "reward": 0.25, "reward_reason": "error"})
    event = scored.rewarded()
    assert (event.reward_bits, event.correct, event.reason) == (bits_of(0.25), False, "error")


async def test_what_the_store_refuses_is_a_failed_trajectory(tmp_path: Path) -> None:
    scored = Scored(tmp_path, RIGHT)
    await scored.run(reply={"answer": "refused", "reason": "it is trained", "reward": None})
    (event,) = scored.host.events
    assert isinstance(event, ev.TrajectoryFailed)
    assert (event.reason, event.detail, event.placement) == ("store-refused", "it is trained", 3)


async def test_what_is_fenced_is_not_reported(tmp_path: Path) -> None:
    """Somebody else has it, and reports it."""
    scored = Scored(tmp_path, RIGHT)
    await scored.run(reply={"answer": "fenced", "reward": None})
    assert scored.host.events == []


async def test_an_answer_to_which_no_function_applies_is_unscored(tmp_path: Path) -> None:
    scored = Scored(tmp_path, RewardResult(None, "unscored"))
    await scored.run()
    (event,) = scored.host.events
    assert isinstance(event, ev.TrajectoryFailed) and event.reason == "unscored"


async def test_siblings_whose_worker_was_lost_fail_and_nothing_is_stored(tmp_path: Path) -> None:
    scored = Scored(tmp_path, RewardWorkerLost("killed by signal 9"))
    store = await scored.run(names=("0.0.0", "0.0.1"))
    assert store.asked == []
    failed = scored.host.all(ev.TrajectoryFailed)
    assert [(f.trajectory_id, f.reason) for f in failed] == [
        ("0.0.0", "reward-worker-lost"), ("0.0.1", "reward-worker-lost"),
    ]  # fmt: skip


async def test_a_response_that_waits_for_its_score_is_kept_when_the_process_ends(
    tmp_path: Path,
) -> None:
    """A pause ends the workers while they score: that is no failure of the response."""
    scored = Scored(tmp_path, RewardWorkerLost("the reward pool is not running"))
    scored.host.ending = True
    store = await scored.run(names=("0.0.0", "0.0.1"))
    assert not store.asked and not scored.host.events


async def test_an_order_that_comes_when_the_tokens_are_gone_is_let_go(tmp_path: Path) -> None:
    """The replica stood still; its group was dropped meanwhile, and two checkpoints were made."""
    scored = Scored(tmp_path, RIGHT)
    await scored.run(client=removed("0.0.0"))
    assert not scored.pool.calls and not scored.host.events


class Turns:
    """An environment that goes on, and a store that answers that as it is told."""

    def __init__(self, answer: str) -> None:
        self.stored = m.Result(trajectory_id="0.0.0", answer=answer)  # type: ignore[arg-type]

    async def answer_turn(self, item: cmd.PlacedTrajectory, row: m.StoredTrajectory) -> NextTurn:
        return NextTurn((7,))

    async def store_context(
        self, item: cmd.PlacedTrajectory, turn: int, answer: NextTurn
    ) -> m.Result:
        return self.stored


@pytest.mark.parametrize(
    ("answer", "told"),
    [("ok", [ev.TurnRequested]), ("fenced", []), ("refused", [ev.TrajectoryFailed])],
)
async def test_a_turn_is_told_once_the_store_has_its_context(
    tmp_path: Path, answer: str, told: list[type]
) -> None:
    scored = Scored(tmp_path, RIGHT)
    scored.scorer.turns = Turns(answer)  # type: ignore[assignment]
    await scored.run(row={"status": "generated", "placement": 3, "contexts": ()})
    assert list(map(type, scored.host.events)) == told


async def test_each_sibling_is_scored_by_its_own_text(tmp_path: Path) -> None:
    scored = Scored(tmp_path, RIGHT)
    tokens = {"0.0.0": b"\1\0\0\0", "0.0.2": b"\2\0\0\0\3\0\0\0", "0.0.1": b"\4\0\0\0"}
    texts = ["text of [1]", "text of [2, 3]", "text of [4]"]
    scored.pool.scores = dict(zip(texts, (0.25, 0.5, 1.0), strict=True))
    store = await scored.run(names=tuple(tokens), tokens=tokens)
    (call,) = scored.pool.calls
    assert call.completions == list(zip(texts, ([1], [2, 3], [4]), strict=True))
    kept = [(item.trajectory_id, item.text, item.reward) for item in store.asked[0].items]
    assert kept == list(zip(tokens, texts, (0.25, 0.5, 1.0), strict=True))
    told = scored.host.all(ev.TrajectoryRewarded)
    assert [(e.trajectory_id, e.reward_bits, e.num_tokens, e.correct) for e in told] == [
        ("0.0.0", bits_of(0.25), 1, False), ("0.0.2", bits_of(0.5), 2, False),
        ("0.0.1", bits_of(1.0), 1, True),
    ]  # fmt: skip


@pytest.mark.parametrize("own", [RewardResult(0.75, extras={"moves": 3.0}), None])
@pytest.mark.parametrize("reason", list(EndedBy))
async def test_the_last_turn_is_scored_and_stored_with_what_ended_it(
    tmp_path: Path, reason: EndedBy, own: RewardResult | None
) -> None:
    """By the environment, or else by the reward functions, which get the tokens of all turns."""

    class Ends(Turns):
        async def answer_turn(self, item: Any, row: Any) -> Any:
            effect = Effect(0, "go", "{}", "done", "there", 0.5)
            return TrajectoryDone(own, "the last turn", reason, (effect,))

    scored = Scored(tmp_path, RIGHT)
    scored.scorer.turns = Ends("ok")  # type: ignore[assignment]
    row = {"status": "generated", "placement": 3, "contexts": (b"\7\0\0\0",), "purpose": "eval"}
    store = await scored.run(row=row, reply={"finish_reason": reason or "stop"})
    asked = [(call.completions, call.step) for call in scored.pool.calls]
    assert asked == ([] if own is not None else [([("the last turn", [5, 7])], 4)])
    (item,), expected = store.asked[0].items, own or RIGHT
    assert (item.text, item.finish_reason) == ("the last turn", reason)
    assert (item.reward, item.extras) == (expected.reward, expected.extras)
    assert [(e.call, e.tool, e.result, e.seconds) for e in item.effects] == [
        (0, "go", "there", 0.5)
    ]
    event = scored.rewarded()
    assert (event.ended_by, event.truncated, event.num_tokens) == (reason, bool(reason), 2)
    assert event.correct == (own is None and not reason)
    assert event.reward_bits == bits_of(expected.reward or 0.0)
