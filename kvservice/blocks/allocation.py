"""How sequences begin: they are allocated, forked, or they continue others.

The computed blocks of a prompt are shared through the prefix index. `can_allocate_in_slices` and `allocate_in_slices`
compute the same plan, so they cannot contradict each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import check_request_blocks, extra_keys_by_block, int32_array, whole_number
from kvservice.blocks.kept import extra_keys_bytes
from kvservice.blocks.plans import NO_STEP, Allocation, AllocationRequest, AllocStatus, Int32Array, Int64Array
from kvservice.blocks.slices import SLICE_SEQUENCES, Slices, Waits, finish, in_turn
from kvservice.blocks.state import (
    DROP,
    FLAGS,
    HIT_TOKENS,
    LENGTH,
    NAMESPACE,
    NUM_BLOCKS,
    NUM_COMPUTED,
    QUERY_TOKENS,
    SCHEDULED,
    SEQUENCE_ID,
    STATE_COLUMNS,
    STEP,
    BlockState,
    SessionNamespace,
    id_array,
    ragged,
)
from kvservice.errors import InvalidArgumentError

_NO_BLOCKS = np.zeros(0, np.int64)


class NewSequence(NamedTuple):
    """A validated request.

    `tokens` is int32[n]. `extra` maps block numbers to extra keys. `found` are the prefix-cache hits of the prompt, of
    which sequences hold at least `num_held`. `num_blocks` and `required` are the sizes of the block table without and
    with lookahead, in blocks.
    """

    sequence_id: int
    tokens: Int32Array
    extra: dict[int, bytes]
    found: Int64Array
    num_blocks: int
    required: int
    num_held: int = 0


# Called with new sequences before they are allocated. Returns what to wait for, or None. More of their blocks may be
# cached then.
BeforeAllocation: TypeAlias = Callable[[SessionNamespace, list[NewSequence]], Awaitable[object] | None]


class FoundPrompt(NamedTuple):
    """A prompt and its prefix-cache hits, from BlockManager.find_prompt. The hits are current in one `generation` of
    the state; `chain_hashes` find them again in a later one."""

    new: NewSequence
    chain_hashes: list[bytes]
    generation: int

    @property
    def num_found(self) -> int:
        """Number of prefix-cache hits, in blocks."""
        return len(self.new.found)

    @property
    def num_consumed(self) -> int:
        """Number of available blocks that the sequence takes at most, with its lookahead."""
        return self.new.required - self.new.num_held


class _Plan(NamedTuple):
    """`hits` are the prefix-cache hits of all sequences. `required` is the number of blocks of all tables."""

    sequences: list[NewSequence]
    hits: Int64Array
    status: AllocStatus
    required: int


def can_allocate_in_slices(
    state: BlockState, namespace: SessionNamespace, requests: Sequence[AllocationRequest]
) -> Slices[AllocStatus]:
    """Return whether the whole batch fits above the watermark (the three answers of vLLM v0).

    OK: after the allocation at least `watermark_blocks` blocks remain available. A prefix-cache hit needs no new
    block, but a hit on an evictable block makes that block unavailable; each block is counted exactly once. There are
    places for the sequences, too.
    NEVER: not OK, and `num_blocks - required < watermark_blocks`, where `required` is the number of blocks of all
    tables, ceil((tokens + lookahead) / block_size) each; or the batch has more than max_sequences sequences.
    LATER: otherwise. As in vLLM v0, this check includes the lookahead slots; the steps reserve them.
    Raises DuplicateSequenceError. The answer describes the state at the last slice.
    """
    plan = yield from _plan(state, namespace, requests)
    return plan.status


def allocate(state: BlockState, namespace: SessionNamespace, requests: Sequence[AllocationRequest]) -> list[Allocation]:
    """Allocate all sequences of the batch, or none.

    Full blocks of a prompt that are already computed under the same extra keys are shared (vLLM's automatic prefix
    caching). At least the last token is left to compute, because an engine needs its logits. Requests of one batch
    do not share each other's new blocks, since those are not computed yet. `open_step` covers the remaining
    tokens. Raises DuplicateSequenceError, QuotaExceededError, OutOfBlocksError.
    """
    return finish(allocate_in_slices(state, namespace, requests))


def allocate_in_slices(
    state: BlockState,
    namespace: SessionNamespace,
    requests: Sequence[AllocationRequest],
    before: BeforeAllocation | None = None,
) -> Waits[list[Allocation]]:
    """`allocate` in slices; the last slice creates all sequences. `before` may load missing blocks first. Raises
    UnknownSessionError if the namespace is closed in the meantime."""
    plan = yield from _plan(state, namespace, requests)
    if before is not None and (event := before(namespace, plan.sequences)) is not None:
        yield event
        plan = yield from _plan(state, namespace, requests)
    _execute(state, namespace, plan)
    return [
        Allocation(new.sequence_id, len(new.tokens), len(new.found) << state.shift, new.num_blocks)
        for new in plan.sequences
    ]


def find_prompt(
    state: BlockState,
    sequence_id: int,
    token_ids: Int32Array,
    extra: dict[int, bytes],
    chain_hashes: list[bytes],
    lookahead: int = 0,
) -> FoundPrompt:
    """Look up a prompt of this process that is known to be valid: token_ids int32[n], its encoded extra keys by
    block, and the chain hashes of its full blocks. Nothing is reserved or counted."""
    found, num_held = state.device.match_hashes(chain_hashes, (len(token_ids) - 1) >> state.shift)
    num_blocks = (len(token_ids) + state.mask) >> state.shift
    required = (len(token_ids) + lookahead + state.mask) >> state.shift
    new = NewSequence(sequence_id, token_ids, extra, found, num_blocks, required, num_held)
    return FoundPrompt(new, chain_hashes, state.generation)


def allocate_found(state: BlockState, namespace: SessionNamespace, prompts: list[FoundPrompt]) -> list[NewSequence]:
    """Allocate all sequences of `find_prompt`, or none, as `allocate` does. If the state changed since they were
    found, they are looked up again. Returns the sequences with the hits that they share."""
    generation = state.generation
    sequences = [one.new if one.generation == generation else _find_again(state, one) for one in prompts]
    state.enter(namespace)
    namespace.check_new_ids([new.sequence_id for new in sequences], "requests[{}].sequence_id")
    _execute(state, namespace, _plan_for(state, sequences), SCHEDULED)
    return sequences


def _find_again(state: BlockState, prompt: FoundPrompt) -> NewSequence:
    """Look up the hits of a prompt as they are now."""
    found, num_held = state.device.match_hashes(prompt.chain_hashes, (len(prompt.new.tokens) - 1) >> state.shift)
    return prompt.new._replace(found=found, num_held=num_held)


def _plan(state: BlockState, namespace: SessionNamespace, requests: Sequence[AllocationRequest]) -> Slices[_Plan]:
    """Make the plan in slices. It describes the state at the last slice."""
    state.enter(namespace)
    if not requests:
        raise InvalidArgumentError("must not be empty", field="requests")
    if len(requests) <= SLICE_SEQUENCES:
        sequences = [_check_request(state, request, f"requests[{i}]") for i, request in enumerate(requests)]
    else:
        sequences = yield from _check_in_slices(state, requests)
        state.enter(namespace)
    namespace.check_new_ids([new.sequence_id for new in sequences], "requests[{}].sequence_id")
    return _plan_for(state, sequences)


def _plan_for(state: BlockState, sequences: list[NewSequence]) -> _Plan:
    """Plan the allocation of sequences whose hits are those of the current state."""
    required = num_held = 0
    hits: list[Int64Array] = []
    for new in sequences:
        required += new.required
        num_held += new.num_held
        if len(new.found):
            hits.append(new.found)
    found = hits[0] if len(hits) == 1 else np.concatenate(hits) if hits else _NO_BLOCKS
    status = allocation_status(state, len(sequences), required, required - num_held)
    # At most so many are taken. Only if these are too many, the hits are counted exactly.
    if status is not AllocStatus.OK and hits:
        num_consumed = required + state.device.num_evictable(np.unique(found)) - len(found)
        status = allocation_status(state, len(sequences), required, num_consumed)
    return _Plan(sequences, found, status, required)


def _check_in_slices(state: BlockState, requests: Sequence[AllocationRequest]) -> Slices[list[NewSequence]]:
    """Validate the requests in slices. Prefix-cache hits count only if the index still has them after the last
    slice."""

    def checked() -> Iterator[tuple[NewSequence, list[Any]]]:
        for i, request in enumerate(requests):
            new = _check_request(state, request, f"requests[{i}]")
            yield new, [state.device.hashes[block] for block in new.found.tolist()]

    return [_still_found(state, *one) for one in (yield from in_turn(checked()))]


def _still_found(state: BlockState, new: NewSequence, hashes: list[bytes]) -> NewSequence:
    found, index = new.found.tolist(), state.device.index.blocks
    gone = (
        i for i, (block, chain_hash) in enumerate(zip(found, hashes, strict=True)) if index.get(chain_hash) != block
    )
    first = next(gone, len(found))
    return new if first == len(found) else new._replace(found=new.found[:first])


def allocation_status(state: BlockState, num_sequences: int, required: int, num_consumed: int) -> AllocStatus:
    """Return whether so many new sequences fit, which need `required` blocks, `num_consumed` of them available ones."""
    fits = state.device.room(state.config.watermark_blocks) >= num_consumed
    if fits and num_sequences <= state.sequences.num_free:
        return AllocStatus.OK
    if num_sequences > state.config.max_sequences:
        return AllocStatus.NEVER
    if state.device.quota is not None and state.device.quota.never(required, num_sequences):
        return AllocStatus.NEVER
    kept = state.config.watermark_blocks
    if state.device.owners is not None:
        kept = max(kept, state.device.owners.guaranteed_to_others(state.device.quota))
    if state.config.num_blocks - required < kept and not fits:
        return AllocStatus.NEVER
    return AllocStatus.LATER


def _check_request(state: BlockState, request: AllocationRequest, field: str) -> NewSequence:
    tokens = int32_array(request.token_ids, f"{field}.token_ids")
    limit = state.config.max_sequence_tokens
    if len(tokens) > limit:
        raise InvalidArgumentError(
            f"has {len(tokens)} tokens, more than max_sequence_tokens = {limit}", field=f"{field}.token_ids"
        )
    lookahead = request.lookahead
    if type(lookahead) is not int or not 0 <= lookahead <= limit - len(tokens):
        lookahead = whole_number(lookahead, f"{field}.lookahead", 0, limit - len(tokens))
    extra: dict[int, bytes] = {}
    if request.extra_keys:
        extra = extra_keys_by_block(request.extra_keys, f"{field}.extra_keys", state.config.block_size, limit)
    found = _NO_BLOCKS
    if state.config.enable_prefix_caching:  # the last token is always computed
        found = state.device.index.match(tokens[:-1], extra)
    num_blocks = (len(tokens) + state.mask) >> state.shift
    required = (len(tokens) + lookahead + state.mask) >> state.shift
    return NewSequence(request.sequence_id, tokens, extra, found, num_blocks, required)


def _execute(state: BlockState, namespace: SessionNamespace, plan: _Plan, flags: int = 0) -> None:
    """Create the sequences of a plan that describes the current state, with these flags."""
    if plan.status is not AllocStatus.OK:
        state.sequences.require_places(len(plan.sequences), "requests", namespace)
        never = plan.status is AllocStatus.NEVER
        raise state.device.out_of_blocks(plan.required, never=never, num_kept=state.config.watermark_blocks)
    sequences, all_rows = plan.sequences, state.sequences
    found: list[Int64Array] = []
    tokens: list[Int32Array] = []
    keyed: list[dict[int, bytes]] = []
    num_new = queried = 0
    for new in sequences:
        found.append(new.found)
        tokens.append(new.tokens)
        if new.extra:
            keyed.append(new.extra)
        num_new += new.num_blocks - len(new.found)
        queried += len(new.tokens)
    if keyed:
        all_rows.extra_keys.require(namespace.number, len(keyed), sum(map(extra_keys_bytes, keyed)), "requests")
    if namespace.lost:
        state.require_lost(namespace)
    if len(plan.hits):  # the hits are referenced before new blocks are allocated, so that they are not evicted
        state.device.incref(plan.hits)
    blocks = state.device.allocate(num_new)
    rows = all_rows.free_rows[-1 : -1 - len(sequences) : -1]
    del all_rows.free_rows[-len(sequences) :]
    state.intents.begin_new(rows)
    state.step_tables.create(rows, found, tokens, blocks)
    items, number = all_rows.items, namespace.number
    for new, row in zip(sequences, rows, strict=True):
        if new.extra:
            all_rows.extra_keys.set(row, number, new.extra)
        namespace.rows[new.sequence_id] = row
        at, made = row * STATE_COLUMNS, all_rows.new_flags(flags)
        items[at + NAMESPACE], items[at + SEQUENCE_ID], items[at + FLAGS] = number, new.sequence_id, made
    if namespace.lost:
        state.create_lost(namespace, [new.sequence_id for new in sequences])
    # Tokens that were looked up in the prefix cache, and those found there.
    counters, hit = state.counters, len(plan.hits) << state.shift
    all_rows.num_tokens += queried
    counters.prefix_cache_query_tokens += queried
    counters.prefix_cache_hit_tokens += hit
    namespace.counters[QUERY_TOKENS] += queried
    namespace.counters[HIT_TOKENS] += hit


# ---- Sequences that continue others


def fork(state: BlockState, namespace: SessionNamespace, parent_ids: npt.ArrayLike, child_ids: npt.ArrayLike) -> None:
    """Create children that share every block of their parents (vLLM v0: fork). Moves no bytes.

    parent_ids int64[n] may repeat a parent; child_ids int64[n] are distinct and unused.
    The parents' steps become stale, because their slots are now shared.
    Raises DuplicateSequenceError, QuotaExceededError.
    """
    state.enter(namespace)
    parents, children = id_array(parent_ids, "parent_ids").tolist(), id_array(child_ids, "child_ids").tolist()
    if len(parents) != len(children):
        raise InvalidArgumentError(f"has {len(children)} elements for {len(parents)} parents", field="child_ids")
    rows = _parent_rows(state, namespace, parents)
    namespace.check_new_ids(children, "child_ids[{}]")
    state.sequences.require_places(len(children), "child_ids", namespace)
    if len(rows) > 1:
        check_request_blocks(state.config, int(state.sequences.num_blocks[rows].sum()), "parent_ids")
    by_parent: dict[int, list[int]] = {}
    for row, child_id in zip(rows, children, strict=True):
        by_parent.setdefault(row, []).append(child_id)
    if state.sequences.extra_keys.by_row and (num_bytes := state.sequences.extra_keys.num_bytes(rows)):
        state.sequences.extra_keys.require(namespace.number, len(rows), num_bytes, "child_ids", shared=True)
    if namespace.lost:
        state.require_lost(namespace)
    state.intents.begin_new(state.sequences.free_rows[-len(rows) :])
    if namespace.lost:
        state.create_lost(namespace, children)
    made: dict[int, int] = {}
    for row, child_ids in by_parent.items():
        made.update(zip(child_ids, _fork_row(state, namespace, row, child_ids), strict=True))
    for child_id in children:  # `describe` lists sequences in creation order
        namespace.rows[child_id] = made[child_id]
        # Last, because a sequence that is kept without being known here could be made a second time.
        state.sequences.items[made[child_id] * STATE_COLUMNS + NAMESPACE] = namespace.number


def _parent_rows(state: BlockState, namespace: SessionNamespace, parents: list[int]) -> list[int]:
    """Return the rows of the parents. Unlike `lookup`, it accepts repeated ids."""
    try:
        rows = [namespace.rows[parent] for parent in parents]
    except KeyError:
        raise namespace.unknown_sequence(parents, "parent_ids") from None
    if state.sequences.num_swapped:
        state.sequences.resident_states(np.array(parents, np.int64), np.array(rows, np.int64), "parent_ids")
    return rows


def _fork_row(state: BlockState, namespace: SessionNamespace, parent: int, child_ids: list[int]) -> list[int]:
    """Fork one row. Returns the rows of the children, which no namespace has yet."""
    sequences, items, at = state.sequences, state.sequences.items, parent * STATE_COLUMNS
    step_id = items[at + STEP]
    if step_id != NO_STEP:
        namespace.supersede((step_id,))
        items[at + STEP] = NO_STEP
    flags, rows = items[at + FLAGS] & SCHEDULED, []
    for child_id in child_ids:
        row = sequences.free_rows.pop()
        rows.append(row)
        state.device.num_shared += state.step_tables.fork(parent, row)
        items[row * STATE_COLUMNS + SEQUENCE_ID] = child_id
        items[row * STATE_COLUMNS + FLAGS] = sequences.new_flags(flags)
        if parent in sequences.extra_keys.by_row:
            sequences.extra_keys.set(row, namespace.number, sequences.extra_keys.by_row[parent], like=parent)
    sequences.num_tokens += items[at + LENGTH] * len(child_ids)
    return rows


def rearrange(
    state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, parent_ids: npt.ArrayLike
) -> None:
    """Let sequences continue others, for beam search (vLLM v0: fork and free; Hugging Face: reorder_cache). Moves
    no bytes.

    sequence_ids int64[n], distinct; parent_ids int64[n] may repeat a parent. Sequence i gets the tokens, the blocks
    and the extra keys that its parent had before the call, without the parent's lookahead blocks, and its own are
    released. A sequence that is its own parent stays as it is. The steps of the others and of their parents become
    stale. Raises QuotaExceededError.
    """
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    parents, parent_rows = _parents(namespace, parent_ids, len(ids))
    state.sequences.resident_states(ids, rows)
    state.sequences.resident_states(parents, parent_rows, "parent_ids")
    moved = rows != parent_rows
    if np.count_nonzero(moved):
        _continue(state, namespace, ids[moved], rows[moved], parent_rows[moved])


def _parents(namespace: SessionNamespace, parent_ids: npt.ArrayLike, count: int) -> tuple[Int64Array, Int64Array]:
    """Return (ids int64[n], rows int64[n]) of the parents, which may be repeated."""
    parents = id_array(parent_ids, "parent_ids")
    if len(parents) != count:
        raise InvalidArgumentError(f"has {len(parents)} elements for {count} sequences", field="parent_ids")
    names = parents.tolist()
    try:
        return parents, np.array([namespace.rows[name] for name in names], np.int64)
    except KeyError:
        raise namespace.unknown_sequence(names, "parent_ids") from None


def _continue(
    state: BlockState, namespace: SessionNamespace, ids: Int64Array, rows: Int64Array, parent_rows: Int64Array
) -> None:
    """Replace the content of rows with that of their parents. All of it is read before anything changes."""
    device, sequences = state.device, state.sequences
    states = sequences.states[parent_rows]
    counts = (states[:, LENGTH] + state.mask) >> state.shift
    check_request_blocks(state.config, int(counts.sum() + sequences.num_blocks[rows].sum()), "sequence_ids")
    which, entries = ragged(np.zeros(len(rows), np.int64), counts)
    blocks = sequences.block_tables[parent_rows[which], entries].astype(np.int64)
    extra_keys = [sequences.extra_keys.by_row.get(row) for row in parent_rows.tolist()]
    if num_bytes := sequences.extra_keys.num_bytes(parent_rows.tolist()):
        dropped_bytes = sequences.extra_keys.num_bytes(rows.tolist())
        sequences.extra_keys.require(namespace.number, len(rows), num_bytes, "sequence_ids", dropped=dropped_bytes)
    dropped = sequences.table_entries(rows)
    num_tokens = int((states[:, LENGTH] - sequences.lengths[rows]).sum())
    state.intents.begin(DROP, rows)
    listed = state.hide(namespace, ids, rows)
    sequences.end_steps(namespace, np.concatenate([rows, parent_rows]))
    device.incref(blocks)
    device.decref_entries(*dropped)
    sequences.num_tokens += num_tokens
    sequences.block_tables[rows[which], entries] = blocks
    sequences.lengths[rows], sequences.num_computed[rows] = states[:, LENGTH], states[:, NUM_COMPUTED]
    sequences.states[rows, NUM_BLOCKS] = counts
    for row, keys in zip(rows.tolist(), extra_keys, strict=True):
        if keys is None:
            sequences.extra_keys.drop([row])
        elif keys != sequences.extra_keys.by_row.get(row):  # beams have the same
            sequences.extra_keys.set(row, namespace.number, keys)
    state.show(namespace, listed, rows)
