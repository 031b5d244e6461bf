"""JSON that every reader can read: NaN and the infinities, which JSON does not have, are null."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """Return a value as JSON. The options are those of `json.dumps`."""
    try:
        return json.dumps(value, **options, allow_nan=False)
    except ValueError:  # a number that is not finite
        return json.dumps(_finite(value), **options, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key) if isinstance(key, float) else key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
