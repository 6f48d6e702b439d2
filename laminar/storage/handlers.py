"""Request handlers: read the row, ask the rules for a verdict, save the result.

Reads   typed requests (`messages`) and the rows they name (`tables`)
Writes  rows and chunks, inside the transaction of the caller
Raises  DamageError if stored data is missing; NotTokenised, before any write, for a request that
        needs token ids that do not exist yet

All decisions are made in `rules`. Items of one request are handled in order; each sees what the
earlier ones wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from laminar.storage import messages as m
from laminar.storage import rules
from laminar.storage.rows import DamageError, NotTokenised, PayloadRemoved, PromptKey
from laminar.storage.rules import Chunk, Row
from laminar.storage.tables import Tables
from laminar.storage.turn_handlers import TurnHandlers, effect_item, make_result

REMOVED_AT_ONCE = 256  #: payloads removed per request, so that other requests are not held up


class Handlers:
    """Handlers of all request types, over the rows of one store."""

    def __init__(self, rows: Tables, *, in_flight: bool = False) -> None:
        """Create the handlers; `in_flight`: newer weights may continue tokens of older ones."""
        self._rows, self._in_flight = rows, in_flight
        self._turns = TurnHandlers(rows)
        self._by_type: dict[type, Callable[[Any], m.Reply]] = {
            m.Open: self._open,
            m.Append: self._append,
            m.Finish: self._finish,
            m.Intend: self._turns.record_intent,
            m.Continue: self._turns.continue_trajectories,
            m.Fetch: self._fetch,
            m.PutRewards: self._put_rewards,
            m.End: self._end_trajectories,
            m.SamplePrompts: self._sample_prompts,
            m.RemovePayloads: self._remove_payloads,
            m.Stats: self._collect_stats,
        }

    def answer_request(self, request: m.Request) -> m.Reply:
        return self._by_type[type(request)](request)

    def _open(self, request: m.Open) -> m.OpenReply:
        self._require_ids(PromptKey(item.purpose, item.row_index) for item in request.items)
        room = _Room()
        results: list[m.OpenResult] = []
        left_out: list[str] = []
        for item in request.items:
            result = self._open_one(item, room)
            if result is None:
                left_out.append(item.trajectory_id)
            else:
                results.append(result)
        return m.OpenReply(results=tuple(results), left_out=tuple(left_out))

    def _open_one(self, item: m.OpenItem, room: _Room) -> m.OpenResult | None:
        """Open a trajectory; return None if its tokens do not fit into the reply."""
        asked = _make_opened_row(item)
        row = self._rows.get_row(item.trajectory_id)
        verdict = rules.judge_open(row, asked, self._in_flight)
        if verdict.answer in ("fenced", "refused"):
            return _refuse_open(item, verdict.answer, verdict.reason)
        prompt_ids = b""
        if verdict.answer == "open":
            key = PromptKey(item.purpose, item.row_index)
            prompt = self._rows.get_prompt(key)
            if prompt is None:
                return _refuse_open(item, "refused", f"no {item.purpose} prompt {item.row_index}")
            prompt_ids = self._rows.get_prompt_ids(key, prompt)
            if not room.take_bytes(
                len(prompt_ids) + (rules.TOKEN_BYTES * row.all_tokens if row else 0)
            ):
                return None
        row = self._save_opened(row, verdict.change, asked)
        return _open_result(row, verdict, prompt_ids, self._rows)

    def _save_opened(self, row: Row | None, change: rules.OpenChange, asked: Row) -> Row:
        if row is not None and change == "none":
            return row
        if change == "restart":
            self._rows.drop_chunks(asked.id)
        after = rules.apply_open(row, change, asked)
        self._rows.save(row, after)
        return after

    def _append(self, request: m.Append) -> m.AppendReply:
        return m.AppendReply(results=tuple(map(self._append_one, request.items)))

    def _append_one(self, item: m.AppendItem) -> m.Result:
        row = self._rows.get_row(item.trajectory_id)
        holder = (row and row.replica) or ""  # of this placement
        source = rules.Source(holder, item.weight_version, item.version_step)
        place = item.segment, item.offset
        chunk = Chunk(*place, item.tokens, item.logprobs, source, item.read)
        stored = None
        if row is not None and rules.is_behind(row, item.segment, item.offset):
            stored = self._rows.load_chunk_at(row, item.segment, item.offset)
        verdict = rules.judge_append(row, item.placement, chunk, stored, self._in_flight)
        if row is not None and verdict.changes:
            self._rows.add_chunk(row, chunk)
            self._rows.save(row, rules.apply_append(row, chunk))
        return make_result(item.trajectory_id, verdict)

    def _finish(self, request: m.Finish) -> m.FinishReply:
        return m.FinishReply(results=tuple(map(self._finish_one, request.items)))

    def _finish_one(self, item: m.FinishItem) -> m.Result:
        row = self._rows.get_row(item.trajectory_id)
        verdict = rules.judge_finish(row, item.placement, item.finish_reason, item.num_tokens)
        if row is not None and verdict.changes:
            digest = self._whole_digest(row)
            after = row._replace(
                status="generated", finish_reason=item.finish_reason, digest=digest
            )
            self._rows.save(row, after)
        return make_result(item.trajectory_id, verdict)

    def _whole_digest(self, row: Row) -> str:
        """Return the payload's digest; DamageError if its counts do not match the row."""
        tokens, logprobs = _join_payload(self._rows.load_chunks(row.id))
        if {len(tokens), len(logprobs)} != {row.num_tokens * rules.TOKEN_BYTES}:
            raise DamageError(
                f"the chunks of {row.id} hold {len(tokens)} bytes of tokens and "
                f"{len(logprobs)} of log-probs, its row counts {row.num_tokens} tokens"
            )
        contexts = list(self._rows.turns.get_contexts(row).values())
        parents = self._rows.turns.get_parents(row)
        return rules.digest_payload(tokens, logprobs, contexts, parents)

    def _fetch(self, request: m.Fetch) -> m.FetchReply:
        room = _Room()
        trajectories: list[m.StoredTrajectory] = []
        left_out: list[str] = []
        removed: list[str] = []
        rows = {wanted: self._rows.get_row(wanted) for wanted in request.ids}
        unknown = [wanted for wanted, row in rows.items() if row is None]
        found = [row for row in rows.values() if row is not None]
        self._require_ids(PromptKey(row.purpose, row.row_index) for row in found)
        for row in found:
            key = PromptKey(row.purpose, row.row_index)
            prompt = self._rows.get_prompt(key)
            if prompt is None:
                raise DamageError(
                    f"the {row.purpose} prompt {row.row_index} of {row.id} is missing"
                )
            ids = self._rows.get_prompt_ids(key, prompt)
            if not room.take_bytes(_fetched_size(row, prompt, ids)):
                left_out.append(row.id)
                continue
            try:
                trajectories.append(self._load_trajectory(row, ids, request.with_prompt, prompt))
            except PayloadRemoved:
                removed.append(row.id)
        return m.FetchReply(
            trajectories=tuple(trajectories),
            left_out=tuple(left_out),
            unknown=tuple(unknown),
            removed=tuple(removed),
        )

    def _require_ids(self, keys: Iterable[PromptKey]) -> None:
        """Raise NotTokenised if any of these existing prompts has no token ids."""
        missing = {}
        for key in dict.fromkeys(keys):
            prompt = self._rows.get_prompt(key)
            if prompt is not None and not self._rows.get_prompt_ids(key, prompt):
                missing[key] = prompt
        if missing:
            raise NotTokenised(missing)

    def _load_trajectory(
        self, row: Row, prompt_ids: bytes, with_prompt: bool, prompt: bytes
    ) -> m.StoredTrajectory:
        chunks, contexts = self._rows.load_chunks(row.id), self._rows.turns.get_contexts(row)
        tokens, logprobs = _join_payload(chunks)
        effects = self._rows.turns.get_effects(row, row.turns) if with_prompt else []
        return m.StoredTrajectory(
            trajectory_id=row.id,
            **row.identity._asdict(),
            **row.stamp._asdict(),
            attempt=row.attempt,
            placement=row.placement,
            replica=row.replica,
            status=row.status,
            finish_reason=row.finish_reason,
            digest=row.digest,
            reward=rules.decode_reward(row.reward_bits),
            reward_reason=row.reward_reason,
            reward_detail=row.reward_detail,
            end=row.end,
            prompt_ids=contexts.pop(0, prompt_ids),
            tokens=tokens,
            logprobs=logprobs,
            contexts=tuple(contexts.values()),
            parents=self._rows.turns.get_parents(row),
            effects=tuple(map(effect_item, effects)),
            call_seconds=self._rows.turns.call_seconds(row) if with_prompt else 0.0,
            segment_lengths=rules.segment_lengths(chunks),
            spans=rules.compute_spans(chunks),
            prompt=prompt if with_prompt else None,
            extras=self._rows.get_extras(row.id),
        )

    def _put_rewards(self, request: m.PutRewards) -> m.PutRewardsReply:
        return m.PutRewardsReply(results=tuple(map(self._reward_one, request.items)))

    def _reward_one(self, item: m.RewardItem) -> m.StoredReward:
        row = self._rows.get_row(item.trajectory_id)
        verdict = rules.judge_reward(row, item.placement, item.reward, item.reason, item.detail)
        if row is not None and verdict.changes:
            row = self._save_reward(row, item)
        return _reward_result(item.trajectory_id, verdict, row)

    def _save_reward(self, row: Row, item: m.RewardItem) -> Row:
        after = row._replace(
            status="rewarded",
            reward_bits=rules.encode_reward(item.reward),
            reward_reason=item.reason,
            reward_detail=item.detail,
            finish_reason=item.finish_reason or row.finish_reason,
        )
        self._turns.end_effects(row, row.turns, item.effects)
        self._rows.save(row, after)
        self._rows.set_reward_text(row.id, item.reward, item.text, item.extras)
        return after

    def _end_trajectories(self, request: m.End) -> m.EndReply:
        return m.EndReply(results=tuple(map(self._end_one, request.items)))

    def _end_one(self, item: m.EndItem) -> m.EndResult:
        row = self._rows.get_row(item.trajectory_id)
        asked = _make_ended_row(item)
        verdict = rules.judge_end(row, asked)
        if verdict.changes:
            after = rules.apply_end(row, asked)
            self._rows.save(row, after)
            self._rows.turns.lose_effects(after.id)
            row = after
        return m.EndResult(
            trajectory_id=item.trajectory_id,
            answer=verdict.answer,
            reason=verdict.reason,
            num_tokens=row.num_tokens if row else 0,
            tokens_lost=row.tokens_lost if row else 0,
        )

    def _sample_prompts(self, request: m.SamplePrompts) -> m.SamplePromptsReply:
        meta, room = self._rows.get_meta(), _Room()
        purpose, rows = "train", int(meta["train_prompts"])
        if not rows:
            purpose, rows = "eval", int(meta["eval_prompts"])
        count = min(request.count, rows)
        keys = [PromptKey(purpose, i * rows // count) for i in range(count)]
        self._require_ids(keys)
        found = ((key, self._rows.get_prompt(key)) for key in keys)
        prompts = (self._rows.get_prompt_ids(key, p) for key, p in found if p is not None)
        return m.SamplePromptsReply(prompts=tuple(p for p in prompts if room.take_bytes(len(p))))

    def _remove_payloads(self, request: m.RemovePayloads) -> m.RemovePayloadsReply:
        keep_tokens = request.keep_bytes // (2 * rules.TOKEN_BYTES)
        removable = self._rows.find_removable(request.before_step, keep_tokens, REMOVED_AT_ONCE)
        for trajectory_id in removable:
            self._rows.remove_payload(trajectory_id)
        return m.RemovePayloadsReply(removed=len(removable))

    def _collect_stats(self, request: m.Stats) -> m.StatsReply:
        meta = self._rows.get_meta()
        return m.StatsReply(
            train_prompts=int(meta["train_prompts"]),
            eval_prompts=int(meta["eval_prompts"]),
            totals=tuple(
                m.Total(state=state, trajectories=number, tokens=tokens, tokens_lost=lost)
                for state, number, tokens, lost in self._rows.get_totals()
            ),
            database_bytes=self._rows.database_bytes(),
        )


class _Room:
    """The payload bytes that still fit into a reply; the first part always fits."""

    def __init__(self) -> None:
        self._used = 0

    def take_bytes(self, size: int) -> bool:
        if self._used and self._used + size > m.REPLY_BUDGET:
            return False
        self._used += size
        return True


def _make_opened_row(item: m.OpenItem) -> Row:
    return Row(
        id=item.trajectory_id,
        group_id=item.group_id,
        sibling=item.sibling,
        purpose=item.purpose,
        row_index=item.row_index,
        attempt=item.attempt,
        placement=item.placement,
        replica=item.replica,
        weight_version=item.weight_version,
        version_step=item.version_step,
        temperature=item.temperature,
    )


def _make_ended_row(item: m.EndItem) -> Row:
    return Row(
        id=item.trajectory_id,
        group_id=item.group_id,
        sibling=item.sibling,
        purpose=item.purpose,
        row_index=item.row_index,
        attempt=0,
        placement=item.placement,
        end=item.end,
        end_reason=item.reason,
        end_step=item.step,
    )


def _refuse_open(item: m.OpenItem, answer: rules.OpenAnswer, reason: str) -> m.OpenResult:
    return m.OpenResult(trajectory_id=item.trajectory_id, answer=answer, reason=reason)


def _open_result(
    row: Row, verdict: rules.OpenVerdict, prompt_ids: bytes, tables: Tables
) -> m.OpenResult:
    is_open = verdict.answer == "open"
    chunks = tables.load_chunks(row.id) if is_open else []
    contexts = tables.turns.get_contexts(row) if is_open else {}
    own_prompt = contexts.pop(0, None)
    return m.OpenResult(
        trajectory_id=row.id,
        answer=verdict.answer,
        reason=verdict.reason,
        prompt_ids=own_prompt or prompt_ids,
        tokens=b"".join(chunk.tokens for chunk in chunks),
        contexts=tuple(contexts.values()),
        parents=tables.turns.get_parents(row) if is_open else (),
        own_prompt=own_prompt is not None,
        options=msgspec.json.decode(tables.turns.get_options(row), type=m.TurnOptions),
        segment_lengths=rules.segment_lengths(chunks),
        num_tokens=row.num_tokens,
        tokens_lost=row.tokens_lost,
        attempt=row.attempt,
        weight_version=row.weight_version,
        version_step=row.version_step,
        finish_reason=row.finish_reason,
        reward=rules.decode_reward(row.reward_bits),
        reward_reason=row.reward_reason,
    )


def _reward_result(
    trajectory_id: str, verdict: rules.RewardVerdict, row: Row | None
) -> m.StoredReward:
    result = m.StoredReward(
        trajectory_id=trajectory_id, answer=verdict.answer, reason=verdict.reason
    )
    if row is None or verdict.answer in ("fenced", "refused"):
        return result
    return msgspec.structs.replace(
        result,
        reward=rules.decode_reward(row.reward_bits),
        reward_reason=row.reward_reason,
        finish_reason=row.finish_reason,
    )


def _join_payload(chunks: Sequence[Chunk]) -> tuple[bytes, bytes]:
    """Return all tokens and all log-probs."""
    tokens = b"".join(chunk.tokens for chunk in chunks)
    return tokens, b"".join(chunk.logprobs for chunk in chunks)


def _fetched_size(row: Row, prompt: bytes, prompt_ids: bytes) -> int:
    """Return a lower bound of the row's bytes in a reply, with a span for each placement."""
    payload = len(prompt) + len(prompt_ids) + 2 * rules.TOKEN_BYTES * row.all_tokens
    spans = m.SPAN_BYTES * min(row.placement, row.num_tokens)
    return payload + spans + 4 * len(row.reward_detail or "") + 4096
