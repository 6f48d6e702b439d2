"""Real runs with an environment: turns are sampled and answered, books agree, and a tool that is
not to be repeated is not, whoever dies."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from laminar.events import events as ev
from laminar.names.roles import Role
from laminar.tasks.data.tokenizer import load_tokenizer
from tests.run.call_kills import PLACES, Kills, Stored, problems_of
from tests.run.conftest import ROOT, Finished, check_books, history, laminar, train

pytestmark = [pytest.mark.process, pytest.mark.long]
CONFIG = "configs/recipes/calculator/run.toml"
AGENTS = "configs/agents/openai_calculator.toml"
SMALL = (
    "trainer.total_training_steps=3",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
    "data.train_batch_size=4",
    "data.val_size=16",
    "data.dataset_size=2000",
)
KILLS = """
import os
import signal
import subprocess
from pathlib import Path

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

class Killer:
    def reset(self, **row):
        pass

    def add(self, a: int, b: int) -> int:
        '''Add two whole numbers. The third call of all kills the host, with its work half done.

        Args:
            a: The first number.
            b: The second number.
        '''
        leave = "sleep 1000 >/dev/null & echo $!"  # in a session without a parent
        daemon = subprocess.check_output(["setsid", "sh", "-c", leave])
        with open({log!r}, "a") as log:
            log.write(f"{int(daemon)}\\n")
        if len(Path({log!r}).read_text().splitlines()) == 3:
            os.kill(parent(parent(os.getppid())), signal.SIGKILL)
            signal.pause()
        return a + b
"""
AGENT = (
    KILLS
    + """

import json
import urllib.request

NUMBERS = dict.fromkeys("ab", dict(type="integer"))
ADD = dict(name="add", parameters=dict(type="object", properties=NUMBERS))

def solve(task, endpoint):
    messages = [dict(role="user", content=task["prompt"])]
    headers = dict(Authorization="Bearer " + endpoint.api_key)
    while True:
        body = json.dumps(dict(messages=messages, tools=[dict(function=ADD)])).encode()
        request = urllib.request.Request(endpoint.base_url + "/chat/completions", body, headers)
        said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        result = str(Killer().add(1, 2))  # once for each turn that was read
        if "tool_calls" not in said:
            return None
        messages.append(said)
        for call in said["tool_calls"]:
            messages.append(dict(role="tool", tool_call_id=call["id"], content=result))
"""
)

TREE = """
import hashlib
import json
import urllib.request


def user(text):
    return dict(role="user", content=text)


def solve(task, endpoint):
    headers = dict(Authorization="Bearer " + endpoint.api_key)
    replies = []

    def ask(messages):
        body = json.dumps(dict(messages=messages)).encode()
        request = urllib.request.Request(endpoint.base_url + "/chat/completions", body, headers)
        replies.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
        return replies[-1]

    main = [user(task["prompt"])]
    main += [ask(main), user("Calculate it again.")]
    ask([user("Calculate 1 + 2.")])  # a sub-agent
    main += [ask(main), user("Sure?")]
    compacted = [main[0], dict(role="assistant", content="I have tried."), main[-1]]
    for _ in range(2):  # and two samples of one request
        ask(compacted)
    ask([user("1+2")])  # shorter than what was sampled before
    said = "".join(reply["content"] or "" for reply in replies)
    return hashlib.sha256(said.encode()).digest()[0] / 255
"""


def effects(run: Finished) -> list[tuple[str, int, int, str]]:
    """(trajectory, attempt, turn, status) of every call."""
    with sqlite3.connect(run.directory / "store.sqlite") as database:
        sql = "SELECT trajectory_id, attempt, turn, status FROM effects"
        return database.execute(sql).fetchall()


def test_turns_are_answered_and_the_books_agree(tmp_path: Path) -> None:
    run = train(tmp_path, *SMALL, config=CONFIG)
    assert run.code == 0, run.output
    check_books(run)
    continued = [e for e in history(run.directory) if isinstance(e, ev.TurnRequested) and e.turn]
    assert continued and run.summary["steps"] == 3
    calls = run.summary["calls"]
    assert calls["made"] == sum(calls["by_end"].values()) == len(effects(run))
    assert calls["turns_continued"] == len(continued) and calls["tokens_read_again"]
    assert {status for *_, status in effects(run)} <= {"done", "failed"}
    assert len(effects(run)) >= len(continued) // 2
    tokenizer = load_tokenizer(str(ROOT / "configs/models/calculator-0.6m"))
    with sqlite3.connect(run.directory / "store.sqlite") as database:
        contexts = database.execute("SELECT tokens FROM contexts WHERE turn > 0").fetchall()
    for (tokens,) in contexts:
        told = tokenizer.decode(np.frombuffer(tokens, dtype="<i4").tolist())
        assert told.startswith("\n") and told.endswith("\n") and "<eos>" not in told


@pytest.mark.timeout(600)
def test_who_dies_around_a_call_costs_no_sibling_and_makes_no_call_twice(tmp_path: Path) -> None:
    """Against a run without kills: tokens, contexts, scores, and advantages of smaller groups."""
    reference = Stored(Kills(tmp_path / "undisturbed", "retryable").run())
    runs, made = dict[str, Stored](), 0
    for victim in (Role.AGENT, Role.ROLLOUT, Role.STORE):
        kills = Kills(tmp_path / victim, "at-most-once", victim)
        runs[victim] = Stored(kills.run())
        assert not problems_of(kills, runs[victim], reference)
        assert kills.kills + len(kills.missed) == len(PLACES)
        made += kills.kills
    assert runs[Role.AGENT].smaller and runs[Role.AGENT].lost
    assert not runs[Role.ROLLOUT].dropped and not runs[Role.STORE].dropped
    assert made > 2 * len(PLACES)


@pytest.mark.parametrize("call_semantics", ["at-most-once", "retryable"])
@pytest.mark.parametrize("kind", ["environment", "agent"])
def test_a_host_that_dies_in_a_call_repeats_only_what_may_be(
    tmp_path: Path, call_semantics: str, kind: str
) -> None:
    tool, log = tmp_path / "killer.py", tmp_path / "log"
    words = (f"env.path={tool}", "env.name=Killer")
    source, config = KILLS, CONFIG
    if kind == "agent":
        words = (f"agents.run={tool}:solve", "reward.trial=false")  # which it would kill
        source, config = AGENT, AGENTS
    tool.write_text(source.replace("{log!r}", repr(str(log))))
    words += (f'env.call_semantics="{call_semantics}"',)
    run = train(tmp_path, *SMALL, *words, config=config)
    assert run.code == 0, run.output
    check_books(run)
    assert any(name.startswith("agent") for name in run.summary["lost_by"])
    with sqlite3.connect(run.directory / "store.sqlite") as database:
        sql = "SELECT id FROM trajectories WHERE end_reason = 'env-lost'"
        lost = database.execute(sql).fetchall()
    daemons, noted = [int(pid) for pid in log.read_text().split()], effects(run)
    while any(map(psutil.pid_exists, daemons)):
        time.sleep(0.05)
    made = len(daemons)
    done = sum(status == "done" for *_, status in noted)
    if call_semantics == "retryable":
        assert not lost and made > done
        return
    assert lost and done < made <= len(noted)  # no call that was noted was made twice


def test_an_agent_with_branches_is_trained_and_its_books_agree(tmp_path: Path) -> None:
    """It calls a sub-agent, compacts its history and asks twice; with weights loaded in flight."""
    agent = tmp_path / "tree.py"
    agent.write_text(TREE)
    words = (f"agents.run={agent}:solve", 'rollout.weight_update="in-flight"')
    words += (
        "rollout.groups_per_version=0",
        "env.max_context_tokens=400",
        "data.max_response_length=200",
    )
    run = train(tmp_path, *SMALL, *words, config=AGENTS)
    assert run.code == 0, run.output
    check_books(run)
    done = laminar("retrain", str(run.directory))
    assert done.returncode == 0 and "identical: 3 steps repeated" in done.stdout, done.stdout
    assert not run.summary["steps_unchanged"]
    with sqlite3.connect(run.directory / "store.sqlite") as database:
        sql = "SELECT DISTINCT turn, parent FROM contexts WHERE turn > 0 ORDER BY turn"
        assert database.execute(sql).fetchall() == [(1, -1), (2, 0), (3, -1), (4, -1), (5, -1)]
    told = laminar("samples", str(run.directory), "--step", "3").stdout
    assert told.count("/5]") == 10 and "after turn" not in told
