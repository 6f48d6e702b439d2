"""The page in headless Chromium, of a finished and of a live run: each tab, a click, the slider."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from laminar.config import dump_config, load_config
from laminar.run.lock import RunLock
from tools.kit.run_directory import make_run, world_log

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("panel", reason="the extra `view` is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)"),
]
TABS = ("Timeline", "Time slider", "Overview", "Samples", "Health")
WAIT_MS = 120_000
#: what each tab shows once it has its data
CONTENT = ("weight versions", "outstanding commands", "steps in", "tokens, by version",
           "Processes")  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("view") / "words"
    make_run(run, world_log())
    settings = {"rollout.engine": "emulated", "data.dataset": "gcd"}
    (run / "config.toml").write_text(dump_config(load_config([settings])))
    return run


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address that the command prints."""
    words = [sys.executable, "-m", "laminar.cli.main", "view", str(run), "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = (re.match(r"open (\S+)", line) for line in process.stdout)
            yield next(match[1] for match in found if match)
        finally:
            process.terminate()


@contextmanager
def browsed(run: Path) -> Iterator[Any]:
    """A page of the run in a browser, which must reach nothing but the server, and log no error."""
    requests, errors = [], []
    with served(run) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: requests.append(request.url))
        page.on("websocket", lambda socket: requests.append(socket.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(address, timeout=WAIT_MS)
        assert "token" not in page.url
        yield page
        browser.close()
    host = re.match(r"http://([^/]+)", address)
    assert host and all(host[1] in url or url.startswith("data:") for url in requests), requests
    assert any(url.startswith("ws:") for url in requests) and not errors


def open_tab(page: Any, name: str) -> None:
    page.locator(".bk-tab", has_text=re.compile(f"^{name}$")).click()
    page.get_by_text(CONTENT[TABS.index(name)]).first.wait_for()


def read_event(page: Any) -> int:
    """The event that the address names, once it names one."""
    page.wait_for_url(re.compile(r"event=\d+"))
    return int(page.url.rpartition("event=")[2])


def click_bars(page: Any) -> None:
    """Click along the picture until a bar tells of itself."""
    box = page.locator(".bk-Canvas, .bk-CanvasPanel, canvas").first.bounding_box()
    for place in range(1, 40):
        page.mouse.click(box["x"] + box["width"] * place / 40, box["y"] + box["height"] * 0.3)
        page.wait_for_timeout(300)
        if page.get_by_text("Open this moment").count():
            break
    page.get_by_text("Open this moment").wait_for()


@pytest.mark.timeout(1200)
def test_a_finished_run(finished: Path) -> None:
    with browsed(finished) as page:
        for name in TABS:
            open_tab(page, name)
        open_tab(page, "Timeline")
        click_bars(page)
        button = page.get_by_text("Open this moment")
        found = re.search(r"#(\d+)", button.inner_text())
        assert found
        before = int(found[1])
        button.click()
        page.wait_for_url(re.compile(f"event={before}$"))
        page.get_by_role("button", name="+1", exact=True).click()
        page.wait_for_url(re.compile(f"event={before + 1}$"))
        page.goto(re.sub(r"event=\d+", "event=9", page.url), timeout=WAIT_MS)
        page.get_by_text("#9 at").first.wait_for()


@pytest.mark.timeout(1200)
def test_a_live_run_grows_on_the_page(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "live"
    shutil.copytree(finished, run)
    segment = sorted((run / "events").glob("*.log"))[-1]
    data = segment.read_bytes()
    segment.write_bytes(data[: len(data) // 2])
    RunLock.create(run, "test")
    with browsed(run) as page:
        page.get_by_text("live, newest event").first.wait_for()
        open_tab(page, "Time slider")
        early = read_event(page)
        segment.write_bytes(data)
        page.get_by_text("ended after").first.wait_for()
        page.get_by_role("button", name="newest", exact=True).click()
        page.wait_for_url(re.compile(f"event=(?!{early}$)"))
        assert read_event(page) > early
        for name in TABS:
            open_tab(page, name)
