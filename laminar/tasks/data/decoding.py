"""Token ids of a run as text, for people who read what a model wrote.

Reads   tokenizer.json of the run's model, or of a model that the run has written
Gives   decoder_of; raises ConfigError where there is no tokenizer

Special tokens are shown: a template that was applied twice or an end that was never sampled is
seen in nothing else. The file is read by `tokenizers` itself, because transformers, which the run
used for the same file, takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from laminar.config import Config, ConfigError
from laminar.run.directory import CHECKPOINTS_DIR, EXPORT_DIR
from laminar.tasks.data.tokenizer import load_tokenizer

TOKENIZER_FILE = "tokenizer.json"


def make_decoder(run_dir: Path, config: Config) -> Callable[[list[int]], str]:
    """Ids to text. The model may have moved since, or be named from another directory."""
    if config.is_emulated:
        return lambda ids: f"{len(ids)} emulated tokens"
    for directory in (Path(config.model.name), *written_models(run_dir)):
        if (directory / TOKENIZER_FILE).is_file():
            return _load_quick_decoder(directory / TOKENIZER_FILE)
    tokenizer = load_tokenizer(config.model.name)
    return lambda ids: str(tokenizer.decode(ids))


def written_models(run_dir: Path) -> list[Path]:
    """Each has the tokenizer that the run was started with."""
    return [run_dir / EXPORT_DIR, *sorted((run_dir / CHECKPOINTS_DIR).glob("step_*"))]


def _load_quick_decoder(file: Path) -> Callable[[list[int]], str]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # its own errors have no other class
        raise ConfigError(f"{file} is no tokenizer: {error}; restore the file") from error

    def decode(ids: list[int]) -> str:
        """An id that is no token (some models have logits for more) is shown as a number."""
        parts: list[str] = []
        known: list[int] = []
        for token in [*ids, -1]:
            if token >= 0 and tokenizer.id_to_token(token) is not None:
                known.append(token)
                continue
            parts.append(tokenizer.decode(known, skip_special_tokens=False))
            parts.append(f"<id {token}>" if token >= 0 else "")
            known = []
        return "".join(parts)

    return decode
