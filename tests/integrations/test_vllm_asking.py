"""vLLM's scheduler does not wait for the store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from fake_store import FakeStore
from waiting import until

from kvservice.integrations.common.waiting import ComputeTime
from kvservice.integrations.vllm import asking
from kvservice.integrations.vllm.asking import StoreAsker
from kvservice.integrations.vllm.finders import StoreFinder

KEYS = [bytes([n]) * 32 for n in range(6)]
# A block of the fake store's tier comes in a second.
COMPUTE = ComputeTime(block_s=1.5)


class Rig:
    def __init__(self) -> None:
        self.store = FakeStore(dict.fromkeys(KEYS, b""))
        self.asker = StoreAsker([StoreFinder(self.store, COMPUTE, 1.0)], patience_s=0.0)

    def answer(self, request_id: str, keys: list[bytes]) -> int:
        """Ask as vLLM does: once in each step."""
        found: list[int | None] = []

        def ask() -> bool:
            self.asker.end_step()
            found.append(self.asker.num_leading(request_id, keys))
            return found[-1] is not None

        until(ask)
        assert found[-1] is not None
        return found[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.asker.close(60)
    assert made.store.closed


def test_an_answer_that_is_late_is_asked_for_again(rig: Rig) -> None:
    with rig.store.held_up("lookup"):
        assert rig.asker.num_leading("a", KEYS[:3]) is None
        assert rig.store.waiting.wait(60)
        assert rig.asker.num_leading("a", KEYS[:3]) is None
    assert rig.answer("a", KEYS[:3]) == 3
    assert rig.store.calls == ["lookup"]


def test_a_step_waits_for_all_its_answers_together(rig: Rig) -> None:
    """The clock goes on by a second in each look at it."""
    times = itertools.count()
    asker = StoreAsker([StoreFinder(rig.store, COMPUTE, 1.0)], patience_s=2.5, clock=lambda: float(next(times)))
    waits: list[float] = []

    class Unanswered:
        def wait(self, timeout_s: float) -> bool:
            waits.append(timeout_s)
            return False

    for name in ("a", "b"):
        asker._lookups[name] = lookup = asking._Lookup(KEYS)
        lookup.answered = Unanswered()  # type: ignore[assignment]
    for name in ("a", "b", "a", "b"):
        assert asker.num_leading(name, KEYS) is None
    asker.end_step()
    assert asker.num_leading("a", KEYS) is None
    asker.close(60)
    assert waits == [2.5, 1.5, 0.5, 0.0, 2.5]


def test_other_keys_are_another_question(rig: Rig) -> None:
    with rig.store.held_up("lookup"):
        assert rig.asker.num_leading("a", KEYS[:3]) is None
        assert rig.asker.num_leading("a", KEYS[1:]) is None
    assert rig.answer("a", KEYS[1:]) == 5
    assert rig.store.calls == ["lookup", "lookup"]


def test_an_answer_is_used_once(rig: Rig) -> None:
    assert rig.answer("a", KEYS) == 6
    del rig.store.values[KEYS[2]]
    assert rig.answer("a", KEYS) == 2
    rig.asker.num_leading("a", KEYS)
    rig.asker.forget("a")
    del rig.store.values[KEYS[0]]
    assert rig.answer("a", KEYS) == 0


def test_an_error_is_a_miss(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("find", "bring_up"):
        rig.store.below = {KEYS[5]: rig.store.values.pop(KEYS[5])}
        with monkeypatch.context() as patch:
            patch.setattr(StoreFinder, name, lambda *_: 1 // 0)
            assert rig.answer("a", KEYS) == 0
        assert rig.answer("a", KEYS) == 6


def test_blocks_are_brought_up_before_the_answer(rig: Rig) -> None:
    rig.store.below = {key: rig.store.values.pop(key) for key in KEYS[2:]}
    with rig.store.held_up("acquire"):
        assert rig.asker.num_leading("slow", KEYS) is None
        assert rig.store.waiting.wait(60)
        assert rig.answer("fast", KEYS[:2]) == 2, "others do not wait for it"
        assert rig.asker.num_leading("slow", KEYS) is None
    assert rig.answer("slow", KEYS) == 6
    assert list(rig.store.values) == KEYS
    assert not rig.store.leased


def test_a_step_does_not_wait_for_blocks_that_are_brought_up(rig: Rig) -> None:
    asker = StoreAsker([StoreFinder(rig.store, COMPUTE, 1.0)], patience_s=60.0)
    asker._lookups["a"] = asking._Lookup(KEYS, is_brought_up=True)
    began_s = time.monotonic()
    assert asker.num_leading("a", KEYS) is None
    assert time.monotonic() - began_s < 30
    asker.close(60)


@pytest.mark.parametrize(("block_s", "found"), [(0.5, 1), (0.9, 1), (1.0, 6), (2.0, 6)])
def test_blocks_that_are_computed_sooner_are_not_waited_for(block_s: float, found: int) -> None:
    """A tier that is a little too slow would deliver a part of the blocks in the time in which all are computed."""
    store = FakeStore({KEYS[0]: b""})
    store.below = dict.fromkeys(KEYS, b"")
    finder = StoreFinder(store, ComputeTime(block_s), 1.0)
    assert finder.find(KEYS) == (found, 1)
    assert list(store.values) == KEYS[:1]


def test_parts_of_blocks_are_brought_up_one_after_the_other() -> None:
    stores = [FakeStore(dict.fromkeys(KEYS[:3], b"")) for _ in range(2)]
    stores[0].below, stores[1].below = dict.fromkeys(KEYS, b""), dict.fromkeys(KEYS[:5], b"")
    asker = StoreAsker([StoreFinder(store, COMPUTE, 1.0) for store in stores], patience_s=60.0)
    until(lambda: asker.num_leading("a", KEYS) == 5)
    asker.close(60)
    assert [len(store.values) for store in stores] == [5, 5]
    assert [store.calls for store in stores] == [["lookup", "lookup", "acquire"]] * 2


def test_touches_are_gathered(rig: Rig) -> None:
    times = iter([0.0, asking.TOUCH_INTERVAL_S / 2, asking.TOUCH_INTERVAL_S, 3600.0])
    asker = StoreAsker([StoreFinder(rig.store, COMPUTE, 1.0)], clock=lambda: next(times))
    for keys in (KEYS[:2], KEYS[3:5], KEYS[3:4], []):
        asker.touch(keys)
        asker.end_step()
    asker.close(60)
    assert rig.store.calls == ["touch", "touch"]
    assert list(rig.store.values) == [KEYS[2], KEYS[5], KEYS[1], KEYS[0], KEYS[4], KEYS[3]]


def test_touches_have_a_limit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MAX_TOUCHED", 2)
    for number in range(4):
        rig.asker.touch(KEYS[number : number + 1])
    assert list(rig.asker._touched) == KEYS[:2]
