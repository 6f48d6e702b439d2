"""Layouts and manifests: what is accepted, and that nothing inconsistent is ever built."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.weights.version import manifest as mf
from tools.kit.manifest_samples import TENSORS, build


def changed(index: int, **changes: Any) -> tuple[mf.TensorSpec, ...]:
    tensors = list(TENSORS)
    tensors[index] = msgspec.structs.replace(tensors[index], **changes)
    return tuple(tensors)


def raw(**changes: Any) -> bytes:
    """A manifest's map with fields replaced after every check of ours."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(build()), **changes})


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        ([], "float32", "at least one"),
        ([("a", (2,)), ("a", (2,))], "float32", "'a' is listed twice"),
        ([("a", (2, 0))], "float32", "no elements"),
        ([("a", (-2, -2))], "float32", "no elements"),
        ([("a", (2,))], "complex64", "'complex64'"),
    ],
)
def test_layout_refuses(
    shapes: list[tuple[str, tuple[int, ...]]], dtype: str, message: str
) -> None:
    with pytest.raises(mf.ManifestError, match=message):
        mf.make_layout(shapes, dtype)


def test_round_trip() -> None:
    for manifest in (build(), build(probe=None)):
        assert mf.decode(mf.encode(manifest)) == manifest


INCONSISTENT: list[tuple[dict[str, Any], str]] = [
    ({"tensors": ()}, "at least one"),
    ({"tensors": changed(1, name="embed")}, "twice"),
    ({"tensors": changed(1, offset=128)}, "offset 128, not 192"),
    ({"tensors": changed(1, offset=1 << 40)}, "not 192"),
    ({"tensors": changed(0, nbytes=156)}, "claims 156 bytes"),
    ({"tensors": changed(0, shape=(5, 9))}, "takes 180"),
    ({"tensors": changed(2, dtype="int32")}, "'scale' is int32"),
    ({"tensors": changed(2, dtype="float33")}, "float33"),
    ({"tensors": tuple(reversed(TENSORS))}, "not 0"),
    ({"total_bytes": 513}, "take 512"),
    ({"total_bytes": 448}, "take 512"),
    ({"dtype": "bfloat16"}, "not bfloat16"),
    ({"chunk_checksums": (1, 2, 3, 4, 5)}, "5 checksums for 6"),
    ({"chunk_bytes": 512}, "6 checksums for 1"),
    ({"kind": "adapter"}, "kind 'adapter' is reserved"),
]


@pytest.mark.parametrize(("changes", "message"), INCONSISTENT)
def test_inconsistent_content_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(mf.ManifestError, match=message):
        build(**changes)
    with pytest.raises(mf.ManifestError, match=message):
        mf.decode(raw(**{key: msgspec.to_builtins(value) for key, value in changes.items()}))


PROBE = {"sequences": [[1, 2]], "logprobs": [[0.0]], "tolerance": 1.0, "mean_tolerance": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"kind": "delta"},
        {"chunk_bytes": 0},
        {"digest": "0" * 31},
        {"digest": "G" * 32},
        {"unknown": 1},
        {"probe": PROBE | {"sequences": [[1]], "logprobs": [[]]}},
        {"probe": PROBE | {"sequences": [], "logprobs": []}},
        {"probe": PROBE | {"logprobs": [[0.0, 0.0]]}},
        {"probe": PROBE | {"logprobs": [[float("nan")]]}},
        {"probe": PROBE | {"tolerance": float("nan")}},
        {"probe": PROBE | {"tolerance": 0.0}},
    ],
)
def test_bad_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(mf.ManifestError, match="not a manifest"):
        mf.decode(raw(**changes))


def test_hostile_bytes_are_refused() -> None:
    data = mf.encode(build())
    nested = b"\x91" * 100_000
    huge = msgspec.to_builtins(TENSORS)
    huge[0]["shape"] = [(1 << 63) - 1] * 200_000
    bad_utf8 = data.replace(b"embed", b"emb\xff\xfe")
    for bad in (b"", b"\x80", data[:-1], data + b"\x00", nested, bad_utf8, raw(tensors=huge)):
        with pytest.raises(mf.ManifestError):
            mf.decode(bad)


def test_too_large_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = mf.encode(build())
    monkeypatch.setattr(mf, "MANIFEST_BYTES_MAX", len(data) - 1)
    with pytest.raises(mf.ManifestError, match="above the limit"):
        mf.decode(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_gives_a_manifest_or_the_one_error(data: st.DataObject) -> None:
    good = bytearray(mf.encode(build()))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = mf.decode(bytes(good))
    except mf.ManifestError:
        return
    assert mf.check_tensors(decoded.tensors) == decoded.total_bytes


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=12),
    st.sampled_from(sorted(mf.ITEM_BYTES)),
)
def test_layout_never_overlaps(shapes: list[list[int]], dtype: str) -> None:
    tensors = mf.make_layout([(f"t{i}", shape) for i, shape in enumerate(shapes)], dtype)
    ends = [spec.offset + spec.nbytes for spec in tensors]
    starts = [spec.offset for spec in tensors[1:]] + [mf.check_tensors(tensors)]
    assert all(0 <= start - end < mf.ALIGNMENT for end, start in zip(ends, starts, strict=True))
    assert all(spec.offset % mf.ALIGNMENT == 0 for spec in tensors)
