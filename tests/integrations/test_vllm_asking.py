"""vLLM's scheduler does not wait for the store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from fake_store import FakeStore
from vllm_connector import Engine, connector_config
from vllm_requests import BLOCK_SIZE, FakeRequest
from waiting import until

from kvservice.integrations.vllm.asking import StoreAsker

KEYS = [bytes([n]) * 32 for n in range(6)]
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


def test_an_answer_that_is_late_is_asked_for_again(engine: Engine, store: FakeStore) -> None:
    with store.held_up("lookup"):
        assert ask(engine, "a", KEYS[:3]) is None
        assert store.waiting.wait(60)
        assert ask(engine, "a", KEYS[:3]) is None
    assert answer(engine, "a", KEYS[:3]) == 3
    assert store.calls == ["lookup"]


def test_other_keys_are_another_question(engine: Engine, store: FakeStore) -> None:
    with store.held_up("lookup"):
        assert ask(engine, "a", KEYS[:3]) is None
        assert ask(engine, "a", KEYS[1:]) is None
    assert answer(engine, "a", KEYS[1:]) == 5
    assert store.calls == ["lookup", "lookup"]


def test_an_answer_is_used_once(engine: Engine, store: FakeStore) -> None:
    assert answer(engine, "a", KEYS) == 6
    del store.values[KEYS[2]]
    assert answer(engine, "a", KEYS) == 2
    ask(engine, "a", KEYS)
    engine.scheduler.request_finished(of(engine, "a", KEYS), [])
    del store.values[KEYS[0]]
    assert answer(engine, "a", KEYS) == 0


def test_an_error_is_a_miss(engine: Engine, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of error counts, also while blocks are brought up."""
    for name in ("lookup", "acquire"):
        store.below = {KEYS[5]: store.values.pop(KEYS[5])}
        with monkeypatch.context() as patch:
            patch.setattr(store, name, lambda *_, **__: 1 // 0)
            assert answer(engine, "a", KEYS) == 0, name
        assert answer(engine, "a", KEYS) == 6, name


def test_blocks_are_brought_up_before_the_answer(engine: Engine, store: FakeStore) -> None:
    store.below = {key: store.values.pop(key) for key in KEYS[2:]}
    with store.held_up("acquire"):
        assert ask(engine, "slow", KEYS) is None
        assert store.waiting.wait(60)
        assert answer(engine, "fast", KEYS[:2]) == 2, "others do not wait for it"
        assert ask(engine, "slow", KEYS) is None
    assert answer(engine, "slow", KEYS) == 6
    assert list(store.values) == KEYS
    assert not store.leased


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
    assert [store.calls for store in engine.asked] == [["lookup", "lookup", "acquire"]] * 2


class Finder:
    """The blocks of a worker. A look-up of the key `slow` is answered when `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.touched: list[list[bytes]] = []

    def find(self, keys: Sequence[bytes]) -> Any:
        if keys == [b"slow"]:
            assert self.go_on.wait(60)
        return Found(len(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched.append(list(keys))

    def close(self) -> None:
        self.go_on.set()


class Found:
    def __init__(self, count: int) -> None:
        self.num_leading = self.num_in_memory = count


def test_a_step_waits_for_all_its_answers_together() -> None:
    """By its clock, the first answer has taken the time of the step, so the second one is not waited for."""
    finder: Any = Finder()
    times = itertools.chain([0.0, 60.0], itertools.repeat(60.0))
    asker = StoreAsker([finder], patience_s=60.0, clock=lambda: next(times))
    assert asker.num_leading("quick", [b"quick"]) == 1
    # A step that waited for it would get it.
    later = threading.Timer(5.0, finder.go_on.set)
    later.start()
    assert asker.num_leading("slow", [b"slow"]) is None
    finder.go_on.set()
    later.cancel()
    asker.end_step()
    assert asker.num_leading("slow", [b"slow"]) == 1, "the next step waits again"
    asker.close(60)


def test_touches_are_gathered_and_have_a_limit() -> None:
    finder: Any = Finder()
    times = iter([0.0, 0.25, 0.5, 3600.0])
    asker = StoreAsker([finder], clock=lambda: next(times))
    for keys in (KEYS[:2], KEYS[3:5], KEYS[3:4]):
        asker.touch(keys)
        asker.end_step()
    until(lambda: finder.touched == [KEYS[:2], KEYS[3:5]])
    many = [number.to_bytes(32) for number in range(40_000)]
    for first in range(0, len(many), 100):
        asker.touch(many[first : first + 100])
    asker.end_step()
    asker.close(60)
    assert len(finder.touched) == 3
    assert finder.touched[2] == many[: len(finder.touched[2])]
    assert len(finder.touched[2]) < 20_000
