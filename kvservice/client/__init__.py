"""The public client API for engines: `KVClient` and `AsyncKVClient`.

with KVClient("unix:///run/kvservice.sock") as client, client.session() as kv:
    seq = kv.allocate(prompt_token_ids)
    prefill = kv.open_step([seq])
    out = prefill.extend(layer, query, key, value)      # for each layer
    step = kv.append([seq], [token_id])
    out = step.decode(layer, query, key, value)         # for each layer
"""

from kvservice.environment import prepare_grpc

prepare_grpc()

from kvservice.attention_options import BlockSparse  # noqa: E402
from kvservice.auth.client import TLSConfig  # noqa: E402  gRPC reads its environment at import
from kvservice.client.aio import (  # noqa: E402
    AsyncKVClient,
    AsyncKVScheduler,
    AsyncSession,
    AsyncStep,
    AsyncStore,
    AsyncStoreLease,
    AsyncStoreReservation,
)
from kvservice.client.blocking import KVClient, KVScheduler, Session, Step, Store, StoreLease, StoreReservation  # noqa: E402
from kvservice.client.cluster.aio import AsyncCluster  # noqa: E402
from kvservice.client.cluster.blocking import Cluster  # noqa: E402
from kvservice.client.cluster.core import ClusterDaemon  # noqa: E402
from kvservice.client.cluster.placement import Candidate, PlacementSettings  # noqa: E402
from kvservice.client.events import (  # noqa: E402
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Gap,
    KVEventBatch,
    StoreBlocksRemoved,
    StoreBlocksStored,
    StoreCleared,
)
from kvservice.client.mapped import MappedPool, MappedStep, OneStep  # noqa: E402
from kvservice.client.regions import HostRegion, SharedRegion  # noqa: E402
from kvservice.client.scheduler import (  # noqa: E402
    BatchReport,
    EngineBatch,
    PreemptedSequence,
    RequestInfo,
    SampleInfo,
    ScheduledRequest,
    SchedulerInfo,
)
from kvservice.client.store.values import Lookup, PutStatus, Scatter, StoreNamespace  # noqa: E402
from kvservice.client.values import Pin, PoolInfo, PoolStats, RegionInfo, Sequence, SequenceInfo, StepInfo  # noqa: E402

__all__ = [
    "AllBlocksCleared",
    "AsyncCluster",
    "AsyncKVClient",
    "AsyncKVScheduler",
    "AsyncSession",
    "AsyncStep",
    "AsyncStore",
    "AsyncStoreLease",
    "AsyncStoreReservation",
    "BatchReport",
    "BlockRemoved",
    "BlockSparse",
    "BlockStored",
    "Candidate",
    "Cluster",
    "ClusterDaemon",
    "EngineBatch",
    "Gap",
    "HostRegion",
    "KVClient",
    "KVEventBatch",
    "KVScheduler",
    "Lookup",
    "MappedPool",
    "MappedStep",
    "OneStep",
    "Pin",
    "PlacementSettings",
    "PoolInfo",
    "PoolStats",
    "PreemptedSequence",
    "PutStatus",
    "RegionInfo",
    "RequestInfo",
    "SampleInfo",
    "Scatter",
    "ScheduledRequest",
    "SchedulerInfo",
    "Sequence",
    "SequenceInfo",
    "Session",
    "SharedRegion",
    "Step",
    "StepInfo",
    "Store",
    "StoreBlocksRemoved",
    "StoreBlocksStored",
    "StoreCleared",
    "StoreLease",
    "StoreNamespace",
    "StoreReservation",
    "TLSConfig",
]
