"""Processes and functions that hang: each is named, then the run continues or ends, resumable."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.events import events as ev
from tests.run.conftest import SMALL, WORDS, Finished, check_books, laminar
from tools.check.rows.wedges import WEDGES, read_events, watch_wedges
from tools.kit.real_run import Run, read_json

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1200)]

STALL_S = 20
CALCULATOR = [
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "data.train_batch_size=4",
    "data.val_size=16",
    "data.dataset_size=2000",
]
HANGING = """
    import contextlib, signal, time
    from pathlib import Path

    def wait_while(flag):
        while Path(flag).exists():
            time.sleep(0.1)

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_while({reward!r})
        return float(len(set(solution_str)))

    def loss(batch):
        wait_while({loss!r})
        return -batch.advantages * batch.log_ratio.exp()
"""


def test_each_process_that_stands_still_is_named_and_the_run_continues(tmp_path: Path) -> None:
    found: list[str] = []
    watch_wedges(tmp_path / "run", WEDGES["release"], found.append)
    assert len(found) == len(WEDGES["release"])


def test_a_host_of_agents_that_stands_still_is_named(tmp_path: Path) -> None:
    settings = [*CALCULATOR, "trainer.total_training_steps=1000"]
    config = "configs/recipes/calculator/run.toml"
    found: list[str] = []
    watch_wedges(tmp_path / "run", ["agent-0"], found.append, config=config, settings=settings)
    assert found


def find_waits(run: Run, event: str) -> list[dict[str, str]]:
    waits = read_json(run.run_dir / "status.json").get("waits", [])
    return [wait for wait in waits if wait["event"] == event]


class Hanging:
    """A run of the words recipe whose functions hang as long as a file exists."""

    def __init__(self, directory: Path) -> None:
        self.flags = {name: directory / f"{name}.flag" for name in ("reward", "loss")}
        code = directory / "hanging.py"
        flags = {name: str(path) for name, path in self.flags.items()}
        code.write_text("\n".join(line[4:] for line in HANGING.format(**flags).splitlines()))
        settings = [
            *(s for s in SMALL if not s.startswith("trainer.total")),
            "trainer.total_training_steps=1000",
            f"reward.custom_reward_function.path={code}",
            "reward.custom_reward_function.name=reward",
            "reward.timeout_s=5",
            f"algorithm.policy_loss.loss_mode={code}:loss",
            f"coordinator.stall_timeout_s={STALL_S}",
        ]
        self.run = Run(directory / "run", WORDS, settings)

    def waits(self, event: str) -> list[dict[str, str]]:
        return find_waits(self.run, event)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    made = Hanging(tmp_path)
    try:
        yield made
    finally:
        for flag in made.flags.values():
            flag.unlink(missing_ok=True)
        made.run.close()


def test_a_reward_that_never_returns_is_shown_and_killed_although_it_ignores_sigterm(
    hanging: Hanging,
) -> None:
    run = hanging.run
    run.until_step(1)
    hanging.flags["reward"].touch()
    run.until(lambda: bool(hanging.waits("trajectory-rewarded")), "the reward is awaited")
    (wait, *_) = hanging.waits("trajectory-rewarded")
    assert wait["owner"].startswith("rollout-") and "reward" in wait["what"]
    status = run.run_dir / "status.json"
    run.until(
        lambda: "timeout" in ((read_json(status).get("reward_errors") or {}).get("by_reason", {})),
        "the timeout is counted",
    )
    hanging.flags["reward"].unlink()
    run.until_step(run.step() + 1)
    assert not [e for e in read_events(run.run_dir) if isinstance(e, ev.RunStalled)]


def test_a_step_that_never_ends_restarts_its_trainer_once_then_ends_the_run(
    hanging: Hanging,
) -> None:
    """The process sends heartbeats: only the passes that it no longer counts tell."""
    run = hanging.run
    run.until_step(3)
    hanging.flags["loss"].touch()
    before = read_json(run.run_dir / "status.json")["processes"]["trainer-0"]
    run.until(lambda: bool(hanging.waits("process-exited")), "the trainer is restarted")
    (wait, *_) = hanging.waits("process-exited")
    assert wait["owner"] == "node-0" and "step-completed from trainer-0" in wait["what"]
    assert run.end() == 1
    stalled = [e for e in read_events(run.run_dir) if isinstance(e, ev.RunStalled)]
    assert [e.owner for e in stalled] == ["trainer-0"] * 2
    assert stalled[0].awaited == "step-completed"  # then perhaps one of its repeats
    stacks = (run.run_dir / "logs" / "latest" / "trainer-0.stacks").read_text()
    assert "wait_while" in stacks and before
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["resumable"] and "trainer-0 holds the run up" in run.said()
    hanging.flags["loss"].unlink()
    steps = f"trainer.total_training_steps={summary['steps'] + 1}"
    done = laminar("train", "--resume", str(run.run_dir), steps)
    assert done.returncode == 0, done.stdout + done.stderr
    check_books(Finished(run.run_dir, 0, done.stdout))


def test_a_checkpoint_that_never_loads_is_named_and_its_trainer_restarted(
    tmp_path: Path, shim: Path
) -> None:
    """Its file server no longer answers; the deadline of the load itself is half an hour."""
    run_dir, flag = tmp_path / "run", tmp_path / "flag"
    environment = {"LD_PRELOAD": shim, "FAILING_DIR": run_dir, "FAILING_FLAG": flag}
    settings = [
        *(s for s in SMALL if not s.startswith(("trainer.total", "trainer.save"))),
        "trainer.total_training_steps=1000",
        "trainer.save_freq=1",
        f"coordinator.stall_timeout_s={STALL_S}",
    ]
    run = Run(run_dir, WORDS, settings, {name: str(path) for name, path in environment.items()})
    try:
        run.until_step(3)
        flag.write_text("9999")
        os.kill(read_json(run_dir / "status.json")["processes"]["trainer-0"], signal.SIGKILL)
        run.until(lambda: bool(find_waits(run, "checkpoint-loaded")), "the checkpoint is awaited")
        run.until(lambda: bool(find_waits(run, "process-exited")), "the trainer is restarted")
        flag.unlink()
        step = run.step()
        run.until_step(step + 2)
        stalled = [e for e in read_events(run_dir) if isinstance(e, ev.RunStalled)]
        assert [(e.owner, e.awaited) for e in stalled] == [("trainer-0", "checkpoint-loaded")]
        run.drain()
        assert run.end() == 0, run.said()
    finally:
        flag.unlink(missing_ok=True)
        run.close()
    check_books(Finished(run_dir, 0, run.said()))
