"""Proposals: tokens that are computed before they are known to be right."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from schedule_rig import EngineRig, alone, make_rig

from kvservice.blocks import AllocationRequest
from kvservice.errors import InvalidArgumentError
from kvservice.scheduler import Report, check_integrity


def begun(lookahead: int = 3, max_tokens: int = 9, **options: Any) -> tuple[EngineRig, list[int]]:
    """Return a rig with request 1 in its prompt's batch, and the tokens that the request gets."""
    rig = make_rig(lookahead=lookahead, **options)
    rig.add(1, 6, max_tokens=max_tokens)
    rig.begin()
    return rig, alone(list(range(6)), max_tokens)


def report(rig: EngineRig, tokens: list[int], proposals: list[int], **options: Any) -> list[int]:
    """Report the batch of request 1 alone."""
    number = rig.flight.pop(0).number
    counts = {"num_tokens": [len(tokens)], "num_proposed": [len(proposals)]}
    rig.outputs[1] += tokens
    rig.known[1] = proposals
    return rig.engine.update(Report(number, tokens, proposals=proposals, **counts, **options))


def test_the_tokens_are_those_without_proposals() -> None:
    with each_row() as row:
        for lookahead in (1, 2, 5):
            for ahead in (False, True):
                with row((lookahead, ahead)):
                    rig = make_rig(lookahead=lookahead)
                    rig.random = random.Random(lookahead)
                    for i in range(4):
                        rig.add(i, range(100 * i, 100 * i + 5 + i), max_tokens=30, stop=20 + i)
                    if ahead:
                        rig.run_ahead()
                    else:
                        rig.run()
                    rig.check_outputs()
                    assert sorted(rig.finished) == [0, 1, 2, 3]
                    counters = rig.engine.queues.counters
                    assert counters.accepted_tokens == rig.accepted
                    assert ahead or counters.proposed_tokens > counters.accepted_tokens > 0
                    assert counters.generated_tokens == sum(map(len, rig.outputs.values()))


def test_right_proposals_stay_and_others_are_removed() -> None:
    with each_row() as row:
        for right in range(4):
            with row(right):
                rig, tokens = begun()
                proposals = [*tokens[1 : 1 + right], 999, 999, 999][:3]
                report(rig, tokens[:1], proposals)
                batch = rig.begin()
                assert batch.step is not None
                assert batch.step.query_lens.tolist() == [4]
                assert batch.sampled.tolist() == [1]
                report(rig, tokens[1 : 2 + right], [])
                (described,) = rig.manager.describe(rig.namespace, [1], include_tokens=True)
                assert described.token_ids is not None
                assert described.token_ids.tolist() == [*range(6), *tokens[: 1 + right]]
                check_integrity(rig.engine)
                rig.manager.check_integrity()
                rig.run()
                rig.check_outputs()


def test_blocks_with_rejected_tokens_are_written_again() -> None:
    """The rejected tokens filled a block, which the next tokens must not change for others."""
    rig, tokens = begun()
    report(rig, tokens[:1], [997, 998, 999])
    rig.begin()
    rejected = [*range(6), tokens[0], 997]
    assert rig.manager.match_prefix([*rejected, 1]) == 8
    report(rig, tokens[1:2], [])
    assert rig.manager.match_prefix([*rejected, 1]) == 4
    rig.run()
    assert rig.manager.match_prefix([*range(6), *tokens[:2], 1]) == 8


def test_a_rejected_block_that_others_use_is_copied() -> None:
    """Another client shares or pins it between the step and the report."""
    with each_row() as row:
        for pinned in (False, True):
            with row(pinned):
                rig, tokens = begun(num_blocks=8, blocks={"max_pinned_fraction": 0.5})
                report(rig, tokens[:1], [997, 998, 999])
                rig.begin()
                rejected = [*range(6), tokens[0], 997]
                other = rig.manager.open_namespace()
                if pinned:
                    rig.manager.pin(other, rejected, ttl_s=1e9)
                else:
                    rig.manager.allocate(other, [AllocationRequest(5, np.array([*rejected, 1]))])
                report(rig, tokens[1:2], [])
                rig.run()
                rig.check_outputs()
                assert rig.manager.match_prefix([*rejected, 1]) == 8
                rig.manager.check_integrity()


def test_proposals_count_in_the_budget_of_tokens() -> None:
    rig, tokens = begun()
    report(rig, tokens[:1], tokens[1:4])
    batch = rig.begin(max_step_tokens=3)
    assert batch.num_tokens == 3
    report(rig, tokens[1:4], [])
    rig.run()
    rig.check_outputs()


def test_no_more_proposals_than_tokens_are_left() -> None:
    rig, tokens = begun(max_tokens=3)
    report(rig, tokens[:1], tokens[1:3])
    assert rig.begin().num_tokens == 2
    assert report(rig, tokens[1:3], []) == [1]
    assert rig.manager.stats().sequences == 0


def test_an_engine_may_stop_within_accepted_tokens() -> None:
    rig, tokens = begun()
    report(rig, tokens[:1], tokens[1:4])
    rig.begin()
    assert report(rig, tokens[1:3], [], finished=[1]) == [1]
    assert rig.manager.match_prefix([*range(6), *tokens[:2], 1]) == 8


def test_a_retried_batch_has_no_proposals() -> None:
    rig, tokens = begun()
    report(rig, tokens[:1], tokens[1:4])
    rig.begin()
    batch = rig.retry()
    assert batch.num_tokens == 1
    rig.write(batch)
    report(rig, tokens[1:2], [])
    check_integrity(rig.engine)
    rig.run()
    rig.check_outputs()


def test_a_sequence_with_proposals_waits_for_its_report() -> None:
    rig, tokens = begun()
    rig.random = random.Random(1)
    rig.add(2, range(200, 206), max_tokens=5)
    report(rig, tokens[:1], tokens[1:4])
    rig.begin()
    ahead = rig.begin()
    assert ahead.step is None
    rig.settle()
    rig.run_ahead()
    rig.check_outputs()


BAD_REPORTS: list[tuple[Any, ...]] = [
    ({"num_tokens": [5]}, "num_tokens[0]"),
    ({"num_tokens": [0]}, "num_tokens[0]"),
    ({"num_tokens": [1, 1]}, "num_tokens"),
    ({"num_tokens": [2]}, "token_ids"),
    ({"num_proposed": [4], "proposals": [1, 2, 3, 4]}, "num_proposed[0]"),
    ({"num_proposed": [-1]}, "num_proposed[0]"),
    ({"num_proposed": [2], "proposals": [1]}, "proposals"),
    ({"proposals": [1]}, "proposals"),
    ({"num_proposed": [1], "proposals": [-1]}, "proposals[0]"),
    ({"token_ids": [1, 2], "num_tokens": [2]}, "token_ids[0]"),
]


def test_a_bad_report_changes_nothing() -> None:
    with each_row() as row:
        for bad, field in BAD_REPORTS:
            with row((bad, field)):
                rig, tokens = begun()
                report(rig, tokens[:1], tokens[1:4])
                batch = rig.begin()
                with pytest.raises(InvalidArgumentError) as refused:
                    rig.engine.update(Report(batch.number, **{"token_ids": [tokens[1]], **bad}))
                assert refused.value.field == field
                report(rig, tokens[1:5], [])
                rig.run()
                rig.check_outputs()
