"""Failpoints: named places in the code where a test or the simulator can end a process.

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
    "trainer-repeat",
    "trainer-export",
)
"""Failpoints of the trainer.

Before a batch is fetched; in a step; after it, before its weights are copied; after the copy; when
the step is recorded; before a checkpoint has its name, and after; before one is loaded; after a
step was repeated; before the export."""

LEARNER = ("policy-update", "critic-update")
"""Failpoints in a step, of a single-process trainer or of a rank other than the first.

Once the gradient is computed: before the policy is updated; after that, before the critic is."""

RANK = ("rank-load", "rank-step", "rank-fill", "rank-write")
"""Failpoints in a trainer rank other than the first.

Before it loads its rows of the model; in a step; before it writes its rows of a version; before it
writes those of a checkpoint."""

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
"""Failpoints of a rollout replica.

Before tokens go to the store; when it has them; when it has the end of a response, before that is
reported; before a reward function or an environment is called; when tool calls are noted, before
they are made; after they are made, before the store has their results; when it has them, or the
score; with a slot of the relay leased; when the engine has weights, before that is reported."""

REWARD = ("reward-call", "reward-scored")
"""Failpoints of a reward worker: before the function is called; before its result is sent."""

RELAY = ("relay-ready", "relay-digest", "relay-digested")
"""Failpoints of a relay: before it reports ready; before it hashes a version, or announces it."""

STORE = ("store-filled", "store-commit", "store-committed", "store-end", "store-ended")
"""Failpoints of the store.

When the data is in the database; before requests are committed; after that, before they are
answered; before ends are written; when ends are durable, before they are reported."""

NODE = ("node-launched", "node-child-ended")
"""Failpoints of a node: when a process was started; when one ended, before that is reported."""

COORDINATOR = (
    "coordinator-replayed",
    "coordinator-received",
    "coordinator-durable",
    "coordinator-sent",
)
"""Failpoints of the coordinator.

When the log was read, before it listens; with unhandled messages; when decisions are durable,
before they are sent; after that."""

POINTS = (*TRAINER, *LEARNER, *RANK, *ROLLOUT, *REWARD, *RELAY, *STORE, *NODE, *COORDINATOR)
