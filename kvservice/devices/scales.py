"""Scales of an FP8 cache, read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.errors import InvalidArgumentError, reason_of

NAMES = ("k_scale", "v_scale")


def load_scales(path: str, num_layers: int, num_kv_heads: int) -> npt.NDArray[np.float32]:
    """Return the scales of keys and values, float32[2, num_layers, num_kv_heads]. The stored number times its scale is
    the value.

    The file holds {"k_scale": ..., "v_scale": ...}. Each is a number, a list with one number per layer, or a list per
    layer with one number per KV head. Omitted scales are 1; if `path` is empty, all are 1. Raises InvalidArgumentError
    with field kv_scales.
    """
    content = _read(path) if path else {}
    unknown = set(content) - set(NAMES)
    if unknown:
        raise InvalidArgumentError(f"{path}: {', '.join(sorted(unknown))} is unknown", field="kv_scales")
    shape = (num_layers, num_kv_heads)
    return np.stack([_as_array(content.get(name, 1.0), f"{path}: {name}", shape) for name in NAMES])


def _read(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidArgumentError(f"{path}: {reason_of(error)}", field="kv_scales") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path}: is not an object with k_scale and v_scale", field="kv_scales")
    return content


def _as_array(value: Any, where: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    try:
        scales = np.array(value, np.float32)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{where} is not made of numbers", field="kv_scales") from None
    if scales.shape not in ((), shape[:1], shape):
        raise InvalidArgumentError(
            f"{where} has shape {list(scales.shape)}, must be one number, {list(shape[:1])} or {list(shape)}",
            field="kv_scales",
        )
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise InvalidArgumentError(f"{where} has to be finite and positive", field="kv_scales")
    if scales.ndim == 1:
        scales = scales[:, None]
    return np.broadcast_to(scales, shape)
