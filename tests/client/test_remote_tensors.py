"""Parts of K/V that are copied while others travel: the order of copies and calls, and what is left after errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from waiting import PATIENCE_S, until

from kvservice import _ext
from kvservice.client.threads import ThreadWaiting, finish
from kvservice.client.transports import transfer
from kvservice.client.transports.inline import Places
from kvservice.client.transports.transfer import KVPart
from kvservice.errors import LayerWrittenError, TransferFailedError
from kvservice.v1 import attention_pb2, tensor_pb2

SHAPE = (2, 8, 2, 16)
TENSOR_BYTES = 4 * 2 * 8 * 2 * 16
PART_BYTES = 2 * TENSOR_BYTES
HALF = 2 * PART_BYTES

Way = Callable[[Any, list[KVPart]], Awaitable[None]]


class FakeRemote:
    """The remote regions of a session with a daemon that the test plays. `memory` is the staging region; it is `None`
    when it was given up."""

    def __init__(self, run: Callable[..., Awaitable[Any]], lock: Any) -> None:
        self.run, self.lock = run, lock
        self.memory: np.ndarray | None = np.zeros(2 * HALF, np.uint8)
        self.failures: list[Exception] = []
        # The numbers of the threads that copied when the region was given up.
        self.copying: list[int] = []

    def staging(self) -> Any:
        if self.memory is None:
            return None
        return SimpleNamespace(name="r", address=self.memory.ctypes.data, num_bytes=self.memory.nbytes)

    def is_worth_it(self, num_bytes: int) -> bool:
        return num_bytes >= PART_BYTES

    def part_bytes(self, _: object) -> int:
        return 1 << 20

    def fail(self, error: Exception) -> None:
        self.failures.append(error)
        self.drop(None)

    def drop(self, _: None) -> None:
        self.copying.append(num_copying())
        self.memory = None


class Rig:
    """Runs `transfer.write` or `read` with one API."""

    def __init__(self, face: str) -> None:
        self.face = face
        if face == "blocking":
            self.remote = FakeRemote(ThreadWaiting().run, ThreadWaiting.lock())
        else:
            self.remote = FakeRemote(asyncio.to_thread, asyncio.Lock())
        self.context: Any = SimpleNamespace(remote=self.remote, info=None)

    def run(self, way: Way, parts: list[KVPart]) -> None:
        if self.face == "blocking":
            finish(way(self.context, parts))  # type: ignore[arg-type]
        else:
            asyncio.run(way(self.context, parts))  # type: ignore[arg-type]

    def bytes_at(self, place: tensor_pb2.SharedMemoryPlace) -> np.ndarray:
        assert self.remote.memory is not None
        return self.remote.memory[place.offset : place.offset + place.byte_size]


@pytest.fixture(params=["blocking", "asyncio"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not num_copying()


def num_copying() -> int:
    return sum(thread.name.startswith("kvservice-copies") for thread in threading.enumerate())


def contents(seed: int) -> tuple[np.ndarray, np.ndarray]:
    key, value = np.random.default_rng(seed).standard_normal((2, *SHAPE), np.float32)
    return key, value


def answer(rig: Rig, places: Places, seed: int) -> attention_pb2.ReadResponse:
    """Put K and V where the client wants them."""
    response = attention_pb2.ReadResponse()
    for tensor, place, array in zip((response.key, response.value), places, contents(seed), strict=True):
        rig.bytes_at(place)[:] = array.reshape(-1).view(np.uint8)
        checksum = int.from_bytes(_ext.store_checksums(array.ctypes.data, bytes(8), array.nbytes, 1), "little")
        tensor.shared_memory.CopyFrom(place)
        tensor.shared_memory.checksum = checksum
    return response


def writing(on_call: Callable[[int, Places | None], None], count: int = 4) -> list[KVPart]:
    """Return parts that are written; `on_call` gets the number of each and its places."""

    def part(number: int) -> KVPart:
        async def send(places: Places | None) -> None:
            on_call(number, places)

        return KVPart(*contents(number), send)

    return [part(number) for number in range(count)]


def reading(rig: Rig, on_call: Callable[[int, Places | None], None], count: int = 4) -> list[KVPart]:
    """Return parts that are read; `on_call` gets the number of each and its places when these were written."""

    def part(number: int) -> KVPart:
        key, value = np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32)

        async def send(places: Places | None) -> Any:
            if places is None:
                key[:], value[:] = contents(number)
                return on_call(number, places)
            response = answer(rig, places, number)
            on_call(number, places)
            return response

        return KVPart(key, value, send)

    return [part(number) for number in range(count)]


def check(parts: list[KVPart]) -> None:
    for number, part in enumerate(parts):
        for found, expected in zip((part.key, part.value), contents(number), strict=True):
            np.testing.assert_array_equal(found, expected)


def is_in(rig: Rig, half: int, seed: int) -> bool:
    """Return whether half of the region begins with K and V of a seed."""
    expected = np.stack(contents(seed)).reshape(-1).view(np.uint8)
    assert rig.remote.memory is not None
    return bool((rig.remote.memory[half * HALF :][:PART_BYTES] == expected).all())


def test_the_next_part_is_copied_while_one_is_written(rig: Rig) -> None:
    called = []

    def on_call(number: int, places: Places | None) -> None:
        assert places is not None
        called.append(number)
        until(lambda: number == 3 or is_in(rig, (number + 1) % 2, number + 1))
        assert is_in(rig, number % 2, number), "the part under way stays"
        for place, array in zip(places, contents(number), strict=True):
            assert rig.bytes_at(place).tobytes() == array.tobytes()
            sums = _ext.store_checksums(array.ctypes.data, bytes(8), array.nbytes, 1)
            assert place.checksum == int.from_bytes(sums, "little")

    rig.run(transfer.write, writing(on_call))
    assert called == [0, 1, 2, 3]
    assert not rig.remote.failures


def test_a_part_is_copied_while_the_next_one_is_read(rig: Rig) -> None:
    def on_call(number: int, places: Places | None) -> None:
        assert places is not None
        before = parts[max(number - 1, 0)]
        until(lambda: number == 0 or (before.value == contents(number - 1)[1]).all())

    parts = reading(rig, on_call)
    rig.run(transfer.read, parts)
    check(parts)
    assert not rig.remote.failures


def test_parts_that_cannot_travel_take_messages_in_order(rig: Rig) -> None:
    called = []
    parts = writing(lambda number, places: called.append((number, places is not None)))
    small = KVPart(parts[1].key[:1], parts[1].value[:1], parts[1].send)
    other = KVPart(parts[2].key, parts[2].value[:1], parts[2].send)
    rig.run(transfer.write, [parts[0], small, other, parts[3]])
    assert called == [(0, True), (1, False), (2, False), (3, True)]


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_what_follows_a_failure_takes_messages(face: str) -> None:
    """The region is given up once, when nobody copies."""
    with each_row() as row:
        for way in ("write", "read"):
            for nth in range(4):
                with row(f"{way} {nth}"):
                    check_failure(Rig(face), way, nth)


def check_failure(rig: Rig, way: str, nth: int) -> None:
    called = []

    def on_call(number: int, places: Places | None) -> None:
        called.append((number, places is not None))
        if places is not None and number == nth:
            raise TransferFailedError("the engine has ended")

    if way == "write":
        rig.run(transfer.write, writing(on_call))
        first = nth
    else:
        parts = reading(rig, on_call)
        rig.run(transfer.read, parts)
        check(parts)
        first = max(nth - 1, 0)  # nobody has looked whether this one has arrived
    assert called == [(n, True) for n in range(nth + 1)] + [(n, False) for n in range(first, 4)]
    assert len(rig.remote.failures) == 1
    assert rig.remote.copying == [0], "nobody copies when the region is given up"


def test_a_part_that_arrives_damaged_is_read_again(rig: Rig) -> None:
    """It shows while the part after it travels."""
    called = []

    def on_call(number: int, places: Places | None) -> None:
        called.append((number, places is not None))
        if places is not None and number == 1:
            rig.bytes_at(places[1])[-1] ^= 1

    parts = reading(rig, on_call)
    rig.run(transfer.read, parts)
    check(parts)
    assert called == [(0, True), (1, True), (2, True), (1, False), (2, False), (3, False)]
    assert len(rig.remote.failures) == 1


def test_a_refused_call_keeps_the_region_and_ends_the_write(rig: Rig) -> None:
    called = []

    def on_call(number: int, _: Places | None) -> None:
        called.append(number)
        if number == 1:
            raise LayerWrittenError("it was written")

    with pytest.raises(LayerWrittenError):
        rig.run(transfer.write, writing(on_call))
    assert called == [0, 1]
    assert rig.remote.memory is not None
    assert not rig.remote.failures


@pytest.mark.parametrize("way", ["write", "read"])
def test_nobody_copies_after_an_interrupted_call(rig: Rig, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The interrupt comes while a thread copies another part, which ends first."""
    copying, name = threading.Event(), "store_copy_in" if way == "write" else "store_copy_out"
    interrupted = threading.Event()
    copy = getattr(_ext, name)
    ended: list[int] = []

    def slowly(*arguments: Any) -> Any:
        if way == "read" or ended:  # the first part of a write is copied before its call
            copying.set()
            assert interrupted.wait(PATIENCE_S)
        result = copy(*arguments)
        ended.append(num_copying())
        return result

    def on_call(number: int, _: Places | None) -> None:
        if number == (0 if way == "write" else 1):
            assert copying.wait(PATIENCE_S)
            interrupted.set()
            raise KeyboardInterrupt if rig.face == "blocking" else asyncio.CancelledError

    monkeypatch.setattr(transfer, "_ext", SimpleNamespace(**{name: slowly}))
    parts = writing(on_call) if way == "write" else reading(rig, on_call)
    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        rig.run(getattr(transfer, way), parts)
    assert len(ended) == (2 if way == "write" else 1), "the copy under way has ended, and no other began"
    assert rig.remote.copying == [0]
    assert rig.remote.memory is None
