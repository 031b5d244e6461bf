"""A lane over a pool on the GPU, with a copy of the pool in host memory as the reference."""

from __future__ import annotations

import mmap
import os
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from gpu_peer import download, wait

from kvservice import _cuda, _ext, ops

# The numbers of dtypes in csrc/pool.h.
DTYPE_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CACHES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
# Relative errors that rounding causes.
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
COUNTER_BYTES = 1 << 16
REGION_BYTES = 16 << 20
DONE = ("", "", "")
# Slots, query lengths, context lengths and block tables of a step.
StepArrays: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass
class Step:
    number: int
    slots: np.ndarray
    query_lens: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    memory: Any  # owns the step's tables on the device
    addresses: tuple[int, int, int, int, int, int]
    written: bytearray

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


def host_memory(num_bytes: int) -> tuple[int, mmap.mmap, np.ndarray]:
    """Create shared host memory. Returns descriptor, mapping and bytes."""
    fd = os.memfd_create("kvservice-test")
    os.ftruncate(fd, num_bytes)
    mapping = mmap.mmap(fd, num_bytes)
    return fd, mapping, np.frombuffer(mapping, np.uint8)


def upload(array: np.ndarray, pointer: int, stream: int = 0) -> None:
    """Copy an array to the device and synchronize, so that the array can be freed."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    _cuda.copy_async(pointer, flat.ctypes.data, flat.nbytes, stream)
    done = _cuda.Event(0)
    done.record(stream)
    done.synchronize()


def upload_all(arrays: StepArrays) -> tuple[Any, tuple[int, int, int, int]]:
    """Return device memory that has these arrays, and the address of each."""
    memory = _cuda.DeviceMemory(0, sum(array.nbytes + 256 for array in arrays))
    addresses, offset = [], 0
    for array in arrays:
        upload(array, memory.pointer + offset)
        addresses.append(memory.pointer + offset)
        offset += -(-array.nbytes // 256) * 256
    slots, query_lens, context_lens, block_tables = addresses
    return memory, (slots, query_lens, context_lens, block_tables)


class HostRegion:
    kind = "page_locked"

    def __init__(self, page_locked: bool = True) -> None:
        self.fd, self.mapping, self.bytes = host_memory(REGION_BYTES)
        self.pointer: int = self.bytes.ctypes.data
        self._registration = _cuda.HostRegistration(self.pointer, REGION_BYTES) if page_locked else None

    def put(self, offset: int, array: np.ndarray) -> None:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes[offset : offset + flat.nbytes] = flat

    def get(self, offset: int, num_bytes: int) -> np.ndarray:
        return self.bytes[offset : offset + num_bytes].copy()

    def close(self) -> None:
        if self._registration is not None:
            self._registration.close()
        os.close(self.fd)


class DeviceRegion:
    kind = "device"

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.pointer: int = memory.pointer

    def put(self, offset: int, array: np.ndarray) -> None:
        upload(array, self.pointer + offset)

    def get(self, offset: int, num_bytes: int) -> np.ndarray:
        return download(self.pointer + offset, num_bytes)

    def close(self) -> None:
        self.memory.close()


class CudaLane:
    """One session with one or more lanes. The sizes are those of the pool."""

    def __init__(
        self,
        dtype: str = "bfloat16",
        *,
        num_blocks: int = 200,
        num_layers: int = 2,
        num_kv_heads: int = 2,
        head_size: int = 64,
        block_size: int = 16,
        batch_invariant: bool = False,
        workspace_bytes: int = COUNTER_BYTES,
        cache: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = num_kv_heads, head_size
        self.num_blocks, self.num_layers, self.block_size = num_blocks, num_layers, block_size
        self.random = np.random.default_rng(0)
        shape = (num_blocks, num_layers, 2, num_kv_heads, head_size * block_size)
        self.host_pool = self.normal(*shape).astype(CACHES[cache] if cache else DTYPES[dtype])
        self.pool_bytes = self.host_pool.nbytes
        self.pool = _cuda.DeviceMemory(0, self.pool_bytes)
        upload(self.host_pool, self.pool.pointer)
        self.stream = _cuda.Stream(0, True)
        self.scales = self.take_scales() if cache else 0
        # The pool arguments of the kernels, without the pool's address.
        self.pool_sizes = DTYPE_NUMBERS[cache or dtype], num_blocks, num_layers, num_kv_heads, head_size, block_size
        arguments = (0, self.stream.handle, self.pool.pointer, *self.pool_sizes, DTYPE_NUMBERS[dtype], self.scales)
        self.executor = _cuda.CudaLaneExecutor(*arguments, batch_invariant, workspace_bytes, 1000.0)
        self.finished = _cuda.FinishedSteps()
        self.session = _cuda.LaneSession(num_layers, self.finished, 0)
        self.regions: dict[int, HostRegion | DeviceRegion] = {}
        self.host = self.add_region(HostRegion())
        self.device = self.add_region(DeviceRegion(_cuda.DeviceMemory(0, REGION_BYTES)))
        self.faults: list[str] = []
        self.servers: list[Any] = []
        self.fd, self.client = self.open_lane()

    def take_finished(self) -> list[int]:
        """Return the ids of the steps that were finished since the previous call."""
        return [step_id for _, step_id in self.finished.take()]

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32).astype(DTYPES[self.dtype])

    def take_scales(self) -> int:
        """Set different scales for each layer and head. Creates an equal second pool for `from_kernels`."""
        scales = self.random.uniform(0.5, 2.0, (2, self.num_layers, self.shape[0])).astype(np.float32)
        self.scale_memory = _cuda.DeviceMemory(0, scales.nbytes)
        upload(scales, self.scale_memory.pointer)
        self.twin = _cuda.DeviceMemory(0, self.pool_bytes)
        upload(self.host_pool, self.twin.pointer)
        self.workspace = _cuda.DeviceMemory(0, 64 << 20)
        _cuda.fill_async(self.workspace.pointer, 0, COUNTER_BYTES, 0)
        wait()
        pointer: int = self.scale_memory.pointer
        return pointer

    def from_kernels(self, step: Step, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        """Launch the kernels of the same call on the second pool and return the output."""
        row, half = 4 * self.shape[0], REGION_BYTES // 2
        scales = self.scales + layer * row, self.scales + (self.num_layers + layer) * row
        at = [self.regions[self.device].pointer + offset for _, offset in self.put(self.device, (query, key, value))]
        dtype, stream = DTYPE_NUMBERS[self.dtype], self.stream.handle
        slots, query_lens, context_lens, block_tables, _, max_query_len = step.addresses
        self.stream.synchronize()
        arguments = (layer, step.num_tokens, slots, at[1], at[2], dtype, *scales, stream)
        _cuda.write_kv(self.twin.pointer, *self.pool_sizes, *arguments)
        call = _cuda.Attention()
        names = "pool_dtype", "num_blocks", "num_layers", "num_kv_heads", "head_size", "block_size"
        fields: dict[str, Any] = dict(zip(names, self.pool_sizes, strict=True))
        fields |= {"pool": self.twin.pointer, "layer": layer, "dtype": dtype, "stream": stream}
        fields |= {"num_tokens": step.num_tokens, "num_seqs": len(step.query_lens), "num_heads": query.shape[1]}
        fields |= {"max_blocks": step.block_tables.shape[1], "max_query_len": max_query_len}
        fields |= {"query": at[0], "query_lens": query_lens, "context_lens": context_lens}
        fields |= {"block_tables": block_tables, "k_scale": scales[0], "v_scale": scales[1]}
        fields |= {"scale": self.shape[1] ** -0.5, "out": self.regions[self.device].pointer + half}
        fields["lse"] = fields["out"] + -(-query.nbytes // 256) * 256
        fields |= {"workspace": self.workspace.pointer, "workspace_bytes": self.workspace.num_bytes}
        for name, value_of in fields.items():
            setattr(call, name, value_of)
        call.launch()
        self.stream.synchronize()
        return self.get((self.device, half), query.shape, DTYPES[self.dtype])

    def add_region(self, region: HostRegion | DeviceRegion) -> int:
        number: int = self.session.add_region(region.pointer, REGION_BYTES, region.kind)
        self.regions[number] = region
        return number

    def open_lane(self) -> tuple[int, Any]:
        """Open a lane. Returns the descriptor of its memory, and a client."""
        fd, mapping, _ = host_memory(_cuda.LANE_BYTES)
        parts = mapping, self.session, self.executor, 50.0, self.faults.append
        self.servers.append(_cuda.LaneServer(*parts))
        return fd, _ext.LaneClient(mapping, 50.0)

    def open_step(
        self,
        number: int,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        on_device: bool = True,
        num_common: int = 0,
    ) -> Step:
        """Publish a step with random blocks. Its sequences share only the first `num_common` blocks."""
        max_blocks = -(-max(context_lens) // self.block_size)
        blocks = self.random.permutation(self.num_blocks).astype(np.int32)
        own = blocks[num_common:][: len(query_lens) * (max_blocks - num_common)].reshape(len(query_lens), -1)
        common = np.broadcast_to(blocks[:num_common], (len(query_lens), num_common))
        tables = np.ascontiguousarray(np.concatenate([common, own], axis=1))
        slots = [
            int(tables[i, position // self.block_size]) * self.block_size + position % self.block_size
            for i, (new, context) in enumerate(zip(query_lens, context_lens, strict=True))
            for position in range(context - new, context)
        ]
        arrays = np.array(slots, np.int64), np.array(query_lens, np.int32), np.array(context_lens, np.int32), tables
        memory, addresses = upload_all(arrays)
        step = Step(number, *arrays, memory, (*addresses, num_common, max(query_lens)), bytearray(self.num_layers))
        self.session.publish(number, step.written, *arrays, step.addresses if on_device else None)
        return step

    def tensors(self, step: Step, num_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num_kv_heads, head_size = self.shape
        query, key, value = (
            self.normal(step.num_tokens, heads, head_size) for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        return query, key, value

    def put(self, region: int, tensors: Sequence[np.ndarray]) -> list[tuple[int, int]]:
        places, offset = [], 0
        for tensor in tensors:
            self.regions[region].put(offset, tensor)
            places.append((region, offset))
            offset += -(-tensor.nbytes // 256) * 256
        return places

    def get(self, place: tuple[int, int], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        region, offset = place
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.regions[region].get(offset, count).view(dtype).reshape(shape)

    def attend(
        self,
        step: Step,
        layer: int,
        query: np.ndarray,
        places: Sequence[Any],
        out: int,
        client: Any = None,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Make a call whose results are in the second half of a region. Returns output and log-sum-exp."""
        client = client or self.client
        half, num_heads = REGION_BYTES // 2, query.shape[1]
        output, lse = (out, half), (out, half + -(-query.nbytes // 256) * 256)
        number = client.submit(step.number, layer, False, num_heads, *places[:3], output, lse, **options)
        assert client.wait(number, 30.0) == DONE
        return self.get(output, query.shape, DTYPES[self.dtype]), self.get(lse, query.shape[:2], np.float32)

    def expected(
        self, step: Step, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray, **options: Any
    ) -> Any:
        """Compute the expected results with the CPU kernels on the pool in host memory."""
        ops.write_kv(self.host_pool, layer, step.slots, key, value)
        lens = step.query_lens, step.block_tables, step.context_lens
        return ops.attention(self.host_pool, layer, query, *lens, return_lse=True, **options)

    def check(self, step: Step, layer: int, num_heads: int, region: int, out: int, **options: Any) -> None:
        """Make one call and compare its results with the CPU kernels."""
        query, key, value = self.tensors(step, num_heads)
        places = self.put(region, (query, key, value))
        output, lse = self.attend(step, layer, query, places, out, **options)
        expected, expected_lse = self.expected(step, layer, query, key, value, **renamed(options))
        check_close(output, expected, TOLERANCES[self.dtype])
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=20 * TOLERANCES[self.dtype])

    def check_pool(self) -> None:
        """Compare every byte of both pools."""
        pool = download(self.pool.pointer, self.host_pool.nbytes)
        np.testing.assert_array_equal(pool, self.host_pool.reshape(-1).view(np.uint8))

    def close(self) -> None:
        for server in self.servers:
            server.close()
        wait()
        for region in self.regions.values():
            region.close()
        self.pool.close()


def renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "alibi_slopes"}


def check_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    difference = np.linalg.norm(found.astype(np.float64) - expected.astype(np.float64))
    assert difference / np.linalg.norm(expected.astype(np.float64)) <= tolerance


@contextmanager
def cuda_lane(*arguments: Any, **sizes: Any) -> Iterator[CudaLane]:
    lane = CudaLane(*arguments, **sizes)
    try:
        yield lane
        assert lane.faults == []
    finally:
        lane.close()


# --- functions that run in another process: a client whose tensors are in its own GPU memory


def start_client(num_bytes: int) -> bytes:
    """Start a client on the lane whose descriptor was sent. Returns the handle of the client's memory."""
    import gpu_peer

    fd = gpu_peer.kept.pop("fd")
    mapping = mmap.mmap(fd, _ext.LANE_BYTES)
    os.close(fd)
    memory = _cuda.IpcAllocation(0, num_bytes)
    gpu_peer.kept["lane"] = types.SimpleNamespace(client=_ext.LaneClient(mapping, 50.0), memory=memory)
    handle: bytes = memory.handle
    return handle


def client_attend(step: int, layer: int, region: int, tensors: Sequence[np.ndarray]) -> np.ndarray:
    import gpu_peer

    lane = gpu_peer.kept["lane"]
    places, offset = [], 0
    for tensor in tensors:
        upload(tensor, lane.memory.pointer + offset)
        places.append((region, offset))
        offset += -(-tensor.nbytes // 256) * 256
    query = tensors[0]
    number = lane.client.submit(step, layer, False, query.shape[1], *places, (region, offset), None)
    assert lane.client.wait(number, 30.0) == DONE
    return download(lane.memory.pointer + offset, query.nbytes).view(query.dtype).reshape(query.shape)


def client_flood(step: int, region: int, num_heads: int) -> int:
    """Submit calls without waiting for them. Returns how many were accepted."""
    import gpu_peer

    client, places = gpu_peer.kept["lane"].client, [(region, 0)] * 3
    for count in range(64):
        client.submit(step, count % 2, False, num_heads, *places, (region, REGION_BYTES // 2), None)
    return 64
