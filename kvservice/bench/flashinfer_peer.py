"""FlashInfer as a peer, if it is installed: the same K and V, in pages of the same size with the same tables.

Decode has one path with CUDA cores and one with tensor cores, extend has two with tensor cores; each is measured. Its
preparation on the host (`plan`) runs before and is timed separately. It compiles a path at its first use.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from kvservice.bench.cuda_inputs import K_SCALE, Inputs
from kvservice.errors import FailedPreconditionError

WORKSPACE_BYTES = 512 << 20
PLANS = 7

PATHS = {"decode": ("CUDA cores", "tensor cores"), "extend": ("fa2", "fa3")}
_KV_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def load() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise FailedPreconditionError(f"FlashInfer cannot be imported: {error}") from error


class FlashInfer:
    def __init__(self) -> None:
        self._module = load()
        self.version = str(getattr(self._module, "__version__", "unknown"))
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def prepare(self, inputs: Inputs, path: str, out: torch.Tensor) -> tuple[Callable[[int], object], float]:
        """Return a call that attends in a layer, and the seconds of its plan."""
        wrapper = self._decode(path) if inputs.shape.kind == "decode" else self._extend(path)
        plan = self._planner(wrapper, inputs)
        plan()
        plan_s = statistics.median(host_seconds(plan) for _ in range(PLANS))
        assert inputs.pages is not None
        pages = inputs.pages.view(_KV_DTYPES[inputs.shape.dtype])
        scales = {} if inputs.k_scale is None else {"k_scale": K_SCALE}
        return lambda layer: wrapper.run(inputs.query, pages[layer], out=out, **scales), plan_s

    def _decode(self, path: str) -> Any:
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, kv_layout="HND", use_tensor_cores=path == "tensor cores"
        )

    def _extend(self, path: str) -> Any:
        return self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND", backend=path)

    def _planner(self, wrapper: Any, inputs: Inputs) -> Callable[[], object]:
        shape = inputs.shape
        starts = torch.tensor((0, *shape.blocks), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ids = torch.cat([row[:used] for row, used in zip(inputs.block_tables, shape.blocks, strict=True)])
        last = torch.tensor([(context - 1) % shape.block_size + 1 for context in shape.contexts], dtype=torch.int32)
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size)
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": _KV_DTYPES[shape.dtype]}
        if shape.kind == "decode":
            return lambda: wrapper.plan(starts, ids, last, *sizes, **dtypes)
        queries = torch.arange(shape.num_seqs + 1, dtype=torch.int32) * shape.query_len
        return lambda: wrapper.plan(queries, starts, ids, last, *sizes, causal=True, **dtypes)


def host_seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
