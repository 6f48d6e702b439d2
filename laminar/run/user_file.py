"""Files of the user's functions: their digests, and the error messages when they fail.

Reads   the files that settings name as path.py:name; user_code.py imports them
Gives   file_digests, run_file_digests; describe_error, an exception of the user's code in one line;
        get_first_line, of any exception; replace_surrogates, for text from outside
Raises  ConfigError, which names the setting, the file and the fix
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from pathlib import Path

from laminar.config import Config, ConfigError

DETAIL_CHARS = 240
HERE = Path(__file__).parent.parent
"""The package's own directory; its stack frames are not the origin of a user's error."""


def file_digests(named: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each file by setting; `named`: path.py:name. Raises ConfigError."""
    found = {}
    for key, reference in named.items():
        try:
            found[key] = digest_file(Path(reference.rpartition(":")[0]))
        except OSError as error:
            raise ConfigError(f"{key} = {reference!r} cannot be read: {error}") from error
    return found


def run_file_digests(config: Config) -> dict[str, str]:
    """Return the digests of the user's files that exist, by path."""
    reward, strategy = config.reward, config.algorithm.batch_strategy
    paths = [reward.custom_reward_function.path, *(entry.path for entry in reward.functions)]
    paths += [config.env.path, *(f.rpartition(":")[0] for f in (config.agents.run, strategy))]
    paths += config.agents.command
    return {path: digest_file(Path(path)) for path in paths if Path(path).is_file()}


def digest_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def describe_error(error: BaseException, path: str) -> str:
    """Return one short line: type, message, line in the user's file (else the innermost)."""
    try:
        lines = replace_surrogates(str(error)).strip().splitlines()
    except Exception:  # of its own __str__
        lines = []
    text = type(error).__name__ + (f": {lines[0]}" if lines else "")
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if HERE not in Path(f.filename).parents]
    frames = [f for f in frames if f.filename == path] or frames
    if frames and not isinstance(error, SyntaxError):
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        return text[: DETAIL_CHARS - len(place)] + place
    return text[:DETAIL_CHARS]


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (replace_surrogates(str(error)).strip() or type(error).__name__).splitlines()[0]


def replace_surrogates(text: str) -> str:
    """Return a plain str that UTF-8 can carry, with U+FFFD for each unpaired surrogate.

    JSON and Python can write half a surrogate pair; no encoder and no tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return str.__str__(text)  # of a subclass, which MessagePack refuses
