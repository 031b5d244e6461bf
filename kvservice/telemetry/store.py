"""The figures of the block store by model. Like the daemon's gauges, they are written when the observer asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Zeros
from kvservice.store.figures import ModelFigures

# Names are UTF-8, have at most 256 characters, and are padded with zeros.
_NAME_BYTES = 1024


class StoreTable:
    """Shared arrays: store_bytes int64[1], the size of the store, 0 if there is none; store_models uint8[max_models,
    1024] and store_figures int64[max_models, columns], in the order of the fields of `ModelFigures`; store_count
    int64[1], the number of rows in use."""

    def __init__(self, num_bytes: int, max_models: int, zeros: Zeros) -> None:
        zeros("store_bytes", (1,), np.int64)[0] = num_bytes
        self._count: npt.NDArray[np.int64] = zeros("store_count", (1,), np.int64)
        self._names: npt.NDArray[np.uint8] = zeros("store_models", (max_models, _NAME_BYTES), np.uint8)
        self._figures: npt.NDArray[np.int64] = zeros("store_figures", (max_models, len(ModelFigures._fields)), np.int64)

    def write(self, figures: Mapping[str, ModelFigures]) -> None:
        for row, (model, values) in enumerate(figures.items()):
            self._names[row] = np.frombuffer(model.encode().ljust(_NAME_BYTES, b"\0"), np.uint8)
            self._figures[row] = values
        self._count[0] = len(figures)


def read_store(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, dict[str, ModelFigures]]:
    """Return the size of the store in bytes, and the figures by model."""
    count = int(arrays["store_count"][0])
    names, figures = arrays["store_models"][:count], arrays["store_figures"][:count].tolist()
    models = (name.tobytes().rstrip(b"\0").decode(errors="replace") for name in names)
    return int(arrays["store_bytes"][0]), {
        model: ModelFigures(*values) for model, values in zip(models, figures, strict=True)
    }
