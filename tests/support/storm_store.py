"""Random operations on a namespace of the block store, with checked contents, while the daemon is killed."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvservice.client import KVClient, PutStatus, StoreNamespace

BLOCK_BYTES = 2048
NUM_KEYS = 64


@dataclass
class StoreStorm:
    """One store. A block that is found has the bytes of its key; a miss is no failure, but counted."""

    client: KVClient
    seed: int
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.store = self.client.store(StoreNamespace("storm", block_bytes=BLOCK_BYTES, layout="storm"))

    def run_one(self) -> None:
        operation = self.random.choice([self.put, self.put, self.get, self.get, self.get, self.lease, self.remove])
        operation()
        if not self.store.reachable:
            time.sleep(0.005)
        self.counts[f"store {operation.__name__}"] += 1

    def numbers(self) -> list[int]:
        first = self.random.randrange(NUM_KEYS)
        return [(first + one) % NUM_KEYS for one in range(self.random.randint(1, 12))]

    def put(self) -> None:
        numbers = self.numbers()
        values = np.stack([value_of(one) for one in numbers])
        for status in self.store.put([key_of(one) for one in numbers], values).tolist():
            self.counts[f"store {PutStatus(status).name}"] += 1

    def get(self) -> None:
        numbers = self.numbers()
        out = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
        found = self.store.get([key_of(one) for one in numbers], out)
        self.counts["store hits"] += int(found.sum())
        self.counts["store misses"] += int((~found).sum())
        self.check("get", numbers, found, out)

    def lease(self) -> None:
        numbers = self.numbers()
        with self.store.acquire([key_of(one) for one in numbers], 5.0) as lease:
            views = lease.views
            out = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
            for at, view in enumerate(views):
                if view is not None:
                    out[at] = view
            self.check("lease", numbers, lease.check(), out)

    def remove(self) -> None:
        if self.random.random() < 0.2:
            self.store.remove([key_of(one) for one in self.numbers()])

    def check(self, what: str, numbers: list[int], found: np.ndarray, out: np.ndarray) -> None:
        for number, is_found, value in zip(numbers, found, out, strict=True):
            if is_found and not np.array_equal(value, value_of(number)):
                self.counts["wrong blocks of the store"] += 1
                self.failures.append(f"{what}: block {number} of the store has wrong bytes")

    def finish(self) -> None:
        self.store.close()


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "big")).digest()


def value_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)
