"""The parts of vLLM that the connector imports, so that it runs without vLLM."""

from __future__ import annotations

import enum
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CONNECTOR = "kvservice.integrations.vllm"


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class ConnectorBase:
    """KVConnectorBase_V1."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received = self.get_finished(finished_req_ids)  # type: ignore[attr-defined]
        return SimpleNamespace(
            finished_sending=set(sent or ()), finished_recving=set(received or ()), failed_recving=set()
        )


class WorkerMetadata:
    """KVConnectorWorkerMetadata."""


def name_of_block(block_hash: bytes, group: int) -> bytes:
    """make_block_hash_with_group_id"""
    return block_hash + bytes([group])


class Stats:
    """KVConnectorStats."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


class PromMetrics:
    """KVConnectorPromMetrics."""

    def __init__(self, *_: object) -> None: ...


@contextmanager
def stub_vllm(without: Collection[str] = ()) -> Iterator[Any]:
    """Yield the connector's class. Its modules and those of the stub are imported only inside of the block. `without`:
    modules that this vLLM does not have.

    The class has `groups`, the ranks of a worker, and `backend`, the name of the attention of all layers.
    """
    groups = SimpleNamespace(
        tensor=SimpleNamespace(rank_in_group=0, world_size=1), pipeline=SimpleNamespace(rank_in_group=0, world_size=1)
    )
    backend = SimpleNamespace(name="CPU_ATTN")
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend.name))
    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.1"},
        "vllm.config": {"get_layers_from_vllm_config": lambda *_: {"layer": layer}},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        v1: {},
        f"{v1}.base": {
            "KVConnectorBase_V1": ConnectorBase,
            "KVConnectorHandshakeMetadata": type("KVConnectorHandshakeMetadata", (), {}),
            "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": SimpleNamespace,
            "KVConnectorWorkerMetadata": WorkerMetadata,
            "SupportsHMA": type("SupportsHMA", (), {}),
        },
        f"{v1}.metrics": {"KVConnectorPromMetrics": PromMetrics, "KVConnectorStats": Stats},
        "vllm.distributed.parallel_state": {
            "get_pp_group": lambda: groups.pipeline,
            "get_tp_group": lambda: groups.tensor,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": object},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {
            "DEFAULT_NONE_HASH_SEED": 0,
            "make_block_hash_with_group_id": name_of_block,
        },
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(HOST="host")},
    }
    before = {name for name in sys.modules if not name.startswith(f"{CONNECTOR}.")}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith(f"{CONNECTOR}.")]:
            patch.delitem(sys.modules, name)  # those of another stub
        for name, content in contents.items():
            if name in without:
                patch.setitem(sys.modules, name, None)
                continue
            module = ModuleType(name)
            vars(module).update(content)
            parent, _, last = name.rpartition(".")
            patch.setitem(sys.modules, name, module)
            if parent:
                setattr(sys.modules[parent], last, module)
        from kvservice.integrations.vllm import KVServiceConnector

        KVServiceConnector.groups, KVServiceConnector.backend = groups, backend
        try:
            yield KVServiceConnector
        finally:
            # Modules that import vLLM may be needed with a real one.
            for name in set(sys.modules) - before:
                if name.startswith(f"{CONNECTOR}."):
                    del sys.modules[name]
                    # Otherwise `from package import module` finds it.
                    vars(sys.modules[CONNECTOR]).pop(name.rpartition(".")[2], None)
