"""Import of the user's code: path.py:name, or an object that a program has passed to its run.

Reads   the user's Python file; RUN/objects/NAME.pkl, written by objects.py
Gives   UserFunction, load_user_function; import_file, module_name
Raises  ConfigError, which names the setting, the file and the fix

A file NAME.pkl is code of the user, as path.py is, and nothing else is unpickled: it was made from
an object of the user's program, and is refused if other users can write it.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from laminar.config import ConfigError
from laminar.run.permissions import OTHERS_WRITE
from laminar.run.user_file import describe_error, digest_file

SUFFIX = ".pkl"  #: of a stored object


class UserFunction:
    """A user function; its exceptions are reported as the user's mistakes."""

    def __init__(self, key: str, path: Path, name: str, function: Callable[..., Any]) -> None:
        self.key, self.path, self.name = key, path, name
        self.digest = digest_file(path)
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


def load_user_function(key: str, reference: str, names: Iterable[str] = ()) -> UserFunction:
    """Import the function that setting `key` names; `names`: valid built-in names. ConfigError."""
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        words = ", ".join(names)
        other = f"neither one of {words} nor" if words else "not"
        raise ConfigError(f"{key} = {reference!r} is {other} an existing file as path.py:function")
    try:
        module = import_file(path, what="function")
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{key}: {path} has no {name!r}; name one of its functions")
    if not callable(function):
        raise ConfigError(f"{key}: {name} in {path} is not a function")
    return UserFunction(key, path, name, function)


def import_file(
    path: Path,
    *,
    what: str = "reward",
    keys: str = "reward.custom_reward_function or reward.functions",
) -> ModuleType:
    """Import the user's file for a `what`, named by a setting of `keys`; raise ConfigError."""
    if not path.is_file():
        raise ConfigError(f"the {what}'s {str(path)!r} is not a file; correct the path in {keys}")
    try:
        return _load_module(path, f"laminar_user_{what}_{path.stem}")
    except ConfigError:  # a sandbox that the file asks for
        raise
    except (Exception, SystemExit) as error:
        said = describe_error(error, str(path))
        if path.suffix == SUFFIX:
            said += "; it was stored when the run began: restore the modules that it needs"
        raise ConfigError(f"{path} does not import: {said}") from None


def _load_module(path: Path, name: str) -> ModuleType:
    """Load a stored object, a module of a package, or a file, whose folder is searched last."""
    if path.suffix == SUFFIX:
        module = ModuleType(name)
        setattr(module, path.stem, load_object(path))
        return module
    root, full_name = module_name(path)
    for folder in map(str, (path.resolve().parent, root)):
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that a helper next to the file shadows no library
    if "." in full_name and _find_origin(full_name) == path.resolve():  # for its relative imports
        return importlib.import_module(full_name)
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ConfigError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _find_origin(name: str) -> Path | None:
    """Return the file that an import of this module would read."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # another package has the name of its package
        return None
    return Path(found.origin).resolve() if found is not None and found.origin else None


def module_name(file: Path) -> tuple[Path, str]:
    """Return the folder on the search path and the module's name, by the packages around it."""
    parts = [] if file.stem == "__init__" else [file.stem]
    folder = file.resolve().parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def load_object(path: Path) -> Any:
    """Load an object of the user's program; raise ConfigError."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & OTHERS_WRITE:
        raise ConfigError(
            f"{path} can be written by other users (mode {mode:04o}), and loading it runs code: "
            f"check where it comes from, then chmod go-w {path}"
        )
    with path.open("rb") as file:
        sys.path += [folder for folder in json.loads(file.readline()) if folder not in sys.path]
        return pickle.load(file)  # noqa: S301
