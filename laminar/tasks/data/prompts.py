"""The prompts of a run: reading of rows, and the split into training and held-out rows.

Reads   a reasoning-gym dataset, or .jsonl / .parquet files (DataConfig)
Gives   PromptSet: training rows, held-out rows, their overlap and a digest of all; ConfigError for
        every mistake in a file or in the dataset's settings

The split is part of the experiment, so it depends only on the prompts: held out are the prompts
with the smallest xxh3_64 hexdigest of their text, independent of the order of rows, and training
excludes all rows with such a prompt. With an environment, a row is its prompt and its columns,
which `reset` gets: equal prompts are ordered by the digest of their columns, and training excludes
only rows that are equal in both. The warm-up of the shipped base model excluded the prompts
that come first in this order. Rows are kept in a form that MessagePack and JSON preserve. Values
that those formats would change silently (tuples, dict keys that are not strings, integers beyond 64
bits) are marked by `to_plain` and restored by `from_plain` before scoring.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from laminar.config import ConfigError, DataConfig
from laminar.run.user_file import get_first_line, replace_surrogates

ANSWER_KEYS = ("answer", "label", "ground_truth", "reward_model.ground_truth")
PARQUET = ".parquet"
TUPLE, PAIRS, INTEGER = "!tuple", "!pairs", "!int"

Prompt = str | list[dict[str, Any]]
Record = tuple[str, dict[str, Any]]  # description of its place, and its columns


@dataclass(frozen=True)
class PromptRow:
    """A row of the data, with `columns` and `ground_truth` in the form of `to_plain`."""

    index: int  #: 0-based position in the loaded data (over all files in order)
    prompt: Prompt
    ground_truth: Any
    columns: dict[str, Any]  #: all columns but the prompt, or the whole item of a dataset
    data_source: str


@dataclass(frozen=True)
class PromptSet:
    train: list[PromptRow]
    held_out: list[PromptRow]
    overlap: int  #: further rows left out of training because their prompt is held out
    digest: str  #: xxh3_128 of both lists


def load_prompts(data: DataConfig, *, with_columns: bool = False) -> PromptSet:
    """Load and split all rows of the run; raise ConfigError.

    `with_columns`: for an environment, where rows that differ in their columns differ.
    """
    rows = list(_dataset_rows(data) if data.dataset else _file_rows(data.train_files, data))
    val = list(_file_rows(data.val_files, data)) if data.val_files else None
    found = _split_rows(rows, val, data.val_size, with_columns=with_columns)
    if not found.train:
        raise ConfigError(
            f"no training prompt is left: the prompts of all {len(rows)} rows are held out "
            f"(data.val_size = {data.val_size}, data.val_files = {data.val_files}); hold out "
            "fewer or give more data"
        )
    return found


def _split_rows(
    rows: list[PromptRow], val: list[PromptRow] | None, val_size: int, *, with_columns: bool
) -> PromptSet:
    """Hold out `val`, or else `val_size` of the rows; train on the rows that differ from these."""

    def key_of(row: PromptRow) -> str:
        columns = prompt_digest(_to_canonical_json(row.columns)) if with_columns else ""
        return prompt_digest(row.prompt) + columns

    digests = [key_of(row) for row in rows]
    held_out = _select_smallest(rows, digests, val_size) if val is None else val
    keys = {key_of(row) for row in held_out}
    train = [row for row, key in zip(rows, digests, strict=True) if key not in keys]
    overlap = len(rows) - len(train) - (len(held_out) if val is None else 0)
    return PromptSet(train, held_out, overlap, _digest_of(train, held_out))


def prompt_digest(prompt: Prompt) -> str:
    """Return the xxh3_64 hexdigest of the prompt's text, or of its messages as canonical JSON."""
    text = prompt if isinstance(prompt, str) else _to_canonical_json(prompt)
    return xxhash.xxh3_64(text.encode()).hexdigest()


def _select_smallest(rows: list[PromptRow], digests: list[str], count: int) -> list[PromptRow]:
    """Return the first row of each of the `count` smallest distinct digests."""
    first: dict[str, PromptRow] = {}
    for row, digest in zip(rows, digests, strict=True):
        first.setdefault(digest, row)
    return [first[digest] for digest in sorted(first)[:count]]


def _digest_of(train: list[PromptRow], held_out: list[PromptRow]) -> str:
    state = xxhash.xxh3_128()
    for name, rows in (("train", train), ("held_out", held_out)):
        state.update(f"{name} {len(rows)}\n".encode())
        for row in rows:
            state.update((_to_canonical_json(vars(row)) + "\n").encode())
    return state.hexdigest()


def _to_canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


# --- reasoning-gym ------------------------------------------------------------------------------


def make_dataset(name: str, config: dict[str, Any], size: int, seed: int) -> Any:
    """Create a reasoning-gym dataset; raise ConfigError for a wrong name or setting."""
    from laminar.tasks.data.gym import DATASETS, DatasetSpec, create_dataset

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"data.dataset = {name!r} is not a reasoning-gym dataset; the nearest name is {near}"
        )
    legal = sorted({f.name for f in fields(DATASETS[name][1])} - {"size", "seed"})
    for key in config:
        if key in ("size", "seed"):
            raise ConfigError(f"data.dataset_config has the key {key}; set data.dataset_{key}")
        if key not in legal:
            raise ConfigError(
                f"data.dataset_config has the key {key!r}, which the dataset {name} does not know; "
                f"it knows {', '.join(legal)}"
            )
    try:
        if name == "composite":  # TOML cannot express its parts, which are objects
            config = {**config, "datasets": [DatasetSpec(**d) for d in config.get("datasets", ())]}
        return create_dataset(name, size=size, seed=seed, **config)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.dataset_config = {config!r} is refused by the dataset {name}: "
            f"{get_first_line(error)}; correct the value"
        ) from None


def _dataset_rows(data: DataConfig) -> Iterator[PromptRow]:
    dataset = make_dataset(data.dataset, data.dataset_config, data.dataset_size, data.dataset_seed)
    for index in range(data.dataset_size):
        where = f"item {index} of the dataset {data.dataset}"
        try:
            item = dataset[index]
        except Exception as error:  # datasets raise various types
            raise ConfigError(
                f"{where} could not be made ({get_first_line(error)}); change data.dataset_config, "
                "data.dataset_seed or data.dataset_size"
            ) from None
        columns = {key: _to_plain_column(where, key, value) for key, value in item.items()}
        row = PromptRow(
            index=index,
            prompt=columns["question"],
            ground_truth=columns["answer"],
            columns=columns,
            data_source=columns["metadata"].get("source_dataset", data.dataset),
        )
        yield _check_size(where, row)


def _check_size(where: str, row: PromptRow) -> PromptRow:
    """Return the row; raise ConfigError if it is too large for the store."""
    from laminar.storage import messages as m  # with numpy, which reward workers do not need

    parts = {key: value for key, value in vars(row).items() if key != "index"}
    size = len(m.encode_prompt(m.PromptPayload(**parts)))
    if size <= m.PROMPT_LIMIT:
        return row
    sizes = {key: len(msgspec.msgpack.encode(value)) for key, value in row.columns.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    named = f"its largest column, {largest!r}, has {sizes[largest]}, and " if sizes else ""
    again = len(msgspec.msgpack.encode(row.ground_truth))
    raise ConfigError(
        f"{where} takes {size} bytes, over the limit of {m.PROMPT_LIMIT} ({named}its answer counts "
        f"apart from the columns, with {again}): drop the row, shorten it, or keep large values in "
        "files that the reward function reads"
    )


# --- files --------------------------------------------------------------------------------------


def _file_rows(files: Iterable[str], data: DataConfig) -> Iterator[PromptRow]:
    index = 0
    for name in files:
        path = Path(name)
        for where, record in read_records(path):
            if path.suffix.lower() == PARQUET and data.prompt_key in record:
                record[data.prompt_key] = _remove_nulls(record[data.prompt_key])
            yield _check_size(where, _make_row(index, where, record, path.stem, data))
            index += 1


def read_records(path: Path) -> Iterator[Record]:
    readers = {".jsonl": _read_jsonl, PARQUET: _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"data file {path} must end in .jsonl or .parquet; convert or rename it")
    if path.is_dir():
        raise ConfigError(f"data file {path} is a directory; name the files in it")
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"data file {path} is a pipe or device, and the data is read several times; write it "
            "to a file"
        )
    if not path.is_file():
        raise ConfigError(f"data file {path} does not exist; correct data.train_files or val_files")
    empty = True
    for record in reader(path):
        empty = False
        yield record
    if empty:
        raise ConfigError(f"data file {path} has no rows; give a file with at least one")


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(f"{where} is not valid JSON: {error}; correct the line") from None
            if not isinstance(record, dict):
                raise ConfigError(
                    f"{where} is a JSON {type(record).__name__}; each line must be an object"
                )
            yield where, record


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"data file {path} is not a readable parquet file: {get_first_line(error)}; write it "
            "again"
        ) from None
    for number, record in enumerate(table.to_pylist()):
        yield f"{path} row {number}", record


def _make_row(
    index: int, where: str, record: dict[str, Any], stem: str, data: DataConfig
) -> PromptRow:
    if data.prompt_key not in record:
        raise ConfigError(
            f"{where} has no column {data.prompt_key!r} (it has {', '.join(record)}); "
            "set data.prompt_key"
        )
    columns = {
        replace_surrogates(key): _to_plain_column(where, key, value)
        for key, value in record.items()
        if key != data.prompt_key
    }
    return PromptRow(
        index=index,
        prompt=_check_prompt(where, data.prompt_key, record[data.prompt_key]),
        ground_truth=_find_answer(where, columns, data),
        columns=columns,
        data_source=str(columns.get("data_source") or stem),
    )


def _check_prompt(where: str, key: str, prompt: Any) -> Prompt:
    """Check the prompt, join text parts, and remove the null fields of messages."""
    if isinstance(prompt, list) and prompt and all(_is_message(m) for m in prompt):
        prompt = [{k: v for k, v in m.items() if v is not None} for m in prompt]
        prompt = [{**m, "content": _join_parts(where, m["content"])} for m in prompt]
    elif not isinstance(prompt, str):
        raise ConfigError(
            f"{where} has a prompt of the wrong type ({type(prompt).__name__}); it must be a "
            "string or a list of messages with the strings role and content"
        )
    checked: Prompt = _to_plain_column(where, key, prompt)
    return checked


def _remove_nulls(value: Any) -> Any:
    """Remove the null fields that parquet adds, where another row has them."""
    if isinstance(value, list):
        return [_remove_nulls(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {k: _remove_nulls(v) for k, v in value.items() if v is not None}


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (
        isinstance(content, list) and all(isinstance(part, dict) for part in content)
    )


def _join_parts(where: str, content: str | list[dict[str, Any]]) -> str:
    """Return the content of a message as text; raise ConfigError for a part that is not text."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{where} has a message with a part of type {part.get('type')!r}; only parts of "
                "type 'text', with a string text, can be used: drop the row, or write it as text"
            )
    return "".join(part["text"] for part in content)


def _find_answer(where: str, columns: dict[str, Any], data: DataConfig) -> Any:
    """Return the column data.answer_key, else the first of ANSWER_KEYS that is set, else None."""
    for key in (data.answer_key,) if data.answer_key else ANSWER_KEYS:
        value = _lookup_column(columns, key)
        if value is not None:
            return value
    if data.answer_key:
        raise ConfigError(
            f"{where} has no answer under {data.answer_key!r} (it has {', '.join(columns)}); "
            "set data.answer_key"
        )
    return None


def columns_of(row: PromptRow) -> str:
    """Describe the columns of a row in words."""
    names = ", ".join(row.columns)
    return f"it has {names}" if names else "it has only its prompt"


def _lookup_column(columns: dict[str, Any], key: str) -> Any:
    """Return a column by name, or a field of one by a dotted path; None if absent."""
    if key in columns:
        return columns[key]
    node: Any = columns
    for part in key.split("."):
        if not isinstance(node, dict):
            return None
        node = node.get(part)
    return node


# --- values that JSON and MessagePack can carry -------------------------------------------------


def to_plain(value: Any) -> Any:
    """Convert to None, bool, 64-bit int, float, str, list and str-keyed dict; raise TypeError.

    Subclasses of the basic types (NumPy scalars, string enums) become the basic type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {INTEGER: str(int(value))}
    if isinstance(value, tuple):
        return {TUPLE: [to_plain(v) for v in value]}
    if isinstance(value, list):
        return [to_plain(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and k not in (TUPLE, PAIRS, INTEGER) for k in value):
            return {to_plain(k): to_plain(v) for k, v in value.items()}
        return {PAIRS: [[to_plain(k), to_plain(v)] for k, v in value.items()]}
    raise TypeError(type(value).__name__)


def from_plain(value: Any) -> Any:
    """Restore the value that `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if TUPLE in value:
        return tuple(from_plain(v) for v in value[TUPLE])
    if PAIRS in value:
        return {from_plain(k): from_plain(v) for k, v in value[PAIRS]}
    if INTEGER in value:
        return int(value[INTEGER])
    return {k: from_plain(v) for k, v in value.items()}


def _to_plain_column(where: str, name: str, value: Any) -> Any:
    try:
        return to_plain(value)
    except RecursionError:
        raise ConfigError(
            f"{where}: the column {name!r} is nested too deep to be stored; drop the column or "
            "write it as text"
        ) from None
    except TypeError as error:
        raise ConfigError(
            f"{where}: the column {name!r} has a value of type {error}, which cannot be stored; "
            "drop the column or write it as text, numbers and lists"
        ) from None
