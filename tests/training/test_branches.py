"""A thousand random sessions of agents as batches: what branches share is trained once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForTokenClassification

from laminar.config import DataConfig
from laminar.config.tasks import AgentsConfig
from laminar.storage.rules import TokenSpan
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.chat_messages import read_request
from laminar.tasks.environments.conversation import Chat, ChatFormat
from laminar.training.critic import Critic
from laminar.training.learner import Learner
from laminar.training.model.packing import build_passes
from laminar.training.model.policy import Compute, LoadedPolicy, build_critic
from laminar.training.model.shared_prefix_attention import read_prompts_once
from laminar.training.ranks import Ranks
from laminar.training.steps import TrainSample
from tests.training.test_learner_objective import (
    assert_same_gradient,
    disturbed,
    gradients,
    plain_advantages,
    plain_objective,
    recorded,
    token_log_probs,
)
from tools.kit.tool_models import END, TEMPLATE, schema, tokenizer

Make = Callable[..., Any]
VOCAB = 432
CPU = torch.device("cpu")
SEEDS, GROUPS, SIBLINGS = 25, 10, 4  #: a thousand sessions
TOOLS = [schema("add", a="integer", b="integer")]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
WORDS = ("sum", "485", "a b", "x\ny", '{"k": 1}', "é", "  ", "0.5")


class Session:
    """A random agent: it resumes conversations, compacts them, calls sub-agents and repeats."""

    def __init__(self, rng: np.random.Generator, form: ChatFormat, task: str) -> None:
        self.rng, self.form, self.task = rng, form, task
        self.chat = Chat(form, PromptRow(0, "", None, {}, "test"))
        self.requests: list[list[dict[str, Any]]] = []  #: messages, by turn
        self.replies: list[dict[str, Any]] = []
        self.parents, self.contexts, self.sampled = list[int](), list[Any](), list[Any]()

    def text(self) -> str:
        return " ".join(self.rng.choice(WORDS, self.rng.integers(1, 4)))

    def run(self, turns: int) -> Session:
        for turn in range(turns):
            kind = self.rng.choice(["extend", "extend", "repeat", "sub-agent", "compact"])
            base = int(self.rng.integers(turn)) if turn else -1
            if turn == 0:
                messages, parent = [{"role": "user", "content": self.task}], -1
            elif kind == "extend":  # the last turn, or one before it, as after a sub-agent
                base = turn - 1 if self.rng.random() < 0.5 else base
                messages, parent = [*self.requests[base], *self.extend(self.replies[base])], base
            elif kind == "repeat":
                messages, parent = self.requests[base], self.parents[base]
            else:
                system = [{"role": "system", "content": "Sub."}] * (kind == "sub-agent")
                messages = [*system, {"role": "user", "content": f"{kind} {turn} {self.text()}"}]
                parent = -1
            call = CALL if self.rng.random() < 0.3 else ""
            self.take_turn(messages, parent, f"{turn}:{self.text()}{call}")
        return self

    def extend(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """Send the reply back as clients do, with a message of the user or the result of a call."""
        if "tool_calls" not in reply:
            return [reply, {"role": "user", "content": self.text()}]
        (call,) = reply["tool_calls"]
        arguments = json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())))
        sent = {"id": f"x{call['id']}", "function": {**call["function"], "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": sent["id"], "content": self.text()}
        return [{"role": "assistant", "content": reply["content"], "tool_calls": [sent]}, result]

    def take_turn(self, messages: list[dict[str, Any]], parent: int, said: str) -> None:
        asked = read_request(json.dumps({"messages": messages, "tools": TOOLS}).encode())
        turn = self.chat.render_request(asked)
        assert turn.parent == parent
        self.chat.accept_request(asked, turn)
        # as few tokens as the tokenizer would take, or one for each character
        parts = [said] if self.rng.random() < 0.5 else re.split("(<.*?>|.)", said)
        ids = [i for part in [*parts, END] for i in self.form.tokenizer.encode(part)]
        completion = json.loads(self.chat.make_reply(ids, "name", cut=False))
        self.requests.append(messages)
        self.replies.append(completion["choices"][0]["message"])
        self.parents.append(parent)
        self.contexts.append(list(turn.ids))
        self.sampled.append(ids)

    def path(self, turn: int) -> list[int]:
        before = self.path(self.parents[turn]) if self.parents[turn] >= 0 else []
        return [*before, *self.contexts[turn], *self.sampled[turn]]


def as_sample(session: Session, group: int, sibling: int) -> TrainSample:
    rng = np.random.default_rng([group, sibling])
    response = np.array([i for ids in session.sampled for i in ids], dtype=np.int32)
    prompt, *contexts = (np.array(ids, dtype=np.int32) for ids in session.contexts)
    line = session.parents == list(range(-1, len(session.parents) - 1))
    first = int(rng.integers(1, len(response)))
    return TrainSample(
        sample_id=f"0.{group}.{sibling}",
        group_id=f"0.{group}",
        prompt_ids=prompt,
        response_ids=response,
        logprobs=np.zeros(len(response), dtype=np.float32),
        reward=float(rng.random()),
        temperature=(0.7, 1.0, 1.3)[sibling % 3],
        truncated=sibling == 1,
        spans=(
            TokenSpan("rollout-0", 3, 3, first),
            TokenSpan("rollout-1", 4, 4, len(response) - first),
        ),
        turns=tuple(map(len, session.sampled)),
        contexts=tuple(contexts),
        parents=() if line else tuple(session.parents),
    )


@pytest.fixture(scope="module")
def form() -> ChatFormat:
    known = tokenizer(TEMPLATE.partition("{% endfor %}")[2])  # without the tools, which are long

    def decode(ids: list[int]) -> str:
        return str(known.decode(ids)).removesuffix(END)

    ends = frozenset([known.eos_token_id])
    return ChatFormat(known, DataConfig(), ends, decode, "m", AgentsConfig(max_branches=99))


@pytest.fixture(scope="module")
def sessions(form: ChatFormat) -> list[list[list[Session]]]:
    """By seed and group."""
    found = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        found.append(
            [
                [
                    Session(rng, form, f"task {group}").run(int(rng.integers(1, 7)))
                    for _ in range(SIBLINGS)
                ]
                for group in range(GROUPS)
            ]
        )
    return found


def as_samples(groups: list[list[Session]]) -> list[TrainSample]:
    return [as_sample(s, g, k) for g, group in enumerate(groups) for k, s in enumerate(group)]


def make_branched_policy(make_policy: Make, seed: int = 0, *, once: bool = False) -> LoadedPolicy:
    policy: LoadedPolicy = make_policy(
        seed, limit=VOCAB, vocab_size=VOCAB, max_position_embeddings=1024
    )
    if once:
        read_prompts_once(policy.model)
        return LoadedPolicy(policy.model, VOCAB, prompts_once=True)
    return policy


OPTIONS: Sequence[dict[str, Any]] = (
    {},
    {"algorithm.loss_agg_mode": "seq-mean-token-mean", "algorithm.truncated": "mask"},
    {"algorithm.loss_agg_mode": "seq-mean-token-sum", "algorithm.use_kl_loss": True},
    {"algorithm.rollout_correction.bypass_mode": True, "algorithm.entropy_coeff": 0.1},
    {
        "algorithm.loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.8_1.2",
    },
)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_batch_of_random_sessions_has_the_gradient_of_separate_rows(
    seed: int, sessions: list[Any], make_policy: Make, make_config: Make
) -> None:
    """Against one masked row at a time in float64, with advantages of one row per session."""
    options, once = OPTIONS[seed % len(OPTIONS)], seed % 2 == 1
    config = make_config({"trainer.micro_batch_tokens": 700} | options)
    policy, reference = (make_branched_policy(make_policy, s, once=once) for s in (0, 1))
    plain = [make_branched_policy(make_policy, s).model.double() for s in (0, 1)]
    samples = as_samples(sessions[seed])
    assert sum(bool(s.parents) for s in samples) > 10
    samples = disturbed(recorded(plain[0], samples), 0.3)
    with torch.no_grad():
        proximal = {s.sample_id: token_log_probs(plain[0], s) for s in samples}
    use_kl = config.algorithm.use_kl_loss
    loss, pg = plain_objective(plain[0], samples, config, proximal, plain[1] if use_kl else None)
    loss.backward()
    result = Learner(config, policy, reference=reference).train_step(samples, 5)
    assert result.metrics["actor/pg_loss"] == pytest.approx(float(pg.detach()), rel=1e-4, abs=1e-6)
    found, expected = gradients(policy.model), gradients(plain[0])
    assert_same_gradient(found, expected)
    lengths = [len(s.response_ids) for s in samples]
    is_sum = config.algorithm.loss_agg_mode == "seq-mean-token-sum"
    tolerance = 1e-6 * (np.mean(lengths) if is_sum else 1.0)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < tolerance, name
    assert result.num_tokens == sum(lengths)
    assert result.metrics["response_length/mean"] == pytest.approx(np.mean(lengths))
    assert result.metrics["perf/total_num_tokens"] == sum(s.length for s in samples)
    assert sum(m.tokens for m in result.mismatch.values()) <= sum(lengths)
    leaves = [len(set(range(len(s.turns))) - set(s.parents)) if s.parents else 1 for s in samples]
    found_branches = [result.metrics[f"branches/{name}"] for name in ("mean", "max")]
    assert found_branches == [pytest.approx(np.mean(leaves)), max(leaves)]


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_sampled_token_is_in_one_loss_behind_what_its_engine_read(
    once: bool, ranks: int, sessions: list[Any]
) -> None:
    for groups in sessions:
        samples = as_samples(groups)
        by_id = dict(zip([s.sample_id for s in samples], chain(*groups), strict=True))
        given = list[str]()
        for rank in range(ranks):
            whole = Ranks(rank, ranks)
            for micro in build_passes(samples, 900, CPU, prompts_once=once, ranks=whole):
                if micro.empty:
                    continue
                given += micro.sample_ids
                check_pass(micro, by_id, once=once)
        assert sorted(given) == sorted(by_id)


def check_pass(micro: Any, by_id: dict[str, Session], *, once: bool) -> None:
    """Each token is predicted at a place of its own: the end of what its engine read before it."""
    read = micro.rows.input_ids
    flat, width = read.flatten().tolist(), read.shape[1]
    positions = micro.rows.positions
    depth = torch.arange(width)[None].expand_as(read) if positions is None else positions
    depth = depth.flatten().tolist()
    places = micro.rows.index.split(micro.rows.counts.tolist())
    for sample_id, index in zip(micro.sample_ids, places, strict=True):
        session, left = by_id[sample_id], iter(index.tolist())
        for turn, ids in enumerate(session.sampled):
            whole = session.path(turn)
            for at in range(len(whole) - len(ids), len(whole)):
                place = next(left)
                assert (flat[place], depth[place]) == (whole[at - 1], at - 1)
        assert next(left, None) is None
    targets = [i for name in micro.sample_ids for ids in by_id[name].sampled for i in ids]
    assert micro.rows.targets.tolist() == targets
    if not once:
        assert len({*micro.rows.index.tolist()}) == len(micro.rows.index)


def test_ids_are_never_made_from_text_again(form: ChatFormat, sessions: list[Any]) -> None:
    """And yet they spell what the template writes for the whole request."""
    tokenizer = form.tokenizer
    for session in chain(*sessions[0], *sessions[1]):
        for turn, messages in enumerate(session.requests):
            asked = read_request(json.dumps({"messages": messages}).encode())
            forms = [dict(message) for message in asked.messages]
            for message in forms:  # arguments as the model wrote them
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = {"a": 1, "b": 2}
            spelled = tokenizer.apply_chat_template(
                forms, tools=TOOLS, tokenize=False, add_generation_prompt=True
            )
            before = session.path(turn)[: -len(session.sampled[turn])]
            assert tokenizer.decode(before) == spelled


def test_sequence_losses_see_the_whole_session(
    sessions: list[Any], make_policy: Make, make_config: Make
) -> None:
    """However its turns branch: a session has one ratio, one length and one mask."""
    policy = make_branched_policy(make_policy)
    for loss in ("gspo", "geo_mean"):
        config = make_config(
            {
                "algorithm.policy_loss.loss_mode": loss,
                "algorithm.rollout_correction.bypass_mode": True,
                "algorithm.loss_agg_mode": "seq-mean-token-mean",
                "trainer.micro_batch_tokens": 1,
            }
        )
        samples = as_samples(sessions[3])
        samples = disturbed(recorded(policy.model, samples), 0.2)
        Learner(config, policy).train_step(samples, 5)
        found = gradients(policy.model)
        double = make_branched_policy(make_policy).model.double()
        total = torch.zeros((), dtype=torch.float64)
        a, advantages = config.algorithm, plain_advantages(samples)
        for s in samples:
            log_ratio = token_log_probs(double, s) - torch.from_numpy(s.logprobs).double()
            advantage = advantages[s.sample_id]
            if loss == "gspo":
                ratio = log_ratio.mean().exp()
                bounded = ratio.clamp(1 - a.clip_ratio_low, 1 + a.clip_ratio_high)
                value = torch.maximum(-advantage * ratio, -advantage * bounded)
            else:
                sign = np.sign(advantage)
                bounded = log_ratio.clamp(-a.clip_ratio_low, a.clip_ratio_high)
                chosen = sign * torch.minimum(sign * log_ratio, sign * bounded)
                value = -advantage * chosen.mean().exp()
            total = total + value / len(samples)  # the mean of the sequences' own means
        total.backward()
        assert_same_gradient(found, gradients(double))


@pytest.mark.parametrize("once", [False, True])
def test_a_critic_reads_each_turn_behind_its_own_branch(
    once: bool, sessions: list[Any], make_policy: Make, make_config: Make
) -> None:
    settings = make_branched_policy(make_policy).model.config
    settings.num_labels = 1
    torch.manual_seed(4)
    model = Qwen2ForTokenClassification(settings).float().eval()
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.3)
    critic = build_critic(model, VOCAB, device=CPU)
    critic = replace(critic, prompts_once=critic.prompts_once and once)
    config = make_config({"algorithm.adv_estimator": "gae", "trainer.micro_batch_tokens": 700})
    samples = as_samples(sessions[5])
    learner = Critic(config, critic, Compute(torch.float32, 1024))
    valued = learner.assign_values(samples)
    for session, sample in zip(chain(*sessions[5]), valued, strict=True):
        wanted = []
        for turn, ids in enumerate(session.sampled):
            with torch.no_grad():
                read = model(input_ids=torch.tensor([session.path(turn)])).logits[0, :, 0]
            wanted += read[-len(ids) - 1 : -1].tolist()
        np.testing.assert_allclose(sample.values, wanted, atol=1e-5)
    assert learner.train_step(valued, 0)["critic/grad_norm"] > 0
