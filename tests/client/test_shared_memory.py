"""Tensors in shared memory: the results match those of messages, and no memory is left behind."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from shm_objects import shm_objects

from kvservice.client import AsyncKVClient, HostRegion, KVClient, RegionInfo, Session, SharedRegion, Step
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.launch import Daemon

SHAPE = (5, 2, 32)
LAYERS = 2
# Other tests on the same daemon leave prompts of low token ids in its prefix cache.
fresh_ids = itertools.count(1 << 20)


@pytest.fixture
def kv(daemon: Daemon) -> Iterator[Session]:
    with KVClient(daemon.address, transport="inline") as client, client.session() as session:
        yield session
        session.reset_prefix_cache()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert shm_objects(os.getpid()) == set()


def normal(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def placed(memory: SharedRegion, values: np.ndarray, offset: int) -> np.ndarray:
    array = memory.array(values.shape, values.dtype, offset)
    array[:] = values
    return array


def new_step(kv: Session) -> Step:
    return kv.open_step([kv.allocate(new_tokens())])


def new_tokens() -> list[int]:
    """Return a prompt that is not in the prefix cache."""
    return [next(fresh_ids) for _ in range(SHAPE[0])]


class Spy:
    """Records the calls that a session sends."""

    def __init__(self, kv: Session) -> None:
        self.requests: list[Any] = []
        connection = kv._core.context.connection
        self._call_until = connection.call_until
        connection.call_until = self.call_until  # type: ignore[method-assign, assignment]

    async def call_until(self, deadline: float | None, name: str, request: Any, *_: object) -> Any:
        self.requests.append(request)
        return await self._call_until(deadline, name, request)


def test_a_layer_whose_tensors_do_not_travel(kv: Session) -> None:
    memory = kv.create_region(1 << 20)
    spy = Spy(kv)
    out, lse_out = memory.array(SHAPE, offset=500_000), memory.array(SHAPE[:2], offset=600_000)
    there, here = new_step(kv), new_step(kv)
    for layer in range(LAYERS):
        inputs = [normal(3 * layer + n) for n in range(3)]
        views = [placed(memory, values, 4 + 100_000 * n) for n, values in enumerate(inputs)]
        result = there.extend(layer, *views, out=out, lse_out=lse_out, return_lse=True, sliding_window=3)
        wanted, lse = here.extend(layer, *inputs, return_lse=True, sliding_window=3)
        assert result[0] is out
        assert result[1] is lse_out
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(lse_out, lse)
    sent = [request.ByteSize() for request in spy.requests if hasattr(request, "query")]
    assert max(sent[::2]) < 300 < SHAPE[0] * SHAPE[1] * SHAPE[2] * 4 < min(sent[1::2])
    key, value = kv.read(there.sequences[0], 0, 5)
    wanted_key, wanted_value = kv.read(here.sequences[0], 0, 5)
    np.testing.assert_array_equal(key, wanted_key)
    np.testing.assert_array_equal(value, wanted_value)


def test_write_takes_them_too(kv: Session) -> None:
    memory = kv.create_region(1 << 20)
    key, value = (placed(memory, normal(n, (LAYERS, *SHAPE)), n << 18) for n in range(2))
    step = new_step(kv)
    step.write(key, value)
    np.testing.assert_equal(kv.read(step.sequences[0], 0, 5), (key, value))


def test_some_in_a_region_and_some_not(kv: Session) -> None:
    memory = kv.create_region(1 << 20)
    query, key, value = normal(1), normal(2), normal(3)
    mixed = new_step(kv).extend(0, placed(memory, query, 0), key, placed(memory, value, 100_000))
    np.testing.assert_array_equal(mixed, new_step(kv).extend(0, query, key, value))
    out = memory.array(SHAPE, offset=200_000)
    output, lse = new_step(kv).extend(0, query, key, value, out=out, return_lse=True)
    assert output is out
    np.testing.assert_array_equal(out, mixed)
    assert lse.shape == SHAPE[:2]


def test_views_that_are_not_contiguous_travel(kv: Session) -> None:
    memory = kv.create_region(1 << 20)
    wide = memory.array((5, 4, 32))
    wide[:] = normal(1, (5, 4, 32))
    every_other = wide[:, ::2]
    output = new_step(kv).extend(0, every_other, every_other, every_other)
    np.testing.assert_array_equal(output, new_step(kv).extend(0, *[every_other.copy()] * 3))


def test_torch_tensors_over_a_region(kv: Session) -> None:
    memory = kv.create_region(1 << 20)
    spy = Spy(kv)
    query, key, value, out = (torch.from_numpy(memory.array(SHAPE, offset=n << 16)) for n in range(4))
    for tensor in (query, key, value):
        tensor.normal_()
    assert new_step(kv).extend(0, query, key, value, out=out) is out
    assert spy.requests[-1].ByteSize() < 300
    np.testing.assert_array_equal(out.numpy(), new_step(kv).extend(0, *(t.numpy().copy() for t in (query, key, value))))


def test_regions_are_told_and_given_up(kv: Session) -> None:
    one, two = kv.create_region(4096), kv.create_region(8192)
    assert kv.regions() == [RegionInfo(one.name, "", 0, 4096, None), RegionInfo(two.name, "", 0, 8192, None)]
    kv.unregister_region(one)
    assert [info.name for info in kv.regions()] == [two.name]
    kv.unregister_region(one)
    kv.unregister_region()
    assert kv.regions() == []


def test_arrays_of_a_region_that_was_given_up_travel(kv: Session) -> None:
    memory = kv.create_region(1 << 20)
    array = placed(memory, normal(1), 0)
    kv.unregister_region(memory)
    output = new_step(kv).extend(0, array, array, array)
    np.testing.assert_array_equal(output, new_step(kv).extend(0, *[normal(1)] * 3))
    out = memory.array(SHAPE, offset=1 << 18)
    assert new_step(kv).extend(0, array, array, array, out=out) is out
    np.testing.assert_array_equal(out, output)


def test_a_region_of_another_session_is_none_of_this_one(client: KVClient, kv: Session) -> None:
    with client.session() as other:
        array = placed(other.create_region(1 << 20), normal(1), 0)
        np.testing.assert_array_equal(
            new_step(kv).extend(0, array, array, array), new_step(kv).extend(0, *[normal(1)] * 3)
        )


def test_what_a_caller_gets_wrong(kv: Session) -> None:
    memory = kv.create_region(1 << 16)
    step, array = new_step(kv), normal(1)
    good = memory.array(SHAPE)
    wrong: list[tuple[Any, str]] = [
        (lambda: step.extend(0, array, array, array, out=good[:4]), "out"),
        (lambda: step.extend(0, array, array, array, out=good.astype(np.float16)), "out"),
        (lambda: step.extend(0, array, array, array, out=torch.empty(5, 2, 64)[:, :, ::2]), "out"),
        (
            lambda: step.extend(0, array, array, array, out=np.broadcast_to(np.float32(0), SHAPE)),
            "out",
        ),
        (lambda: step.extend(0, array, array, array, out=[1.0]), "out"),
        (lambda: step.extend(0, array, array, array, lse_out=memory.array((5, 2))), "lse_out"),
        (lambda: step.extend(0, array, array, array, return_lse=True, lse_out=good), "lse_out"),
        (lambda: memory.array((1 << 14) + 1), "shape"),
        (lambda: memory.array(1, offset=1 << 16), "shape"),
        (lambda: memory.array(-2), "shape"),
        (lambda: kv.create_region(0), "num_bytes"),
        (lambda: kv.create_region(1.5), "num_bytes"),  # type: ignore[arg-type]
    ]
    for call, field in wrong:
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert caught.value.field == field
    np.testing.assert_array_equal(step.extend(0, array, array, array, out=good), good)


def test_more_than_there_is(kv: Session) -> None:
    with pytest.raises(QuotaExceededError) as caught:
        kv.create_region(1 << 50)
    assert caught.value.metadata["limit"] == "max_region_mib"
    for _ in range(4):
        kv.create_region(4096)
    with pytest.raises(QuotaExceededError):
        kv.create_region(4096)
    assert len(kv.regions()) == 4


def test_arrays_outlive_their_session(client: KVClient) -> None:
    with client.session() as kv:
        memory = kv.create_region(1 << 16)
        array = placed(memory, normal(1), 0)
    del memory
    np.testing.assert_array_equal(array, normal(1))


def test_the_asynchronous_face(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(daemon.address, transport="inline") as client, client.session() as kv:
            memory = await kv.create_region(1 << 20)
            views = [placed(memory, normal(n), n << 16) for n in range(3)]
            outs = [memory.array(SHAPE, offset=(4 + n) << 16) for n in range(8)]

            async def one(out: np.ndarray) -> None:
                step = await kv.open_step([await kv.allocate(new_tokens())])
                assert await step.extend(0, *views, out=out) is out

            await asyncio.gather(*(one(out) for out in outs))
            for out in outs:
                np.testing.assert_array_equal(out, outs[0])
            assert [info.byte_size for info in await kv.regions()] == [1 << 20]
            await kv.unregister_region(memory)
            assert await kv.regions() == []
            await kv.reset_prefix_cache()

    asyncio.run(scenario())


def test_a_private_region_keeps_its_contents_and_shares_no_more() -> None:
    """The other side still sees the same bytes, and arrays stay at their addresses."""
    descriptor = os.memfd_create("region")
    try:
        os.truncate(descriptor, 3 << 12)
        other = np.frombuffer(mmap.mmap(descriptor, 3 << 12), np.uint8)
        region = HostRegion("region", descriptor, 2 << 12, offset=1 << 12)
    finally:
        os.close(descriptor)
    array = region.array(2 << 12, "uint8")
    array[...] = 7
    assert (other[1 << 12 :] == 7).all()
    region.make_private()
    assert (array == 7).all()
    array[5000] = 8
    assert (other[1 << 12 :] == 7).all()
    assert region.array(2 << 12, "uint8")[5000] == 8
    assert region.offset_of(array) == 0
