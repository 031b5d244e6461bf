"""The scheduler's side of the vLLM connector, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_store import FakeStore
from vllm_requests import BLOCK_SIZE, FakeOutput, FakeRequest, chain
from waiting import until

from kvservice.integrations.common.waiting import ComputeTime
from kvservice.integrations.vllm.asking import StoreAsker
from kvservice.integrations.vllm.finders import StoreFinder
from kvservice.integrations.vllm.scheduling import ConnectorScheduler
from kvservice.integrations.vllm.steps import BlockLoad, BlockSave

ASKERS: list[StoreAsker] = []


@pytest.fixture(autouse=True)
def close_askers() -> Iterator[None]:
    yield
    settle()


def scheduler(*stores: FakeStore, loads: bool = True, saves: bool = True) -> ConnectorScheduler:
    """Return a scheduler whose look-ups wait for the answer."""
    made = ConnectorScheduler(BLOCK_SIZE, loads=loads, saves=saves)
    ASKERS.append(StoreAsker([StoreFinder(store, ComputeTime(1.0), 1.0) for store in stores], patience_s=60.0))
    made.use(ASKERS[-1])
    return made


def settle() -> None:
    """Wait until everything that was asked so far has been done. Nothing can be asked afterwards."""
    while ASKERS:
        ASKERS.pop().close(60)


def stored(tokens: list[int]) -> FakeStore:
    return FakeStore(dict.fromkeys(chain(tokens), b""))


def run(made: ConnectorScheduler, request: FakeRequest, blocks: list[int], external: int = 0) -> None:
    made.num_matched_tokens(request, 0)
    made.allocated(request, blocks, external)


TOKENS = list(range(18))


def test_leading_blocks_are_found_by_every_worker_or_not_at_all() -> None:
    request = FakeRequest("a", TOKENS)
    assert scheduler(stored(TOKENS)).num_matched_tokens(request, 0) == 16
    assert scheduler(stored(TOKENS), stored(TOKENS[:9])).num_matched_tokens(request, 0) == 8
    assert scheduler(stored(TOKENS), FakeStore()).num_matched_tokens(request, 0) == 0
    assert ConnectorScheduler(BLOCK_SIZE, loads=True, saves=True).num_matched_tokens(request, 0) == 0


def test_blocks_after_a_gap_are_not_found() -> None:
    store = stored(TOKENS)
    del store.values[chain(TOKENS)[1]]
    assert scheduler(store).num_matched_tokens(FakeRequest("a", TOKENS), 0) == 4
    assert scheduler(store).num_matched_tokens(FakeRequest("a", TOKENS), 8) == 8


def test_the_last_token_is_always_computed() -> None:
    assert scheduler(stored(TOKENS)).num_matched_tokens(FakeRequest("a", TOKENS[:16]), 0) == 12


def test_look_up_has_no_effects() -> None:
    store = stored(TOKENS)
    made = scheduler(store)
    for _ in range(3):
        made.num_matched_tokens(FakeRequest("a", TOKENS), 0)
    assert set(store.calls) == {"lookup"}
    step = made.step(FakeOutput({}))
    assert not step.loads
    assert not step.overwritten


@pytest.mark.parametrize("request_of", [lambda: FakeRequest("a", TOKENS, skip_reading_prefix_cache=True)])
def test_requests_that_must_not_read_find_nothing(request_of: Any) -> None:
    store = stored(TOKENS)
    assert scheduler(store).num_matched_tokens(request_of(), 0) == 0
    assert scheduler(store, loads=False).num_matched_tokens(FakeRequest("b", TOKENS), 0) == 0
    assert store.calls == []


@pytest.mark.parametrize("state", ["away", "broken"])
def test_a_store_that_fails_has_no_blocks(state: str) -> None:
    store = stored(TOKENS)
    setattr(store, state, True)
    made = scheduler(store)
    request = FakeRequest("a", TOKENS)
    assert made.num_matched_tokens(request, 0) == 0
    made.allocated(request, [1, 2, 3, 4], 8)
    made.loaded(["a"])


def test_a_load_goes_to_the_blocks_after_the_local_ones_and_is_leased_until_it_ends() -> None:
    store = stored(TOKENS)
    made = scheduler(store)
    request = FakeRequest("a", TOKENS)
    assert made.num_matched_tokens(request, 4) == 12
    made.allocated(request, [9, 5, 6, 7, 8], 8)
    keys = chain(TOKENS)
    until(lambda: store.leased == keys[1:3])
    step = made.step(FakeOutput({}))
    assert step.loads == (BlockLoad("a", tuple(keys[1:3]), (5, 6)),)
    # All blocks after the local one are new.
    assert step.overwritten == {5, 6, 7, 8}
    assert made.step(FakeOutput({})).loads == ()
    made.loaded(["a", "unknown"])
    settle()
    assert store.leased == []
    assert store.calls.count("acquire") == 1


def test_blocks_of_the_local_cache_are_touched_in_the_store() -> None:
    """The first one is the most recent afterwards: the others are useless without it."""
    keys = chain(TOKENS)
    store = FakeStore(dict.fromkeys([*keys, b"other"], b""))
    made = scheduler(store)
    request = FakeRequest("a", TOKENS)
    made.num_matched_tokens(request, 12)
    made.allocated(request, [1, 2, 3, 4], 0)
    made.step(FakeOutput({}))
    settle()
    assert list(store.values) == [keys[3], b"other", keys[2], keys[1], keys[0]]


def test_full_blocks_are_saved_once_in_chunks() -> None:
    made = scheduler(FakeStore())
    request = FakeRequest("a", TOKENS)
    keys = chain(TOKENS)
    run(made, request, [1, 2])
    first = made.step(FakeOutput({"a": 7}, new=[(request, [1, 2], 0)]))
    assert first.saves == (BlockSave((keys[0],), (1,)),)
    assert first.overwritten == {1, 2}
    second = made.step(FakeOutput({"a": 10}, cached=[("a", [3, 4, 5], 7)]))
    assert second.saves == (BlockSave(tuple(keys[1:4]), (2, 3, 4)),)
    assert second.overwritten == {3, 4, 5}
    request.tokens += [50, 51]
    third = made.step(FakeOutput({"a": 1}, cached=[("a", None, 18)]))
    assert third.saves == ()
    # The last token of the fifth block is known now, and computed in this step.
    fourth = made.step(FakeOutput({"a": 1}, cached=[("a", None, 19)]))
    assert fourth.saves == (BlockSave((chain(request.tokens)[4],), (5,)),)


def test_tokens_that_are_not_known_yet_are_not_saved() -> None:
    """With asynchronous scheduling, vLLM schedules tokens whose ids it does not know."""
    made = scheduler(FakeStore())
    request = FakeRequest("a", TOKENS[:7])
    run(made, request, [1, 2, 3])
    step = made.step(FakeOutput({"a": 12}, new=[(request, [1, 2, 3], 0)]))
    assert step.saves == (BlockSave((chain(TOKENS)[0],), (1,)),)


def test_blocks_of_the_local_cache_are_offered_but_not_overwritten() -> None:
    made = scheduler(FakeStore())
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2, 3])
    step = made.step(FakeOutput({"a": 4}, new=[(request, [1, 2, 3], 8)]))
    assert step.saves == (BlockSave(tuple(chain(TOKENS)[:3]), (1, 2, 3)),)
    assert step.overwritten == {3}


def test_a_preempted_request_saves_from_its_new_blocks() -> None:
    made = scheduler(FakeStore())
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2])
    made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    run(made, request, [6, 7, 8, 9])
    step = made.step(FakeOutput({"a": 16}, cached=[("a", [6, 7, 8, 9], 0)], resumed={"a"}))
    assert step.saves == (BlockSave(tuple(chain(TOKENS)[2:4]), (8, 9)),)
    assert step.overwritten == {6, 7, 8, 9}


def test_a_consumer_saves_nothing() -> None:
    made = scheduler(FakeStore(), saves=False)
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2])
    step = made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    assert step.saves == ()
    assert step.overwritten == {1, 2}


def test_a_finished_request_leaves_its_first_block_as_the_most_recent() -> None:
    """It was saved first."""
    keys = chain(TOKENS)
    store = FakeStore(dict.fromkeys(keys, b""))
    made = scheduler(store)
    request = FakeRequest("a", TOKENS)
    made.allocated(request, [1, 2], 0)
    made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    made.step(FakeOutput({"a": 4}, cached=[("a", [3], 8)]))
    made.finished(request)
    made.step(FakeOutput({}))
    settle()
    assert list(store.values) == [keys[3], keys[2], keys[1], keys[0]]


def test_a_finished_request_is_forgotten() -> None:
    made = scheduler(FakeStore())
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2])
    made.finished(request)
    assert made.step(FakeOutput({"a": 8}, cached=[("a", [3], 0)])).saves == ()


def test_adapters_with_the_same_path_and_other_weights_have_other_keys(tmp_path: Path) -> None:
    keys: list[bytes] = []
    for size in (1, 2):
        (tmp_path / "adapter.safetensors").write_bytes(bytes(size))
        made = scheduler(FakeStore())
        request = FakeRequest("a", TOKENS, lora_request=SimpleNamespace(lora_path=str(tmp_path)))
        run(made, request, [1])
        (save,) = made.step(FakeOutput({"a": 4}, new=[(request, [1], 0)])).saves
        keys += save.keys
    assert len({*keys, chain(TOKENS)[0]}) == 3


def test_an_adapter_whose_files_change_shares_nothing_until_a_restart(tmp_path: Path) -> None:
    """The request that runs meanwhile has the old weights to its end."""

    def saves(request: FakeRequest, *row: Any) -> int:
        return sum(len(save.keys) for save in made.step(FakeOutput({request.request_id: 4}, **dict([row]))).saves)

    made = scheduler(FakeStore())
    (tmp_path / "adapter.safetensors").write_bytes(b"1")
    lora = SimpleNamespace(lora_path=str(tmp_path))
    first, second, third = (FakeRequest(name, TOKENS, lora_request=lora) for name in "abc")
    run(made, first, [1, 2])
    assert saves(first, "new", [(first, [1], 0)]) == 1
    (tmp_path / "adapter.safetensors").write_bytes(b"22")
    assert saves(first, "cached", [("a", [2], 4)]) == 1
    for request in (second, third):
        run(made, request, [3])
        assert saves(request, "new", [(request, [3], 0)]) == 0
        (tmp_path / "adapter.safetensors").write_bytes(b"1")


def test_an_adapter_that_is_no_directory_shares_nothing() -> None:
    store = stored(TOKENS)
    made = scheduler(store)
    request = FakeRequest("a", TOKENS, lora_request=SimpleNamespace(lora_path="someone/adapter"))
    assert made.num_matched_tokens(request, 0) == 0
    made.allocated(request, [1], 0)
    assert made.step(FakeOutput({"a": 4}, new=[(request, [1], 0)])).saves == ()


def test_after_a_reset_an_engine_has_keys_of_its_own() -> None:
    """The weights may be others now, in this engine alone."""
    store = stored(TOKENS)
    made = scheduler(store)
    request = FakeRequest("a", TOKENS)
    made.reset()
    assert made.num_matched_tokens(request, 0) == 0
    made.allocated(request, [1], 0)
    (save,) = made.step(FakeOutput({"a": 4}, new=[(request, [1], 0)])).saves
    store.values[save.keys[0]] = b""
    assert made.num_matched_tokens(FakeRequest("b", TOKENS), 0) == 4
    made.reset()
    assert made.num_matched_tokens(FakeRequest("b", TOKENS), 0) == 0
    assert scheduler(store).num_matched_tokens(FakeRequest("b", TOKENS), 0) == 16
