"""Every transport returns the results of the inline transport, for every kind of step, option and tensor."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from both_faces import Face, session_of
from each_row import each_row
from small_daemons import TRANSPORTS, OpenDaemon

from kvservice.client import KVClient, Session, SharedRegion
from kvservice.errors import InvalidArgumentError
from kvservice.launch import Daemon

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 2, 4, 2, 32
SLOPES = [2.0**-n for n in range(HEADS)]
OPTIONS: list[dict[str, Any]] = [
    {"scale": 0.25},
    {"sliding_window": 6},
    {"logits_soft_cap": 1.5},
    {"alibi_slopes": SLOPES},
    {"scale": -0.5, "sliding_window": 3, "logits_soft_cap": 4.0, "alibi_slopes": SLOPES},
]
Place = Callable[[np.ndarray], np.ndarray]
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
VARIANTS = {"inline": ("inline", "write"), **TRANSPORTS}


class Inputs:
    """Inputs from N(0,1), from a seeded generator: the same requests in the same order return the same numbers."""

    def __init__(self, dtype: str, place: Place = lambda array: array) -> None:
        self._rng = np.random.default_rng(7)
        self._dtype = DTYPES[dtype]
        self.place = place

    def layer(self, num_tokens: int) -> list[np.ndarray]:
        return [self.array(num_tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def array(self, num_tokens: int, heads: int) -> np.ndarray:
        values = self._rng.standard_normal((num_tokens, heads, HEAD_SIZE)).astype(self._dtype)
        return self.place(values)


async def walk(kv: Any, inputs: Inputs, *, given: bool) -> list[np.ndarray]:
    """Run prefill, decode and mixed steps with every option, then read all K/V. `given`: the caller passes arrays for
    the results."""
    seen: list[np.ndarray] = []

    async def run(step: Any, method: str, **options: Any) -> None:
        for layer in range(LAYERS):
            query, key, value = inputs.layer(step.num_tokens)
            if not given:
                output, lse = await getattr(step, method)(layer, query, key, value, return_lse=True, **options)
            else:
                out = inputs.place(np.zeros_like(query))
                lse_out = inputs.place(np.zeros(query.shape[:2], np.float32))
                output, lse = await getattr(step, method)(
                    layer, query, key, value, return_lse=True, out=out, lse_out=lse_out, **options
                )
                assert output is out
                assert lse is lse_out
            seen.extend((output.copy(), lse.copy()))

    sequences = await kv.allocate_batch([range(n, n + length) for n, length in ((0, 5), (100, 1), (200, 45))])
    await run(await kv.open_step(sequences[:2]), "extend")
    await run(await kv.open_step(sequences[2:], 20), "extend")  # one chunk of a chunked prefill
    await run(await kv.open_step(sequences[2:]), "extend")
    await run(await kv.append(sequences, [1, 2, 3]), "decode")
    for options in OPTIONS:
        await run(await kv.append(sequences, [4, 5, 6]), "decode", **options)
        await run(await kv.append(sequences, range(7), num_tokens=[4, 1, 2]), "attend", **options)
    child = await kv.fork(sequences[0])
    await run(await kv.append([child, sequences[0]], [8, 9]), "decode")
    query, key, value = inputs.layer(2)
    last = await kv.append([child, sequences[0]], [10, 11])
    seen.append((await last.decode(0, query, key, value)).copy())  # without a log-sum-exp
    await last.write(key, value, 1)
    await (await kv.append([child], [12])).write(*(np.stack([inputs.array(1, KV_HEADS)] * LAYERS) for _ in range(2)))
    for sequence in (*sequences, child):
        seen += await kv.read(sequence, 0, sequence.length)
    await kv.free([*sequences, child])
    await kv.reset_prefix_cache()
    return seen


def run_walk(face: Face, daemon: Daemon, transport: str, dtype: str, *, given: bool, shared: str = "") -> list[Any]:
    """Run `walk` on a session. `shared`: all tensors are in a region of this kind."""

    async def scenario() -> list[Any]:
        async with session_of(face, daemon.address, transport) as kv:
            assert kv.transport == transport
            if not shared:
                return await walk(kv, Inputs(dtype), given=given)
            memory = await make_region(kv, shared)
            return await walk(kv, Inputs(dtype, Bump(memory).place), given=given)

    return asyncio.run(scenario())


async def make_region(kv: Any, kind: str) -> Any:
    return await (kv.create_region(1 << 20) if kind == "made" else kv.open_region(kind, 1 << 20))


class Bump:
    """A bump allocator for arrays in a region. It starts again at offset 0 when the region is full."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._used = 0

    def place(self, array: np.ndarray) -> np.ndarray:
        if self._used + array.nbytes > self._memory.num_bytes:
            self._used = 0
        there = self._memory.array(array.shape, array.dtype, self._used)
        there[...] = array
        self._used += -(-array.nbytes // 64) * 64
        return there


@pytest.fixture(scope="module")
def by_messages(open_daemon: OpenDaemon) -> Callable[[str], list[Any]]:
    """The results of the inline transport."""
    known: dict[str, list[Any]] = {}

    def find(dtype: str) -> list[Any]:
        if dtype not in known:
            known[dtype] = run_walk("blocking", open_daemon(dtype, "write"), "inline", dtype, given=False)
        return known[dtype]

    return find


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_results_are_those_of_messages(
    open_daemon: OpenDaemon, by_messages: Callable[[str], list[Any]], dtype: str, name: str
) -> None:
    transport, share_pool = VARIANTS[name]
    daemon = open_daemon(dtype, share_pool)
    faces: tuple[Face, ...] = ("blocking", "asyncio")
    with each_row() as row:
        for face in faces:
            for given in (False, True):
                with row(f"{face}, results given: {given}"):
                    found = run_walk(face, daemon, transport, dtype, given=given)
                    np.testing.assert_equal(found, by_messages(dtype))


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_in_a_region_give_the_same(
    open_daemon: OpenDaemon, by_messages: Callable[[str], list[Any]], shm_object: str, name: str
) -> None:
    transport, share_pool = VARIANTS[name]
    daemon = open_daemon("float32", share_pool)
    with each_row() as row:
        for region in ("made", shm_object):
            with row(region):
                found = run_walk("blocking", daemon, transport, "float32", given=True, shared=region)
                np.testing.assert_equal(found, by_messages("float32"))


def num_copied(kv: Session, own: SharedRegion) -> int:
    """Return how many bytes other than 0 are in the regions that the transport has made for copies."""
    names = {one.name for one in kv.regions()} - {own.name}
    made = [one for one in gc.get_objects() if issubclass(type(one), SharedRegion) and one.name in names]
    assert {one.name for one in made} == names
    return sum(int(np.count_nonzero(one.array(one.num_bytes, "uint8"))) for one in made)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_lies_in_a_region_is_not_copied(open_daemon: OpenDaemon, name: str) -> None:
    transport, share_pool = TRANSPORTS[name]
    with KVClient(open_daemon("float32", share_pool).address, transport=transport) as client, client.session() as kv:
        memory = kv.create_region(1 << 20)
        bump = Bump(memory)
        inputs = Inputs("float32", bump.place)
        step = kv.open_step([kv.allocate(range(45))])
        query, key, value = inputs.layer(45)
        out, lse_out = bump.place(np.zeros_like(query)), bump.place(np.zeros(query.shape[:2], np.float32))
        step.extend(0, query, key, value, out=out, lse_out=lse_out, return_lse=True)
        assert out.any()
        assert lse_out.all()
        assert num_copied(kv, memory) == 0
        step.extend(1, query.copy(), key, value, out=out)
        assert (num_copied(kv, memory) > 0) == (transport != "mapped")
        kv.free(step.sequences)
        kv.reset_prefix_cache()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_calls_without_options_give_the_same(open_daemon: OpenDaemon, kind: str) -> None:
    """Calls of one shape use the same memory of a lane. A call with 256 heads makes it larger, and replaces it."""
    convert = torch.from_numpy if kind == "torch" else np.asarray
    found = {}
    for name in ("inline", "lane"):
        inputs = Inputs("float32")
        outputs: list[Any] = []
        with KVClient(open_daemon("float32", "write").address, transport=name) as client, client.session() as kv:
            sequences = kv.allocate_batch([range(5), range(100, 145)])
            for heads in (HEADS, HEADS, 256, HEADS):
                step = kv.open_step(sequences) if not outputs else kv.append(sequences, [1, 2])
                for layer in range(LAYERS):
                    query = inputs.array(step.num_tokens, heads)
                    key, value = (inputs.array(step.num_tokens, KV_HEADS) for _ in range(2))
                    outputs.append(step.attend(layer, *map(convert, (query, key, value))))
            assert all(isinstance(output, type(convert(query))) for output in outputs)
            with pytest.raises(InvalidArgumentError, match="is float64"):
                kv.append(sequences, [3, 4]).attend(0, *(convert(np.zeros((2, 4, 32))) for _ in range(3)))
            kv.free(sequences)
            kv.reset_prefix_cache()
        found[name] = [np.asarray(output) for output in outputs]
    np.testing.assert_equal(found["lane"], found["inline"])


@pytest.fixture
def shm_object() -> Iterator[str]:
    """The name of a POSIX shared-memory object of 1 MiB."""
    path = Path("/dev/shm", f"kvservice-transports-{os.getpid()}")
    path.write_bytes(bytes(1 << 20))
    yield path.name
    path.unlink()
