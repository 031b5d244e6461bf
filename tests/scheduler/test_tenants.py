"""Schedulers of tenants whose shares of the pool change while requests are queued, run or are swapped out."""

from __future__ import annotations

import pytest
from schedule_rig import EngineRig, make_rig

from kvservice.blocks import TenantQuota
from kvservice.errors import KVServiceError
from kvservice.scheduler import Needs, PreemptionMode, QueueOrder, Request


def tenant_rig(**config: object) -> EngineRig:
    """Return the engine of tenant b in a pool of 100 blocks, which another tenant shares."""
    rig = make_rig(100, {"num_swap_blocks": 100}, **{"max_step_tokens": 512, "max_running": 8, **config})
    rig.namespace.quota = TenantQuota("b", 60, None)
    rig.namespace.quota.namespaces.add(rig.namespace)
    share(rig)
    return rig


def share(rig: EngineRig, guaranteed_to_other: int = 0, max_blocks: int = 60) -> None:
    """Give tenant b another share of the pool, as a daemon does between two calls."""
    rig.namespace.quota.max_blocks = max_blocks
    rig.manager.set_tenants({"a": guaranteed_to_other, "b": 0})
    rig.manager.enter(rig.namespace)


SMALLER = [{"max_blocks": 20}, {"guaranteed_to_other": 80}]


@pytest.mark.parametrize("smaller", SMALLER)
@pytest.mark.parametrize("order", QueueOrder)
def test_a_queued_request_that_would_be_refused_holds_no_other_back(smaller: dict[str, int], order: QueueOrder) -> None:
    """Nor are others preempted for it. It runs when it fits again."""
    rig = tenant_rig(order=order)
    rig.add(1, range(160), priority=1)
    rig.add(2, range(1000, 1008), max_tokens=12, priority=2)
    share(rig, **smaller)
    with pytest.raises(KVServiceError):
        rig.engine.add(Request(3, range(160), 4))
    rig.step()
    for number in range(10, 90):  # more of them than one step looks at
        share(rig)
        rig.add(number, range(2000, 2160), priority=0)
        share(rig, **smaller)
    rig.add(99, range(3000, 3008), priority=3)
    for _ in range(20):
        assert not rig.step().preempted
    assert sorted(rig.finished) == [2, 99]
    for number in range(10, 90):
        rig.abort(number)
    share(rig)
    rig.run()
    assert rig.finished[-1] == 1
    rig.check_outputs()


@pytest.mark.parametrize("smaller", SMALLER)
@pytest.mark.parametrize("order", QueueOrder)
def test_no_number_of_refused_requests_holds_others_back(
    smaller: dict[str, int], order: QueueOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step looks at none of them. All keep their places, also those that come while others are refused."""
    rig = tenant_rig(order=order, max_running=4, size_delay_steps=0.0)
    refused, others = range(10, 1010), range(2000, 2008)
    for number in refused:
        rig.add(number, range(10 * number, 10 * number + 160), max_tokens=1)
    share(rig, **smaller)
    for number in others:
        rig.add(number, range(100_000 + 10 * number, 100_008 + 10 * number), max_tokens=1)
    rig.step()
    with monkeypatch.context() as unchanged:
        unchanged.setattr(Needs, "within", lambda *_: pytest.fail("the limits are as before"))
        for _ in range(8):
            rig.step()
    assert rig.finished == [*others]
    for number in [*refused][4:]:
        rig.abort(number)
    share(rig)
    rig.add(3000, range(8), max_tokens=1)
    rig.run()
    assert rig.finished == [*others, *refused[:4], 3000]
    rig.check_outputs()


@pytest.mark.parametrize("smaller", SMALLER)
def test_a_swapped_request_that_would_be_refused_holds_no_other_back(smaller: dict[str, int]) -> None:
    rig = tenant_rig(preemption=PreemptionMode.SWAP, order=QueueOrder.PRIORITY)
    rig.add(1, range(200), max_tokens=8, priority=2)
    rig.step()
    rig.add(2, range(1000, 1076), priority=1)
    assert [one.sequence_id for one in rig.step().preempted] == [1]
    rig.manager.reset_prefix_cache()
    share(rig, **smaller)
    rig.add(3, range(2000, 2008), priority=2)
    for _ in range(20):
        rig.step()
    assert sorted(rig.finished) == [2, 3]
    share(rig)
    rig.run()
    assert rig.finished[-1] == 1
    rig.check_outputs()


def test_a_prefill_goes_on_when_more_is_guaranteed_to_others_than_is_left() -> None:
    rig = tenant_rig(max_step_tokens=64)
    share(rig, max_blocks=100)
    rig.add(1, range(318), max_tokens=2)
    rig.step()
    share(rig, max_blocks=100, guaranteed_to_other=50)
    rig.run(max_steps=10)
    assert rig.finished == [1]
    rig.check_outputs()
