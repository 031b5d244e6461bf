"""Checksums, and copies between the store and a client's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
from each_row import each_row
from numpy.typing import NDArray
from store_rig import bits, pack, unpack

from kvservice import _ext
from kvservice.errors import InvalidArgumentError

Bytes = NDArray[np.uint8]
SIZES = (1, 31, 32, 33, 63, 64, 4095, 4096, 4097, 100_003)
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def specified_checksum(block: bytes) -> int:
    """Compute the checksum as csrc/store/checksum.h specifies it."""
    words = np.frombuffer(block + bytes(-len(block) % 32), "<u4").reshape(-1, 8)
    h = len(block)
    for j in range(8):
        lane = [int(word) for word in words[:, j]]
        h = mix(h ^ (sum(lane) & MASK))
        h = mix(h ^ (sum((len(lane) - t) * word for t, word in enumerate(lane)) & MASK))
    return h


def checksum(block: Bytes) -> int:
    return unpack(_ext.store_checksums(block.ctypes.data, pack([0]), block.size, 1))[0]


def random_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_checksums_are_as_specified() -> None:
    with each_row() as row:
        for size in SIZES:
            with row(size):
                memory = random_bytes(size + 7)
                expected = specified_checksum(memory[:size].tobytes()), specified_checksum(memory[7:].tobytes())
                assert unpack(_ext.store_checksums(memory.ctypes.data, pack([0, 7]), size, 1)) == expected


def test_each_changed_byte_changes_the_checksum() -> None:
    for fill, block in (("random", random_bytes(1000)), ("zeros", np.zeros(1000, np.uint8))):
        seen = {checksum(block)}
        for i in range(block.size):
            for change in (1, 0x80, 0xFF):
                block[i] ^= change
                seen.add(checksum(block))
                block[i] ^= change
        assert len(seen) == 1 + 3 * block.size, fill


def test_each_exchange_of_words_changes_the_checksum() -> None:
    """The words differ only in their highest bit, or only in their lowest."""
    for difference in (1 << 31, 1):
        words = np.zeros(1 << 12, "<u4")
        words[0] = difference
        seen = set()
        for i in range(words.size):
            words[0], words[i] = words[i], words[0]
            seen.add(checksum(words.view(np.uint8)))
            words[0], words[i] = words[i], words[0]
        assert len(seen) == words.size


def test_exchanged_parts_change_the_checksum() -> None:
    block = random_bytes(1 << 16)
    seen = {checksum(block)}
    for part in (4, 8, 32, 64, 4096, 1 << 15):
        parts = block.reshape(-1, part)
        for i in range(1, len(parts), max(1, len(parts) // 16)):
            parts[[0, i]] = parts[[i, 0]]
            seen.add(checksum(block))
            parts[[0, i]] = parts[[i, 0]]
    assert checksum(block) == checksum(block.copy())
    assert len(seen) == 1 + sum(len(range(1, n, max(1, n // 16))) for n in (1 << 14, 1 << 13, 2048, 1024, 16, 2))


def test_blocks_of_zeros_with_different_sizes_have_different_checksums() -> None:
    zeros = np.zeros(200, np.uint8)
    assert len({checksum(zeros[:size]) for size in range(1, 201)}) == 200


def pieces_of(block_bytes: int, num_pieces: int, rng: np.random.Generator) -> list[int]:
    cuts = sorted(rng.choice(np.arange(1, block_bytes), num_pieces - 1, replace=False).tolist())
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, block_bytes], strict=True)]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_pieces_at_any_offsets(num_threads: int) -> None:
    """It fails if a byte is wrong on the way in or out, or if one beside a piece has changed."""
    with each_row() as row:
        for block_bytes in (33, 64, 4095, 4096, 4097):
            for num_pieces in (1, 2, 7, 31):
                with row((block_bytes, num_pieces)):
                    check_pieces(block_bytes, num_pieces, num_threads)


def check_pieces(block_bytes: int, num_pieces: int, num_threads: int) -> None:
    """Copy blocks in pieces that lie anywhere in the client's memory into a store and back, and look at every byte."""
    rng = np.random.default_rng(block_bytes * num_pieces)
    num_blocks = 9
    sizes = pieces_of(block_bytes, num_pieces, rng)
    # The pieces of all blocks lie in any order in the client's memory, with gaps.
    order = rng.permutation(num_blocks * num_pieces)
    gaps = rng.integers(0, 40, order.size)
    ends = list(accumulate(int(sizes[i % num_pieces] + gap) for i, gap in zip(order, gaps, strict=True)))
    places = np.empty(order.size, np.uint64)
    for i, end in zip(order, ends, strict=True):
        places[i] = end - sizes[i % num_pieces]
    source = random_bytes(ends[-1])
    stride = block_bytes + 11
    store = np.full(num_blocks * stride, 0xAA, np.uint8)
    offsets = rng.permutation(num_blocks) * stride
    layout = places.tobytes(), pack(sizes)

    copied = _ext.store_copy_in(store.ctypes.data, pack(offsets), block_bytes, source.ctypes.data, *layout, num_threads)
    blocks = [
        np.concatenate([source[place : place + size] for place, size in zip(row, sizes, strict=True)])
        for row in places.reshape(num_blocks, num_pieces).astype(int)
    ]
    for offset, block, written in zip(offsets, blocks, unpack(copied), strict=True):
        assert np.array_equal(store[offset : offset + block_bytes], block)
        assert (store[offset + block_bytes : offset + stride] == 0xAA).all()
        assert written == checksum(block)

    inside = np.zeros(source.size, bool)
    for place, size in zip(places.astype(int), sizes * num_blocks, strict=True):
        inside[place : place + size] = True
    for compared in (copied, b""):
        target = np.full(source.size, 0xBB, np.uint8)
        right = _ext.store_copy_out(
            store.ctypes.data, pack(offsets), block_bytes, target.ctypes.data, *layout, compared, num_threads
        )
        assert all(bits(right, num_blocks))
        assert np.array_equal(target[inside], source[inside])
        assert (target[~inside] == 0xBB).all()


def test_large_copies_with_several_threads() -> None:
    """It fails if a byte or a checksum is wrong."""
    with each_row() as row:
        for misaligned in (0, 1, 8):
            with row(misaligned):
                check_large_copies(misaligned)


def check_large_copies(misaligned: int) -> None:
    block_bytes, num_blocks = (1 << 20) + 24, 12
    source = random_bytes(num_blocks * block_bytes + misaligned)[misaligned:]
    store = np.zeros_like(source)
    offsets = pack(range(0, source.size, block_bytes))
    one_piece = offsets, pack([block_bytes])
    sums = _ext.store_copy_in(store.ctypes.data, offsets, block_bytes, source.ctypes.data, *one_piece, 4)
    assert sums == _ext.store_checksums(source.ctypes.data, offsets, block_bytes, 3)
    for compared in (sums, b""):
        target = np.zeros(source.size + misaligned, np.uint8)[misaligned:]
        right = _ext.store_copy_out(
            store.ctypes.data, offsets, block_bytes, target.ctypes.data, *one_piece, compared, 4
        )
        assert all(bits(right, num_blocks))
        assert np.array_equal(source, target)


def test_several_threads_call_at_a_time() -> None:
    block_bytes, num_blocks, callers = 4097, 300, 4
    source = random_bytes(callers * num_blocks * block_bytes)
    store = np.zeros_like(source)
    failures = []

    def copy(caller: int) -> None:
        begin = caller * num_blocks * block_bytes
        offsets = pack(range(begin, begin + num_blocks * block_bytes, block_bytes))
        arguments = store.ctypes.data, offsets, block_bytes, source.ctypes.data, offsets, pack([block_bytes]), 2
        if _ext.store_copy_in(*arguments) != _ext.store_checksums(source.ctypes.data, offsets, block_bytes, 2):
            failures.append(caller)

    threads = [threading.Thread(target=copy, args=(caller,)) for caller in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert np.array_equal(source, store)


def test_a_wrong_checksum_marks_its_block_only() -> None:
    store, target = random_bytes(10 * 64), np.zeros(10 * 64, np.uint8)
    offsets = pack(range(0, 640, 64))
    sums = _ext.store_checksums(store.ctypes.data, offsets, 64, 1)
    store[[0, 64 * 9 + 63]] ^= 1
    arguments = store.ctypes.data, offsets, 64, target.ctypes.data, offsets, pack([64])
    assert bits(_ext.store_copy_out(*arguments, sums, 1), 10) == [False, *[True] * 8, False]
    assert bits(_ext.store_copy_out(*arguments, b"", 1), 10) == [True] * 10


def test_no_blocks() -> None:
    memory = np.zeros(64, np.uint8).ctypes.data
    assert _ext.store_copy_in(memory, b"", 64, memory, b"", pack([64]), 4) == b""
    assert _ext.store_copy_out(memory, b"", 64, memory, b"", pack([64]), b"", 4) == b""


def copy_in(**changes: object) -> object:
    memory = np.zeros(256, np.uint8).ctypes.data
    arguments: dict[str, object] = {
        "memory": memory,
        "offsets": pack([0, 64]),
        "block_bytes": 64,
        "source": memory,
        "places": pack([128, 160, 192, 224]),
        "piece_bytes": pack([32, 32]),
        "num_threads": 1,
    }
    call: Callable[..., object] = _ext.store_copy_in
    return call(**(arguments | changes))


WRONG: list[tuple[str, object]] = [
    ("memory", 0),
    ("memory", "x"),
    ("offsets", b"1234567"),
    ("offsets", bytearray(16)),
    ("block_bytes", 0),
    ("block_bytes", -64),
    ("block_bytes", 1.5),
    ("source", 0),
    ("places", pack([0])),
    ("places", b"123"),
    ("piece_bytes", b""),
    ("piece_bytes", pack([32, 31])),
    ("piece_bytes", pack([32, 33])),
    ("piece_bytes", pack([64, 0])),
    ("piece_bytes", pack([(1 << 64) - 1, 65])),
    ("num_threads", 0),
    ("num_threads", 257),
]


def test_wrong_arguments_are_refused_by_name() -> None:
    copy_in()
    with each_row() as row:
        for field, value in WRONG:
            with row((field, value)):
                with pytest.raises(InvalidArgumentError) as caught:
                    copy_in(**{field: value})
                assert caught.value.field == field


def test_versions_are_read_for_offsets_of_blocks_only() -> None:
    with each_row() as row:
        for offset in (0, 4095, 4096 + 1, 4096 + 3 * 4096):
            with row(offset):
                with pytest.raises(InvalidArgumentError) as caught:
                    _ext.store_versions(4096, 16384, 4096, 4096, pack([offset]))
                assert caught.value.field == "offsets"
