"""Random operations of several tasks on the GPU of `fake_cuda`."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest
from constants import set_constants
from fake_cuda import DeadlockError, FakeCuda
from kv_churn import Churn
from kv_model import POOL

from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine

CONFIG = ServeConfig.model_validate(POOL | {"device": "cuda", "max_message_mib": 1, "allow_client_shm": "off"})


def run_churn(num_runs: int, patch: pytest.MonkeyPatch) -> None:
    for seed in range(num_runs):
        patch.setitem(sys.modules, "kvservice._cuda", FakeCuda(seed))
        config = CONFIG.model_copy(update={"enable_prefix_caching": False})
        engine = CacheEngine(config, open_device(config))
        try:
            asyncio.run(Churn(engine, seed).run(60))
        finally:
            with contextlib.suppress(DeadlockError):
                engine.device.close()


def run_in_threads() -> None:
    """Run the churn so often that it detects the rarest mutant, which shows in about one run of 150."""
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch, "kvservice.devices", INLINE_S=-1.0)
        run_churn(3000, patch)
