"""User functions that a setting names as path.py:name, and the error messages when they fail.

Reads   the user's Python file
Gives   UserFunction, file_digests, run_file_digests; describe_error, an exception of the user's
        code in one line; replace_surrogates, for text from outside
Raises  ConfigError, which names the setting, the file and the fix
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from laminar.config import Config, ConfigError

DETAIL_CHARS = 240
HERE = Path(__file__).parent.parent
"""The package's own directory; its stack frames are not the origin of a user's error."""


class UserFunction:
    """A user function; its exceptions are reported as the user's mistakes."""

    def __init__(self, key: str, path: Path, name: str, function: Callable[..., Any]) -> None:
        self.key, self.path, self.name = key, path, name
        self.digest = _digest_file(path)
        self.function = function

    def __str__(self) -> str:
        return f"{self.key}: {self.name} of {self.path}"

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; ConfigError with its exception and line."""
        try:
            return self.function(*arguments)
        except Exception as error:
            raise ConfigError(
                f"{self} raised {describe_error(error, str(self.path))}; correct it"
            ) from error


def file_digests(named: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each file by setting; `named`: path.py:name. Raises ConfigError."""
    found = {}
    for key, reference in named.items():
        try:
            found[key] = _digest_file(Path(reference.rpartition(":")[0]))
        except OSError as error:
            raise ConfigError(f"{key} = {reference!r} cannot be read: {error}") from error
    return found


def run_file_digests(config: Config) -> dict[str, str]:
    """Return the digests of the reward, environment and strategy files that exist, by path."""
    reward, strategy = config.reward, config.algorithm.batch_strategy
    paths = [reward.custom_reward_function.path, *(entry.path for entry in reward.functions)]
    paths += [config.env.path, *(f.rpartition(":")[0] for f in (config.agents.run, strategy))]
    return {path: _digest_file(Path(path)) for path in paths if Path(path).is_file()}


def _digest_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def load_user_function(key: str, reference: str, names: Iterable[str] = ()) -> UserFunction:
    """Import the function that setting `key` names; `names`: valid built-in names. ConfigError."""
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        words = ", ".join(names)
        other = f"neither one of {words} nor" if words else "not"
        raise ConfigError(f"{key} = {reference!r} is {other} an existing file as path.py:function")
    found = importlib.util.spec_from_file_location(f"laminar_user_{path.stem}", path)
    if found is None or found.loader is None:
        raise ConfigError(f"{key}: {path} is not a Python file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a helper in the folder shadows no library
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        said = describe_error(error, file)
        raise ConfigError(f"{key}: {path}:{name} does not import: {said}") from None
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{key}: {path} has no {name!r}; name one of its functions")
    if not callable(function):
        raise ConfigError(f"{key}: {name} in {path} is not a function")
    return UserFunction(key, path, name, function)


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


def replace_surrogates(text: str) -> str:
    """Return a plain str that UTF-8 can carry, with U+FFFD for each unpaired surrogate.

    JSON and Python can write half a surrogate pair; no encoder and no tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return str.__str__(text)  # of a subclass, which MessagePack refuses
