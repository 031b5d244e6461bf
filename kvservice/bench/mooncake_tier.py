"""Puts and gets of the Mooncake tier, against the library's own on registered memory, in the same Mooncake Store.

Both have one client on the loopback interface, over TCP. The tier's figures include its child process, the trailer of
each object, and the check of all checksums after a get.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console

from kvservice import _ext
from kvservice.bench.harness import medians, seconds_of, table, take_turns
from kvservice.bench.peer_process import BlockBatch, BlockWay
from kvservice.bench.store_peers import HOST, LOCAL_BYTES, MooncakePeer, check, mooncake_processes
from kvservice.mooncake import MooncakeOptions
from kvservice.pool.sealed import SealedMemory
from kvservice.tiers import Space, Values
from kvservice.tiers.mooncake import MooncakeTier

SIZES = {"2m": 2 << 20, "256k": 256 << 10, "32k": 32 << 10}
BATCH_BYTES, BATCH_BYTES_QUICK = 64 << 20, 4 << 20
ROUNDS, ROUNDS_QUICK = 15, 1
LABELS = {"library": "the library alone", "tier": "the tier"}


class MooncakeTierWay:
    """Values in memory like a block store's: the first half is put, the second half is read into."""

    def __init__(self, runner: asyncio.Runner, batch: BlockBatch, options: MooncakeOptions) -> None:
        self.batch, self._runner = batch, runner
        count, block_bytes = batch.values.shape
        self._memory = SealedMemory("bench-store", 2 * batch.values.nbytes, read_only=False)
        np.frombuffer(self._memory.map, np.uint8)[: batch.values.nbytes] = batch.values.reshape(-1)
        self._space = Space(block_bytes.to_bytes(16, "little"), block_bytes, "bench")
        offsets = [
            struct.pack(f"<{count}Q", *range(at, at + batch.values.nbytes, block_bytes))
            for at in (0, batch.values.nbytes)
        ]
        keys = b"".join(batch.keys)
        self._put = Values(keys, offsets[0], _ext.store_checksums(self._memory.address, offsets[0], block_bytes, 2))
        self._get = Values(keys, offsets[1])
        runner.run(self._open(options))

    def put(self) -> None:
        assert all(self._runner.run(self._tier.put(self._space, self._put))), "there is room"

    def get(self) -> None:
        got = self._runner.run(self._tier.get(self._space, self._get))
        assert all(got.found), "they were put"
        assert got.checksums == self._put.checksums

    def empty(self) -> None:
        self._runner.run(self._tier.clear(self._space))

    def close(self) -> None:
        self._runner.run(self._tier.close())

    async def _open(self, options: MooncakeOptions) -> None:
        self._tier = MooncakeTier.open(options, self._memory.fd, self._memory.num_bytes)
        while self._tier.stats().state != "open":
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def ways(runner: asyncio.Runner, block_bytes: int, num_bytes: int) -> Iterator[dict[str, BlockWay]]:
    """Raises PeerMissingError."""
    with mooncake_processes() as (store, master, metadata, _):
        check(store.setup(HOST, metadata, 0, LOCAL_BYTES, "tcp", "", master))
        library = MooncakePeer(store, BlockBatch(block_bytes, num_bytes))
        tier = MooncakeTierWay(runner, BlockBatch(block_bytes, num_bytes), MooncakeOptions(master, HOST, metadata))
        try:
            yield {"library": library, "tier": tier}
        finally:
            tier.close()


def run(quick: bool = False) -> dict[str, Any]:
    """Return `<way>_<put|get>_<size>_s`, and `batch_bytes`. Raises PeerMissingError."""
    num_bytes = BATCH_BYTES_QUICK if quick else BATCH_BYTES
    results: dict[str, Any] = {"batch_bytes": num_bytes}
    with asyncio.Runner() as runner:
        for size, block_bytes in SIZES.items():
            with ways(runner, block_bytes, num_bytes) as opened:
                contenders: dict[str, Callable[[], float]] = {}
                for name, way in opened.items():
                    contenders[f"{name}_put_{size}_s"] = functools.partial(_timed, way.put, way.empty)
                    contenders[f"{name}_get_{size}_s"] = functools.partial(seconds_of, way.get)
                results |= medians(take_turns(contenders, ROUNDS_QUICK if quick else ROUNDS, warm_ups=1))
    return results


def _timed(call: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    return seconds_of(call)


def render(results: dict[str, Any], console: Console) -> None:
    rows = table("Values, GB/s; in brackets: in units of the library", ("block", "way"), ("put", "get"))
    for size in SIZES:
        rows.add_section()
        for way, label in LABELS.items():
            rows.add_row(
                f"{size.upper()}iB", label, *(_rate(results, way, f"{call}_{size}_s") for call in ("put", "get"))
            )
    console.print(rows)


def _rate(results: dict[str, Any], way: str, figure: str) -> str:
    seconds, library = results[f"{way}_{figure}"], results[f"library_{figure}"]
    return f"{results['batch_bytes'] / seconds / 1e9:.2f} ({library / seconds:.2f})"
