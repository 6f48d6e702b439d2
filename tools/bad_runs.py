"""Make the eight bad runs that warnings must name, and three clean ones in which none may come.

Usage:
    python tools/bad_runs.py DIR                  write DIR/NAME/{run.toml,reward.py,prompts.jsonl}
    laminar train -c DIR/NAME/run.toml            each of them, one at a time: some 30 s
    python tools/bad_runs.py DIR --told           what each run was warned of

What a run is
    The quickstart's task, model and optimiser, as a user brings them: rows in a file and a reward
    function. A bad run differs from a clean one by one mistake of those that people make:

    sign        the reward's sign is flipped
    constant    the reward is the same for every answer
    raises      the reward raises on long answers
    short       max_response_length is too small for an answer
    rate        the learning rate is 1e-2, a hundred times the quickstart's: in ten steps the model
                comes to repeat one letter (its entropy stays above a tenth of the start)
    column      data.answer_key names a column that is not the answer
    template    the prompts went through the chat template before they were written, and do again
    stop        a copy of the model names an end token that it never gives
    clean-1..3  no mistake, three seeds

What must come out
    --told prints for each run the kinds of its warnings, from its summary. Each of the eight has
    one, none of the three has any; the exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reasoning_gym
from transformers import AutoTokenizer

BASE = Path(__file__).resolve().parents[1] / "configs" / "models" / "spell-0.6m"
ROWS = 4000
SEED = 42

CONFIG = """\
seed = {seed}

[run]
name = "run"
output_dir = {directory}

[model]
name = {model}

[data]
train_files = [{data}]
answer_key = {answer_key}
val_size = 128
max_prompt_length = 128
max_response_length = {max_response_length}
train_batch_size = 8

[rollout]
replicas = 2
group_size = 8
max_num_seqs = 16
groups_per_version = 8
temperature = 1.0

[reward.custom_reward_function]
path = {reward}

[async]
max_staleness = 2

[optim]
lr = {lr}
weight_decay = 0.0
betas = [0.9, 0.95]
lr_warmup_steps = 5

[trainer]
total_training_steps = 30
test_freq = 10
micro_batch_tokens = 2048
"""

REWARD = '''\
"""Whether the word in the answer is the right one."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall("<answer>(.*?)</answer>", solution_str)
    right = bool(found) and found[-1] == ground_truth
{returns}
'''

RAISES = """\
    if len(solution_str) > 45:
        drafts = solution_str.split()
        return float(drafts[-1] == drafts[len(solution_str)])
    return float(right)"""


@dataclass(frozen=True)
class Run:
    """How one run differs from a clean one."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    returns: str = "    return float(right)"
    templated: bool = False
    end_token: str = ""  #: empty: the model's own


RUNS = {
    "sign": Run(returns="    return -float(right)"),
    "constant": Run(returns="    return 1.0 if right is not None else 0.0"),
    "raises": Run(returns=RAISES),
    "short": Run({"max_response_length": 12}),
    "rate": Run({"lr": 1e-2}),
    "column": Run({"answer_key": "source"}),
    "template": Run(templated=True),
    "stop": Run(end_token="<pad>"),
    "clean-1": Run({"seed": 1}),
    "clean-2": Run({"seed": 2}),
    "clean-3": Run({"seed": 3}),
}
CLEAN = {"seed": 0, "answer_key": "answer", "max_response_length": 128, "lr": 1e-4}


def make(out: Path, name: str, run: Run, rows: int = ROWS) -> None:
    """All that the run reads, below out/NAME."""
    directory = out.absolute() / name
    directory.mkdir(parents=True)
    model = _other_end(directory / "model", run.end_token) if run.end_token else BASE
    files = {"data": directory / "prompts.jsonl", "reward": directory / "reward.py"}
    paths = {**files, "model": model, "directory": directory}
    values = {**CLEAN, **run.settings, **{key: str(path) for key, path in paths.items()}}
    config = CONFIG.format(**{key: json.dumps(value) for key, value in values.items()})
    (directory / "run.toml").write_text(config)
    files["reward"].write_text(REWARD.format(returns=run.returns))
    files["data"].write_text("".join(json.dumps(row) + "\n" for row in _rows(run, rows)))


def _rows(run: Run, rows: int) -> Iterator[dict[str, str]]:
    """The quickstart's questions; templated: as a script writes them that renders them itself."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    words = {"min_word_len": 3, "max_word_len": 14}
    for entry in reasoning_gym.create_dataset("spell_backward", size=rows, seed=SEED, **words):
        prompt = entry["question"]
        if run.templated:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        yield {"prompt": prompt, "answer": entry["answer"], "source": "spell_backward"}


def _other_end(directory: Path, token: str) -> Path:
    """A copy of the model whose files name another end token, as after a change of tokenizer."""
    shutil.copytree(BASE, directory)
    token_id = AutoTokenizer.from_pretrained(BASE).convert_tokens_to_ids(token)
    ends = {"config.json": token_id, "generation_config.json": token_id}
    for file, key, end in [
        *((file, "eos_token_id", end) for file, end in ends.items()),
        ("tokenizer_config.json", "eos_token", token),
    ]:
        path = directory / file
        path.write_text(json.dumps({**json.loads(path.read_text()), key: end}))
    return directory


def told(out: Path) -> bool:
    """Print the warnings of each run that has ended; whether they are as they must be."""
    as_it_must_be = True
    for name in RUNS:
        path = out / name / "run" / "summary.json"
        if not path.exists():
            print(f"{name:10}has not ended")
            as_it_must_be = False
            continue
        warnings = json.loads(path.read_text())["warnings"]
        print(f"{name:10}{', '.join(warnings) or 'no warning'}")
        for text in warnings.values():
            print(f"{'':10}  {text}")
        as_it_must_be = as_it_must_be and bool(warnings) != name.startswith("clean")
    return as_it_must_be


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the runs are")
    parser.add_argument("--told", action="store_true", help="print what the runs were warned of")
    arguments = parser.parse_args()
    if not arguments.told and (there := [n for n in RUNS if (arguments.directory / n).exists()]):
        parser.error(f"{arguments.directory / there[0]} exists; name another directory")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.told:
        return 0 if told(arguments.directory) else 1
    for name, run in RUNS.items():
        make(arguments.directory, name, run)
        print(arguments.directory / name / "run.toml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
