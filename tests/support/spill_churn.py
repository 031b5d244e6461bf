"""Random operations on an engine while blocks leave its pool and come back, compared with the model of kv_model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from kv_model import NUM_LAYERS, POOL, Keys, ModelSequence
from kv_systems import EngineSystem

from kvservice.blocks import PoolCopy, PoolLoad, extra_keys_by_block
from kvservice.config import ServeConfig
from kvservice.errors import OutOfBlocksError, QuotaExceededError

PREFIXES = [[0, 1, 2] * 8, [2, 1, 0] * 7]
KEYS: list[Keys] = [(), (), (), ((0, b"tenant"),)]
CONFIG = ServeConfig.model_validate(POOL | {"max_message_mib": 1, "allow_client_shm": "off"})
MOST_AT_ONCE, MOST_SEQUENCES = 5, 4


class SpillChurn:
    """`one` performs a random operation. `outside` has the bytes and the checksum of each saved block, by its hash. A
    copy and a load take two operations each, with others in between."""

    def __init__(self, system: EngineSystem, seed: int) -> None:
        self.system, self.random = system, random.Random(seed)
        self.sequences: dict[int, ModelSequence] = {}
        self.outside: dict[bytes, tuple[Any, int]] = {}
        self.copies: list[tuple[PoolCopy, Any, Any]] = []
        self.loads: list[tuple[PoolLoad, Any, Any]] = []
        self.next_id = self.num_loaded = self.num_torn = self.num_hits = 0

    @property
    def loader(self) -> Any:
        return self.system.manager.loader

    @property
    def device(self) -> Any:
        return self.system.engine.device

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.one()
            self.check()
        while self.copies or self.loads:
            self.end_copy()
            self.end_load()

    def one(self) -> None:
        weights = {
            self.allocate: 6, self.append: 3, self.rewrite: 3, self.free: 4, self.reset: 1, self.begin_copy: 5,
            self.end_copy: 4, self.begin_load: 8, self.end_load: 6,
        }  # fmt: skip
        self.random.choices(list(weights), list(weights.values()))[0]()

    def check(self) -> None:
        """Read everything back, and check the invariants of the bookkeeping."""
        for n, one in self.sequences.items():
            self.check_sequence(n, one)
        self.system.check()

    def check_sequence(self, n: int, one: ModelSequence) -> None:
        key, value = self.system.read(0, n, 0, one.computed)
        for layer in range(NUM_LAYERS):
            wanted = one.kv(layer, 0, one.computed)
            np.testing.assert_array_equal(key[layer], wanted[0])
            np.testing.assert_array_equal(value[layer], wanted[1])

    def prompt(self) -> tuple[list[int], Keys]:
        prefix = self.random.choice(PREFIXES)
        tail = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 6))]
        return prefix[: self.random.randint(8, len(prefix))] + tail, self.random.choice(KEYS)

    def allocate(self) -> None:
        if len(self.sequences) == MOST_SEQUENCES:
            return
        tokens, keys = self.prompt()
        n = self.next_id = self.next_id + 1
        try:
            (cached,) = self.system.allocate(0, [n], [tokens], [keys])
        except (OutOfBlocksError, QuotaExceededError):
            return
        self.num_hits += cached
        one = self.sequences[n] = ModelSequence(tokens, keys, cached)
        self.check_sequence(n, one)
        self.write(n, one, self.system.open_step(0, [n], None))

    def write(self, n: int, one: ModelSequence, step: Any) -> None:
        both = [one.kv(layer, one.computed, len(one.tokens)) for layer in range(NUM_LAYERS)]
        self.system.write(0, step, None, *(np.stack(part) for part in zip(*both, strict=True)))
        self.sequences[n].computed = len(one.tokens)

    def some(self) -> int | None:
        return self.random.choice(list(self.sequences)) if self.sequences else None

    def append(self) -> None:
        if (n := self.some()) is None or len(self.sequences[n].tokens) > 45:
            return
        one, new = self.sequences[n], [self.random.randint(0, 1) for _ in range(self.random.randint(1, 5))]
        try:
            step = self.system.append(0, [n], new, [len(new)], [len(one.tokens)])
        except OutOfBlocksError:
            return
        one.tokens += new
        self.write(n, one, step)

    def rewrite(self) -> None:
        """Truncate a sequence within a full block, and go on: the block is written again, or its copy."""
        if (n := self.some()) is not None and len(self.sequences[n].tokens) > 6:
            one = self.sequences[n]
            length = len(one.tokens) - self.random.randint(1, 5)
            self.system.truncate(0, n, length)
            del one.tokens[length:]
            one.computed = length
            self.append()

    def free(self) -> None:
        if (n := self.some()) is not None:
            self.system.free(0, [n])
            del self.sequences[n]

    def reset(self) -> None:
        self.system.reset_prefix_cache(0)

    def begin_copy(self) -> None:
        if len(self.copies) > 1:
            self.end_copy()
        blocks = self.loader.coldest(MOST_AT_ONCE)
        if self.random.random() < 0.5:
            blocks = np.flatnonzero(self.system.manager.device.indexed)[-MOST_AT_ONCE:]
        copy = self.loader.begin_copy(blocks)
        memory = np.zeros((len(copy), self.system.engine.layout.block_bytes), np.uint8)

        def save() -> Any:
            return self.system.run(self.device.save_blocks(copy.blocks.astype(np.int32), addresses_of(memory)))

        self.copies.append((copy, memory, self.now_or_later(save)))

    def now_or_later(self, work: Any) -> Any:
        """Do the work now or when its result is asked for. A device may do it at any time in between."""
        if self.random.random() < 0.5:
            return work
        result = work()
        return lambda: result

    def end_copy(self) -> None:
        if not self.copies:
            return
        copy, memory, saving = self.copies.pop(0)
        checksums = saving()
        whole = self.loader.end_copy(copy, np.array([self.random.random() < 0.8 for _ in copy.chain_hashes]))
        self.num_torn += int((~whole).sum())
        for i in np.flatnonzero(whole).tolist():
            known = self.outside.setdefault(copy.chain_hashes[i], (memory[i].copy(), int(checksums[i])))
            assert known[1] == int(checksums[i]), "two blocks with one hash have different bytes"

    def begin_load(self) -> None:
        if len(self.loads) > 1:
            self.end_load()
        tokens, keys = self.prompt()
        if self.random.random() < 0.4:
            self.reset()
        prompt = np.array(tokens, np.int32)
        extra = extra_keys_by_block(keys, "keys", self.system.manager.config.block_size, 1 << 20)
        found = self.system.manager.device.index.match(prompt[:-1], extra)
        missing = self.loader.missing(prompt, extra, found, MOST_AT_ONCE)
        if missing is None:
            return
        there = [chain_hash in self.outside for chain_hash in missing.chain_hashes]
        count = there.index(False) if False in there else len(there)
        load = self.loader.begin_load(missing.first(count)) if count else None
        if load is None:
            return
        chosen = [self.outside[chain_hash] for chain_hash in load.missing.chain_hashes]
        memory = np.stack([content for content, _ in chosen])
        checksums = np.array([checksum for _, checksum in chosen], np.uint64)
        ids = load.blocks.astype(np.int32)

        def fill() -> Any:
            return self.system.run(self.device.load_blocks(addresses_of(memory), ids, checksums))

        self.loads.append((load, memory, self.now_or_later(fill)))

    def end_load(self) -> None:
        """End a load. Sometimes its last block does not count."""
        if self.loads:
            load, _, loading = self.loads.pop(0)
            assert loading().all()
            self.num_loaded += self.loader.end_load(load, len(load) - self.random.choice([0, 0, 1]))


def run_churn(seeds: range, num_operations: int = 150) -> list[SpillChurn]:
    made = []
    for seed in seeds:
        system = EngineSystem(CONFIG, 1)
        try:
            made.append(churn := SpillChurn(system, seed))
            churn.run(num_operations)
        finally:
            system.end()
    return made


def run_other_seeds() -> None:
    """Run the churn with seeds under which it detects the mutants of test_mutants."""
    run_churn(range(100, 130))


def addresses_of(memory: Any) -> Any:
    """Return the address of each row of uint8[n, num_bytes]."""
    rows = np.arange(len(memory), dtype=np.uint64) * np.uint64(memory.shape[1])
    return rows + np.uint64(memory.ctypes.data)
