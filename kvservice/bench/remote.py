"""Cost of blocks between a client over TCP and the daemon's store, and of K/V between it and the daemon's pool: by
Transfer Engines and in messages, against a plain socket that copies the same bytes.

All processes are on this host, and talk over the loopback interface. The ways take turns, so that a slow machine
affects all of them. Checksums are compared by both ends, except by the plain socket and by the engine alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console

from kvservice.bench.engine_peer import engine_peer
from kvservice.bench.harness import medians, table, take_turns
from kvservice.bench.peer_process import free_port
from kvservice.bench.remote_sequences import LABELS as SEQUENCE_LABELS
from kvservice.bench.remote_sequences import WAYS as SEQUENCE_WAYS
from kvservice.bench.remote_sequences import SequenceWay, pool_options, sequence_ways
from kvservice.bench.socket_peer import socket_peer
from kvservice.bench.store import OPTIONS, StoreWay, timed
from kvservice.bench.store_blocks import BlockBatch, BlockWay
from kvservice.client import KVClient, StoreNamespace
from kvservice.launch import Daemon

__all__ = [
    "BLOCK_BYTES",
    "LABELS",
    "SEQUENCE_LABELS",
    "SEQUENCE_WAYS",
    "WAYS",
    "pool_options",
    "render",
    "run",
    "sequence_ways",
    "ways",
]

BLOCK_BYTES = 2 << 20
BATCH_BYTES, BATCH_BYTES_QUICK = 128 << 20, 16 << 20
ROUNDS, ROUNDS_QUICK = 25, 2
# The ways without a daemon, by name.
PEERS: dict[str, Callable[[BlockBatch], AbstractContextManager[BlockWay]]] = {
    "socket": socket_peer,
    "engine": engine_peer,
}
# All ways by name: the transport of the store, None for a peer.
WAYS = {"socket": None, "engine": None, "transfer": "transfer", "staged": "transfer", "inline": "inline"}
LABELS = {
    "socket": "plain socket",
    "engine": "Transfer Engine alone, nothing compared",
    "transfer": "Transfer Engine, blocks in a region",
    "staged": "Transfer Engine, blocks elsewhere",
    "inline": "messages",
}


@contextlib.contextmanager
def ways(address: str, num_bytes: int) -> Iterator[dict[str, BlockWay]]:
    """Yield the ways by name, each with blocks of its own."""
    opened: dict[str, BlockWay] = {}
    with contextlib.ExitStack() as cleanup:
        for name, transport in WAYS.items():
            batch = BlockBatch(BLOCK_BYTES, num_bytes)
            if transport is None:
                opened[name] = cleanup.enter_context(PEERS[name](batch))
                continue
            client = cleanup.enter_context(KVClient(address))
            namespace = StoreNamespace("bench", BLOCK_BYTES, layout=name)
            store = cleanup.enter_context(client.store(namespace, transport=transport, unreachable="raise"))
            if name == "transfer":
                values, out = (store.create_region(num_bytes).array(batch.out.shape, "uint8") for _ in range(2))
                values[...] = batch.values
                batch.values, batch.out = values, out
            opened[name] = StoreWay(store, batch)
        yield opened


def run(quick: bool = False) -> dict[str, Any]:
    """Return `batch_bytes`, and `<way>_<put|get>_s`; a put of K/V is a write, and a get a read."""
    num_bytes = BATCH_BYTES_QUICK if quick else BATCH_BYTES
    address = f"127.0.0.1:{free_port()}"
    options = OPTIONS | pool_options(num_bytes) | {"tcp_address": address, "transfer_address": "127.0.0.1"}
    with Daemon(**options), ways(address, num_bytes) as blocks, sequence_ways(address, num_bytes) as sequences:
        all_ways: dict[str, BlockWay | SequenceWay] = {**blocks, **sequences}
        contenders = {}
        for call in ("put", "get"):
            for name, way in all_ways.items():
                before = way.empty if call == "put" else _nothing
                contenders[f"{name}_{call}_s"] = functools.partial(timed, getattr(way, call), before)
        results = medians(take_turns(contenders, ROUNDS_QUICK if quick else ROUNDS, warm_ups=1))
    return {"batch_bytes": num_bytes} | results


def _nothing() -> None:
    return


def render(results: dict[str, Any], console: Console) -> None:
    for what, labels, calls in (
        ("Blocks of 2 MiB", LABELS, ("put", "get")),
        ("K/V of a sequence", SEQUENCE_LABELS, ("write", "read")),
    ):
        title = f"{what} over the loopback interface, GB/s; in brackets: in units of the plain socket"
        rows = table(title, ("way",), calls)
        for name, label in labels.items():
            rows.add_row(label, *(_rate(results, name, call) for call in ("put", "get")))
        console.print(rows)


def _rate(results: dict[str, Any], way: str, call: str) -> str:
    seconds, plain = results[f"{way}_{call}_s"], results[f"socket_{call}_s"]
    return f"{results['batch_bytes'] / seconds / 1e9:.2f} ({plain / seconds:.2f})"
