"""The command that starts a daemon of a plan. It passes the checks of the daemon's own configuration."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvservice.config_sources import checked_config
from kvservice.errors import InvalidArgumentError
from kvservice.pool.layout import PoolLayout

GIB = 1 << 30
# The reader of the command replaces these words.
DIRECTORY = "DIRECTORY"
MASTER = "MASTER:50051"
WEIGHTS = "NAME"
_SHAPE = ("num_layers", "num_kv_heads", "head_size", "dtype")
# Other options of the daemon that have the same name in a plan.
_SAME = frozenset({"block_size", "disk_gib", "kv_cache_dtype", "store_gib"})


def checked_options(layout: PoolLayout, dtype: str, kv_cache_dtype: str, **sizes: Any) -> dict[str, Any]:
    """Return options of `kvservice serve`. `dtype` is that of the model, `sizes` are options of the pool and the tiers.
    Raises InvalidArgumentError naming the option of the plan if the daemon refuses them."""
    shape = (layout.num_layers, layout.num_kv_heads, layout.head_size, dtype)
    options = dict(zip(_SHAPE, shape, strict=True)) | {
        "device": "cuda",
        "block_size": layout.block_size,
        "kv_cache_dtype": kv_cache_dtype,
        **sizes,
    }
    try:
        checked_config(options)
    except InvalidArgumentError as error:
        if error.field in _SAME:
            raise InvalidArgumentError(f"the daemon refuses it: {error.message}", field=error.field) from None
        raise InvalidArgumentError(f"{error.field}: {error.message}", field="model") from None
    return options


def serve_command(options: Mapping[str, Any], model: Path | None) -> str:
    """Return the command line for options of `checked_options`. `model` determines the shape; None: the options do."""
    words = ["kvservice", "serve", *(() if model is None else ("--model", str(model)))]
    for name, value in options.items():
        if value != "auto" and (model is None or name not in _SHAPE):
            words += [f"--{name.replace('_', '-')}", _text(value)]
    return shlex.join(words)


def size_gib(gib: float, block_bytes: int) -> float:
    """Round a size down to tenths of a GiB, unless it is small or that of a few blocks."""
    return math.floor(10 * gib) / 10 if gib >= max(1.0, 100 * block_bytes / GIB) else gib


def _text(value: Any) -> str:
    """`repr` has all digits of a number: the size of a single block must not get smaller."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
