"""Models with several groups of K/V caches: what is needed to continue after a prefix."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from fake_store import FakeStore
from vllm_connector import Engine, FullAttentionSpec, MambaSpec, SlidingWindowSpec, connector_config
from vllm_requests import BLOCK_SIZE, FakeOutput, FakeRequest, wanted
from vllm_stub import name_of_block
from waiting import until

from kvservice.client.store.values import split_keys
from kvservice.integrations.vllm.groups import CacheGroups, Group
from kvservice.integrations.vllm.steps import ConnectorStep

# 20 tokens: five full blocks, of which a window of six tokens before the last needs two.
TOKENS = list(range(21))
SPECS = (FullAttentionSpec(), SlidingWindowSpec(6))
FULL, WINDOW = range(2)
OpenEngine = Callable[..., Engine]


def random_groups(chance: random.Random) -> CacheGroups:
    kinds = [Group(), Group(window=chance.randint(1, 30)), Group(chunk=chance.randint(1, 30)), Group(recurrent=True)]
    return CacheGroups(chance.choices(kinds, k=chance.randint(1, 4)), chance.randint(1, 8))


def attended(group: Group, num_tokens: int) -> list[int]:
    """Return the tokens before the next one to which it attends."""
    if group.recurrent:
        return list(range(num_tokens))[-1:]
    if group.window:
        return [token for token in range(num_tokens) if num_tokens - token < group.window]
    return [
        token for token in range(num_tokens) if not group.chunk or token // group.chunk == num_tokens // group.chunk
    ]


def places(groups: CacheGroups, first: int, num_tokens: int) -> list[tuple[int, int]]:
    """Return block and group of what is needed."""
    pairs = (divmod(place, groups.num) for place in groups.needed(first, num_tokens).tolist())
    return [(first + block, group) for block, group in pairs]


def test_what_is_needed_is_what_the_next_token_attends_to() -> None:
    chance = random.Random(1)
    for _ in range(300):
        groups, num_tokens, first = random_groups(chance), chance.randint(0, 60), chance.randint(0, 4)
        expected = {
            (block, number)
            for number, group in enumerate(groups.groups)
            for block in {token // groups.block_size for token in attended(group, num_tokens)}
            if block >= first
        }
        needed = set(places(groups, first, num_tokens))
        assert needed >= expected, (str(groups), num_tokens)
        # A window may begin with the next token: vLLM keeps the block before it, unless that is full.
        more = needed - expected
        assert all(block == num_tokens // groups.block_size for block, _ in more), (str(groups), num_tokens)


def test_the_longest_prefix_is_the_last_of_which_nothing_is_missing() -> None:
    chance = random.Random(2)
    for _ in range(500):
        groups, first, num_blocks = random_groups(chance), chance.randint(0, 3), chance.randint(1, 12)
        share = chance.choice([0.5, 0.9, 1.0])
        found = np.array([[chance.random() < share for _ in groups.groups] for _ in range(num_blocks)])
        most = (first + num_blocks) * groups.block_size - chance.randint(0, 1)
        expected = max(
            count
            for count in range(num_blocks + 1)
            if all(
                found[block - first, group]
                for block, group in (
                    places(groups, first, min((first + count) * groups.block_size, most)) if count else ()
                )
            )
        )
        assert groups.longest(found, first, most) == expected, (str(groups), first, found)


def test_keys_that_are_needed_are_in_the_order_of_blocks() -> None:
    groups = CacheGroups([Group(), Group(window=6)], BLOCK_SIZE)
    keys = [bytes([block, group]) * 16 for block in range(2, 6) for group in range(2)]
    asked = wanted(keys, 2, groups)
    assert split_keys(asked.needed(4)) == [keys[place] for place in (0, 2, 4, 5, 6, 7)]
    assert split_keys(asked.needed(1)) == keys[:2]


@pytest.fixture
def engine(vllm_connector: Any) -> Iterator[OpenEngine]:
    with ExitStack() as stack:

        def make(*stores: FakeStore, **config: Any) -> Engine:
            made = Engine(vllm_connector, *stores, config=connector_config(**config), specs=SPECS)
            stack.callback(made.close)
            return made

        yield make


def saved(made: Engine, request: FakeRequest) -> ConnectorStep:
    """Compute a prompt. Its full attention has blocks 1 to 6, the window has 11 to 16, of which vLLM keeps 13 to 15."""
    for block, block_id in ((2, 13), (3, 14), (4, 15)):
        made.pool.blocks[block_id].block_hash = name_of_block(request.block_hashes[block], WINDOW)
    # Another request has got this one.
    made.pool.blocks[12].block_hash = name_of_block(bytes(32), WINDOW)
    made.allocated(request, range(1, 7), 0, range(11, 17))
    message = made.step(FakeOutput({request.request_id: 21}, new=[(request, (range(1, 7), range(11, 17)), 0)]))
    made.compute(message)
    made.settle()
    step: ConnectorStep = message.step
    return step


def test_of_a_window_the_store_gets_what_vllm_keeps(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    (save,) = saved(made, FakeRequest("a", TOKENS)).saves
    assert sorted(save.block_ids) == [1, 2, 3, 4, 5, 13, 14, 15]
    assert len(set(split_keys(save.keys))) == 8, "the groups have keys of their own"
    assert made.pool.used == set()


def test_a_prefix_is_found_if_full_attention_has_all_and_the_window_its_last_blocks(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    request = FakeRequest("a", TOKENS)
    (save,) = saved(made, request).saves
    keys = dict(zip(save.block_ids, split_keys(save.keys), strict=True))
    asked = made.asked[0]
    assert made.asked_for(FakeRequest("b", TOKENS)) == (20, False)
    assert sorted(asked.leased) == sorted(keys[block_id] for block_id in (1, 2, 3, 4, 5, 14, 15))
    made.allocated(FakeRequest("b", TOKENS), [21, 22, 23, 24, 25, 26], 20, [0, 0, 0, 34, 35, 36])
    message = made.step()
    load = message.step.step_load
    assert load.block_ids.tolist() == [21, 22, 23, 24, 34, 25, 35]
    made.compute(message)
    until(lambda: asked.leased == [])
    for missing, num_tokens in ((15, 16), (14, 0), (1, 0)):
        value = asked.values.pop(keys[missing])
        assert made.matched(FakeRequest(f"without {missing}", TOKENS)) == num_tokens
        asked.values[keys[missing]] = value


def test_what_vllm_has_itself_is_not_asked_for(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    (save,) = saved(made, FakeRequest("a", TOKENS)).saves
    keys = dict(zip(save.block_ids, split_keys(save.keys), strict=True))
    assert made.matched(FakeRequest("b", TOKENS), 16) == 4
    assert made.asked[0].leased == [keys[5], keys[15]]


def test_blocks_that_vllm_would_take_for_computed_are_loaded_or_it_ends(engine: OpenEngine) -> None:
    made = engine(FakeStore())
    saved(made, FakeRequest("a", TOKENS))
    request = FakeRequest("b", TOKENS)
    assert made.matched(request) == 20
    with pytest.raises(AssertionError, match="other blocks"):
        made.allocated(request, [21, 22, 23, 24, 25, 26], 20, [0, 0, 33, 34, 35, 36])


def test_a_load_that_fails_is_that_of_its_request(engine: OpenEngine) -> None:
    """A number of a block may be that of two groups."""
    made = engine(FakeStore(), extra={"max_step_load_mib": 0})
    saved(made, FakeRequest("a", TOKENS))
    request = FakeRequest("b", TOKENS)
    assert made.asked_for(request) == (20, True)
    made.allocated(request, [1, 2, 3, 4, 5, 6], 20, [0, 0, 0, 6, 7, 5])
    made.store.values.clear()
    message = made.step()
    worker = made.worker
    worker.handle_preemptions(message)
    worker.bind_connector_metadata(message)
    worker.start_load_kv(None)
    failed: set[str] = set()

    def ended() -> bool:
        results = worker.get_transfer_results(set())
        failed.update(results.failed_recving)
        return "b" in results.finished_recving

    until(ended)
    assert failed == {"b"}
    assert worker.get_block_ids_with_load_errors() == set()


def test_of_a_recurrent_layer_the_state_at_the_end_of_the_prefix_is_enough(vllm_connector: Any) -> None:
    """It is loaded asynchronously: vLLM copies states to other blocks before a step loads. vLLM keeps the states after
    12 and 20 tokens."""
    made = Engine(vllm_connector, FakeStore(), config=connector_config(), specs=(FullAttentionSpec(), MambaSpec()))
    request = FakeRequest("a", TOKENS)
    for block, block_id in ((2, 13), (4, 15)):
        made.pool.blocks[block_id].block_hash = name_of_block(request.block_hashes[block], 1)
    states = [0, 0, 13, 0, 15, 16]
    made.allocated(request, range(1, 7), 0, states)
    message = made.step(FakeOutput({"a": 21}, new=[(request, (range(1, 7), states), 0)]))
    made.compute(message)
    made.settle()
    (save,) = message.step.saves
    assert sorted(save.block_ids) == [1, 2, 3, 4, 5, 13, 15]
    keys = dict(zip(save.block_ids, split_keys(save.keys), strict=True))
    assert made.asked_for(FakeRequest("b", TOKENS)) == (20, True)
    made.allocated(FakeRequest("b", TOKENS), [21, 22, 23, 24, 25], 20, [0, 0, 0, 0, 35])
    (load,) = made.step().step.loads
    assert load.block_ids == [21, 22, 23, 24, 25, 35]
    assert split_keys(load.keys) == [keys[block_id] for block_id in (1, 2, 3, 4, 5, 15)]
    # The last token is computed, and there is no state before it.
    assert made.asked_for(FakeRequest("c", TOKENS[:20])) == (12, True)
    del made.asked[0].values[keys[15]]
    assert made.asked_for(FakeRequest("d", TOKENS)) == (12, True)
    made.close()
