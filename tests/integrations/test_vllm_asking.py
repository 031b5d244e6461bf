"""vLLM's scheduler does not wait for the store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from fake_store import FakeStore
from waiting import until

from kvservice.integrations.vllm import asking
from kvservice.integrations.vllm.asking import StoreAsker
from kvservice.integrations.vllm.finders import StoreFinder

KEYS = [bytes([n]) * 32 for n in range(6)]


class Rig:
    def __init__(self) -> None:
        self.store = FakeStore(dict.fromkeys(KEYS, b""))
        self.asker = StoreAsker([StoreFinder(self.store)], patience_s=0.0)

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
    asker = StoreAsker([StoreFinder(rig.store)], patience_s=2.5, clock=lambda: float(next(times)))
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
    monkeypatch.setattr(StoreFinder, "num_leading", lambda *_: 1 // 0)
    assert rig.answer("a", KEYS) == 0
    monkeypatch.undo()
    assert rig.answer("a", KEYS) == 6


def test_touches_are_gathered(rig: Rig) -> None:
    times = iter([0.0, asking.TOUCH_INTERVAL_S / 2, asking.TOUCH_INTERVAL_S, 3600.0])
    asker = StoreAsker([StoreFinder(rig.store)], clock=lambda: next(times))
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
