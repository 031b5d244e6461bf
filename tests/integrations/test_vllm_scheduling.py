"""The scheduler's side of the vLLM connector, without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_store import FakeStore
from vllm_connector import Engine, connector_config
from vllm_requests import FakeOutput, FakeRequest, chain
from waiting import until

TOKENS = list(range(18))
OpenEngine = Callable[..., Engine]


@pytest.fixture
def engine(vllm_connector: Any) -> Iterator[OpenEngine]:
    """Return an engine whose workers have these stores. `config`: changes of its configuration."""
    with ExitStack() as stack:

        def make(*stores: FakeStore, **config: Any) -> Engine:
            made = Engine(vllm_connector, *stores, config=connector_config(**config))
            stack.callback(made.close)
            return made

        yield make


def stored(tokens: list[int]) -> FakeStore:
    return FakeStore(dict.fromkeys(chain(tokens), b""))


def run(made: Engine, request: FakeRequest, blocks: list[int], external: int = 0) -> None:
    made.matched(request)
    made.allocated(request, blocks, external)


def saves(message: Any) -> list[tuple[list[bytes], list[int]]]:
    """Return the keys and blocks that the workers are told to save."""
    return [(list(save.keys), list(save.block_ids)) for save in message.step.saves]


def overwritten(message: Any) -> set[int]:
    """Return the blocks of which the workers are told that they change."""
    return set(message.step.overwritten)


def test_leading_blocks_are_found_by_every_worker_or_not_at_all(engine: OpenEngine) -> None:
    request = FakeRequest("a", TOKENS)
    assert engine(stored(TOKENS)).matched(request) == 16
    assert engine(stored(TOKENS), stored(TOKENS[:9])).matched(request) == 8
    assert engine(stored(TOKENS), FakeStore()).matched(request) == 0
    assert engine().matched(request) == 0


def test_blocks_after_a_gap_are_not_found(engine: OpenEngine) -> None:
    store = stored(TOKENS)
    del store.values[chain(TOKENS)[1]]
    assert engine(store).matched(FakeRequest("a", TOKENS), 0) == 4
    assert engine(store).matched(FakeRequest("a", TOKENS), 8) == 8


def test_the_last_token_is_always_computed(engine: OpenEngine) -> None:
    assert engine(stored(TOKENS)).matched(FakeRequest("a", TOKENS[:16])) == 12


def test_look_up_has_no_effects(engine: OpenEngine) -> None:
    store = stored(TOKENS)
    made = engine(store)
    for _ in range(3):
        made.matched(FakeRequest("a", TOKENS))
    assert set(made.asked[0].calls) == {"lookup"}
    message = made.step()
    assert not message.step.loads
    assert not overwritten(message)


def test_requests_that_must_not_read_find_nothing(engine: OpenEngine) -> None:
    both, producer = engine(stored(TOKENS)), engine(stored(TOKENS), consumer=False)
    assert both.matched(FakeRequest("a", TOKENS, skip_reading_prefix_cache=True)) == 0
    assert producer.matched(FakeRequest("b", TOKENS)) == 0
    assert both.asked[0].calls == producer.asked[0].calls == []


def test_a_store_that_fails_has_no_blocks(engine: OpenEngine) -> None:
    for state in ("away", "broken"):
        made = engine(stored(TOKENS))
        setattr(made.asked[0], state, True)
        request = FakeRequest("a", TOKENS)
        assert made.matched(request) == 0, state
        made.allocated(request, [1, 2, 3, 4], 8)
        made.scheduler.update_connector_output(SimpleNamespace(finished_recving={"a"}))


def test_a_load_goes_to_the_blocks_after_the_local_ones_and_is_leased_until_it_ends(engine: OpenEngine) -> None:
    made = engine(stored(TOKENS))
    asked, request = made.asked[0], FakeRequest("a", TOKENS)
    assert made.matched(request, 4) == 12
    made.allocated(request, [7, 3, 4, 5, 6], 8)
    keys = chain(TOKENS)
    until(lambda: asked.leased == keys[1:3])
    message = made.step()
    (load,) = message.step.loads
    assert (load.request_id, list(load.keys), list(load.block_ids)) == ("a", keys[1:3], [3, 4])
    # All blocks after the local one are new.
    assert overwritten(message) == {3, 4, 5, 6}
    assert not made.step().step.loads
    made.scheduler.update_connector_output(SimpleNamespace(finished_recving={"a", "unknown"}))
    until(lambda: asked.leased == [])
    assert asked.calls.count("acquire") == 1


def test_blocks_of_the_local_cache_are_touched_in_the_store(engine: OpenEngine) -> None:
    """The first one is the most recent afterwards: the others are useless without it."""
    keys = chain(TOKENS)
    store = FakeStore(dict.fromkeys([*keys, b"other"], b""))
    made = engine(store)
    request = FakeRequest("a", TOKENS)
    made.matched(request, 12)
    made.allocated(request, [1, 2, 3, 4], 0)
    made.step()
    until(lambda: list(store.values) == [keys[3], b"other", keys[2], keys[1], keys[0]])


def test_full_blocks_are_saved_once_in_chunks(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS)
    keys = chain(TOKENS)
    run(made, request, [1, 2])
    first = made.step(FakeOutput({"a": 7}, new=[(request, [1, 2], 0)]))
    assert saves(first) == [([keys[0]], [1])]
    assert overwritten(first) == {1, 2}
    second = made.step(FakeOutput({"a": 10}, cached=[("a", [3, 4, 5], 7)]))
    assert saves(second) == [(keys[1:4], [2, 3, 4])]
    assert overwritten(second) == {3, 4, 5}
    request.tokens += [50, 51]
    third = made.step(FakeOutput({"a": 1}, cached=[("a", None, 18)]))
    assert saves(third) == []
    # The last token of the fifth block is known now, and computed in this step.
    fourth = made.step(FakeOutput({"a": 1}, cached=[("a", None, 19)]))
    assert saves(fourth) == [([chain(request.tokens)[4]], [5])]


def test_tokens_that_are_not_known_yet_are_not_saved(engine: OpenEngine) -> None:
    """With asynchronous scheduling, vLLM schedules tokens whose ids it does not know."""
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS[:7])
    run(made, request, [1, 2, 3])
    step = made.step(FakeOutput({"a": 12}, new=[(request, [1, 2, 3], 0)]))
    assert saves(step) == [([chain(TOKENS)[0]], [1])]


def test_blocks_of_the_local_cache_are_offered_but_not_overwritten(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2, 3])
    step = made.step(FakeOutput({"a": 4}, new=[(request, [1, 2, 3], 8)]))
    assert saves(step) == [(chain(TOKENS)[:3], [1, 2, 3])]
    assert overwritten(step) == {3}


def test_a_preempted_request_saves_from_its_new_blocks(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2])
    made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    run(made, request, [6, 7, 8, 9])
    step = made.step(FakeOutput({"a": 16}, cached=[("a", [6, 7, 8, 9], 0)], resumed={"a"}))
    assert saves(step) == [(chain(TOKENS)[2:4], [8, 9])]
    assert overwritten(step) == {6, 7, 8, 9}


def test_a_consumer_saves_nothing(engine: OpenEngine) -> None:
    made = engine(FakeStore(), producer=False)
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2])
    step = made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    assert saves(step) == []
    assert overwritten(step) == {1, 2}


def test_a_finished_request_leaves_its_first_block_as_the_most_recent(engine: OpenEngine) -> None:
    """It was saved first."""
    keys = chain(TOKENS)
    store = FakeStore(dict.fromkeys(keys, b""))
    made = engine(store)
    request = FakeRequest("a", TOKENS)
    made.allocated(request, [1, 2], 0)
    made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    made.step(FakeOutput({"a": 4}, cached=[("a", [3], 8)]))
    made.scheduler.request_finished(request, [])
    made.step()
    until(lambda: list(store.values) == [keys[3], keys[2], keys[1], keys[0]])


def test_a_finished_request_is_forgotten(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2])
    made.scheduler.request_finished(request, [])
    assert saves(made.step(FakeOutput({"a": 8}, cached=[("a", [3], 0)]))) == []


def test_adapters_with_the_same_path_and_other_weights_have_other_keys(engine: OpenEngine, tmp_path: Path) -> None:
    keys: list[bytes] = []
    for size in (1, 2):
        (tmp_path / "adapter.safetensors").write_bytes(bytes(size))
        made = engine(FakeStore())
        request = FakeRequest("a", TOKENS, lora_request=SimpleNamespace(lora_path=str(tmp_path)))
        run(made, request, [1])
        ((saved, _),) = saves(made.step(FakeOutput({"a": 4}, new=[(request, [1], 0)])))
        keys += saved
    assert len({*keys, chain(TOKENS)[0]}) == 3


def test_an_adapter_whose_files_change_shares_nothing_until_a_restart(engine: OpenEngine, tmp_path: Path) -> None:
    """The request that runs meanwhile has the old weights to its end."""

    def num_saved(request: FakeRequest, *row: Any) -> int:
        message = made.step(FakeOutput({request.request_id: 4}, **dict([row])))
        return sum(len(keys) for keys, _ in saves(message))

    made = engine(FakeStore())
    (tmp_path / "adapter.safetensors").write_bytes(b"1")
    lora = SimpleNamespace(lora_path=str(tmp_path))
    first, second, third = (FakeRequest(name, TOKENS, lora_request=lora) for name in "abc")
    run(made, first, [1, 2])
    assert num_saved(first, "new", [(first, [1], 0)]) == 1
    (tmp_path / "adapter.safetensors").write_bytes(b"22")
    assert num_saved(first, "cached", [("a", [2], 4)]) == 1
    for request in (second, third):
        run(made, request, [3])
        assert num_saved(request, "new", [(request, [3], 0)]) == 0
        (tmp_path / "adapter.safetensors").write_bytes(b"1")


def test_an_adapter_that_is_no_directory_shares_nothing(engine: OpenEngine) -> None:
    store = stored(TOKENS)
    made = engine(store)
    request = FakeRequest("a", TOKENS, lora_request=SimpleNamespace(lora_path="someone/adapter"))
    assert made.matched(request, 0) == 0
    made.allocated(request, [1], 0)
    assert saves(made.step(FakeOutput({"a": 4}, new=[(request, [1], 0)]))) == []


def test_after_a_reset_an_engine_has_keys_of_its_own(engine: OpenEngine) -> None:
    """The weights may be others now, in this engine alone."""
    store = stored(TOKENS)
    made = engine(store)
    request = FakeRequest("a", TOKENS)
    made.scheduler.reset_cache()
    assert made.matched(request, 0) == 0
    made.allocated(request, [1], 0)
    ((saved, _),) = saves(made.step(FakeOutput({"a": 4}, new=[(request, [1], 0)])))
    store.values[saved[0]] = b""
    assert made.matched(FakeRequest("b", TOKENS), 0) == 4
    made.scheduler.reset_cache()
    assert made.matched(FakeRequest("b", TOKENS), 0) == 0
    assert engine(store).matched(FakeRequest("b", TOKENS), 0) == 16
