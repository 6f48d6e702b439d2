"""The rows of a batch, fetched from the store in the learner's form.

Reads   trajectories of the store
Raises  ConfigError for steps whose tokens were removed together with their checkpoint
"""

from __future__ import annotations

import numpy as np

from laminar.actors.service_clients import StoreClient, TokensRemoved
from laminar.config import ConfigError
from laminar.engines.protocol import is_cut_off
from laminar.events import commands as cmd
from laminar.run.directory import CHECKPOINTS_DIR
from laminar.storage import messages as store
from laminar.tasks.rewards.results import is_correct, select_numbers
from laminar.training.steps import TrainSample


async def fetch_batch(
    client: StoreClient, command: cmd.TrainStep | cmd.RepeatStep
) -> list[TrainSample]:
    """Return the samples of a batch, in the order of the command.

    The store removes tokens once a kept checkpoint has the step that trained them, so a repeated
    step lacks tokens only if that checkpoint was removed by hand.
    """
    try:
        rows = await client.fetch(command.trajectories, with_prompt=False)
    except TokensRemoved as gone:
        raise ConfigError(
            f"step {command.step_index + 1} cannot be repeated: {gone}, because a later checkpoint "
            f"has the step, but that is missing from {CHECKPOINTS_DIR}/; restore it"
        ) from None
    return [sample_of(row) for row in rows]


def sample_of(row: store.StoredTrajectory) -> TrainSample:
    """Convert a stored trajectory to the learner's form."""
    if row.reward is None or row.temperature is None:
        raise RuntimeError(f"{row.trajectory_id} is in a batch but has no reward")
    truncated = is_cut_off(row.finish_reason)
    return TrainSample(
        sample_id=row.trajectory_id,
        group_id=row.group_id,
        prompt_ids=np.frombuffer(row.prompt_ids, dtype="<i4"),
        response_ids=np.frombuffer(row.tokens, dtype="<i4"),
        logprobs=np.frombuffer(row.logprobs, dtype="<f4"),
        reward=row.reward,
        temperature=row.temperature,
        truncated=truncated,
        truncated_by=row.finish_reason or "",
        correct=is_correct(row.reward, truncated=truncated),
        spans=row.spans,
        extras=select_numbers(row.extras),
        turns=row.segment_lengths if row.contexts else (),
        contexts=tuple(np.frombuffer(context, dtype="<i4") for context in row.contexts),
        parents=row.parents,
    )
