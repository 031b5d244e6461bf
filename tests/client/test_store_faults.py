"""Faults under the block store's client: leases that end early, damaged blocks, and a daemon that is away or restarts.
Whatever happens, a block that counts as found has the right bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both_faces import Awaitable as Awaited
from both_faces import Face
from client_calls import Send, around_calls
from cutting_proxy import CuttingProxy
from each_row import each_row
from store_daemons import (
    BLOCK_BYTES,
    SMALL_STORE,
    OpenStore,
    blocks_of,
    keys_of,
    new_namespace,
    store_of,
)
from waiting import until

from kvservice.client import AsyncKVClient, KVClient, PutStatus, Store, StoreNamespace
from kvservice.errors import ConnectionLostError, DaemonAwayError
from kvservice.launch import Daemon
from kvservice.v1 import store_pb2

DONE, PRESENT, UNREACHABLE = PutStatus.DONE, PutStatus.PRESENT, PutStatus.UNREACHABLE
FACES: list[Face] = ["blocking", "asyncio"]
# For tests that kill a daemon of their own.
ONE_OF_BOTH = pytest.mark.parametrize("face", ["blocking", pytest.param("asyncio", marks=pytest.mark.slow)])


def new_out(count: int) -> np.ndarray:
    return np.zeros((count, BLOCK_BYTES), np.uint8)


# ---- leases that end while a copy runs


@pytest.mark.parametrize("face", FACES)
def test_a_block_whose_lease_ends_during_the_copy_is_missing(store_daemon: OpenStore, face: Face) -> None:
    """The lease is released behind the reader's back, then the memory of two of four blocks gets other bytes."""
    address = store_daemon("read").address

    async def scenario(other: Store, namespace: StoreNamespace, verify: bool) -> None:
        armed = [False]

        async def released(name: str, request: Any, send: Send) -> Any:  # noqa: ARG001
            response = await send()
            if name == "store_acquire" and armed[0]:
                armed[0] = False
                await send(store_pb2.ReleaseRequest(lease_ids=[response.lease_id]), name="store_release")
                assert other.remove(keys_of(2, 4)) == 2
                assert other.put(keys_of(12, 14), blocks_of(12, 14)).tolist() == [DONE, DONE]
            return response

        with around_calls(released):
            async with store_of(face, address, namespace) as store:
                await store.put(keys_of(1, 2, 3, 4), blocks_of(1, 2, 3, 4))
                out = new_out(4)
                armed[0] = True
                found = await store.get(keys_of(1, 2, 3, 4), out, verify=verify)
                assert not armed[0]
                assert found.tolist() == [True, False, True, False]
                np.testing.assert_array_equal(out[found], blocks_of(1, 3))
                assert (await store.get(keys_of(1, 12, 3, 14), out, verify=verify)).all()
                np.testing.assert_array_equal(out, blocks_of(1, 12, 3, 14))

    with each_row() as row:
        for verify in (False, True):
            namespace = new_namespace()
            with row(verify), KVClient(address) as client, client.store(namespace) as other:
                asyncio.run(scenario(other, namespace, verify))


def test_a_damaged_block_is_found_out_and_removed(store_daemon: OpenStore) -> None:
    """It fails if a get with `verify` finds the block, or if the block cannot be stored again."""
    with each_row() as row:
        for transport in ("mapped", "region", "inline"):
            with row(transport):
                check_a_damaged_block(store_daemon, transport)


def check_a_damaged_block(store_daemon: OpenStore, transport: str) -> None:
    namespace = new_namespace()
    with KVClient(store_daemon("write").address) as client, client.store(namespace, transport=transport) as store:
        store.put(keys_of(1, 2, 3), blocks_of(1, 2, 3))
        with client.store(namespace) as writer, writer.acquire(keys_of(2)) as lease:
            (view,) = lease.views
            assert view is not None
            ctypes.c_uint8.from_address(view.ctypes.data + 17).value ^= 1
        out = new_out(3)
        assert store.get(keys_of(1, 2, 3), out).all()
        assert store.get(keys_of(1, 2, 3), out, verify=True).tolist() == [True, False, True]
        np.testing.assert_array_equal(out[[0, 2]], blocks_of(1, 3))
        assert store.lookup(keys_of(1, 2, 3)).found.tolist() == [True, False, True]
        assert store.put(keys_of(2), blocks_of(2)).tolist() == [DONE]
        assert store.get(keys_of(1, 2, 3), out, verify=True).all()


# ---- a daemon that is away


class Restarting:
    """A daemon that is killed and started again at the same address."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._socket = directory / "daemon.sock"
        self._options = SMALL_STORE | {"share_store": "write"} | options
        self.start()
        self.address = self.daemon.address

    def start(self) -> None:
        """Start a daemon. The first one starts with the object."""
        self.daemon = Daemon(unix_socket=self._socket, **self._options)
        self.daemon.__enter__()

    def kill(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait()

    def stop(self) -> None:
        self.daemon.process.send_signal(signal.SIGCONT)
        self.daemon.__exit__()


@pytest.fixture
def restarting(tmp_path: Path) -> Iterator[Restarting]:
    daemon = Restarting(tmp_path)
    try:
        yield daemon
    finally:
        daemon.stop()


async def every_method_misses(store: Any) -> None:
    """No method raises while the daemon is away, and each says that nothing is there."""
    keys = keys_of(1, 2)
    assert not (await store.lookup(keys)).found.any()
    assert not (await store.get(keys, new_out(2))).any()
    assert (await store.put(keys, blocks_of(1, 2))).tolist() == [UNREACHABLE] * 2
    lease = await store.acquire(keys)
    assert not lease.found.any()
    assert lease.views == [None, None]
    await lease.release()
    reservation = await store.reserve(keys)
    assert reservation.statuses.tolist() == [UNREACHABLE] * 2
    assert await reservation.commit() == 0
    await reservation.abort()
    assert await store.touch(keys) == await store.remove(keys) == await store.clear() == 0
    assert store.transport == ""
    with pytest.raises(DaemonAwayError):
        await store.create_region(4096)


async def reached(store: Any) -> None:
    """Wait until the store is reachable again, then put and get."""
    while not store.reachable:
        await asyncio.sleep(0.01)
    numbers = range(20, 40)
    assert (await store.put(keys_of(*numbers), blocks_of(*numbers)) == DONE).all()
    out = new_out(20)
    assert (await store.get(keys_of(*numbers), out)).all()
    np.testing.assert_array_equal(out, blocks_of(*numbers))
    await store.clear()


@contextlib.asynccontextmanager
async def client_of(face: Face, address: str) -> Any:
    """Yield a function that opens stores whose methods are awaited."""
    if face == "blocking":
        with KVClient(address) as client:

            @contextlib.asynccontextmanager
            async def opened(*args: Any, **options: Any) -> Any:
                with client.store(*args, **options) as store:
                    yield Awaited(store)

            yield opened
    else:
        async with AsyncKVClient(address) as waiting:
            yield waiting.store


@ONE_OF_BOTH
def test_a_store_outlives_the_daemon(restarting: Restarting, face: Face) -> None:
    """It is killed twice: under open stores, and before others are opened. One of the first holds a lease."""

    async def scenario() -> None:
        async with client_of(face, restarting.address) as open_store, contextlib.AsyncExitStack() as stack:

            async def opened(transport: str) -> Any:
                return await stack.enter_async_context(open_store(new_namespace(), transport=transport))

            stores = [await opened(transport) for transport in ("mapped", "region", "inline")]
            for store in stores:
                await reached(store)
                await store.put(keys_of(1, 2), blocks_of(1, 2))
            lease = await stores[0].acquire(keys_of(1, 2))
            reservation = await stores[0].reserve(keys_of(3))
            restarting.kill()
            for store in stores:
                await every_method_misses(store)
                assert not store.reachable
            # Leased blocks are still readable, and unchanged: the daemon is gone, its memory is not.
            np.testing.assert_array_equal(np.array(lease.views), blocks_of(1, 2))
            stores += [await opened(transport) for transport in ("mapped", "auto")]
            for store in stores[3:]:
                await every_method_misses(store)
            restarting.start()
            for store in stores:
                await reached(store)
            assert not await lease.renew()
            assert await reservation.commit() == 0
            await lease.release()
            assert [store.transport for store in stores] == ["mapped", "region", "inline", "mapped", "mapped"]

    asyncio.run(scenario())


@ONE_OF_BOTH
def test_an_engine_may_start_before_the_daemon(restarting: Restarting, face: Face) -> None:
    """Until the daemon is there, nothing is found. Then put and get work."""
    restarting.kill()

    async def scenario() -> None:
        async with store_of(face, restarting.address, new_namespace(), connect_timeout_s=None) as store:
            await every_method_misses(store)
            restarting.start()
            await reached(store)

    asyncio.run(scenario())


@ONE_OF_BOTH
def test_a_client_that_has_not_waited_asks_for_the_shape_later(restarting: Restarting, face: Face) -> None:
    async def scenario() -> None:
        if face == "blocking":
            with KVClient(restarting.address, connect_timeout_s=None) as client, client.session() as session:
                assert session.info == client.info
        else:
            async with AsyncKVClient(restarting.address, connect_timeout_s=None) as waiting:
                with pytest.raises(ConnectionLostError):
                    _ = waiting.info
                async with waiting.session() as session:
                    assert session.info == waiting.info

    asyncio.run(scenario())


def test_unreachable_can_raise(restarting: Restarting) -> None:
    with KVClient(restarting.address) as client:
        store = client.store(new_namespace(), unreachable="raise")
        restarting.kill()
        for _ in range(2):
            with pytest.raises(ConnectionLostError):
                store.lookup(keys_of(1))
        with pytest.raises(DaemonAwayError):
            store.lookup(keys_of(1))
        with pytest.raises(ConnectionLostError):
            client.store(new_namespace(), unreachable="raise")
        store.close()


@ONE_OF_BOTH
def test_a_daemon_that_does_not_answer_is_away(restarting: Restarting, face: Face) -> None:
    async def scenario() -> None:
        async with store_of(face, restarting.address, new_namespace(), timeout_s=0.5) as store:
            await reached(store)
            restarting.daemon.process.send_signal(signal.SIGSTOP)
            assert not (await store.lookup(keys_of(1))).found.any()
            await every_method_misses(store)
            restarting.daemon.process.send_signal(signal.SIGCONT)
            await reached(store)

    asyncio.run(scenario())


@ONE_OF_BOTH
def test_a_put_that_was_given_up_stores_no_later_bytes(restarting: Restarting, face: Face) -> None:
    """The daemon is stopped, the put of values in a region reaches its limit, and the caller uses the memory for
    something else. What the daemon does when it goes on is up to it, but other bytes must not be stored."""

    async def scenario() -> None:
        async with store_of(face, restarting.address, new_namespace(), timeout_s=0.5) as store:
            region = await store.create_region(4 * BLOCK_BYTES)
            values = region.array((4, BLOCK_BYTES), "uint8")
            values[...] = blocks_of(1, 2, 3, 4)
            restarting.daemon.process.send_signal(signal.SIGSTOP)
            assert (await store.put(keys_of(1, 2, 3, 4), values)).tolist() == [UNREACHABLE] * 4
            np.testing.assert_array_equal(values, blocks_of(1, 2, 3, 4))
            values[...] = blocks_of(5, 6, 7, 8)
            restarting.daemon.process.send_signal(signal.SIGCONT)
            while not store.reachable:
                await asyncio.sleep(0.01)
            out = new_out(4)
            found = await store.get(keys_of(1, 2, 3, 4), out)
            np.testing.assert_array_equal(out[found], blocks_of(1, 2, 3, 4)[found])
            np.testing.assert_array_equal(values, blocks_of(5, 6, 7, 8))
            assert (await store.put(keys_of(5, 6, 7, 8), values)).tolist() == [DONE] * 4
            assert (await store.get(keys_of(5, 6, 7, 8), out)).all()
            np.testing.assert_array_equal(out, blocks_of(5, 6, 7, 8))

    asyncio.run(scenario())


@ONE_OF_BOTH
def test_a_broken_connection_ends_what_the_session_held(restarting: Restarting, tmp_path: Path, face: Face) -> None:
    async def scenario(proxy: CuttingProxy) -> None:
        async with store_of(face, proxy.address, new_namespace()) as store:
            await store.put(keys_of(1, 2), blocks_of(1, 2))
            lease = await store.acquire(keys_of(1, 2))
            reservation = await store.reserve(keys_of(3))
            lost = store.memory
            proxy.cut()
            while store.memory is None or store.memory is lost or not store.reachable:
                await asyncio.sleep(0.01)
            assert not await lease.renew()
            assert await reservation.commit() == 0
            np.testing.assert_array_equal(np.array(lease.views), blocks_of(1, 2))
            # This process may still write into the room of the lost reservation; the block goes elsewhere.
            statuses = await store.put(keys_of(1, 2, 3), blocks_of(1, 2, 3))
            assert statuses.tolist() == [PRESENT, PRESENT, DONE]

    with CuttingProxy(tmp_path, restarting.address, handover=True) as proxy:
        asyncio.run(scenario(proxy))


def test_closing_the_client_closes_its_stores(store_daemon: OpenStore) -> None:
    namespace = new_namespace()
    with KVClient(store_daemon("write").address) as other, other.store(namespace) as observer:
        with KVClient(store_daemon("write").address) as client:
            store = client.store(namespace)
            assert store.reserve(keys_of(1)).statuses.tolist() == [DONE]
            assert observer.put(keys_of(1), blocks_of(1)).tolist() == [PutStatus.BEING_WRITTEN]
        assert not store.reachable
        with pytest.raises(ConnectionLostError, match="the store is closed"):
            store.lookup(keys_of(1))
        assert observer.put(keys_of(1), blocks_of(1)).tolist() == [DONE]
        store.close()


# ---- several threads, and a daemon killed under them


class Worker(threading.Thread):
    """Puts and gets blocks of its own keys at random until it is told to stop, and checks all bytes."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self.rounds = self.hits = 0
        self.stopping = False
        self._store, self._random = store, np.random.default_rng(seed)
        self._numbers = np.arange(24) + 100 * seed

    def run(self) -> None:
        try:
            while not self.stopping:
                self._round()
                self.rounds += 1
        except BaseException as error:
            self.failure = error

    def _round(self) -> None:
        numbers = self._random.permutation(self._numbers)[: self._random.integers(1, 25)].tolist()
        keys = keys_of(*numbers)
        match self._random.integers(4):
            case 0:
                statuses = self._store.put(keys, blocks_of(*numbers))
                assert set(statuses.tolist()) <= {DONE, PRESENT, UNREACHABLE, PutStatus.BEING_WRITTEN}
            case 1:
                with self._store.acquire(keys) as lease:
                    views = lease.views if self._store.transport == "mapped" else []
                    right = [
                        view is None or (view == blocks_of(number)[0]).all()
                        for number, view in zip(numbers, views, strict=False)
                    ]
                    assert all(right) or not lease.check()[~np.array(right)].any()
            case 2 if self._random.integers(4) == 0:
                self._store.remove(keys[:3])
            case _:
                out = new_out(len(numbers))
                found = self._store.get(keys, out, verify=bool(self._random.integers(2)))
                np.testing.assert_array_equal(out[found], blocks_of(*numbers)[found])
                self.hits += int(found.sum())


def advance(workers: list[Worker], counter: str) -> None:
    """Wait until this counter of each worker has grown by two, or a worker has failed."""
    wanted = [getattr(worker, counter) + 2 for worker in workers]

    def done() -> bool:
        counts = [getattr(worker, counter) for worker in workers]
        return all(count >= least for count, least in zip(counts, wanted, strict=True))

    until(lambda: done() or any(worker.failure for worker in workers))


def test_threads_get_right_bytes_while_the_daemon_is_killed(restarting: Restarting) -> None:
    with KVClient(restarting.address) as client, contextlib.ExitStack() as stack:
        transports = ("mapped", "mapped", "region", "inline")
        stores = [stack.enter_context(client.store(new_namespace(), transport=transport)) for transport in transports]
        stores[1] = stores[0]  # two threads share a store
        workers = [Worker(store, seed) for seed, store in enumerate(stores)]
        for worker in workers:
            worker.start()
        try:
            advance(workers, "hits")
            restarting.kill()
            advance(workers, "rounds")
            restarting.start()
            until(lambda: all(store.reachable for store in stores))
            advance(workers, "hits")
        finally:
            for worker in workers:
                worker.stopping = True
            for worker in workers:
                worker.join()
        assert [worker.failure for worker in workers] == [None] * len(workers)


# ---- random operations of several clients against a dict


class Model:
    """Blocks that are there, by key: the seed of their bytes. There is always room."""

    def __init__(self) -> None:
        self.there: dict[int, int] = {}
        self.reserved: set[int] = set()

    def put(self, numbers: list[int], seeds: list[int]) -> list[int]:
        statuses: list[int] = []
        for number, seed in zip(numbers, seeds, strict=True):
            status = self.status(number)
            if status == DONE:
                self.there[number] = seed
            statuses.append(status)
        return statuses

    def status(self, number: int) -> PutStatus:
        if number in self.there:
            return PRESENT
        return PutStatus.BEING_WRITTEN if number in self.reserved else DONE


class Machine:
    """Random operations of several stores on one namespace. Each result is compared with the model."""

    def __init__(self, stores: list[Store], writer: Store, seed: int) -> None:
        self._stores, self._writer = stores, writer
        self._random = np.random.default_rng(seed)
        self._model = Model()
        self._seeds = iter(range(1, 1 << 30))
        self._leases: list[tuple[Any, list[int | None]]] = []

    def _numbers(self) -> list[int]:
        return self._random.permutation(60)[: self._random.integers(0, 40)].tolist()

    def step(self) -> None:
        kinds: list[Callable[[Store, list[int]], None]] = [
            self.put, self.put, self.get, self.get, self.lookup, self.remove, self.reserve, self.acquire, self.release,
        ]  # fmt: skip
        store = self._stores[self._random.integers(len(self._stores))]
        kinds[self._random.integers(len(kinds))](store, self._numbers())
        if self._random.integers(60) == 0:
            assert store.clear() == len(self._model.there)
            self._model.there.clear()

    def put(self, store: Store, numbers: list[int]) -> None:
        seeds = [next(self._seeds) for _ in numbers]
        assert store.put(keys_of(*numbers), blocks_of(*seeds)).tolist() == self._model.put(numbers, seeds)

    def get(self, store: Store, numbers: list[int]) -> None:
        out = new_out(len(numbers))
        found = store.get(keys_of(*numbers), out, verify=bool(self._random.integers(2)))
        assert found.tolist() == [number in self._model.there for number in numbers]
        seeds = [self._model.there[number] for number in numbers if number in self._model.there]
        np.testing.assert_array_equal(out[found], blocks_of(*seeds))

    def lookup(self, store: Store, numbers: list[int]) -> None:
        there = [number in self._model.there for number in numbers]
        looked = store.lookup(keys_of(*numbers))
        assert looked.found.tolist() == there
        assert looked.num_leading == [*there, False].index(False)
        assert store.touch(keys_of(*numbers)) == sum(there)

    def remove(self, store: Store, numbers: list[int]) -> None:
        numbers = numbers[:8]
        there = [number for number in numbers if number in self._model.there]
        assert store.remove(keys_of(*numbers)) == len(there)
        for number in there:
            del self._model.there[number]

    def reserve(self, store: Store, numbers: list[int]) -> None:
        with self._writer.reserve(keys_of(*numbers)) as reservation:
            statuses = [self._model.status(number) for number in numbers]
            assert reservation.statuses.tolist() == statuses
            seeds = [next(self._seeds) for _ in numbers]
            self._model.reserved = {number for number, status in zip(numbers, statuses, strict=True) if status == DONE}
            self.put(store, numbers[:5])
            self.get(store, numbers)
            self._model.reserved.clear()
            for view, seed in zip(reservation.views, seeds, strict=True):
                if view is not None:
                    view[...] = blocks_of(seed)[0]
            if self._random.integers(3):
                written = self._random.integers(2, size=len(numbers)).astype(bool)
                chosen = [status == DONE and bool(one) for status, one in zip(statuses, written, strict=True)]
                assert reservation.commit(written) == sum(chosen)
                for number, seed, one in zip(numbers, seeds, chosen, strict=True):
                    if one:
                        self._model.there[number] = seed

    def acquire(self, _: Store, numbers: list[int]) -> None:
        lease = self._writer.acquire(keys_of(*numbers))
        seeds = [self._model.there.get(number) for number in numbers]
        assert lease.found.tolist() == [seed is not None for seed in seeds]
        self._leases.append((lease, seeds))

    def release(self, _: Store, __: list[int]) -> None:
        """Compare a leased batch with what it was when it was leased, and release it."""
        if self._leases:
            lease, seeds = self._leases.pop(int(self._random.integers(len(self._leases))))
            for view, seed in zip(lease.views, seeds, strict=True):
                if seed is not None:
                    np.testing.assert_array_equal(view, blocks_of(seed)[0])
            np.testing.assert_array_equal(lease.check(), lease.found)
            lease.release()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_several_clients_agree_with_a_dict(store_daemon: OpenStore, seed: int) -> None:
    """Each step compares results with the dict."""
    namespace: StoreNamespace = new_namespace()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(KVClient(store_daemon("write").address)) for _ in range(2)]
        stores = [
            stack.enter_context(clients[number % 2].store(namespace, transport=transport))
            for number, transport in enumerate(("mapped", "region", "inline"))
        ]
        machine = Machine(stores, stores[0], seed)
        for _ in range(150):
            machine.step()
