"""CanAppend, CanSwapOut and CanSwapIn: the answer is what the call would do, and asking changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from each_row import each_row

from kvservice.client import KVClient, Session
from kvservice.errors import InvalidArgumentError, OutOfBlocksError, SequenceNotSwappedError
from kvservice.launch import Daemon

BLOCK_SIZE, NUM_BLOCKS = 4, 8
# Room for four blocks in the swap tier; a block takes 4 tokens * 2 * 32 * 4 bytes.
POOL: dict[str, Any] = {
    "num_layers": 1, "num_kv_heads": 1, "head_size": 32, "dtype": "float32", "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS, "watermark": 0.0, "swap_space_gib": 4 * 1024 / 2**30,
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(**POOL) as running:
        yield running


@pytest.fixture
def kv(daemon: Daemon) -> Iterator[Session]:
    with KVClient(daemon.address) as client, client.session() as session:
        yield session
        session.reset_prefix_cache()


def test_an_append_fits_if_the_check_says_so(kv: Session) -> None:
    with each_row() as row:
        for num_tokens, lookahead, fits in ((4, 0, True), (3, 1, True), (5, 0, False), (4, 1, False)):
            with row((num_tokens, lookahead)):
                one = kv.allocate(range(BLOCK_SIZE))
                other = kv.allocate(range(BLOCK_SIZE * (NUM_BLOCKS - 2)))  # one block is left
                before = kv.describe(token_ids=True, block_ids=True)
                assert kv.can_append([one], [num_tokens], lookahead=lookahead) is fits
                assert kv.describe(token_ids=True, block_ids=True) == before
                if fits:
                    kv.append([one], [7] * num_tokens, num_tokens=[num_tokens], lookahead=lookahead)
                else:
                    with pytest.raises(OutOfBlocksError):
                        kv.append([one], [7] * num_tokens, num_tokens=[num_tokens], lookahead=lookahead)
                assert kv.can_append([one]) is not (fits and num_tokens == BLOCK_SIZE and not lookahead)
                kv.free([other])
                assert kv.can_append([one], [BLOCK_SIZE])
                kv.free([one])


def test_swapping_out_fits_if_the_check_says_so(kv: Session) -> None:
    with each_row() as row:
        for num_blocks, fits in ((4, True), (5, False)):
            with row(num_blocks):
                sequence = kv.allocate(range(BLOCK_SIZE * num_blocks))
                before = kv.describe(block_ids=True)
                assert kv.can_swap_out([sequence]) is fits
                assert kv.describe(block_ids=True) == before
                if fits:
                    assert kv.swap_out([sequence]) == num_blocks
                else:
                    with pytest.raises(OutOfBlocksError):
                        kv.swap_out([sequence])
                kv.free([sequence])


def test_swapping_in_fits_if_the_check_says_so(kv: Session) -> None:
    sequence = kv.allocate(range(BLOCK_SIZE * 4))
    with pytest.raises(SequenceNotSwappedError):
        kv.can_swap_in([sequence])
    kv.swap_out([sequence])
    other = kv.allocate(range(100, 100 + BLOCK_SIZE * (NUM_BLOCKS - 3)))
    before = kv.describe(block_ids=True)
    assert kv.can_swap_in([sequence]) == "later"
    assert kv.describe(block_ids=True) == before
    with pytest.raises(OutOfBlocksError):
        kv.swap_in([sequence])
    kv.free([other])
    assert kv.can_swap_in([sequence]) == "ok"
    kv.swap_in([sequence])


def test_wrong_arguments_are_named(kv: Session) -> None:
    sequence = kv.allocate([1])
    for arguments, field in (({"num_tokens": [1, 2]}, "num_tokens"), ({"lookahead": -1}, "lookahead")):
        with pytest.raises(InvalidArgumentError) as caught:
            kv.can_append([sequence], **arguments)
        assert caught.value.field == field
    for ask in (kv.can_append, kv.can_swap_out, kv.can_swap_in):
        with pytest.raises(InvalidArgumentError) as caught:
            ask([])
        assert caught.value.field == "sequence_ids"
