"""Random requests beside saves: what PoolBlocks holds keeps its content, and what waits is saved or goes."""

from __future__ import annotations

import itertools
import random

from vllm_connector import FakePool

from kvservice.client.store.values import split_keys
from kvservice.integrations.vllm.holding import Offer, PoolBlocks

SEEDS = 150


class Model:
    """vLLM's scheduler, which allocates, shares and ends requests; `saves` are under way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_blocks = self.random.choice([20, 60, 300])
        self.pool = FakePool(self.num_blocks)
        self.held = PoolBlocks(self.pool, lambda key, _: key, self.random.choice([0.1, 0.3, 0.5]), lambda: 0.0)
        self.keys = (number.to_bytes(32, "big") for number in itertools.count(1))
        self.numbers = itertools.count()
        self.requests: dict[int, list[int]] = {}
        # Requests have not offered these yet. Others may have offered some of the blocks, which wait then.
        self.rests: dict[int, Offer] = {}
        self.saves: dict[int, dict[int, bytes]] = {}
        self.num_offered = self.num_saved = self.num_gone = 0

    def end_some(self) -> None:
        for request in [one for one in self.requests if self.random.random() < 0.3]:
            if (rest := self.rests.pop(request, None)) is not None:
                self.save(rest)
            self.pool.free_blocks([self.pool.blocks[block] for block in reversed(self.requests.pop(request))])

    def allocate(self, count: int) -> list[int]:
        """Return free blocks, which lose their content."""
        blocks = self.random.sample([block for block in self.pool.blocks if not block.ref_cnt], count)
        self.pool.touch(blocks)
        for block in blocks:
            block.block_hash = None
        return [block.block_id for block in blocks]

    def start(self) -> None:
        """Start a request, perhaps with the first blocks of another."""
        count = self.random.randrange(1, max(2, self.num_blocks // 4))
        if count > self.pool.get_num_free_blocks():
            return
        shared: list[int] = []
        if self.requests and self.random.random() < 0.4:
            table = self.random.choice(list(self.requests.values()))
            shared = table[: self.random.randrange(len(table) + 1)]
            self.pool.touch([self.pool.blocks[block] for block in shared])
            assert self.held.taken(shared) == 0, "they have their content"
        own = self.allocate(count)
        self.num_gone += self.held.taken(own)
        for block in own:
            self.pool.blocks[block].block_hash = next(self.keys)
        number, table = next(self.numbers), shared + own
        keys = b"".join([self.content(block) for block in table])
        self.num_offered += count
        self.requests[number], self.rests[number] = table, Offer(keys, keys, table, bytes(len(table)), bool(shared))

    def offers(self) -> list[Offer]:
        """Return all or a part of what some requests have not offered yet."""
        offers = []
        for number in [one for one in self.rests if self.random.random() < 0.7]:
            rest = self.rests.pop(number)
            stop = self.random.choice([len(rest.block_ids), self.random.randrange(len(rest.block_ids) + 1)])
            offers.append(rest.part(0, stop))
            if stop < len(rest.block_ids):
                self.rests[number] = rest.part(stop, len(rest.block_ids))
        return offers

    def content(self, block: int) -> bytes:
        key = self.pool.blocks[block].block_hash
        assert key is not None
        return key

    def save(self, *offers: Offer) -> None:
        keys, block_ids, num_gone = self.held.choose(offers)
        self.num_gone += num_gone
        chosen = dict(zip(block_ids, split_keys(keys), strict=True))
        assert len(chosen) == len(block_ids), "each once"
        if block_ids:
            number = next(self.numbers)
            self.held.hold(number, block_ids)
            self.saves[number] = chosen
            self.num_saved += len(block_ids)

    def check(self) -> None:
        for chosen in self.saves.values():
            for block, key in chosen.items():
                assert self.content(block) == key
                assert self.pool.blocks[block].ref_cnt

    def end_saves(self, part: float) -> None:
        for number in [one for one in self.saves if self.random.random() < part]:
            self.held.free(number)
            del self.saves[number]


def test_held_blocks_keep_their_content_and_nothing_waits_for_ever() -> None:
    num_waited = 0
    for seed in range(SEEDS):
        model = Model(seed)
        for _ in range(model.random.randrange(5, 60)):
            model.end_some()
            for _ in range(model.random.randrange(3)):
                model.start()
            model.save(*model.offers())
            num_waited += model.held.waits
            model.check()
            model.end_saves(0.5)
        model.save(*model.rests.values())
        for request in list(model.requests):
            model.pool.free_blocks([model.pool.blocks[block] for block in model.requests.pop(request)])
        for _ in range(model.num_offered):
            model.save()
            model.end_saves(1.0)
        assert not model.held.waits, seed
        assert not model.held.holds
        assert model.pool.get_num_free_blocks() == model.num_blocks, seed
        assert model.num_saved + model.num_gone >= model.num_offered, "each was saved, or had gone"
    assert num_waited > SEEDS


def test_blocks_of_many_requests_that_wait_are_taken_together() -> None:
    pool = FakePool(100)
    held = PoolBlocks(pool, lambda key, _: key, 0.1, lambda: 0.0)
    table, others = list(range(40)), pool.blocks[40:95]
    pool.touch(pool.blocks[:95])
    for block in table:
        pool.blocks[block].block_hash = key = block.to_bytes(32, "big")
        held.wait(Offer(key, key, [block], bytes(1), False))
    pool.free_blocks([pool.blocks[block] for block in table[:2]])
    # Blocks that would be free stay until there are more of them. They are not in the way of others.
    assert held.choose([])[1:] == (table[2:], 0)
    pool.free_blocks(others)
    assert held.choose([])[1:] == (table[:2], 0)
    assert not held.waits
