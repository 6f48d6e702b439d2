"""The rollout's model: one replica that generates, hands over tokens, scores and pulls weights.

Reads   GenerateTrajectory, ScoreTrajectories, PullWeights, AbortTrajectories
        checkpoints that the trainer has written
Emits   ReplicaReady, TrajectoryStarted/Finished/Failed/Rewarded, TokenProgress, WeightsLoaded, ...

It follows actors/rollout.py: store first, event second; one flush at a time; a refused flush lets
go of the trajectory; a pull lets go of everything, also of what the store has not opened yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from laminar import ids
from laminar.core.scores import bits_of
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.sim.models import relay as r
from laminar.sim.models import store as s
from laminar.sim.models.engine import Sequence, SimEngine
from laminar.sim.models.idle import Idle
from laminar.sim.process import EXIT_KILLED
from laminar.sim.scenario import seconds
from laminar.sim.scheduler import MS
from laminar.storage.rules import Chunk, Row
from laminar.weights.slots import VersionGone

FINISH_DELAY_NS = 2 * MS
LOADS_MAX = 2
STORE = "store-0"


@dataclass(slots=True)
class Running:
    """A trajectory here: what is not in the store yet, and where that begins."""

    command: cmd.GenerateTrajectory
    sequence: Sequence
    stored: int
    finished: bool = False


class Rollout(Idle):
    """One engine and what surrounds it."""

    def start(self) -> None:
        self.opening: dict[str, cmd.GenerateTrajectory] = {}
        self.running: dict[str, Running] = {}
        self.digest, self.version = "", -1  #: of what the engine serves
        self._relay = ids.actor_name("relay", self.process.node, 0)
        self.engine = SimEngine(
            self.process, self.scenario.engine, self.scenario.slots, self._on_finished
        )
        self._flushing = False
        self._flush_again = False
        self._finish_due = False
        start_s = self.chance.uniform(0, self.scenario.start_s)  # also of a slow one
        self.process.after(seconds(start_s), self._ready)

    def _ready(self) -> None:
        taken = self.scenario.slots + self.scenario.settings.group_size
        self.process.emit(ev.ReplicaReady(max_num_seqs=taken, kv_capacity_tokens=1_000_000))
        self.process.after(self.scenario.progress_ns, self._report_progress)

    def pause(self) -> None:
        if self.process.welcomed:
            self.engine.freeze()

    def resume(self) -> None:
        if self.process.welcomed:
            self.engine.thaw()

    def handle(self, order: cmd.Order, command: Command) -> None:
        if isinstance(command, cmd.GenerateTrajectory):
            self._open(command)
        elif isinstance(command, cmd.ScoreTrajectories):
            self._score(command)
        elif isinstance(command, cmd.PullWeights):
            self._let_go_of_all()
            self._pull(command, 1)
        elif isinstance(command, cmd.AbortTrajectories):
            for item in command.items:
                self._let_go(item.trajectory, item.placement)

    # --- starting a trajectory --------------------------------------------------------------------

    def _open(self, command: cmd.GenerateTrajectory) -> None:
        self._let_go(command.trajectory, command.placement)
        self.opening[command.trajectory] = command
        asked = Row(
            id=command.trajectory,
            group_id=command.group,
            sibling=command.sibling,
            purpose=command.purpose,
            row_index=command.row_index,
            attempt=command.attempt,
            placement=command.placement,
            replica=self.process.name,
            weight_version=command.version,
            version_step=command.step,
            temperature=0.0 if command.purpose == ids.EVAL else 1.0,
        )
        self.process.client.call(STORE, s.Open(asked), partial(self._opened, command))

    def _opened(self, command: cmd.GenerateTrajectory, reply: s.Opened) -> None:
        if self.opening.get(command.trajectory) is not command:
            return self.world.marks.hit("rollout:opening-taken-back")
        del self.opening[command.trajectory]
        if reply.answer == "open":
            self._generate(command, reply.num_tokens)
        elif reply.answer in ("generated", "rewarded"):  # only the report was lost
            self._report_finished(command, reply.num_tokens, reply.finish_reason)
        elif reply.answer == "refused":
            self._report_failed(command.trajectory, command.placement, "store-refused")

    def _generate(self, command: cmd.GenerateTrajectory, done: int) -> None:
        self.world.checks.generates(command, self.version)
        total = self.scenario.lengths.of(command.seed)
        hangs = self.world.faults.hangs(command)
        sequence = Sequence(_request_id(command), done, total, hangs)
        self.running[command.trajectory] = Running(command, sequence, stored=done)
        started = ev.TrajectoryStarted(
            trajectory=command.trajectory, placement=command.placement, tokens_resumed=done
        )
        self.process.emit(started)
        if self.world.faults.poisonous(command):
            self.world.checks.poisoned(command, self.process.node)
            self.process.after(seconds(0.1), self.process.die, EXIT_KILLED)
        elif self.world.faults.refuses(command):
            self._give_up(command.trajectory, "bad-logprobs")
        elif done >= total:
            self._on_finished([sequence.id])
        else:
            self.engine.add(sequence)

    def _give_up(self, trajectory: str, reason: str) -> None:
        running = self.running.pop(trajectory)
        self.engine.abort(running.sequence.id)
        self._report_failed(trajectory, running.command.placement, reason)

    def _let_go(self, trajectory: str, placement: int) -> None:
        """Forget a trajectory under this placement and older ones."""
        opening, running = self.opening.get(trajectory), self.running.get(trajectory)
        if opening is not None and opening.placement <= placement:
            del self.opening[trajectory]
        if running is not None and running.command.placement <= placement:
            del self.running[trajectory]
            self.engine.abort(running.sequence.id)

    def _let_go_of_all(self) -> None:
        """A pull means that nothing is wanted here; an abort that was lost must not block it."""
        self.opening.clear()
        for running in self.running.values():
            self.engine.abort(running.sequence.id)
        self.running.clear()

    # --- tokens -------------------------------------------------------------------------------

    def _on_finished(self, finished: list[str]) -> None:
        for request_id in finished:
            trajectory, _, placement = request_id.rpartition("@")
            running = self.running.get(trajectory)
            if running is not None and running.command.placement == int(placement):
                running.finished = True
                if not self._finish_due:
                    self._finish_due = True
                    self.process.after(FINISH_DELAY_NS, self._flush_finished)

    def _flush_finished(self) -> None:
        self._finish_due = False
        self._flush(everything=False)

    def _flush(self, *, everything: bool) -> None:
        """Hand over new tokens (of what has ended, or of everything), then what has ended."""
        if self._flushing:
            self._flush_again = True
            return
        chosen = [r for r in self.running.values() if everything or r.finished]
        appends = tuple(item for r in chosen if (item := self._take_chunk(r)) is not None)
        ended = tuple(r for r in chosen if r.finished)
        finishes = tuple(
            s.Finish(r.command.trajectory, r.command.placement, self._reason(r), r.stored)
            for r in ended
        )
        if appends or finishes:
            self._flushing = True
            then = partial(self._flushed, appends, ended)
            self.process.client.call(STORE, s.Flush(appends, finishes), then)

    def _take_chunk(self, running: Running) -> s.Append | None:
        sequence = running.sequence
        now = sequence.total if running.finished else self.engine.tokens(sequence)
        start, running.stored = running.stored, max(now, running.stored)
        if running.stored == start:
            return None
        seed = running.command.seed
        tokens = s.tokens_of(seed, start, running.stored)
        chunk = Chunk(0, start, tokens, s.logprobs_of(running.stored - start))
        return s.Append(running.command.trajectory, running.command.placement, chunk)

    def _flushed(
        self,
        appends: tuple[s.Append, ...],
        ended: tuple[Running, ...],
        reply: tuple[tuple[str, str], ...],
    ) -> None:
        self._flushing = False
        for append, (answer, _) in zip(appends, reply, strict=False):
            if answer != "ok":
                self._not_taken(append.trajectory, append.placement, answer)
        for running, (answer, _) in zip(ended, reply[len(appends) :], strict=True):
            command = running.command
            if self.running.get(command.trajectory) is not running:
                continue  # refused with its last tokens, or aborted meanwhile
            if answer != "ok":
                self._not_taken(command.trajectory, command.placement, answer)
                continue
            del self.running[command.trajectory]
            self._report_finished(command, running.stored, self._reason(running))
        if self._flush_again:
            self._flush_again = False
            self._flush(everything=False)

    def _not_taken(self, trajectory: str, placement: int, answer: str) -> None:
        """Fenced: somebody else has it now. Refused: these tokens can never be trained."""
        running = self.running.get(trajectory)
        if running is None or running.command.placement != placement:
            return
        del self.running[trajectory]
        self.engine.abort(running.sequence.id)
        self.world.marks.hit(f"rollout:{answer}")
        if answer == "refused":
            self._report_failed(trajectory, placement, "store-refused")

    def _reason(self, running: Running) -> str:
        return "length" if running.sequence.total >= self.scenario.lengths.limit else "stop"

    # --- reports ------------------------------------------------------------------------------

    def _report_finished(self, command: cmd.GenerateTrajectory, tokens: int, reason: str) -> None:
        finished = ev.TrajectoryFinished(
            trajectory=command.trajectory,
            placement=command.placement,
            num_tokens=tokens,
            finish_reason=reason,
        )
        self.process.emit(finished)

    def _report_failed(self, trajectory: str, placement: int, reason: str) -> None:
        failed = ev.TrajectoryFailed(
            trajectory=ids.TrajectoryId(trajectory), placement=placement, reason=reason, detail=""
        )
        self.process.emit(failed)

    def _report_progress(self) -> None:
        """One gauge per interval, and the tokens so far into the store in the same rhythm."""
        self.engine.advance()
        self._flush(everything=True)
        progress = ev.TokenProgress(
            tokens_total=self.engine.tokens_total(),
            kv_used_tokens=0,
            running=self.engine.running,
            waiting=self.engine.waiting,
        )
        self.process.gauge(progress)
        self.process.after(self.scenario.progress_ns, self._report_progress)

    # --- rewards ------------------------------------------------------------------------------

    def _score(self, command: cmd.ScoreTrajectories) -> None:
        request = s.Fetch(tuple(item.trajectory for item in command.items))
        self.process.client.call(STORE, request, partial(self._fetched, command))

    def _fetched(self, command: cmd.ScoreTrajectories, rows: tuple[Row, ...]) -> None:
        duration = self.scenario.score_s * self.chance.uniform(0.5, 1.5)
        duration *= self.world.faults.reward_slow
        self.process.compute(duration, self._scored, command, rows)

    def _scored(self, command: cmd.ScoreTrajectories, rows: tuple[Row, ...]) -> None:
        failure = self.world.faults.reward_failure(command)
        if failure:
            for item in command.items:
                self._report_failed(item.trajectory, item.placement, failure)
            return
        reasons = [self.world.faults.reward_reason() for _ in rows]
        rewards = tuple(
            s.Reward(item.trajectory, item.placement, _score_of(row, reason), reason)
            for item, row, reason in zip(command.items, rows, reasons, strict=True)
        )
        then = partial(self._rewarded, command, rows)
        self.process.client.call(STORE, s.Rewards(rewards), then)

    def _rewarded(
        self,
        command: cmd.ScoreTrajectories,
        rows: tuple[Row, ...],
        reply: tuple[s.Rewarded, ...],
    ) -> None:
        for item, row, (answer, score, reason) in zip(command.items, rows, reply, strict=True):
            if answer == "refused":
                self._report_failed(item.trajectory, item.placement, "store-refused")
            elif answer != "fenced" and score is not None:
                rewarded = ev.TrajectoryRewarded(
                    trajectory=item.trajectory,
                    placement=item.placement,
                    score_bits=bits_of(score),
                    correct=score >= 1.0 and row.finish_reason != "length",
                    reason=reason,
                    num_tokens=row.num_tokens,
                    truncated=row.finish_reason == "length",
                    extras={"half": score / 2} if command.purpose == ids.EVAL else {},
                )
                self.process.emit(rewarded)

    # --- weights ------------------------------------------------------------------------------

    def _pull(self, command: cmd.PullWeights, load: int) -> None:
        if command.checkpoint:
            duration = self.scenario.load_s * self.chance.uniform(1, 3)
            return self.process.compute(duration, self._read, command)
        request = r.Lease(command.version, command.exact)
        self.process.client.call(self._relay, request, partial(self._leased, command, load))

    def _read(self, command: cmd.PullWeights) -> None:
        """Load from disk; it may have been removed, and bytes may have changed there."""
        found = self.world.checkpoints.get(command.checkpoint)
        if found is None or self.world.faults.corrupts_weights():
            reason = "it is not there" if found is None else "wrong digest"
            return self.process.emit(ev.CheckpointRefused(version=command.version, reason=reason))
        self._serve(command, found.version, found.step, found.digest)

    def _leased(self, command: cmd.PullWeights, load: int, lease: r.Leased | VersionGone) -> None:
        if isinstance(lease, VersionGone):
            if load > 1:  # what the engine had is gone, too
                return self._rejected(command.version)
            return self.process.emit(ev.VersionGone(version=command.version, held=lease.held))
        reloaded = lease.digest != self.digest
        duration = self.scenario.load_s * self.chance.uniform(0.5, 1.5) if reloaded else 0.0
        corrupt = reloaded and self.world.faults.corrupts_weights()
        self.process.compute(duration, self._loaded, command, load, lease, corrupt)

    def _loaded(self, command: cmd.PullWeights, load: int, lease: r.Leased, corrupt: bool) -> None:
        then = partial(self._released, command, load, lease, corrupt)
        release = r.Release(lease.boot, lease.lease_id)
        self.process.client.call(self._relay, release, then)

    def _released(
        self, command: cmd.PullWeights, load: int, lease: r.Leased, corrupt: bool, valid: bool
    ) -> None:
        if valid and not corrupt:
            return self._serve(command, lease.version, lease.step, lease.digest)
        self.digest, self.version = "", -1
        if load < LOADS_MAX:
            return self._pull(command, load + 1)
        self._rejected(lease.version)

    def _rejected(self, version: int) -> None:
        self.process.emit(ev.WeightsRejected(version=version, reason="digest"))

    def _serve(self, command: cmd.PullWeights, version: int, step: int, digest: str) -> None:
        self.world.checks.loaded(command, version, digest)
        loaded = ev.WeightsLoaded(
            version=version,
            step=step,
            digest=digest,
            probe_diff=0.0,
            seconds=self.scenario.load_s,
            reloaded=digest != self.digest,
        )
        self.digest, self.version = digest, version
        self.process.emit(loaded)


def _request_id(command: cmd.GenerateTrajectory) -> str:
    return f"{command.trajectory}@{command.placement}"


def _score_of(row: Row, reason: str) -> float:
    """Right or wrong, by the trajectory: the same on every replica; 0 where the reward failed."""
    if reason != "ok":
        return 0.0
    return float(ids.hash64(row.id, row.attempt, "score") % 2)
