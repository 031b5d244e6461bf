"""Saves and loads of K/V blocks on a GPU by the vLLM connector's worker, which needs no vLLM.

A stand-in registers tensors in the layouts of vLLM's GPU backends, saves blocks to the mapped store of a daemon, and
loads them into other blocks, whose content is compared. Block ids are random. The ceiling of the link is one copy of
as many bytes of pinned memory in each round.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console

from kvservice.bench import cuda_harness, medians, table, take_turns
from kvservice.client import KVClient, Store, StoreNamespace
from kvservice.errors import InternalError
from kvservice.integrations.vllm.copies import block_layout
from kvservice.integrations.vllm.gpu_copies import block_copier
from kvservice.integrations.vllm.steps import BlockLoad, BlockSave, ConnectorStep
from kvservice.integrations.vllm.working import ConnectorWorker
from kvservice.launch import Daemon

# ---- K/V tensors in the layouts that vLLM's GPU backends use, one per layer, filled with random bytes


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


# ---- the measurement


# Models by the size of their blocks, about. MLA has no heads, so its layers are counted separately.
MODELS = {"2m": Model(32, 8), "256k": Model(32, 1), "32k": Model(4, 1)}
LATENT_MODELS = {"2m": Model(28, 0, 64), "256k": Model(14, 0), "32k": Model(2, 0)}
BATCH_BYTES, BATCH_BYTES_QUICK = 1 << 30, 64 << 20
ROUNDS, ROUNDS_QUICK = 7, 1
SHARES = {"write": "mapped for writing", "read": "mapped for reading"}
OPTIONS: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_size": 32,
    "num_blocks": 64,
    "swap_space_gib": 0.0,
    "store_gib": 4.0,
    "max_region_mib": 512,
}
TIMEOUT_S = 60.0


class StandIn:
    """The worker of an engine with as many blocks to save as `num_bytes` hold, and as many to load into."""

    def __init__(self, store_of: Callable[[StoreNamespace], Store], layout: str, size: str, num_bytes: int) -> None:
        model = (LATENT_MODELS if layout == "MLA" else MODELS)[size]
        block_bytes = block_layout(LAYOUTS[layout](model, 1), 1).block_bytes
        count = num_bytes // block_bytes
        self.num_bytes, self.block_bytes = count * block_bytes, block_bytes
        self._num_blocks = 2 * count
        self._tensors = LAYOUTS[layout](model, self._num_blocks)
        found = block_layout(self._tensors, self._num_blocks)
        rng = np.random.default_rng(0)
        ids = rng.permutation(self._num_blocks)
        self._saved, self._loaded = ids[:count], ids[count:]
        self._keys = rng.bytes(32 * count)
        self.store = store_of(StoreNamespace("bench", block_bytes, layout=layout))
        copier: Any = block_copier(found)
        self._worker = ConnectorWorker(self.store, copier, found.block_bytes)
        until = time.perf_counter() + TIMEOUT_S
        while not copier.has_locked:  # a thread locks the memory; what is not locked yet is copied twice
            if time.perf_counter() > until:
                raise InternalError("the memory of the store is not locked")
            time.sleep(0.01)

    def save_s(self) -> float:
        """Save blocks that the store does not have. Returns the seconds until they are there."""
        self.store.clear()
        start = time.perf_counter()
        self._worker.start_saves(ConnectorStep(saves=(BlockSave(1, self._keys, self._saved.tolist()),)))
        self._worker.wait_for_saves(TIMEOUT_S)
        taken = time.perf_counter() - start
        if self._worker.take_counters().blocks_saved != len(self._saved):
            raise InternalError("not all blocks were saved")
        return taken

    def load_s(self) -> float:
        """Load the blocks. Returns the seconds until the worker reports them."""
        start = time.perf_counter()
        step = ConnectorStep(loads=(BlockLoad("bench", self._keys, self._loaded.tolist()),), computes=False)
        self._worker.before_step(step)
        self._worker.start_loads(step)
        while time.perf_counter() < start + TIMEOUT_S:
            ended = self._worker.end_step(computes=True)
            if ended.wrong:
                raise InternalError("blocks were not found")
            if ended.loaded:
                return time.perf_counter() - start
            time.sleep(50e-6)
        raise InternalError("the load has not ended")

    def check(self) -> None:
        check_equal(self._tensors, self._num_blocks, self._saved.tolist(), self._loaded.tolist())

    def close(self) -> None:
        self.store.clear()
        self._worker.close(TIMEOUT_S)


def link_copies(num_bytes: int) -> Iterator[Callable[[], float]]:
    """Yield what returns the seconds of one large copy from the device, and of one to it."""
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    yield lambda: cuda_harness.elapsed_s(lambda: host.copy_(device, non_blocking=True))
    yield lambda: cuda_harness.elapsed_s(lambda: device.copy_(host, non_blocking=True))


def measure(client: KVClient, layout: str, size: str, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Return GB/s of `save` and `load`, and of the link in the same rounds: `save_link`, `load_link`."""
    stand_in = StandIn(client.store, layout, size, num_bytes)
    try:
        save_link, load_link = link_copies(stand_in.num_bytes)
        contenders = {
            "save_link": save_link,
            "save": stand_in.save_s,
            "load_link": load_link,
            "load": stand_in.load_s,
        }
        seconds = medians(take_turns(contenders, rounds, warm_ups=1))
        stand_in.check()
    finally:
        stand_in.close()
    rates = {name: stand_in.num_bytes / taken / 1e9 for name, taken in seconds.items()}
    return {"layout": layout, "size": size, "block_bytes": stand_in.block_bytes, **rates}


def run(quick: bool = False) -> dict[str, Any]:
    """Return `gb_per_s`: what `measure` returns for each layout and size, with `share`. Where the store is mapped for
    reading, one layout is measured."""
    cuda_harness.require_device()
    num_bytes, rounds = (BATCH_BYTES_QUICK, ROUNDS_QUICK) if quick else (BATCH_BYTES, ROUNDS)
    measured = []
    for share in SHARES:
        layouts = LAYOUTS if share == "write" else ["FlashAttention, K and V first"]
        with Daemon(**OPTIONS, share_store=share) as daemon, KVClient(daemon.address) as client:
            for layout, size in itertools.product(layouts, MODELS):
                measured.append({"share": share} | measure(client, layout, size, num_bytes, rounds))
    return {**cuda_harness.versions(), "batch_bytes": num_bytes, "gb_per_s": measured}


def render(results: dict[str, Any], console: Console) -> None:
    title = f"{results['device']}, {results['batch_bytes'] >> 20} MiB at a time, GB/s; in brackets: of the link"
    rows = table(title, ("store", "layout", "block"), ("save", "load", "link, save", "link, load"))
    for rates in results["gb_per_s"]:
        save, load = (f"{rates[way]:.1f} ({rates[way] / rates[f'{way}_link']:.2f})" for way in ("save", "load"))
        rows.add_row(
            SHARES[rates["share"]],
            rates["layout"],
            f"{rates['block_bytes'] / 1024:g} KiB",
            save,
            load,
            f"{rates['save_link']:.1f}",
            f"{rates['load_link']:.1f}",
        )
    console.print(rows)
