"""K and V from N(0, 1) in a pool with random blocks, the same data in pages for a peer, and attention in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvservice.bench.cuda_shapes import Shape
from kvservice.bench.harness import attention_rows, largest_error, sampled
from kvservice.ops import cuda
from kvservice.ops.cuda import DeviceArray, Kernel

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
