"""The tokenizer of a model and the ids that end a response."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laminar.config import ConfigError
from laminar.tasks.data.tokenizer import end_ids, get_tokenizer_size, load_tokenizer

Make = Callable[..., Any]


def edit(directory: Path, file: str, **fields: object) -> None:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_end_ids_are_the_union_of_three_places(model_directory: Make) -> None:
    directory = model_directory()
    edit(directory, "config.json", eos_token_id=9)
    tokenizer = load_tokenizer(str(directory))
    assert tokenizer.eos_token_id == 27
    assert end_ids(str(directory), tokenizer) == {27, 5, 9}


def test_a_single_number_and_an_absent_generation_config_are_fine(model_directory: Make) -> None:
    directory = model_directory()
    tokenizer = load_tokenizer(str(directory))
    edit(directory, "generation_config.json", eos_token_id=4)
    assert end_ids(str(directory), tokenizer) == {27, 4}
    (directory / "generation_config.json").unlink()
    assert end_ids(str(directory), tokenizer) == {27}


def test_a_model_without_any_end_token_is_refused(model_directory: Make) -> None:
    directory = model_directory()
    tokenizer = load_tokenizer(str(directory))
    tokenizer.eos_token = None
    (directory / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="no end token"):
        end_ids(str(directory), tokenizer)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_file_is_named(content: str, model_directory: Make) -> None:
    directory = model_directory()
    tokenizer = load_tokenizer(str(directory))
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json is not"):
        end_ids(str(directory), tokenizer)


def test_a_directory_without_a_model_is_refused(tmp_path: Path, model_directory: Make) -> None:
    tokenizer = load_tokenizer(str(model_directory()))
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        with pytest.raises(ConfigError, match=r"no config\.json"):
            end_ids(str(tmp_path / name), tokenizer)
    with pytest.raises(ConfigError, match="tokenizer of model"):
        load_tokenizer(str(tmp_path / "absent"))


def test_the_size_counts_added_tokens(model_directory: Make) -> None:
    assert get_tokenizer_size(load_tokenizer(str(model_directory()))) == 28
