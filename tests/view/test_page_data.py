"""Figures, moments and samples of the page, from the facts of a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.analysis.report.samples import SampleFilter, find_samples
from laminar.config import ConfigError
from laminar.view import moment_data, overview_data
from laminar.view.html import render_table
from laminar.view.marks import make_mark
from laminar.view.run_data import RunData
from tools.kit.run_directory import make_run, world_log


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    make_run(tmp_path / "run", world_log())
    return RunData(tmp_path / "run")


def test_every_moment_has_its_event_its_decisions_and_their_reasons(run: RunData) -> None:
    log = {stamped.seq: (stamped, commands) for stamped, commands in world_log()}
    reasons = set()
    for event in (run.first_event, run.last_event // 2, run.last_event):
        moment = run.get_moment(event)
        stamped, commands = log[event]
        assert moment.state.seq == event and moment.stamped.event == stamped.event
        found = [row["to"] for row in moment_data.list_decisions(moment)]
        assert found[: len(commands)] == [c.to for c in commands][: moment_data.DECISIONS_MAX]
        rows = moment_data.list_replicas(moment.state, run.table)
        assert {row[0] for row in rows} == moment.state.members.replicas.keys()
        assert all(len(row) == 6 for row in moment_data.list_waiting(moment))
    for event in range(run.first_event, run.last_event + 1):
        reasons |= {reason.text for reason in moment_data.list_reasons(run.table, event)}
    assert any("group" in text for text in reasons), "why a replica got no work"
    with pytest.raises(ConfigError, match="outside the facts"):
        run.get_moment(run.last_event + 1)


def test_the_sentence_and_curves_of_a_run(run: RunData) -> None:
    text = overview_data.describe_run(run.table, run.state, run.timeline.seconds)
    assert text.startswith("Complete: 3 of 3 steps in") and "evaluation" in text
    curves = {curve.title: curve.points for curve in overview_data.list_health_curves(run.table)}
    mismatch = curves["mismatch KL per token"]
    assert [step for step, _ in mismatch] == [1, 2, 3]
    assert [value for _, value in mismatch] == pytest.approx([0.0, 0.1, 0.2])
    processes = overview_data.list_processes(run.table, run.state)
    assert {"trainer-0", "store-0"} <= {row["process"] for row in processes}


def test_every_bar_of_the_timeline_has_a_mark(run: RunData) -> None:
    sources = [*run.timeline.bars.source.tolist(), *run.timeline.background.source.tolist()]
    marks = [make_mark(run.table, source) for source in sources]
    assert all(mark.event > 0 and "<table>" in mark.text for mark in marks)
    assert {mark.subject[:1] for mark in marks} >= {"", "v", "0", "e"}


def test_text_of_the_model_is_escaped(run: RunData) -> None:
    samples_tab = pytest.importorskip("laminar.view.samples_tab", reason="no extra `view`")
    attack = "<script>alert(1)</script>"
    choice = samples_tab.choose_samples("training", "", "", "worst reward")
    assert choice == SampleFilter(worst=samples_tab.SHOWN)
    samples = list(find_samples(run.directory, choice, lambda ids: attack))
    assert samples
    for sample in samples:
        shown = samples_tab.render_sample(sample._replace(answer=attack, extras={attack: attack}))
        assert attack not in shown and "&lt;script&gt;" in shown
    assert attack not in render_table([{attack: attack}])
    with pytest.raises(ConfigError, match="'x' is not a number"):
        samples_tab.choose_samples("step", "x", "", "latest")
