"""Block manager of the KV pool. It plans all operations and never touches the bytes of the pool.

Every operation takes a session namespace and a batch. It validates everything before it changes anything, and either
performs the whole batch or raises one of kvservice.errors. If a `can_...` method says yes, the operation does not fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence

import numpy.typing as npt

from kvservice.blocks.advancing import Advancer
from kvservice.blocks.ahead import AheadStepper
from kvservice.blocks.allocation import Allocator, BeforeAllocation, FoundPrompt, NewSequence
from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.events import EventJournal
from kvservice.blocks.freeing import Reclaimer
from kvservice.blocks.inspection import Inspector
from kvservice.blocks.integrity import SLICE_ENTRIES, check_in_slices
from kvservice.blocks.kept import KeptMaps
from kvservice.blocks.layers import LayerTracker
from kvservice.blocks.loading import Loader
from kvservice.blocks.namespaces import NUM_COUNTERS, SessionNamespace
from kvservice.blocks.plans import (
    Allocation,
    AllocationRequest,
    AllocStatus,
    ArrayMemory,
    Int32Array,
    Int64Array,
    PinnedPrefix,
    SequenceSnapshot,
    StepPlan,
    SwapPlan,
    numpy_memory,
)
from kvservice.blocks.prefix_cache import PrefixCache
from kvservice.blocks.rearranging import Rearranger
from kvservice.blocks.recovery import Recoverer, Recovery
from kvservice.blocks.reopening import Reopener
from kvservice.blocks.restoring import RestoredBlocks, Restorer, SavedSequences, SavedTables
from kvservice.blocks.saved_steps import save_steps
from kvservice.blocks.sharing import Forker
from kvservice.blocks.slices import Slices, Waits, finish
from kvservice.blocks.state import BlockState
from kvservice.blocks.stats import BlocksStats
from kvservice.blocks.steps import StepPlanner
from kvservice.blocks.swapping import Swapper


class BlockManager:
    """Allocator, block tables, prefix cache and swap tier of one pool (vLLM's block manager, adapted to a service).

    This class is the API; its parts do the work on one BlockState. `loader` is the API for blocks that come from
    outside of the pool or are copied out of it. Methods named `..._in_slices` are for large batches: other operations
    may run between the slices (see slices.py).

    Errors that are not repeated below: InvalidArgumentError names a bad argument; UnknownSessionError means that the
    namespace is closed; operations on sequence_ids raise UnknownSequenceError, and SequenceSwappedError unless they are
    for swapped-out sequences; batches above max_request_tokens or max_request_blocks raise QuotaExceededError.
    """

    def __init__(
        self,
        config: BlocksConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        journal: EventJournal | None = None,
        memory: ArrayMemory = numpy_memory,
        kept: KeptMaps | None = None,
    ) -> None:
        """`memory` and `kept` hold what outlives the process. If an earlier process wrote them, call `recover` before
        anything else. `clock` returns seconds, the same in every process; pins and ages use it. `journal` records the
        changes of the prefix index."""
        self.config = config
        self.state = BlockState(config, clock, journal, memory, kept or KeptMaps())
        self._allocator = Allocator(self.state)
        self._steps = StepPlanner(self.state)
        self._advancer = Advancer(self.state, self._steps)
        self._reopener = Reopener(self.state, self._steps)
        self._layers = LayerTracker(self.state)
        self._ahead = AheadStepper(self.state, self._steps, self._layers)
        self._forker = Forker(self.state)
        self._rearranger = Rearranger(self.state)
        self._reclaimer = Reclaimer(self.state)
        self._swapper = Swapper(self.state)
        self._restorer = Restorer(self.state)
        self._prefix_cache = PrefixCache(self.state)
        self._inspector = Inspector(self.state)
        self.loader = Loader(self.state)

    # Namespaces

    def open_namespace(
        self, number: int | None = None, counters: MutableSequence[int] | None = None
    ) -> SessionNamespace:
        """Open a namespace for one client's sequences, steps and pins. `number` identifies it in sequence states, from
        1 to max_namespaces; None means the next one that no open namespace has. `counters` has NUM_COUNTERS elements,
        see SessionNamespace."""
        if number is None:
            number = self.state.unused_number()
        self.state.last_ids[number - 1] = 0
        self.state.finished_ids[number - 1] = 0
        return self.state.add_namespace(number, [0] * NUM_COUNTERS if counters is None else counters)

    def close_namespace(self, namespace: SessionNamespace) -> int:
        """Free all sequences of a namespace and remove its pins. Returns the number of sequences freed, which is 0 if
        it was already closed."""
        return finish(self.close_namespace_in_slices(namespace))

    def close_namespace_in_slices(self, namespace: SessionNamespace) -> Slices[int]:
        """`close_namespace` in slices. The namespace is closed after the first slice."""
        return self._reclaimer.close_namespace(namespace)

    # Restarts of the daemon

    def recover(self, open_namespaces: Mapping[int, MutableSequence[int]], *, with_steps: bool = False) -> Recovery:
        """Make the state of an earlier process whole, before any other operation of this manager.

        `open_namespaces` maps the numbers of namespaces that live on to their counters; the sequences and pins of all
        others end. `with_steps` says that the process before ended with `save_steps`; otherwise all steps end. May be
        interrupted and repeated. Raises InternalError if the tables are invalid.
        """
        return Recoverer(self.state).recover(open_namespaces, with_steps)

    def save_steps(self) -> int:
        """Save the live steps for the process that takes the state over, as the last operation of this one. Returns how
        many they are. Steps of a scheduler, and steps that follow others, are not saved."""
        return save_steps(self.state)

    def end_operation(self) -> None:
        """Declare that the last operation counts, because its reply is remembered. Before that, or before the next
        operation, a restart undoes it, or loses its sequences."""
        self.state.end_operation()

    def submitted(self, plan: SwapPlan) -> None:
        """Record that the device has got the copies of a `swap_in`, and counts its blocks as unfinished until they are
        copied. Before that, a restart drops these blocks."""
        self._swapper.submitted(plan)

    # Sequences

    def can_allocate(self, namespace: SessionNamespace, requests: Sequence[AllocationRequest]) -> AllocStatus:
        """Return whether the whole batch fits above the watermark (the three answers of vLLM v0).

        OK: after the allocation at least `watermark_blocks` blocks remain available. A prefix-cache hit needs no new
        block, but a hit on an evictable block makes that block unavailable; each block is counted exactly once.
        NEVER: not OK, and `num_blocks - required < watermark_blocks`, where `required` is the number of blocks of all
        tables, ceil((tokens + lookahead) / block_size) each; or the batch has more than max_sequences sequences.
        LATER: otherwise. As in vLLM v0, this check includes the lookahead slots; the steps reserve them.
        Raises DuplicateSequenceError.
        """
        return finish(self.can_allocate_in_slices(namespace, requests))

    def can_allocate_in_slices(
        self, namespace: SessionNamespace, requests: Sequence[AllocationRequest]
    ) -> Slices[AllocStatus]:
        """`can_allocate` in slices. The answer describes the state at the last slice."""
        return self._allocator.can_allocate(namespace, requests)

    def allocate(self, namespace: SessionNamespace, requests: Sequence[AllocationRequest]) -> list[Allocation]:
        """Allocate all sequences of the batch, or none.

        Full blocks of a prompt that are already computed under the same extra keys are shared (vLLM's automatic prefix
        caching). At least the last token is left to compute, because an engine needs its logits. Requests of one batch
        do not share each other's new blocks, since those are not computed yet. `open_step` covers the remaining
        tokens. Raises DuplicateSequenceError, QuotaExceededError, OutOfBlocksError.
        """
        return finish(self.allocate_in_slices(namespace, requests))

    def allocate_in_slices(
        self,
        namespace: SessionNamespace,
        requests: Sequence[AllocationRequest],
        before: BeforeAllocation | None = None,
    ) -> Waits[list[Allocation]]:
        """`allocate` in slices; the last slice creates all sequences. `before` may load missing blocks first. Raises
        UnknownSessionError if the namespace is closed in the meantime."""
        return self._allocator.allocate(namespace, requests, before)

    def find_prompt(
        self,
        sequence_id: int,
        token_ids: Int32Array,
        extra: dict[int, bytes],
        chain_hashes: list[bytes],
        lookahead: int = 0,
    ) -> FoundPrompt:
        """Look up a prompt of this process that is known to be valid: token_ids int32[n], its encoded extra keys by
        block, and the chain hashes of its full blocks. Nothing is reserved or counted."""
        return self._allocator.find_prompt(sequence_id, token_ids, extra, chain_hashes, lookahead)

    def allocate_found(self, namespace: SessionNamespace, prompts: list[FoundPrompt]) -> list[NewSequence]:
        """Allocate all sequences of `find_prompt`, or none, as `allocate` does. If the state changed since they were
        found, they are looked up again. Returns the sequences with the hits that they share."""
        return self._allocator.allocate_found(namespace, prompts)

    def fork(self, namespace: SessionNamespace, parent_ids: npt.ArrayLike, child_ids: npt.ArrayLike) -> None:
        """Create children that share every block of their parents (vLLM v0: fork). Moves no bytes.

        parent_ids int64[n] may repeat a parent; child_ids int64[n] are distinct and unused.
        The parents' steps become stale, because their slots are now shared.
        Raises DuplicateSequenceError, QuotaExceededError.
        """
        self._forker.fork(namespace, parent_ids, child_ids)

    def rearrange(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, parent_ids: npt.ArrayLike) -> None:
        """Let sequences continue others, for beam search (vLLM v0: fork and free; Hugging Face: reorder_cache). Moves
        no bytes.

        sequence_ids int64[n], distinct; parent_ids int64[n] may repeat a parent. Sequence i gets the tokens, the blocks
        and the extra keys that its parent had before the call, without the parent's lookahead blocks, and its own are
        released. A sequence that is its own parent stays as it is. The steps of the others and of their parents become
        stale. Raises QuotaExceededError.
        """
        self._rearranger.rearrange(namespace, sequence_ids, parent_ids)

    def truncate(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        lengths: npt.ArrayLike,
        *,
        unindex: bool = False,
    ) -> None:
        """Remove tokens at the end, for rejected speculation or a retried step (vLLM v1 and SGLang do the same).

        sequence_ids int64[n], distinct; lengths int64[n], each from 0 to the sequence's length. A sequence of length 0
        continues to exist without blocks. Blocks past the new end are released, including lookahead blocks. A block of
        which only some tokens remain stays in the prefix index until it is written. With `unindex` it leaves the index
        at once, unless others hold or pin it, so that nobody shares it before and the write needs no copy.
        """
        self._reclaimer.truncate(namespace, sequence_ids, lengths, unindex)

    def free(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> None:
        """Free sequences, including swapped-out ones. sequence_ids int64[n], distinct.

        Computed full blocks without references stay cached, and the deepest block of a chain is evicted first; other
        blocks become free.
        """
        finish(self.free_in_slices(namespace, sequence_ids))

    def free_in_slices(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> Slices[None]:
        """`free` in slices. The ids are free after the first slice, all blocks after the last one."""
        return self._reclaimer.free(namespace, sequence_ids)

    # Steps

    def can_append(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        lookahead: int = 0,
    ) -> bool:
        """Return whether enough blocks are available for `append`. The answer is exact: an append with the same
        arguments does not run out of blocks.

        Unlike allocate, append may use the blocks below the watermark, which exists for running sequences.
        """
        return self._steps.can_append(namespace, sequence_ids, num_tokens, lookahead)

    def append(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        expected_lengths: npt.ArrayLike | None = None,
        lookahead: int = 0,
    ) -> StepPlan:
        """Append tokens and open a step over all uncomputed tokens (vLLM v0: append_slots).

        sequence_ids int64[n], distinct; token_ids int32[sum(num_tokens)], sequence after sequence; num_tokens int64[n],
        each >= 1, one each if None; expected_lengths int64[n], the lengths before the append. If the lengths show that
        this very append was the last operation, the same step is returned again, without its copies (which were already
        made), so a retry is safe. Raises LengthMismatchError, OutOfBlocksError.
        """
        return self._steps.append(namespace, sequence_ids, token_ids, num_tokens, expected_lengths, lookahead)

    def can_open_step(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int = 0) -> bool:
        """Return whether enough blocks are available for `open_step`. The answer is exact."""
        return self._steps.can_open_step(namespace, sequence_ids, lookahead)

    def open_step(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        lookahead: int = 0,
    ) -> StepPlan:
        """Open a step over existing tokens that are not computed: a prefill, or one chunk of it with num_tokens.

        num_tokens int64[n], each from 1 to the sequence's pending tokens; None means all pending tokens. Raises the
        errors of append, and FailedPreconditionError if a sequence has no pending tokens.
        """
        return self._steps.open_step(namespace, sequence_ids, num_tokens, lookahead)

    def advance(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        lookahead: int = 0,
        *,
        num_appended: npt.ArrayLike | None = None,
        follows: int | None = None,
    ) -> StepPlan:
        """Append tokens to the first sequences, and open one step over them and over chunks of prompts.

        sequence_ids int64[n], distinct; token_ids int32[t] for the first m <= n sequences: num_appended int64[m] each,
        or one each if None; num_tokens int64[n], the tokens of the step in each sequence, from 1 to its pending tokens,
        the appended ones included. `lookahead` slots are reserved past the first appended token of a sequence, so that
        other appended tokens use them. It is `append` and `open_step` in one, for batches that mix decodes and chunked
        prefills. Unlike `append`, it cannot be repeated.

        `follows` is a live step, which may be incomplete and stays live. In the sequences that it covers, the new step
        begins where that step ends. Where one of them gets a token, that token is the one sampled after the followed
        step: the value in token_ids is ignored, and the token becomes a token of its sequence with `set_tokens`. Until
        the followed step is complete and the tokens are known, the new step does not commit. Any other operation on a
        sequence of one of the two steps ends both, unless the sequence is only in the followed step and that step is
        complete.

        Raises OutOfBlocksError, and for `follows` UnknownStepError, StaleStepError, and FailedPreconditionError if that
        step has a follower, if its tokens are not known, if it follows an incomplete step itself, or if it does not
        cover all tokens of a sequence that gets a token.
        """
        return self._advancer.advance(namespace, sequence_ids, token_ids, num_tokens, lookahead, num_appended, follows)

    def set_tokens(self, namespace: SessionNamespace, step_id: int, token_ids: npt.ArrayLike) -> bool:
        """Give a following step the tokens that were not known when it was opened.

        token_ids int32[u], one for each of its sequences that got a token and that the followed step covers, in their
        order. Returns True if the step is complete, and thereby commits. Raises FailedPreconditionError if all tokens
        of the step are known.
        """
        return self._layers.set_tokens(namespace, step_id, token_ids)

    def reopen(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        starts: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        lookahead: int = 0,
    ) -> StepPlan:
        """Open a step over tokens that may be computed already, for an engine that lost what it computed.

        sequence_ids int64[n], distinct; starts int64[n], the first token of the step in each sequence, at most its
        number of computed tokens; num_tokens int64[n], at least 1. Tokens from the start on are not computed any more,
        and their blocks leave the prefix index or are copied. Raises OutOfBlocksError.
        """
        return self._reopener.reopen(namespace, sequence_ids, starts, num_tokens, lookahead)

    def open_ahead(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        num_steps: int,
        expected_lengths: npt.ArrayLike | None = None,
    ) -> StepPlan:
        """Open a step over the next `num_steps` tokens of sequences, which are not known yet (vLLM v0: multi-step
        scheduling with lookahead slots).

        sequence_ids int64[n], distinct, all of whose tokens are computed; expected_lengths int64[n], the lengths that
        the client knows, which say where it writes. The step has no layers to write: its client writes the K/V, and
        tells the tokens with `commit_ahead`. It ends as other steps do. Raises FailedPreconditionError,
        LengthMismatchError, OutOfBlocksError.
        """
        return self._ahead.open(namespace, sequence_ids, num_steps, expected_lengths)

    def commit_ahead(
        self,
        namespace: SessionNamespace,
        step_id: int,
        token_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        num_steps: int = 0,
    ) -> StepPlan | None:
        """Append the tokens that a step ahead has written, as computed tokens, and open the next one.

        token_ids int32[sum(num_tokens)], sequence after sequence; num_tokens int64[n], from 0 to the `num_steps` of the
        step, the same number each if None. The next step has slots for `num_steps` tokens after them, of which the
        first are those that this step had beyond the tokens; 0 opens none and returns None. Raises
        FailedPreconditionError for other steps, OutOfBlocksError.
        """
        return self._ahead.commit(namespace, step_id, token_ids, num_tokens, num_steps)

    def get_step(self, namespace: SessionNamespace, step_id: int) -> StepPlan:
        """Return the live step with this id. Raises UnknownStepError if it was never opened, and StaleStepError if a
        newer operation on one of its sequences replaced it. The methods below raise the same for their step."""
        return self._layers.get_step(namespace, step_id)

    def written_layers(self, namespace: SessionNamespace, step_id: int) -> bytearray | None:
        """Return the flags of a live step, one byte per layer, which the writer of a layer sets. None if the step is
        not live."""
        return self._layers.written_layers(namespace, step_id)

    def finished_ids(self, namespace: SessionNamespace) -> Int64Array:
        """Return int64[n] in kept memory. A lane stores the id of a step there, at id % n, when it has written all its
        layers, and `recover` commits the step if the process ends before `commit_written`."""
        ids: Int64Array = self.state.finished_ids[namespace.number - 1]
        return ids

    def hand_to_lane(self, namespace: SessionNamespace, step_id: int) -> bytearray | None:
        """Return the `written_layers` of a step that a lane may finish from now on."""
        return self._layers.hand_to_lane(namespace, step_id)

    def check_layer(self, namespace: SessionNamespace, step_id: int, layer: int) -> StepPlan:
        """Return the step. Raises LayerWrittenError if this layer of it is already written. Changes nothing."""
        return self._layers.check_layer(namespace, step_id, layer)

    def mark_layer(self, namespace: SessionNamespace, step_id: int, layer: int) -> bool:
        """Record that a layer is written. Returns True if that commits the step: it was the last layer, all tokens are
        known, and the step that it follows is committed. The step's tokens are then computed, and its full blocks can
        be shared. Raises LayerWrittenError."""
        return self._layers.mark_layer(namespace, step_id, layer)

    def check_part(self, namespace: SessionNamespace, step_id: int, layer: int, first: int, count: int) -> StepPlan:
        """Return the part of a step that is written next in this layer: `count` tokens from `first` on, or all
        remaining tokens if `count` is 0. Returns the step itself if the part covers all of it. Changes nothing.

        Raises LayerWrittenError, and FailedPreconditionError if tokens before the part are not written.
        """
        return self._layers.check_part(namespace, step_id, layer, first, count)

    def mark_part(self, namespace: SessionNamespace, step_id: int, layer: int, part: StepPlan) -> bool:
        """Record that a part from `check_part` is written. The last part marks the layer and returns as
        `mark_layer`."""
        return self._layers.mark_part(namespace, step_id, layer, part)

    def completes(self, namespace: SessionNamespace, step_id: int, layer: int, part: StepPlan) -> bool:
        """Return whether `mark_part` of this part from `check_part` marks the last layer of the step."""
        return self._layers.completes(namespace, step_id, layer, part)

    def check_all_layers(self, namespace: SessionNamespace, step_id: int) -> StepPlan:
        """Return the step. Raises LayerWrittenError if a layer of it is already written. Changes nothing."""
        return self._layers.check_all_layers(namespace, step_id)

    def mark_all_layers(self, namespace: SessionNamespace, step_id: int) -> None:
        """Record that all layers are written, and commit the step as `mark_layer`. Raises LayerWrittenError."""
        self._layers.mark_all_layers(namespace, step_id)

    def mark_layers(self, namespace: SessionNamespace, step_id: int, layers: Sequence[int]) -> None:
        """Record that these distinct layers are written, all or none, as `mark_layer`."""
        self._layers.mark_layers(namespace, step_id, layers)

    def commit_written(self, namespace: SessionNamespace, step_id: int) -> bool:
        """Commit a step whose layers were marked directly in its `written_layers`. Returns False if the step is not
        live, cannot commit yet, or was committed before."""
        return self._layers.commit_written(namespace, step_id)

    # Swap

    def can_swap_out(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> bool:
        """Return whether the swap tier has room for the group. The answer is exact; the swap tier has no watermark."""
        return self._swapper.can_swap_out(namespace, sequence_ids)

    def swap_out(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> SwapPlan:
        """Move a group of sequences to the swap tier (vLLM v0: swap_out).

        sequence_ids int64[n], distinct. Returns device blocks src int32[m] and swap blocks dst int32[m]; the device
        copies them before anything else is written to the device pool. A block that several sequences of the group
        share moves once and stays shared. The steps of the group become stale. Raises OutOfBlocksError with tier
        "swap".
        """
        return self._swapper.swap_out(namespace, sequence_ids)

    def can_swap_in(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int = 0) -> AllocStatus:
        """Return one of the three answers of can_allocate for a swapped-out group, with the device tier's watermark.

        The required blocks are the distinct blocks of the group and the lookahead blocks. A block that the index still
        finds on the device needs no new block. Raises SequenceNotSwappedError.
        """
        return self._swapper.can_swap_in(namespace, sequence_ids, lookahead)

    def swap_in(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int = 0) -> SwapPlan:
        """Move a group of swapped-out sequences back to the device (vLLM v0: swap_in).

        sequence_ids int64[n], distinct. Returns swap blocks src int32[m] and device blocks dst int32[m], only for
        blocks that are no longer on the device. Raises SequenceNotSwappedError, OutOfBlocksError.
        """
        return self._swapper.swap_in(namespace, sequence_ids, lookahead)

    # Sequences that outlive the daemon

    def end_steps_in_slices(
        self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike | None = None
    ) -> Slices[None]:
        """Make the steps of these sequences stale, or all steps of a namespace. Their tokens that are not computed stay
        pending."""
        return self._reclaimer.end_steps(namespace, sequence_ids)

    def save_in_slices(
        self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike | None = None
    ) -> Slices[SavedTables]:
        """Return sequences of a namespace as values, and the places of their blocks. Lookahead blocks are left out.

        sequence_ids int64[n], distinct; None: all that have a row. The caller keeps others from changing the sequences
        between the slices.
        """
        return self._restorer.save(namespace, sequence_ids)

    def move_to_disk_in_slices(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> Slices[None]:
        """Free sequences that the caller has saved on a disk, and list them in `namespace.on_disk`.

        sequence_ids int64[n], distinct. Operations on them raise SequenceSwappedError then, except `free`, which
        forgets them.
        """
        return self._reclaimer.move_to_disk(namespace, sequence_ids)

    def adopt(self, namespace: SessionNamespace, other: SessionNamespace) -> None:
        """Move all sequences of another namespace, which were restored there from a disk, to this one."""
        self._restorer.adopt(namespace, other)

    def restore_in_slices(self, namespace: SessionNamespace, saved: SavedSequences) -> Slices[RestoredBlocks]:
        """Create saved sequences in an empty namespace, which nobody uses and no restart finds yet. Returns the places
        of their blocks, of which those that are not `found` get their K/V from the caller.

        Swapped sequences become swapped ones again, or resident ones if the swap tier has no room. If it fails, the
        caller closes the namespace. Raises InvalidArgumentError if a sequence is longer than max_sequence_tokens,
        QuotaExceededError, OutOfBlocksError.
        """
        return self._restorer.restore(namespace, saved)

    def index_restored_in_slices(self, namespace: SessionNamespace, restored: RestoredBlocks) -> Slices[None]:
        """Add the full computed blocks of restored sequences to the prefix index. They have their K/V now."""
        return self._restorer.index(namespace, restored)

    # Prefix cache

    def match_prefix(self, token_ids: npt.ArrayLike, extra_keys: Sequence[tuple[int, bytes]] = ()) -> int:
        """Return how many leading tokens of a prompt int32[n] the prefix cache holds, a multiple of the block size."""
        return self._prefix_cache.match(token_ids, extra_keys)

    def touch(self, chain_hashes: Sequence[bytes]) -> int:
        """Make the cached blocks of a prompt with these chain hashes the last to be evicted. Returns how many they
        are."""
        return self._prefix_cache.touch(chain_hashes)

    def pin(
        self,
        namespace: SessionNamespace,
        token_ids: npt.ArrayLike,
        extra_keys: Sequence[tuple[int, bytes]] = (),
        *,
        ttl_s: float,
    ) -> PinnedPrefix:
        """Keep the cached prefix of a prompt int32[n] from eviction for ttl_s seconds, or until unpin or
        close_namespace.

        Raises NotComputedError if no block of the prompt is cached, and QuotaExceededError if more than
        max_pinned_fraction of the pool would be pinned, or if there would be more pins than that many blocks.
        """
        return self._prefix_cache.pin(namespace, token_ids, extra_keys, ttl_s)

    def unpin(self, namespace: SessionNamespace, pin_id: int) -> None:
        """Remove a pin. Raises UnknownPinError if the id is unknown or the pin has ended."""
        self._prefix_cache.unpin(namespace, pin_id)

    def reset_prefix_cache(self) -> int:
        """Remove all blocks from the prefix index, except pinned ones. Returns how many cached blocks became free."""
        return finish(self.reset_prefix_cache_in_slices())

    def reset_prefix_cache_in_slices(self) -> Slices[int]:
        """`reset_prefix_cache` in slices. It removes the blocks that are in the index at the first slice."""
        return self._prefix_cache.reset()

    # Inspection

    def read_slots(self, namespace: SessionNamespace, ranges: Sequence[tuple[int, int, int]]) -> Int64Array:
        """Return the slots int64[m] of the token positions start <= position < stop of each (sequence id, start, stop)
        range, in order. A sequence may appear more than once.

        Raises NotComputedError if one of the tokens is not computed. Fields are named as in ranges[0].stop.
        """
        return self._inspector.read_slots(namespace, ranges)

    def common_prefix_blocks(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> int:
        """Return how many leading blocks all these sequences share, so that attention can read them once (cascade).
        Only blocks that are full and computed in every sequence count."""
        return self._forker.common_prefix_blocks(namespace, sequence_ids)

    def tail_blocks(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """Return the blocks int64[n] to which the next tokens of sequences are written, and how many tables hold each
        of them, int64[n]. Where the block is still to be allocated, both are 0. A block that several tables hold is
        copied before it is written."""
        return self._forker.tail_blocks(namespace, sequence_ids)

    def describe(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike | None = None,
        *,
        first: int = 0,
        limit: int | None = None,
        include_tokens: bool = False,
        include_blocks: bool = False,
    ) -> list[SequenceSnapshot]:
        """Describe sequences in the requested order. Without ids it describes the sequences of the namespace in the
        order of their creation, at most `limit` of them from index `first` on. Swapped-out sequences are included."""
        return finish(
            self.describe_in_slices(
                namespace,
                sequence_ids,
                first=first,
                limit=limit,
                include_tokens=include_tokens,
                include_blocks=include_blocks,
            )
        )

    def describe_in_slices(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike | None = None,
        *,
        first: int = 0,
        limit: int | None = None,
        include_tokens: bool = False,
        include_blocks: bool = False,
    ) -> Slices[list[SequenceSnapshot]]:
        """`describe` in slices. The first slice selects the sequences; each is described as of its own slice. Raises
        UnknownSequenceError if one is freed in the meantime."""
        return self._inspector.describe(
            namespace,
            sequence_ids,
            first=first,
            limit=limit,
            include_tokens=include_tokens,
            include_blocks=include_blocks,
        )

    def stats(self) -> BlocksStats:
        """Return all gauges and counters, in O(1)."""
        return self._inspector.stats()

    def block_hash(self, block_id: int) -> bytes:
        """Return the chain hash of a block in the prefix index, or b"" for other blocks and for invalid block ids."""
        return self._inspector.block_hash(block_id)

    @property
    def num_available(self) -> int:
        """Number of blocks that are free or can be evicted now."""
        return self.state.device.num_available

    @property
    def num_free_sequences(self) -> int:
        """Number of sequences for which there is room."""
        return len(self.state.sequences.free_rows)

    def fold_ages(self) -> None:
        """Add the latest ages of blocks to their shared histograms, for a reader in another process."""
        self.state.device.ages.fold()

    def check_integrity(self) -> None:
        """Recompute every invariant from scratch, in O(pool). Raises InternalError naming the one that is violated."""
        finish(self.check_integrity_in_slices())

    def check_integrity_in_slices(self, size: int = SLICE_ENTRIES) -> Slices[bool]:
        """`check_integrity` in slices of about `size` table entries; other operations may run in between. Returns False
        if the sums could not be checked because the state changed too often. Raises InternalError."""
        return check_in_slices(self.state, size)
