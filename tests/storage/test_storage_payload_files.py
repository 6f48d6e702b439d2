"""Large payloads: in files, durable before their row, swept when no row names them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from laminar.names.ports import DiskError
from laminar.storage import payload_files
from laminar.storage.database import Database
from tools.kit.store_samples import answers, append, contents, fetched, filled, floats, ints, open_

INLINE_TOKENS = payload_files.INLINE_LIMIT // 8


def _names(path: Path) -> list[str]:
    return sorted(file.name for file in payload_files.folder_of(path).iterdir())


def test_only_what_is_large_goes_to_a_file(path):
    database = filled(path)
    answers(database, open_("0.1.0"), append("0.1.0", tuple(range(INLINE_TOKENS))))
    assert _names(path) == []
    tokens = tuple(range(INLINE_TOKENS + 1))
    answers(database, open_("0.1.1"), append("0.1.1", tokens))
    logprobs = floats(*(-0.25 * (token % 7) for token in tokens))
    (name,) = _names(path)
    data = (payload_files.folder_of(path) / name).read_bytes()
    assert data == ints(*tokens) + logprobs and name == xxhash.xxh3_128_hexdigest(data)
    (row,) = [row for row in contents(path)["chunks"] if row[0] == "0.1.1"]
    assert row[6:9] == (None, None, name)
    kept = fetched(database, "0.1.1")
    assert (kept.tokens, kept.logprobs) == (ints(*tokens), logprobs)


def test_a_large_chunk_may_be_sent_again(path):
    database = filled(path)
    request = append("0.1.0", tuple(range(10_000)))
    assert answers(database, open_("0.1.0"), request, request) == ["open", "ok", "ok"]
    other = append("0.1.0", (*range(9_999), 3))
    assert answers(database, other) == ["refused"]
    assert len(_names(path)) == 1


def test_the_file_is_durable_before_its_name(tmp_path, monkeypatch):
    """Sync the data, rename, sync the folder: in any other order a crash could leave less."""
    seen: list[str] = []
    sync, rename = os.fsync, os.replace

    def record_sync(descriptor):
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def record_rename(old, new):
        seen.append(f"rename {old.name} {new.name} {old.stat().st_size}")
        return rename(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    name = payload_files.write(tmp_path, b"abc")
    new = f".{name}.{os.getpid()}"
    written = [f"sync {new}", f"rename {new} {name} 3"]
    assert seen == [*written, f"sync {tmp_path.name}"]
    assert payload_files.write(tmp_path, b"abc") == name
    assert seen == [*written, f"sync {tmp_path.name}", f"sync {tmp_path.name}"]


def test_a_file_that_cannot_be_synced_is_a_disk_error(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError, match="Input/output"):
        payload_files.write(tmp_path, b"abc")


def test_a_missing_or_changed_file_is_damage(tmp_path):
    name = payload_files.write(tmp_path, b"abc")
    assert payload_files.read(tmp_path, name) == b"abc"
    (tmp_path / name).write_bytes(b"abd")
    with pytest.raises(payload_files.DamageError, match=name):
        payload_files.read(tmp_path, name)
    (tmp_path / name).unlink()
    with pytest.raises(payload_files.DamageError, match="missing"):
        payload_files.read(tmp_path, name)


def test_a_start_sweeps_only_what_no_row_names(path):
    database = filled(path)
    answers(database, open_("0.1.0"), append("0.1.0", tuple(range(10_000))))
    (kept,) = _names(path)
    answers(database, open_("0.1.1"), append("0.1.1", tuple(range(11_000))))
    answers(database, open_("0.1.1", 2, attempt=2))
    (payload_files.folder_of(path) / "0123.partial").write_bytes(b"interrupted")
    assert len(_names(path)) == 3
    database.close()
    database = Database(path, 1)
    assert _names(path) == [kept]
    assert len(fetched(database, "0.1.0").tokens) == 40_000
