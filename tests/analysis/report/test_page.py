"""The page about a run: true figures, every answer escaped, one file that needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path
from xml.etree import ElementTree

import pytest

from laminar.analysis.report.page import render_page
from laminar.analysis.report.page_data import PageData, page_data
from laminar.analysis.report.summary import summarize_run
from laminar.analysis.report.summary_lines import format_headline, list_problems
from laminar.cli import report
from laminar.config import dump_config, load_config
from tests.analysis.conftest import Cli
from tools.kit.run_directory import CLOCK_NS, make_run, world_log, write_steps

MODEL = Path(__file__).parents[3] / "configs/models/spell-0.6m"
SECOND = 10**9


def decode(ids: list[int]) -> str:
    return f"<script>{len(ids)}</script>"


@pytest.fixture
def run(copy: Path) -> Path:
    """The made run with figures, a timeline and a configuration."""
    lines = [
        {"training/global_step": step, "reward/mean": 0.25 * step, "reward_extra/format": 0.5}
        | {"actor/pg_loss": 0.1 * step, "actor/pg_clipfrac": 0.0, "actor/lr": 1e-6}
        | {f"critic/advantages/{name}": float(step) for name in ("max", "mean", "min")}
        for step in (1, 2, 3)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (copy / "metrics.jsonl").write_text(text + '{"step": 3, "val/version": 4}\n{"torn')
    write_steps(copy, "rollout-0", [(CLOCK_NS, CLOCK_NS + SECOND // 100, 1, 30)])
    machine = {"gpus": ["NVIDIA H100", "NVIDIA H100"], "cpu": "EPYC", "cores": 64}
    machine |= {
        "memory_gib": 512.0,
        "python": "3.12.1",
        "laminar": "0.1.0",
        "directory": "/home/me",
    }
    machine |= {"laminar_commit": "0123456789ab", "directory_commit": "fedcba987654-dirty"}
    line = {"run": "run", "process": "node-0", "event": "machine", "level": "info"} | machine
    (copy / "logs" / "attempt_1").mkdir(parents=True, exist_ok=True)
    text = json.dumps(line | {"timestamp": "2026-11-24T13:22:04Z"})
    (copy / "logs" / "attempt_1" / "node-0.jsonl").write_text(text + "\n")
    settings = [f"model.name={MODEL}", "data.dataset=gcd", "optim.lr=3e-5", "seed=7"]
    (copy / "config.toml").write_text(dump_config(load_config([], settings)))
    return copy


def svgs(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)


def test_the_page_needs_nothing_else(run: Path) -> None:
    page = render_page([page_data(run, decode)])
    for outside in ("<link", "<img", "http:", "https:", "url(", "@import", "src="):
        assert outside not in page, outside
    for svg in svgs(page):
        ElementTree.fromstring(svg)
    titles = " ".join(re.findall(r'aria-label="([^"]*)"', page))
    drawn = "Evaluation,Reward,Loss,Advantages,Trained response lengths,Staleness,per second"
    for chart in (*drawn.split(","), "Time per process", "format"):
        assert chart in titles, chart
    assert page.count("<script") == 1 and page.rstrip().endswith("</script></body></html>")
    assert "&lt;script&gt;" in page, "what a model wrote is text"


def test_the_head_says_what_ran_where(run: Path) -> None:
    """With what was set; of a run without these files, what is known."""
    page = render_page([page_data(run, decode)])
    for said in (
        "<th>model</th><td>spell-0.6m</td>",
        "<th>hardware</th><td>2 x NVIDIA H100; EPYC, 64 cores, 512 GiB</td>",
        "0.1.0 at 0123456789ab, Python 3.12.1",
        "/home/me at fedcba987654-dirty",
        "<code>optim.lr = 3e-05</code>",
        "<code>seed = 7</code>",
    ):
        assert said in page, said
    assert "\neps = 1e-08" in page and "<code>optim.eps" not in page
    (run / "config.toml").unlink()
    shutil.rmtree(run / "logs")
    bare = render_page([page_data(run, decode)])
    assert "<th>seed</th>" in bare and "<th>hardware</th>" not in bare


def test_the_closed_line_of_a_sample_has_prompt_and_right_answer(run: Path) -> None:
    page = render_page([page_data(run, lambda ids: f"<|im_start|>{'word ' * 40}" + "the question")])
    closed = re.findall(r'<details class="sample"><summary>(.*?)</summary>', page)
    assert closed and all("…" in line and "the question" in line for line in closed)
    assert all('<span class="of">truth</span>' in line for line in closed)
    assert not any("im_start" in line.partition("response")[0] for line in closed)


def test_figures_are_those_of_the_run(run: Path) -> None:
    data = page_data(run, decode)
    assert data.get_points("reward/mean") == ([1.0, 2.0, 3.0], [0.25, 0.5, 0.75])
    told = dict(format_headline(data))
    assert told["outcome"] == "complete"
    assert told["reward"] == "0.25 -> 0.75 (first and last step)"
    assert told["eval accuracy"].startswith("1.000 ± 0.000 -> 1.000 ± 0.000 (4 samples")
    seconds, rate = data.rates["generated"]
    assert sum(rate) * data.summary["seconds"] / len(seconds) == pytest.approx(30)
    trained = sum(data.rates["trained"][1]) * data.summary["seconds"] / len(seconds)
    assert trained == pytest.approx(10 + 20 + 30)
    assert sum(len(xs) for xs, _ in data.lengths.values()) > 0
    lengths, scores = data.scores
    assert lengths == [10]  # all have this length, and stay together
    with sqlite3.connect(run / "store.sqlite") as store:
        mean = "SELECT AVG(reward) FROM trajectories WHERE \"end\" = 'trained'"
        assert scores == [pytest.approx(store.execute(mean).fetchone()[0])]
    for shares in data.staleness.values():
        assert sum(shares.values()) == pytest.approx(1)


def test_what_went_wrong_is_told(run: Path) -> None:
    summary = summarize_run(run)
    bad = {
        "failure": "no replica is left",
        "remedy": "fork it",
        "reward_errors": {"error": 9, "timeout": 1},
        "reward_answers": 40,
        "reward_error_first": "KeyError: 'x' (reward.py:4)",
        "trajectories_left_out": 3,
        "left_out": [{"replica": "rollout-1", "version": v} for v in (7, 7, 8)],
        "groups_dropped": {"batch-timeout": 1},
        "tokens_restarted": 1200,
        "coordinator_incarnations": 2,
    }
    assert list(list_problems(summary | bad)) == [
        "the run FAILED: no replica is left; to continue: fork it",
        "the reward FAILED on 10 of 40 responses (error 9, timeout 1), first: KeyError: 'x' "
        "(reward.py:4)",
        "3 trajectories not trained: not generated by the weights they name (rollout-1 v7, "
        "rollout-1 v8)",
        "1 group dropped: batch-timeout",
        "1,200 sampled tokens discarded by restarts",
        "the coordinator was started 2 times",
    ]


def test_runs_side_by_side_share_their_charts_and_axes(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace('"reward/mean": 0.5', '"reward/mean": 0.6'))
    runs = [page_data(run, decode), page_data(other, decode)]
    page = render_page(runs)
    reward = next(svg for svg in svgs(page) if 'aria-label="Reward, mean' in svg)
    assert reward.count("<polyline") == 2 and ">copy</text>" in reward and ">other</text>" in reward
    loss = next(svg for svg in svgs(page) if 'aria-label="Loss' in svg)
    assert loss.count("<polyline") == 1 and "copy = other: 0.2 (at 2)" in loss
    results = page.partition("<h2>Results</h2>")[2].partition("</table>")[0]
    assert results.count("<td>") == 2 * len({name for name, _ in format_headline(runs[0])})
    lengths = [svg for svg in svgs(page) if 'aria-label="Response length (' in svg]
    assert len(lengths) == 2
    assert len({tuple(re.findall(r'"end">([^<]*)<', svg)) for svg in lengths}) == 1


def test_the_command_prints_a_page_and_writes_it(run: Path, tmp_path: Path, cli: Cli) -> None:
    code, out = cli("report", run)
    assert code == 0 and "  outcome" in out and str(run / "report.html") in out
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    code, out = cli("report", run, run, "-o", tmp_path / "two.html")
    assert code == 0 and (tmp_path / "two.html").is_file()
    code, out = cli("report", "--json", run)
    assert code == 0 and json.loads(out) == json.loads((run / "summary.json").read_text())


def test_without_a_tokenizer_the_page_has_everything_but_answers(
    run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(report, "print_error", lambda _, sentence: said.append(sentence))
    assert "summary>" in render_page([page_data(run, decode)])
    (run / "config.toml").unlink()
    code, _ = cli("report", run)
    assert code == 0 and "No responses to show" in (run / "report.html").read_text()
    assert ["shows no responses: " in sentence for sentence in said] == [True]


def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path) -> None:
    make_run(tmp_path / "run", world_log()[:20])
    (tmp_path / "run" / "store.sqlite").unlink()
    data: PageData = page_data(tmp_path / "run", None)
    assert dict(format_headline(data))["outcome"] == "not ended"
    assert "no figures yet" in render_page([data])


def test_no_line_of_a_figure_is_lost(run: Path) -> None:
    """Several lines of one name, and figures that only one of the runs has."""
    first, second = page_data(run, decode), page_data(run, decode)
    ranges = [
        {"prompt_tokens_min": i, "prompt_tokens_max": i, "first_total": 1, "first_correct": 1}
        | {"last_total": 1, "last_correct": 0}
        for i in (3, 4)
    ]
    second.summary["eval_by_prompt_length"] = ranges
    page = render_page([first, second])
    assert "<th>  by prompt length</th><td>-</td><td>3 tokens 1.00 -&gt; 0.00 (1)" in page
    assert page.count("4 tokens 1.00 -&gt; 0.00 (1)") == 1


def test_a_run_without_evaluation_has_no_chart_of_it(run: Path) -> None:
    data = page_data(run, decode)
    assert "Evaluation accuracy" in render_page([data])
    data.summary["evaluations"].clear()
    assert "Evaluation accuracy" not in render_page([data])
