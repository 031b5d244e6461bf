"""A lane with both ends in this process, over memory files like the daemon's, and methods that write raw entries."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from lane_ring import CAPACITY, COMPLETION, COMPLETIONS, ENTRIES, SLOT_BYTES

from kvservice import _ext, ops

Array = npt.NDArray[Any]

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
OK = ("", "", "")
TIMEOUT_S = 60.0
SESSION_NUMBER = 7


def memory_file(num_bytes: int) -> int:
    """Create a memory file with a sealed size and return its descriptor."""
    fd = os.memfd_create("lane-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def mapped(fd: int, num_bytes: int) -> Array:
    return np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)


@dataclass
class StepArrays:
    """A step like the block manager's. Its sequences share no blocks."""

    step_id: int
    slot_mapping: Array
    query_lens: Array
    context_lens: Array
    block_tables: Array
    written: bytearray


@dataclass
class Call:
    """Tensors and options of a call, in the form that the ops take."""

    query: Array
    key: Array
    value: Array
    options: dict[str, Any] = field(default_factory=dict)
    slopes: Array | None = None


class LaneRig:
    """A lane's `session`, `server` and `client`. `region_number` is the number of `region`. Rigs with the same shapes
    may share a pool."""

    def __init__(
        self,
        dtype: str = "float32",
        num_layers: int = 2,
        num_kv_heads: int = 2,
        head_size: int = 32,
        block_size: int = 4,
        num_blocks: int = 64,
        spin_us: float = 20.0,
        batch_invariant: bool = False,
        region_bytes: int = 1 << 20,
        shared_with: LaneRig | None = None,
    ) -> None:
        self.dtype, self.head_size, self.block_size, self.num_kv_heads = dtype, head_size, block_size, num_kv_heads
        shape = (num_blocks, num_layers, 2, num_kv_heads, head_size * block_size)
        self.pool = np.random.default_rng(3).standard_normal(shape, np.float32).astype(DTYPES[dtype])
        self.executor = _ext.CpuLaneExecutor(self.pool, head_size, batch_invariant)
        if shared_with is not None:
            self.pool, self.executor = shared_with.pool, shared_with.executor
        self.num_layers = num_layers
        self.finished = _ext.FinishedSteps()
        self.kept_ids = np.zeros(8, np.int64)
        self.session = _ext.LaneSession(num_layers, self.finished, SESSION_NUMBER, self.kept_ids)
        self.region = mapped(memory_file(region_bytes), region_bytes)
        self.region_number = self.session.add_region(self.region.ctypes.data, region_bytes)
        self.fd = memory_file(_ext.LANE_BYTES)
        self.memory = mapped(self.fd, _ext.LANE_BYTES)
        self.faults: list[str] = []
        self.server = _ext.LaneServer(self.memory, self.session, self.executor, spin_us, self.faults.append)
        self.client = _ext.LaneClient(self.memory, spin_us)
        self.random = np.random.default_rng(5)
        self._used = 0

    def take_finished(self) -> list[int]:
        """Return the ids of the steps that were finished since the previous call."""
        taken = self.finished.take()
        assert {number for number, _ in taken} <= {SESSION_NUMBER}
        return [step_id for _, step_id in taken]

    # Steps and tensors.

    def publish(
        self, step_id: int, query_lens: Sequence[int], context_lens: Sequence[int], first_block: int = 0
    ) -> StepArrays:
        num_blocks = [-(-length // self.block_size) for length in context_lens]
        tables = np.full((len(num_blocks), max(num_blocks)), -1, np.int32)
        for row, count in enumerate(num_blocks):
            tables[row, :count] = np.arange(first_block, first_block + count)
            first_block += count
        slots = [
            tables[row, position // self.block_size] * self.block_size + position % self.block_size
            for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True))
            for position in range(context_len - query_len, context_len)
        ]
        step = StepArrays(
            step_id,
            np.array(slots, np.int64),
            np.array(query_lens, np.int32),
            np.array(context_lens, np.int32),
            tables,
            bytearray(self.num_layers),
        )
        self.republish(step)
        return step

    def republish(self, step: StepArrays) -> None:
        arrays = (step.slot_mapping, step.query_lens, step.context_lens, step.block_tables)
        self.session.publish(step.step_id, step.written, *arrays)

    def tensors(self, step: StepArrays, num_heads: int = 4, slopes: bool = False, **options: Any) -> Call:
        num_tokens = len(step.slot_mapping)

        def normal(heads: int) -> Array:
            shape = (num_tokens, heads, self.head_size)
            return self.random.standard_normal(shape, np.float32).astype(DTYPES[self.dtype])

        alibi = -np.exp2(-np.arange(1, num_heads + 1, dtype=np.float32)) if slopes else None
        kv = self.num_kv_heads
        return Call(normal(num_heads), normal(kv), normal(kv), options, alibi)

    def reserve(self, num_bytes: int) -> tuple[int, int]:
        """Reserve bytes in the region and return their place."""
        offset = self._used
        assert offset + num_bytes <= len(self.region)
        self._used += -(-num_bytes // 64) * 64
        return self.region_number, offset

    def put(self, array: Array) -> tuple[int, int]:
        place = self.reserve(array.nbytes)
        self.view(place, array.shape, array.dtype)[...] = array
        return place

    def view(self, place: tuple[int, int], shape: tuple[int, ...], dtype: Any) -> Array:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.region[place[1] : place[1] + num_bytes].view(dtype).reshape(shape)

    def release_places(self) -> None:
        self._used = 0

    # Calls.

    def expected(self, step: StepArrays, layer: int, call: Call) -> tuple[Array, Array, Array]:
        """Compute the expected output, log-sum-exp and pool after the call."""
        pool = self.pool.copy()
        ops.write_kv(pool, layer, step.slot_mapping, call.key, call.value)
        arrays = (step.query_lens, step.block_tables, step.context_lens)
        options = {**call.options, "alibi_slopes": call.slopes}
        output, lse = ops.attention(pool, layer, call.query, *arrays, **options, return_lse=True)
        return output, lse, pool

    def submit(self, step_id: int, layer: int, call: Call, decode: bool = False) -> tuple[int, Array, Array]:
        """Submit a call. Returns its number, and views of its output and log-sum-exp."""
        output, lse = self.reserve(call.query.nbytes), self.reserve(4 * call.query[..., 0].size)
        slopes = None if call.slopes is None else self.put(call.slopes)
        places = (self.put(call.query), self.put(call.key), self.put(call.value), output, lse)
        number = self.client.submit(
            step_id, layer, decode, call.query.shape[1], *places, alibi_slopes=slopes, **call.options
        )
        shape = call.query.shape
        return number, self.view(output, shape, call.query.dtype), self.view(lse, shape[:2], np.float32)

    def call(self, step_id: int, layer: int, call: Call, decode: bool = False) -> tuple[str, str, str]:
        number, _, _ = self.submit(step_id, layer, call, decode)
        return self.wait(number)

    def wait(self, number: int) -> tuple[str, str, str]:
        answer = self.client.wait(number, TIMEOUT_S)
        assert answer is not None
        return answer

    # Raw access to the ring.

    def word(self, offset: int) -> Array:
        """Return a writable view of a word of the header."""
        return self.memory[offset : offset + 8].view(np.uint64)

    def write_entry(self, place: int, entry: bytes) -> None:
        start = ENTRIES + place % CAPACITY * SLOT_BYTES
        self.memory[start : start + SLOT_BYTES] = np.frombuffer(entry, np.uint8)

    def completion(self, place: int) -> tuple[int, int, str, str, str]:
        start = COMPLETIONS + place % CAPACITY * SLOT_BYTES
        number, ok, _, *texts = COMPLETION.unpack(self.memory[start : start + SLOT_BYTES].tobytes())
        return (number, ok, *(text.split(b"\0")[0].decode() for text in texts))

    def close(self) -> None:
        self.server.close()
        os.close(self.fd)


@contextmanager
def lane(**arguments: Any) -> Iterator[LaneRig]:
    rig = LaneRig(**arguments)
    try:
        yield rig
        assert rig.faults == []
    finally:
        rig.close()
