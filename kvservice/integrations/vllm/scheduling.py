"""The scheduler's side of the connector: which blocks are found, loaded and saved. It never waits for a transfer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvservice.integrations.vllm.adapters import AdapterIdentities
from kvservice.integrations.vllm.asking import StoreAsker
from kvservice.integrations.vllm.steps import BlockLoad, BlockSave, ConnectorStep


@dataclass
class _Tracked:
    """A request with blocks. `num_offered` of its blocks have been handed to the workers to be saved."""

    request: Any
    block_ids: list[int] = field(default_factory=list)
    num_offered: int = 0


class ConnectorScheduler:
    """Blocks of all workers are needed, so a block is found if every worker's part of it is found.

    Nothing here has to be right for the tokens to be right: a block that has gone between look-up and load is reported
    by the worker, and vLLM computes it again. Leases make that rare.
    """

    def __init__(self, block_size: int, *, loads: bool, saves: bool) -> None:
        """`block_size` in tokens; `loads` and `saves` say what the role of this vLLM allows."""
        self._block_size, self._loads, self._saves = block_size, loads, saves
        self._store: StoreAsker | None = None
        self._requests: dict[str, _Tracked] = {}
        self._num_local: dict[str, int] = {}
        self._new_loads: list[BlockLoad] = []
        self._overwritten: set[int] = set()
        self._adapters = AdapterIdentities()
        self._epoch = b""

    def use(self, store: StoreAsker) -> None:
        self._store = store

    def num_matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Return the number of tokens after the first `num_computed_tokens` whose blocks can be loaded; None: not known
        yet, ask again. The last token is never among them: vLLM computes it to get the logits."""
        self._num_local[request.request_id] = num_computed_tokens
        if not self._loads or self._store is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        first = num_computed_tokens // self._block_size
        keys = self._keys(request, first, (request.num_tokens - 1) // self._block_size)
        if not keys:
            return 0
        num_leading = self._store.num_leading(request.request_id, keys)
        return None if num_leading is None else num_leading * self._block_size

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Note the blocks of a request, and decide to load those of `num_external_tokens` tokens."""
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        tracked.request = request
        first = self._num_local.pop(request.request_id, 0) // self._block_size
        if self._store is None:
            return
        if first:
            # The workers do not read these from the store. It must not take them for unused.
            self._store.touch(self._keys(request, 0, first))
        if not num_external_tokens:
            return
        stop = first + num_external_tokens // self._block_size
        keys = self._keys(request, first, stop)
        targets = tuple(block_ids[first:stop])
        assert len(keys) == len(targets), "a load needs a block for each key"
        self._store.lease(request.request_id, keys)
        self._new_loads.append(BlockLoad(request.request_id, tuple(keys), targets))
        self._overwritten.update(block_ids[first:])

    def step(self, output: Any) -> ConnectorStep:
        """Return what the workers do in a step. `output`: vLLM's SchedulerOutput."""
        saves = []
        for request_id, num_computed_tokens in self._note_blocks(output):
            tracked = self._requests.get(request_id)
            if tracked is not None and self._saves:
                num_tokens = num_computed_tokens + output.num_scheduled_tokens.get(request_id, 0)
                saves += self._offer(tracked, num_tokens)
        step = ConnectorStep(tuple(self._new_loads), tuple(saves), frozenset(self._overwritten))
        self._new_loads, self._overwritten = [], set()
        if self._store is not None:
            self._store.end_step()
        return step

    def loaded(self, request_ids: Iterable[str]) -> None:
        """All workers have finished loading these requests, with or without errors."""
        if self._store is not None:
            self._store.release(request_ids)

    def finished(self, request: Any) -> None:
        """Forget a request. Its blocks may be saved later than this: see `ConnectorWorker.before_step`. The first ones,
        without which the others are useless, were saved first; they must not be the first to be evicted."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None and self._store is not None:
            self._store.touch(self._keys(request, 0, tracked.num_offered))
        self._num_local.pop(request.request_id, None)
        self._adapters.forget(request.request_id)
        if self._store is not None:
            self._store.forget(request.request_id)

    def reset(self) -> None:
        """Find nothing that was saved until now: the weights may have changed in memory, so that blocks of this engine
        are not those of the namespace any more. New keys keep them apart from those of other engines, too. Blocks that
        are still being saved have the old keys."""
        self._epoch = os.urandom(16)

    def _note_blocks(self, output: Any) -> Iterable[tuple[str, int]]:
        """Keep the block tables of all requests of a step. Yields each with its number of computed tokens."""
        for new in output.scheduled_new_reqs:
            self._replace(new.req_id, new.block_ids[0], new.num_computed_tokens)
            yield new.req_id, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed_tokens in rows:
            added = block_ids[0] if block_ids else []
            if request_id in cached.resumed_req_ids:
                self._replace(request_id, added, num_computed_tokens)
            elif request_id in self._requests:
                self._requests[request_id].block_ids += added
                self._overwritten.update(added)
            yield request_id, num_computed_tokens

    def _replace(self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Set the blocks of a request that starts or continues. Those of computed tokens keep their contents."""
        if request_id in self._requests:
            self._requests[request_id].block_ids = list(block_ids)
        self._overwritten.update(block_ids[num_computed_tokens // self._block_size :])

    def _offer(self, tracked: _Tracked, num_tokens: int) -> list[BlockSave]:
        """Return the blocks that are full after `num_tokens` computed tokens and were not offered before. Blocks that
        vLLM had itself are among them: a daemon that has restarted does not have them."""
        num_full = min(num_tokens // self._block_size, len(tracked.block_ids))
        keys = self._keys(tracked.request, tracked.num_offered, num_full)
        if not keys:
            return []
        stop = tracked.num_offered + len(keys)
        save = BlockSave(tuple(keys), tuple(tracked.block_ids[tracked.num_offered : stop]))
        tracked.num_offered = stop
        return [save]

    def _keys(self, request: Any, first: int, stop: int) -> list[bytes]:
        """Return the keys of blocks whose tokens are known. There are none if the request's adapter is unknown."""
        hashes = [bytes(block_hash) for block_hash in request.block_hashes[first:stop]]
        identity = self._adapters.of(request)
        if identity is None:
            return []
        if not identity and not self._epoch:
            return hashes
        return [hashlib.sha256(key + self._epoch + identity).digest() for key in hashes]
