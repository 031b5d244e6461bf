"""What routers are told about the blocks of the store."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_daemons import OpenStore, keys_of, new_namespace, store_daemon
from vllm_connector import Engine, connector_config
from waiting import until

from kvservice.client import KVClient
from kvservice.client.store.memory import StoreChanges

__all__ = ["store_daemon"]


def test_blocks_of_all_engines_are_told_once(store_daemon: OpenStore) -> None:
    with KVClient(store_daemon("write").address) as client:
        namespace = new_namespace(64)
        store, other = (client.store(namespace, timeout_s=30.0) for _ in range(2))
        until(lambda: store.memory is not None)
        memory: list[Any] = [store.memory]
        events = StoreChanges(lambda: memory[0])
        seen: list[bytes] = []

        def has_come(*numbers: int) -> bool:
            gone, come = events.take()
            assert gone == []
            seen.extend(come)
            return sorted(seen) == keys_of(*numbers)

        other.put(keys_of(1, 2), np.zeros((2, 64), np.uint8))
        until(lambda: has_come(1, 2))
        other.put(keys_of(3), np.zeros((1, 64), np.uint8))
        until(lambda: has_come(1, 2, 3))
        other.remove(keys_of(1))
        until(lambda: events.take() == (keys_of(1), []))
        # If the store cannot be seen any more, nothing is there.
        memory[0] = None
        assert events.take() == (keys_of(2, 3), [])
        store.close()
        other.close()


def test_the_connector_tells_events_where_vllm_publishes_them(
    vllm_connector: Any, store_daemon: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = sys.modules[vllm_connector.__module__].versions
    monkeypatch.setattr(versions, "cache_events", lambda gone, come, block_size: [(gone, come, block_size)])
    rows: list[tuple[bool, list[Any]]] = [(True, [([], [], 4)]), (False, [])]
    for enabled, told in rows:
        config = connector_config(store_daemon("write").address)
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=enabled)
        engine = Engine(vllm_connector, None, config=config)
        assert list(engine.scheduler.take_events()) == told
        engine.close()
