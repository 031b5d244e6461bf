"""The scheduler's side of the connector: which blocks are found, loaded and saved. It never waits for a transfer.

A load is part of the step in which its request runs, if it is small, its blocks were in the daemon's memory when vLLM
asked, and every worker maps that memory: then it cannot fail, but for a lease that the daemon breaks. The whole step
waits for it: while vLLM computes for other requests, only very small ones are. Other loads are asynchronous: vLLM lets
the request wait, computes for others meanwhile, and continues it when all workers have its blocks.

Blocks that are being saved are held: vLLM's block pool counts a reference more, so that a step never waits for a save.
The workers tell when they have ended. Held blocks come back in any case:

    held ── all workers report the end, also of a failure ──▶ free
      └──── vLLM forgets its prefix cache, or a worker does not report for HOLD_S ──▶ free; the next step tells the
            workers first, which give up what they have not begun and wait for copies in progress
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.client.store.values import KEY_BYTES, chosen_keys, num_keys, some_keys
from kvservice.integrations.vllm.groups import CacheGroups, Wanted
from kvservice.integrations.vllm.holding import HELD_AT_ONCE, NameOf, Offer, PoolBlocks
from kvservice.integrations.vllm.lookup import StoreLookup
from kvservice.integrations.vllm.settings import AdapterIdentities
from kvservice.integrations.vllm.steps import (
    BlockLoad,
    BlockSave,
    ConnectorStep,
    LeasedBlocks,
    MemoryId,
    Rank,
    StepLoad,
    WorkerReport,
    wrong_load,
)

logger = logging.getLogger(__name__)

# The least number of decoded blocks of a request that are saved together, unless it ends.
DECODED_BLOCKS = 8
# How long blocks are held for workers that do not report.
HOLD_S = 30.0


# The daemon shows these of TransferCounters to operators.
_COUNTED = ("blocks_loaded", "blocks_not_loaded", "blocks_saved", "blocks_not_saved", "blocks_skipped")

BlockTable = list[list[int]]
"""For each group, the blocks of a request from its first token on. vLLM takes those back of which a window does not
need any more: only the groups with full attention have all."""


@dataclass(frozen=True)
class SchedulingOptions:
    """`loads` and `saves` say what the role of this vLLM allows. `max_step_bytes` are the most that the loads of a step
    may have together on each worker, `max_beside_bytes` if the step computes for other requests. `max_held` is the
    largest part of vLLM's blocks that is held for saves alone. `save_decode`: blocks of generated tokens are saved,
    too. `adapters_by_name`: see AdapterIdentities. `checks_loads`: workers do not check the loads of a step, since vLLM
    could not compute the blocks again."""

    groups: CacheGroups
    loads: bool
    saves: bool
    max_step_bytes: float
    max_beside_bytes: float
    max_held: float
    save_decode: bool
    adapters_by_name: bool = False
    checks_loads: bool = False


@dataclass(slots=True)
class _Tracked:
    """A request with blocks, of which `num_prompt` have tokens of its prompt only. `keys` are those of its first
    blocks, of all groups of a block one after the other. `num_offered` of its blocks have been offered to be saved.
    Those from `num_shared` on it has computed itself, and offers for the first time. Those from `loaded.start` to
    `loaded.stop` have come from the store to the blocks `targets`. `relies_on` are the numbers of the loads of steps
    that fill blocks with which it computes."""

    request: Any
    num_prompt: int = 0
    num_shared: int = 0
    keys: bytes = b""
    block_ids: BlockTable = field(default_factory=list)
    num_offered: int = 0
    loaded: range = range(0)
    targets: Sequence[int] = ()
    relies_on: frozenset[int] = frozenset()


@dataclass(slots=True)
class _StepLoading:
    """A load of a step, of which so many workers have ended their part. It fills the blocks `targets` of its requests.
    They become a set when somebody asks, since mostly nobody does."""

    targets: list[list[int]] = field(default_factory=list)
    num_ended: int = 0
    block_ids: set[int] = field(default_factory=set)

    def fills_any(self, block_ids: Iterable[int]) -> bool:
        while self.targets:
            self.block_ids.update(self.targets.pop())
        return not self.block_ids.isdisjoint(block_ids)


class _Answer(NamedTuple):
    """The answer to vLLM about a request of which it has `num_local` blocks itself, and the keys of the first ones."""

    num_local: int
    keys: bytes = b""
    in_step: bool = False


_NO_ANSWER = _Answer(0)


class ConnectorScheduler:
    """Blocks of all workers are needed, so a block is found if every worker's part of it is found. A block that cannot
    be loaded is reported by the worker, and vLLM computes it again."""

    def __init__(self, options: SchedulingOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._groups, self._clock = options, options.groups, clock
        self._block_size = options.groups.block_size
        self._lookup: StoreLookup | None = None
        self._pool: PoolBlocks | None = None
        self._blocks_of: dict[Rank, Rank] = {}
        self._block_bytes = 0
        self._memories: dict[Rank, MemoryId | None] = {}
        # Those that wait for an asynchronous load are named in `_waiting`.
        self._requests: dict[str, _Tracked] = {}
        self._waiting: set[str] = set()
        # Requests that have blocks to offer, or will have.
        self._unsaved: set[str] = set()
        # Blocks of requests that ended while blocks were being filled that they had computed with: with the numbers of
        # these loads.
        self._unsure: list[tuple[frozenset[int], Offer]] = []
        self._answers: dict[str, _Answer] = {}
        self._adapters = AdapterIdentities(by_name=options.adapters_by_name)
        self._epoch = b""
        # The next step tells the workers these. What it loads itself, it loads together.
        self._loads: list[BlockLoad] = []
        self._step_loads: list[tuple[list[int], Mapping[Rank, LeasedBlocks]]] = []
        self._step_load_number = self._step_bytes = 0
        self._saves: list[BlockSave] = []
        self._num_skipped = 0
        self._abandoned: set[int] = set()
        self._number = 0
        # The loads of steps that not all workers have ended, by their number.
        self._loading: dict[int, _StepLoading] = {}
        self._figures = dict.fromkeys(("prompt_tokens", "found_tokens", *_COUNTED), 0)
        self._num_ended: dict[int, int] = {}

    def use(self, lookup: StoreLookup, blocks_of: Mapping[Rank, Rank], block_bytes: int) -> None:
        """Ask this from now on. `blocks_of`: for each worker the rank of the finder that finds its blocks, which have
        at most `block_bytes`."""
        self._lookup, self._blocks_of, self._block_bytes = lookup, dict(blocks_of), block_bytes

    def bind(self, pool: Any, name_of: NameOf) -> None:
        """Hold blocks of this pool, see PoolBlocks. Without one, nothing is saved."""
        self._pool = PoolBlocks(pool, name_of, self._options.max_held, self._clock)

    # ---- loads

    def expect(self, request: Any) -> None:
        """A request waits in vLLM's queue."""
        group = self._groups.full
        if (
            self._options.loads
            and self._lookup is not None
            and not self._lookup.sees_all
            and not getattr(request, "skip_reading_prefix_cache", False)
            and group is not None  # otherwise no block is always needed
        ):
            every = self._keys(request, 0, request.num_tokens // self._block_size)
            places = np.arange(group, num_keys(every), self._groups.num)
            self._lookup.expect(request.request_id, chosen_keys(every, places))

    def num_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens after the first `num_computed_tokens` whose blocks can be loaded, and whether
        that is asynchronous; None: not known yet, ask again. All full blocks are matched. vLLM computes the last token
        in any case, to get the logits: one token less is answered if the blocks have all."""
        request_id, num_tokens, lookup = request.request_id, request.num_tokens, self._lookup
        first, stop = num_computed_tokens // self._block_size, self._groups.num_full_blocks(num_tokens)
        self._answers[request_id] = _Answer(first)
        if not self._options.loads or lookup is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if first >= (num_tokens - 1) // self._block_size:
            # vLLM has all blocks that it could use, for example those of a request that was preempted.
            lookup.drop(request_id)
            return 0, False
        hurries = self._others_compute(request_id)
        if self._is_miss(lookup, request, first, stop, hurries=hurries):
            return 0, False
        every = self._keys(request, 0, stop)
        keys = every[self._groups.key_bytes * first :]
        if not keys:
            return 0, False
        fits = self._step_bytes + len(keys) // KEY_BYTES * self._block_bytes <= self._options.max_step_bytes
        wanted = Wanted(keys, self._groups, first, num_tokens - 1)
        found = lookup.find(request_id, wanted, reads=fits, hurries=hurries)
        if found is None:
            return None, False
        in_step = found.num_blocks > 0 and found.at_hand and self._can_be_in_step(request_id, found.num_blocks, hurries)
        self._answers[request_id] = _Answer(first, every, in_step)
        num_found = found.num_blocks * self._block_size
        if num_computed_tokens + num_found == num_tokens:
            num_found -= 1
        return num_found, num_found > 0 and not in_step

    def _is_miss(self, lookup: StoreLookup, request: Any, first: int, stop: int, *, hurries: bool) -> bool:
        """Whether the store is known to have no block that this request could use, by the first that it needs."""
        if self._groups.full is None:
            return False  # no block is always needed
        key = self._keys(request, first, first + 1)
        if self._groups.num > 1:
            key = some_keys(key, slice(self._groups.full, self._groups.full + 1))
        num_keys = (stop - first) * self._groups.num
        return not key or lookup.is_miss(request.request_id, key, num_keys, hurries=hurries)

    def allocated(
        self, request: Any, list_blocks: Callable[[], Sequence[Sequence[int]]], num_external_tokens: int
    ) -> None:
        """A request has blocks. Load those of `num_external_tokens` tokens. `list_blocks` returns the numbers of the
        blocks for each group; it asks vLLM for each, so it is not called if nobody needs them now."""
        request_id = request.request_id
        answer = self._answers.pop(request_id, _NO_ANSWER)
        first = answer.num_local
        block_ids = list_blocks() if num_external_tokens > 0 or (first > 0 and self._loading) else ()
        tracked = self._requests.get(request_id)
        if tracked is None:
            self._figures["prompt_tokens"] += request.num_tokens - first * self._block_size
            self._figures["found_tokens"] += num_external_tokens
            tracked = self._requests[request_id] = _Tracked(request)
        # After an asynchronous load vLLM says this again, without another question.
        tracked.request, tracked.num_shared = request, max(tracked.num_shared, first)
        tracked.num_prompt = request.num_prompt_tokens // self._block_size
        tracked.keys = answer.keys or tracked.keys
        if self._options.saves:
            self._unsaved.add(request_id)
        if num_external_tokens > 0 and self._watches_taken:
            self._taken(block_ids)  # it may not be in a step for long
        if self._lookup is None:
            return
        if first:
            # The workers do not read these from the store. It must not take them for unused.
            self._lookup.touch(self._needed_keys(tracked, 0, first * self._block_size))
            for number, loading in self._loading.items():
                if any(loading.fills_any(ids[:first]) for ids in block_ids):
                    tracked.relies_on |= {number}
        if answer.in_step and not self._step_load_number:
            self._number += 1
            self._step_load_number = self._number
            self._loading[self._number] = _StepLoading()
        # One token less was answered if the blocks have all tokens.
        num_blocks = -(-num_external_tokens // self._block_size)
        leased = self._lookup.take(request_id, num_blocks, self._step_load_number if answer.in_step else request_id)
        if not num_blocks:
            return
        stop, num_tokens = first + num_blocks, first * self._block_size + num_external_tokens
        targets = list(block_ids[0][first:stop])
        if not self._groups.leading:
            every = np.array([ids[first:stop] for ids in block_ids], np.int64).T.ravel()
            needed = self._groups.needed(first, num_tokens)
            # vLLM takes all blocks that it has allocated for computed. Its null block, 0, stands for the others.
            is_right = np.array_equal(np.flatnonzero(every), needed)
            assert is_right, "vLLM wants other blocks loaded than a request needs"
            targets = every[needed].tolist()
        tracked.loaded, tracked.targets = range(first, stop), targets
        if not answer.in_step:
            self._waiting.add(request_id)
            keys = self._needed_keys(tracked, first, num_tokens)
            assert num_keys(keys) == len(targets), "a load needs a block for each key"
            self._loads.append(BlockLoad(request_id, keys, targets, leased))
            return
        assert leased is not None, "vLLM was told that they are leased for every worker"
        self._step_bytes += len(targets) * self._block_bytes
        self._step_loads.append((targets, leased))
        self._loading[self._step_load_number].targets.append(targets)
        tracked.relies_on |= {self._step_load_number}

    def received(
        self,
        report: WorkerReport,
        loaded: Iterable[str],
        wrong: frozenset[int] | set[int],
        failed: Iterable[str] = (),
    ) -> None:
        """Note the reports of all workers after a step: the requests that have all their asynchronous loads, the blocks
        that are not right, and the requests whose loads have failed. Raises InternalError before vLLM takes tokens that
        were computed with blocks which are not right."""
        self._memories.update(report.memories)
        again = [name for name in failed if name in self._requests]
        if wrong:
            again += [name for name, one in self._requests.items() if not wrong.isdisjoint(one.targets)]
        for request_id in again:
            # vLLM computes the blocks again.
            tracked = self._requests[request_id]
            tracked.num_shared = max(tracked.num_shared, tracked.num_offered)
            tracked.num_offered, tracked.loaded = min(tracked.num_offered, tracked.loaded.start), range(0)
            if self._options.saves:
                self._unsaved.add(request_id)
        for request_id in loaded:
            self._waiting.discard(request_id)
            self._release(request_id)
        for number, count in report.loads.items():
            if (loading := self._loading.get(number)) is not None:
                loading.num_ended += count
                if loading.num_ended >= len(self._blocks_of):
                    if self._options.checks_loads and self._lookup is not None and not self._lookup.lasts(number):
                        raise wrong_load()
                    del self._loading[number]
                    self._release(number)
        for number, count in report.saves.items():
            self._num_ended[number] = self._num_ended.get(number, 0) + count
            if self._num_ended[number] >= len(self._blocks_of):
                del self._num_ended[number]
                self._abandoned.discard(number)
                if self._pool is not None:
                    self._pool.free(number)
        known = [offer for numbers, offer in self._unsure if numbers.isdisjoint(self._loading)]
        if known:
            self._unsure = [each for each in self._unsure if not each[0].isdisjoint(self._loading)]
            for offer in known:
                if self._pool is not None and self._pool.most and not wrong:
                    self._pool.wait(offer)
                else:
                    self._num_skipped += len(offer.block_ids)

    def _can_be_in_step(self, request_id: str, num_blocks: int, others_compute: bool) -> bool:
        """Whether the step has room for a load, and every worker maps the memory in which the blocks lie."""
        assert self._lookup is not None
        most = self._options.max_step_bytes
        if others_compute:
            most = min(most, self._options.max_beside_bytes)
        if self._groups.leading and self._step_bytes + num_blocks * self._block_bytes > most:
            return False
        leased = self._lookup.places(request_id, num_blocks)
        if leased is None:
            return False
        for worker, rank in self._blocks_of.items():
            part = leased[rank]
            if self._memories.get(worker) != part.memory:
                return False
            if self._step_bytes + part.num_blocks * self._block_bytes > most:
                return False
        return True

    def _others_compute(self, request_id: str = "") -> bool:
        """Whether vLLM computes for requests other than this one, or has scheduled it."""
        computes = request_id in self._requests and request_id not in self._waiting
        return len(self._requests) - len(self._waiting) > computes

    def _release(self, load: str | int) -> None:
        if self._lookup is not None:
            self._lookup.release(load)

    # ---- steps

    def step(self, output: Any) -> ConnectorStep:
        """Return what the workers do in a step. `output`: vLLM's SchedulerOutput."""
        offers, room = [], HELD_AT_ONCE
        for request_id, num_computed_tokens in self._note_blocks(output):
            tracked = self._requests[request_id]
            num_tokens = num_computed_tokens + output.num_scheduled_tokens.get(request_id, 0)
            if room > 0 and (offer := self._offer(tracked, num_tokens, most=room)) is not None:
                offers.append(offer)
                room -= len(offer.block_ids)
            if not self._options.save_decode and tracked.num_prompt <= tracked.num_offered:
                self._unsaved.discard(request_id)
        self._hold(offers)
        if self._pool is not None:
            for number in self._pool.numbers(HOLD_S):
                logger.warning("workers have not reported a save for %.0f s: its blocks are given back", HOLD_S)
                self._give_up(number)
        step = ConnectorStep(
            tuple(self._loads),
            self._step_load(),
            tuple(self._saves),
            frozenset(self._abandoned),
            self._num_skipped,
            bool(output.num_scheduled_tokens) or self._others_compute(),
        )
        self._loads, self._step_loads, self._step_load_number, self._step_bytes = [], [], 0, 0
        self._saves, self._abandoned, self._num_skipped = [], set(), 0
        if self._lookup is not None:
            self._lookup.end_step(self._report())
        return step

    def _step_load(self) -> StepLoad | None:
        """Return what the step loads itself. All of it is in the memories that the workers have mapped."""
        if not self._step_loads:
            return None
        targets = np.fromiter(itertools.chain.from_iterable([each for each, _ in self._step_loads]), np.int64)
        parts = [leased for _, leased in self._step_loads]
        leased = {rank: LeasedBlocks.joined([part[rank] for part in parts]) for rank in parts[0]}
        assert {each.num_blocks for each in leased.values()} == {len(targets)}, "a load needs a place for each block"
        return StepLoad(self._step_load_number, targets, leased)

    def count(self, counters: Mapping[str, float]) -> None:
        """Add TransferCounters of all workers, by name."""
        for name in _COUNTED:
            if name in counters:
                self._figures[name] += int(counters[name])

    def _report(self) -> dict[str, int]:
        return self._figures | {"loads_in_flight": len(self._waiting) + len(self._loading)}

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request. What is not saved yet is offered now, while vLLM still counts its blocks as used. Its first
        blocks, without which the others are useless, were saved first; they must not be the first to be evicted."""
        request_id = request.request_id
        tracked, is_unsaved = self._requests.pop(request_id, None), request_id in self._unsaved
        self._unsaved.discard(request_id)
        if tracked is not None and self._lookup is not None:
            if is_unsaved and request_id not in self._waiting:
                # The last token has no K/V.
                num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
                tracked.block_ids = [list(ids) for ids in block_ids]
                offer = self._offer(tracked, num_tokens)
                if offer is not None:
                    self._hold((offer,))
            self._lookup.touch(self._needed_keys(tracked, 0, tracked.num_offered * self._block_size))
        self._waiting.discard(request_id)
        self._answers.pop(request_id, None)
        self._adapters.forget(request_id)
        if self._lookup is not None:
            self._lookup.forget(request_id)

    def reset(self) -> None:
        """Find nothing that was saved until now: the weights may have changed in memory, so that blocks of this engine
        are not those of the namespace any more. New keys keep them apart from those of other engines, too. Blocks that
        are still being saved have the old keys."""
        self._epoch = os.urandom(16)
        for tracked in self._requests.values():
            tracked.keys = b""

    @property
    def has_own_keys(self) -> bool:
        """Whether keys are not vLLM's hashes, since `reset`."""
        return bool(self._epoch)

    def free_held(self) -> None:
        """Give all held blocks back at once: vLLM is about to forget its prefix cache, which needs all blocks."""
        self._unsure.clear()
        if self._pool is not None:
            self._pool.forget_waiting()
            for number in self._pool.numbers():
                self._give_up(number)
        self._saves = []

    @property
    def holds(self) -> bool:
        """Whether workers have something to save, or to report."""
        return self._pool is not None and (self._pool.holds or self._pool.waits)

    @property
    def delays_others(self) -> bool:
        """Whether blocks will be free as soon as they are saved."""
        return self._pool is not None and self._pool.delays_others

    def _give_up(self, number: int) -> None:
        assert self._pool is not None
        self._pool.free(number)
        self._abandoned.add(number)

    def _note_blocks(self, output: Any) -> Iterable[tuple[str, int]]:
        """Keep the block tables of the requests of a step that have blocks to offer. Yields each with its number of
        computed tokens."""
        cached = output.scheduled_cached_reqs
        if self._watches_taken:
            tables = [new.block_ids for new in output.scheduled_new_reqs] + [ids for ids in cached.new_block_ids if ids]
            self._taken(itertools.chain.from_iterable(tables))
        for new in output.scheduled_new_reqs:
            if new.req_id in self._unsaved:
                self._replace(new.req_id, new.block_ids)
                yield new.req_id, new.num_computed_tokens
        if not self._unsaved:
            return
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed_tokens in rows:
            if request_id not in self._unsaved:
                continue
            if request_id in cached.resumed_req_ids:
                self._replace(request_id, block_ids or ())
            elif block_ids:
                for table, added in zip(self._requests[request_id].block_ids, block_ids, strict=True):
                    table += added
            yield request_id, num_computed_tokens

    def _replace(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Set the blocks of a request that starts or continues."""
        self._requests[request_id].block_ids = [list(ids) for ids in block_ids]

    @property
    def _watches_taken(self) -> bool:
        """Whether it matters which blocks requests get."""
        return bool(self._unsure) or (self._pool is not None and self._pool.waits)

    def _taken(self, block_ids: Iterable[Iterable[int]]) -> None:
        """A request has these blocks now. If they are still those of its tokens, it offers them itself."""
        taken = set(itertools.chain.from_iterable(block_ids))
        self._unsure = [(numbers, offer.without(taken)) for numbers, offer in self._unsure]
        if self._pool is not None:
            self._num_skipped += self._pool.taken(taken)

    # ---- saves

    def _offer(self, tracked: _Tracked, num_tokens: int, most: int | None = None) -> Offer | None:
        """Return the blocks that are full after `num_tokens` computed tokens and were not offered before, about so many
        at `most`; None: all, since the request ends. Blocks that vLLM had itself are among them: a daemon that has
        restarted does not have them. A request is passed over while blocks are being filled that it computes with: its
        own would be wrong if these were. If it ends, it is known when these loads end."""
        num_full = min(num_tokens // self._block_size, min(map(len, tracked.block_ids), default=0))
        num_prompt = min(num_full, tracked.num_prompt)
        stop = num_prompt
        if self._options.save_decode and (
            most is None or num_full - max(tracked.num_offered, num_prompt) >= DECODED_BLOCKS
        ):
            stop = num_full
        first = tracked.num_offered
        if first in tracked.loaded:
            # These have come from the store.
            first = tracked.num_offered = min(stop, tracked.loaded.stop)
        if stop <= first:
            return None
        filling = tracked.relies_on and tracked.relies_on & self._loading.keys()
        if most is not None:
            if filling:
                return None
            stop = min(stop, first + -(-most // self._groups.num))
        keys = self._known_keys(tracked, first, stop)
        tracked.num_offered += len(keys) // self._groups.key_bytes
        offer = self._offered(tracked, first, keys)
        if not filling or not offer.block_ids:
            return offer if offer.block_ids else None
        self._unsure.append((filling, offer))
        return None

    def _offered(self, tracked: _Tracked, first: int, keys: bytes) -> Offer:
        """Return those blocks of a request from `first` on, with these keys, that have not come from the store."""
        width, num_blocks = self._groups.num, len(keys) // self._groups.key_bytes
        # Those from `start` to `stop` have.
        start = stop = 0
        if tracked.loaded:
            start, stop = (min(max(end - first, 0), num_blocks) for end in (tracked.loaded.start, tracked.loaded.stop))
        if self._groups.leading:
            hashes, ids = b"", tracked.block_ids[0][first : first + num_blocks]
            if self._epoch or self._adapters.of(tracked.request):
                hashes = b"".join(tracked.request.block_hashes[first : first + num_blocks])
            if start < stop:
                before, after = slice(0, start), slice(stop, num_blocks)
                keys, hashes = (some_keys(of, before) + some_keys(of, after) for of in (keys, hashes))
                ids = ids[:start] + ids[stop:]
            return Offer(keys, hashes or keys, ids, bytes(len(ids)), first < tracked.num_shared)
        every_hash = tracked.request.block_hashes[first : first + num_blocks]
        block_ids = np.array([ids[first : first + num_blocks] for ids in tracked.block_ids], np.int64).T.ravel()
        blocks = np.arange(len(block_ids)) // width
        places = np.flatnonzero((blocks < start) | (blocks >= stop))
        # vLLM may have taken a window's blocks back, and given them to others.
        is_full = [group.is_full for group in self._groups.groups]
        has = [
            is_full[place % width]
            or (self._pool is not None and self._pool.is_cached(block_id, every_hash[place // width], place % width))
            for place, block_id in zip(places.tolist(), block_ids[places].tolist(), strict=True)
        ]
        places = places[np.array(has, np.bool_)]
        kept = b"".join([every_hash[block] for block in (places // width).tolist()])
        groups = (places % width).astype(np.uint8).tobytes()
        return Offer(chosen_keys(keys, places), kept, block_ids[places].tolist(), groups, first < tracked.num_shared)

    def _hold(self, offers: Sequence[Offer]) -> None:
        """Save blocks with the next step, and hold them until then and until they are saved, as far as there is room:
        first those that wait for it, then these. The others wait."""
        pool = self._pool
        if pool is None or not pool.most:
            self._num_skipped += sum(len(offer.block_ids) for offer in offers)
        elif offers or pool.waits:
            keys, block_ids, num_gone = pool.choose(offers)
            self._num_skipped += num_gone
            if block_ids:
                self._number += 1
                pool.hold(self._number, block_ids)
                self._saves.append(BlockSave(self._number, keys, block_ids))

    def _keys(self, request: Any, first: int, stop: int) -> bytes:
        """Return the keys of the blocks from `first` to `stop` whose tokens are known, of all groups of a block one
        after the other. There are none if the request's adapter is unknown."""
        identity = self._adapters.of(request)
        if identity is None:
            return b""
        hashes, more, width = b"".join(request.block_hashes[first:stop]), self._epoch + identity, self._groups.num
        if width == 1 and not more:
            return hashes
        # Hashes that are combined with different numbers are as different as other hashes.
        parts = [group.to_bytes(4, "little") for group in range(width)] if width > 1 else [b""]
        masks = b"".join([hashlib.sha256(more + part).digest() for part in parts])
        mixed = _words(hashes).reshape(-1, 1, KEY_BYTES // 8) ^ _words(masks).reshape(width, -1)
        return mixed.tobytes()

    def _known_keys(self, tracked: _Tracked, first: int, stop: int) -> bytes:
        """Return the same as `_keys`, without asking vLLM for the hashes of a block again."""
        key_bytes = self._groups.key_bytes
        if self._adapters.of(tracked.request) is None:
            return b""
        if len(tracked.keys) < stop * key_bytes:
            tracked.keys += self._keys(tracked.request, len(tracked.keys) // key_bytes, stop)
        return tracked.keys[first * key_bytes : stop * key_bytes]

    def _needed_keys(self, tracked: _Tracked, first: int, num_tokens: int) -> bytes:
        """Return the keys of what is needed to continue after `num_tokens` tokens, without blocks before `first`."""
        keys = self._known_keys(tracked, first, -(-num_tokens // self._block_size))
        if self._groups.leading:
            return keys
        places = self._groups.needed(first, num_tokens)
        return chosen_keys(keys, places[places < num_keys(keys)])


def _words(keys: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(keys, np.uint64)
