"""Tensors through a slot and back, and that no changed byte goes unseen."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from laminar.run.work_counter import get_work_count
from laminar.weights.arena.arena import Arena
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import WeightsCorrupt, compute_checksums, verify_weights
from laminar.weights.version.tensors import TORCH_DTYPES, tensor_view, write_rows, write_tensors

SHAPES = [("embed", (7, 5)), ("scale", ()), ("norm", (3,)), ("conv", (2, 3, 4))]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES}


def slot(size: int = 4096) -> np.ndarray:
    """What an earlier version left behind."""
    return np.full(size, 0xAA, dtype=np.uint8)


def describe(
    view: np.ndarray, specs: Sequence[mf.TensorSpec], chunk_bytes: int = 64
) -> mf.Manifest:
    total = mf.check_tensors(specs)
    chunks, digest = compute_checksums(view, total, chunk_bytes)
    return mf.Manifest(
        version=4,
        step=3,
        kind="full",
        dtype=specs[0].dtype,
        total_bytes=total,
        tensors=tuple(specs),
        chunk_bytes=chunk_bytes,
        chunk_checksums=tuple(chunks),
        digest=digest,
        probe=None,
    )


def read_tensors(view, specs):
    """Name and view of every tensor, in layout order."""
    return [(spec.name, tensor_view(view, spec)) for spec in specs]


@pytest.mark.parametrize("name", sorted(mf.ITEM_BYTES))
def test_every_type_comes_back_exactly(name: str) -> None:
    dtype = TORCH_DTYPES[name]
    assert dtype.itemsize == mf.ITEM_BYTES[name]
    tensors, specs, view = random_tensors(dtype), mf.make_layout(SHAPES, name), slot()
    write_tensors(view, specs, tensors.items())
    back = dict(read_tensors(view, specs))
    assert list(back) == [key for key, _ in SHAPES]
    for key, tensor in tensors.items():
        assert back[key].dtype == dtype
        assert torch.equal(back[key], tensor)


def test_bfloat16_through_an_arena(tmp_path) -> None:
    specs = mf.make_layout(SHAPES, "bfloat16")
    arena = Arena.create(tmp_path / "arena", 3, mf.check_tensors(specs))
    bits = torch.arange(35, dtype=torch.int16) * 937  # NaN payloads and subnormals included
    tensors = random_tensors(torch.bfloat16)
    tensors["embed"] = bits.view(torch.bfloat16).reshape(7, 5)
    write_tensors(arena.get_slot(1), specs, tensors.items())
    other = Arena.attach(arena.path)
    manifest = describe(arena.get_slot(1), specs)
    verify_weights(other.get_slot(1), manifest)
    back = dict(read_tensors(other.get_slot(1), specs))
    assert torch.equal(back["embed"].view(torch.int16).reshape(-1), bits)


def test_other_types_and_strides_are_converted_on_the_way() -> None:
    tensors = random_tensors()
    strided = {**tensors, "embed": torch.nn.Parameter(tensors["embed"].t().contiguous().t())}
    assert not strided["embed"].is_contiguous()
    for name in ("float32", "bfloat16", "float64"):
        specs, view = mf.make_layout(SHAPES, name), slot()
        write_tensors(view, specs, strided.items())
        back = dict(read_tensors(view, specs))
        for key, tensor in tensors.items():
            assert torch.equal(back[key], tensor.to(TORCH_DTYPES[name]))


class CopiesToSlots(TorchDispatchMode):
    """Records what reaches a slot, and stands in for the copy from a device that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default or args[0].device.type != "cpu":
            return func(*args, **kwargs or {})
        self.sources.append((args[1].device.type, args[1].dtype))
        return args[0]


def test_a_device_converts_before_its_tensor_is_copied_to_the_host() -> None:
    """A blocking copy to the host in another type makes a whole temporary in the old one."""
    specs = mf.make_layout([("embed", (7, 5))], "bfloat16")
    with CopiesToSlots() as copies:
        for device in ("meta", "cpu"):
            write_tensors(slot(), specs, [("embed", torch.empty(7, 5, device=device))])
    assert copies.sources == [("meta", torch.bfloat16), ("cpu", torch.float32)]


def test_tensors_are_views_of_the_slot() -> None:
    specs, view = mf.make_layout(SHAPES, "float32"), slot()
    write_tensors(view, specs, random_tensors().items())
    back = dict(read_tensors(view, specs))
    view[:] = 0
    assert all(not tensor.any() for tensor in back.values())


def test_equal_weights_have_equal_digests_in_every_slot() -> None:
    specs, first, second = mf.make_layout(SHAPES, "float32"), slot(), np.zeros(8192, dtype=np.uint8)
    tensors = random_tensors()
    write_tensors(first, specs, tensors.items())
    write_tensors(second, specs, reversed(tensors.items()))
    assert describe(first, specs) == describe(second, specs)
    assert (first[mf.check_tensors(specs) :] == 0xAA).all()


def test_checksums_are_xxh3_of_chunks_and_of_all() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    chunks, digest = compute_checksums(data, 900, 256)
    raw = data.tobytes()[:900]
    assert chunks == [xxhash.xxh3_64_intdigest(raw[i : i + 256]) for i in (0, 256, 512, 768)]
    assert digest == xxhash.xxh3_128_hexdigest(raw)


def test_any_changed_byte_is_found_in_its_chunk() -> None:
    specs, view = mf.make_layout(SHAPES, "bfloat16"), slot()
    write_tensors(view, specs, random_tensors().items())
    manifest = describe(view, specs, chunk_bytes=100)
    verify_weights(view, manifest)
    for index in range(manifest.total_bytes):
        at = index // 100
        said = (
            rf"version 4, chunk {at} of .*expected xxh3_64 {manifest.chunk_checksums[at]:016x}, f"
        )
        for flip in (0x01, 0x80, 0xFF):
            view[index] ^= flip
            with pytest.raises(WeightsCorrupt, match=said):
                verify_weights(view, manifest)
            view[index] ^= flip
    verify_weights(view, manifest)
    view[manifest.total_bytes :] = 1
    verify_weights(view, manifest)


def test_a_wrong_digest_over_right_chunks_is_corrupt() -> None:
    specs, view = mf.make_layout(SHAPES, "float32"), slot()
    write_tensors(view, specs, random_tensors().items())
    good = describe(view, specs)
    fields = {key: getattr(good, key) for key in good.__struct_fields__}
    with pytest.raises(WeightsCorrupt, match=f"expected xxh3_128 {'0' * 32}, found {good.digest}"):
        verify_weights(view, mf.Manifest(**{**fields, "digest": "0" * 32}))


def test_wrong_tensors_are_refused() -> None:
    specs, tensors = mf.make_layout(SHAPES, "float32"), random_tensors()
    items = list(tensors.items())
    bad = {
        "'extra' is not in the layout": [*items, ("extra", torch.zeros(1))],
        "'embed' is not in the layout, or was written before": [*items, items[0]],
        r"not written: \['conv'\]": items[:-1],
        r"'embed' has shape \(5, 7\)": [("embed", torch.zeros(5, 7))],
    }
    for message, given in bad.items():
        with pytest.raises(mf.ManifestError, match=message):
            write_tensors(slot(), specs, given)


@pytest.mark.parametrize(
    ("name", "starts"), [("embed", (0, 0)), ("embed", (3, 0)), ("embed", (0, 2)), ("scale", (0, 0))]
)
def test_rows_that_were_written_before_are_refused(name: str, starts: tuple[int, ...]) -> None:
    tensor, specs = random_tensors()[name], mf.make_layout([(name, dict(SHAPES)[name])], "float32")
    rows = [(name, start, tensor[start : start + 3] if tensor.ndim else tensor) for start in starts]
    with pytest.raises(mf.ManifestError, match=f"'{name}' are written again or out of order"):
        write_rows(slot(), specs, rows)


def test_rows_between_two_parts_may_be_those_of_another_process() -> None:
    specs, view, tensor = mf.make_layout(SHAPES[:1], "float32"), slot(), random_tensors()["embed"]
    counted = get_work_count()
    write_rows(view, specs, [("embed", first, tensor[first : first + 2]) for first in (0, 4)])
    assert get_work_count() == counted + 2
    write_rows(view, specs, [("embed", first, tensor[first : first + 2]) for first in (2, 6)])
    ((_, back),) = read_tensors(view, specs)
    assert torch.equal(back, tensor)


def test_a_slot_that_is_too_small_is_refused() -> None:
    specs, view = mf.make_layout(SHAPES, "float32"), slot()
    total = mf.check_tensors(specs)
    write_tensors(view, specs, random_tensors().items())
    manifest, small = describe(view, specs), slot(total - 1)
    message = f"a version of {total} bytes does not fit into a slot of {total - 1}"
    with pytest.raises(mf.ManifestError, match=message):
        write_tensors(small, specs, random_tensors().items())
    with pytest.raises(mf.ManifestError, match=message):
        verify_weights(small, manifest)
    assert (small == 0xAA).all()
