"""Scoring in a replica: what failures become in events, in the store, in the logs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from laminar.actors.scoring import Scorer
from laminar.actors.system.reward_output import make_reward_pool, user_output
from laminar.core.state.scores import bits_of
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import GroupId, TrajectoryId
from laminar.storage import messages as m
from tests.actors.parts import FakeHost

pytestmark = pytest.mark.process

ERROR_SCORE = -0.5
GROUP = """
    def brevity(prompts, completions, **columns):
        print("scoring", len(completions))
        return [{}[c] for c in completions]
"""
VERL = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        raise ValueError("no score for " + solution_str)
"""


class FakeStore:
    """It has every trajectory that it is asked about, and takes every reward."""

    def __init__(self) -> None:
        self.items: list[m.RewardItem] = []

    async def fetch(self, ids: Sequence[str], *, with_prompt: bool) -> list[m.StoredTrajectory]:
        prompt = msgspec.msgpack.encode(
            {
                "prompt": "q",
                "ground_truth": "a",
                "columns": {},
                "data_source": "s",
                "prompt_ids": b"",
            }
        )
        return [_row(name, prompt) for name in ids]

    async def send_request(self, request: m.PutRewards, answer: object) -> m.PutRewardsReply:
        self.items += request.items
        return m.PutRewardsReply(
            results=tuple(
                m.StoredReward(
                    trajectory_id=i.trajectory_id,
                    answer="ok",
                    reward=i.reward,
                    reward_reason=i.reason,
                )
                for i in request.items
            )
        )


def _row(name: str, prompt: bytes) -> m.StoredTrajectory:
    known: dict[str, Any] = {"trajectory_id": name, "row_index": 0, "purpose": "train"}
    known |= {"tokens": b"\1\0\0\0", "prompt_ids": b"", "prompt": prompt, "logprobs": b""}
    fields = {field.name: None for field in msgspec.structs.fields(m.StoredTrajectory)}
    return m.StoredTrajectory(**(fields | known))


def scoring(*names: str) -> tuple[cmd.Envelope, cmd.ScoreTrajectories]:
    items = tuple(cmd.PlacedTrajectory(trajectory_id=TrajectoryId(n), placement=1) for n in names)
    command = cmd.ScoreTrajectories(
        to="rollout-0", group=GroupId("0.0"), row_index=0, purpose="train", items=items
    )
    return cmd.Envelope(command_id=1, cause=1, command=msgspec.Raw(b"")), command


async def scored(
    tmp_path: Path, source: str, calls: Iterable[Sequence[str]], *settings: str
) -> tuple[FakeHost, FakeStore]:
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(source))
    (tmp_path / "logs" / "latest").mkdir(parents=True)
    host, store = (
        FakeHost(
            tmp_path,
            "rollout-0",
            f"reward.custom_reward_function.path={path}",
            f"reward.error_score={ERROR_SCORE}",
            *settings,
        ),
        FakeStore(),
    )
    pool = make_reward_pool(host, user_output(host))  # type: ignore[arg-type]
    scorer = Scorer(host, store, pool, lambda ids: f"text of {len(ids)}")  # type: ignore[arg-type]
    await scorer.start()
    try:
        for names in calls:
            await scorer.score_trajectories(*scoring(*names))
    finally:
        await scorer.close()
    host.telemetry.wait_drained(60)
    return host, store


async def test_a_group_reward_that_raises_gives_every_sibling_the_error_score(
    tmp_path: Path,
) -> None:
    """A dropped group is generated again, and again. The siblings are equal, so the step learns
    nothing from them, and the failure is counted."""
    host, store = await scored(tmp_path, GROUP, [("0.0.0", "0.0.1", "0.0.2")])
    assert not host.all(ev.TrajectoryFailed)
    events = host.all(ev.TrajectoryRewarded)
    assert [(e.reason, e.reward_bits) for e in events] == [("error", bits_of(ERROR_SCORE))] * 3
    assert [i.detail for i in store.items] == ["KeyError: 'text of 1' (reward.py:4)"] * 3


async def test_details_go_with_the_first_failures_of_each_reason_only(tmp_path: Path) -> None:
    """The event log of a run whose reward always raises does not grow by a sentence per answer;
    the log of the process tells the same ones."""
    with capture_logs() as lines:
        host, store = await scored(tmp_path, VERL, [(f"0.{i}.0",) for i in range(8)])
    told = [e.detail for e in host.all(ev.TrajectoryRewarded)]
    sentence = "ValueError: no score for text of 1 (reward.py:3)"
    assert told == [sentence] * 3 + [""] * 5
    assert [i.detail for i in store.items] == [sentence] * 8
    warnings = [line for line in lines if line["event"] == "reward-failed"]
    assert [line["detail"] for line in warnings] == [sentence] * 3


async def test_what_a_reward_prints_is_in_a_file_of_its_replica(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await scored(tmp_path, GROUP, [("0.0.0", "0.0.1")])
    assert (tmp_path / "logs/latest/rollout-0.reward.log").read_text() == "scoring 2\n"
    assert "scoring" not in "".join(capfd.readouterr())
