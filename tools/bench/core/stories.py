"""Stories for the scale benchmark: how each kind of event happens in a running cluster.

Gives   STORIES: by name, a generator of (process, event); "" is the coordinator itself

Preceding events go to the state machine directly and are not measured. A story yields its event
several times where that makes sense, each time about another process or trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from laminar.core.state.transitions import IN_ENGINE
from laminar.core.state.work import Trajectory
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.reasons import FailureReason
from tools.bench.core.cluster import Cluster

Story = Iterator[tuple[str, Event]]
TIMES = 5


# --- finding ------------------------------------------------------------------------------------


def running(cluster: Cluster, status: str = "running") -> Iterator[Trajectory]:
    """Yield trajectories of that status, each on another replica, spread over the cluster."""
    state = cluster.state
    busy = [name for name, replica in state.members.replicas.items() if replica.running]
    for name in busy[:: -max(len(busy) // (TIMES + 1), 1)]:
        for trajectory_id in state.members.replicas[name].running:
            if state.work.trajectories[trajectory_id].status == status:
                yield state.work.trajectories[trajectory_id]
                break


def some(cluster: Cluster) -> list[str]:
    """Return replicas with work, spread over the cluster."""
    return [t.replica for t in islice(running(cluster), TIMES)]


def work_of(cluster: Cluster, name: str) -> list[Trajectory]:
    state = cluster.state
    return [state.work.trajectories[t] for t in state.members.replicas[name].running]


def almost_a_batch(cluster: Cluster) -> Trajectory:
    """Reward a whole batch except one trajectory, which is finished and returned."""
    state, work = cluster.state, cluster.state.work
    groups = [g for g in work.groups.values() if g.purpose == "train" and g.status == "open"]
    in_engine = [
        g for g in groups if all(work.trajectories[m].status in IN_ENGINE for m in g.members)
    ]
    members = [
        work.trajectories[m] for g in in_engine[: state.settings.groups_per_step] for m in g.members
    ]
    for member in members[:-1]:
        cluster.finish(member.id)
        cluster.reward(member.id)
    cluster.finish(members[-1].id)
    return members[-1]


def train(cluster: Cluster) -> ev.StepCompleted:
    """Complete a batch and return the event that it is trained."""
    if cluster.state.steps.batch is None:
        last = almost_a_batch(cluster)
        cluster.reward(last.id)
    return cluster.trained()


def newer_version(cluster: Cluster) -> int:
    """Train a step and return its version, which is not published yet."""
    done = train(cluster)
    cluster.say("trainer-0", done)
    return done.version


def pulling(cluster: Cluster) -> Iterator[str]:
    """Yield replicas that have been ordered to pull the newest version, one after the other."""
    version = cluster.state.versions.newest
    if version < 1:
        version = newer_version(cluster)
    names = some(cluster)
    cluster.spread(version)
    for name in names:
        for t in work_of(cluster, name):
            cluster.finish(t.id)
        if f"pull:{name}" in cluster.state.orders.commands:
            yield name


# --- the coordinator's own ----------------------------------------------------------------------


def coordinator_started(cluster: Cluster) -> Story:
    yield "", cluster.started(2)


def heartbeat_lost(cluster: Cluster) -> Story:
    for name in some(cluster):
        yield "", cluster.silence(name)


def heartbeat_lost_node(cluster: Cluster) -> Story:
    for node in cluster.nodes[1 : 1 + TIMES]:
        yield "", cluster.silence(node)


def heartbeat_lost_relay(cluster: Cluster) -> Story:
    for relay in cluster.relays[1 : 1 + TIMES]:
        yield "", cluster.silence(relay)


def timer_progress(cluster: Cluster) -> Story:
    for name in some(cluster):
        yield "", ev.TimerFired(timer=f"progress:{name}")


def timer_resume(cluster: Cluster) -> Story:
    for name in list(cluster.state.work.lost)[:TIMES]:
        yield "", ev.TimerFired(timer=f"resume:{name}")


def timer_batch_wait(cluster: Cluster) -> Story:
    yield "", ev.TimerFired(timer="batch-timeout")


def timer_rejoin(cluster: Cluster) -> Story:
    for name in some(cluster):
        cluster.silent(name)
        yield "", ev.TimerFired(timer=f"rejoin:{name}")


def timer_score(cluster: Cluster) -> Story:
    for t in islice(running(cluster), TIMES):
        cluster.finish(t.id)
        yield "", ev.TimerFired(timer=f"command:score:{t.id}")


def batch_proposed(cluster: Cluster) -> Story:
    yield "", ev.BatchProposed(step_index=cluster.state.steps.chosen, groups=())


def drain_requested(cluster: Cluster) -> Story:
    yield "", ev.DrainRequested(reason="SIGINT")


# --- processes ----------------------------------------------------------------------------------


def actor_joined(cluster: Cluster) -> Story:
    for name in some(cluster):
        cluster.silent(name)
        yield name, cluster.joining(name, "b")


def actor_left(cluster: Cluster) -> Story:
    for name in some(cluster):
        yield name, ev.ActorLeft()


def actor_failed(cluster: Cluster) -> Story:
    for name in some(cluster):
        yield name, ev.ActorFailed(reason="it broke", user_error=False)


def process_exited(cluster: Cluster) -> Story:
    for name in some(cluster):
        actor = cluster.state.members.actors[name]
        exited = ev.ProcessExited(actor=name, boot_id=actor.boot_id, code=-9, restarting=True)
        yield actor.node, exited


def replica_ready(cluster: Cluster) -> Story:
    for name in some(cluster):
        cluster.replaced(name)
        yield name, ev.ReplicaReady(max_num_seqs=cluster.capacity, kv_capacity_tokens=1)


def relay_ready(cluster: Cluster) -> Story:
    for relay in cluster.relays[1 : 1 + TIMES]:
        cluster.replaced(relay)
        yield relay, ev.RelayReady(address="here", chain_address="here")


def trainer_ready(cluster: Cluster) -> Story:
    yield "trainer-0", ev.TrainerReady(num_parameters=1, weights_bytes=4)


def data_loaded(cluster: Cluster) -> Story:
    yield "store-0", ev.DataLoaded(num_train=1, num_eval=1, overlap=0, digest="d")


# --- steps and weights --------------------------------------------------------------------------


def step_completed(cluster: Cluster) -> Story:
    yield "trainer-0", train(cluster)


def trajectories_ended(cluster: Cluster) -> Story:
    cluster.say("trainer-0", train(cluster))
    ends = [
        o
        for o in cluster.state.orders.commands.values()
        if isinstance(o.command, cmd.EndTrajectories)
    ]
    yield "store-0", cluster.written(ends[0])


def publish_skipped(cluster: Cluster) -> Story:
    version = newer_version(cluster)
    yield "trainer-0", ev.PublishSkipped(version=version, step=version, reason="no slot")


def model_exported(cluster: Cluster) -> Story:
    yield "trainer-0", ev.ModelExported(version=1, path="export")


def checkpoint_saved(cluster: Cluster) -> Story:
    version = newer_version(cluster)
    yield "trainer-0", ev.CheckpointSaved(version=version, step=version, path="c", kept=(version,))


def weights_published(cluster: Cluster) -> Story:
    version = newer_version(cluster)
    yield cluster.relays[0], cluster.weights(cluster.relays[0], version)


def weights_received(cluster: Cluster) -> Story:
    version = newer_version(cluster)
    cluster.say(cluster.relays[0], cluster.weights(cluster.relays[0], version))
    for relay in cluster.relays[1 : 1 + TIMES]:
        yield relay, cluster.weights(relay, version)


def relay_linked(cluster: Cluster) -> Story:
    for relay in cluster.relays[1 : 1 + TIMES]:
        yield relay, ev.RelayLinked(command_id=1, successor="")


def transfer_problem(cluster: Cluster) -> Story:
    for relay in cluster.relays[1 : 1 + TIMES]:
        yield relay, ev.TransferProblem(kind="stalled", relay="", version=0, detail="")


def weights_loaded(cluster: Cluster) -> Story:
    for name in pulling(cluster):
        yield name, cluster.loaded(cluster.state.versions.newest)


def weights_rejected(cluster: Cluster) -> Story:
    for name in pulling(cluster):
        yield name, ev.WeightsRejected(version=1, reason="digest")


def version_missing(cluster: Cluster) -> Story:
    for name in pulling(cluster):
        yield name, ev.VersionMissing(version=1, held=(1,))


def checkpoint_refused(cluster: Cluster) -> Story:
    for name in pulling(cluster):
        yield name, ev.CheckpointRefused(version=0, reason="it cannot be read")


# --- trajectories -------------------------------------------------------------------------------


def trajectory_started(cluster: Cluster) -> Story:
    for t in islice(running(cluster, "dispatched"), TIMES):
        yield t.replica, cluster.begun(t.id)


def token_progress(cluster: Cluster) -> Story:
    for name in some(cluster):
        yield name, ev.TokenProgress(tokens_total=9, kv_used_tokens=0, running=1, waiting=0)


def trajectory_finished(cluster: Cluster) -> Story:
    for t in islice(running(cluster), TIMES):
        yield t.replica, cluster.finished(t.id)


def trajectory_failed(cluster: Cluster) -> Story:
    for t in islice(running(cluster), TIMES):
        failed = ev.TrajectoryFailed(
            trajectory_id=t.id, placement=t.placement, reason=FailureReason.STORE_REFUSED, detail=""
        )
        yield t.replica, failed


def trajectory_rewarded(cluster: Cluster) -> Story:
    for t in islice(running(cluster), TIMES):
        cluster.finish(t.id)
        yield t.replica, cluster.rewarded(t.id)


def group_rewarded(cluster: Cluster) -> Story:
    """Reward the last sibling of a group, which makes the group ready."""
    for t in islice(running(cluster), TIMES):
        state = cluster.state
        members = [state.work.trajectories[m] for m in state.work.groups[t.group].members]
        for member in members:
            cluster.finish(member.id)
            if member is not t:
                cluster.reward(member.id)
        yield t.replica, cluster.rewarded(t.id)


def batch_rewarded(cluster: Cluster) -> Story:
    """Reward the last trajectory of a batch, which starts a training step and new groups."""
    last = almost_a_batch(cluster)
    yield last.replica, cluster.rewarded(last.id)


STORIES: dict[str, Callable[[Cluster], Story]] = {
    story.__name__.replace("_", "-"): story
    for story in (
        coordinator_started, heartbeat_lost, heartbeat_lost_node, heartbeat_lost_relay,
        timer_progress, timer_resume, timer_batch_wait, timer_rejoin, timer_score,
        batch_proposed, drain_requested,
        actor_joined, actor_left, actor_failed, process_exited, replica_ready, relay_ready,
        trainer_ready, data_loaded,
        step_completed, trajectories_ended, publish_skipped, model_exported, checkpoint_saved,
        weights_published, weights_received, relay_linked, transfer_problem,
        weights_loaded, weights_rejected, version_missing, checkpoint_refused,
        trajectory_started, token_progress, trajectory_finished, trajectory_failed,
        trajectory_rewarded, group_rewarded, batch_rewarded,
    )
}  # fmt: skip
