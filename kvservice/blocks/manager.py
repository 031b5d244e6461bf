"""Block manager of the KV pool. It plans all operations and never touches the bytes of the pool.

Every operation takes a session namespace and a batch. It validates everything before it changes anything, and either
performs the whole batch or raises one of kvservice.errors. If a `can_...` method says yes, the operation does not fail.
"""

from __future__ import annotations

from functools import cached_property

from kvservice.blocks import (
    advancing,
    allocation,
    freeing,
    inspection,
    integrity,
    layers,
    prefix,
    recovery,
    steps,
    swapping,
)
from kvservice.blocks.loading import Loader
from kvservice.blocks.state import BlockState


class BlockManager(BlockState):
    """Allocator, block tables, prefix cache and swap tier of one pool (vLLM's block manager, adapted to a service).

    It is the state together with all operations on it. Each operation is a function of its module below, whose first
    argument is the state. `loader` is the API for blocks that come from outside of the pool or are copied out of it.
    Methods named `..._in_slices` are for large batches: other operations may run between the slices (see slices.py).

    Errors that the operations do not repeat: InvalidArgumentError names a bad argument; UnknownSessionError means that
    the namespace is closed; operations on sequence_ids raise UnknownSequenceError, and SequenceSwappedError unless they
    are for swapped-out sequences; batches above max_request_tokens or max_request_blocks raise QuotaExceededError.
    """

    # Namespaces: open_namespace, and for restarts end_operation, are methods of the state.
    close_namespace = freeing.close_namespace
    close_namespace_in_slices = freeing.close_namespace_in_slices
    quarantine_writable = freeing.quarantine_writable
    recover = recovery.recover
    save_steps = recovery.save_steps

    # Sequences
    can_allocate_in_slices = allocation.can_allocate_in_slices
    allocate = allocation.allocate
    allocate_in_slices = allocation.allocate_in_slices
    find_prompt = allocation.find_prompt
    allocate_found = allocation.allocate_found
    fork = allocation.fork
    rearrange = allocation.rearrange
    truncate = freeing.truncate
    free = freeing.free
    free_in_slices = freeing.free_in_slices

    # Steps
    can_append = steps.can_append
    append = steps.append
    open_step = steps.open_step
    reopen = steps.reopen
    advance = advancing.advance
    open_ahead = advancing.open_ahead
    commit_ahead = advancing.commit_ahead
    end_steps_in_slices = freeing.end_steps_in_slices

    # Layers of a step, and its commit
    written_layers = staticmethod(layers.written_layers)
    finished_ids = layers.finished_ids
    hand_to_lane = layers.hand_to_lane
    check_part = layers.check_part
    mark_part = layers.mark_part
    completes = staticmethod(layers.completes)
    check_all_layers = layers.check_all_layers
    mark_all_layers = layers.mark_all_layers
    mark_layers = layers.mark_layers
    commit_written = layers.commit_written
    set_tokens = layers.set_tokens

    # Swap, and sequences that outlive the daemon
    can_swap_out = swapping.can_swap_out
    swap_out = swapping.swap_out
    can_swap_in = swapping.can_swap_in
    swap_in = swapping.swap_in
    submitted = swapping.submitted
    save_in_slices = swapping.save_in_slices
    move_to_disk_in_slices = freeing.move_to_disk_in_slices
    add_on_disk = freeing.add_on_disk
    adopt = swapping.adopt
    restore_in_slices = swapping.restore_in_slices
    index_restored_in_slices = swapping.index_restored_in_slices

    # Prefix cache
    match_prefix = prefix.match_prefix
    touch = prefix.touch
    pin = prefix.pin
    unpin = prefix.unpin
    reset_prefix_cache = prefix.reset_prefix_cache
    reset_prefix_cache_in_slices = prefix.reset_prefix_cache_in_slices

    # Inspection
    read_slots = inspection.read_slots
    common_prefix_blocks = inspection.common_prefix_blocks
    tail_blocks = inspection.tail_blocks
    describe = inspection.describe
    describe_in_slices = inspection.describe_in_slices
    stats = inspection.stats
    block_hash = inspection.block_hash
    check_integrity = integrity.check_integrity
    check_integrity_in_slices = integrity.check_integrity_in_slices

    @cached_property
    def loader(self) -> Loader:
        """The API for blocks from outside of the pool, and for copies of blocks."""
        return Loader(self)
