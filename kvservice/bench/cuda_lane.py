"""Cost of a decode step of 32 layers for a client of a daemon with a GPU, in units of its kernels alone.

The kernels alone are those of the daemon, on the same blocks, launched by this process as one CUDA graph. All
transports take turns, with one step each. The figures do not include the opening of the step, which is one call.

A step as one graph is a part of a run of GRAPH_STEPS: opening the run, its commits and its end are included. The host
knows the tokens of a step one step later, as an engine that samples them on the GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console

from kvservice.bench import cuda_harness, quantiles, seconds_of, table, take_turns, transports
from kvservice.bench.cuda_harness import TorchScratch, device_array, random_tensor
from kvservice.client import KVClient, Sequence, Session, SharedRegion, Step
from kvservice.client.decode_graph import DecodeGraph
from kvservice.client.step import Transport
from kvservice.client.transports.lane import LaneTransport
from kvservice.client.transports.mapped import MappedTransport
from kvservice.client.transports.region import RegionTransport
from kvservice.launch import Daemon
from kvservice.ops import cuda, torch_cuda

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 32, 8, 128, 16
# Steps of a run with the whole step as one graph, and how many of them are committed at once.
GRAPH_STEPS, COMMITTED_STEPS = 64, 16
SHAPES = {"64x4096": (64, 4096), "1x1024": (1, 1024)}
POOL: dict[str, Any] = {
    "device": "cuda",
    "num_layers": NUM_LAYERS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_SIZE,
    "dtype": "bfloat16",
    "block_size": BLOCK_SIZE,
    "num_blocks": sum(
        num_seqs * ((length + GRAPH_STEPS + 2 * COMMITTED_STEPS) // BLOCK_SIZE + 2)
        for num_seqs, length in SHAPES.values()
    ),
    "swap_space_gib": 0.0,
    "enable_prefix_caching": False,
    "max_sequence_tokens": 8192,
    "share_pool": "write",
}
LABELS = {
    "kernels": "the kernels alone",
    "graph": "mapped pool, the client's step as one graph",
    "mapped": "mapped pool",
    "lane": "lane, tensors in a region of the GPU",
    "lane_copied": "lane, tensors elsewhere on the GPU",
    "lane_host": "lane, tensors in a region of the host",
    "region_host": "stream, tensors in a region of the host",
}


@dataclass
class StepTensors:
    query: Any
    key: Any
    value: Any
    out: Any

    @staticmethod
    def of(num_seqs: int, empty: Callable[[tuple[int, ...], int], Any]) -> StepTensors:
        """`empty(shape, offset)` returns an array to fill."""
        arrays, offset = [], 0
        for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS):
            arrays.append(empty((num_seqs, num_heads, HEAD_SIZE), offset))
            offset += arrays[-1].nbytes
        for array in arrays:
            values = np.random.default_rng(0).standard_normal(array.shape, np.float32)
            array[...] = torch.from_numpy(values) if isinstance(array, torch.Tensor) else values
        return StepTensors(*arrays)


def in_memory(memory: SharedRegion) -> Callable[[tuple[int, ...], int], Any]:
    return lambda shape, offset: memory.array(shape, "bfloat16", offset)


def on_gpu(shape: tuple[int, ...], _: int) -> Any:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda:0")


class LaneBench:
    """A session with the mapped transport, its sequences, and the transports to measure on their steps."""

    def __init__(self, session: Session, num_seqs: int, length: int) -> None:
        self.session = session
        core = session._core
        mapped = core.calls.transport
        assert isinstance(mapped, MappedTransport), "transport=mapped was asked for"
        self.pool = mapped.pool
        # The length before the last token. The blocks have random content, like the whole pool.
        random = np.random.default_rng(0)
        prompts = [random.integers(0, 50_000, length - 1).tolist() for _ in range(num_seqs)]
        # One by one, because together they exceed the tokens of one request.
        self.sequences: list[Sequence] = [session.allocate(prompt) for prompt in prompts]
        for sequence in self.sequences:
            session.commit(session.open_step([sequence]))
        size = 2 * num_seqs * (NUM_HEADS + NUM_KV_HEADS) * HEAD_SIZE * 2
        lane = mapped.rest
        assert isinstance(lane, LaneTransport), "the daemon allows it"
        gpu = StepTensors.of(num_seqs, in_memory(session.create_region(size, device=0)))
        elsewhere = StepTensors.of(num_seqs, on_gpu)
        host = StepTensors.of(num_seqs, in_memory(session.create_region(size)))
        self.ways: dict[str, tuple[Transport, StepTensors]] = {
            "mapped": (mapped, elsewhere),
            "lane": (lane, gpu),
            "lane_copied": (lane, elsewhere),
            "lane_host": (lane, host),
            "region_host": (RegionTransport(core.context), host),
        }
        self._graph = DecodeGraph(session, num_seqs, length + GRAPH_STEPS + 2 * COMMITTED_STEPS)
        self._graph.capture(partial(self._graph_step, elsewhere))

    def open_step(self) -> Step:
        return self.session.append(self.sequences, [7] * len(self.sequences))

    def close_step(self) -> None:
        for sequence in self.sequences:
            self.session.truncate(sequence, sequence.length - 1)

    def _graph_step(self, tensors: StepTensors) -> None:
        for layer in range(NUM_LAYERS):
            self._graph.attend(layer, tensors.query, tensors.key, tensors.value, out=tensors.out)

    def _graph_run(self) -> float:
        """Return the seconds of one step of a run."""
        tokens = [7] * len(self.sequences)
        lengths = [sequence.length for sequence in self.sequences]
        done: list[Any] = []  # an event for each step whose tokens the host does not know
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._graph.begin(self.sequences, COMMITTED_STEPS)
        for number in range(GRAPH_STEPS):
            self._graph.replay()
            done.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            done[-1].record()
            if number > 0:
                done.pop(0).synchronize()
                self._graph.written(tokens)
        done.pop().synchronize()
        self._graph.written(tokens)
        self._graph.end()
        seconds = time.perf_counter() - start
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self.session.truncate(sequence, length)
        return seconds / GRAPH_STEPS

    def step(self, way: str) -> float:
        """Seconds."""
        if way == "graph":
            return self._graph_run()
        step = self.open_step()
        if way == "kernels":
            seconds = self._kernels(step)
        else:
            transport, tensors = self.ways[way]
            self.session._core.calls.transport = transport
            torch.cuda.synchronize()
            start = time.perf_counter()
            for layer in range(NUM_LAYERS):
                step.decode(layer, tensors.query, tensors.key, tensors.value, out=tensors.out)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        self.close_step()
        return seconds

    def _kernels(self, step: Step) -> float:
        mapped, (_, tensors) = self.pool.step(step), self.ways["mapped"]
        arrays = mapped.slot_mapping, mapped.query_lens, mapped.block_tables, mapped.context_lens
        slots, query_lens, block_tables, context_lens = (torch.from_numpy(array.copy()).cuda() for array in arrays)

        def launch() -> None:
            for layer in range(NUM_LAYERS):
                torch_cuda.write_kv(self.pool.pool, layer, slots, tensors.key, tensors.value)
                torch_cuda.attend(
                    tensors.out, None, self.pool.pool, layer, tensors.query, query_lens, block_tables, context_lens,
                    max_query_len=1,
                )  # fmt: skip

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for event in (start, end):  # warm-up, because the first replay is slower
            event.record()
            graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def run(quick: bool) -> dict[str, Any]:
    """Return `<shape>_<way>_<p50_s|p99_s>` for a step of 32 layers."""
    cuda_harness.require_device()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0)}
    with contextlib.ExitStack() as cleanup:
        daemon = cleanup.enter_context(Daemon(**POOL))
        client = cleanup.enter_context(KVClient(daemon.address, transport="mapped"))
        with client.session("fill") as session:
            session.map_pool(writable=True).pool.normal_()
            torch.cuda.synchronize()
        for shape, (num_seqs, length) in SHAPES.items():
            with client.session(shape) as session:
                samples = measure(LaneBench(session, num_seqs, length), 5 if quick else 40)
            for way, seconds in samples.items():
                results |= quantiles(f"{shape}_{way}", seconds)
    return results


def measure(bench: LaneBench, rounds: int) -> dict[str, list[float]]:
    return take_turns({way: partial(bench.step, way) for way in LABELS}, rounds, warm_ups=1)


def render(results: dict[str, Any], console: Console) -> None:
    title = f"A decode step of {NUM_LAYERS} layers, {results['device']}, ms; in brackets: in units of its kernels alone"
    rows = table(title, ("sequences x context", "way"), ("p50", "p99"))
    for shape in SHAPES:
        rows.add_section()
        base = results[f"{shape}_kernels_p50_s"]
        for way, label in LABELS.items():
            p50, p99 = results[f"{shape}_{way}_p50_s"], results[f"{shape}_{way}_p99_s"]
            rows.add_row(shape, label, f"{p50 * 1e3:.3f} ({p50 / base:.2f})", f"{p99 * 1e3:.3f}")
    console.print(rows)


# ---- the work of a layer without a daemon, for `bench rpc`: launched and awaited, on tensors in device memory


class CudaNativeWay:
    """As NativeWay. `num_tokens` is by size."""

    def __init__(self, num_tokens: Mapping[str, int]) -> None:
        """Raises FailedPreconditionError if there is no device."""
        cuda_harness.require_device()
        sizes = (1 + max(num_tokens.values()), transports.NUM_LAYERS, 2, transports.NUM_KV_HEADS)
        self._pool = random_tensor(*sizes, transports.HEAD_SIZE * transports.BLOCK_SIZE)
        self._num_tokens = num_tokens
        self._scratch = TorchScratch()

    def step(self, size: str) -> list[float]:
        """See Way."""
        num_tokens = self._num_tokens[size]
        heads = (transports.NUM_HEADS, transports.NUM_KV_HEADS, transports.NUM_KV_HEADS, transports.NUM_HEADS)
        tensors = [random_tensor(num_tokens, count, transports.HEAD_SIZE) for count in heads]
        tables = [torch.from_numpy(array).cuda() for array in transports.native_tables(num_tokens)]
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream()
        pool, query, key, value, out = (device_array(tensor) for tensor in (self._pool, *tensors))
        slots, query_lens, block_tables, context_lens = (device_array(table) for table in tables)

        def layer(number: int) -> None:
            cuda.write_kv(pool, number, slots, key, value, stream=stream.cuda_stream)
            cuda.attention(
                pool,
                number,
                query,
                query_lens,
                block_tables,
                context_lens,
                max_query_len=1,
                num_common_blocks=1,
                out=out,
                workspace=self._scratch,
                stream=stream.cuda_stream,
            )
            stream.synchronize()

        return [seconds_of(partial(layer, number)) for number in range(transports.NUM_LAYERS)]
