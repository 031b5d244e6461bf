"""Wrong arguments of the store's index are refused by name and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from each_row import each_row
from store_rig import Store, keys_of, pack

from kvservice import _ext
from kvservice.errors import InvalidArgumentError

SLAB_BYTES = 16384
KEYS = keys_of("ab")


CONSTRUCTIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("address", (0, SLAB_BYTES, SLAB_BYTES, 1, 4096)),
    ("address", (4096 + 32, SLAB_BYTES, SLAB_BYTES, 1, 4096)),
    ("num_bytes", (4096, SLAB_BYTES - 1, SLAB_BYTES, 1, 4096)),
    ("num_bytes", (4096, -1, SLAB_BYTES, 1, 4096)),
    ("num_bytes", (4096, 1 << 62, SLAB_BYTES, 1, 4096)),
    ("slab_bytes", (4096, SLAB_BYTES, 4096, 1, 4096)),
    ("slab_bytes", (4096, SLAB_BYTES, 10_000, 1, 4096)),
    ("slab_bytes", (4096, SLAB_BYTES, None, 1, 4096)),
    ("kept", (4096, SLAB_BYTES, SLAB_BYTES, 1, 0)),
    ("kept", (4096, SLAB_BYTES, SLAB_BYTES, 1, 4096 + 64)),
]


def test_of_the_constructor() -> None:
    with each_row() as row:
        for field, arguments in CONSTRUCTIONS:
            with row((field, arguments)):
                with pytest.raises(InvalidArgumentError) as caught:
                    _ext.StoreIndex(*arguments)
                assert caught.value.field == field


CALLS: list[tuple[str, Callable[[_ext.StoreIndex], object]]] = [
    ("block_bytes", lambda index: index.open(0, 1)),
    ("block_bytes", lambda index: index.open(SLAB_BYTES - 4095, 1)),
    ("block_bytes", lambda index: index.open(1 << 64, 1)),
    ("quota_bytes", lambda index: index.open(64, -1)),
    ("namespace", lambda index: index.lookup(2, KEYS)),
    ("namespace", lambda index: index.reserve(0, KEYS)),
    ("namespace", lambda index: index.acquire(-1, KEYS, False)),
    ("namespace", lambda index: index.acquire(1 << 32, KEYS, False)),
    ("namespace", lambda index: index.close(7)),
    ("namespace", lambda index: index.geometry(7)),
    ("namespace", lambda index: index.stats(7)),
    ("namespace", lambda index: index.clear(7, 1)),
    ("keys", lambda index: index.lookup(1, KEYS[:-1])),
    ("keys", lambda index: index.needed(1, KEYS[:-1])),
    ("keys", lambda index: index.acquire(1, KEYS + b"x", True)),
    ("keys", lambda index: index.reserve(1, KEYS[:33])),
    ("keys", lambda index: index.touch(1, KEYS[:1])),
    ("keys", lambda index: index.remove(1, KEYS[:63])),
    ("slots", lambda index: index.release(b"1234567")),
    ("slots", lambda index: index.abort(b"x")),
    ("slots", lambda index: index.checksums(b"x")),
    ("checksums", lambda index: index.commit(pack([0, 1]), pack([0]))),
]


def test_of_calls() -> None:
    with each_row() as row:
        for number, (field, call) in enumerate(CALLS):
            with row((number, field)):
                store = Store(2, SLAB_BYTES)
                assert store.index.open(64, 1 << 20) == 1
                store.put(1, "a")
                with pytest.raises(InvalidArgumentError) as caught:
                    call(store.index)
                assert caught.value.field == field
                assert store.found(1, "ab") == [True, False]
                assert store.index.totals().used_bytes == 64
                store.check()


def test_a_refused_open_leaves_no_namespace() -> None:
    store = Store(2, SLAB_BYTES)
    with pytest.raises(InvalidArgumentError):
        store.index.open(SLAB_BYTES, 1)
    assert store.index.open(64, 1) == 1
