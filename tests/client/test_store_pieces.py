"""Where the blocks of a put or get are, and what is refused; keys and bitmaps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvservice.client import Lookup, Scatter, StoreNamespace
from kvservice.client.store import copies
from kvservice.client.store.link import StoreOptions
from kvservice.client.store.pieces import array_pieces, pieces_of
from kvservice.client.store.values import bitmap_of, chosen_keys, flags_of, key_bytes, some_keys, statuses_of
from kvservice.errors import InternalError, InvalidArgumentError

BLOCK = 96
KEYS = [bytes([number]) * 32 for number in range(5)]


def test_keys_are_one_bytes_or_a_sequence() -> None:
    assert key_bytes(b"".join(KEYS)) == key_bytes(KEYS) == key_bytes(tuple(KEYS)) == b"".join(KEYS)
    assert key_bytes(b"") == key_bytes([]) == b""
    assert some_keys(b"".join(KEYS), slice(1, 3)) == KEYS[1] + KEYS[2]
    assert chosen_keys(b"".join(KEYS), np.array([0, 1, 0, 0, 1], bool)) == KEYS[1] + KEYS[4]


@pytest.mark.parametrize(
    "keys", [b"\0" * 31, b"\0" * 33, [b"\0" * 31], [KEYS[0], KEYS[1][:-1]], "a" * 32, ["a" * 32], [7], 7, None,
             bytearray(32), np.zeros(32, np.uint8)],
)  # fmt: skip
def test_other_keys_are_refused(keys: Any) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        key_bytes(keys)
    assert error.value.field == "keys"


def test_bitmaps_start_with_the_lowest_bit() -> None:
    flags = np.array([1, 0, 0, 1, 1, 0, 0, 0, 0, 1], bool)
    assert bitmap_of(flags) == bytes([0b11001, 0b10])
    np.testing.assert_array_equal(flags_of(bitmap_of(flags), 10), flags)
    assert flags_of(b"", 0).tolist() == []
    assert flags_of(b"\1", 1).dtype == np.bool_
    for wrong in (b"", b"\1\1"):
        with pytest.raises(InternalError):
            flags_of(wrong, 3)


def test_a_response_has_one_status_per_key() -> None:
    assert statuses_of(bytes([1, 2]), 2).tolist() == [1, 2]
    with pytest.raises(InternalError):
        statuses_of(bytes([1, 2]), 3)


@pytest.mark.parametrize(("found", "leading"), [([], 0), ([1, 1], 2), ([1, 0, 1], 1), ([0, 1], 0)])
def test_a_lookup_counts_the_leading_keys(found: list[int], leading: int) -> None:
    assert Lookup.of(np.array(found, bool), 0).num_leading == leading


def gathered(base: list[np.ndarray], offsets: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Return the blocks of a scatter, by NumPy."""
    rows = []
    for row in offsets:
        parts = [
            array.reshape(-1).view(np.uint8)[int(at) : int(at) + size]
            for array, at, size in zip(base, row, sizes, strict=True)
        ]
        rows.append(np.concatenate(parts))
    return np.array(rows)


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("own", [False, True])
def test_pieces_are_copied_to_their_places(own: bool) -> None:
    sizes = [32, 48, 16]
    base = [random_bytes(10, 48, seed=seed).view(np.uint16) for seed in range(3)] if own else [random_bytes(30, 48)] * 3
    offsets = np.array([[48 * number, 96, 7] for number in (4, 0, 9)], np.int32)
    packed = np.zeros((3, BLOCK), np.uint8)
    source = pieces_of(Scatter(base if own else base[0], offsets, sizes), 3, BLOCK, "values", writable=False)
    copies.copy_in(packed.ctypes.data, copies.packed(3, BLOCK).tobytes(), BLOCK, source, 2)
    np.testing.assert_array_equal(packed, gathered(base, offsets, sizes))

    blocks = random_bytes(3, BLOCK, seed=9)
    places = np.arange(9).reshape(3, 3) * 48
    out = np.zeros((10, 48), np.uint8)
    target = pieces_of(Scatter(out, places, sizes), 3, BLOCK, "out", writable=True)
    copies.copy_out(blocks.ctypes.data, copies.packed(3, BLOCK)[[2, 0]].tobytes(), BLOCK, target.part(slice(1, 3)), 1)
    np.testing.assert_array_equal(gathered([out] * 3, places, sizes), np.stack([blocks[0] * 0, blocks[2], blocks[0]]))
    assert not out[9].any()


def test_torch_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4 * BLOCK).to(torch.uint8).reshape(4, BLOCK)
    pieces = pieces_of(tensor, 4, BLOCK, "values", writable=False)
    assert pieces.addresses[1, 0] == tensor[1].data_ptr()
    layers = [torch.zeros(4, 16, dtype=torch.bfloat16) for _ in range(3)]
    pieces = pieces_of(Scatter(layers, [[0, 32, 64]], [32] * 3), 1, BLOCK, "values", writable=True)
    assert pieces.addresses.tolist() == [[layers[0].data_ptr(), layers[1].data_ptr() + 32, layers[2].data_ptr() + 64]]
    for wrong in (tensor.t(), tensor.to(torch.int8), tensor[:3], tensor.to("meta")):
        with pytest.raises(InvalidArgumentError, match="values"):
            pieces_of(wrong, 4, BLOCK, "values", writable=False)


@pytest.mark.parametrize(
    "blocks",
    [
        np.zeros((4, BLOCK), np.int8),
        np.zeros((3, BLOCK), np.uint8),
        np.zeros((4, BLOCK - 1), np.uint8),
        np.zeros(4 * BLOCK, np.uint8),
        np.zeros((4, 2 * BLOCK), np.uint8)[:, ::2],
        np.zeros((BLOCK, 4), np.uint8).T,
        bytes(4 * BLOCK),
        None,
        [[0] * BLOCK] * 4,
    ],
    ids=lambda one: f"{type(one).__name__}{getattr(one, 'shape', '')}",
)
@pytest.mark.parametrize("field", ["values", "out"])
def test_other_arrays_are_refused(blocks: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        pieces_of(blocks, 4, BLOCK, field, writable=False)
    assert error.value.field == field


BASE = np.zeros((4, BLOCK), np.uint8)


@pytest.mark.parametrize(
    "scatter",
    [
        Scatter(BASE, [[0, 48]] * 3, [48, 48]),
        Scatter(BASE, [[0]] * 4, [48, 48]),
        Scatter(BASE, [[0, 0.5]] * 4, [48, 48]),
        Scatter(BASE, [[0, -1]] * 4, [48, 48]),
        Scatter(BASE, [[0, 4 * BLOCK - 47]] * 4, [48, 48]),
        Scatter(BASE, [[0, 2**63]] * 4, [48, 48]),
        Scatter(BASE, [[0, 48]] * 4, [48, 47]),
        Scatter(BASE, [[0, 48]] * 4, [96, 0]),
        Scatter(BASE, [[0, 48]] * 4, [97, -1]),
        Scatter(BASE, [[0, 48]] * 4, [48.0, 48]),  # type: ignore[list-item]
        Scatter(BASE, [[]] * 4, []),
        Scatter([BASE], [[0, 48]] * 4, [48, 48]),
        Scatter([BASE, BASE[0, :40]], [[0, 0]] * 4, [48, 48]),
        Scatter(BASE[:, ::2], [[0, 48]] * 4, [48, 48]),
        Scatter(None, [[0, 48]] * 4, [48, 48]),
        Scatter([], [[0, 48]] * 4, [48, 48]),
    ],
    ids=range(16),
)
def test_other_scatters_are_refused(scatter: Scatter) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        pieces_of(scatter, 4, BLOCK, "out", writable=True)
    assert error.value.field == "out"


def test_a_piece_may_end_with_its_array() -> None:
    assert pieces_of(Scatter(BASE, [[0, 4 * BLOCK - 48]] * 4, [48, 48]), 4, BLOCK, "out", writable=True)


def test_results_are_not_written_to_read_only_arrays() -> None:
    array = np.zeros((4, BLOCK), np.uint8)
    array.flags.writeable = False
    assert pieces_of(array, 4, BLOCK, "values", writable=False)
    for blocks in (array, Scatter(array, [[0]] * 4, [BLOCK])):
        with pytest.raises(InvalidArgumentError, match="read-only"):
            pieces_of(blocks, 4, BLOCK, "out", writable=True)


def test_blocks_that_lie_one_after_the_other_are_seen_as_one() -> None:
    array = np.arange(4 * BLOCK, dtype=np.uint8).reshape(4, BLOCK)
    pieces = pieces_of(array, 4, BLOCK, "values", writable=False)
    assert bytes(pieces.view() or b"") == array.tobytes()
    assert bytes(pieces.part(slice(1, 3)).view() or b"") == array[1:3].tobytes()
    assert bytes(pieces.part(slice(3, 4)).view() or b"") == array[3:].tobytes()
    assert pieces.part(np.array([True, False, True, False])).view() is None
    two = Scatter(array, [[0, 1], [BLOCK, BLOCK + 1]], [1, BLOCK - 1])
    assert pieces_of(two, 2, BLOCK, "values", writable=False).view() is None


def test_pieces_are_found_in_a_range_of_memory() -> None:
    pieces = array_pieces(10_000, 3, 100, None)
    offsets = pieces.offsets_in(9_900, 400)
    assert offsets is not None
    assert offsets.tolist() == [[100], [200], [300]]
    for address, num_bytes in ((9_900, 399), (10_001, 1000), (20_000, 1000), (0, 100)):
        assert pieces.offsets_in(address, num_bytes) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", 7), ("block_bytes", 0), ("block_bytes", -1), ("block_bytes", 1.5), ("tp_rank", -1), ("tp_size", 2**32)],
)
def test_a_namespace_with_a_wrong_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        dataclasses.replace(StoreNamespace("m", 1), **{field: value}).message()
    assert error.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", None),
        ("tenant", 7),
        ("name", b"\xff"),
        ("unreachable", "wait"),
        ("transport", "lane"),
        ("copy_threads", 0),
        ("copy_threads", 1.5),
        ("quota_gib", -1),
        ("quota_gib", float("nan")),
        ("quota_gib", "1"),
        ("quota_gib", 1e-12),
    ],
)
def test_a_wrong_option_is_refused(field: str, value: Any) -> None:
    options: dict[str, Any] = {
        "namespace": StoreNamespace("m", 1), "tenant": "", "name": "", "limit_s": None, "unreachable": "miss",
        "transport": "auto", "copy_threads": None, "quota_gib": 0.0,
    }  # fmt: skip
    assert StoreOptions.of(**options).copy_threads >= 1
    with pytest.raises(InvalidArgumentError) as error:
        StoreOptions.of(**options | {field: value})
    assert error.value.field == field
