"""The peers of `bench store`: bare gRPC, and other stores if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from kvservice.bench.grpc_peer import grpc_peer
from kvservice.bench.mooncake_peer import mooncake_memory_peer, mooncake_peer
from kvservice.bench.redis_peer import redis_peer
from kvservice.bench.store_blocks import BlockBatch, BlockWay

# Raise PeerMissingError if the peer is not installed, or does not start.
PEERS: dict[str, Callable[[BlockBatch], AbstractContextManager[BlockWay]]] = {
    "grpc": grpc_peer,
    "redis": redis_peer,
    "mooncake": mooncake_peer,
    "mooncake_memory": mooncake_memory_peer,
}
