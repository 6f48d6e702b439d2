"""Try tiny random models of all families in whole runs, and print the table of docs/models.md.

Usage: python -m tools.bench.families [--only KIND,...] [--write]
`--write` puts the rows into docs/models.md, which explains them. Exits with 1 if a family has more
bad cells there than before. Needs vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import transformers

from laminar.config import ConfigError
from laminar.config.families import get_family
from laminar.coordinator.system import RealDisk
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.events.codec import decode_event
from laminar.launch.model_export import export_model
from tools.kit import rank_cases
from tools.kit.family_models import ATTENTION, FAMILIES, write_family_model
from tools.kit.one_process import OneLearner
from tools.kit.rank_cases import OnRanks
from tools.kit.rank_group import RankGroup
from tools.kit.real_run import ROOT, BadRun, Run, check, read_json

PAGE, MARKS = ROOT / "docs" / "models.md", r"(?<=<!-- families -->\n)|(?=<!-- end -->)"
SERVED = {"": 1e-5, "qwen3_5": 0.25}  #: nats
HALF = {"qwen3_5": ["rollout.dtype=bfloat16"]}  #: vLLM for CPU has no other type for it
REASON = 160  #: characters
REWARD = "def score(data_source, solution_str, ground_truth):\n    return len(solution_str) % 7"
SETTINGS = """
rollout.engine=vllm rollout.replicas=1 rollout.vllm.kv_cache_bytes=67108864 rollout.group_size=4
data.train_batch_size=4 data.dataset_size=400 data.val_size=0 data.max_prompt_length=64
data.max_response_length=32 trainer.test_freq=0 trainer.save_freq=1 optim.lr=1e-4 trainer.ranks=2
reward.custom_reward_function.name=score trainer.total_training_steps=100000
""".split()  # noqa: SIM905


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(FAMILIES), help="kinds, by commas")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    args = parser.parse_args()
    before, former, after = re.split(MARKS, PAGE.read_text(), maxsplit=2)
    rows = {line.split(" | ")[0]: line for line in former.splitlines()}
    worse = False
    with closing(RankGroup()) as ranks:
        for kind in args.only.split(","):
            with tempfile.TemporaryDirectory() as directory:
                cells = try_family(kind, Path(directory), ranks)
            name, row = f"| {get_family(kind).name}", " | ".join(cells)
            worse |= row.count("no: ") > rows.get(name, row).count("no: ")
            rows[name] = f"{name} | {row} |"
            print(rows[name], flush=True)
            if args.write:
                PAGE.write_text(before + "\n".join(rows.values()) + "\n" + after)
    return int(worse)


def try_family(kind: str, directory: Path, ranks: RankGroup) -> list[str]:
    """Return a row of the table without its name."""
    model = write_family_model(kind, directory / "model")
    lora = {"lora.rank": 4, "lora.target_modules": ATTENTION.get(kind, ["all-linear"])}
    settings = ({}, lora, {"algorithm.adv_estimator": "gae"})
    return [*(_try_training(model, more, ranks) for more in settings), *_try_run(kind, model)]


def _try_training(model: Path, more: dict[str, Any], ranks: RankGroup) -> str:
    settings = {"model.name": str(model), "optim.lr": 1e-3} | more
    samples, digests = rank_cases.make_samples(), []
    learner = OneLearner(rank_cases.make_config(settings), rank_cases.VOCAB)
    with tempfile.TemporaryDirectory() as saved:
        trained = rank_cases.train_and_resume(
            OnRanks(learner, learner.files), f"{saved}/1", samples
        )
        try:
            digests.append(asyncio.run(trained))
            arguments = ("train_and_resume", settings, f"{saved}/2", samples)
            digests += ranks.call(2, "on_ranks", *arguments)[:1]
        except (AssertionError, ConfigError) as error:
            reason = str(error).strip().splitlines()[-1].replace(f"model {str(model)!r} ", "")
            return f"no: {reason.partition(';')[0][:REASON]}"
    return "yes" if digests[0] == digests[1] else "no: 1 and 2 ranks have other digests"


def _try_run(kind: str, model: Path) -> list[str]:
    """Return the cells of a run with vLLM that is stopped and resumed."""
    (reward := model.parent / "reward.py").write_text(REWARD)
    own = [f"model.name={model}", f"reward.custom_reward_function.path={reward}"]
    run = Run(
        model.parent / "run",
        "configs/recipes/words/run.toml",
        [*own, *SETTINGS, *HALF.get(kind, ())],
    )
    try:
        run.until_step(3)
        run.drain()
        steps = read_json(run.run_dir / "summary.json")["steps"] if run.end() == 0 else 0
        run.resume([f"trainer.total_training_steps={steps + 3}"])
        if run.end():
            raise BadRun(run.said())
        check(run.run_dir)
    except BadRun as error:
        reason = read_json(run.run_dir / "summary.json").get("failure") or str(error)
        return [f"no: {' '.join(reason.split())[-REASON:]}", "no", "no"]
    finally:
        run.close()
    records = (record for _, record in read_log(RealDisk(run.run_dir / "events")))
    events = (decode_event(r.event) for r in records if isinstance(r, EventRecord))
    apart = max(event.probe_diff for event in events if isinstance(event, ev.WeightsLoaded))
    served = "" if apart <= SERVED.get(kind, SERVED[""]) else "no: "
    return ["yes", f"{served}{apart:.0e}", _try_export(run.run_dir)]


def _try_export(run_dir: Path) -> str:
    target = run_dir.parent / "export"
    export_model(run_dir, target, step=None, dtype="float32", merge=True)
    (name,) = json.loads((target / "config.json").read_text())["architectures"]
    load = getattr(transformers, name).from_pretrained
    _, info = load(target, output_loading_info=True)
    other = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    return f"no: {other[0]} is missing, or more than the model has" if other else "yes"


if __name__ == "__main__":
    sys.exit(main())
