"""K/V tensors in the layouts that vLLM's GPU backends use, one per layer, filled with random bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvservice.errors import InternalError

Tensors = dict[str, torch.Tensor]
HEAD_SIZE = 128
# The compressed K/V of a token in multi-head latent attention (DeepSeek): 512 numbers, and 64 for its position.
LATENT = 576


@dataclass(frozen=True)
class Model:
    """Sizes that decide how many bytes a block has. `num_kv_heads` does not matter for latent attention."""

    num_layers: int
    num_kv_heads: int
    block_size: int = 16


def kv_first(model: Model, num_blocks: int) -> Tensors:
    """FlashAttention: [2, blocks, block size, heads, head size]."""
    shape = (2, num_blocks, model.block_size, model.num_kv_heads, HEAD_SIZE)
    return {f"layer.{n}": _random(shape) for n in range(model.num_layers)}


def kv_in_block(model: Model, num_blocks: int) -> Tensors:
    """FlashInfer NHD, and FlashAttention in newer versions: [blocks, 2, block size, heads, head size]."""
    shape = (num_blocks, 2, model.block_size, model.num_kv_heads, HEAD_SIZE)
    return {f"layer.{n}": _random(shape) for n in range(model.num_layers)}


def heads_before_tokens(model: Model, num_blocks: int) -> Tensors:
    """FlashInfer HND: the shape of NHD, with heads before tokens in memory."""
    shape = (num_blocks, 2, model.num_kv_heads, model.block_size, HEAD_SIZE)
    return {f"layer.{n}": _random(shape).permute(0, 1, 3, 2, 4) for n in range(model.num_layers)}


def latent(model: Model, num_blocks: int) -> Tensors:
    """MLA: [blocks, block size, 576]."""
    return {f"layer.{n}": _random((num_blocks, model.block_size, LATENT)) for n in range(model.num_layers)}


def across_layers(model: Model, num_blocks: int) -> Tensors:
    """Uniform layers in one tensor: [blocks, layers, 2, block size, heads, head size]."""
    memory = _random((num_blocks, model.num_layers, 2, model.block_size, model.num_kv_heads, HEAD_SIZE))
    return {f"layer.{n}": memory[:, n] for n in range(model.num_layers)}


LAYOUTS: Mapping[str, Callable[[Model, int], Tensors]] = {
    "FlashAttention, K and V first": kv_first,
    "FlashInfer NHD, FlashAttention": kv_in_block,
    "FlashInfer HND": heads_before_tokens,
    "MLA": latent,
    "across layers": across_layers,
}


def check_equal(tensors: Tensors, num_blocks: int, some: list[int], others: list[int]) -> None:
    """Raise InternalError unless the blocks `some` and `others` have the same content, in this order."""
    for name, tensor in tensors.items():
        blocks = tensor.movedim(tensor.shape.index(num_blocks), 0).view(torch.int16)
        for first in range(0, len(some), 256):
            left, right = (
                blocks[torch.tensor(ids[first : first + 256], device=tensor.device)] for ids in (some, others)
            )
            if not torch.equal(left, right):
                raise InternalError(f"{name}: blocks that were saved and loaded are not what they were")


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    memory = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, out=memory.view(torch.int16))
    return memory
