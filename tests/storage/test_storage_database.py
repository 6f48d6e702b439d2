"""The store through its one door, handle_batch: what is answered and what is then on the disk."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing

import msgspec
import pytest

from laminar.config import ConfigError
from laminar.events.families import MESSAGE_BYTES_MAX
from laminar.names.ports import DiskError
from laminar.run.work_counter import get_work_count
from laminar.storage import books, payload_files, rules
from laminar.storage import messages as m
from laminar.storage.database import Database
from laminar.storage.rows import LoadedPrompts, NotTokenised, PromptKey
from tools.kit.store_samples import (
    PROMPTS,
    answers,
    append,
    contents,
    end,
    fetched,
    filled,
    finish,
    floats,
    ints,
    one,
    open_,
    prompt,
    reward,
)


def test_what_a_reward_gave_besides_the_score_is_kept_with_it(database):
    """The first one stays, as the score does."""
    given = {"acc": 1.0, "pred": "x"}
    answers(database, *LIFE[:5], reward("0.1.0", 0.5, extras=given))
    assert fetched(database, "0.1.0").extras == given
    assert answers(database, reward("0.1.0", 0.5, extras={"acc": 0.0})) == ["ok"]
    assert fetched(database, "0.1.0").extras == given
    answers(database, open_("0.2.0"))
    assert fetched(database, "0.2.0").extras == {}


LIFE = [
    open_("0.1.0"),
    append("0.1.0", (1, 2, 3)),
    append("0.1.0", (4,), offset=3),
    append("0.1.0", (5, 6), offset=4),
    finish("0.1.0", 6),
    reward("0.1.0", 0.1, reason="right", detail="d", text="four"),
    end("0.1.0", "trained", step=9),
]


def test_a_whole_life(database):
    assert answers(database, *LIFE) == ["open"] + ["ok"] * 6
    kept = fetched(database, "0.1.0")
    assert kept.tokens == ints(1, 2, 3, 4, 5, 6) and kept.segment_lengths == (6,)
    assert kept.logprobs == floats(-0.25, -0.5, -0.75, -1, -1.25, -1.5)
    assert (kept.reward, kept.reward_reason, kept.reward_detail) == (0.1, "right", "d")
    assert (kept.status, kept.end, kept.finish_reason) == ("rewarded", "trained", "stop")
    assert (kept.weight_version, kept.version_step, kept.temperature) == (5, 4, 0.7)
    assert (kept.group_id, kept.sibling, kept.purpose, kept.row_index) == ("0.1", 0, "train", 1)
    assert kept.digest == rules.digest_payload(kept.tokens, kept.logprobs)
    assert kept.prompt_ids == ints(100, 1) and m.decode_prompt(kept.prompt) == prompt(1)


def test_what_is_written_counts_as_work_and_what_is_read_does_not(database):
    before = get_work_count()
    answers(database, *LIFE[:2])
    written = get_work_count()
    assert written > before
    fetched(database, "0.1.0")
    assert get_work_count() == written


def test_open_tells_how_far_it_got(database):
    first = one(database, open_("0.1.0"))
    assert (first.answer, first.prompt_ids, first.tokens) == ("open", ints(100, 1), b"")
    answers(database, append("0.1.0", (7, 8)), append("0.1.0", (9,), offset=2))
    for placement in (1, 2):
        again = one(database, open_("0.1.0", placement))
        assert (again.answer, again.tokens, again.num_tokens) == ("open", ints(7, 8, 9), 3)
        assert again.segment_lengths == (3,)
    answers(database, finish("0.1.0", 3, placement=2, reason="length"))
    generated = one(database, open_("0.1.0", 3))
    assert (generated.answer, generated.finish_reason) == ("generated", "length")
    assert (generated.num_tokens, generated.tokens, generated.prompt_ids) == (3, b"", b"")
    answers(database, reward("0.1.0", 0.5, placement=3, reason="half"))
    rewarded = one(database, open_("0.1.0", 4))
    assert (rewarded.answer, rewarded.reward, rewarded.reward_reason) == ("rewarded", 0.5, "half")


def test_a_zombie_is_refused_whatever_it_sends(database, path):
    answers(database, open_("0.1.0"), append("0.1.0", (1, 2)), open_("0.1.0", 2))
    before = contents(path)
    zombie = [
        open_("0.1.0"),
        open_("0.1.0", attempt=2),
        append("0.1.0", (1, 2)),
        append("0.1.0", (3,), offset=2),
        finish("0.1.0", 2),
        reward("0.1.0", 1.0),
        end("0.1.0"),
    ]
    assert answers(database, *zombie) == ["fenced"] * len(zombie)
    assert contents(path) == before


def test_a_restart_discards_the_tokens_and_says_how_many(database, path):
    answers(database, open_("0.1.0"), append("0.1.0", (1, 2, 3)))
    restart = open_("0.1.0", 2, attempt=2, weight_version=8, version_step=7)
    for _ in range(2):
        reply = one(database, restart)
        assert (reply.answer, reply.tokens_lost, reply.num_tokens) == ("open", 3, 0)
        assert (reply.attempt, reply.weight_version, reply.tokens) == (2, 8, b"")
    assert contents(path)["chunks"] == []
    answers(database, append("0.1.0", (4, 5), placement=2, version=8))
    third = one(database, open_("0.1.0", 3, attempt=3))
    assert third.tokens_lost == 5
    ended = one(database, end("0.1.0", placement=4))
    assert (ended.answer, ended.num_tokens, ended.tokens_lost) == ("ok", 0, 5)


def test_what_is_fetched_says_who_sampled_which_part(database):
    """A chunk is of who held the placement when it came, also if another one sends it again; who
    opens a whole response has sampled nothing of it."""
    answers(
        database,
        open_("0.1.0", replica="rollout-a"),
        append("0.1.0", (1, 2)),
        append("0.1.0", (3,), offset=2),
        open_("0.1.0", 2, replica="rollout-b"),
        append("0.1.0", (3,), offset=2, placement=2),
        append("0.1.0", tuple(range(10_000)), offset=3, placement=2),
        append("0.1.0", (4,), offset=10_003, placement=2),
    )
    spans = (("rollout-a", 5, 4, 3), ("rollout-b", 5, 4, 10_001))
    assert fetched(database, "0.1.0").spans == spans
    answers(database, finish("0.1.0", 10_004, placement=2), open_("0.1.0", 3, replica="rollout-c"))
    found = fetched(database, "0.1.0")
    assert (found.spans, found.replica) == (spans, "rollout-c")
    assert found.spans == m.decode_reply(m.encode(reply_with(found))).trajectories[0].spans


def reply_with(found: m.StoredTrajectory) -> m.FetchReply:
    return m.FetchReply(trajectories=(found,))


def test_chunks_of_one_request_see_one_another(database):
    answers(database, open_("0.1.0"))
    parts = [append("0.1.0", (1,)), append("0.1.0", (1,)), append("0.1.0", (2,), offset=1)]
    (reply,) = database.handle_batch([m.Append(items=tuple(part.items[0] for part in parts))])
    assert [result.answer for result in reply.results] == ["ok", "ok", "ok"]
    assert fetched(database, "0.1.0").tokens == ints(1, 2)


def test_what_no_function_could_score_is_rewarded_without_a_score(database):
    answers(database, open_("0.1.0"), finish("0.1.0", 0), reward("0.1.0", None, reason="none"))
    kept = fetched(database, "0.1.0")
    assert (kept.status, kept.reward, kept.reward_reason) == ("rewarded", None, "none")


def test_unknown_prompts_and_ids(database, path):
    refused = one(database, open_("0.1.0", row_index=PROMPTS))
    assert refused.answer == "refused" and f"prompt {PROMPTS}" in refused.reason
    (reply,) = database.handle_batch([m.Fetch(ids=("0.1.0",))])
    assert reply.unknown == ("0.1.0",) and not reply.trajectories
    assert contents(path)["trajectories"] == []


def test_a_bad_request_takes_nothing_of_the_others_with_it(database, path):
    large = tuple(range(10_000))
    answers(database, open_("0.1.0"), append("0.1.0", (1,)))
    answers(database, open_("0.1.1"), append("0.1.1", large))
    (file,) = payload_files.folder_of(path).iterdir()
    file.unlink()
    both = (*finish("0.1.0", 2).items, *finish("0.1.1", len(large)).items)
    batch = [append("0.1.0", (2,), offset=1), m.Finish(items=both), open_("0.1.2")]
    first, bad, last = database.handle_batch(batch)
    assert isinstance(bad, m.ErrorReply) and file.name in bad.reason
    assert first.results[0].answer == "ok" and last.results[0].answer == "open"
    assert fetched(database, "0.1.0").status == "open"
    assert fetched(database, "0.1.0").tokens == ints(1, 2)


def test_a_failed_write_undoes_the_whole_batch(database, path, monkeypatch):
    answers(database, open_("0.1.0"))
    before = contents(path)

    def fail(folder, data):
        raise DiskError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(payload_files, "write", fail)
        with pytest.raises(DiskError):
            database.handle_batch([open_("0.1.1"), append("0.1.0", tuple(range(10_000)))])
    assert contents(path) == before
    assert answers(database, open_("0.1.1")) == ["open"]


def test_a_batch_is_one_transaction(path):
    database = filled(path)
    statements: list[str] = []
    database._db.set_trace_callback(statements.append)
    database.handle_batch(LIFE)
    assert sum(statement.startswith("BEGIN") for statement in statements) == 1
    assert statements.count("COMMIT") == 1 and statements[-1] == "COMMIT"
    assert database._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert database._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_what_was_answered_is_there_after_a_restart(path):
    database = filled(path)
    answers(database, *LIFE[:4])
    database.close()
    database = filled(path)
    assert one(database, open_("0.1.0", 2)).tokens == ints(1, 2, 3, 4, 5, 6)
    again = [msgspec.structs.replace(request.items[0], placement=2) for request in LIFE[4:]]
    batch = [type(request)(items=(item,)) for request, item in zip(LIFE[4:], again, strict=True)]
    assert answers(database, *batch) == ["ok"] * 3
    assert books.check_integrity(path) == []


def _large(name: str, count: int) -> list[m.Request]:
    return [open_(name), append(name, tuple(range(count)))]


def test_fetch_leaves_out_what_has_no_room_and_serves_it_when_asked_again(database):
    names = [f"0.1.{sibling}" for sibling in range(5)]
    for name in names:
        answers(database, *_large(name, 400_000))
    asked, got = names, []
    while asked:
        (reply,) = database.handle_batch([m.Fetch(ids=tuple(asked))])
        assert reply.trajectories and m.encode(reply)
        got += [kept.trajectory_id for kept in reply.trajectories]
        asked = list(reply.left_out)
    assert got == names


def test_open_leaves_out_what_has_no_room_and_does_not_touch_it(database):
    names = [f"0.1.{sibling}" for sibling in range(5)]
    for name in names:
        answers(database, *_large(name, 900_000))
    items = tuple(open_(name, 2).items[0] for name in names)
    (reply,) = database.handle_batch([m.Open(items=items)])
    assert len(reply.results) == 3 and reply.left_out == tuple(names[3:]) and m.encode(reply)
    assert [fetched(database, name).placement for name in names] == [2, 2, 2, 1, 1]


def test_the_largest_trajectory_fits_one_reply(database):
    answers(database, *_large("0.1.0", rules.MAX_TOKENS))
    (reply,) = database.handle_batch([m.Fetch(ids=("0.1.0",), with_prompt=True)])
    assert len(m.encode(reply)) + 2 * m.PROMPT_LIMIT < MESSAGE_BYTES_MAX


def test_stats(database):
    answers(database, *LIFE, open_("0.1.1"), append("0.1.1", (1,)))
    answers(database, open_("0.1.1", 2, attempt=2))
    (stats,) = database.handle_batch([m.Stats()])
    assert (stats.train_prompts, stats.eval_prompts) == (PROMPTS, 2)
    rows = [(t.state, t.trajectories, t.tokens, t.tokens_lost) for t in stats.totals]
    assert rows == [("open", 1, 0, 1), ("trained", 1, 6, 0)]
    assert stats.database_bytes > 4096


def test_sampled_prompts_are_spread_over_the_data(database, path):
    """Without training prompts the held-out ones; never more than there are."""

    def sampled(data, count):
        (reply,) = data.handle_batch([m.SamplePrompts(count=count)])
        return reply.prompts

    every = tuple(prompt(i).prompt_ids for i in range(PROMPTS))
    assert sampled(database, 256) == every
    assert sampled(database, 2) == (every[0], every[PROMPTS // 2])
    with closing(Database(path.with_name("eval"), 1)) as only_held_out:
        only_held_out.load_prompts([], [prompt(7)], "data-1")
        assert sampled(only_held_out, 3) == (prompt(7).prompt_ids,)


def test_what_needs_token_ids_that_nobody_has_made_is_left_undone(path):
    """And done when they are kept; what needs none is done, whatever it came with."""
    with closing(Database(path, 1)) as database:
        rows = [msgspec.structs.replace(prompt(n), prompt_ids=b"") for n in range(2)]
        database.load_prompts(rows, [], "data-1")
        two = m.Open(items=(*open_("0.1.0").items, *open_("0.0.0").items))
        needing, sampling, ending = database.handle_batch(
            [two, m.SamplePrompts(count=2), end("0.0.7")]
        )
        keys = [PromptKey("train", 1), PromptKey("train", 0)]
        for undone, wanted in ((needing, keys), (sampling, keys[::-1])):
            assert isinstance(undone, NotTokenised) and list(undone.prompts) == wanted
        assert m.decode_prompt(needing.prompts[keys[0]]) == rows[1]
        assert isinstance(ending, m.EndReply)
        assert database.handle_batch([m.Fetch(ids=("0.1.0",))])[0].unknown == ("0.1.0",)
        database.save_prompt_ids({key: ints(100, key.row_index) for key in keys})
        assert answers(database, open_("0.1.0"), append("0.1.0", (1,))) == ["open", "ok"]
        assert fetched(database, "0.1.0").prompt_ids == ints(100, 1)


def test_prompts_are_loaded_once(database, path):
    assert database.prompt_count() == (PROMPTS, 2, "data-1")
    before = contents(path)
    database.load_prompts([], [], "data-1")
    with pytest.raises(ConfigError, match=r"data-1.*data-2"):
        database.load_prompts([prompt(0)], [], "data-2")
    assert contents(path) == before


async def test_the_event_loop_goes_on_while_the_data_are_stored(path):
    """A store with a million rows renews its lease meanwhile, or it would be restarted for ever."""
    loop_moved = threading.Event()

    class Rows(list):
        def __iter__(self):
            assert loop_moved.wait(60), "storing the rows blocks the event loop"
            return super().__iter__()

    database = Database(path, 1)
    filling = asyncio.create_task(database.fill(LoadedPrompts(Rows([prompt(0)]), [], 0, "data-1")))
    await asyncio.sleep(0)
    loop_moved.set()
    assert await filling == (1, 0, "data-1")
    database.close()


def test_a_prompt_that_cannot_be_stored_is_named_and_nothing_is_loaded(path):
    database = Database(path, 1)
    odd = msgspec.structs.replace(prompt(1), columns={"odd": object()})
    large = msgspec.structs.replace(prompt(1), columns={"image": bytes(m.PROMPT_LIMIT)})
    for wrong in (odd, large):
        with pytest.raises(ConfigError, match="train prompt 1"):
            database.load_prompts([prompt(0), wrong], [], "data-1")
    assert database.prompt_count() == (0, 0, "")
    with pytest.raises(ValueError, match="digest"):
        database.load_prompts([prompt(0)], [], "")


def test_a_file_that_is_no_store_is_refused(tmp_path):
    wrong = tmp_path / "store.sqlite"
    wrong.write_bytes(b"not a database, but long enough to have a header" * 100)
    with pytest.raises(ConfigError, match=r"store\.sqlite"):
        Database(wrong, 1)
    with pytest.raises(DiskError, match="nowhere"):
        Database(tmp_path / "nowhere" / "store.sqlite", 1)


def test_another_format_is_refused(database, path):
    database._tables.set_meta({"format": "0"})
    database.close()
    with pytest.raises(ConfigError, match="format '0'"):
        Database(path, 1)
