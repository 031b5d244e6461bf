"""The contents of a batch under each policy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from schedule_rig import EngineRig, alone, make_rig

from kvservice.errors import OutOfBlocksError
from kvservice.scheduler import BatchPolicy, PreemptionMode, QueueOrder, Request


def sizes(rig: EngineRig, **budgets: float) -> dict[int, int]:
    """Run a step. Returns the tokens of each of its sequences."""
    step = rig.step(**budgets).step
    return {} if step is None else dict(zip(step.sequence_ids.tolist(), step.query_lens.tolist(), strict=True))


def test_a_request_gets_the_tokens_that_the_model_gives() -> None:
    rig = make_rig()
    rig.add(7, 10, max_tokens=5)
    rig.run()
    assert rig.outputs[7] == alone(list(range(10)), 5)
    assert rig.finished == [7]
    assert rig.computed_tokens == 10 + 4
    assert rig.manager.stats().sequences == 0


def test_decodes_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    rig = make_rig(max_step_tokens=10)
    rig.add(1, 6, max_tokens=20)
    rig.add(2, range(100, 112), max_tokens=20)
    rig.add(3, range(200, 230), max_tokens=20)
    assert sizes(rig) == {1: 6, 2: 4}
    assert sizes(rig) == {1: 1, 2: 8, 3: 1}
    assert sizes(rig) == {1: 1, 2: 1, 3: 8}
    assert sizes(rig, max_step_tokens=4) == {1: 1, 2: 1, 3: 2}


def test_a_batch_names_the_rows_that_sample_and_counts_the_queues() -> None:
    rig = make_rig(max_step_tokens=10, max_running=2)
    rig.add(1, 6, max_tokens=20)
    rig.add(2, range(100, 112), max_tokens=20)
    rig.add(3, range(200, 212), max_tokens=20)
    batches = [rig.step() for _ in range(3)]
    assert [batch.sampled.tolist() for batch in batches] == [[1], [1, 2], [1, 2]]
    assert [batch.sampled_rows.tolist() for batch in batches] == [[0], [0, 1], [0, 1]]
    assert batches[0].sampled_rows.dtype == np.int32
    assert [tuple(batch.counts) for batch in batches] == [(1, 2, 0)] * 3


def test_prefill_first_runs_whole_prompts_before_decodes() -> None:
    rig = make_rig(max_step_tokens=10, batches=BatchPolicy.PREFILL_FIRST)
    rig.add(1, 6, max_tokens=20)
    rig.add(2, range(100, 106), max_tokens=20)
    assert sizes(rig) == {1: 6}
    assert sizes(rig) == {2: 6}
    assert sizes(rig) == {1: 1, 2: 1}
    rig.add(3, range(200, 212), max_tokens=20)
    assert [sizes(rig), sizes(rig), sizes(rig)] == [{3: 10}, {3: 2}, {1: 1, 2: 1, 3: 1}]


def test_no_more_sequences_run_than_may() -> None:
    rig = make_rig(max_running=3)
    for i in range(5):
        rig.add(i, range(10 * i, 10 * i + 3), max_tokens=3)
    assert list(sizes(rig, max_running=2)) == [0, 1]
    assert list(sizes(rig)) == [0, 1, 2]
    rig.run()
    assert sorted(rig.finished) == [0, 1, 2, 3, 4]


def test_a_long_prompt_gets_at_most_its_cap_and_few_are_in_progress() -> None:
    rig = make_rig(max_step_tokens=20, long_prefill_tokens=5, max_long_prefills=1)
    rig.add(1, range(100, 112), max_tokens=9)
    rig.add(2, range(200, 212), max_tokens=9)
    rig.add(3, range(300, 304), max_tokens=9)
    assert sizes(rig) == {1: 5, 3: 4}
    assert sizes(rig) == {3: 1, 1: 5}
    assert sizes(rig) == {3: 1, 1: 2, 2: 5}


def test_tokens_in_the_prefix_cache_cost_no_budget() -> None:
    rig = make_rig(max_step_tokens=8)
    rig.add(1, 8, max_tokens=1)
    rig.run()
    rig.add(2, 12)
    rig.add(3, range(50, 54))
    assert sizes(rig) == {2: 4, 3: 4}


def test_requests_wait_for_a_common_prefix_that_is_being_computed() -> None:
    rig = make_rig(max_step_tokens=12)
    rig.add(1, 17)
    rig.add(2, 18)
    rig.add(3, range(50, 54))
    assert sizes(rig) == {1: 12}
    assert sizes(rig) == {1: 5, 3: 4}
    assert sizes(rig) == {1: 1, 3: 1, 2: 2}
    twice = make_rig(max_step_tokens=100, share_prefixes=False)
    twice.add(1, 17)
    twice.add(2, 18)
    assert sizes(twice) == {1: 17, 2: 18}


def test_who_waits_for_a_prefix_goes_on_when_its_computation_is_aborted() -> None:
    rig = make_rig(max_step_tokens=12)
    rig.add(1, 17)
    rig.add(2, 18)
    rig.step()
    rig.engine.abort(1)
    assert sizes(rig) == {2: 6}


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    rig = make_rig(10, {"watermark": 0.2})
    with pytest.raises(OutOfBlocksError) as refused:
        rig.engine.add(_request(1, 20, 13))
    assert (refused.value.never, refused.value.required, refused.value.free) == (True, 9, 8)
    assert refused.value.field == "max_tokens"
    rig.engine.add(_request(1, 20, 12))


def _request(request_id: int, prompt: int, max_tokens: int) -> Request:
    return Request(request_id, np.arange(prompt), max_tokens)


def test_admission_leaves_the_watermark_free() -> None:
    rig = make_rig(10, {"watermark": 0.3}, reserve_steps=0)
    rig.add(1, range(16), max_tokens=4)
    rig.add(2, range(100, 116), max_tokens=4)
    assert list(sizes(rig)) == [1]
    other = make_rig(10, reserve_steps=0)
    other.add(1, range(16), max_tokens=4)
    other.add(2, range(100, 116), max_tokens=4)
    assert list(sizes(other)) == [1, 2]


def test_admission_leaves_free_what_running_sequences_need_soon() -> None:
    rig = make_rig(10, reserve_steps=3)
    rig.add(1, range(14), max_tokens=9)
    rig.step()
    rig.add(2, range(100, 124), max_tokens=1)
    assert list(sizes(rig)) == [1]
    other = make_rig(10, reserve_steps=0)
    other.add(1, range(14), max_tokens=9)
    other.step()
    other.add(2, range(100, 124), max_tokens=1)
    assert list(sizes(other)) == [1, 2]


def test_lookahead_slots_are_reserved() -> None:
    rig = make_rig(lookahead=5)
    rig.add(1, 4, max_tokens=3)
    rig.step()
    assert rig.manager.describe(rig.namespace)[0].num_blocks == 3
    rig.step()
    assert rig.manager.describe(rig.namespace)[0].num_blocks == 3
    rig.run()


def test_the_delay_factor_collects_prompts() -> None:
    rig = make_rig(delay_factor=2.0)
    rig.add(1, 4, max_tokens=50)
    assert sizes(rig, now_s=10.0) == {1: 4}
    rig.add(2, range(50, 54), max_tokens=50, now_s=11.0)
    assert sizes(rig, now_s=11.0) == {1: 1}
    assert sizes(rig, now_s=13.0) == {1: 1}
    assert sizes(rig, now_s=13.1) == {1: 1, 2: 4}


def test_short_prompts_pass_long_ones_by_a_bounded_number_of_steps() -> None:
    rig = make_rig(400, max_running=1, size_delay_steps=1.0, max_size_delay_steps=3.0, max_step_tokens=100)
    rig.add(0, 1, max_tokens=8)
    rig.step()
    rig.add(1, range(100, 180), max_tokens=1)
    for _ in range(2):
        rig.step()
    rig.add(2, range(200, 204), max_tokens=1)
    rig.step()
    rig.add(3, range(300, 304), max_tokens=1)
    rig.run()
    assert rig.finished == [0, 1, 2, 3] or rig.finished == [0, 2, 1, 3]
    assert rig.finished.index(1) < rig.finished.index(3)


def test_stalled_decodes_keep_their_blocks_and_go_on_later() -> None:
    rig = make_rig(6, reserve_steps=0, max_stalled_fraction=0.5)
    rig.add(1, range(8), max_tokens=4, stop=2)
    rig.add(2, range(100, 112), max_tokens=4)
    rig.step()
    first = rig.step()
    assert (first.num_stalled, first.preempted) == (1, ())
    assert first.step is not None
    assert first.step.sequence_ids.tolist() == [1]
    rig.run()
    assert sum(len(batch.preempted) for batch in rig.batches) == 0
    rig.check_outputs()


def test_without_stalls_the_request_with_the_fewest_blocks_is_preempted() -> None:
    rig = make_rig(9, reserve_steps=0, max_stalled_fraction=0.0)
    rig.add(1, range(12), max_tokens=9)
    rig.add(2, range(100, 104), max_tokens=9)
    rig.add(3, range(200, 216), max_tokens=9)
    rig.step()
    batch = rig.step()
    assert [(one.sequence_id, one.computed, one.swapped) for one in batch.preempted] == [(2, 4, False)]
    rig.run()
    rig.check_outputs()
    assert sorted(rig.finished) == [1, 2, 3]


def test_the_cached_blocks_of_a_preempted_request_are_evicted_last() -> None:
    rig = make_rig(10, reserve_steps=0, max_stalled_fraction=0.0)
    rig.add(1, range(15), max_tokens=17)
    rig.add(2, range(100, 112), max_tokens=2)
    rig.add(3, range(200, 208), max_tokens=9)
    rig.step()
    assert [one.sequence_id for one in rig.step().preempted] == [3]
    assert rig.finished == [2]
    while 1 not in rig.finished:  # it grows by four blocks
        rig.step(max_running=1)
    assert sizes(rig) == {3: 1}


def test_higher_priority_preempts_lower() -> None:
    rig = make_rig(8, order=QueueOrder.PRIORITY)
    rig.add(1, range(12), max_tokens=9, priority=5)
    rig.add(2, range(100, 112), max_tokens=9, priority=1)
    rig.step()
    rig.add(3, range(200, 212), max_tokens=9, priority=1)
    batch = rig.step()
    assert [one.sequence_id for one in batch.preempted] == [1]
    assert batch.step is not None
    assert batch.step.sequence_ids.tolist() == [2, 3]
    rig.run()
    assert rig.finished == [2, 3, 1]
    rig.check_outputs()


def test_what_was_swapped_out_for_a_more_urgent_request_comes_back_after_it() -> None:
    rig = make_rig(
        20, {"num_swap_blocks": 20}, order=QueueOrder.PRIORITY, preemption=PreemptionMode.SWAP, max_running=1
    )
    rig.add(1, range(12), max_tokens=9, priority=5)
    rig.step()
    rig.add(2, range(200, 212), max_tokens=3, priority=1)
    rig.add(3, range(300, 312), max_tokens=3, priority=5)
    batch = rig.step()
    assert [(one.sequence_id, one.swapped) for one in batch.preempted] == [(1, True)]
    assert batch.sampled.tolist() == [2]
    rig.run()
    assert rig.finished == [2, 1, 3]
    rig.check_outputs()


def test_a_swapped_request_comes_back_into_a_pool_that_it_fills() -> None:
    rig = make_rig(5, {"num_swap_blocks": 5}, preemption=PreemptionMode.SWAP, lookahead=3, reserve_steps=0)
    rig.add(1, 3, max_tokens=13)
    rig.add(2, range(100, 103), max_tokens=13)
    rig.run(max_steps=60)
    assert sum(len(one.swapped_in) for one in rig.batches) > 0
    rig.check_outputs()


def test_no_request_waits_for_ever_in_a_small_pool() -> None:
    swapped = 0
    with each_row() as row:
        for seed in range(12):
            with row(seed):
                rig = small_pool(random.Random(seed))
                rig.run(max_steps=2000)
                rig.check_outputs()
                swapped += sum(len(one.swapped_in) for one in rig.batches)
    assert swapped > 8


def small_pool(choose: random.Random) -> EngineRig:
    """Return an engine whose requests may fill its pool alone."""
    lookahead, size, num_blocks = choose.randint(0, 9), choose.choice([1, 2, 4, 8]), choose.randint(4, 12)
    rig = make_rig(
        num_blocks,
        {"block_size": size, "num_swap_blocks": 2 * num_blocks, "watermark": choose.choice([0.0, 0.2])},
        preemption=PreemptionMode.SWAP,
        lookahead=lookahead,
        max_running=choose.randint(2, 4),
        reserve_steps=choose.choice([0, 4]),
    )
    for number in range(choose.randint(2, 5)):
        width = choose.choice([1, 1, 2])
        beams = width > 1 and choose.random() < 0.5
        room = (num_blocks - rig.manager.config.watermark_blocks) // (width if beams else 1) * size - lookahead
        if room >= 2:
            prompt = choose.randint(1, room // 2)
            rig.add(10 * number, prompt, max_tokens=room - prompt, width=width, beams=beams)
    return rig


def test_priority_is_ignored_when_first_come_is_first_served() -> None:
    rig = make_rig(8)
    rig.add(1, range(12), max_tokens=9, priority=5)
    rig.step()
    rig.add(2, range(200, 224), max_tokens=1, priority=1)
    assert not rig.step().preempted


PREEMPTIONS: list[tuple[Any, ...]] = [
    (PreemptionMode.AUTO, 1e-9, 10, True),
    (PreemptionMode.AUTO, 1.0, 10, False),
    (PreemptionMode.SWAP, 1.0, 10, True),
    (PreemptionMode.SWAP, 1e-9, 1, False),
    (PreemptionMode.RECOMPUTE, 1e-9, 10, False),
]


def test_preemption_swaps_or_recomputes_by_what_costs_less() -> None:
    with each_row() as row:
        for mode, swap_block_s, swap_blocks, swapped in PREEMPTIONS:
            with row((mode, swap_block_s, swap_blocks, swapped)):
                rig = make_rig(
                    8,
                    {"num_swap_blocks": swap_blocks},
                    reserve_steps=0,
                    max_stalled_fraction=0.0,
                    preemption=mode,
                    swap_block_s=swap_block_s,
                )
                rig.add(1, range(16), max_tokens=9)
                rig.add(2, range(100, 115), max_tokens=9)
                rig.step()
                batch = rig.step()
                assert [one.swapped for one in batch.preempted] == [swapped]
                assert len(batch.swapped_out) == swapped
                rig.run()
                rig.check_outputs()
                assert sum(len(one.swapped_in) for one in rig.batches) == swapped
                assert sorted(rig.finished) == [1, 2]
