"""The scheduler's side of the vLLM connector, without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_store import FakeStore
from vllm_connector import Engine, OpenEngine, run, saves
from vllm_requests import FakeOutput, FakeRequest, chain
from waiting import until

from kvservice.client.store.values import split_keys
from kvservice.errors import InternalError

TOKENS = list(range(18))


def stored(tokens: list[int]) -> FakeStore:
    return FakeStore(dict.fromkeys(chain(tokens), bytes(64)))


def keyed(made: Engine, message: Any) -> tuple[list[bytes], list[int]]:
    """Return what a step loads, with its keys as the first worker finds them."""
    (memory,) = {store.memory for store in made.asked[:1]}
    assert memory is not None
    load = message.step.step_load
    leased = load.leased[0, 0]
    assert leased.memory == memory.identity
    keys = [FakeStore.numbered[number] for number in np.frombuffer(leased.offsets, np.uint64).tolist()]
    return keys, load.block_ids.tolist()


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
    """All blocks are matched. vLLM computes one token to get the logits, not the last block."""
    made = engine(stored(TOKENS))
    request = FakeRequest("a", TOKENS[:16])
    assert made.matched(request) == 15
    made.allocated(request, [1, 2, 3, 4], 15)
    assert keyed(made, made.step()) == (chain(TOKENS), [1, 2, 3, 4])
    assert made.matched(FakeRequest("b", TOKENS[:17])) == 16


def test_a_request_of_which_vllm_has_all_blocks_asks_for_nothing(engine: OpenEngine) -> None:
    """vLLM computes the last block of a prompt that ends with it: that is no reason to ask for one block."""
    made = engine(stored(TOKENS))
    assert made.matched(FakeRequest("a", TOKENS), 16) == 0
    assert made.matched(FakeRequest("b", TOKENS[:16]), 12) == 0
    assert made.asked[0].calls == []
    assert made.matched(FakeRequest("c", TOKENS[:16]), 8) == 7


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
        made.allocated(request, [1, 2, 3, 4], 0)
        made.compute(made.step())


def test_a_small_load_is_part_of_the_step_and_leased_until_it_has_ended(engine: OpenEngine) -> None:
    made = engine(stored(TOKENS))
    asked, request, keys = made.asked[0], FakeRequest("a", TOKENS), chain(TOKENS)
    assert made.asked_for(request, 4) == (12, False)
    assert asked.leased == keys[1:4]
    made.allocated(request, [7, 3, 4, 5, 6], 8)
    message = made.step()
    assert keyed(made, message) == (keys[1:3], [3, 4])
    assert (message.step.loads, made.step().step.step_load) == ((), None)
    assert asked.leased == keys[1:4]
    made.compute(message)
    until(lambda: asked.leased == [])
    assert asked.calls[:2] == ["lookup", "acquire"]
    assert asked.calls.count("acquire") == 1


def test_all_loads_of_a_step_are_one(engine: OpenEngine) -> None:
    made = engine(stored(TOKENS))
    for name, blocks, num_found in (("a", [7, 6, 5, 4], 16), ("b", [1, 2, 3], 12)):
        request = FakeRequest(name, TOKENS[: num_found + 1])
        assert made.asked_for(request) == (num_found, False)
        made.allocated(request, blocks, num_found)
    message = made.step()
    assert keyed(made, message) == (chain(TOKENS) + chain(TOKENS)[:3], [7, 6, 5, 4, 1, 2, 3])
    made.store.broken_leases = {FakeStore.numbered.index(chain(TOKENS)[3])}
    assert made.asked[0].leased == chain(TOKENS) + chain(TOKENS)[:3]
    assert made.compute(message).invalid_block_ids == {4}
    assert made.store.calls.count("read") == 1
    until(lambda: made.asked[0].leased == [])


def test_a_load_of_a_step_ends_when_all_workers_have_ended_it(engine: OpenEngine) -> None:
    made = engine(stored(TOKENS), stored(TOKENS[:12]))
    request = FakeRequest("a", TOKENS)
    assert made.asked_for(request) == (12, False)
    made.allocated(request, [1, 2, 3, 4, 5], 12)
    message = made.step(FakeOutput({"a": 6}, new=[(request, [1, 2, 3, 4, 5], 12)]))
    made.compute(message, ranks=[0])
    assert saves(made.step(FakeOutput({"a": 0}, cached=[("a", None, 18)]))) == []
    assert made.asked[1].leased == chain(TOKENS)[:3]
    made.compute(message, ranks=[1])
    until(lambda: made.asked[0].leased == made.asked[1].leased == [])
    assert saves(made.step(FakeOutput({"a": 0}, cached=[("a", None, 18)]))) == [([chain(TOKENS)[3]], [4])]


def test_the_loads_of_steps_are_checked_before_their_tokens_are_taken(engine: OpenEngine) -> None:
    """Where vLLM schedules ahead, workers do not wait for the end of a load."""
    made = engine(stored(TOKENS), ahead=True)
    for name, last in (("a", False), ("b", True)):
        request = FakeRequest(name, TOKENS)
        assert made.asked_for(request) == (16, False)
        made.allocated(request, [1, 2, 3, 4, 5], 16)
        message = made.step()
        if last:
            made.asked[0].broken_leases.add(made.asked[0].number(chain(TOKENS)[2]))
            with pytest.raises(InternalError, match="max_step_load_mib"):
                made.compute(message)
        else:
            made.compute(message)
        assert made.worker.get_block_ids_with_load_errors() == set()


def test_loads_are_asynchronous_by_their_bytes(engine: OpenEngine) -> None:
    """The limit is for the loads of a step together. A block has 64 bytes."""
    made = engine(stored(TOKENS), extra={"max_step_load_mib": 5 * 64 / (1 << 20)})
    first, second = FakeRequest("a", TOKENS), FakeRequest("b", TOKENS)
    assert made.asked_for(first) == (16, False)
    made.allocated(first, [0, 1, 2, 3], 16)
    assert made.asked_for(second) == (16, True)
    made.allocated(second, [4, 5, 6, 7], 16)
    message = made.step()
    (load,) = message.step.loads
    assert (load.request_id, split_keys(load.keys), load.block_ids) == ("b", chain(TOKENS), [4, 5, 6, 7])
    assert keyed(made, message) == (chain(TOKENS), [0, 1, 2, 3])
    # The leases end when all workers have the blocks.
    finished = set(made.compute(message).finished_recving)
    while finished != {"b"}:
        finished |= made.compute(made.step()).finished_recving
    until(lambda: made.asked[0].leased == [])


def test_a_step_that_computes_for_others_loads_little(engine: OpenEngine) -> None:
    """They would wait for the load. A request that waits for its own load does not."""
    made = engine(stored(TOKENS), extra={"max_beside_load_mib": 3 * 64 / (1 << 20)})
    first, second, third = (FakeRequest(name, TOKENS) for name in "abc")
    assert made.asked_for(first, 4) == (12, False)
    made.allocated(first, [0, 1, 2, 3], 12)
    assert made.asked_for(second) == (16, True)
    made.allocated(second, [4, 5, 6, 7], 16)
    made.step()
    assert made.asked_for(third, 4) == (12, False)
    made.scheduler.request_finished(first, [0, 1, 2, 3])
    assert made.asked_for(FakeRequest("d", TOKENS)) == (16, False)


def test_loads_are_asynchronous_unless_every_worker_maps_the_memory(engine: OpenEngine) -> None:
    stores = stored(TOKENS), stored(TOKENS)
    stores[1].is_mapped = False
    made = engine(*stores)
    assert made.asked_for(FakeRequest("a", TOKENS)) == (16, True)
    stores[1].is_mapped = True
    made.compute(made.step())
    assert made.asked_for(FakeRequest("b", TOKENS)) == (16, False)
    made.asked[0].is_mapped = False
    assert made.asked_for(FakeRequest("c", TOKENS)) == (16, True)
    assert engine(stored(TOKENS), extra={"max_step_load_mib": 0}).asked_for(FakeRequest("a", TOKENS)) == (16, True)
    # A damaged block is found when it is too late for the step.
    assert engine(stored(TOKENS), extra={"verify": True}).asked_for(FakeRequest("a", TOKENS)) == (16, True)


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
    second = made.step(FakeOutput({"a": 10}, cached=[("a", [3, 4, 5], 7)]))
    assert saves(second) == [(keys[1:4], [2, 3, 4])]
    request.tokens += [50, 51]
    # Generated tokens are not saved unless that is wished.
    assert saves(made.step(FakeOutput({"a": 1}, cached=[("a", None, 19)]))) == []


def test_a_step_begins_to_save_a_limited_number_of_blocks(engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones, or the end of their requests, save the others."""
    made = engine(FakeStore())
    monkeypatch.setitem(made.scheduler._scheduler.step.__globals__, "HELD_AT_ONCE", 3)
    first, second = FakeRequest("a", TOKENS), FakeRequest("b", [9] * 16)
    run(made, first, [1, 2, 3, 4, 5])
    run(made, second, [6, 7, 8, 9])
    new = [(first, [1, 2, 3, 4, 5], 0), (second, [6, 7, 8, 9], 0)]
    assert saves(made.step(FakeOutput({"a": 18, "b": 16}, new=new))) == [(chain(TOKENS)[:3], [1, 2, 3])]
    message = made.step(FakeOutput({"a": 1, "b": 1}, cached=[("a", None, 18), ("b", None, 16)]))
    assert saves(message) == [([chain(TOKENS)[3], *chain([9] * 16)[:2]], [4, 6, 7])]
    second.tokens.append(5)
    made.scheduler.request_finished(second, [6, 7, 8, 9])
    assert saves(made.step()) == [(chain([9] * 16)[2:], [8, 9])]


def test_tokens_that_are_not_known_yet_are_not_saved(engine: OpenEngine) -> None:
    """With asynchronous scheduling, vLLM schedules tokens whose ids it does not know."""
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS[:7])
    run(made, request, [1, 2, 3])
    step = made.step(FakeOutput({"a": 12}, new=[(request, [1, 2, 3], 0)]))
    assert saves(step) == [([chain(TOKENS)[0]], [1])]


def test_blocks_of_the_local_cache_are_offered(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2, 3])
    step = made.step(FakeOutput({"a": 4}, new=[(request, [1, 2, 3], 8)]))
    assert saves(step) == [(chain(TOKENS)[:3], [1, 2, 3])]


def test_a_preempted_request_saves_from_its_new_blocks(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2])
    made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    run(made, request, [6, 7, 8, 9])
    step = made.step(FakeOutput({"a": 16}, cached=[("a", [6, 7, 8, 9], 0)], resumed={"a"}))
    assert saves(step) == [(chain(TOKENS)[2:4], [8, 9])]


def test_a_consumer_saves_nothing(engine: OpenEngine) -> None:
    made = engine(FakeStore(), producer=False)
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2])
    step = made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    assert saves(step) == []


def test_a_finished_request_leaves_its_first_block_as_the_most_recent(engine: OpenEngine) -> None:
    """It was saved first."""
    keys = chain(TOKENS)
    store = FakeStore(dict.fromkeys(keys, b""))
    made = engine(store)
    request = FakeRequest("a", TOKENS)
    made.allocated(request, [1, 2], 0)
    made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    made.step(FakeOutput({"a": 4}, cached=[("a", [3], 8)]))
    made.scheduler.request_finished(request, [1, 2, 3])
    made.step()
    until(lambda: list(store.values) == [keys[3], keys[2], keys[1], keys[0]])


def test_generated_blocks_are_saved_in_pieces_if_that_is_wished(engine: OpenEngine) -> None:
    made = engine(FakeStore(), extra={"save_decode": True})
    request = FakeRequest("a", TOKENS[:8])
    run(made, request, [1, 2])
    made.step(FakeOutput({"a": 8}, new=[(request, [1, 2], 0)]))
    blocks = list(range(3, 15))
    request.tokens += range(100, 149)
    keys = chain(request.tokens)
    assert saves(made.step(FakeOutput({"a": 1}, cached=[("a", blocks, 38)]))) == [], "seven blocks wait"
    assert saves(made.step(FakeOutput({"a": 1}, cached=[("a", None, 39)]))) == [(keys[2:10], blocks[:8])]
    # The others are saved at the end. The last token has no K/V.
    request.num_computed_tokens = 56
    made.scheduler.request_finished(request, [1, 2, *blocks])
    assert saves(made.step()) == [(keys[10:14], blocks[8:12])]


def test_what_a_request_has_computed_last_is_saved_when_it_ends(engine: OpenEngine) -> None:
    """It ends after the step that loads and computes its blocks, before it is known that the load was right."""
    made = engine(stored(TOKENS[:8]))
    request = FakeRequest("a", TOKENS[:16])
    assert made.asked_for(request) == (8, False)
    made.allocated(request, [1, 2, 3, 4], 8)
    message = made.step(FakeOutput({"a": 8}, new=[(request, [1, 2, 3, 4], 8)]))
    assert saves(message) == []
    made.compute(message)
    request.tokens.append(99)
    made.scheduler.request_finished(request, [1, 2, 3, 4])
    assert made.pool.used == {3, 4}
    assert saves(made.step()) == [(chain(TOKENS)[2:4], [3, 4])]


def test_blocks_computed_from_a_load_are_saved_when_it_was_right(engine: OpenEngine) -> None:
    """Another request that shares them waits, too."""
    made = engine(stored(TOKENS[:8]))
    first, second = FakeRequest("a", TOKENS), FakeRequest("b", TOKENS[:12] + [55] * 6)
    made.asked_for(first)
    made.allocated(first, [1, 2, 3, 4, 5], 8)
    assert made.asked_for(second, 12) == (0, False)
    made.allocated(second, [1, 2, 3, 6, 7], 0)
    new = [(first, [1, 2, 3, 4, 5], 8), (second, [1, 2, 3, 6, 7], 12)]
    message = made.step(FakeOutput({"a": 10, "b": 6}, new=new))
    assert saves(message) == []
    made.compute(message)
    message = made.step(FakeOutput({"a": 1, "b": 1}, cached=[("a", None, 18), ("b", None, 18)]))
    # The loaded ones are there.
    ((keys, blocks),) = saves(message)
    assert blocks == [3, 4, 1, 2, 6]
    assert keys[:2] == chain(TOKENS)[2:4]


def test_blocks_of_a_request_that_ends_with_the_step_of_its_load_are_saved(engine: OpenEngine) -> None:
    """vLLM tells of its end before it tells of the load's. With 0.1 percent of 800 blocks nothing can be held."""
    for name, wrong, percent in (("a", False, 10), ("b", True, 10), ("c", False, 0.1)):
        made = engine(stored(TOKENS[:8]), extra={"max_held_percent": percent})
        request = FakeRequest(name, TOKENS)
        made.asked_for(request)
        made.allocated(request, [1, 2, 3, 4, 5], 8)
        made.pool.cache(request, [1, 2, 3, 4])
        message = made.step(FakeOutput({name: 10}, new=[(request, [1, 2, 3, 4, 5], 8)]))
        if wrong:
            made.store.broken_leases = {FakeStore.numbered.index(chain(TOKENS)[1])}
        made.scheduler.request_finished(request, [1, 2, 3, 4, 5])
        made.compute(message)
        assert saves(made.step()) == ([(chain(TOKENS)[2:], [3, 4])] if name == "a" else [])
        assert made.scheduler.has_pending_push_work() == (name == "a")


def test_a_load_that_fails_is_computed_again_and_saved(engine: OpenEngine) -> None:
    made = engine(stored(TOKENS[:8]))
    request = FakeRequest("a", TOKENS)
    made.asked_for(request)
    made.allocated(request, [1, 2, 3, 4], 8)
    message = made.step(FakeOutput({"a": 10}, new=[(request, [1, 2, 3, 4], 8)]))
    made.store.broken_leases = {FakeStore.numbered.index(chain(TOKENS)[1])}
    assert made.compute(message).invalid_block_ids == {2}
    message = made.step(FakeOutput({"a": 14}, cached=[("a", None, 4)]))
    assert saves(message) == [(chain(TOKENS), [1, 2, 3, 4])]


def test_a_damaged_block_is_computed_again_if_loads_are_verified(engine: OpenEngine) -> None:
    """Workers read it by its key, though they know where it lies."""
    made = engine(stored(TOKENS), extra={"verify": True})
    made.store.damaged = {chain(TOKENS)[1]}
    request = FakeRequest("a", TOKENS)
    assert made.asked_for(request) == (16, True)
    made.allocated(request, [1, 2, 3, 4, 5], 16)
    message = made.step()
    made.worker.handle_preemptions(message)
    made.worker.bind_connector_metadata(message)
    made.worker.start_load_kv(None)
    assert made.loaded() == ({"a"}, {2})


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


def test_adapters_that_vllm_mixes_up_share_nothing(
    engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions hash the name alone: they take blocks of one adapter for those of another."""
    loras = []
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        loras.append(SimpleNamespace(lora_name="same", lora_path=str(tmp_path / place)))
    for extra_keys, shared in ((("lora_name", "lora_path"), [4, 4, 4]), (("lora_name",), [4, 0, 0])):
        monkeypatch.setattr(
            sys.modules["vllm.v1.core.kv_cache_utils"],
            "_gen_lora_extra_hash_keys",
            lambda request, names=extra_keys: [("lora", *(getattr(request.lora_request, name) for name in names))],
            raising=False,
        )
        made = engine(FakeStore())
        found = []
        for number, lora in enumerate((*loras, loras[0])):
            request = FakeRequest(str(number), [number] * 16, lora_request=lora)
            run(made, request, [1, 2, 3, 4])
            step = made.step(FakeOutput({str(number): 16}, new=[(request, [1, 2, 3, 4], 0)]))
            found.append(sum(len(keys) for keys, _ in saves(step)))
            made.pool.reset_prefix_cache()
        assert found == shared


def test_a_request_whose_adapter_is_mixed_up_later_saves_no_more_blocks(
    engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose keys are known already."""
    monkeypatch.setattr(
        sys.modules["vllm.v1.core.kv_cache_utils"],
        "_gen_lora_extra_hash_keys",
        lambda request: [("lora", request.lora_request.lora_name)],
        raising=False,
    )
    loras = [SimpleNamespace(lora_name="same", lora_path=str(tmp_path / place)) for place in ("first", "second")]
    for lora in loras:
        Path(lora.lora_path).mkdir()
    made = engine(FakeStore(), extra={"save_decode": True})
    request, other = (FakeRequest(str(lora), TOKENS, lora_request=lora) for lora in loras)
    name = request.request_id
    run(made, request, [1, 2, 3, 4])
    ((saved, _),) = saves(made.step(FakeOutput({name: 4}, new=[(request, [1], 0)])))
    assert len(saved) == 1
    run(made, other, [])
    request.tokens += range(100, 112)
    request.num_computed_tokens = len(request.tokens)
    made.scheduler.request_finished(request, [1, 2, 3, 4, 5, 6, 7])
    assert saves(made.step()) == []


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
