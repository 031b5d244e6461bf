"""Fake data for the page: a pool of any size, which is equal for equal seeds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.errors import InvalidArgumentError, UnknownSequenceError

STATES = ("free", "active", "shared", "cached", "pinned")
SWAP_STATES = ("free", "swapped")
MAX_CELLS = 4096
METHODS = ("allocate", "append", "decode", "extend", "free", "open_step", "swap_out", "write")
# 64-bit ids, whose last digits would change in JavaScript numbers.
FIRST_SEQUENCE = 9_007_199_254_740_993
HISTORY_S = 600


@dataclass(frozen=True)
class FakeMap:
    group: int
    device: bytes
    group_swap: int
    swap: bytes


class FakeViews:
    """Sequences of a random pool. `step()` grows one sequence, so that map and snapshot change."""

    def __init__(self, num_blocks: int, num_swap_blocks: int, num_sequences: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.states = {"device": np.zeros(num_blocks, np.uint8), "swap": np.zeros(num_swap_blocks, np.uint8)}
        self.ref_counts = {"device": np.zeros(num_blocks, np.int64), "swap": np.zeros(num_swap_blocks, np.int64)}
        self.tables: dict[int, tuple[str, np.ndarray]] = {}
        self.session_names = ["chat-eu", "chat-us", "batch", ""]
        self.num_snapshots = 0
        self.draining = False
        self._started = time.time()
        self.info = {
            "version": "0.1.0", "device": "cuda:0", "dtype": "bfloat16", "block_size": 16, "block_bytes": 2 << 20,
            "num_layers": 32, "num_kv_heads": 8, "head_size": 128, "num_blocks": num_blocks,
            "num_swap_blocks": num_swap_blocks, "max_sequences": 1024, "max_sessions": 256, "prefix_caching": True,
            "kv_cache_dtype": "auto",
        }  # fmt: skip
        self._fill(num_sequences)

    def _fill(self, num_sequences: int) -> None:
        num_blocks = len(self.states["device"])
        free = list(self._random.permutation(int(num_blocks * 0.7)))
        shared = [free.pop() for _ in range(max(2, num_blocks // 50))]
        for index in range(num_sequences):
            length = max(1, int(self._random.exponential(0.45 * num_blocks / num_sequences)))
            own = [free.pop() for _ in range(min(length, len(free)))]
            table = np.array(shared[: len(shared) * (index % 3) // 2] + sorted(own))
            self._hold(FIRST_SEQUENCE + index, "device", table)
        if len(self.states["swap"]):
            self._hold(FIRST_SEQUENCE + num_sequences, "swap", np.arange(len(self.states["swap"]) // 3))
        for state, part in (("cached", 0.15), ("pinned", 0.02)):
            chosen = self._random.choice(num_blocks, int(num_blocks * part), replace=False)
            chosen = chosen[self.states["device"][chosen] == 0]
            self.states["device"][chosen] = STATES.index(state)

    def _hold(self, sequence_id: int, tier: str, table: np.ndarray) -> None:
        self.tables[sequence_id] = (tier, table)
        self.ref_counts[tier][table] += 1
        self.states[tier][table] = np.minimum(self.ref_counts[tier][table], 2 if tier == "device" else 1)

    def step(self) -> None:
        """Allocate a block to the first sequence."""
        free = np.flatnonzero(self.states["device"] == 0)
        if len(free):
            tier, table = self.tables[FIRST_SEQUENCE]
            self.states["device"][free[0]] = self.ref_counts["device"][free[0]] = 1
            self.tables[FIRST_SEQUENCE] = tier, np.append(table, free[0])

    def drop(self, sequence_id: int) -> None:
        tier, table = self.tables.pop(sequence_id)
        self.ref_counts[tier][table] -= 1
        self.states[tier][table] = np.minimum(self.ref_counts[tier][table], 2)

    async def snapshot(self, max_sessions: int = 100, max_sequences: int = 100, search: str = "") -> dict[str, Any]:
        self.num_snapshots += 1
        sequences = [row for row in self._sequences() if search in str(row["sequence_id"]) + row["session_name"]]
        sessions = [row for row in self._sessions() if search in f"{row['name']} {row['tenant']} {row['session_id']}"]
        now = time.time()
        return {
            "time_s": now,
            "uptime_s": now - self._started + 7_000,
            "pool": self._pool(),
            "rates": self._rates(now),
            "calls": [self._call(index, method, now) for index, method in enumerate(METHODS)],
            "sessions": sessions[:max_sessions],
            "sequences": sorted(sequences, key=lambda row: -row["blocks"])[:max_sequences],
            "num_sessions": len(sessions),
            "num_sequences": len(sequences),
        }

    def _pool(self) -> dict[str, Any]:
        counts = np.bincount(self.states["device"], minlength=len(STATES))
        swapped = sum(tier == "swap" for tier, _ in self.tables.values())
        used_swap = int(np.count_nonzero(self.states["swap"]))
        return {
            **{f"{state}_blocks": int(number) for state, number in zip(STATES, counts, strict=True)},
            "num_blocks": len(self.states["device"]), "num_swap_blocks": len(self.states["swap"]),
            "used_swap_blocks": used_swap,
            "sequences": len(self.tables) - swapped, "swapped_sequences": swapped,
            "tokens": sum(len(table) * 16 - 3 for _, table in self.tables.values()),
            "sessions": len(self.session_names), "lanes": 2, "regions": 1, "region_bytes": 64 << 20,
            "draining": self.draining,
        }  # fmt: skip

    def _rates(self, now: float) -> dict[str, Any]:
        wave = 1 + math.sin(now / 30)
        return {
            "window_s": 5.0, "computed_tokens": 41_000 * wave, "query_tokens": 9_000.0, "hit_tokens": 6_200.0,
            "hit_share": 0.62 + 0.1 * math.sin(now / 47), "evicted_blocks": 12.4, "cow_copies": 0.8,
            "swapped_out_bytes": max(0.0, 3e8 * math.sin(now / 20)),
            "swapped_in_bytes": max(0.0, -2e8 * math.sin(now / 20)),
            "out_of_blocks": 0.0, "calls": 1840.0, "errors": 0.2, "lane_calls": 52_300.0,
        }  # fmt: skip

    def _call(self, index: int, method: str, now: float) -> dict[str, Any]:
        p50_s = 60e-6 * 2.3**index * (1.2 + math.sin(now / (9 + index)))
        quantiles = {} if method == "swap_out" else {"p50_s": p50_s, "p99_s": 3.1 * p50_s}
        rate = 900.0 / (index + 1)
        return {"method": method, "calls": round(1e3 * rate), "errors": index, "calls_per_s": rate} | quantiles

    def _session_of(self, sequence_id: int) -> int:
        return (sequence_id - FIRST_SEQUENCE) % len(self.session_names)

    def _sequences(self) -> list[dict[str, Any]]:
        return [
            {
                "session_id": (session := self._session_of(sequence_id)) + 1,
                "session_name": self.session_names[session],
                "sequence_id": sequence_id,
                "length": len(table) * 16 - 3,
                "computed": len(table) * 16 - 4,
                "blocks": len(table),
                "swapped": tier == "swap",
            }
            for sequence_id, (tier, table) in self.tables.items()
        ]

    def _sessions(self) -> list[dict[str, Any]]:
        rows = []
        for index, name in enumerate(self.session_names):
            held = [entry for sequence_id, entry in self.tables.items() if self._session_of(sequence_id) == index]
            blocks = sum(len(table) for _, table in held)
            rows.append({
                "session_id": index + 1, "name": name, "tenant": "acme" if index else "", "attached": index != 2,
                "age_s": 431.0 * (index + 1), "sequences": len(held),
                "swapped_sequences": sum(tier == "swap" for tier, _ in held), "tokens": blocks * 16, "blocks": blocks,
                "regions": int(index == 0), "region_bytes": (64 << 20) * (index == 0), "lane": index < 2,
                "computed_tokens": 10**6 * (index + 1), "query_tokens": 10**6, "hit_tokens": 200_000 * (index + 1),
            })  # fmt: skip
        return rows

    def history(self) -> dict[str, Any]:
        times = [time.time() - HISTORY_S + second for second in range(HISTORY_S)]
        rates = [self._rates(moment) for moment in times]
        return {
            "time_s": times,
            "usage": [0.5 + 0.2 * math.sin(moment / 80) for moment in times],
            "hit_share": [None if 200 < second < 240 else rate["hit_share"] for second, rate in enumerate(rates)],
            "computed_tokens": [rate["computed_tokens"] for rate in rates],
            "swapped_out_bytes": [rate["swapped_out_bytes"] for rate in rates],
            "swapped_in_bytes": [rate["swapped_in_bytes"] for rate in rates],
            "p99_s": {
                method: [self._call(index, method, moment).get("p99_s") for moment in times]
                for index, method in enumerate(METHODS)
            },
        }

    def sample(self) -> dict[str, Any]:
        history = self.history()
        sample = {name: column[-1] for name, column in history.items() if name != "p99_s"}
        return sample | {"p99_s": {method: column[-1] for method, column in history["p99_s"].items()}}

    def map(self) -> FakeMap:
        group, device = grouped(self.states["device"], len(STATES))
        group_swap, swap = grouped(self.states["swap"], len(SWAP_STATES))
        return FakeMap(group, device, group_swap, swap)

    def blocks(self, tier: str, start: int, count: int) -> dict[str, Any]:
        if start >= len(self.states[tier]):
            raise InvalidArgumentError(f"the tier has {len(self.states[tier])} blocks", field="start")
        names = STATES if tier == "device" else SWAP_STATES
        states = [names[state] for state in self.states[tier][start : start + count]]
        return {"start": start, "states": states, "ref_counts": self.ref_counts[tier][start : start + count].tolist()}

    async def block(self, tier: str, block_id: int) -> dict[str, Any]:
        state = self.blocks(tier, block_id, 1)["states"][0]
        holders = [row for row in self._sequences() if block_id in self._table(row["sequence_id"], tier)]
        return {
            "tier": tier, "block_id": block_id, "state": state, "ref_count": int(self.ref_counts[tier][block_id]),
            "hash": None if state in ("free", "active") else f"{block_id:064x}",
            "age_s": None if state == "free" else 12.5, "idle_s": 3.25 if state == "cached" else None,
            "sequences": [
                {name: row[name] for name in ("session_id", "session_name", "sequence_id")}
                | {"position": self._table(row["sequence_id"], tier).index(block_id)}
                for row in holders
            ],
            "sequences_left_out": 0,
        }  # fmt: skip

    def _table(self, sequence_id: int, tier: str) -> list[int]:
        held_in, table = self.tables[sequence_id]
        return table.tolist() if held_in == tier else []

    def sequence(self, session_id: int, sequence_id: int) -> dict[str, Any]:
        wanted = (session_id, sequence_id)
        found = [row for row in self._sequences() if (row["session_id"], row["sequence_id"]) == wanted]
        if not found:
            raise UnknownSequenceError(f"sequence {sequence_id} is unknown")
        tier, table = self.tables[sequence_id]
        names = STATES if tier == "device" else SWAP_STATES
        shown = table[:4096]
        return found[0] | {
            "tier": tier, "block_ids": shown.tolist(), "blocks_left_out": len(table) - len(shown),
            "states": [names[state] for state in self.states[tier][shown]],
            "ref_counts": self.ref_counts[tier][shown].tolist(),
        }  # fmt: skip


def grouped(states: np.ndarray, num_states: int) -> tuple[int, bytes]:
    """Return the number of blocks per cell, and the share of each state in each cell, as a fraction of 255."""
    group = max(1, math.ceil(len(states) / MAX_CELLS))
    cells = np.arange(len(states)) // group
    num_cells = math.ceil(len(states) / group)
    counts = np.bincount(cells * num_states + states, minlength=num_cells * num_states).reshape(num_cells, num_states)
    sums = np.maximum(1, counts.sum(axis=1, keepdims=True))
    return group, (counts * 255 // sums).astype(np.uint8).tobytes()
