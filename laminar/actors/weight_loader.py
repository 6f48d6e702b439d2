"""Loads of weights into an engine, with proof that they arrived unchanged.

Reads   PullWeights commands; leased slots of the relay on this machine; checkpoints
Emits   WeightsLoaded, WeightsRejected, VersionMissing, CheckpointRefused

A stream copies the part that the relay has so far while the rest arrives; work waits in the engine
and is sampled once the version is proved.

Two proofs: the digest of the loaded bytes, taken after the load (a slot must not have changed
during the read), and the probe: the engine scores a few fixed sequences and must agree with the
trainer. A correct digest with a wrong probe means a tensor in the wrong place.

The relay may die at any moment and return without versions, and with its arena under another name:
bytes with the right digest are good, all others are requested again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from laminar.actors.active_sequence import LoadedWeights
from laminar.actors.host import Host
from laminar.actors.service_clients import RelayClient
from laminar.engines import protocol
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import PullPurpose
from laminar.net.calls import RpcError
from laminar.weights import messages as m
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, WeightsCorrupt

LOADS_MAX = 2
"""Loads per pull: a failed digest is retried once, the second failure is reported.

A load in flight is not retried, because tokens sampled since then are worthless.
"""
REVOKED = "the lease was revoked while the slot was read"
COMING_POLL_S = 0.05  #: interval of requests to a relay for a version that it is receiving
RELEASE_S = 5.0
"""Time limit for a release, so that a dead relay does not keep a loaded replica from serving."""


class NotReadable(RuntimeError):
    """The bytes of a version do not exist, or no longer do."""


class SlotArena(Protocol):
    """The memory of a relay on this machine."""

    def get_slot_offset(self, index: int) -> int:
        """Return the offset of a slot in its file, bytes."""
        ...

    def get_slot(self, index: int) -> Bytes:
        """Return the bytes of a slot, uint8 [slot_bytes], which the relay may write to."""
        ...


class CheckpointBytes(Protocol):
    """A version in separate memory."""

    @property
    def manifest(self) -> mf.Manifest: ...

    @property
    def view(self) -> Bytes: ...

    @property
    def path(self) -> str:
        """The path by which an engine can open it."""
        ...

    def close(self) -> None:
        """Close the copy; its memory is freed once no reader has it."""


class WeightFiles(Protocol):
    """The bytes of versions that a replica can reach."""

    def attach_arena(self, arena: str) -> SlotArena:
        """Map the memory of a relay by its path; NotReadable."""
        ...

    async def read_checkpoint(self, directory: Path, version: int) -> CheckpointBytes:
        """Read a version, proved by its digest; NotReadable."""
        ...

    async def verify_weights(self, view: Bytes, manifest: mf.Manifest) -> None:
        """Check the digest of a version; WeightsCorrupt, ManifestError."""


class Leases:
    """Leases of slots of the relay on this machine, held during reads."""

    def __init__(self, host: Host, relay: RelayClient, files: WeightFiles) -> None:
        self._host, self._relay, self._files = host, relay, files
        self._arena: SlotArena | None = None
        self._arena_path = ""  #: a restarted relay has another

    async def take_lease(
        self, order: cmd.Envelope, command: cmd.PullWeights, copy: int = -1
    ) -> m.VersionLeased | m.VersionArriving | m.VersionUnavailable:
        """Lease a slot and map its arena, waiting for a version that the relay expects.

        A relay that is dead or ending holds nothing. `copy`: number of the copy known here.
        """
        request = m.LeaseVersion(
            version=command.version,
            exact=command.exact,
            holder=command.holder,
            address=command.address,
            order=order.command_id,
            stream=command.purpose == PullPurpose.STREAM,
            copy=copy,
        )
        try:
            lease: m.VersionLeased | m.VersionArriving | m.VersionPending | m.VersionUnavailable = (
                m.VersionPending()
            )
            while isinstance(lease, m.VersionPending):  # the order to load has a deadline
                lease = await self._relay.send_request(
                    request,
                    m.VersionLeased,
                    m.VersionArriving,
                    m.VersionPending,
                    m.VersionUnavailable,
                )
                if isinstance(lease, m.VersionPending):
                    await asyncio.sleep(COMING_POLL_S)
            if not isinstance(lease, m.VersionUnavailable) and self._arena_path != lease.arena:
                self._arena = self._files.attach_arena(lease.arena)
                self._arena_path = lease.arena
        except (RpcError, TimeoutError, NotReadable) as error:
            self._host.log.warning("not-leased", version=command.version, reason=str(error))
            return m.VersionUnavailable(held=())
        return lease

    async def release(self, lease: m.VersionLeased) -> bool:
        """Release a lease; return whether the slot was surely not written during the read.

        If the relay is slow or dead, the digest, checked after the load, decides.
        """
        request = m.ReleaseLease(arena=lease.arena, lease_id=lease.lease_id)
        try:
            released: m.LeaseReleased | m.ArenaReplaced = await self._relay.send_request(
                request, m.LeaseReleased, m.ArenaReplaced, timeout_s=RELEASE_S
            )
        except TimeoutError:
            return True
        return isinstance(released, m.ArenaReplaced) or released.valid

    def bytes_of(self, lease: m.VersionLeased) -> Bytes:
        """Return the slot's bytes, in the arena that was mapped last."""
        assert self._arena is not None
        return self._arena.get_slot(lease.slot)

    def make_source(
        self, lease: m.VersionLeased | m.VersionArriving, manifest: mf.Manifest
    ) -> protocol.WeightSource:
        """Describe where the tensors of a version with this layout are."""
        assert self._arena is not None
        offset = self._arena.get_slot_offset(lease.slot)
        return source_of(lease.arena, offset, manifest.tensors, manifest.total_bytes)


class WeightLoader:
    """The weights of one replica: loaded versions, and their loads."""

    def __init__(
        self, host: Host, relay: RelayClient, engine: protocol.ReplicaEngine, files: WeightFiles
    ) -> None:
        self.host, self.engine, self._files = host, engine, files
        self._leases = Leases(host, relay, files)
        #: digest and number of the served version; empty and -1: none
        self.digest, self.version = "", -1
        self.coming = -1  #: version being streamed; -1: none
        self._expected: Awaitable[None]  #: the engine accepts work for it from then on
        self.proved = 0  #: last load with correct digest and probe, as TokenDelta counts
        self._loads = 0  #: loads begun
        self._weights: dict[int, LoadedWeights] = {}  #: weights of the last loads
        self.probe_diff, self.probe_kl = 0.0, 0.0
        #: seconds of the last load including its digest, and of its probe
        self._took: dict[str, float] = {}

    def get_weights(self, load: int) -> LoadedWeights:
        """Return the weights after this load, one of the last two; 0: after the last."""
        return self._weights[load or self._loads]

    def expect_version(self, version: int) -> None:
        """Accept work for a version before any of it is here; a streaming pull follows."""
        self._clear_served()
        self._loads += 1
        self.coming, self._expected = version, self.engine.expect_weights()

    async def pull_weights(self, order: cmd.Envelope, command: cmd.PullWeights) -> None:
        """Lease, load, prove, release, report."""
        if command.purpose == PullPurpose.STREAM:
            return await self._stream_weights(order, command)
        in_flight = command.purpose == PullPurpose.IN_FLIGHT
        if command.checkpoint:
            return await self._pull_from_disk(order, command)
        started = self.host.now_ns()
        failure: str | None = None
        for _ in range(1 if in_flight else LOADS_MAX):
            lease = await self._leases.take_lease(order, command)
            if isinstance(lease, m.VersionUnavailable):
                if failure:  # what the engine had is gone, too
                    return self._report_rejected(order, command.version, failure)
                return self._report_gone(order, command.version, lease)
            assert isinstance(lease, m.VersionLeased)  # only a stream gets partial versions
            await self.host.hit_failpoint("rollout-leased")
            manifest = mf.decode(lease.manifest)
            reloaded = manifest.digest != self.digest
            failure = await self._load(lease, manifest, in_flight) if reloaded else None
            valid = await self._leases.release(lease)
            if valid and not failure:
                await self.host.hit_failpoint("rollout-loaded")
                return self._report_loaded(order, manifest, started, reloaded)
            failure = failure or REVOKED
            self._clear_served()
        self._report_rejected(order, manifest.version, failure or REVOKED)

    async def _stream_weights(self, order: cmd.Envelope, command: cmd.PullWeights) -> None:
        """Copy a version as it arrives, prove it, report, and let the engine sample.

        A failure is not retried here, because the complete version is available by then.
        """
        started = self.host.now_ns()
        try:
            await self._expected
            lease, source, begun = await self._follow_copy(order, command)
        except protocol.EngineError as error:
            return self._report_rejected(order, command.version, str(error))
        if isinstance(lease, m.VersionUnavailable):
            self.coming = -1
            return self._report_gone(order, command.version, lease)
        await self.host.hit_failpoint("rollout-leased")
        manifest = mf.decode(lease.manifest)
        rest = self.engine.load_partial(source, source.nbytes)
        failure = await self._verify_load(rest, self._leases.bytes_of(lease), manifest, begun)
        valid = await self._leases.release(lease)
        if failure or not valid:
            return self._report_rejected(order, command.version, failure or REVOKED)
        await self.host.hit_failpoint("rollout-loaded")
        self.coming = -1
        self._report_loaded(order, manifest, started, True)
        await self.engine.resume_sampling()

    async def _follow_copy(
        self, order: cmd.Envelope, command: cmd.PullWeights
    ) -> tuple[m.VersionLeased | m.VersionUnavailable, protocol.WeightSource, int]:
        """Copy the proved part of one relay copy until it is complete or gone.

        The last value returned is the time of its first bytes, ns.
        """
        source, copy, begun, here = protocol.WeightSource("", 0, 0, ()), -1, 0, 0
        while True:
            lease = await self._leases.take_lease(order, command, copy)
            if isinstance(lease, m.VersionUnavailable):
                return lease, source, begun
            former = source.path not in ("", lease.arena)  # of a relay that has restarted
            if former or copy not in (-1, lease.copy):  # its slot was given away
                if isinstance(lease, m.VersionLeased):
                    await self._leases.release(lease)
                return m.VersionUnavailable(held=()), source, begun
            if copy < 0:
                copy, begun = lease.copy, self.host.now_ns()
                manifest = (
                    mf.decode(lease.manifest)
                    if isinstance(lease, m.VersionLeased)
                    else lease.manifest
                )
                assert manifest is not None, lease  # it is left out only if the reader knows it
                self._note_weights(manifest)
                source = self._leases.make_source(lease, manifest)
            if isinstance(lease, m.VersionLeased):
                return lease, source, begun
            if lease.num_bytes > here:
                here = lease.num_bytes
                await self.engine.load_partial(source, here)
            else:
                await asyncio.sleep(COMING_POLL_S)

    async def _pull_from_disk(self, order: cmd.Envelope, command: cmd.PullWeights) -> None:
        """Load a version that the relays evicted; its bytes are proved before the load."""
        started = self.host.now_ns()
        directory = self.host.run_dir / command.checkpoint
        try:
            version = await self._files.read_checkpoint(directory, command.version)
        except NotReadable as error:
            reason = str(error)[:500]
            refused = ev.CheckpointRefused(version=command.version, reason=reason)
            return self.host.emit(refused, event_seq=order.cause, reason=reason)
        manifest = version.manifest
        reloaded = manifest.digest != self.digest
        source = source_of(version.path, 0, manifest.tensors, manifest.total_bytes)
        failure = await self._load_from(version.view, source, manifest) if reloaded else None
        version.close()
        if not failure:
            return self._report_loaded(order, manifest, started, reloaded)
        self._report_rejected(order, manifest.version, failure)

    def _clear_served(self) -> None:
        self.digest, self.version = "", -1

    async def _load(
        self, lease: m.VersionLeased, manifest: mf.Manifest, in_flight: bool
    ) -> str | None:
        source = self._leases.make_source(lease, manifest)
        on_update = self.host.config.rollout.kv_on_update if in_flight else None
        return await self._load_from(self._leases.bytes_of(lease), source, manifest, on_update)

    async def _load_from(
        self,
        view: Bytes,
        source: protocol.WeightSource,
        manifest: mf.Manifest,
        on_update: protocol.KvOnUpdate | None = None,
    ) -> str | None:
        """Load a version with bytes `view` and check it; return the failure, if any."""
        if on_update is None:
            self._clear_served()
        self._loads += 1
        self._note_weights(manifest)
        begun = self.host.now_ns()
        return await self._verify_load(self.engine.load(source, on_update), view, manifest, begun)

    async def _verify_load(
        self, load: Awaitable[None], view: Bytes, manifest: mf.Manifest, begun: int
    ) -> str | None:
        """Finish a load begun at `begun` (ns) and prove it; return the failure, if any."""
        try:
            await load
            await self._files.verify_weights(view, manifest)
            proved = self.host.now_ns()
            found = await probe_difference(self.engine, manifest.probe)
        except (WeightsCorrupt, protocol.EngineError, mf.ManifestError) as error:
            return str(error)
        ended = self.host.now_ns()
        self._took = {"load_s": (proved - begun) / 1e9, "probe_s": (ended - proved) / 1e9}
        self.probe_diff, self.probe_kl = found.largest, found.mean_k3
        failure = find_probe_failure_reason(found, manifest.probe) if manifest.probe else None
        if not failure:
            self.digest = manifest.digest
        return failure

    def _note_weights(self, manifest: mf.Manifest) -> None:
        """Note the weights since the last load, or from now on if nothing was loaded."""
        before = self._weights.get(self._loads - 1)
        self._weights = {} if before is None else {before.load: before}
        self._weights[self._loads] = LoadedWeights(self._loads, manifest.version, manifest.step)

    def _report_loaded(
        self, order: cmd.Envelope, manifest: mf.Manifest, started_ns: int, reloaded: bool
    ) -> None:
        ended = self.host.now_ns()
        self.version, self.proved = manifest.version, self._loads
        self._note_weights(manifest)
        self.host.record_span("pulling", started_ns, ended, version=manifest.version)
        loaded = ev.WeightsLoaded(
            version=manifest.version,
            step=manifest.step,
            digest=manifest.digest,
            probe_diff=self.probe_diff,
            probe_kl=self.probe_kl,
            seconds=(ended - started_ns) / 1e9,
            reloaded=reloaded,
            num_bytes=manifest.total_bytes,
        )
        facts = {"version": manifest.version, "digest": manifest.digest}
        took = self._took if reloaded else {}
        self.host.emit(loaded, event_seq=order.cause, **facts, **took)

    def _report_gone(self, order: cmd.Envelope, version: int, lease: m.VersionUnavailable) -> None:
        gone = ev.VersionMissing(version=version, held=lease.held)
        self.host.emit(gone, event_seq=order.cause, version=version)

    def _report_rejected(self, order: cmd.Envelope, version: int, failure: str) -> None:
        self._clear_served()
        self.coming = -1
        rejected = ev.WeightsRejected(version=version, reason=failure[:500])
        self.host.emit(rejected, event_seq=order.cause, version=version, reason=failure)


def source_of(
    path: str, offset: int, tensors: Iterable[mf.TensorSpec], nbytes: int
) -> protocol.WeightSource:
    """Describe a version to an engine."""
    places = (protocol.TensorPlace(t.name, t.dtype, t.shape, t.offset) for t in tensors)
    return protocol.WeightSource(path, offset, nbytes, tuple(places))


class ProbeDifference(NamedTuple):
    """|log p(engine) - log p(trainer)| over the probe, nats; nan counts as infinite."""

    mean: float
    largest: float
    mean_k3: float = 0.0  #: estimated KL(engine, trainer), as mismatch_kl/mean of a step


async def probe_difference(
    engine: protocol.ReplicaEngine, probe: mf.Probe | None
) -> ProbeDifference:
    """Have the engine score the probe, and return the difference."""
    if probe is None:
        return ProbeDifference(0.0, 0.0)
    scores = await engine.compute_logprobs([list(s) for s in probe.sequences])
    log_ratios = [
        theirs - ours
        for row, expected in zip(scores, probe.logprobs, strict=True)
        for ours, theirs in zip(row, expected, strict=True)
    ]
    mean = sum(map(abs, log_ratios)) / len(log_ratios)
    if mean != mean:
        return _INFINITE
    k3 = (math.expm1(min(x, K3_LOG_RATIO_MAX)) - x for x in log_ratios)
    return ProbeDifference(mean, max(map(abs, log_ratios)), sum(k3) / len(log_ratios))


_INFINITE = ProbeDifference(math.inf, math.inf, math.inf)
K3_LOG_RATIO_MAX = 20.0
"""The largest log-ratio that is exponentiated, as in the trainer's mismatch."""


def find_probe_failure_reason(found: ProbeDifference, probe: mf.Probe) -> str | None:
    """Return why these are not the trainer's weights; None: they are.

    A wrong tensor shifts all log-probs, which the mean shows; rounding shifts a few of them far.
    """
    pairs = (
        (found.mean, probe.mean_tolerance, "on average"),
        (found.largest, probe.tolerance, "at one token"),
    )
    for difference, limit, where in pairs:
        if not difference <= limit:
            return (
                f"the engine's log-probs of the probe differ from the trainer's by "
                f"{difference:.3g} {where}, more than {limit:.3g}"
            )
    return None
