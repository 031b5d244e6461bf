"""Tenants of one pool: what they may not take, and whose the blocks are when tenants change and after restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blocks_calls import can_allocate
from crashes import KeptManager

from kvservice.blocks import (
    NUM_COUNTERS,
    AllocationRequest,
    AllocStatus,
    BlockManager,
    BlocksConfig,
    SessionNamespace,
    TenantQuota,
    finish,
)
from kvservice.errors import OutOfBlocksError, QuotaExceededError

CONFIG = BlocksConfig(
    num_blocks=32, block_size=4, num_layers=1, num_swap_blocks=16, watermark=0.0, max_sequences=8,
    max_sequence_tokens=128, max_namespaces=4,
)  # fmt: skip


def join(namespace: SessionNamespace, tenant: str, max_blocks: int | None = None) -> SessionNamespace:
    namespace.quota = TenantQuota(tenant, max_blocks, None)
    namespace.quota.namespaces.add(namespace)
    return namespace


def compute(manager: BlockManager, space: SessionNamespace, sequence_id: int, num_blocks: int, first: int = 0) -> None:
    """Let a sequence have so many full blocks, whose tokens begin at `first`."""
    manager.allocate(space, [AllocationRequest(sequence_id, np.arange(first, first + 4 * num_blocks))])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


@pytest.mark.parametrize("tenants", [{"a": 0, "b": 0, "c": 0}, {"b": 0, "a": 0}], ids=["one more", "another order"])
def test_tenants_that_change_during_a_check_are_no_corruption(tenants: dict[str, int]) -> None:
    """After each of its slices."""
    for changed_after in range(200):
        manager = BlockManager(CONFIG)
        compute(manager, join(manager.open_namespace(), "a"), 1, 20)
        manager.set_tenants({"a": 0, "b": 0})
        check = manager.check_integrity_in_slices(8)
        for number, _ in enumerate(check):
            if number == changed_after:
                manager.set_tenants(tenants)
                assert finish(check)
                break
        else:
            assert changed_after > 20
            return
    pytest.fail("the check does not end")


def test_what_needs_no_block_goes_on_where_more_is_guaranteed_than_is_left() -> None:
    manager = BlockManager(CONFIG)
    space = join(manager.open_namespace(), "b")
    manager.set_tenants({"a": 0, "b": 0})
    manager.allocate(space, [AllocationRequest(1, np.arange(4 * 30 - 3))])
    manager.set_tenants({"a": 16, "b": 0})
    manager.mark_all_layers(space, manager.open_step(space, [1]).step_id)
    assert manager.can_append(space, [1])
    manager.mark_all_layers(space, manager.append(space, [1], [7]).step_id)
    assert not manager.can_append(space, [1], [3])
    with pytest.raises(OutOfBlocksError, match="1 block is needed and 0 of 32 are available; 16 more are guaranteed"):
        manager.append(space, [1], [7, 7, 7], [3])
    manager.check_integrity()


class Daemon:
    """A manager with the namespaces of tenants a and b, whose process may end. They share their blocks."""

    def __init__(self, guaranteed: dict[str, int], max_blocks: int | None = None) -> None:
        self.guaranteed, self.max_blocks = guaranteed, max_blocks
        self.manager = KeptManager(CONFIG, lambda: 0.0)
        self.begin({name: self.manager.open_namespace(number) for name, number in (("a", 1), ("b", 2))})

    def begin(self, spaces: dict[str, SessionNamespace]) -> None:
        self.spaces = {name: join(space, name, self.max_blocks) for name, space in spaces.items()}
        self.manager.set_tenants(self.guaranteed, dict.fromkeys("ab", "shared"))

    def restart(self) -> None:
        self.manager.end_operation()
        self.manager = KeptManager(CONFIG, lambda: 0.0, self.manager.kept_state())
        recovery = self.manager.recover({1: [0] * NUM_COUNTERS, 2: [0] * NUM_COUNTERS})
        self.begin({"a": recovery.namespaces[1], "b": recovery.namespaces[2]})
        self.manager.check_integrity()

    def num_held(self) -> tuple[int, int]:
        owners = self.manager.device.owners
        assert owners is not None
        return owners.num_held("a"), owners.num_held("b")


def test_pins_count_for_their_tenant_after_a_restart() -> None:
    daemon = Daemon({"a": 12, "b": 0}, max_blocks=16)
    compute(daemon.manager, daemon.spaces["a"], 1, 12)
    daemon.manager.free(daemon.spaces["a"], [1])
    daemon.manager.pin(daemon.spaces["a"], np.arange(48), ttl_s=60)
    compute(daemon.manager, daemon.spaces["b"], 1, 14, first=1000)
    assert daemon.num_held() == (12, 14)
    daemon.restart()
    assert daemon.num_held() == (12, 14)
    with pytest.raises(QuotaExceededError) as caught:
        compute(daemon.manager, daemon.spaces["a"], 2, 5, first=2000)
    assert caught.value.metadata["used"] == "12"
    compute(daemon.manager, daemon.spaces["b"], 2, 2, first=3000)


def test_blocks_of_tenants_who_share_are_the_same_ones_after_every_restart() -> None:
    for _ in range(8):  # sets of objects have another order in each
        daemon = Daemon({"a": 0, "b": 0})
        for name in ("b", "a"):
            compute(daemon.manager, daemon.spaces[name], 1, 6)
        daemon.restart()
        assert daemon.num_held() == (6, 1)  # a prompt's last block is computed by each


STATUSES: dict[str, tuple[Callable[[BlockManager, TenantQuota], object], AllocStatus]] = {
    "nothing changes": (lambda manager, quota: None, AllocStatus.OK),
    "a lower quota": (lambda manager, quota: setattr(quota, "max_blocks", 9), AllocStatus.NEVER),
    "a higher guarantee": (lambda manager, quota: manager.set_tenants({"a": 23, "b": 0}), AllocStatus.NEVER),
    "a guarantee that leaves enough": (lambda manager, quota: manager.set_tenants({"a": 22, "b": 0}), AllocStatus.OK),
}


@pytest.mark.parametrize("change", STATUSES)
def test_a_swap_in_that_never_fits_is_told_from_one_that_waits(change: str) -> None:
    """As an allocation of as many blocks."""
    manager, (changed, status) = BlockManager(CONFIG), STATUSES[change]
    space = join(manager.open_namespace(), "b", max_blocks=20)
    manager.set_tenants({"a": 0, "b": 0})
    compute(manager, space, 1, 10)
    manager.swap_out(space, [1])
    manager.reset_prefix_cache()
    quota: Any = space.quota
    changed(manager, quota)
    assert manager.can_swap_in(space, [1]) is status
    assert can_allocate(manager, space, [AllocationRequest(2, np.arange(1000, 1040))]) is status
