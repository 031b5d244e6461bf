"""Writing K and V of new tokens into the pool on a CUDA device, compared with a plain copy of as many bytes.

Every shape is compared with torch before it is timed. Times are by the device's clock, of graphs with many calls that
take turns with graphs of copies. Each call uses the next layer and the next tensors, so that none is in L2.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from kvservice.bench import cuda_timing
from kvservice.bench.cuda_inputs import K_SCALE, device_array, random_tensor
from kvservice.bench.cuda_shapes import BLOCK_SIZE, GRAPH_S, ROTATION_BYTES, SHORT_NAMES
from kvservice.bench.harness import table
from kvservice.errors import InternalError
from kvservice.ops import cuda
from kvservice.ops.cuda import DeviceArray

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
    return cuda_timing.graph_of(call, bench.shape.num_layers, bench.shape.num_calls)


def measure(shape: SlotsShape, rounds: int) -> dict[str, Any]:
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
    seconds = cuda_timing.device_seconds({name: graph.replay for name, graph in graphs.items()}, rounds)
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


def run(quick: bool) -> dict[str, Any]:
    """Return for each shape: `write_us`, `copy_us`, `write_gb_per_s` and `copy_gb_per_s` (bytes read plus written), and
    `share_of_copy`."""
    cuda_timing.require_device()
    return {**cuda_timing.versions(), "shapes": [measure(shape, 5 if quick else 25) for shape in SHAPES]}


def render(results: dict[str, Any], console: Console) -> None:
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
