"""A KV connector of vLLM that keeps K/V blocks in the daemon's block store.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVServiceConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvservice.integrations.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": "unix:///run/kvservice.sock"}}'

The connector implements `KVConnectorBase_V1`. The other road is vLLM's `OffloadingConnector` with a spec or a secondary
tier of our own. It would track requests, preemption and hybrid models for us. But it asserts that the transfers of a
spec succeed, so a daemon that goes away would take the engine with it. It asks for keys one by one, which would be one
call per block. A secondary tier copies every block once more, through a primary tier in host memory that each engine
has for itself; both specs that come with vLLM 0.32 refuse to start on a CPU. `KVConnectorBase_V1` reports failed loads,
after which vLLM recomputes the blocks, and it is the smaller and older of the two APIs.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVServiceConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector on first use, since it imports vLLM."""
    if name == "KVServiceConnector":
        from kvservice.integrations.vllm.connector import KVServiceConnector

        return KVServiceConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
