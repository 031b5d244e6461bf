"""Paged attention on the CPU, in two units: the machine's read bandwidth, and torch's attention on contiguous K/V.

Every shape gets keys and values from N(0, 1), in a pool with blocks in random order and, for torch, contiguously.
The output is first compared with float64. Then both implementations, and plain reads of a large buffer, take turns.
Each call uses the next layer, so that no call finds its keys in a cache that is smaller than all layers together, and
so that a busy machine affects all of them equally. Without torch its columns are empty.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from kvservice import ops
from kvservice.bench import (
    Array,
    attention_rows,
    largest_error,
    medians,
    normal,
    sampled,
    seconds_of,
    table,
    take_turns,
)
from kvservice.pool.layout import DTYPES, PoolLayout

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

CEILING_BYTES = 1 << 30
# All layers are read before a layer is read again. Together they exceed the last-level cache.
DECODE_BYTES = 768 << 20
PAGE_BYTES = 4096
SAMPLED_TOKENS = 8


@dataclass(frozen=True)
class HostShape:
    kind: str  # decode: one new token per sequence; extend: query_len new tokens per sequence, causal
    dtype: str
    num_seqs: int
    context: int
    query_len: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of K and V that one call reads."""
        layout = PoolLayout(1, self.num_kv_heads, self.head_size, self.block_size, self.dtype)
        return self.num_seqs * self.context * layout.token_bytes

    @property
    def num_layers(self) -> int:
        return max(2, -(-DECODE_BYTES // self.layer_bytes)) if self.kind == "decode" else 1


SHAPES = (
    HostShape("decode", "bfloat16", 16, 4096),
    HostShape("decode", "float16", 16, 4096),
    HostShape("decode", "float32", 8, 4096),
    HostShape("decode", "bfloat16", 1, 65536),
    HostShape("decode", "bfloat16", 256, 256),
    HostShape("decode", "bfloat16", 4, 4096, num_kv_heads=32),
    HostShape("decode", "bfloat16", 32, 4096, num_heads=64, num_kv_heads=8, head_size=64),
    HostShape("decode", "bfloat16", 16, 4096, block_size=32),
    HostShape("decode", "bfloat16", 16, 4096, block_size=8),
    HostShape("decode", "bfloat16", 16, 4096, query_len=4),
    HostShape("extend", "bfloat16", 1, 2048, query_len=2048),
    HostShape("extend", "float16", 1, 2048, query_len=2048),
    HostShape("extend", "float32", 1, 2048, query_len=2048),
    HostShape("extend", "bfloat16", 4, 4096, query_len=128),
    HostShape("extend", "float32", 4, 4096, query_len=128),
)
QUICK_SHAPES = (SHAPES[0], HostShape("extend", "bfloat16", 1, 1024, query_len=1024))


@dataclass
class HostInputs:
    keys: Array  # [num_layers, num_seqs, num_kv_heads, context, head_size]
    values: Array
    pool: Array
    query: Array  # [num_seqs * query_len, num_heads, head_size]
    query_lens: Array
    block_tables: Array
    context_lens: Array

    def attend(self, layer: int, out: Array) -> None:
        ops.attention(self.pool, layer, self.query, self.query_lens, self.block_tables, self.context_lens, out=out)


def run(device: str = "cpu", quick: bool = False) -> dict[str, Any]:
    """Return the figures of every shape: `seconds`, `gb_per_s` (K and V once, per second), `ceiling_gb_per_s` (read
    bandwidth, measured in turns with it), `relative_error` against float64, `torch_sdpa_s` and `speedup_vs_sdpa` (null
    without torch). The top-level `ceiling_gb_per_s` is the median.
    """
    assert device == "cpu"
    if torch is not None:
        torch.set_num_threads(ops.num_threads())
    buffer = np.ones(CEILING_BYTES // 8)
    shapes = []
    with ThreadPoolExecutor(ops.num_threads()) as executor:
        for index, shape in enumerate(QUICK_SHAPES if quick else SHAPES):
            shapes.append(measure(shape, lambda: read_all(buffer, executor), seed=index, rounds=5 if quick else 9))
    return {
        "device": device,
        "isa": ops.cpu_isa(),
        "threads": ops.num_threads(),
        "ceiling_gb_per_s": statistics.median(shape["ceiling_gb_per_s"] for shape in shapes),
        "shapes": shapes,
    }


def measure(shape: HostShape, read: Callable[[], object], seed: int, rounds: int) -> dict[str, Any]:
    inputs = make_host_inputs(shape, np.random.default_rng(seed))
    out = np.full_like(inputs.query, np.nan)
    inputs.attend(0, out)
    error = relative_error(shape, inputs, out)
    contenders = {"ours": rotating(lambda layer: inputs.attend(layer, out), shape), "ceiling": lambda: seconds_of(read)}
    if torch is not None:
        contenders["sdpa"] = fastest_sdpa(shape, inputs)
    seconds = medians(take_turns(contenders, rounds))
    sdpa_s = seconds.get("sdpa")
    return {
        **asdict(shape),
        "seconds": seconds["ours"],
        "gb_per_s": shape.layer_bytes / seconds["ours"] / 1e9,
        "ceiling_gb_per_s": CEILING_BYTES / seconds["ceiling"] / 1e9,
        "relative_error": error,
        "torch_sdpa_s": sdpa_s,
        "speedup_vs_sdpa": None if sdpa_s is None else sdpa_s / seconds["ours"],
    }


def rotating(call: Callable[[int], object], shape: HostShape) -> Callable[[], float]:
    """Return a contender that calls with the next layer each time."""
    layers = itertools.cycle(range(shape.num_layers))
    return lambda: seconds_of(lambda: call(next(layers)))


def read_all(buffer: Array, executor: ThreadPoolExecutor) -> None:
    """Sum up the buffer with all threads, one part after the other, to measure the read bandwidth."""
    list(executor.map(np.sum, np.array_split(buffer, 16 * ops.num_threads())))


def make_host_inputs(shape: HostShape, rng: np.random.Generator) -> HostInputs:
    dtype = DTYPES[shape.dtype]
    size = (shape.num_layers, shape.num_seqs, shape.num_kv_heads, shape.context, shape.head_size)
    keys, values = (normal(*size, dtype=shape.dtype, rng=rng) for _ in range(2))
    blocks = shape.context // shape.block_size
    num_blocks = shape.num_seqs * blocks
    pool = page_aligned(
        (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.head_size * shape.block_size), dtype
    )
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(shape.num_seqs, blocks)
    slots = (tables[:, :, None] * np.int64(shape.block_size) + np.arange(shape.block_size)).reshape(shape.num_seqs, -1)
    for layer in range(shape.num_layers):
        for seq in range(shape.num_seqs):
            key, value = keys[layer, seq].swapaxes(0, 1), values[layer, seq].swapaxes(0, 1)
            ops.write_kv(pool, layer, slots[seq], key, value)
    num_tokens = shape.num_seqs * shape.query_len
    query = normal(num_tokens, shape.num_heads, shape.head_size, dtype=shape.dtype, rng=rng)
    lens = np.full(shape.num_seqs, shape.query_len, np.int32), np.full(shape.num_seqs, shape.context, np.int32)
    return HostInputs(keys, values, pool, query, lens[0], tables, lens[1])


def page_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def relative_error(shape: HostShape, inputs: HostInputs, out: Array) -> float:
    """Return the largest |out - float64| / |float64| over some queries of the first and the last sequence."""
    tokens = np.array(sampled(shape.query_len, SAMPLED_TOKENS))
    hidden = np.arange(shape.context) > shape.context - shape.query_len + tokens[:, None]
    worst = 0.0
    for seq in {0, shape.num_seqs - 1}:
        rows = seq * shape.query_len + tokens
        query, keys, values = (
            part.astype(np.float64) for part in (inputs.query[rows], inputs.keys[0, seq], inputs.values[0, seq])
        )
        expected = attention_rows(np, query, keys, values, hidden, shape.head_size**-0.5)
        worst = max(worst, largest_error(out[rows].astype(np.float64), expected))
    return worst


def fastest_sdpa(shape: HostShape, inputs: HostInputs) -> Callable[[], float]:
    """Return torch's attention on contiguous K/V, with grouped heads or repeated KV heads, whichever is faster.

    The call includes the repetition, because an engine's cache does not have repeated heads.
    """
    query = as_tensor(inputs.query).view(shape.num_seqs, shape.query_len, shape.num_heads, -1).transpose(1, 2)
    keys, values = as_tensor(inputs.keys), as_tensor(inputs.values)
    options: dict[str, Any] = {"is_causal": shape.query_len == shape.context}
    if 1 < shape.query_len < shape.context:
        past = shape.context - shape.query_len
        options["attn_mask"] = torch.ones(shape.query_len, shape.context, dtype=torch.bool).tril(past)
    attend = torch.nn.functional.scaled_dot_product_attention

    def grouped(layer: int) -> object:
        return attend(query, keys[layer], values[layer], enable_gqa=shape.group > 1, **options)

    def repeated(layer: int) -> object:
        key, value = (kv[layer].repeat_interleave(shape.group, 1) for kv in (keys, values))
        return attend(query, key, value, **options)

    contenders = {call.__name__: rotating(torch.inference_mode()(call), shape) for call in (grouped, repeated)}
    seconds = medians(take_turns(contenders, rounds=2))
    return contenders[min(seconds, key=seconds.__getitem__)]


def as_tensor(array: Array) -> torch.Tensor:
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def render(results: dict[str, Any], console: Console) -> None:
    title = f"{results['isa']}, {results['threads']} threads, read bandwidth {results['ceiling_gb_per_s']:.1f} GB/s"
    labels = ("", "seqs x (new, context)", "heads", "head x block", "dtype")
    rows = table(title, labels, ("ms", "GB/s", "of ceiling", "torch ms", "speedup", "error"))
    for shape in results["shapes"]:
        sdpa_s, speedup = shape["torch_sdpa_s"], shape["speedup_vs_sdpa"]
        rows.add_row(
            shape["kind"],
            f"{shape['num_seqs']} x ({shape['query_len']}, {shape['context']})",
            f"{shape['num_heads']}/{shape['num_kv_heads']}",
            f"{shape['head_size']} x {shape['block_size']}",
            shape["dtype"],
            f"{shape['seconds'] * 1e3:.2f}",
            f"{shape['gb_per_s']:.1f}",
            f"{shape['gb_per_s'] / shape['ceiling_gb_per_s']:.0%}" if shape["kind"] == "decode" else "",
            "" if sdpa_s is None else f"{sdpa_s * 1e3:.2f}",
            "" if speedup is None else f"{speedup:.2f}",
            f"{shape['relative_error']:.1e}",
        )
    console.print(rows)
