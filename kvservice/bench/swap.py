"""Swapping of whole blocks between the device's pool and pinned memory, alone and during a decode.

Blocks are those of Llama-3-8B: 32 layers, 8 KV heads of 128, bfloat16, 16 tokens, 2 MiB. Block ids are random on both
sides. First, blocks that were swapped out and back to other blocks are compared. The ceiling is one large copy in each
direction.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from kvservice.bench import cuda_timing
from kvservice.bench.cuda_inputs import MAX_ERROR, Inputs, TorchScratch, random_tensor, relative_error
from kvservice.bench.cuda_shapes import Shape
from kvservice.bench.harness import table
from kvservice.errors import InternalError
from kvservice.ops import cuda
from kvservice.ops.cuda import HOST, DeviceArray

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


def run(quick: bool = False) -> dict[str, Any]:
    """Return `gb_per_s` of `swap_out`, `swap_in` and `both` (per direction, at once), the same for one large copy in
    `ceilings`, and `decode`: `alone_us` and `beside_us` of a layer's call, `loss` (a fraction), and `out_gb_per_s` and
    `in_gb_per_s` of the swaps during the decode.
    """
    cuda_timing.require_device()
    rounds = 3 if quick else 9
    bench = make_bench(quick)
    check(bench)
    call_bytes = bench.leaving.device_ids.size * BLOCK_BYTES
    both = Both(lambda: bench.swap_out(bench.leaving), lambda: bench.swap_in(bench.coming))
    works: dict[str, Callable[[], object]] = {
        "swap_out": lambda: bench.swap_out(bench.leaving),
        "swap_in": lambda: bench.swap_in(bench.coming),
        "both": both,
    }
    seconds = cuda_timing.device_seconds(works, rounds)
    return {
        **cuda_timing.versions(),
        "block_bytes": BLOCK_BYTES,
        "decode_shape": bench.decode.shape.name,
        "blocks_per_call": bench.leaving.device_ids.size,
        "ceilings": cuda_timing.ceilings(rounds) | link_both_ways(rounds),
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


def check(bench: SwapBench) -> None:
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
        self._works = [(work, cuda_timing.new_stream()) for work in works]

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
    size = cuda_timing.LINK_BYTES
    hosts = [torch.ones(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    both = Both(
        lambda: hosts[0].copy_(devices[0], non_blocking=True), lambda: devices[1].copy_(hosts[1], non_blocking=True)
    )
    seconds = cuda_timing.device_seconds({"both": both}, rounds)
    return {"both_gb_per_s": cuda_timing.LINK_BYTES / seconds["both"] / 1e9}


def beside_decode(bench: SwapBench, rounds: int) -> dict[str, float]:
    """Measure a layer's decode call, alone and during swaps in both directions at full speed."""
    out, scratch = torch.full_like(bench.decode.query, math.nan), TorchScratch()
    num_calls = 4 * NUM_LAYERS
    graph = cuda_timing.graph_of(
        lambda layer: bench.decode.attend(layer, out, scratch, "auto", invariant=False), NUM_LAYERS, num_calls
    )
    graph.replay()
    error = relative_error(bench.decode, NUM_LAYERS - 1, out)
    if not error <= MAX_ERROR:
        raise InternalError(f"wrong result of the decode: relative error {error:.3g}")
    alone_s = cuda_timing.device_seconds({"decode": graph.replay}, rounds)["decode"]
    with SwapThread(bench.swap_out, bench.leaving) as out_way, SwapThread(bench.swap_in, bench.coming) as in_way:
        start = (time.perf_counter(), out_way.bytes, in_way.bytes)
        beside_s = cuda_timing.device_seconds({"decode": graph.replay}, rounds)["decode"]
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
        stream = cuda_timing.new_stream()
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


def render(results: dict[str, Any], console: Console) -> None:
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
