"""Names of the hub, against a server of our own with the hub's interface, and from its cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from laminar.config import ConfigError, load_config
from laminar.tasks.data.hub import localize_config

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = ROOT / "configs" / "models" / "spell-0.6m"
ROWS = json.dumps({"prompt": "one", "answer": "1"}) + "\n" + json.dumps({"prompt": "2"}) + "\n"

RESOLVE = """
import sys
from laminar.config import ConfigError, dump_config, load_config
from laminar.tasks.data.hub import localize_config
try:
    print(dump_config(localize_config(load_config([], sys.argv[1:]))))
except ConfigError as error:
    sys.exit(str(error))
"""


class Hub(BaseHTTPRequestHandler):
    """The two repositories, read only: what huggingface_hub asks for on its way to their files."""

    repositories: dict[str, dict[str, bytes]]
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        for name, files in self.repositories.items():
            api = f"/api/{name if name.startswith('datasets/') else 'models/' + name}"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                listed = [{"rfilename": file} for file in files]
                about = {"id": name, "sha": COMMIT, "siblings": listed, "private": False}
                return self._send(json.dumps(about).encode(), body)
            if path.startswith(f"{api}/tree/"):
                tree = [self._entry(file, data) for file, data in files.items()]
                return self._send(json.dumps(tree).encode(), body)
            for file, data in files.items():
                if path in (f"/{name}/resolve/{COMMIT}/{file}", f"/{name}/resolve/main/{file}"):
                    return self._send(data, body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    @staticmethod
    def _entry(file: str, data: bytes) -> dict[str, object]:
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": file, "size": len(data), "oid": oid}

    def _send(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """A hub on this machine; its address."""
    Hub.asked = []
    Hub.repositories = {
        "us/speller": {path.name: path.read_bytes() for path in MODEL.iterdir()}
        | {"pytorch_model.bin": b"the same weights in another form"},
        "datasets/us/rows": {"data/train-0.jsonl": ROWS.encode(), "data/train-1.jsonl": b"{}\n"},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(endpoint: str, home: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """`localize` in a process of its own: the hub's library reads its environment at import."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, *settings],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=home.parent,
    )


def test_a_model_and_data_are_fetched_once_and_then_found_in_the_cache(
    hub: str, tmp_path: Path
) -> None:
    settings = [
        "model.name=us/speller",
        'data.train_files=["hf://datasets/us/rows/data/train-*.jsonl"]',
    ]
    first = resolve(hub, tmp_path / "home", *settings)
    assert first.returncode == 0, first.stderr
    (tmp_path / "resolved.toml").write_text(first.stdout)
    config = load_config([tmp_path / "resolved.toml"])
    assert COMMIT in config.model.name
    weights = Path(config.model.name, "model.safetensors").read_bytes()
    assert weights == (MODEL / "model.safetensors").read_bytes()
    assert not Path(config.model.name, "pytorch_model.bin").exists()
    assert [Path(file).name for file in config.data.train_files] == [
        "train-0.jsonl",
        "train-1.jsonl",
    ]
    assert Path(config.data.train_files[0]).read_text() == ROWS

    without_network = resolve("http://127.0.0.1:9", tmp_path / "home", *settings)
    assert without_network.stdout == first.stdout, without_network.stderr


def test_what_is_neither_here_nor_there(hub: str, tmp_path: Path) -> None:
    data = "data.dataset=spell_backward"
    unknown = resolve(hub, tmp_path / "home", "model.name=us/nothing", data)
    unreachable = resolve("http://127.0.0.1:9", tmp_path / "home", "model.name=us/speller", data)
    for answer, name in ((unknown, "us/nothing"), (unreachable, "us/speller")):
        assert answer.returncode == 1 and "Traceback" not in answer.stderr, answer.stderr
        assert f"model.name = '{name}' is not a directory relative to" in answer.stderr
        assert f"hf download {name}" in answer.stderr


def test_a_file_that_the_dataset_does_not_have(hub: str, tmp_path: Path) -> None:
    wrong = 'data.train_files=["hf://datasets/us/rows/data/test-*.jsonl"]'
    answer = resolve(hub, tmp_path / "home", "model.name=us/speller", wrong)
    assert "us/rows has no file 'data/test-*.jsonl'" in answer.stderr, answer.stderr


@pytest.mark.parametrize("name", ["hf://us/rows/a.jsonl", "hf://datasets/us", "hf://datasets/us/r"])
def test_a_name_that_is_no_file_of_a_dataset(name: str, tmp_path: Path) -> None:
    config = load_config([], [f"model.name={tmp_path}", f'data.train_files=["{name}"]'])
    with pytest.raises(ConfigError, match=r"write hf://datasets/ORG/NAME/FILE"):
        localize_config(config)


def test_a_directory_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "us" / "speller").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = load_config([], ["model.name=us/speller", 'data.train_files=["rows.jsonl"]'])
    assert localize_config(config) == config
