"""Leases that a client takes in the mapped memory, without the daemon, beside puts that evict."""

from __future__ import annotations

import random
import threading

import numpy as np
from store_daemons import OpenStore, keys_of, new_namespace, store_daemon
from waiting import until

from kvservice.client import KVClient, Store

__all__ = ["store_daemon"]

BLOCK_BYTES = 48 << 10
# More keys than the store has room for.
NUM_KEYS, BATCH = 900, 6


def put(store: Store, first: int) -> None:
    """Store blocks that are full of their numbers."""
    numbers = np.arange(first, first + BATCH)
    values = np.repeat(numbers.astype(np.uint16)[:, None], BLOCK_BYTES // 2, axis=1).view(np.uint8)
    store.put(keys_of(*numbers.tolist()), values)


def test_what_is_leased_stays_while_others_evict(store_daemon: OpenStore) -> None:
    with KVClient(store_daemon("write").address) as client:
        namespace = new_namespace(BLOCK_BYTES)
        writer, reader = (client.store(namespace, timeout_s=30.0) for _ in range(2))
        put(writer, 0)
        until(lambda: writer.memory is not None and reader.memory is not None)
        memory = reader.memory
        assert memory is not None
        assert memory.tells_all
        newest, ended = [0], threading.Event()

        def write() -> None:
            while not ended.is_set():
                first = (newest[0] + BATCH) % NUM_KEYS // BATCH * BATCH
                put(writer, first)
                newest[0] = first

        thread = threading.Thread(target=write)
        thread.start()
        try:
            draw, num_leased, wraps = random.Random(0), 0, 0
            while num_leased < 4000 or wraps < 3:
                before = newest[0]
                # The oldest ones are about to be evicted.
                chosen = [(before - draw.randrange(NUM_KEYS)) % NUM_KEYS for _ in range(8)]
                lease = memory.lease(b"".join(keys_of(*chosen)))
                assert lease is not None
                found = np.flatnonzero(lease.found)
                blocks = np.empty((len(found), BLOCK_BYTES), np.uint8)
                assert memory.read(lease.offsets, lease.versions, blocks).all()
                expected = np.array(chosen, np.uint16)[found]
                assert (blocks.view(np.uint16) == expected[:, None]).all()
                assert lease.renew()
                lease.release()
                num_leased += len(found)
                wraps += newest[0] < before
        finally:
            ended.set()
            thread.join()
        assert (
            writer.lookup(keys_of(*range(NUM_KEYS))).found == memory.find(b"".join(keys_of(*range(NUM_KEYS))))
        ).all()
        writer.close()
        reader.close()


def test_a_memory_that_is_mapped_for_reading_is_seen_and_gives_no_leases(store_daemon: OpenStore) -> None:
    with (
        KVClient(store_daemon("read").address) as client,
        client.store(new_namespace(BLOCK_BYTES), timeout_s=30.0) as store,
    ):
        put(store, 0)
        until(lambda: store.memory is not None)
        memory = store.memory
        assert memory is not None
        found = memory.find(b"".join(keys_of(*range(4, 8))))
        assert found is not None
        assert found.tolist() == [True, True, False, False]
        assert memory.lease(b"".join(keys_of(0))) is None
