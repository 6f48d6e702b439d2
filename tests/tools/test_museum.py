"""The museum of silent failures and the policies of a resume: cases that take seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import resume_policies
from tools.bench.museum.__main__ import show_case
from tools.bench.museum.cases import CASES
from tools.bench.museum.faults import FAULTS

BY_NAME = {case.name: case for case in CASES}
PAGE = (Path(__file__).parents[2] / "docs" / "museum.md").read_text()


def test_fused_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_case(BY_NAME["experts"], tmp_path / "case")
    assert ".mlp.experts." in capsys.readouterr().out


def test_a_run_that_says_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.bench.museum.__main__.run_case", lambda case, directory: ([], 0))
    assert not show_case(BY_NAME["experts"], tmp_path)
    assert "FAILED experts" in capsys.readouterr().out


def test_each_case_is_on_the_page() -> None:
    assert len(BY_NAME) == 12 and FAULTS.keys() <= BY_NAME.keys()
    for case in CASES:
        (row,) = (line for line in PAGE.splitlines() if f"(`{case.name}`)" in line)
        assert case.report in row


def test_what_each_policy_loses() -> None:
    seen = {p: resume_policies.Resumed(1, p, 200.0).measure(8) for p in resume_policies.POLICIES}
    lost = {policy: each["lost"] for policy, each in seen.items()}
    assert lost.pop("drop") > 0 and not any(lost.values())
    again = [seen[policy]["again"] for policy in ("continue", "snapshot", "reissue")]
    assert again == sorted(again) and 0 < again[0] < 0.1 * again[1]
    assert all(seen[policy]["length"] == 1 for policy in lost)
