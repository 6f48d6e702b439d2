"""Resolution of Hugging Face hub names to local paths.

Reads   model.name (ORG/NAME or ORG/NAME@REVISION), data files (hf://datasets/ORG/NAME/PATTERN, with
        @REVISION after NAME); the cache below HF_HOME, and what it lacks from the hub (HF_ENDPOINT)
Gives   the config with paths instead; ConfigError with a remedy if a file is not available

Names are resolved once, before a run starts. So every process reads the same files, and the run's
config.toml names the snapshot with its commit. The name of an existing directory is never resolved.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import NamedTuple

from laminar.config import Config, ConfigError, replace_keys
from laminar.config.paths import HUB_FILE, HUB_MODEL
from laminar.run.user_file import get_first_line

DATA_PREFIX = f"{HUB_FILE}datasets/"
MODEL_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
"""Files of a model and its tokenizer; repositories often repeat the weights in other formats."""


class HubFiles(NamedTuple):
    """Files of a repository of the hub."""

    kind: str  #: model | dataset
    repo: str  #: ORG/NAME
    revision: str | None  #: revision, or None for the main branch
    patterns: list[str]  #: shell patterns of paths in the repository


def localize_config(config: Config) -> Config:
    """Return the config with hub names replaced by paths; download what the cache lacks."""
    return localize_data(localize_model(config))


def localize_model(config: Config) -> Config:
    names = {"model.name": config.model.name, "critic.model.name": config.critic.model.name}
    return replace_keys(config, {key: find_model(key, name) for key, name in names.items()})


def localize_data(config: Config) -> Config:
    files = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    return replace_keys(
        config, {key: [*chain(*map(find_data_files, names))] for key, names in files.items()}
    )


def find_model(key: str, name: str, files: list[str] = MODEL_FILES) -> str:
    """Return a model's directory; `files`: patterns of those to download from the hub."""
    found = HUB_MODEL.fullmatch(name)
    if found is None or Path(name).exists():
        return name
    wanted = HubFiles("model", found["repo"], found["revision"], files)
    return str(
        _fetch(
            wanted,
            f"{key} = {name!r} is not a directory relative to a config file or {Path.cwd()}, and",
        )
    )


def find_data_files(name: str) -> list[str]:
    """Return the local paths of a data file, or of the files that a hub pattern matches."""
    if not name.startswith(HUB_FILE):
        return [name]
    org, _, rest = name.removeprefix(DATA_PREFIX).partition("/")
    repository, _, pattern = rest.partition("/")
    found = HUB_MODEL.fullmatch(f"{org}/{repository}")
    if not name.startswith(DATA_PREFIX) or found is None or not pattern:
        raise ConfigError(
            f"data file {name!r} is not a file of a dataset on the hub; write "
            f"{DATA_PREFIX}ORG/NAME/FILE, where FILE may be a pattern such as "
            "data/train-*.parquet"
        )
    wanted = HubFiles("dataset", found["repo"], found["revision"], [pattern])
    directory = _fetch(wanted, f"data file {name!r}:")
    paths = sorted(str(path) for path in directory.glob(pattern) if path.is_file())
    if not paths:
        raise ConfigError(
            f"data file {name!r}: {found['repo']} has no file {pattern!r} (looked for in "
            f"{directory}); its files are listed at huggingface.co/datasets/{found['repo']}"
        )
    return paths


def _fetch(wanted: HubFiles, what: str) -> Path:
    """Fetch the wanted files and return the snapshot's directory."""
    from huggingface_hub import snapshot_download  # most of a second to import, for few users

    try:
        found = snapshot_download(
            wanted.repo,
            repo_type=wanted.kind,
            revision=wanted.revision,
            allow_patterns=wanted.patterns,
        )
    except Exception as error:  # network, hub, reply and disk raise many types
        raise ConfigError(
            f"{what} the hub does not provide {wanted.kind} {wanted.repo!r}: "
            f"{get_first_line(error).rstrip('.')}; give a local path, or download it on a machine "
            f"with a network: {_fetch_command(wanted)} (HF_HOME has the downloads and can be "
            "copied; HF_TOKEN gives access to private repositories)"
        ) from None
    return Path(found)


def _fetch_command(wanted: HubFiles) -> str:
    words = ["hf", "download", wanted.repo]
    if wanted.kind == "dataset":
        words += ["--repo-type", "dataset"]
    if wanted.patterns is not MODEL_FILES:
        words += [f"--include '{p}'" for p in wanted.patterns]
    if wanted.revision:
        words += ["--revision", wanted.revision]
    return " ".join(words)
