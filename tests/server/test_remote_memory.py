"""The end of remote regions and of calls that use them, with an engine that does as it is told."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from daemon_lives import Life
from fake_engines import MIB, FakeEngines, create, life_with_engines
from manual_clock import ManualClock
from raw_store import identity, keys, scatter
from waiting import PATIENCE_S

from kvservice.errors import FailedPreconditionError, TransferFailedError
from kvservice.v1 import attention_pb2, store_pb2, tensor_pb2, transfer_pb2

pytestmark = pytest.mark.usefixtures("transfer_engine")

BLOCK_BYTES = 4096
# One block fits into each of the three slots.
BYTE_SIZE = 3 * BLOCK_BYTES


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    made = FakeEngines()
    made.install(monkeypatch)
    return made


def until_interrupted(engine: Any, _: float) -> None:
    assert engine.interrupted.wait(PATIENCE_S)
    raise TransferFailedError("the transfer engine has ended")


async def opened(life: Life, session: Any) -> int:
    """Open a namespace of the store. Returns its id."""
    request = store_pb2.OpenNamespaceRequest(namespace=identity(block_bytes=BLOCK_BYTES))
    answer = await life.call(session, "store_open_namespace", request)
    return int(answer.namespace_id)


async def put(life: Life, session: Any, namespace_id: int, *numbers: int) -> Any:
    """Store blocks out of the client's memory."""
    request = store_pb2.BatchPutRequest(
        namespace_id=namespace_id, keys=keys(*numbers), checksums=bytes(8 * len(numbers)),
        region=scatter("r", [BLOCK_BYTES * (n % 250) for n in range(len(numbers))]),
    )  # fmt: skip
    return await life.call(session, "store_batch_put", request)


@pytest.mark.parametrize("how", ["removed", "closed"])
def test_a_call_fails_at_once_when_its_region_is_given_up(clock: ManualClock, engines: FakeEngines, how: str) -> None:
    engines.wait = until_interrupted

    async def scenario() -> None:
        with life_with_engines(clock) as life:
            session = life.open()
            namespace_id = await opened(life, session)
            await create(life, session, byte_size=BYTE_SIZE)
            (engine,) = engines.made
            calls = [
                asyncio.create_task(put(life, session, namespace_id, *range(10 * n, 10 * n + 5))) for n in range(2)
            ]
            assert await asyncio.to_thread(engine.waiting.wait, PATIENCE_S)
            if how == "removed":
                remove = transfer_pb2.RemoveRemoteRegionRequest(name="r")
                await life.call(session, "remove_remote_region", remove)
            else:
                session.regions.close()
            assert engine.interrupted.is_set()
            assert life.sessions.transfers.count == 1, "the calls still use the memory"
            for failed in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(failed, TransferFailedError)
            assert life.sessions.transfers.count == 0

    asyncio.run(scenario())


def test_a_slow_peer_has_time_in_proportion_to_the_bytes(
    clock: ManualClock, engines: FakeEngines, caplog: pytest.LogCaptureFixture
) -> None:
    """Each wait ends just in time. A call may take 5 seconds, and one more for each 8 MiB; so may each of its waits
    but for that."""

    def slowly(_: Any, timeout_s: float) -> None:
        took_s = 4.5
        clock.now += min(took_s, max(timeout_s, 0.0))
        if took_s > timeout_s:
            raise TransferFailedError("no answer in time")

    async def scenario() -> None:
        with life_with_engines(clock) as life:
            session = life.open()
            namespace_id = await opened(life, session)
            await create(life, session, byte_size=BYTE_SIZE)
            begun = clock.now
            numbers = range(1000)
            engines.wait = slowly
            with pytest.raises(TransferFailedError):
                await put(life, session, namespace_id, *numbers)
            assert not engines.made[0].is_alive
            num_bytes = len(numbers) * BLOCK_BYTES
            assert clock.now - begun == pytest.approx(5.0 + num_bytes / (8 << 20))
            assert f"{num_bytes} bytes could not be transferred in: no answer in time" in caplog.text

    asyncio.run(scenario())


def test_each_call_has_time_of_its_own(clock: ManualClock, engines: FakeEngines) -> None:
    def slowly(_: Any, timeout_s: float) -> None:
        clock.now += 4.5
        assert timeout_s == pytest.approx(5.0)

    async def scenario() -> None:
        with life_with_engines(clock) as life:
            session = life.open()
            namespace_id = await opened(life, session)
            await create(life, session, byte_size=BYTE_SIZE)
            engines.wait = slowly
            for number in range(3):
                await put(life, session, namespace_id, number)
            session.regions.close()

    asyncio.run(scenario())


def test_tensors_are_used_while_others_travel(clock: ManualClock, engines: FakeEngines) -> None:
    """K and V of Write are compared with their checksums as they come, those of Read are summed while they travel."""

    async def scenario() -> None:
        with life_with_engines(clock) as life:
            session = life.open()
            await life.compute(session, 1, [1, 2, 3, 4])
            await create(life, session, byte_size=MIB)
            num_bytes = 2 * 4 * 2 * 32 * 4
            places = [tensor_pb2.SharedMemoryPlace(region="r", offset=at, byte_size=num_bytes) for at in (0, MIB // 2)]
            whole = attention_pb2.SequenceRange(sequence_id=1, start=0, stop=4)
            read = attention_pb2.ReadRequest(ranges=[whole], key_place=places[0], value_place=places[1])
            answer = await life.call(session, "read", read)
            assert answer.key.shared_memory.checksum != answer.value.shared_memory.checksum
            assert engines.events == ["start", "start", "wait", "wait"]
            engines.events.clear()
            life.manager.truncate(session.namespace, [1], [0])
            step = life.manager.append(session.namespace, [1], [1, 2, 3, 4], [4])
            placed = [
                tensor_pb2.Tensor(
                    data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=(2, 4, 2, 32),
                    shared_memory=tensor_pb2.SharedMemoryPlace(
                        region="r", offset=place.offset, byte_size=num_bytes, checksum=one.shared_memory.checksum
                    ),
                )
                for place, one in zip(places, (answer.key, answer.value), strict=True)
            ]  # fmt: skip
            write = attention_pb2.WriteRequest(step_id=step.step_id, key=placed[0], value=placed[1])
            await life.call(session, "write", write)
            assert engines.events == ["start", "start", "wait", "wait"]
            session.regions.close()

    asyncio.run(scenario())


def test_calls_that_wait_to_create_a_region_start_no_engine_after_the_end(
    clock: ManualClock, engines: FakeEngines
) -> None:
    gate, begun = threading.Event(), threading.Event()

    def begin() -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)

    engines.begin = begin

    async def scenario() -> None:
        with life_with_engines(clock) as life:
            session = life.open()
            creating = [asyncio.create_task(create(life, session)) for _ in range(4)]
            assert await asyncio.to_thread(begun.wait, PATIENCE_S)
            session.regions.close()
            gate.set()
            for failed in await asyncio.gather(*creating, return_exceptions=True):
                assert isinstance(failed, FailedPreconditionError)
            assert len(engines.made) == 1
            assert not engines.made[0].is_alive
            assert life.sessions.transfers.count == 0

    asyncio.run(scenario())


def test_nothing_is_transferred_for_a_writer_that_has_gone(clock: ManualClock, engines: FakeEngines) -> None:
    """It waits for another call, which uses the region."""
    engines.wait = until_interrupted

    async def scenario() -> None:
        with life_with_engines(clock) as life:
            session = life.open()
            namespace_id = await opened(life, session)
            await create(life, session, byte_size=BYTE_SIZE)
            (engine,) = engines.made
            putting = asyncio.create_task(put(life, session, namespace_id, 1))
            assert await asyncio.to_thread(engine.waiting.wait, PATIENCE_S)
            place = tensor_pb2.SharedMemoryPlace(region="r", byte_size=4, checksum=1)
            tensor = tensor_pb2.Tensor(shared_memory=place)
            request = attention_pb2.WriteRequest(key=tensor, value=tensor)
            writing = asyncio.create_task(life.call(session, "write", request))
            for _ in range(10):
                await asyncio.sleep(0)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            before = engine.num_started
            session.regions.close()
            with pytest.raises(TransferFailedError):
                await putting
            for _ in range(10):
                await asyncio.sleep(0)
            assert engine.num_started == before

    asyncio.run(scenario())
