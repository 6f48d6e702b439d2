"""laminar init DIR: create a first run: a config, a reward file and ten prompts; or copy a recipe.

Reads   the location of the small model that comes with the package; the files of a recipe
Writes  DIR/run.toml, DIR/reward.py, DIR/prompts.jsonl (or those); never over an existing file

The result runs as it is, on the small model; the user then replaces the three files with their own
settings, reward and data.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laminar.cli.plan import add_machine, load_plan
from laminar.config import ConfigError, load_config
from laminar.launch.layouts import layout_lines, list_layouts, settings_of
from laminar.names import exit_codes
from laminar.run.command_line import shell_command

WORDS = [
    "elephant", "mountain", "sandwich", "umbrella", "keyboard",
    "hospital", "notebook", "airplane", "calendar", "dinosaur",
]  # fmt: skip

CONFIG = """\
# A run of your own: laminar train -c run.toml --dry-run, then without --dry-run.
# Relative paths: next to this file, then in the directory where you start it.
# Every key with its default: {reference}

[run]
name = {name}  # the run directory, in runs/ where you start it

[model]
name = {model}  # a directory, or a name on the hub such as "Qwen/Qwen2.5-0.5B-Instruct"

[data]
train_files = ["prompts.jsonl"]   # or .parquet, or "hf://datasets/ORG/NAME/FILE"
max_prompt_length = 96            # tokens; this small model reads bytes
max_response_length = 48
train_batch_size = 4              # prompts of one training step
val_size = 2                      # prompts held out, to see whether it learns

[rollout]
group_size = 8                    # responses to each prompt
max_num_seqs = 16                 # responses that one replica generates at a time

[reward.custom_reward_function]
path = "reward.py"

[optim]
lr = 1e-4                         # for this small model; 1e-6 is usual for large ones

[trainer]
total_training_steps = 40         # half a minute
"""

FIRST_RUN = {
    "data.max_prompt_length": 1024, "data.max_response_length": 4096, "optim.lr": 1e-6,
    "rollout.engine": "vllm", "trainer.total_training_steps": 100,
}  # fmt: skip

REWARD = '''\
"""The reward of this run: the share of letters at their place."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1.0 for the correct word, less if letters are wrong."""
    found = re.findall("<answer>(.*?)</answer>", solution_str)
    answer = found[-1] if found else solution_str.strip()
    right = sum(a == b for a, b in zip(answer, ground_truth))
    return right / max(len(answer), len(ground_truth))
'''

CONFIGS = Path(__file__).parents[1] / "configs"
"""Link to configs/ in a checkout; copy of it in a wheel."""
RECIPES = {path.name: path for path in sorted((CONFIGS / "recipes").iterdir())}
REFERENCE_CONFIG = CONFIGS / "reference.toml"
QUICKSTART_CONFIG = RECIPES["words"] / "run.toml"
QUICKSTART_MODEL = CONFIGS / "models" / "spell-0.6m"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("init")
    parser.add_argument("directory", type=Path, metavar="DIR", help="created if missing")
    parser.add_argument("--recipe", metavar="NAME", help=f"copy a recipe: {', '.join(RECIPES)}")
    text = "a directory with its config.json, or a name on the hub; planned for --gpus"
    parser.add_argument("--model", default="", help=text)
    add_machine(parser)
    parser.set_defaults(function=run_init)


def run_init(arguments: argparse.Namespace) -> int:
    """Write all files or none; print the next command."""
    directory: Path = arguments.directory
    name, recipe = directory.absolute().name, arguments.recipe
    files = read_recipe(recipe) if recipe else build_files(name)
    if arguments.model or arguments.gpus or arguments.nodes or arguments.host_memory:
        if recipe:
            raise ConfigError("--recipe has its model and GPUs: leave out --model and --gpus")
        files["run.toml"] = set_keys(files["run.toml"], plan_settings(arguments))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if there := [name for name in files if (directory / name).exists()]:
            raise ConfigError(
                f"{directory / there[0]} exists and is left as it is; name another directory"
            )
        for name, text in files.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written: {error.strerror}; name another directory"
        ) from None
    print(f"wrote {', '.join(str(directory / name) for name in files)}")
    if "prepare.py" in files:
        print(f"data  {shlex.join([sys.executable, str(directory / 'prepare.py')])}")
    train = shell_command("train", "-c", directory / "run.toml")
    print(f"look  {train} --dry-run")
    print(f"run   {train}")
    return exit_codes.COMPLETE


def read_recipe(name: str) -> dict[str, str]:
    """Return the text of each file of a recipe, with absolute paths of the shipped models."""
    if name not in RECIPES:
        raise ConfigError(f"--recipe {name} is unknown; choose from {', '.join(RECIPES)}")
    files = {path.name: path.read_text() for path in RECIPES[name].iterdir() if path.is_file()}
    shipped = json.dumps(str(QUICKSTART_MODEL.parent))[:-1]
    return files | {"run.toml": files["run.toml"].replace('"../../models', shipped)}


def plan_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a first run of a model, with its best layout on the GPUs."""
    if not (arguments.model and arguments.gpus):
        raise ConfigError("--model and --gpus belong together: give both, such as --gpus 8x80")
    local = Path(arguments.model).is_dir()
    model = str(Path(arguments.model).absolute()) if local else arguments.model
    first = FIRST_RUN | {"model.name": model, "run.planned_gpus": arguments.gpus}
    given = [f"{key}={json.dumps(value)}" for key, value in first.items()]
    given += ["data.dataset=chain_sum"]  # in place of the prompts, which are not written yet
    config, run = load_plan(arguments, [], given)
    if not (layouts := list_layouts(config, run)):
        none_fits = layout_lines(config, run, layouts)[0].split(maxsplit=1)[1]
        raise ConfigError(f"no layout of {model} on {arguments.gpus}: {none_fits}")
    return {**first, **settings_of(layouts[0], load_config([], given))}


def set_keys(text: str, settings: Mapping[str, Any]) -> str:
    """Return the text of a config with these settings, each first in its section."""
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        head, line = f"[{section}]\n", f"{name} = {json.dumps(value)}\n"
        before, found, rest = text.partition(head)
        here, bracket, after = rest.partition("\n[")
        here = re.sub(rf"(?m)^{name} = .*\n?", "", here)
        text = before + ("" if found else "\n") + head + line + here + bracket + after
    return text


def build_files(name: str) -> dict[str, str]:
    """Return the text of each file by its name; `name` is that of the run."""
    rows = [
        {"prompt": f"Spell this word backward (example: sun -> nus): {w}", "answer": w[::-1]}
        for w in WORDS
    ]
    return {
        "run.toml": CONFIG.format(
            reference=REFERENCE_CONFIG,
            name=json.dumps(name),
            model=json.dumps(str(QUICKSTART_MODEL)),
        ),
        "reward.py": REWARD,
        "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }
