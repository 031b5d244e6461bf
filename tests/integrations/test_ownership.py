"""The sequences of a cache are freed with it, wherever it is collected."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_argument import cached

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import KVServiceCache, install

IDS = torch.arange(1, 97).repeat(2)[:180].reshape(2, 90)


def fail_after_a_pass(model, cache: KVServiceCache) -> None:
    model(IDS, **cached(cache))
    cache.crop(1)


def test_requests_with_a_cache_each_never_fill_the_pool(llama) -> None:
    """The README's three lines, in a loop. The pool has 256 blocks, and each request needs 46."""
    kv = llama.new_session()
    for request in range(8):
        ids = IDS.roll(request, 1)
        model: Any = install(llama.model)
        tokens = model.generate(ids, max_new_tokens=2, do_sample=False, **cached(KVServiceCache(kv)))
        assert torch.equal(tokens, llama.reference.generate(ids, max_new_tokens=2, do_sample=False))


def test_a_context_manager_frees_at_once(llama) -> None:
    kv = llama.new_session()
    with KVServiceCache(kv) as cache:
        llama.model(IDS, **cached(cache))
        assert len(kv.describe()) == 2
    assert kv.describe() == []
    with pytest.raises(InvalidArgumentError), KVServiceCache(kv) as cache:
        fail_after_a_pass(llama.model, cache)
    assert kv.describe() == []


def test_a_dropped_cache_is_freed_before_the_next_allocation(llama) -> None:
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    llama.model(IDS, **cached(cache))
    fork = cache.fork()
    del cache
    kv.allocate([1])
    assert sorted(info.length for info in kv.describe()) == [1, 90, 90]
    fork.reset()
    del fork
    kv.allocate([1])
    assert [info.length for info in kv.describe()] == [1, 1]


def test_sequences_that_the_caller_freed_are_passed_over(llama) -> None:
    kv = llama.new_session()
    cache = KVServiceCache(kv)
    llama.model(IDS, **cached(cache))
    kv.free(cache.sequences[:1])
    del cache
    assert kv.can_allocate([[1, 2, 3]]) == "ok"
    assert kv.describe() == []


def test_the_collector_may_run_anywhere_within_a_call_of_the_session(llama) -> None:
    """A cache in a reference cycle is collected whenever the garbage collector runs, also during another call."""
    kv = llama.new_session()
    gc.disable()
    try:
        for number in itertools.count(1, 20):
            cache: Any = KVServiceCache(kv)
            llama.model(IDS[:, :4], **cached(cache))
            cache.itself = cache
            del cache
            reached = collect_at_event(number, lambda: kv.describe([]))
            gc.collect()
            kv.free([kv.allocate([1])])
            assert kv.describe() == []
            if not reached:
                assert number > 20
                return
    finally:
        gc.enable()


def collect_at_event(number: int, call: Callable[[], object]) -> bool:
    """Run the garbage collector when a call enters or leaves its n-th function. Returns whether it has so many."""
    left = number

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            gc.collect()

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return left <= 0
