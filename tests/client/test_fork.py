"""A process that is forked from a client's: calls raise there, and nothing that it does ends the client."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from store_daemons import OpenStore, blocks_of, keys_of, new_namespace

from kvservice.client import AsyncKVClient, KVClient
from kvservice.errors import FailedPreconditionError

# Only a failing child lives so long.
CHILD_S = 60


def in_child(work: Callable[[], Any]) -> bool:
    """Run `work` in a forked process. Returns whether it raised nothing."""
    pid = os.fork()
    if pid == 0:
        status = 1
        # What other tests have left of gRPC, if it were collected here, would wait for threads that a fork has not.
        gc.freeze()
        signal.alarm(CHILD_S)
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def refused(*calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(FailedPreconditionError, match="forked"):
            call()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_process(store_daemon: OpenStore) -> None:
    address = store_daemon("write").address
    with (
        KVClient(address) as client,
        client.store(new_namespace()) as store,
        client.session() as kv,
    ):
        sequence = kv.allocate([1, 2, 3])
        store.put(keys_of(1), blocks_of(1))
        lease, reservation = store.acquire(keys_of(1)), store.reserve(keys_of(2))
        assert in_child(
            lambda: refused(
                lambda: store.lookup(keys_of(1)),
                lambda: store.put(keys_of(1), blocks_of(1)),
                lambda: lease.renew(),
                lambda: reservation.commit(),
                lambda: kv.describe(),
                lambda: kv.free([sequence]),
                lambda: client.ping(),
                lambda: client.session(),
                lambda: client.store(new_namespace()),
            )
        )
        assert in_child(lambda: refused(lambda: KVClient(address), lambda: AsyncKVClient(address)))
        assert in_child(lambda: [one.close() for one in (store, kv, client)])
        assert in_child(lambda: lease.views)
        assert client.ping(b"x") == b"x"
        assert store.lookup(keys_of(1)).num_leading == 1
        assert lease.renew()
        assert reservation.commit() == 1
        assert [one.sequence_id for one in kv.describe()] == [sequence.sequence_id]
