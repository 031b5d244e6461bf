"""A remote storage plugin of LMCache that keeps chunks of K/V in the daemon's block store.

    remote_storage_plugins: ["kvservice"]
    extra_config:
      remote_storage_plugin.kvservice.module_path: kvservice.integrations.lmcache
      remote_storage_plugin.kvservice.class_name: KVServiceAdapter
      remote_storage_plugin.kvservice.address: unix:///run/kvservice.sock

The connector implements `RemoteConnector`. It stores only full chunks: a block of the store has one size, and the last
chunk of a request, which LMCache stores with `save_unfull_chunk`, is of use only to requests that end with it. Shape,
dtype and format of a full chunk are part of the namespace, so a chunk that is found always fits.

Calls run on threads, with the client's blocking API. LMCache calls the connector on the event loop of its storage
manager and on threads of requests, while the client's asyncio API is tied to one loop. So no loop waits for the daemon
or for a copy of bytes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVServiceAdapter"]


def __getattr__(name: str) -> Any:
    """Import the adapter on first use, since it imports LMCache."""
    if name == "KVServiceAdapter":
        from kvservice.integrations.lmcache.connector import KVServiceAdapter

        return KVServiceAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
