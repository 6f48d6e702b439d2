"""Trials of agents: their conversations, with the run's model or a stand-in."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import pytest

from laminar.cli.commands import run_command
from laminar.config import load_config
from laminar.launch.agent_check import STAND_IN, AgentTrial, sample_text, try_agents
from laminar.storage.branches import ROOT
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.data.tokenizer import end_ids, load_tokenizer

pytestmark = pytest.mark.process

CONFIG = str(Path(__file__).parents[2] / "configs/agents/openai_calculator.toml")
ASK = """
import json, time, urllib.request

def ask(endpoint, *texts, **more):
    messages = [dict(role="user", content=text) for text in texts]
    body = json.dumps(dict(model="any", messages=messages, **more)).encode()
    headers = {"Authorization": "Bearer " + endpoint.api_key}
    request = urllib.request.Request(endpoint.base_url + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def write_agent(tmp_path: Path, body: str) -> str:
    path = tmp_path / "mine.py"
    lines = textwrap.indent(textwrap.dedent(body), "    ")
    path.write_text(f"{ASK}\ndef solve(task, endpoint):\n{lines}")
    return f"{path}:solve"


def trials_of(
    tmp_path: Path, body: str, *settings: str, limit_s: float | None = None
) -> tuple[list[AgentTrial], list[str]]:
    agent = write_agent(tmp_path, body)
    config = load_config([CONFIG], [f"agents.run={agent}", *settings])
    tokenizer = load_tokenizer(config.model.name)
    rows = [PromptRow(i, f"Row {i}.", str(i), {}, "test") for i in range(2)]
    sample = sample_text(tokenizer, end_ids(config.model.name, tokenizer))
    return asyncio.run(try_agents(config, tokenizer, rows, sample, limit_s))


def test_a_trial_has_the_turns_and_branches_of_each_row(tmp_path: Path) -> None:
    body = """
    if task["answer"] == "1":
        raise OSError("no docker")
    assert ask(endpoint, task["prompt"]) == "I do not know."
    assert ask(endpoint, "Other.", stop="not", temperature=0) == "I do "
    assert ask(endpoint, "Third.", max_tokens=3) == "I d"
    return dict(score=0.5, steps=3)
    """
    (first, second), told = trials_of(tmp_path, body)
    assert [turn.parent for turn in first.turns] == [ROOT] * 3 and first.branches == [[0], [1], [2]]
    assert [len(turn.sampled) for turn in first.turns] == [len(STAND_IN) + 1, len("I do not"), 3]
    assert first.outcome == "score 0.5" and not first.is_failed
    assert second.is_failed and "no docker (mine.py:" in second.outcome and not second.turns
    assert len(told) == 1 and "temperature = 0" in told[0]


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("ask(endpoint, 'a')", "the reward functions score its last turn"),
        ("ask(endpoint, 'a')\nreturn 'x'", "not-a-number: "),
        ("ask(endpoint, 'a')\ntime.sleep(60)", "it was still running after 0.5 s"),
        ("while True: ask(endpoint, 'a')", "ended by max-turns"),
        (
            "while True:\n    try: ask(endpoint, 'a')\n    except Exception: pass",
            "it was still running after 0.5 s",
        ),
    ],
)
def test_a_trial_tells_how_an_agent_ended(tmp_path: Path, body: str, outcome: str) -> None:
    trials, _ = trials_of(tmp_path, body, "env.max_turns=3", limit_s=0.5)
    assert all(outcome in trial.outcome and not trial.is_failed for trial in trials), trials


def run_try(*words: str) -> int:
    return run_command(["agent", "try", "-c", CONFIG, "data.dataset_size=300", *words])


def test_the_command_shows_conversations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "ask(endpoint, task['prompt'])\nask(endpoint, 'Other.', temperature=0)\nreturn 1"
    assert run_try(write_agent(tmp_path, body), "data.max_response_length=8") == 0
    out, err = capfd.readouterr()
    rows = out.split("row ")[1:]
    assert len(rows) == 3
    for row in rows:
        assert "  turn 0: " in row and "    < Calculate " in row and "    > " in row
        assert "score 1" in row or "the reward functions" in row  # all tokens may be used up
    assert "(one branch)" in out or "(2 branches)" in out
    assert "temperature = 0" in err or "turn 1" not in out


def test_without_a_model_and_without_a_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_try(write_agent(tmp_path, "ask(endpoint, 'a')"), "--without-model") == 0
    assert capfd.readouterr().out.count(f"    > {STAND_IN}") == 3
    assert run_try(write_agent(tmp_path, "return 1"), "--without-model") == 1
    assert capfd.readouterr().out.count("the agent made no request") == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["agents.run=", "env.max_turns=10", "env.max_context_tokens=2048"], "there is no agent"),
        (["no_such.py:solve"], "no_such.py"),
        (["agents.run=", 'agents.command=["no-such-program"]'], "no program 'no-such-program'"),
    ],
)
def test_what_cannot_be_tried_is_one_sentence(
    words: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_try("--without-model", *words) == 2
    out, err = capfd.readouterr()
    assert told in err and "Traceback" not in err and not out
