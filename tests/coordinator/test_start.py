"""A coordinator comes back: from a snapshot where it can, and says from which."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from laminar.config import Config
from laminar.config.tasks import EnvConfig
from laminar.config.tree import CoordinatorConfig
from laminar.coordinator.loop import Coordinator
from laminar.coordinator.tick import HandlingFailed
from laminar.core.machine import HANDLING
from laminar.core.state.state import hash_state
from laminar.eventlog.record import MAX_HEADER_BYTES
from laminar.eventlog.snapshot import read_snapshots
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.codec import encode
from laminar.net.client import coordinator_address, write_address
from laminar.net.session import RunOver
from laminar.net.transport import PortTaken
from laminar.net.user_requests import is_coordinator_alive
from laminar.run.user_file import run_file_digests
from tools.kit.memory_disk import MemoryDisk
from tools.kit.secrets import KEYS
from tools.kit.sim_worlds import LoggedRun


@pytest.fixture(scope="module")
def world() -> LoggedRun:
    return LoggedRun(segment_bytes=MAX_HEADER_BYTES, snapshot_every=30).run()


def run_dir_of(disk: MemoryDisk, run_dir: Path) -> Path:
    (run_dir / "events").mkdir(parents=True)
    for name, data in disk.files.items():
        (run_dir / "events" / name).write_bytes(data)
    return run_dir


def start(
    run_dir: Path, replay_from: int | None = None, config: Config | None = None
) -> tuple[Coordinator, list[int], list[dict[str, object]]]:
    """The coordinator, the events that were replayed, and what was logged."""
    seen: list[int] = []
    with capture_logs() as logged:
        coordinator = Coordinator(
            config or Config(),
            run_dir,
            KEYS,
            on_replayed=lambda stamped, commands, state: seen.append(stamped.seq),
            on_event=lambda stamped, commands, state: None,
            replay_from=replay_from,
        )
    return coordinator, seen, [dict(entry) for entry in logged]


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logs that a test opened are closed behind it."""
    opened: list[Coordinator] = []
    init = Coordinator.__init__

    def remember(self: Coordinator, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        opened.append(self)

    monkeypatch.setattr(Coordinator, "__init__", remember)
    yield
    for coordinator in opened:
        coordinator.tick.log.close()
        coordinator.socket.close()


def test_the_newest_snapshot_is_where_it_begins(world: LoggedRun, tmp_path: Path) -> None:
    newest, _ = read_snapshots(world.disk).usable
    coordinator, seen, logged = start(run_dir_of(world.disk, tmp_path / "run"))
    assert hash_state(coordinator.tick.machine.state) == hash_state(world.state)
    assert seen == list(range(newest.seq + 1, world.state.seq + 1))
    (started,) = logged
    assert (started["event"], started["snapshot"]) == ("started", newest.name)
    assert started["replayed_events"] == len(seen)


def test_an_observer_can_ask_for_more(world: LoggedRun, tmp_path: Path) -> None:
    _, seen, logged = start(run_dir_of(world.disk, tmp_path / "run"), replay_from=1)
    assert seen == list(range(1, world.state.seq + 1))
    assert logged[-1]["snapshot"] is None


def test_the_log_has_the_digests_of_the_users_files(world: LoggedRun, tmp_path: Path) -> None:
    mine = tmp_path / "games.py"
    mine.write_text("class Game: ...")
    config = Config(env=EnvConfig(path=str(mine)))
    coordinator, _, _ = start(run_dir_of(world.disk, tmp_path / "run"), config=config)
    (started,) = [e for e in coordinator._own if isinstance(e, ev.CoordinatorStarted)]
    assert started.files == run_file_digests(config) and list(started.files) == [str(mine)]
    bare = encode(msgspec.structs.replace(started, files={}))
    assert "files" not in msgspec.msgpack.decode(bare)


def test_a_snapshot_that_is_passed_over_is_reported(world: LoggedRun, tmp_path: Path) -> None:
    newest, older = read_snapshots(world.disk).usable
    run_dir = run_dir_of(world.disk, tmp_path / "run")
    file = run_dir / "events" / newest.name
    file.write_bytes(file.read_bytes()[:-1])
    _, _, logged = start(run_dir)
    assert logged[0]["event"] == "snapshot-passed-over"
    assert (logged[0]["file"], logged[0]["reason"]) == (newest.name, "it is damaged")
    assert logged[1]["snapshot"] == older.name
    assert not file.exists()


async def test_an_event_that_cannot_be_handled_ends_the_run_until_a_build_handles_it(
    tmp_path: Path, world: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process log has the event, its story and the exception, the event log has nothing of it,
    and the processes of the run leave; the next coordinator resumes the run from its log."""
    run_dir = run_dir_of(world.disk, tmp_path / "run")
    coordinator, _, _ = start(run_dir)
    before = {path.name: path.read_bytes() for path in (run_dir / "events").iterdir()}

    def broken(turn: object, event: Event) -> None:
        raise KeyError("0.3.1")

    asked = ev.DrainRequested(reason="rollout-0 is wanted elsewhere")
    with monkeypatch.context() as patch, capture_logs() as logged:
        patch.setitem(HANDLING, type(asked), HANDLING[type(asked)]._replace(handler=broken))
        coordinator.report_event(asked)
        with pytest.raises(
            HandlingFailed, match=r"drain-requested of coordinator cannot .*KeyError"
        ):
            await coordinator.run()
    (told,) = (line for line in logged if line["event"] == "not-handled")
    assert told["what"] == "drain-requested of coordinator" and told["story"]
    assert told["body"]["reason"] == asked.reason
    assert isinstance(told["exc_info"].__cause__, KeyError)
    assert before == {path.name: path.read_bytes() for path in (run_dir / "events").iterdir()}
    with pytest.raises(RunOver):
        coordinator_address(run_dir / "coordinator.json")

    mended, _, _ = start(run_dir)
    mended.report_event(asked)
    mended._try_turn()
    assert mended.tick.machine.state.run.draining
    assert mended.tick.machine.state.seq == world.state.seq + 2


def test_nothing_is_done_after_a_turn_that_failed(
    tmp_path: Path, world: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop comes back to its socket before the process ends: another turn would acknowledge
    what was not handled."""
    coordinator, _, _ = start(run_dir_of(world.disk, tmp_path / "run"))
    turns: list[int] = []

    def fail() -> None:
        turns.append(1)
        raise KeyError("0.3.1")

    monkeypatch.setattr(coordinator, "_run_turn", fail)
    coordinator._try_turn()
    coordinator._try_turn()
    assert len(turns) == 1 and isinstance(coordinator._error, KeyError)


def test_it_listens_where_its_predecessor_did_or_elsewhere(
    tmp_path: Path, world: LoggedRun
) -> None:
    """A port that the user has set is taken or missing; the log is as it was then."""
    run_dir = run_dir_of(world.disk, tmp_path / "run")
    first = start(run_dir)[0].socket
    write_address(run_dir / "coordinator.json", first.address)
    assert start(run_dir)[0].socket.address != first.address
    first.close()
    port = int(first.address.rpartition(":")[2])
    until_free(port)
    again = start(run_dir)[0].socket
    assert again.address == first.address
    before = sorted(path.name for path in (run_dir / "events").iterdir())
    with pytest.raises(PortTaken, match=r"set coordinator\.port=0"):
        start(run_dir, config=Config(coordinator=CoordinatorConfig(port=port)))
    assert sorted(path.name for path in (run_dir / "events").iterdir()) == before


def until_free(port: int) -> None:
    """A socket that was closed gives its port back some milliseconds later."""
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                return probe.bind(("127.0.0.1", port))


def test_who_does_not_join_asks_whether_a_coordinator_answers(
    tmp_path: Path, world: LoggedRun
) -> None:
    run_dir = run_dir_of(world.disk, tmp_path / "run")
    coordinator = start(run_dir)[0]
    with concurrent.futures.ThreadPoolExecutor() as others:
        asking = others.submit(is_coordinator_alive, coordinator.socket.address, KEYS)
        while not asking.done():
            coordinator._try_turn()
        assert asking.result()
    assert coordinator.tick.bad_frames == 0
    coordinator.socket.close()
    until_free(int(coordinator.socket.address.rpartition(":")[2]))
    assert not is_coordinator_alive(coordinator.socket.address, KEYS)
