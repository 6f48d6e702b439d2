"""Nothing in laminar/ reads data that could be code: what comes from a socket or a file is checked
data, and who sends it can send nothing that runs. The one exception is the user's own code: a
function that a program passes to its run is a pickle in RUN/objects, as good as a Python file, and
refused where other users can write it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.run.user_code import ObjectFolder, import_file

PACKAGE = Path(__file__).parents[1] / "laminar"
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
NAMES = {
    *("recv_pyobj", "send_pyobj"),  # of ZeroMQ: they pickle
    *("all_gather_object", "gather_object"),  # of torch.distributed, which pickles objects
    *("broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"),
}
USERS_CODE = {f"run/user_code.py: {what}" for what in ("cloudpickle", "Pickler", "pickle", "load")}
PLANNER = "torch.distributed.checkpoint"
"""It pickles what it saves beside the tensors, and plans by collectives that pickle, too."""
OPTIONS = {"allow_pickle": True, "weights_only": False, "trust_remote_code": True}


def found_in(tree: ast.AST) -> Iterator[str]:
    """What may run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from filter(_forbidden, (each.name for each in node.names))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {module, *(f"{module}.{each.name}" for each in node.names)}
            yield from filter(_forbidden, names)
        elif isinstance(node, ast.Attribute) and _forbidden(ast.unparse(node)):
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _forbidden(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in MODULES or parts[-1] in NAMES or name.startswith(PLANNER)


def _call(node: ast.Call) -> Iterator[str]:
    options = {each.arg: ast.unparse(each.value) for each in node.keywords}
    yield from (
        f"{name}={value}" for name, value in OPTIONS.items() if options.get(name) == str(value)
    )
    if ast.unparse(node.func) == "torch.load" and options.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if ast.unparse(node.func) == "torch.save":
        yield "torch.save, which pickles"


def test_the_package_reads_nothing_that_could_be_code() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 200
    found = {
        f"{path.relative_to(PACKAGE)}: {what}"
        for path in files
        for what in found_in(ast.parse(path.read_text()))
    }
    assert found == USERS_CODE


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_an_object_that_others_can_write_is_not_loaded(tmp_path: Path, mode: int) -> None:
    folder = ObjectFolder()
    path = Path(folder.name_object("reward_funcs", lambda completions: [1.0])[0])
    assert import_file(path).__dict__["lambda"]([""]) == [1.0]
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"can be written by other users .mode 0{mode:o}."):
        import_file(path)
    folder.close()
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "socket.recv_pyobj()",
        "from torch.distributed import broadcast_object_list",
        "dist.all_gather_object(found, mine)",
        "np.load(path, allow_pickle=True)",
        "torch.save(state, path)",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
    ],
)
def test_each_way_is_found(text: str) -> None:
    assert list(found_in(ast.parse(text)))


def test_what_reads_tensors_alone_is_fine() -> None:
    fine = "torch.load(path, weights_only=True); np.load(path); dist.all_gather(found, mine)"
    assert not list(found_in(ast.parse(fine)))
