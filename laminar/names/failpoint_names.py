"""Named places in the code where a test, or the simulator, may have a process die.

Gives   POINTS of all roles; TRAINER, those that the simulator draws from
"""

from __future__ import annotations

TRAINER = (
    "trainer-fetch",
    "trainer-step",
    "trainer-optimizer",
    "trainer-copy",
    "trainer-book",
    "trainer-checkpoint",
    "trainer-checkpoint-named",
    "trainer-load",
    "trainer-redo",
    "trainer-export",
)
"""Before a batch is fetched; in a step; after it, before its weights are copied; after that; when
the step is in the book; before a checkpoint has its name, and after; before one is loaded; when a
step was done again; before the export."""

LEARNER = ("policy-update", "critic-update")
"""In a step, of a trainer of one process or of another rank than the first, when its gradient is
there: before the policy is updated; after that, before its critic is."""

RANK = ("rank-load", "rank-step", "rank-fill", "rank-write")
"""In another rank of the trainer than the first: before it loads its rows of the model; in a step;
before it writes its rows of a version; before it writes those of a checkpoint."""

ROLLOUT = (
    "rollout-append",
    "rollout-appended",
    "rollout-finished",
    "rollout-score",
    "rollout-noted",
    "rollout-called",
    "rollout-rewarded",
    "rollout-leased",
    "rollout-loaded",
)
"""Before tokens go to the store; when it has them; when it has the end of an answer, before that is
reported; before a reward function or an environment is asked; when calls of tools are noted, before
they are made; when they were made, before the store has their answers; when it has them, or the
score; with a slot of the relay leased; when the engine has weights, before that is reported."""

REWARD = ("reward-call", "reward-scored")
"""In a reward worker: before the function is called; before its result is sent."""

RELAY = ("relay-ready", "relay-digest", "relay-digested")
"""Before it says that it is ready; before a version is hashed; before it is announced."""

STORE = ("store-filled", "store-commit", "store-committed", "store-end", "store-ended")
"""When the data is in the database; before requests are committed; after that, before they are
answered; before ends are written; when they are on the disk, before they are reported."""

NODE = ("node-launched", "node-child-ended")
"""When a process was started; when one has ended, before that is reported."""

COORDINATOR = (
    "coordinator-replayed",
    "coordinator-received",
    "coordinator-durable",
    "coordinator-sent",
)
"""When the log was read, before it listens; with messages that were not handled; when decisions are
on the disk, before they are sent; after that."""

POINTS = (*TRAINER, *LEARNER, *RANK, *ROLLOUT, *REWARD, *RELAY, *STORE, *NODE, *COORDINATOR)
