"""Bad input: each case raises a typed error that names the field, and changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blocks_calls import can_allocate
from each_row import each_row

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig, SessionNamespace, extra_keys_by_block
from kvservice.errors import InvalidArgumentError, KVServiceError, UnknownSequenceError

Make = Callable[..., tuple[BlockManager, SessionNamespace]]

BAD_IDS: list[tuple[Any, type[KVServiceError], str]] = [
    ([], InvalidArgumentError, "sequence_ids"),
    ([1, 1], InvalidArgumentError, "sequence_ids[1]"),
    ([1, 77], UnknownSequenceError, "sequence_ids[1]"),
    ([1, 3], UnknownSequenceError, "sequence_ids[1]"),
    ([1, 4], UnknownSequenceError, "sequence_ids[1]"),
    ([1, -1], InvalidArgumentError, "sequence_ids[1]"),
    (np.array([1, 2**63], np.uint64), InvalidArgumentError, "sequence_ids[1]"),
    ([1, 2**63], InvalidArgumentError, "sequence_ids"),
    ([1, 2**70], InvalidArgumentError, "sequence_ids"),
    ([1.0], InvalidArgumentError, "sequence_ids"),
    ([True], InvalidArgumentError, "sequence_ids"),
    (["1"], InvalidArgumentError, "sequence_ids"),
    ([[1]], InvalidArgumentError, "sequence_ids"),
    ([[1], 2], InvalidArgumentError, "sequence_ids"),
    (1, InvalidArgumentError, "sequence_ids"),
    (None, InvalidArgumentError, "sequence_ids"),
    (np.zeros(0, np.int64), InvalidArgumentError, "sequence_ids"),
]

CALLS: dict[str, Callable[[BlockManager, SessionNamespace, Any], object]] = {
    "can_append": lambda m, s, ids: m.can_append(s, ids),
    "append": lambda m, s, ids: m.append(s, ids, [1, 1]),
    "open_step": lambda m, s, ids: m.open_step(s, ids),
    "truncate": lambda m, s, ids: m.truncate(s, ids, [1, 1]),
    "free": lambda m, s, ids: m.free(s, ids),
    "can_swap_out": lambda m, s, ids: m.can_swap_out(s, ids),
    "swap_out": lambda m, s, ids: m.swap_out(s, ids),
    "can_swap_in": lambda m, s, ids: m.can_swap_in(s, ids),
    "swap_in": lambda m, s, ids: m.swap_in(s, ids),
    "common_prefix_blocks": lambda m, s, ids: m.common_prefix_blocks(s, ids),
}


@pytest.fixture
def pool(make: Make) -> tuple[BlockManager, SessionNamespace]:
    """Sequences 1 and 2 have pending tokens; 3 is freed; 4 is in another namespace."""
    manager, space = make()
    manager.allocate(space, [AllocationRequest(i, range(6)) for i in (1, 2, 3)])
    manager.free(space, [3])
    manager.allocate(manager.open_namespace(), [AllocationRequest(4, range(6))])
    return manager, space


def test_sequence_ids(pool: tuple[BlockManager, SessionNamespace], snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for name in CALLS:
            with row(name):
                manager, space = pool
                before = snapshot(manager)
                for ids, error, field in BAD_IDS:
                    with pytest.raises(error) as caught:
                        CALLS[name](manager, space, ids)
                    assert caught.value.field == field, str(ids)
                    assert type(caught.value) is error
                assert snapshot(manager) == before


BAD_APPENDS: list[tuple[Any, ...]] = [
    (([1], []), "token_ids"),
    (([1], [1, 2]), "token_ids"),
    (([1], [-1]), "token_ids[0]"),
    (([1], np.array([-1], np.int32)), "token_ids[0]"),
    (([1], [2**31]), "token_ids[0]"),
    (([1], [0.5]), "token_ids"),
    (([1, 2], [1, 2], [1]), "num_tokens"),
    (([1, 2], [1, 2], [2, 0]), "num_tokens[1]"),
    (([1, 2], [1, 2], [3, -1]), "num_tokens[1]"),
    (([1, 2], [1, 2], [1, 2**62]), "num_tokens[1]"),
    (([1, 2], [1, 2], [2, 1]), "token_ids"),
    (([1, 2], [1, 2], None, [6]), "expected_lengths"),
    (([1, 2], [1, 2], None, [6.0, 6.0]), "expected_lengths"),
    (([1, 2], [1, 2], None, [6, -6]), "expected_lengths[1]"),
    (([1], [1], None, None, -1), "lookahead"),
    (([1], [1], None, None, 1.5), "lookahead"),
    (([1], [1], None, None, True), "lookahead"),
    (([1], [1], None, None, 2**40), "lookahead"),
    (([1], [1], None, None, 250), "lookahead[0]"),
]


def test_append(pool: tuple[BlockManager, SessionNamespace], snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for arguments, field in BAD_APPENDS:
            with row((arguments, field)):
                manager, space = pool
                before = snapshot(manager)
                with pytest.raises(InvalidArgumentError) as caught:
                    manager.append(space, *arguments)
                assert caught.value.field == field
                assert snapshot(manager) == before


BAD_REQUESTS: list[tuple[Any, ...]] = [
    ({"sequence_id": -1}, "sequence_id"),
    ({"sequence_id": 2**63}, "sequence_id"),
    ({"sequence_id": "x"}, "sequence_id"),
    ({"sequence_id": True}, "sequence_id"),
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [[1]]}, "token_ids"),
    ({"token_ids": [1, -5]}, "token_ids[1]"),
    ({"token_ids": range(257)}, "token_ids"),
    ({"lookahead": -1}, "lookahead"),
    ({"lookahead": 256}, "lookahead"),
    ({"lookahead": None}, "lookahead"),
    ({"extra_keys": {0: b"x"}}, "extra_keys"),
    ({"extra_keys": [(0, "x")]}, "extra_keys[0]"),
    ({"extra_keys": [(0, b"x"), (-1, b"x")]}, "extra_keys[1]"),
    ({"extra_keys": [(256, b"x")]}, "extra_keys[0]"),
    ({"extra_keys": [(0, b"")]}, "extra_keys[0]"),
    ({"extra_keys": [(0, b"x" * 257)]}, "extra_keys[0]"),
    ({"extra_keys": [(0, b"x")] * 1025}, "extra_keys"),
    ({"extra_keys": [b"xy"]}, "extra_keys[0]"),
]


def test_allocate(pool: tuple[BlockManager, SessionNamespace], snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for request_fields, field in BAD_REQUESTS:
            with row((request_fields, field)):
                manager, space = pool
                before = snapshot(manager)
                good, bad = (
                    AllocationRequest(8, [1]),
                    AllocationRequest(**{"sequence_id": 9, "token_ids": [1], **request_fields}),
                )
                for call in (functools.partial(can_allocate, manager), manager.allocate):
                    with pytest.raises(InvalidArgumentError) as caught:
                        call(space, [good, bad])
                    assert caught.value.field == f"requests[1].{field}"
                    with pytest.raises(InvalidArgumentError):
                        call(space, [])
                assert snapshot(manager) == before


BAD_CONFIGS: list[Any] = [
    {"num_blocks": 0},
    {"num_blocks": 2**31},
    {"num_blocks": True},
    {"block_size": 0},
    {"block_size": 12},
    {"block_size": 512},
    {"num_layers": 0},
    {"num_swap_blocks": -1},
    {"watermark": -0.1},
    {"watermark": 1.1},
    {"watermark": float("nan")},
    {"max_sequences": 0},
    {"max_sequence_tokens": 0},
    {"max_pinned_fraction": 2},
]


def test_config() -> None:
    with each_row() as row:
        for change in BAD_CONFIGS:
            with row(change):
                with pytest.raises(InvalidArgumentError) as caught:
                    BlocksConfig(**{"num_blocks": 8, **change})
                assert caught.value.field == next(iter(change))


def test_arrays_of_other_dtypes_and_layouts_are_taken(pool: tuple[BlockManager, SessionNamespace]) -> None:
    manager, space = pool
    ids = np.array([[2, 9], [1, 9]], np.uint16)[:, 0]
    step = manager.append(space, ids, np.arange(4, dtype=np.int64)[::2], expected_lengths=(6, 6))
    assert step.sequence_ids.tolist() == [2, 1]
    manager.check_integrity()


def test_a_step_keeps_its_ids_when_the_callers_buffer_changes(pool: tuple[BlockManager, SessionNamespace]) -> None:
    manager, space = pool
    ids = np.array([1, 2])
    step = manager.append(space, ids, [1, 1])
    ids[:] = [2, 1]
    assert step.sequence_ids.tolist() == [1, 2]
    assert manager.append(space, ids, [1, 1]).sequence_ids.tolist() == [2, 1]


def test_extra_keys_at_the_limits_are_accepted() -> None:
    found = extra_keys_by_block([(0, b"x" * 256)] * 1024, "keys", 4, 1)
    assert found.keys() == {0}
    assert found[0].count(b"x") == 256 * 1024


def test_extra_keys_of_a_block_follow_each_other_by_position_and_key() -> None:
    keys = [(5, b"c"), (4, b"b"), (0, b"x"), (4, b"aa")]
    encoded = [
        offset.to_bytes(4, "little") + len(key).to_bytes(4, "little") + key
        for offset, key in ((0, b"aa"), (0, b"b"), (1, b"c"))
    ]
    found = extra_keys_by_block(keys, "keys", 4, 100)
    assert found == {0: bytes(4) + b"\1\0\0\0x", 1: b"".join(encoded)}
    assert all(type(value) is bytes for value in found.values())
