"""An in-process engine, with a pool on a GPU by default, and checks for every cache dtype."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from kv_model import POOL, reference_attention

from kvservice.attention_options import AttentionOptions
from kvservice.blocks import AllocationRequest
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine

TENSOR_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ON_GPU: dict[str, Any] = POOL | {"device": "cuda", "max_message_mib": 1, "allow_client_shm": "off"}
# The dtype of tensors, and the dtype of the pool.
TYPES = [
    ("float32", "auto"),
    ("float16", "auto"),
    ("bfloat16", "auto"),
    ("float16", "fp8"),
    ("bfloat16", "fp8_e4m3"),
    ("bfloat16", "fp8_e5m2"),
    ("float32", "fp8_e4m3"),
]


class Rig:
    def __init__(self, **changes: Any) -> None:
        self.config = ServeConfig.model_validate(ON_GPU | {"num_blocks": 200, "max_sequence_tokens": 600} | changes)
        self.device: Any = open_device(self.config)
        self.engine = CacheEngine(self.config, self.device)
        self.space = self.engine.manager.open_namespace()
        self.random = np.random.default_rng(0)

    def normal(self, *shape: int) -> Any:
        return self.random.standard_normal(shape, np.float32).astype(TENSOR_DTYPES[self.config.dtype])

    def open_step(self, sequence_id: int, num_tokens: int) -> Any:
        self.engine.manager.allocate(self.space, [AllocationRequest(sequence_id, range(num_tokens))])
        return self.engine.manager.open_step(self.space, np.array([sequence_id]), None)

    def attend(self, step: Any, layer: int, query: Any, key: Any, value: Any) -> Any:
        options = AttentionOptions()
        work = self.engine.attend(self.space, step.step_id, layer, query, key, value, options, False)
        return asyncio.run(_output(work))


async def _output(work: Any) -> Any:
    return (await work)[0]


def check_types(tmp_path: Path, head_size: int, dtype: str, cache: str) -> None:
    """Check a cache dtype. Every layer and head has its own scales, so that a wrong scale is detected. The scales are
    powers of 2, which cause no rounding."""
    changes: dict[str, Any] = {"head_size": head_size, "dtype": dtype, "kv_cache_dtype": cache, "block_size": 16}
    scales = {"k_scale": [[0.5, 2.0], [0.25, 1.0]], "v_scale": [[1.0, 0.125], [4.0, 0.5]]}
    if cache != "auto":
        file = tmp_path / "scales.json"
        file.write_text(json.dumps(scales))
        changes["kv_scales"] = str(file)
    rig = Rig(**changes)
    tensor_type = TENSOR_DTYPES[dtype]
    stored_type = ml_dtypes.float8_e5m2 if cache == "fp8_e5m2" else ml_dtypes.float8_e4m3fn
    tolerance = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    if cache != "auto":
        tolerance = max(tolerance, 4e-3)
    try:
        step = rig.open_step(0, 37)
        expected = []
        for layer in range(2):
            query, key, value = rig.normal(37, 4, head_size), rig.normal(37, 2, head_size), rig.normal(37, 2, head_size)
            output = rig.attend(step, layer, query, key, value)
            if cache != "auto":
                k_scale, v_scale = (np.array(scales[name][layer], np.float32)[:, None] for name in scales)
                key, value = (
                    ((array.astype(np.float32) / scale).astype(stored_type).astype(np.float32) * scale).astype(
                        tensor_type
                    )
                    for array, scale in ((key, k_scale), (value, v_scale))
                )
            expected.append((key, value))
            reference = attention_in_float64(query, key, value)
            np.testing.assert_allclose(output.astype(np.float64), reference, rtol=0, atol=tolerance)
        key, value = asyncio.run(rig.engine.read(rig.space, [(0, 0, 37)], None))
        out = np.zeros(key.nbytes, np.uint8), np.zeros(value.nbytes, np.uint8)
        asyncio.run(rig.engine.read(rig.space, [(0, 0, 37)], None, out))
        assert [one.tobytes() for one in out] == [key.tobytes(), value.tobytes()]
        for layer in range(2):
            np.testing.assert_array_equal(key[layer], expected[layer][0])
            np.testing.assert_array_equal(value[layer], expected[layer][1])
    finally:
        rig.device.close()


def attention_in_float64(query: Any, key: Any, value: Any) -> Any:
    """Compute attention in float64 for any head size. `reference_attention` uses the scale of the model's head size."""
    factor = np.sqrt(32 / query.shape[-1])
    return reference_attention(query.astype(np.float64) * factor, key.astype(np.float64), value.astype(np.float64))
