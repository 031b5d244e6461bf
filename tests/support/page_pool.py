"""A pool for the page, with sequences, cached and pinned blocks, calls and a history. Bookkeeping, arrays
and views are the real ones; a virtual clock moves on by a second with each reading."""

from __future__ import annotations

import dataclasses
import random
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np
from observed_pool import ObservedPool, OpenSession

from kvservice import __version__
from kvservice.blocks import AllocationRequest
from kvservice.scheduler import Report, Request, SchedulerConfig
from kvservice.store import ModelFigures
from kvservice.telemetry import (
    ATTACHED,
    BUCKETS_S,
    WIDTH,
    Reading,
    SavedStats,
    ServerStats,
    SpillStats,
    TransferReading,
    TransferStats,
    keys,
)
from kvservice.tiers import TierStats

# What the page gets: states of blocks in the order of the map's bytes, and the most cells of a map.
STATES = ("free", "active", "shared", "cached", "pinned")
MAX_CELLS = 4096
# The most samples of the history, one per second.
SAMPLES = 600
BLOCK_SIZE = 16
CALLED = ("allocate", "append", "decode", "extend", "free", "open_step", "swap_out", "write")
# 64-bit ids, whose last digits would change in JavaScript numbers.
FIRST_SEQUENCE = 9_007_199_254_740_993
SESSION_NAMES = ("chat-eu", "chat-us", "batch", "")
# Blocks in the first so many, so that a pool of a million is made quickly.
MOST_USED = 20_000
AGE_S = 3 * 86400 + 5 * 3600 + 60.0  # "3 d 5 h", for almost an hour
LANE_CALLS_PER_S = 52_300
MIB, GIB = 1 << 20, 1 << 30


def page_info(num_blocks: int, num_swap_blocks: int) -> dict[str, Any]:
    """Return the report of a daemon with the shape of Llama-3-8B. test_page_daemon.py compares it with a daemon's."""
    return {
        "version": __version__,
        "device": "cpu",
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "num_layers": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "block_size": BLOCK_SIZE,
        "block_bytes": 2 * MIB,
        "num_blocks": num_blocks,
        "num_swap_blocks": num_swap_blocks,
        "max_sequences": 1024,
        "max_sessions": 256,
        "prefix_caching": True,
    }


class PagePool(ObservedPool):
    """Sequences FIRST_SEQUENCE, FIRST_SEQUENCE + 1, ... of four sessions in turn; the last one is swapped out, if there
    is a swap tier. Equal for equal arguments."""

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        num_sequences: int,
        session_names: tuple[str, ...] = SESSION_NAMES,
        num_samples: int = 30,
    ) -> None:
        taken = time.monotonic() - AGE_S
        super().__init__(
            lambda: taken,
            CALLED,
            page_info(num_blocks, num_swap_blocks),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_swap_blocks=num_swap_blocks,
            max_sequences=64,
            max_sequence_tokens=min(num_blocks, MOST_USED) * BLOCK_SIZE,
        )
        self._random = random.Random(0)
        self._token = 0
        self._seconds = 0
        self._first_tokens_per_s = 0
        self._started_s = time.monotonic() - num_samples
        self._started_wall_s = time.time() - num_samples
        self.draining = False
        self.has_tiers = False
        self.has_transfers = False
        self.mooncake_state = "open"
        self.num_readings = 0
        self.failure: Exception | None = None
        for index, name in enumerate(session_names):
            session = self.open(name, "acme" if index else "")
            session.row.set(ATTACHED, name != "batch")
        self._fill(min(num_blocks, MOST_USED), num_swap_blocks, num_sequences)
        self._observe_calls(num_samples)
        for _ in range(1 + num_samples):  # the first one is no sample
            self.read_next()

    # ---- contents

    def session_of(self, sequence_id: int) -> OpenSession:
        return self.sessions[(sequence_id - FIRST_SEQUENCE) % len(self.sessions)]

    def _fill(self, num_blocks: int, num_swap_blocks: int, num_sequences: int) -> None:
        """Other sequences come first and end in between: what they leave is free, cached or pinned."""
        owner = self.sessions[0]
        prefix = self._tokens(max(2, num_blocks // 50))
        self.compute(owner, 0, prefix)
        cached = [self._tokens(max(1, num_blocks // 80)) for _ in range(14)]
        for number in range(28):
            if number % 2:
                self.compute(owner, 1 + number, cached[number // 2])
            else:
                self.manager.allocate(owner.space, [AllocationRequest(1 + number, self._tokens(1 + number % 3))])
        self.manager.free(owner.space, list(range(1, 29)))
        self.manager.pin(owner.space, cached[0], ttl_s=1e6)
        for index in range(num_sequences):
            own = self._tokens(max(1, round(self._random.expovariate(num_sequences / (0.45 * num_blocks)))))
            shared = prefix[: len(prefix) // BLOCK_SIZE * (index % 3) // 2 * BLOCK_SIZE]
            self._add(FIRST_SEQUENCE + index, shared + own)
        self.manager.free(owner.space, [0])
        if num_swap_blocks:
            swapped = FIRST_SEQUENCE + num_sequences
            self._add(swapped, self._tokens(num_swap_blocks // 3))
            self.manager.swap_out(self.session_of(swapped).space, [swapped])

    def _tokens(self, num_blocks: int) -> list[int]:
        """Tokens of so many blocks that no other sequence has."""
        self._token += 1
        return [self._token] * (num_blocks * BLOCK_SIZE)

    def _add(self, sequence_id: int, tokens: list[int]) -> None:
        self.compute(self.session_of(sequence_id), sequence_id, tokens)

    def grow(self) -> None:
        """Append a block's tokens to the first sequence."""
        space = self.session_of(FIRST_SEQUENCE).space
        for token in range(BLOCK_SIZE):
            self.manager.mark_all_layers(space, self.manager.append(space, [FIRST_SEQUENCE], [token]).step_id)

    def drop(self, sequence_id: int) -> None:
        self.manager.free(self.session_of(sequence_id).space, [sequence_id])

    def schedule(self) -> None:
        """Let the first session schedule three requests, of which two run and have got a token after 150 ms. From now
        on another request of the daemon gets its first token after 150 ms in each second."""
        space = self.sessions[0].space
        engine = self.schedulers.open_engine(space, SchedulerConfig(max_running=2))
        for number in range(3):
            engine.add(Request(number, [number] * 10, max_tokens=5), 1.0)
        batch = engine.schedule(1.0)
        assert batch.step is not None
        self.manager.mark_all_layers(space, batch.step.step_id)
        engine.update(Report(batch.number, [7, 7]), 1.15)
        self._first_tokens_per_s = 1

    # ---- what the page should show

    def block_table(self, sequence_id: int) -> list[int]:
        found = self.views.sequence(self.session_of(sequence_id).session_id, sequence_id)
        assert found["blocks_left_out"] == 0
        return list(found["block_ids"])

    def holders(self, block: int) -> set[int]:
        """The sequences whose table has this block of the device."""
        infos = [info for s in self.sessions for info in self.manager.describe(s.space, s.space.sequence_ids())]
        return {i.sequence_id for i in infos if not i.swapped and block in self.block_table(i.sequence_id)}

    def sequence_ids(self) -> Iterator[int]:
        for session in self.sessions:
            yield from session.space.sequence_ids()

    def states(self, tier: str = "device") -> list[str]:
        num_blocks = self.views.info["num_blocks" if tier == "device" else "num_swap_blocks"]
        parts = [self.views.blocks(tier, start, MAX_CELLS)["states"] for start in range(0, num_blocks, MAX_CELLS)]
        return [state for part in parts for state in part]

    def first_of(self, state: str) -> int:
        return self.states().index(state)

    def num_free(self) -> int:
        return self.manager.stats().free_blocks

    # ---- readings

    def _observe_calls(self, seconds: int) -> None:
        """Count calls: those of `append` 450 a second, of `swap_out` only once, before the history."""
        rows = {key: row for row, key in enumerate(keys(CALLED))}
        for number, method in enumerate(CALLED):
            counts = self.calls.counts[rows[method, "OK", "stream"]]
            per_s = 900 // (number + 1)
            if method == "swap_out":
                counts[9] = 40
            else:
                counts[number] += seconds * (per_s - per_s // 30)
                counts[number + 2] += seconds * (per_s // 30)
        self.calls.counts[rows["free", "NOT_FOUND", "unary"], 3] = 4

    def read_next(self) -> Reading:
        """Read as the observer does each second. For 40 seconds of the history, nothing was looked up."""
        self._seconds += 1
        self._observe_calls(1)
        looked_up = self._seconds - min(40, max(0, self._seconds - 300))
        blocks = dataclasses.replace(
            self.manager.stats(),
            prefix_cache_query_tokens=9_000 * looked_up,
            prefix_cache_hit_tokens=6_000 * looked_up,
            computed_tokens=41_000 * self._seconds,
            swapped_out_blocks=150 * self._seconds,
            swapped_in_blocks=100 * self._seconds,
        )
        server = ServerStats(
            sessions=len(self.sessions), draining=self.draining, lane_calls=LANE_CALLS_PER_S * self._seconds
        )
        self.stats.write(blocks, server, [0, 0])
        self.schedulers.latencies.first_token.observe(0.15, self._first_tokens_per_s)
        self.write_schedulers()
        reading = dataclasses.replace(
            self.reader.read(), time_s=self._started_s + self._seconds, **self._tiers(), **self._transfers()
        )
        self.history.add(reading, self._started_wall_s + self._seconds)
        return reading

    def _tiers(self) -> dict[str, Any]:
        """The fields of a reading for a block store with a disk and a distributed store below it."""
        if not self.has_tiers:
            return {}
        seconds = self._seconds
        figures = ModelFigures(
            blocks=30_000, used_bytes=60 * GIB, hits=80 * seconds, misses=20 * seconds, read_bytes=160 * MIB * seconds,
            stored_bytes=400 * MIB * seconds, evicted_misses=1200, other_namespace_misses=7,
        )  # fmt: skip
        disk = TierStats(
            "disk", num_values=612_345, used_bytes=1225 * GIB, capacity_bytes=2000 * GIB, hits=15 * seconds,
            misses=5 * seconds, read_bytes=30 * MIB * seconds, written_bytes=120 * MIB * seconds, latency_s=310e-6,
        )  # fmt: skip
        is_open = self.mooncake_state == "open"
        mooncake = TierStats(
            "mooncake", self.mooncake_state,
            hits=seconds if is_open else 0, misses=4 * seconds, latency_s=0.0021, errors=0 if is_open else 12,
        )  # fmt: skip
        spill = SpillStats(
            saved_blocks=12 * seconds, saved_bytes=24 * MIB * seconds, loaded_blocks=2 * seconds,
            loaded_bytes=4 * MIB * seconds, hit_tokens=32 * seconds,
        )  # fmt: skip
        return {
            "store_bytes": 64 * GIB,
            "store_ready_bytes": 64 * GIB,
            "store_models": {"m": figures},
            "tiers": (disk, mooncake),
            "spill": spill,
            "saved": SavedStats(num_sessions=3, used_bytes=5 * GIB, capacity_bytes=16 * GIB),
        }

    def _transfers(self) -> dict[str, Any]:
        """The field of a reading for two engines, one of which has failed. Transfers take 15 ms."""
        if not self.has_transfers:
            return {}
        seconds = self._seconds
        stats = TransferStats(
            engines=1, regions=2, failed_out=2, engine_failures=1, bytes_in=300 * MIB * seconds,
            bytes_out=GIB * seconds, fallback_bytes=5 * MIB * seconds,
        )  # fmt: skip
        counts = np.zeros((2, WIDTH), np.int64)
        counts[0, bisect_left(BUCKETS_S, 0.015)] = 100 * seconds
        return {"transfers": TransferReading(stats, counts, np.zeros(2))}

    async def _read(self) -> Reading:
        if self.failure is not None:
            raise self.failure
        self.num_readings += 1
        return self.read_next()


def count_states(states: list[str]) -> list[int]:
    """Blocks in each state, in the order of STATES."""
    return np.bincount([STATES.index(state) for state in states], minlength=len(STATES)).tolist()
