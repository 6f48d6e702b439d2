"""Try tiny random models of all families in whole runs, and print the table of docs/models.md.

Usage: python -m tools.bench.families [--only KIND,...] [--directory DIR] [--write]
Prints one JSON line for each run and a row for each family; `--write` puts the rows into
docs/models.md. Exits with 1 if a family has more bad cells there than before. Needs vLLM.

Good, otherwise the cell has the reason:

full, LoRA, critic   with 1 and with 2 ranks: what is published equals the files, three steps change
                     it, a checkpoint is restored to the same digest, and 1 and 2 ranks have the
                     same digest at load
run                  a `laminar train` with vLLM and 2 ranks: steps, a stop, a resume; its books
                     agree, its log replays, and its training repeats
served               the largest difference of a probe's log-prob in it, vLLM against the trainer,
                     is at most SERVED
export               transformers loads what `laminar export` writes: no tensor is missing, or more
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from laminar.config import ConfigError
from laminar.config.families import get_family
from laminar.coordinator.system import RealDisk
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.events.codec import decode_event
from laminar.training.threaded import ThreadedFiles, ThreadedLearner
from laminar.weights.version.checkpoint import build_tensor_manifest
from tools.kit import rank_cases
from tools.kit.family_models import ATTENTION, FAMILIES, write_family_model
from tools.kit.rank_cases import OnRanks
from tools.kit.rank_group import RankGroup
from tools.kit.real_run import ROOT, BadRun, Run, check, laminar, read_json

PAGE, MARKS = ROOT / "docs" / "models.md", ("<!-- families -->\n", "<!-- end -->\n")
COLUMNS = ("full", "LoRA", "critic", "run", "served", "export")
SERVED = {"": 1e-5, "qwen3_5": 1e-4}  #: nats; more for recurrent layers
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
    parser.add_argument("--directory", type=Path, help="keep models and runs here")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    args = parser.parse_args()
    before, mark, after = PAGE.read_text().partition(MARKS[0])
    former, _, after = after.partition(MARKS[1])
    rows = {line.split(" | ")[0]: line for line in former.splitlines()}
    worse = False
    ranks = RankGroup()
    with closing(ranks), tempfile.TemporaryDirectory() as temporary:
        for kind in args.only.split(","):
            cells = try_family(kind, args.directory or Path(temporary), ranks)
            row = f"| {' | '.join(cells)} |"
            worse |= row.count("no: ") > rows.get(name := f"| {cells[0]}", row).count("no: ")
            rows[name] = row
            print(row, flush=True)
            if args.write:
                table = "\n".join(rows.values())
                PAGE.write_text(f"{before}{mark}{table}\n{MARKS[1]}{after}")
    return int(worse)


def try_family(kind: str, directory: Path, ranks: RankGroup) -> list[str]:
    """Return a row of the table."""
    model = write_family_model(kind, directory / kind / "model")
    lora = {"lora.rank": 4, "lora.target_modules": ATTENTION.get(kind, ["all-linear"])}
    cells = {
        "full": _try_training(model, {}, ranks),
        "LoRA": _try_training(model, lora, ranks),
        "critic": _try_training(model, {"algorithm.adv_estimator": "gae"}, ranks),
    }
    cells |= _try_run(kind, directory / kind)
    print(json.dumps({"family": kind} | cells), flush=True)
    return [get_family(kind).name, *(cells[name] for name in COLUMNS)]


def _try_training(model: Path, more: dict[str, Any], ranks: RankGroup) -> str:
    settings = {"model.name": str(model), "optim.lr": 1e-3} | more
    samples, digests = rank_cases.make_samples(), []
    learner = ThreadedLearner(rank_cases.make_config(settings), lambda: rank_cases.VOCAB)
    files = ThreadedFiles(lambda: learner.learner, str(model), build_tensor_manifest)
    with tempfile.TemporaryDirectory() as saved:
        trained = rank_cases.train_and_resume(OnRanks(learner, files), f"{saved}/1", samples)
        try:
            digests.append(asyncio.run(trained))
            arguments = ("train_and_resume", settings, f"{saved}/2", samples)
            digests += ranks.call(2, "on_ranks", *arguments)[:1]
        except (AssertionError, ConfigError) as error:
            return f"no: {str(error).strip().splitlines()[-1][:REASON]}"
    return "yes" if digests[0] == digests[1] else "no: 1 and 2 ranks have other digests"


def _try_run(kind: str, directory: Path) -> dict[str, str]:
    reward = directory / "reward.py"
    reward.write_text(REWARD)
    settings = [f"model.name={directory / 'model'}", *SETTINGS]
    settings += [f"reward.custom_reward_function.path={reward}"]
    run = Run(directory / "run", "configs/recipes/words/run.toml", settings)
    try:
        run.until_step(3)
        run.drain()
        _require(run.end() == 0, run)
        steps = read_json(run.run_dir / "summary.json")["steps"]
        run.resume([f"trainer.total_training_steps={steps + 3}"])
        _require(run.end() == 0, run)
        check(run.run_dir)
        apart = _find_distance(run.run_dir)
    except BadRun as error:
        reason = f"no: {' '.join(str(error).split())[-REASON:]}"
        return {"run": reason, "served": "no", "export": "no"}
    finally:
        run.close()
    served = f"{apart:.0e}" if apart <= SERVED.get(kind, SERVED[""]) else f"no: {apart:.0e}"
    return {"run": "yes", "served": served, "export": _try_export(run.run_dir)}


def _require(good: bool, run: Run) -> None:
    if not good:
        raise BadRun(run.said())


def _find_distance(run_dir: Path) -> float:
    records = (record for _, record in read_log(RealDisk(run_dir / "events")))
    events = (decode_event(r.event) for r in records if isinstance(r, EventRecord))
    return max(event.probe_diff for event in events if isinstance(event, ev.WeightsLoaded))


def _try_export(run_dir: Path) -> str:
    target = run_dir.parent / f"{run_dir.name}-export"
    words = ("export", str(run_dir), "--to", str(target), "--merge-adapters", "--dtype", "fp32")
    for command in (laminar(*words), [sys.executable, "-c", LOAD, str(target)]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return "no: " + (done.stdout + done.stderr).strip().rpartition("\n")[2][-200:]
    return "yes"


LOAD = """
import json, sys, transformers
directory = sys.argv[1]
(name,) = json.load(open(directory + "/config.json"))["architectures"]
_, info = getattr(transformers, name).from_pretrained(directory, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
"""

if __name__ == "__main__":
    sys.exit(main())
