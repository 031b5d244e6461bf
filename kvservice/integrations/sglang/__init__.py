"""A HiCache storage backend of SGLang that keeps pages of K/V in the daemon's block store.

    sglang serve --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvservice", "interface_v1": 1,
            "module_path": "kvservice.integrations.sglang", "class_name": "KVServiceStorage",
            "kvservice": {"address": "unix:///run/kvservice.sock"}}'

The backend implements the batches of `HiCacheStorage` that name places in SGLang's host pool: pages are copied between
the pool and the store without a copy in between. SGLang's older interface hands over flattened copies, whose bytes are
in another order at the same size, so it is refused.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVServiceStorage"]


def __getattr__(name: str) -> Any:
    """Import the backend on first use, since it imports SGLang."""
    if name == "KVServiceStorage":
        from kvservice.integrations.sglang.storage import KVServiceStorage

        return KVServiceStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
