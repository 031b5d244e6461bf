"""A fake of `kvservice._cuda` that needs no GPU: host memory, and streams that run at arbitrary times.

Work is deferred. The pieces of one stream run in order, but the next stream to run is chosen at random, and only events
restrict the choice. If an event is missing, some run executes work in the wrong order, and memory gets wrong content.
The kernels are those of the CPU, on the same layout. Memory that was freed or never written reads as bytes of 255.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import functools
import mmap
import os
import random
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from kvservice import _ext, ops
from kvservice.errors import InvalidArgumentError
from kvservice.pool import DTYPES

Array = np.ndarray[Any, Any]
DTYPE_OF = list(DTYPES.values())
COUNTER_BYTES = 1 << 16
SLOTS_ARGUMENTS = (
    "pool",
    "pool_dtype",
    "num_blocks",
    "num_layers",
    "num_kv_heads",
    "head_size",
    "block_size",
    "layer",
    "num_tokens",
    "slots",
    "key",
    "value",
    "dtype",
    "k_scale",
    "v_scale",
    "stream",
)


class CudaError(RuntimeError):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class DeadlockError(AssertionError):
    """A deadlock: a stream waits for an event that no stream reaches."""


class Event:
    def __init__(self, cuda: FakeCuda, timing: bool, blocking: bool) -> None:
        self.cuda = cuda
        self.timing = timing
        self.blocking = blocking
        self.recorded = self.reached = 0

    def has_reached(self, number: int) -> bool:
        return self.reached >= number

    def record(self, stream: int) -> None:
        with self.cuda.call():
            self.recorded += 1
            self.cuda.streams[stream].put(functools.partial(setattr, self, "reached", self.recorded))

    def synchronize(self) -> None:
        if self.blocking:
            self.cuda.sleep_until(lambda: self.reached >= self.recorded)
            return
        with self.cuda.call():
            self.cuda.run_until(lambda: self.reached >= self.recorded)

    def done(self) -> bool:
        with self.cuda.call():
            return self.reached >= self.recorded

    def elapsed_ms(self, start: Event) -> float:
        assert self.timing
        assert start.timing
        assert start.done()
        assert self.done()
        return 1.0


class Stream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.handle = len(cuda.streams) + 1
        self.held = False
        self._pieces: collections.deque[tuple[Callable[[], bool], Callable[[], Any]]] = collections.deque()
        cuda.streams[self.handle] = self

    def put(self, work: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self._pieces.append((ready, work))

    def wait(self, event: Event) -> None:
        with self.cuda.call():
            self.put(lambda: None, functools.partial(event.has_reached, event.recorded))

    def synchronize(self) -> None:
        with self.cuda.call():
            self.cuda.run_until(lambda: not self._pieces)

    def idle(self) -> bool:
        with self.cuda.call():
            return not self._pieces

    @property
    def can_run(self) -> bool:
        return not self.held and bool(self._pieces) and self._pieces[0][0]()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to run. Unlike `idle`, it lets no time pass."""
        return not self._pieces

    def run_one(self) -> None:
        self._pieces.popleft()[1]()


class Memory:
    """Device memory or pinned host memory, which pointers may refer to."""

    def __init__(self, cuda: FakeCuda, address: int, num_bytes: int, *, on_device: bool, file: int = -1) -> None:
        self.cuda, self.pointer, self.num_bytes, self._on_device = cuda, address, num_bytes, on_device
        self._file = file
        cuda.memory[address] = self

    def export_fd(self) -> int:
        return os.dup(self._file)

    def close(self) -> None:
        with self.cuda.call():
            del self.cuda.memory[self.pointer]
            self.cuda.used_bytes -= self.num_bytes if self._on_device else 0
            if self._file >= 0:
                os.close(self._file)


class Attention:
    """The attributes are those of the extension. Attributes that are not set are off."""

    alibi_slopes = k_scale = v_scale = lse = sliding_window = num_common_blocks = 0
    soft_cap = 0.0
    sparse = (0, 0, 64, 0, 0)
    batch_invariant = False
    kernel = "auto"
    pool: int
    pool_dtype: int
    dtype: int
    layer: int
    query: int
    out: int
    block_tables: int
    query_lens: int
    context_lens: int
    num_seqs: int
    num_tokens: int
    num_heads: int
    head_size: int
    block_size: int
    max_blocks: int
    max_query_len: int
    scale: float
    stream: int
    workspace: int
    workspace_bytes: int

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def wanted_workspace_bytes(self) -> int:
        return COUNTER_BYTES + 64 * self.num_tokens

    def launch(self) -> None:
        assert self.workspace_bytes >= self.wanted_workspace_bytes()
        call = copy.copy(self)
        with self.cuda.call():
            self.cuda.launched.append(call)
            self.cuda.streams[self.stream].put(lambda: call.run())

    def run(self) -> None:
        at = self.cuda.array
        assert not at(self.workspace, (COUNTER_BYTES,), np.uint8).any(), "the counters are not zero"
        at(self.workspace, (self.workspace_bytes,), np.uint8)[COUNTER_BYTES:] = 17
        pool, layer = self.cuda.pool(self.pool, self.pool_dtype, self), self.layer
        query_lens = at(self.query_lens, (self.num_seqs,), np.int32)
        assert query_lens.max() <= self.max_query_len
        query = at(self.query, (self.num_tokens, self.num_heads, self.head_size), DTYPE_OF[self.dtype])
        block_tables = at(self.block_tables, (self.num_seqs, self.max_blocks), np.int32)
        context_lens = at(self.context_lens, (self.num_seqs,), np.int32)
        common = block_tables[:, : self.num_common_blocks]
        assert (common == common[0]).all(), "what is said to be common is not"
        assert ((context_lens - query_lens) >= self.num_common_blocks * self.block_size).all()
        out = at(self.out, query.shape, query.dtype)
        if pool.dtype != query.dtype:
            pool, layer, query = as_float32(self.cuda, self, pool), 0, query.astype(np.float32)
        result, lse = ops.attention(
            pool,
            layer,
            query,
            query_lens,
            block_tables,
            context_lens,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.soft_cap,
            alibi_slopes=at(self.alibi_slopes, (self.num_heads,), np.float32) if self.alibi_slopes else None,
            return_lse=True,
        )
        out[:] = result
        if self.lse:
            at(self.lse, lse.shape, np.float32)[:] = lse


class FakeCuda(ModuleType):
    """A module for `sys.modules["kvservice._cuda"]`."""

    CudaError = CudaError
    LANE_BYTES = 36864
    LANE_BUCKETS = (1e-3,)
    FinishedSteps = _ext.FinishedSteps

    def __init__(self, seed: int = 0, total_bytes: int = 64 << 20) -> None:
        super().__init__("kvservice._cuda")
        self.lock = threading.RLock()
        self.progress = threading.Condition(self.lock)
        self.random = random.Random(seed)
        self.total_bytes = total_bytes
        self.streams: dict[int, Stream] = {}
        self.memory: dict[int, Memory] = {}
        self.used_bytes = 0
        self.lockable_bytes = total_bytes
        self.launched: list[Attention] = []
        # The stream of each copy of blocks, the newest last.
        self.copied: list[int] = []
        self.error: str | None = None
        self.error_code = 700  # cudaErrorIllegalAddress
        self._graveyard: list[Array] = []
        self._order: list[int] = []

    # ---- scheduling

    def hold(self, *handles: int) -> None:
        """Let these streams run nothing, and all others what they have."""
        for handle, stream in self.streams.items():
            stream.held = handle in handles

    def call(self) -> threading.RLock:
        """Wrap every call: time passes, and a failed device raises its error."""
        with self.lock:
            self._check()
            if self.random.random() < 0.3:
                for _ in range(self.random.randrange(12)):
                    self.run_one()
        return self.lock

    def run_until(self, true: Callable[[], bool]) -> None:
        while not true():
            if not self.run_one():
                raise DeadlockError(f"nothing can run: {[stream.handle for stream in self.streams.values()]}")
            self._check()

    def sleep_until(self, true: Callable[[], bool]) -> None:
        """Wait for what other threads run."""
        with self.progress:
            while not true():
                self.progress.wait(0.01)  # a test sets `error` without a notification
                self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise CudaError(self.error_code, self.error)

    def run_one(self) -> bool:
        """Run one piece of work of the first stream in a random order that changes now and then. Returns False if no
        stream can run."""
        if len(self._order) != len(self.streams) or self.random.random() < 0.1:
            self._order = self.random.sample(list(self.streams), len(self.streams))
        for handle in self._order:
            if self.streams[handle].can_run:
                self.streams[handle].run_one()
                self.progress.notify_all()
                return True
        return False

    # ---- memory

    def array(self, pointer: int, shape: tuple[int, ...], dtype: Any) -> Array:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.check_range(pointer, num_bytes)
        data = (ctypes.c_uint8 * num_bytes).from_address(pointer)
        return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)

    def check_range(self, pointer: int, num_bytes: int) -> None:
        for memory in self.memory.values():
            if memory.pointer <= pointer and pointer + num_bytes <= memory.pointer + memory.num_bytes:
                return
        raise AssertionError(f"{num_bytes} bytes at {pointer:#x} are nobody's")

    def pool(self, pointer: int, dtype: int, sizes: Any) -> Array:
        shape = (sizes.num_blocks, sizes.num_layers, 2, sizes.num_kv_heads, sizes.head_size * sizes.block_size)
        return self.array(pointer, shape, DTYPE_OF[dtype])

    def _count(self, num_bytes: int) -> None:
        if self.used_bytes + num_bytes > self.total_bytes:
            raise CudaError(2, f"out of memory: {num_bytes} bytes")
        self.used_bytes += num_bytes

    def _map(self, file: int, num_bytes: int) -> Memory:
        """Map memory that other processes can map too."""
        data = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
        self._graveyard.append(data)
        return Memory(self, data.ctypes.data, num_bytes, on_device=True, file=file)

    def _take(self, num_bytes: int) -> Memory:
        self._count(num_bytes)
        data = np.full(num_bytes + 256, 255, np.uint8)
        self._graveyard.append(data)
        return Memory(self, -(-data.ctypes.data // 256) * 256, num_bytes, on_device=True)

    # ---- the module's API

    def device_count(self) -> int:
        return 1

    def memory_info(self, device: int) -> tuple[int, int]:
        assert device == 0
        with self.call():
            return self.total_bytes - self.used_bytes, self.total_bytes

    def set_device(self, device: int) -> None:
        assert device == 0

    def synchronize_stream(self, stream: int) -> None:
        self.streams[stream].synchronize()

    def Stream(self, device: int, high_priority: bool = False) -> Stream:  # noqa: ARG002, N802
        with self.call():
            return Stream(self)

    def Event(self, device: int, timing: bool = False, blocking: bool = False) -> Event:  # noqa: ARG002, N802
        return Event(self, timing, blocking)

    def Attention(self) -> Attention:  # noqa: N802
        return Attention(self)

    def DeviceMemory(self, device: int, num_bytes: int) -> Memory:  # noqa: ARG002, N802
        with self.call():
            self._count(num_bytes)
            file = os.memfd_create("gpu")
            os.truncate(file, num_bytes)
            memory = self._map(file, num_bytes)
            self.array(memory.pointer, (num_bytes,), np.uint8)[:] = 255
            return memory

    def ImportedMemory(self, device: int, fd: int, num_bytes: int, writable: bool) -> Memory:  # noqa: ARG002, N802
        with self.call():
            if os.fstat(fd).st_size != num_bytes:
                raise InvalidArgumentError("is not the size of the memory", field="num_bytes")
            self._count(num_bytes)
            return self._map(os.dup(fd), num_bytes)

    def HostRegistration(self, address: int, num_bytes: int) -> Memory:  # noqa: N802
        with self.call():
            if num_bytes > self.lockable_bytes:
                raise CudaError(2, f"cannot lock {num_bytes} bytes")
            return Memory(self, address, num_bytes, on_device=False)

    def allocate_async(self, num_bytes: int, stream: int) -> int:
        with self.call():
            assert stream in self.streams
            return self._take(num_bytes).pointer

    def free_async(self, pointer: int, stream: int) -> None:
        def free() -> None:
            memory = self.memory[pointer]
            self.array(pointer, (memory.num_bytes,), np.uint8)[:] = 255
            self.used_bytes -= memory.num_bytes
            del self.memory[pointer]

        with self.call():
            self.streams[stream].put(free)

    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        def move() -> None:
            self.check_range(dst, num_bytes)
            self.check_range(src, num_bytes)
            ctypes.memmove(dst, src, num_bytes)

        with self.call():
            self.streams[stream].put(move)

    def fill_async(self, dst: int, byte: int, num_bytes: int, stream: int) -> None:
        with self.call():
            self.streams[stream].put(lambda: self.array(dst, (num_bytes,), np.uint8).fill(byte))

    def copy_blocks(
        self,
        src: int,
        dst: int,
        num_src_blocks: int,
        num_dst_blocks: int,
        block_bytes: int,
        src_ids: Array,
        dst_ids: Array,
        stream: int,
    ) -> None:
        pairs = list(zip(src_ids.tolist(), dst_ids.tolist(), strict=True))
        assert src_ids.dtype == dst_ids.dtype == np.int32
        assert all(0 <= one < num_src_blocks and 0 <= other < num_dst_blocks for one, other in pairs)
        self.check_range(src, num_src_blocks * block_bytes)
        self.check_range(dst, num_dst_blocks * block_bytes)
        with self.call():
            self.copied.append(stream)
            for one, other in pairs:  # each block is a separate piece of work, so that others may run in between
                to, source = dst + other * block_bytes, src + one * block_bytes
                self.streams[stream].put(functools.partial(ctypes.memmove, to, source, block_bytes))

    def write_kv(self, *arguments: int) -> None:
        self._slots(ops_write, *arguments)

    def read_kv(self, *arguments: int) -> None:
        self._slots(ops_read, *arguments)

    def _slots(self, move: Callable[..., None], *arguments: int) -> None:
        call = SlotsCall(*arguments)
        with self.call():
            self.streams[call.stream].put(lambda: move(self, call))


class SlotsCall:
    pool: int
    pool_dtype: int
    slots: int
    key: int
    value: int
    dtype: int
    num_tokens: int
    num_kv_heads: int
    head_size: int
    stream: int

    def __init__(self, *arguments: int) -> None:
        for name, value in zip(SLOTS_ARGUMENTS, arguments, strict=True):
            setattr(self, name, value)

    def arrays(self, cuda: FakeCuda) -> tuple[Array, Array, Array, Array]:
        shape = (self.num_tokens, self.num_kv_heads, self.head_size)
        return (
            cuda.pool(self.pool, self.pool_dtype, self),
            cuda.array(self.slots, (self.num_tokens,), np.int64),
            cuda.array(self.key, shape, DTYPE_OF[self.dtype]),
            cuda.array(self.value, shape, DTYPE_OF[self.dtype]),
        )


def ops_write(cuda: FakeCuda, call: Any) -> None:
    pool, slots, key, value = call.arrays(cuda)
    if pool.dtype == key.dtype:
        ops.write_kv(pool, call.layer, slots, key, value)
        return
    for which, array, scale in ((0, key, call.k_scale), (1, value, call.v_scale)):
        stored = (array / scales(cuda, call, scale)).astype(pool.dtype)
        for slot, token in zip(slots.tolist(), stored, strict=True):
            there = place(pool, call, slot, which)
            there[:] = token.reshape(there.shape)


def ops_read(cuda: FakeCuda, call: Any) -> None:
    pool, slots, key, value = call.arrays(cuda)
    if pool.dtype == key.dtype:
        key[:], value[:] = ops.read_kv(pool, call.layer, slots, head_size=call.head_size)
        return
    for which, array, scale in ((0, key, call.k_scale), (1, value, call.v_scale)):
        stored = np.stack([place(pool, call, slot, which) for slot in slots.tolist()]).reshape(array.shape)
        array[:] = (stored.astype(np.float32) * scales(cuda, call, scale)).astype(array.dtype)


def scales(cuda: FakeCuda, call: Any, pointer: int) -> Array:
    return cuda.array(pointer, (call.num_kv_heads, 1), np.float32)


def place(pool: Array, call: Any, slot: int, which: int) -> Array:
    """Return a view of a token's keys (0) `[num_kv_heads, head_size / 16, 16]` or values (1) in an FP8 pool."""
    block, offset = divmod(slot, call.block_size)
    heads = pool[block, call.layer, which]
    if which == 1:
        return heads.reshape(call.num_kv_heads, call.head_size, call.block_size)[:, :, offset]
    return heads.reshape(call.num_kv_heads, call.head_size // 16, call.block_size, 16)[:, :, offset]


def as_float32(cuda: FakeCuda, call: Any, pool: Array) -> Array:
    """Return the values of one layer of an FP8 pool."""
    num_slots = call.num_blocks * call.block_size
    parts = []
    for which, scale in ((0, call.k_scale), (1, call.v_scale)):
        stored = np.stack([place(pool, call, slot, which) for slot in range(num_slots)])
        shape = (num_slots, call.num_kv_heads, call.head_size)
        parts.append(stored.reshape(shape).astype(np.float32) * scales(cuda, call, scale))
    real = np.zeros((call.num_blocks, 1, *pool.shape[2:]), np.float32)
    ops.write_kv(real, 0, np.arange(num_slots), *parts)
    return real
