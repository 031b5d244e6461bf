"""vLLM's scheduler does not wait for the store."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from fake_store import FakeLease, FakeStore
from store_daemons import SMALL_STORE, keys_of, new_namespace
from vllm_connector import Engine, connector_config
from vllm_requests import BLOCK_SIZE, FULL, FakeRequest, wanted
from waiting import until

from kvservice.client import KVClient
from kvservice.client.store.values import SharedUses, num_keys, split_keys
from kvservice.integrations.common import ComputeTime, FoundBlocks
from kvservice.integrations.vllm.finder import StoreFinder
from kvservice.integrations.vllm.groups import CacheGroups, Group
from kvservice.integrations.vllm.lookup import (
    EXPECTED_S,
    FRESH_S,
    MAX_KEYS_EACH,
    MAX_PROMISES,
    MAX_TOUCHED,
    NOTHING_S,
    PROMISE_S,
    RENEW_S,
    RENEWED_S,
    Found,
    StoreLookup,
)
from kvservice.integrations.vllm.steps import LeasedBlocks
from kvservice.launch import Daemon

KEYS = [bytes([n]) * 32 for n in range(6)]
# Each block has two keys.
TWO = CacheGroups([Group(), Group(window=BLOCK_SIZE)], BLOCK_SIZE)
OpenEngine = Callable[..., Engine]


def compute_s(seconds: float) -> dict[str, Any]:
    """Return the option of an engine that computes a block in this time. The fake store's tier takes a second."""
    return {"extra": {"prefill_tokens_per_s": BLOCK_SIZE / seconds}}


@pytest.fixture
def open_engine(vllm_connector: Any) -> Iterator[OpenEngine]:
    with ExitStack() as stack:

        def make(*stores: FakeStore, **config: Any) -> Engine:
            made = Engine(vllm_connector, *stores, config=connector_config(**config))
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def engine(open_engine: OpenEngine) -> Engine:
    return open_engine(FakeStore(dict.fromkeys(KEYS, b"")), **compute_s(1.5))


@pytest.fixture
def store(engine: Engine) -> FakeStore:
    """The store, as the scheduler sees it."""
    return engine.asked[0]


def ask(engine: Engine, request_id: str, keys: Sequence[bytes]) -> int | None:
    """Ask once. A request has a token besides its blocks."""
    num_tokens, _ = engine.scheduler.get_num_new_matched_tokens(of(engine, request_id, keys), 0)
    return None if num_tokens is None else num_tokens // BLOCK_SIZE


def answer(engine: Engine, request_id: str, keys: Sequence[bytes]) -> int:
    return engine.matched(of(engine, request_id, keys)) // BLOCK_SIZE


def of(engine: Engine, request_id: str, keys: Sequence[bytes]) -> FakeRequest:
    request = engine.request(request_id, keys)
    request.tokens.append(0)
    return request


def test_an_answer_is_there_in_the_same_step_and_is_a_promise(engine: Engine, store: FakeStore) -> None:
    """vLLM may ask again before it has room for the request."""
    assert ask(engine, "a", KEYS[:3]) == 3
    assert store.leased == KEYS[:3]
    store.values = {}
    assert ask(engine, "a", KEYS[:3]) == 3
    assert store.calls == ["lookup", "acquire"]


def test_other_keys_are_another_question(engine: Engine, store: FakeStore) -> None:
    assert ask(engine, "a", KEYS[:3]) == 3
    assert ask(engine, "a", KEYS[1:]) == 5
    until(lambda: store.leased == KEYS[1:])


def test_a_promise_ends_with_the_request_or_if_vllm_loads_nothing(engine: Engine, store: FakeStore) -> None:
    for end in (
        lambda: engine.scheduler.request_finished(of(engine, "a", KEYS), []),
        lambda: engine.allocated(of(engine, "a", KEYS), [], 0),
    ):
        assert ask(engine, "a", KEYS) == 6
        assert store.leased == KEYS
        end()
        until(lambda: store.leased == [])


def test_an_error_is_a_miss(engine: Engine, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of error counts, also while blocks are brought up."""
    for name in ("lookup", "acquire"):
        store.below = {KEYS[5]: store.values.pop(KEYS[5])}
        with monkeypatch.context() as patch:
            patch.setattr(store, name, lambda *_, **__: 1 // 0)
            assert answer(engine, name, KEYS) == 0, name
        until(lambda name=name: answer(engine, f"{name} again", KEYS) == 6, engine.step)  # type: ignore[misc]


def test_blocks_are_brought_up_before_the_answer(engine: Engine, store: FakeStore) -> None:
    store.below = {key: store.values.pop(key) for key in KEYS[2:]}
    with store.held_up("bring up"):
        assert ask(engine, "slow", KEYS) is None
        assert store.waiting.wait(60)
        assert answer(engine, "fast", KEYS[:2]) == 2, "others do not wait for it"
        assert ask(engine, "slow", KEYS) is None
    assert answer(engine, "slow", KEYS) == 6
    assert list(store.values) == KEYS
    # It is leased from now on, and loaded asynchronously.
    assert store.leased == KEYS[:2] + KEYS
    assert engine.asked_for(of(engine, "slow", KEYS)) == (6 * BLOCK_SIZE, True)


def test_blocks_that_are_computed_sooner_are_not_waited_for(open_engine: OpenEngine) -> None:
    """A tier that is a little too slow would deliver a part of the blocks in the time in which all are computed."""
    for block_s, found in ((0.5, 1), (0.9, 1), (1.0, 6), (1.5, 6)):
        engine = open_engine(FakeStore({KEYS[0]: b""}), **compute_s(block_s))
        (store,) = engine.asked
        store.below = dict.fromkeys(KEYS, b"")
        assert answer(engine, "a", KEYS) == found, block_s
        assert len(store.values) == found


def test_parts_of_blocks_are_brought_up_one_after_the_other(open_engine: OpenEngine) -> None:
    """Each of two ranks has its share of the time of computing a block."""
    engine = open_engine(*(FakeStore(dict.fromkeys(KEYS[:3], b"")) for _ in range(2)), **compute_s(3.0))
    for store, below in zip(engine.asked, (KEYS, KEYS[:5]), strict=True):
        store.below = dict.fromkeys(below, b"")
    assert answer(engine, "a", KEYS) == 5
    assert [len(store.values) for store in engine.asked] == [5, 5]
    assert [store.calls[:3] for store in engine.asked] == [["lookup", "lookup", "acquire"]] * 2


class Finder:
    """The blocks of a worker. Its clock goes on by `answers_s` with each look-up, and by a second for each ping."""

    rank = (0, 0)
    sees_all = False

    def __init__(self) -> None:
        self.now = self.answers_s = 0.0
        self.asked: list[list[bytes]] = []
        self.limits_s: list[float] = []
        self.leases: list[FakeLease] = []
        self.touched: list[list[bytes]] = []
        self.early: list[list[bytes]] = []
        self.looks = 0
        self.uses = SharedUses()
        self.missing: set[bytes] = set()
        self.is_back = threading.Event()
        self.store = FakeStore()

    @property
    def memory(self) -> Any:
        return self.store.memory

    def see(self, _keys: bytes, _max_age_s: float) -> None:
        """The daemon is asked."""

    def share(self, _keys: bytes, _max_age_s: float) -> None:
        """The daemon is asked."""

    def look(self) -> None:
        """Nothing is seen."""
        self.looks += 1

    def find(self, keys: bytes, timeout_s: float) -> FoundBlocks:
        self.asked.append(split_keys(keys))
        self.limits_s.append(timeout_s)
        self.now += self.answers_s
        return FoundBlocks(num_keys(keys), num_keys(keys))

    def flags(self, keys: bytes, timeout_s: float) -> Any:  # noqa: ARG002
        self.early.append(split_keys(keys))
        return np.array([key not in self.missing for key in split_keys(keys)])

    def lease(self, keys: bytes, timeout_s: float, **_: Any) -> FakeLease:  # noqa: ARG002
        self.store.values |= dict.fromkeys(split_keys(keys), b"")
        self.leases.append(FakeLease(self.store, keys))
        return self.leases[-1]

    def places(self, _memory: Any, lease: Any, num_blocks: int) -> LeasedBlocks:
        return LeasedBlocks((0, 0), lease.offsets[: 8 * num_blocks], lease.versions[: 8 * num_blocks])

    def touch(self, keys: bytes, uses: SharedUses | None) -> None:
        if keys:
            self.touched.append(split_keys(keys))
        if uses is not None:
            self.uses.hits += uses.hits
            self.uses.misses += uses.misses
            self.uses.missing += uses.missing
            self.uses.not_whole += uses.not_whole

    def answers(self, timeout_s: float) -> bool:  # noqa: ARG002
        return self.is_back.is_set()

    def close(self) -> None:
        self.is_back.set()


@pytest.fixture
def finder() -> Any:
    return Finder()


@pytest.fixture
def lookup(finder: Any) -> Iterator[StoreLookup]:
    made = StoreLookup([finder], 0.05, 1.0, clock=lambda: finder.now)
    yield made
    made.close(60)


def test_a_step_asks_no_more_when_its_time_is_used_up(finder: Any, lookup: StoreLookup) -> None:
    finder.answers_s = 0.03
    assert lookup.find("a", wanted([bytes(32)])) == Found(1, True)
    assert lookup.find("b", wanted([bytes(32)])) == Found(1, True)
    assert lookup.find("c", wanted([bytes(32)])) is None
    assert lookup.find("a", wanted([bytes(32)])) == Found(1, True)
    lookup.end_step()
    assert lookup.find("c", wanted([bytes(32)])) == Found(1, True)
    assert finder.limits_s == [0.05] * 3


def expect(finder: Any, lookup: StoreLookup, *prompts: Sequence[bytes]) -> None:
    """Let requests come, named by their numbers, and wait until all of them have been asked for."""
    num_asked = sum(map(len, finder.early))
    for number, keys in enumerate(prompts):
        lookup.expect(str(number), b"".join(keys))

    def all_asked() -> bool:
        lookup.end_step()
        return sum(map(len, finder.early)) == num_asked + sum(len(keys[:MAX_KEYS_EACH]) for keys in prompts)

    until(all_asked)


def test_what_is_known_to_be_missing_costs_no_call(finder: Any, lookup: StoreLookup) -> None:
    """It is counted by the daemon all the same."""
    finder.missing = {KEYS[2], KEYS[3]}
    expect(finder, lookup, KEYS[2:3], KEYS[:4])
    for _ in range(3):
        assert lookup.find("0", wanted(KEYS[2:3])) == Found(0, True)
        assert lookup.find("1", wanted(KEYS[2:4], 2)) == Found(0, True)
    assert (finder.asked, finder.leases) == ([], [])
    finder.now += RENEW_S
    until(lambda: finder.uses == SharedUses(misses=3, missing=[KEYS[2], KEYS[2]]))


def test_why_blocks_are_missing(open_engine: OpenEngine) -> None:
    """One worker of two has a block less; no worker has the one after it. The first one's daemon counts the reasons."""
    engine = open_engine(FakeStore(dict.fromkeys(KEYS[:3], b"")), FakeStore(dict.fromkeys(KEYS[:2], b"")))
    assert answer(engine, "a", KEYS[:4]) == 2
    assert answer(engine, "b", KEYS[:2]) == 2
    assert answer(engine, "c", [KEYS[0], KEYS[3]]) == 1

    def reported() -> bool:
        engine.step()
        return [(store.uses.missing, store.uses.not_whole) for store in engine.asked] == [([KEYS[3]], 1), ([], 0)]

    until(reported)


def test_what_is_known_to_be_there_is_leased_at_once(finder: Any, lookup: StoreLookup) -> None:
    finder.missing = {KEYS[0]}
    expect(finder, lookup, KEYS)
    until(lambda: lookup.find("0", wanted(KEYS)) == Found(0, True))
    assert lookup.find("0", wanted(KEYS[1:], 1)) == Found(5, True)
    assert (finder.asked, len(finder.leases)) == ([], 1)


def test_an_early_answer_is_renewed_and_not_used_when_it_is_old(finder: Any, lookup: StoreLookup) -> None:
    finder.missing = set(KEYS)
    expect(finder, lookup, KEYS)
    until(lambda: lookup.find("0", wanted(KEYS)) == Found(0, True))
    finder.missing = set()
    finder.now += EXPECTED_S
    assert lookup.find("0", wanted(KEYS)) == Found(6, True), "it has been asked for"
    assert len(finder.asked) == 1
    num_early = len(finder.early)
    finder.now += RENEWED_S
    lookup.end_step()
    until(lambda: len(finder.early) == num_early + 1)


def test_blocks_far_behind_in_a_prompt_are_asked_for(finder: Any, lookup: StoreLookup) -> None:
    keys = [number.to_bytes(32) for number in range(MAX_KEYS_EACH + 2)]
    finder.missing = set(keys)
    expect(finder, lookup, keys)
    assert lookup.find("0", wanted(keys[MAX_KEYS_EACH:], MAX_KEYS_EACH)) == Found(2, True)


@pytest.mark.parametrize("ends", ["scheduled", "finished"])
def test_a_request_that_waits_no_more_is_not_asked_for(finder: Any, lookup: StoreLookup, ends: str) -> None:
    finder.missing = set(KEYS)
    expect(finder, lookup, KEYS, KEYS[:1])
    if ends == "scheduled":
        lookup.take("0", 0, "0")
    else:
        lookup.forget("0")
    finder.early.clear()
    finder.now += RENEWED_S
    lookup.end_step()
    until(lambda: finder.early != [])
    assert finder.early == [KEYS[:1]]


def test_a_late_answer_is_used_and_the_next_ones_are_misses(finder: Any, lookup: StoreLookup) -> None:
    """Until the daemon answers in time."""
    finder.answers_s = 0.05
    assert lookup.find("a", wanted([bytes(32)])) == Found(1, True)
    lookup.end_step()
    assert lookup.find("c", wanted([bytes(32)])) == Found(0, True)
    assert len(finder.asked) == 1
    assert lookup.find("a", wanted([bytes(32)])) == Found(1, True), "a promise is a promise"
    finder.is_back.set()
    until(lambda: lookup.asks)
    assert lookup.find("c", wanted([bytes(32)])) == Found(1, True)


def test_a_promise_is_renewed_and_dropped_in_the_end(finder: Any, lookup: StoreLookup) -> None:
    assert lookup.find("a", wanted(KEYS)) == Found(6, True)
    (lease,) = finder.leases
    for _ in range(3):
        finder.now += FRESH_S
        assert lookup.find("a", wanted(KEYS)) == Found(6, True)
    assert (finder.store.calls, len(finder.asked)) == (["renew"] * 3, 1)
    finder.now += FRESH_S
    lease.alive = False  # the daemon has restarted
    assert lookup.find("a", wanted(KEYS)) == Found(6, True)
    assert len(finder.asked) == 2
    finder.now += PROMISE_S
    lookup.end_step()
    until(lambda: finder.store.leased == [])


def test_promises_have_a_limit(finder: Any, lookup: StoreLookup) -> None:
    for number in range(MAX_PROMISES + 5):
        lookup.find(str(number), wanted([number.to_bytes(32)]))
    until(lambda: len(finder.store.leased) == MAX_PROMISES)
    assert lookup.take("0", 1, "0") is None
    taken = lookup.take("5", 1, 7)
    assert taken is not None
    assert len(taken[0, 0].offsets) == 8
    # What is taken stays until it is loaded.
    finder.now += 2 * PROMISE_S
    lookup.end_step()
    until(lambda: finder.store.leased == [(5).to_bytes(32)])
    lookup.release(7)
    until(lambda: finder.store.leased == [])


def test_touches_are_gathered_and_have_a_limit(finder: Any, lookup: StoreLookup) -> None:
    for keys, now in ((KEYS[:2], 0.0), (KEYS[3:5], 0.25), (KEYS[3:5], 0.5)):
        finder.now = now
        lookup.touch(b"".join(keys))
        lookup.end_step()
    until(lambda: finder.touched == [KEYS[:2], KEYS[3:5]])
    many = [number.to_bytes(32) for number in range(40_000)]
    for first in range(0, len(many), 100):
        lookup.touch(b"".join(many[first : first + 100]))
    finder.now = 3600.0
    lookup.end_step()
    until(lambda: len(finder.touched) == 3)
    assert finder.touched[2] == many[:MAX_TOUCHED]
    # A prefix that many have counts once.
    for number in range(64):
        lookup.touch(b"".join(many[:512] + many[512 + 16 * number : 528 + 16 * number]))
    finder.now = 7200.0
    lookup.end_step()
    until(lambda: len(finder.touched) == 4)
    assert finder.touched[3] == many[: 512 + 64 * 16]


def test_one_look_at_most_waits_for_the_thread(finder: Any, lookup: StoreLookup) -> None:
    """The thread is away for some steps."""
    away = threading.Event()
    lookup._queue.put(lambda: until(away.is_set))
    for number in range(20):
        lookup.find(f"r{number}", wanted(KEYS[:1]))
        lookup.end_step()
    assert lookup._queue.qsize() <= 2
    looks = finder.looks
    away.set()
    until(lambda: finder.looks > looks)


def test_what_is_seen_in_the_mapped_memory_needs_no_daemon() -> None:
    """Hits are leased and misses known while the daemon has stopped."""
    with Daemon(**SMALL_STORE | {"share_store": "write"}) as daemon, KVClient(daemon.address) as client:
        namespace = new_namespace(64)
        store, background = (client.store(namespace, timeout_s=30.0) for _ in range(2))
        store.put(keys_of(1, 2, 3), np.zeros((3, 64), np.uint8))
        until(lambda: store.memory is not None)
        asked = StoreLookup([StoreFinder((0, 0), store, background, ComputeTime(1.0))], 30.0, 30.0)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            asked.expect("a", b"".join(keys_of(1, 2)))
            assert asked.find("a", wanted(keys_of(1, 2, 9, 3))) == Found(2, True)
            assert asked.find("b", wanted(keys_of(9, 1))) == Found(0, True)
            assert asked.find("c", wanted(keys_of(2, 3), groups=TWO)) == Found(1, True)
            places = asked.take("a", 2, 1)
            assert places is not None
            memory = store.memory
            assert memory is not None
            assert memory.unchanged(places[0, 0].offsets, places[0, 0].versions).tolist() == [True, True]
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        # Nothing that is leased goes, until it is released.
        store.remove(keys_of(1, 2, 3))
        store.put(keys_of(4, 5), np.ones((2, 64), np.uint8))
        assert memory.unchanged(places[0, 0].offsets, places[0, 0].versions).tolist() == [True, True]
        asked.release(1)
        asked.close(60)


@pytest.mark.parametrize(("share_store", "sees"), [("write", True), ("read", False), ("off", False)])
def test_a_block_that_is_nowhere_is_a_miss_without_a_call(
    share_store: str, sees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who sees all that there is can say so. It counts once, however often vLLM asks meanwhile."""
    with Daemon(**SMALL_STORE | {"share_store": share_store}) as daemon, KVClient(daemon.address) as client:
        namespace = new_namespace(64)
        store, background = (client.store(namespace, timeout_s=30.0) for _ in range(2))
        store.put(keys_of(1), np.zeros((1, 64), np.uint8))
        if share_store != "off":
            until(lambda: store.memory is not None)
        finder = StoreFinder((0, 0), store, background, ComputeTime(1.0))
        now = 0.0
        asked = StoreLookup([finder], 30.0, 30.0, clock=lambda: now)
        there, nowhere = keys_of(1, 9)
        until(lambda: asked.find("promised", wanted([there])) == Found(1, True))
        asked._take_uses()
        calls: list[str] = []
        for name in ("lookup", "acquire"):
            monkeypatch.setattr(store, name, _noted(getattr(store, name), name, calls))

        def count(*keys: bytes) -> tuple[int, int, list[bytes]]:
            """Ask several times, and return the calls and what is counted."""
            calls.clear()
            for _ in range(3):
                assert asked.find("a", wanted(keys)) == Found(0, True)
            uses = asked._take_uses() or SharedUses()
            return len(calls), uses.misses, uses.missing

        # The daemon counts what it is asked for itself, but not why.
        counted = (0, 3, [nowhere]) if sees else (1, 0, [nowhere])
        assert count(nowhere, there, there) == counted
        assert count(nowhere, there, there) == (0, 0, [])
        now += NOTHING_S
        assert count(nowhere, there, there) == counted
        assert count(nowhere, there)[0] == counted[0], "vLLM wants others than before"
        asked.close(60)


@pytest.mark.parametrize("share_store", ["write", "read", "off"])
@pytest.mark.parametrize("groups", [FULL, TWO], ids=["one group", "two groups"])
def test_a_new_prompt_is_a_miss_by_its_first_block(groups: CacheGroups, share_store: str) -> None:
    """The mapped memory tells that, since nothing is below it. A request counts once, however often vLLM asks."""
    with Daemon(**SMALL_STORE | {"share_store": share_store}) as daemon, KVClient(daemon.address) as client:
        namespace = new_namespace(64)
        store, background = (client.store(namespace, timeout_s=30.0) for _ in range(2))
        first, *others = keys_of(*range(1, 9))
        store.put(others, np.zeros((7, 64), np.uint8))
        if share_store != "off":
            until(lambda: store.memory is not None)
        asked = StoreLookup([StoreFinder((0, 0), store, background, ComputeTime(1.0))], 30.0, 30.0)
        sees = share_store != "off"
        for request_id in ("a", "a", "b"):
            assert asked.is_miss(request_id, first, 8) == sees
        assert not asked.is_miss("c", others[0], 7)
        uses = asked._take_uses() or SharedUses()
        assert (uses.hits, uses.misses, uses.missing) == ((0, 16, [first, first]) if sees else (0, 0, []))
        asked.take("a", 0, "a")
        asked.forget("b")
        for request_id in ("a", "b"):
            assert asked.is_miss(request_id, first, 8) == sees
        assert (asked._take_uses() or SharedUses()).misses == (16 if sees else 0), "they are other look-ups"
        store.put(first, np.zeros((1, 64), np.uint8))
        if (memory := store.memory) is not None:
            memory.look()
        assert not asked.is_miss("a", first, 8)
        assert asked.find("a", wanted([first, *others], groups=groups)) == Found(8 // groups.num, True)
        asked.close(60)


def test_a_miss_is_one_of_all_workers() -> None:
    """A block that some workers have is looked up, so that the daemon counts it as not whole."""
    first, second = keys_of(1, 2)
    with Daemon(**SMALL_STORE | {"share_store": "write"}) as daemon, KVClient(daemon.address) as client:
        namespaces = new_namespace(64), new_namespace(64)
        stores = [[client.store(namespace, timeout_s=30.0) for _ in range(2)] for namespace in namespaces]
        stores[1][0].put(first, np.zeros((1, 64), np.uint8))
        until(lambda: all(store.memory is not None for store, _ in stores))
        finders = [StoreFinder((0, rank), store, other, ComputeTime(1.0)) for rank, (store, other) in enumerate(stores)]
        asked = StoreLookup(finders, 30.0, 30.0)
        assert not asked.is_miss("a", first, 2)
        assert asked.find("a", wanted([first, second])) == Found(0, True)
        assert asked.is_miss("b", second, 1)
        uses = asked._take_uses()
        assert uses is not None
        assert (uses.misses, uses.not_whole, uses.missing) == (3, 1, [second])
        asked.close(60)


def _noted(call: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def noted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return call(*arguments, **options)

    return noted


def test_a_view_of_the_mapped_memory_may_be_old_until_somebody_looks() -> None:
    """A step that others wait for does not look itself."""
    with Daemon(**SMALL_STORE | {"share_store": "write"}) as daemon, KVClient(daemon.address) as client:
        store = client.store(new_namespace(64), timeout_s=30.0)
        store.put(keys_of(1), np.zeros((1, 64), np.uint8))
        until(lambda: store.memory is not None)
        memory = store.memory
        assert memory is not None
        memory.look()
        seen = [memory.find(keys_of(1)[0], max_age_s=3600.0)]
        store.put(keys_of(2), np.zeros((1, 64), np.uint8))
        seen.append(memory.find(keys_of(2)[0], max_age_s=3600.0))
        assert memory.lease(keys_of(2)[0], max_age_s=3600.0).num_blocks == 0  # type: ignore[union-attr]
        memory.look()
        seen.append(memory.find(keys_of(2)[0], max_age_s=3600.0))
        assert [each.tolist() for each in seen if each is not None] == [[True], [False], [True]]
        store.put(keys_of(3), np.zeros((1, 64), np.uint8))
        until(lambda: bool((found := memory.find(keys_of(3)[0])) is not None and found.all()))


def test_a_frozen_daemon_costs_a_step_its_limit_once() -> None:
    """The real client, with a daemon that has stopped. The limit is 50 ms; the test allows for a busy machine."""
    with Daemon(**SMALL_STORE | {"share_store": "read"}) as daemon, KVClient(daemon.address) as client:
        store = client.store(new_namespace(64), timeout_s=30.0)
        store.put(keys_of(1), np.zeros((1, 64), np.uint8))
        times: list[float] = []
        background = client.store(new_namespace(64), timeout_s=30.0)
        asked = StoreLookup([StoreFinder((0, 0), store, background, ComputeTime(1.0))], 0.05, 1.0)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            for number in range(20):
                asked.end_step()
                began = time.monotonic()
                assert asked.find(str(number), wanted(keys_of(1))) == Found(0, True)
                times.append(time.monotonic() - began)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        assert 0.04 < times[0] < 5.0
        assert sum(times[1:]) < times[0] + 5.0

        def is_found() -> bool:
            asked.end_step()
            return asked.find("again", wanted(keys_of(1))) == Found(1, True)

        until(is_found)
        asked.close(60)
