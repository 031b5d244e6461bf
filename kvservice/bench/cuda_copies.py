"""Copies between K/V tensors, the pool of a CUDA device and pinned memory: writing new tokens, and swapping blocks."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from kvservice.bench import cuda_harness, table
from kvservice.bench.cuda_harness import (
    BLOCK_SIZE,
    GRAPH_S,
    K_SCALE,
    MAX_ERROR,
    ROTATION_BYTES,
    SHORT_NAMES,
    Inputs,
    Shape,
    TorchScratch,
    device_array,
    random_tensor,
    relative_error,
)
from kvservice.errors import InternalError
from kvservice.ops import cuda
from kvservice.ops.cuda import HOST, DeviceArray

# ---- writing K and V of new tokens into the pool, compared with a plain copy of as many bytes
#
# Every shape is compared with torch before it is timed. Times are by the device's clock, of graphs with many calls that
# take turns with graphs of copies. Each call uses the next layer and the next tensors, so that none is in L2.


TENSOR_ITEM_BYTES = 2  # of bfloat16
MIN_LAYERS, MAX_CALLS = 2, 1000
# Estimated rate and launch time, only for the length of a graph.
_BYTES_PER_S, _CALL_S = 3e12, 2e-6


@dataclass(frozen=True)
class SlotsShape:
    """`dtype` is the pool's. A prompt fills whole blocks in random order; a step has one token for each sequence."""

    num_tokens: int
    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    is_prompt: bool = True

    @property
    def name(self) -> str:
        kind = "prompt" if self.is_prompt else "step"
        return f"{kind} {SHORT_NAMES[self.dtype]} {self.num_kv_heads}x{self.head_size} {self.num_tokens}"

    @property
    def num_numbers(self) -> int:
        """Return the numbers of K and V of a layer."""
        return 2 * self.num_tokens * self.num_kv_heads * self.head_size

    @property
    def pool_item_bytes(self) -> int:
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a call reads and writes."""
        return self.num_numbers * (TENSOR_ITEM_BYTES + self.pool_item_bytes)

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // BLOCK_SIZE if self.is_prompt else self.num_tokens

    @property
    def num_layers(self) -> int:
        """Return how many layers are more than fit into L2. A step touches a sector for each number of a value."""
        touched = self.num_numbers * self.pool_item_bytes if self.is_prompt else self.num_numbers * 32
        return min(max(-(-ROTATION_BYTES // touched), MIN_LAYERS), 64)

    @property
    def num_calls(self) -> int:
        call_s = max(self.num_bytes / _BYTES_PER_S, _CALL_S)
        rounds = max(1, int(GRAPH_S / (call_s * self.num_layers)))
        return self.num_layers * min(rounds, max(1, MAX_CALLS // self.num_layers))


SHAPES = (
    SlotsShape(8192, 8, 128),
    SlotsShape(8192, 32, 128),
    SlotsShape(8192, 8, 64),
    SlotsShape(8192, 32, 64),
    SlotsShape(2048, 8, 128),
    SlotsShape(8192, 8, 128, "float8_e4m3fn"),
    SlotsShape(8192, 32, 128, "float8_e4m3fn"),
    SlotsShape(8192, 32, 64, "float8_e4m3fn"),
    SlotsShape(1, 8, 128, is_prompt=False),
    SlotsShape(64, 8, 128, is_prompt=False),
    SlotsShape(256, 8, 128, is_prompt=False),
)


class SlotsBench:
    """The memory of a shape, its calls, and copies of as many bytes."""

    def __init__(self, shape: SlotsShape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        is_float8 = shape.pool_item_bytes == 1
        size = shape.head_size * BLOCK_SIZE
        self.pool = torch.zeros(
            (shape.num_blocks, shape.num_layers, 2, shape.num_kv_heads, size),
            dtype=torch.uint8 if is_float8 else torch.bfloat16,
            device="cuda",
        )
        self.tokens = random_tensor(shape.num_layers, 2, shape.num_tokens, shape.num_kv_heads, shape.head_size)
        blocks = torch.randperm(shape.num_blocks)
        offsets = torch.arange(BLOCK_SIZE) if shape.is_prompt else torch.randint(BLOCK_SIZE, (shape.num_blocks, 1))
        self.slots = (blocks[:, None] * BLOCK_SIZE + offsets).flatten().cuda()
        self.scale = torch.full((shape.num_kv_heads,), K_SCALE, device="cuda") if is_float8 else None
        self.copied = torch.zeros((2, shape.num_layers, shape.num_bytes // 2), dtype=torch.uint8, device="cuda")

    def write(self, layer: int) -> None:
        """Launch the write of a layer on torch's current stream."""
        scale = None if self.scale is None else device_array(self.scale)
        cuda.write_kv(
            DeviceArray(self.pool.data_ptr(), tuple(self.pool.shape), self.shape.dtype, self.pool.device.index),
            layer,
            device_array(self.slots),
            device_array(self.tokens[layer, 0]),
            device_array(self.tokens[layer, 1]),
            k_scale=scale,
            v_scale=scale,
            stream=torch.cuda.current_stream().cuda_stream,
        )

    def copy(self, layer: int) -> None:
        self.copied[1, layer].copy_(self.copied[0, layer])

    def expected(self, layer: int) -> torch.Tensor:
        """Return the layer that a write into zeros leaves."""
        shape = self.shape
        tokens = self.tokens[layer]
        if self.scale is not None:
            tokens = (tokens.float() / K_SCALE).to(torch.float8_e4m3fn).view(torch.uint8)
        pieces = 16 // shape.pool_item_bytes
        blocks, offsets = self.slots // BLOCK_SIZE, self.slots % BLOCK_SIZE
        layout = (shape.num_blocks, shape.num_kv_heads)
        keys = torch.zeros((*layout, shape.head_size // pieces, BLOCK_SIZE, pieces), dtype=tokens.dtype, device="cuda")
        values = torch.zeros((*layout, shape.head_size, BLOCK_SIZE), dtype=tokens.dtype, device="cuda")
        keys[blocks, :, :, offsets] = tokens[0].view(*tokens[0].shape[:2], -1, pieces)
        values[blocks, :, :, offsets] = tokens[1]
        return torch.stack([keys.flatten(2), values.flatten(2)], dim=1)

    def check(self, layer: int) -> None:
        """Raise InternalError unless the layer is what was written into it."""
        if not torch.equal(self.pool[:, layer], self.expected(layer)):
            raise InternalError(f"{self.shape.name}: the pool does not hold what was written")


def graph_of(bench: SlotsBench, call: Callable[[int], None]) -> torch.cuda.CUDAGraph:
    return cuda_harness.graph_of(call, bench.shape.num_layers, bench.shape.num_calls)


def measure_slots(shape: SlotsShape, rounds: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    bench = SlotsBench(shape)
    for layer in (0, shape.num_layers - 1):
        bench.write(layer)
        bench.check(layer)
    graphs = {"write": graph_of(bench, bench.write), "copy": graph_of(bench, bench.copy)}
    bench.pool.zero_()
    graphs["write"].replay()
    bench.check(shape.num_layers - 1)
    seconds = cuda_harness.device_seconds({name: graph.replay for name, graph in graphs.items()}, rounds)
    write_s, copy_s = (seconds[name] / shape.num_calls for name in ("write", "copy"))
    return {
        "name": shape.name,
        **asdict(shape),
        "write_us": write_s * 1e6,
        "copy_us": copy_s * 1e6,
        "write_gb_per_s": shape.num_bytes / write_s / 1e9,
        "copy_gb_per_s": shape.num_bytes / copy_s / 1e9,
        "share_of_copy": copy_s / write_s,
    }


def run_slots(quick: bool) -> dict[str, Any]:
    """Return for each shape: `write_us`, `copy_us`, `write_gb_per_s` and `copy_gb_per_s` (bytes read plus written), and
    `share_of_copy`."""
    cuda_harness.require_device()
    return {**cuda_harness.versions(), "shapes": [measure_slots(shape, 5 if quick else 25) for shape in SHAPES]}


def render_slots(results: dict[str, Any], console: Console) -> None:
    rows = table(
        f"write_kv, {results['device']}; GB/s of bytes read plus written",
        ("pool, heads, tokens",),
        ("us", "copy us", "GB/s", "copy GB/s", "of copy"),
    )
    for shape in results["shapes"]:
        rows.add_row(
            shape["name"],
            f"{shape['write_us']:.1f}",
            f"{shape['copy_us']:.1f}",
            f"{shape['write_gb_per_s']:.0f}",
            f"{shape['copy_gb_per_s']:.0f}",
            f"{shape['share_of_copy']:.2f}",
        )
    console.print(rows)


# ---- swapping of whole blocks between the device's pool and pinned memory, alone and during a decode
#
# Blocks are those of Llama-3-8B: 32 layers, 8 KV heads of 128, bfloat16, 16 tokens, 2 MiB. Block ids are random on both
# sides. First, blocks that were swapped out and back to other blocks are compared. The ceiling is one large copy in
# each direction.

NUM_LAYERS = 32
BLOCK_BYTES = NUM_LAYERS * 2 * 8 * 128 * 16 * 2
DECODE, QUICK_DECODE = (64, 4096), (16, 1024)
# Blocks copied by one call. One half of the swap blocks moves out while the other half moves in.
CALL_BLOCKS, QUICK_CALL_BLOCKS = 512, 64
# Blocks copied by one call during a decode.
STREAM_BLOCKS = 32

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Side:
    """Blocks of one direction: ids in the device's pool, and as many in the host's."""

    device_ids: Ids
    host_ids: Ids

    def parts(self, size: int) -> Iterator[Side]:
        for start in range(0, self.device_ids.size, size):
            yield Side(self.device_ids[start : start + size], self.host_ids[start : start + size])


@dataclass(frozen=True)
class SwapBench:
    pool: torch.Tensor  # [num_blocks, num_layers, 2, 8, 2048] on the device
    host: torch.Tensor  # the same, pinned
    decode: Inputs
    leaving: Side
    coming: Side

    def swap_out(self, side: Side) -> None:
        self._copy(self.pool, self.host, side.device_ids, side.host_ids)

    def swap_in(self, side: Side) -> None:
        self._copy(self.host, self.pool, side.host_ids, side.device_ids)

    @staticmethod
    def _copy(src: torch.Tensor, dst: torch.Tensor, src_ids: Ids, dst_ids: Ids) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        cuda.copy_blocks(pool_array(src), pool_array(dst), src_ids, dst_ids, stream=stream)


def pool_array(pool: torch.Tensor) -> DeviceArray:
    return DeviceArray(pool.data_ptr(), tuple(pool.shape), "bfloat16", pool.device.index if pool.is_cuda else HOST)


def run_swap(quick: bool = False) -> dict[str, Any]:
    """Return `gb_per_s` of `swap_out`, `swap_in` and `both` (per direction, at once), the same for one large copy in
    `ceilings`, and `decode`: `alone_us` and `beside_us` of a layer's call, `loss` (a fraction), and `out_gb_per_s` and
    `in_gb_per_s` of the swaps during the decode.
    """
    cuda_harness.require_device()
    rounds = 3 if quick else 9
    bench = make_bench(quick)
    check_swapped(bench)
    call_bytes = bench.leaving.device_ids.size * BLOCK_BYTES
    both = Both(lambda: bench.swap_out(bench.leaving), lambda: bench.swap_in(bench.coming))
    works: dict[str, Callable[[], object]] = {
        "swap_out": lambda: bench.swap_out(bench.leaving),
        "swap_in": lambda: bench.swap_in(bench.coming),
        "both": both,
    }
    seconds = cuda_harness.device_seconds(works, rounds)
    return {
        **cuda_harness.versions(),
        "block_bytes": BLOCK_BYTES,
        "decode_shape": bench.decode.shape.name,
        "blocks_per_call": bench.leaving.device_ids.size,
        "ceilings": cuda_harness.ceilings(rounds) | link_both_ways(rounds),
        "gb_per_s": {name: call_bytes / taken / 1e9 for name, taken in seconds.items()},
        "decode": beside_decode(bench, rounds),
    }


def make_bench(quick: bool) -> SwapBench:
    num_seqs, context = QUICK_DECODE if quick else DECODE
    call_blocks = QUICK_CALL_BLOCKS if quick else CALL_BLOCKS
    shape = Shape("decode", "bfloat16", (context,) * num_seqs, f"{num_seqs}x{context}")
    decode_blocks = sum(shape.blocks)
    torch.manual_seed(0)
    size = (decode_blocks + 2 * call_blocks, NUM_LAYERS, 2, 8, 128 * 16)
    pool = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    for part in torch.split(pool, 1024):
        part.normal_()
    host = torch.ones((2 * call_blocks, *pool.shape[1:]), dtype=torch.bfloat16, pin_memory=True)
    ids = np.random.default_rng(0).permutation(pool.shape[0]).astype(np.int32)
    host_ids = np.random.default_rng(1).permutation(host.shape[0]).astype(np.int32)
    swapped = ids[decode_blocks:]
    sides = [Side(swapped[half], host_ids[half]) for half in (slice(None, call_blocks), slice(call_blocks, None))]
    tables = torch.from_numpy(ids[:decode_blocks].reshape(num_seqs, -1)).cuda()
    return SwapBench(pool, host, decode_inputs(shape, pool, tables), *sides)


def decode_inputs(shape: Shape, pool: torch.Tensor, tables: torch.Tensor) -> Inputs:
    return Inputs(
        shape=shape,
        pool=pool,
        pages=None,
        query=random_tensor(shape.num_seqs, shape.num_heads, shape.head_size),
        query_lens=torch.ones(shape.num_seqs, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        context_lens=torch.tensor(shape.contexts, dtype=torch.int32, device="cuda"),
        k_scale=None,
        v_scale=None,
    )


def check_swapped(bench: SwapBench) -> None:
    """Check that blocks keep their content when they are swapped out and back to other blocks."""
    bench.swap_out(bench.leaving)
    bench.swap_in(Side(bench.coming.device_ids, bench.leaving.host_ids))
    torch.cuda.synchronize()
    for start in range(0, bench.leaving.device_ids.size, 256):
        some = slice(start, start + 256)
        left, came = (torch.from_numpy(side.device_ids[some]).long().cuda() for side in (bench.leaving, bench.coming))
        if not torch.equal(bench.pool[left], bench.pool[came]):
            raise InternalError("blocks that were swapped out and in are not what they were")
    # The other half of the host's blocks gets content, too.
    bench.swap_out(bench.coming)
    torch.cuda.synchronize()


class Both:
    """Run two pieces of work concurrently on two streams. The current stream waits for both."""

    def __init__(self, *works: Callable[[], object]) -> None:
        self._works = [(work, cuda_harness.new_stream()) for work in works]

    def __call__(self) -> None:
        main = torch.cuda.current_stream()
        for work, stream in self._works:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                work()
        for _, stream in self._works:
            main.wait_stream(stream)


def link_both_ways(rounds: int) -> dict[str, float]:
    """Return GB/s per direction of two concurrent large copies."""
    size = cuda_harness.LINK_BYTES
    hosts = [torch.ones(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    both = Both(
        lambda: hosts[0].copy_(devices[0], non_blocking=True), lambda: devices[1].copy_(hosts[1], non_blocking=True)
    )
    seconds = cuda_harness.device_seconds({"both": both}, rounds)
    return {"both_gb_per_s": cuda_harness.LINK_BYTES / seconds["both"] / 1e9}


def beside_decode(bench: SwapBench, rounds: int) -> dict[str, float]:
    """Measure a layer's decode call, alone and during swaps in both directions at full speed."""
    out, scratch = torch.full_like(bench.decode.query, math.nan), TorchScratch()
    num_calls = 4 * NUM_LAYERS
    graph = cuda_harness.graph_of(
        lambda layer: bench.decode.attend(layer, out, scratch, "auto", invariant=False), NUM_LAYERS, num_calls
    )
    graph.replay()
    error = relative_error(bench.decode, NUM_LAYERS - 1, out)
    if not error <= MAX_ERROR:
        raise InternalError(f"wrong result of the decode: relative error {error:.3g}")
    alone_s = cuda_harness.device_seconds({"decode": graph.replay}, rounds)["decode"]
    with SwapThread(bench.swap_out, bench.leaving) as out_way, SwapThread(bench.swap_in, bench.coming) as in_way:
        start = (time.perf_counter(), out_way.bytes, in_way.bytes)
        beside_s = cuda_harness.device_seconds({"decode": graph.replay}, rounds)["decode"]
        seconds, left, came = (
            now - then for now, then in zip((time.perf_counter(), out_way.bytes, in_way.bytes), start, strict=True)
        )
    return {
        "alone_us": alone_s / num_calls * 1e6,
        "beside_us": beside_s / num_calls * 1e6,
        "loss": beside_s / alone_s - 1,
        "relative_error": error,
        "out_gb_per_s": left / seconds / 1e9,
        "in_gb_per_s": came / seconds / 1e9,
    }


class SwapThread:
    """Copies the blocks of one direction repeatedly, from its own thread on its own stream, two calls ahead of the
    device. `bytes` counts the completed copies."""

    def __init__(self, swap: Callable[[Side], object], side: Side) -> None:
        self.bytes = 0
        self._swap, self._parts = swap, [*side.parts(STREAM_BLOCKS)]
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._work = self._thread.submit(self._run)
        while not self._started.wait(0.1):
            if self._work.done():
                self._work.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._work.result()
        self._thread.shutdown()

    def _run(self) -> None:
        stream = cuda_harness.new_stream()
        with torch.cuda.stream(stream):
            ahead: deque[tuple[torch.cuda.Event, int]] = deque()
            for part in itertools.cycle(self._parts):
                if self._stop.is_set():
                    break
                self._swap(part)
                ahead.append((stream.record_event(), part.device_ids.size * BLOCK_BYTES))
                if len(ahead) > 2:
                    event, num_bytes = ahead.popleft()
                    event.synchronize()
                    self.bytes += num_bytes
                    self._started.set()
        stream.synchronize()


def render_swap(results: dict[str, Any], console: Console) -> None:
    limits, rates, decode = results["ceilings"], results["gb_per_s"], results["decode"]
    title = f"{results['device']}, blocks of {results['block_bytes'] / 2**20:g} MiB"
    rows = table(title, ("",), ("GB/s", "one copy GB/s", "of it"))
    for name, rate, limit in (
        ("swap out", rates["swap_out"], limits["device_to_host_gb_per_s"]),
        ("swap in", rates["swap_in"], limits["host_to_device_gb_per_s"]),
        ("both at once, each way", rates["both"], limits["both_gb_per_s"]),
        ("out, beside a decode", decode["out_gb_per_s"], limits["both_gb_per_s"]),
        ("in, beside a decode", decode["in_gb_per_s"], limits["both_gb_per_s"]),
    ):
        rows.add_row(name, f"{rate:.1f}", f"{limit:.1f}", f"{rate / limit:.0%}")
    console.print(rows)
    console.print(
        f"decode {results['decode_shape']}: {decode['alone_us']:.1f} us alone, {decode['beside_us']:.1f} us beside "
        f"swaps both ways: {decode['loss']:.1%} lost"
    )
