"""The benches on a CUDA device share this: timing, shapes of attention, inputs, and attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from kvservice.bench import attention_rows, largest_error, medians, sampled, take_turns
from kvservice.errors import FailedPreconditionError
from kvservice.ops import cuda
from kvservice.ops.cuda import DeviceArray, Kernel

# ---- timing, by graphs of many calls that are replayed in turns between two events; and the bandwidth of plain copies
# in device memory and over the host link


DEVICE_COPY_BYTES = 2 << 30
LINK_BYTES = 1 << 30


def require_device() -> None:
    if not cuda.load_extension().device_count():
        raise FailedPreconditionError("no CUDA device")
    if not torch.cuda.is_available():
        raise FailedPreconditionError("no CUDA device that torch can use: it was built without CUDA, or for another")


def versions() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"device": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda}


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def graph_of(call: Callable[[int], object], num_layers: int, num_calls: int) -> torch.cuda.CUDAGraph:
    """Capture `num_calls` calls, each on the next layer. The very first call runs before the capture."""
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for index in range(num_calls):
            call(index % num_layers)
    return graph


def device_seconds(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each work by the device's clock. The works take turns."""
    return medians(take_turns({name: partial(elapsed_s, work) for name, work in works.items()}, rounds, warm_ups=1))


def elapsed_s(work: Callable[[], object]) -> float:
    """Return the seconds between events around the work that `work` enqueues on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def ceilings(rounds: int) -> dict[str, float]:
    """Return GB/s of a plain copy within the device (bytes read plus written), and of the host link per direction."""
    source = torch.ones(DEVICE_COPY_BYTES, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    pinned = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    part = source[:LINK_BYTES]
    seconds = device_seconds(
        {
            "device_copy": lambda: copy.copy_(source),
            "host_to_device": lambda: part.copy_(pinned, non_blocking=True),
            "device_to_host": lambda: pinned.copy_(part, non_blocking=True),
        },
        rounds,
    )
    return {
        "device_copy_gb_per_s": 2 * DEVICE_COPY_BYTES / seconds["device_copy"] / 1e9,
        "host_to_device_gb_per_s": LINK_BYTES / seconds["host_to_device"] / 1e9,
        "device_to_host_gb_per_s": LINK_BYTES / seconds["device_to_host"] / 1e9,
    }


# ---- shapes, with their memory traffic and arithmetic

BLOCK_SIZE = 16
# The layers of a measurement together are several times the size of the largest L2 (50 to 60 MB on Hopper), so that no
# layer is in L2 when it is used again.
ROTATION_BYTES = 320 << 20
# Long enough to make the launch of a graph negligible.
GRAPH_S = 2e-3
LEAST_CALLS, MAX_CALLS = 4, 2000

# Estimated rates of a device, only for the length of a graph.
_BYTES_PER_S, _FLOP_PER_S, _CALL_S = 4e12, 5e14, 3e-6

SHORT_NAMES = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}


@dataclass(frozen=True)
class Shape:
    """`contexts` are the lengths of the sequences, including the last `query_len` tokens. `dtype` is the pool's. All
    shapes of a `family` can be selected by its name."""

    kind: Literal["decode", "extend"]
    dtype: str
    contexts: tuple[int, ...]
    lengths: str
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    query_len: int = 1
    block_size: int = BLOCK_SIZE
    family: str = "grid"

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}"
        return f"{self.kind} {SHORT_NAMES[self.dtype]} {heads} {self.lengths}"

    @property
    def item_size(self) -> int:
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def num_seqs(self) -> int:
        return len(self.contexts)

    @property
    def num_tokens(self) -> int:
        """Return the query tokens of one call."""
        return self.num_seqs * self.query_len

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(-(-context // self.block_size) for context in self.contexts)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of K and V of one layer, the minimum that a call reads."""
        return sum(self.contexts) * 2 * self.num_kv_heads * self.head_size * self.item_size

    @property
    def flop(self) -> int:
        """Return the multiplications and additions of a call's two products, over the attended keys of each query."""
        query = self.query_len
        pairs = sum(query * (context - query) + query * (query + 1) // 2 for context in self.contexts)
        return 4 * pairs * self.num_heads * self.head_size

    @property
    def num_layers(self) -> int:
        return -(-ROTATION_BYTES // self.kv_bytes)

    @property
    def num_calls(self) -> int:
        """Return the calls of one graph: all layers, repeated until it takes long enough."""
        call_s = max(self.kv_bytes / _BYTES_PER_S, self.flop / _FLOP_PER_S, _CALL_S)
        rounds = max(int(-(-GRAPH_S // (call_s * self.num_layers))), -(-LEAST_CALLS // self.num_layers))
        return self.num_layers * min(rounds, max(1, MAX_CALLS // self.num_layers))


# ---- K and V from N(0, 1) in a pool with random blocks, the same data in pages for a peer, and attention in float64

# The scale of keys in an FP8 pool. Values have none, because the peer would need an additional kernel for it.
K_SCALE = 0.25
# The block id in table entries past the context, which no kernel may read.
NO_BLOCK = 2**31 - 1
SAMPLED_SEQS, SAMPLED_TOKENS = 6, 16
# Inputs and weights are rounded to 8 bits of mantissa. The error of a wrong token, head or block is much larger.
MAX_ERROR = 0.02

_TORCH = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32", torch.int64: "int64"}


@dataclass
class TorchScratch:
    """Workspace for the launches of one stream."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cuda"))

    def reserve(self, num_bytes: int) -> int:
        if num_bytes > self.memory.numel():
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        return self.memory.data_ptr()


@dataclass(frozen=True)
class Inputs:
    shape: Shape
    pool: torch.Tensor  # [num_blocks, num_layers, 2, num_kv_heads, head_size * block_size]; 8-bit types as uint8
    pages: torch.Tensor | None  # [num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]: the same K and V
    query: torch.Tensor  # [num_tokens, num_heads, head_size]
    query_lens: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def attend(self, layer: int, out: torch.Tensor, scratch: TorchScratch, kernel: Kernel, invariant: bool) -> None:
        """Launch attention on torch's current stream."""
        cuda.attention(
            DeviceArray(self.pool.data_ptr(), tuple(self.pool.shape), self.shape.dtype, self.pool.device.index),
            layer,
            device_array(self.query),
            device_array(self.query_lens),
            device_array(self.block_tables),
            device_array(self.context_lens),
            max_query_len=self.shape.query_len,
            out=device_array(out),
            workspace=scratch,
            stream=torch.cuda.current_stream().cuda_stream,
            k_scale=None if self.k_scale is None else device_array(self.k_scale),
            v_scale=None if self.v_scale is None else device_array(self.v_scale),
            batch_invariant=invariant,
            kernel=kernel,
        )


def device_array(tensor: torch.Tensor) -> DeviceArray:
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), _NAMES[tensor.dtype], tensor.device.index)


def random_tensor(*shape: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def make_inputs(shape: Shape, seed: int, with_pages: bool, device: str = "cuda") -> Inputs:
    torch.manual_seed(seed)
    is_float8 = shape.item_size == 1
    num_blocks = sum(shape.blocks)
    sizes = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.head_size * shape.block_size)
    raw = torch.uint8 if is_float8 else _TORCH[shape.dtype]
    pool = torch.empty(sizes, dtype=raw, device=device)
    page = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
    pages = torch.empty((shape.num_layers, *page), dtype=raw, device=device) if with_pages else None
    for layer in range(shape.num_layers):
        fill_layer(shape, pool[:, layer], None if pages is None else pages[layer])
    scales = [torch.full((shape.num_kv_heads,), scale, device=device) for scale in (K_SCALE, 1.0)] if is_float8 else []
    return Inputs(
        shape=shape,
        pool=pool,
        pages=pages,
        query=random_tensor(shape.num_tokens, shape.num_heads, shape.head_size, device=device),
        query_lens=torch.full((shape.num_seqs,), shape.query_len, dtype=torch.int32, device=device),
        block_tables=make_tables(shape).to(device),
        context_lens=torch.tensor(shape.contexts, dtype=torch.int32, device=device),
        k_scale=scales[0] if scales else None,
        v_scale=scales[1] if scales else None,
    )


def make_tables(shape: Shape) -> torch.Tensor:
    ids = torch.randperm(sum(shape.blocks)).to(torch.int32)
    tables = torch.full((shape.num_seqs, max(shape.blocks)), NO_BLOCK, dtype=torch.int32)
    for table, own in zip(tables, torch.split(ids, list(shape.blocks)), strict=True):
        table[: own.numel()] = own
    return tables


def fill_layer(shape: Shape, pool: torch.Tensor, pages: torch.Tensor | None) -> None:
    """`pool` [num_blocks, 2, num_kv_heads, head_size * block_size], `pages` [num_blocks, 2, num_kv_heads, block_size,
    head_size]."""
    piece = 16 // shape.item_size
    size = (pool.shape[0], shape.num_kv_heads, shape.block_size, shape.head_size)
    for which, scale in enumerate((K_SCALE, 1.0)):
        stored = torch.randn(size, dtype=torch.bfloat16, device=pool.device)
        if shape.item_size == 1:
            stored = (stored / scale).to(_TORCH[shape.dtype]).view(torch.uint8)
        if pages is not None:
            pages[:, which] = stored
        pieces = stored.view(*size[:3], -1, piece) if which == 0 else stored
        pool[:, which] = pieces.transpose(2, 3).flatten(2)


def keys_and_values(inputs: Inputs, layer: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, `[num_kv_heads, context, head_size]` each, as stored numbers without scales."""
    shape = inputs.shape
    table = inputs.block_tables[seq, : shape.blocks[seq]].long()
    keys, values = inputs.pool[table, layer].unbind(1)
    rows = (table.numel(), shape.num_kv_heads)
    keys = keys.reshape(*rows, -1, shape.block_size, 16 // shape.item_size).permute(1, 0, 3, 2, 4).flatten(3)
    values = values.reshape(*rows, shape.head_size, shape.block_size).permute(1, 0, 3, 2)
    keys, values = (kv.flatten(1, 2)[:, : shape.contexts[seq]].view(_TORCH[shape.dtype]) for kv in (keys, values))
    return keys, values


def reference(inputs: Inputs, layer: int, seq: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the attention of some query tokens of a sequence, float64[len(tokens), num_heads, head_size]."""
    shape = inputs.shape
    keys, values = (kv.float().double() for kv in keys_and_values(inputs, layer, seq))
    query = inputs.query[seq * shape.query_len + tokens].double()
    positions = shape.contexts[seq] - shape.query_len + tokens
    hidden = torch.arange(shape.contexts[seq], device=tokens.device) > positions[:, None]
    scale = (1.0 if inputs.k_scale is None else K_SCALE) / math.sqrt(shape.head_size)
    rows: torch.Tensor = attention_rows(torch, query, keys, values, hidden, scale)
    return rows


def relative_error(inputs: Inputs, layer: int, out: torch.Tensor) -> float:
    """Return the largest |out - float64| / |float64| over the heads of sampled tokens of sampled sequences. It is
    infinite if any number of the whole output is not finite."""
    shape = inputs.shape
    if not bool(out.isfinite().all()):
        return math.inf
    order = sorted(range(shape.num_seqs), key=lambda seq: shape.contexts[seq])
    tokens = torch.tensor(sampled(shape.query_len, SAMPLED_TOKENS), device=out.device)
    worst = 0.0
    for seq in sampled(shape.num_seqs, SAMPLED_SEQS - 2, extra=(order[0], order[-1])):
        got = out[seq * shape.query_len + tokens].double()
        worst = max(worst, largest_error(got, reference(inputs, layer, seq, tokens)))
    return worst
