"""laminar log: replay, dump, tail, stats, story; what each says of things that are no run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from laminar.analysis.log.story import Subject
from laminar.config import ConfigError
from laminar.coordinator.system import RealDisk
from laminar.core.state.statuses import Phase
from laminar.eventlog.reader import scan_log
from laminar.eventlog.record import DecisionRecord, EventRecord, encode_frame
from laminar.events import commands as cmd
from tests.analysis.conftest import Cli
from tools.kit.golden_pages import check
from tools.kit.logs import write_log
from tools.kit.run_directory import CLOCK_NS, world_log


def log_file(run_dir: Path) -> Path:
    return run_dir / "events" / "events-00000001.log"


# --- replay -------------------------------------------------------------------------------------


def test_replay_counts_and_says_identical(made: Path, cli: Cli) -> None:
    log = world_log()
    decisions = sum(len(commands) for _, commands in log)
    code, out = cli("log", "replay", made)
    assert code == 0
    assert out == (
        f"{len(log)} events, {decisions} decisions, {len(log) // 50} state hashes\nidentical\n"
    )


def test_replay_until_an_event_shows_the_state_there(made: Path, cli: Cli) -> None:
    code, out = cli("log", "replay", made, "--until", 7, "--state")
    assert code == 0
    assert out.startswith("7 events")
    state = json.loads(out.split("identical\n")[1])
    assert (state["seq"], state["run"]["phase"]) == (7, "starting")
    _, out = cli("log", "replay", made, "--state")
    assert json.loads(out.split("identical\n")[1])["run"]["phase"] == Phase.ENDED


def test_replay_names_the_first_difference_with_both_sides(tmp_path: Path, cli: Cli) -> None:
    """One seed was changed; --diff shows only what differs."""
    log = world_log()
    index = next(
        i for i, (_, cs) in enumerate(log) if isinstance(cs[0:1] and cs[0], cmd.GenerateTrajectory)
    )
    stamped, commands = log[index]
    seed = commands[0].seed
    log[index] = (stamped, [msgspec.structs.replace(commands[0], seed=77), *commands[1:]])
    write_log(tmp_path, log)
    code, out = cli("log", "replay", tmp_path)
    assert code == 1
    assert f"event {stamped.seq}:" in out
    assert "logged:   GenerateTrajectory(" in out
    assert "seed=77" in out
    assert f"seed={seed}" in out
    code, out = cli("log", "replay", tmp_path, "--diff")
    assert code == 1
    parts = [line.strip() for line in out.splitlines()[2:]]
    assert sorted(parts) == sorted(["- seed=77)", f"+ seed={seed})"])


# --- dump ----------------------------------------------------------------------------------------


def test_dump_has_one_line_per_record(made: Path, cli: Cli) -> None:
    log = world_log()
    records = 1 + len(log) + sum(len(commands) for _, commands in log) + len(log) // 50
    code, out = cli("log", "dump", made)
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == records
    assert "header" in lines[0]
    assert "coordinator-started incarnation=1" in lines[1]
    assert max(map(len, lines)) < 1200
    _, raw = cli("log", "dump", made, "--raw")
    bodies = [json.loads(line) for line in raw.splitlines()]
    assert len(bodies) == records
    assert Counter(body["kind"] for body in bodies)["event"] == len(log)
    assert bodies[1]["event"]["settings"]["group_size"] == 4


def test_raw_dump_reads_another_schema(made: Path, copy: Path, cli: Cli) -> None:
    """A log of a later release: its header has a new key, its event a type unknown here."""
    shutil.rmtree(copy / "events")
    (copy / "events").mkdir()
    header = msgspec.defstruct(
        "Header",
        [
            ("schema", int),
            ("logic", int),
            ("segment", int),
            ("takes_over", type(None)),
            ("colour", str),
        ],
        tag_field="kind",
        tag="header",
    )
    later = EventRecord.from_stamped(world_log()[0][0], msgspec.msgpack.encode({"type": "new"}))
    data, crc = encode_frame(header(99, 7, 1, None, "red"), 0)
    log_file(copy).write_bytes(data + encode_frame(later, crc)[0])
    code, out = cli("log", "dump", copy, "--raw")
    assert code == 0
    assert [json.loads(line).get("colour") for line in out.splitlines()] == ["red", None]
    code, message = cli("log", "dump", copy)
    assert code == 2
    assert "written by another release of Laminar (schema 99, logic version 7;" in message


def test_dump_shows_the_last_records(made: Path, cli: Cli) -> None:
    _, whole = cli("log", "dump", made)
    code, out = cli("log", "dump", made, "-n", 3)
    assert code == 0
    assert out.splitlines() == whole.splitlines()[-3:]


def test_stats_count_by_type(copy: Path, cli: Cli) -> None:
    log = world_log()
    with log_file(copy).open("ab") as file:
        file.write(b"torn")
    code, out = cli("log", "dump", "--stats", copy)
    assert code == 0
    size = log_file(copy).stat().st_size
    assert f"{size} bytes in 1 segments, torn tail 4 bytes" in out
    assert f"{(log[-1][0].time_ns - log[0][0].time_ns) / 1e9:.3f} s" in out
    counts = {words[1]: int(words[0]) for words in map(str.split, out.splitlines()[1:])}
    assert counts["events"] == len(log)
    assert counts["step-completed"] == 3
    started = [c for _, cs in log for c in cs if isinstance(c, cmd.GenerateTrajectory)]
    assert counts["generate-trajectory"] == len(started)


def test_a_reader_that_has_seen_enough_is_told_from_an_error(made: Path) -> None:
    """`laminar log dump RUN | head -n 1`: the dump is larger than a pipe holds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "laminar.cli.main", "log", "dump", str(made), "--raw"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert b"header" in process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 141


# --- story --------------------------------------------------------------------------------------


def test_every_mention_is_in_the_story(made: Path, cli: Cli) -> None:
    """Against a plain search through the raw text of every message."""
    messages = [(s.seq, s.event) for s, _ in world_log()]
    messages += [(s.seq, c) for s, cs in world_log() for c in cs]
    for name in ("0.1.2", "e1.3.0"):
        naming = [seq for seq, message in messages if f'"{name}"' in json_of(message)]
        _, out = cli("log", "story", made, name)
        assert Counter(int(line.split()[0]) for line in out.splitlines()) == Counter(naming)


def json_of(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


def test_stories_of_a_group_an_actor_and_a_version(made: Path, cli: Cli) -> None:
    _, group = cli("log", "story", made, "0.1")
    for sibling in range(4):
        assert f"trajectory=0.1.{sibling} " in group
    assert "0.10." not in group
    _, actor = cli("log", "story", made, "trainer-0")
    assert actor.count("-> trainer-0") == actor.count("train-step") + 2 + 1 + 1
    assert "trainer-ready" in actor
    _, version = cli("log", "story", made, "v2")
    assert version == cli("log", "story", made, "2")[1]
    assert "weights-published version=2" in version
    assert "version=1 " not in version


def test_a_machine_is_not_its_replicas() -> None:
    """rollout-3 is the fourth replica of the first machine, rollout-3.0 the first of the fourth."""
    assert not Subject.parse("rollout-3").named_by({"to": "rollout-3.0"})
    assert Subject.parse("0.17").named_by({"trajectory": "0.17.3"})


def test_a_name_that_nothing_has_is_refused(made: Path, cli: Cli) -> None:
    with pytest.raises(ConfigError, match="is not an id"):
        Subject.parse("0.17.3.4")
    for name in ("9.9.9", "rollout-7", "v99", "?"):
        code, message = cli("log", "story", made, name)
        assert code == 2
        assert name in message


# --- story with the logs of the processes -------------------------------------------------------


def write_logs(run_dir: Path, attempt: int, process: str, lines: list[dict[str, object]]) -> None:
    """As the processes of a run write them; `at` is in seconds after the run's first event."""
    directory = run_dir / "logs" / f"attempt_{attempt}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{process}.jsonl").open("a") as file:
        for line in lines:
            seconds = float(str(line.pop("at")))
            at = datetime.fromtimestamp(CLOCK_NS / 1e9 + seconds, UTC).isoformat()
            whole = {"run": "made", "process": process, "level": "info", "timestamp": at, **line}
            file.write(json.dumps(whole) + "\n")


def with_logs(run_dir: Path) -> str:
    """Log lines about trajectory 0.1.2, and the replica that was told to generate it."""
    seq, replica, at = next(
        (s.seq, c.to, s.time_ns / 1e9)
        for s, cs in world_log()
        for c in cs
        if isinstance(c, cmd.GenerateTrajectory) and c.trajectory_id == "0.1.2"
    )
    mine = {"event_seq": seq, "trajectory": "0.1.2"}
    write_logs(
        run_dir,
        1,
        replica,
        [
            {"at": at - 5, "event": "trajectory-started", **mine, "version": 0},
            {"at": at + 0.01, "event": "other", "event_seq": seq, "trajectory": "0.1.3"},
            {"at": at + 0.02, "event": "no-id", "event_seq": seq},
            {"at": at + 0.03, "event": "slow", "level": "warning"},
            {"at": at + 0.04, "event": "dull"},
            {"at": at + 9999, "event": "too-late", "level": "error"},
        ],
    )
    write_logs(run_dir, 1, "stranger-0", [{"at": at + 0.03, "event": "odd", "level": "error"}])
    write_logs(run_dir, 2, "store-0", [{"at": at + 0.05, "event": "seen", "trajectory": "0.1.2"}])
    return replica


def test_stories_are_those_of_the_page(copy: Path, cli: Cli) -> None:
    """With the logs of all attempts: what names it, what comes of its commands, warnings of who had
    it. A line follows the event that it belongs to, though its clock is five seconds late."""
    with_logs(copy)
    page = []
    for words in (["0.1.2"], ["0.1.2", "--logs"], ["v2"]):
        code, out = cli("log", "story", copy, words[0], *words[1:])
        assert code == 0
        page += [f"$ story {' '.join(words)}", out]
    check("story", "\n".join(page))


def test_all_lines_of_an_actor_are_in_its_story_but_damaged_ones(copy: Path, cli: Cli) -> None:
    """A crash cut one short; something else wrote there, too."""
    replica = with_logs(copy)
    with (copy / "logs" / "attempt_1" / f"{replica}.jsonl").open("ab") as file:
        file.write(b'{"event": "cut-sh{"a": 1}\n[]\n7\n{"timestamp": 5}\n\xff\n')
    code, out = cli("log", "story", copy, replica, "--logs")
    assert code == 0
    assert out.count(" | ") == 6
    assert "error: too-late" in out


def test_logs_that_cannot_be_read_are_named(copy: Path, cli: Cli) -> None:
    path = copy / "logs" / "attempt_1" / "store-0.jsonl"
    path.mkdir(parents=True)
    code, message = cli("log", "story", copy, "0.1.2", "--logs")
    assert code == 2
    assert message.startswith(f"{path} cannot be read")


# --- what is no run, or no log ------------------------------------------------------------------

COMMANDS = [("replay",), ("dump",), ("dump", "--raw"), ("dump", "-n", 3), ("dump", "--stats")]


def refusals(cli: Cli, path: Path, new: Path) -> list[str]:
    """What every reading command says; all must refuse in one sentence that names the place.

    `new` is a directory for what would be written.
    """
    new.mkdir(exist_ok=True)
    said = [cli("log", command, path, *options) for command, *options in COMMANDS]
    said += [cli("log", "story", path, "0.1"), cli("audit", path), cli("report", path)]
    said += [cli("log", "why", path, "0.1.0"), cli("log", "trace", path, "-o", new / "t.json")]
    said += [cli("log", "sql", path, "select 1 as n", "-o", new / "t")]
    assert not any(new.iterdir())
    for code, message in said:
        assert code == 2, message
        assert str(path) in message
        assert "\n" not in message
    return [message for _, message in said]


def test_paths_that_are_no_run_directory(made: Path, tmp_path: Path, cli: Cli) -> None:
    assert "does not exist" in refusals(cli, tmp_path / "nowhere", tmp_path / "new")[0]
    assert "is not a directory" in refusals(cli, made / "store.sqlite", tmp_path / "new")[0]
    assert "is not a run directory" in refusals(cli, tmp_path, tmp_path / "new")[0]
    (tmp_path / "run" / "events").mkdir(parents=True)
    assert "no event log" in refusals(cli, tmp_path / "run", tmp_path / "new")[0]
    log_file(tmp_path / "run").mkdir()
    assert "cannot be read" in refusals(cli, tmp_path / "run", tmp_path / "new")[0]


def test_a_flipped_bit_is_named_with_its_place(copy: Path, tmp_path: Path, cli: Cli) -> None:
    data = bytearray(log_file(copy).read_bytes())
    data[len(data) // 2] ^= 4
    log_file(copy).write_bytes(data)
    for message in refusals(cli, copy, tmp_path / "new"):
        assert "events-00000001.log is corrupt at offset" in message


def test_a_log_without_events_is_refused_by_what_needs_a_state(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "run").mkdir()
    write_log(tmp_path / "run", [])
    for arguments in (("log", "replay"), ("audit",), ("report",)):
        code, message = cli(*arguments, tmp_path / "run")
        assert code == 2
        assert "no events yet" in message
    assert cli("log", "dump", "--stats", tmp_path / "run")[0] == 0


def test_a_torn_tail_is_no_damage(copy: Path, cli: Cli) -> None:
    """A crash in the middle of a write: the last record is not part of the history."""
    data = log_file(copy).read_bytes()
    log_file(copy).write_bytes(data[:-3])
    assert scan_log(RealDisk(copy / "events")).torn_bytes > 0
    code, out = cli("log", "replay", copy)
    assert code == 0
    assert "identical" in out


@pytest.mark.parametrize("decision", [False, True])
def test_a_message_of_another_release_is_refused_by_name(
    copy: Path, cli: Cli, decision: bool
) -> None:
    shutil.rmtree(copy / "events")
    log = world_log()[:3]
    write_log(copy, log)
    raw = msgspec.msgpack.encode({"type": "new"})
    last = msgspec.structs.replace(log[-1][0], seq=4)
    event = EventRecord.from_stamped(last, raw)
    order = DecisionRecord(cause=3, index=0, command=msgspec.Raw(raw))
    tail = scan_log(RealDisk(copy / "events"))
    assert tail.end is not None
    with log_file(copy).open("ab") as file:
        file.write(encode_frame(order if decision else event, tail.end.crc)[0])
    for options in ((), ("--stats",), ("-n", 3)):
        code, message = cli("log", "dump", copy, *options)
        assert code == 2
        assert ("decision of event 3" if decision else "event 4") in message
        assert "--raw" in message
    assert cli("log", "replay", copy)[0] == 1
    assert cli("log", "dump", copy, "--raw")[0] == 0
