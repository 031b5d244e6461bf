"""A cache class for the library's generation loops, with the K/V in the daemon."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from transformers import Cache, PreTrainedModel
from typing_extensions import override

from kvservice.client import Sequence, Session, Step
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, StaleStepError
from kvservice.integrations.transformers import arguments, attention, keys
from kvservice.integrations.transformers.arguments import CACHE_NAMES, Batch, Mask
from kvservice.integrations.transformers.attention import ForwardPass
from kvservice.integrations.transformers.decode_graphs import DecodeGraphs, DecodeRun
from kvservice.integrations.transformers.keys import ExtraKeys

# ---- the sequences of a cache, one per row of its batch


@dataclass(frozen=True)
class Snapshot:
    """The state of the rows before a pass, for the rollback if it fails."""

    sequences: tuple[Sequence | None, ...]
    lengths: tuple[int, ...]


class Rows:
    """Sequences of a session by row, None while a row has only padding. The list is empty before the first pass.

    After this object is garbage-collected, the session frees the sequences before its next allocation.
    """

    def __init__(self, kv: Session) -> None:
        self.kv = kv
        # The finalizer references this list, so the list is modified in place.
        self.sequences: list[Sequence | None] = []
        # Passes of which the daemon may not know yet. `end_run` ends it before any other change of the rows.
        self.run: DecodeRun | None = None
        finalizer = weakref.finalize(self, _abandon, kv, self.sequences)
        finalizer.atexit = False

    def end_run(self) -> None:
        """End the run. The lengths of sequences say which tokens were committed: all, unless their step had ended."""
        run, self.run = self.run, None
        if run is None:
            return
        try:
            with contextlib.suppress(StaleStepError):
                run.end()
        except BaseException:
            # After an interrupted commit the daemon's sequences may be longer than the client's objects say.
            for sequence in self.held():
                self.kv.truncate(sequence, sequence.length)
            raise

    def held(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def open_step(
        self, token_ids: list[list[int]], num_wanted: int, extra_keys: list[ExtraKeys]
    ) -> tuple[Step, list[int]]:
        """Add the new tokens of each row and open a step over those that must be computed. Returns the step, and the
        number of new tokens per row that the prefix cache already has.

        extra_keys: per row, the extra keys for the allocation of its sequence if it has none yet.

        Only allocated tokens can be found in the prefix cache; appended tokens are always pending. The last
        `num_wanted` tokens of a new row, whose outputs the caller needs, are therefore left to be computed.
        """
        self.sequences[:] = self.sequences or [None] * len(token_ids)
        active = [row for row, ids in enumerate(token_ids) if ids]
        prompts = {
            row: token_ids[row][: max(1, len(token_ids[row]) - num_wanted + 1)]
            for row in active
            if self.sequences[row] is None
        }
        if prompts:
            self._allocate(prompts, extra_keys)
        rest = {row: token_ids[row][len(prompts.get(row, ())) :] for row in active}
        appended = [row for row in active if rest[row]]
        if appended:
            step = self.kv.append(
                [self._sequence(row) for row in appended],
                [token_id for row in appended for token_id in rest[row]],
                num_tokens=[len(rest[row]) for row in appended],
            )
        if appended != active:
            step = self.kv.open_step([self._sequence(row) for row in active])
        pending = dict(zip(active, step.query_lens.tolist(), strict=True))
        return step, [len(ids) - pending.get(row, 0) for row, ids in enumerate(token_ids)]

    def _allocate(self, prompts: dict[int, list[int]], extra_keys: list[ExtraKeys]) -> None:
        keys = [extra_keys[row] for row in prompts]
        sequences = self.kv.allocate_batch(list(prompts.values()), extra_keys=keys)
        for row, sequence in zip(prompts, sequences, strict=True):
            self.sequences[row] = sequence

    def _sequence(self, row: int) -> Sequence:
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} has no tokens yet"
        return sequence

    def snapshot(self) -> Snapshot:
        lengths = tuple(sequence.length if sequence else 0 for sequence in self.sequences)
        return Snapshot(tuple(self.sequences), lengths)

    def roll_back(self, before: Snapshot) -> None:
        kept = {sequence.sequence_id for sequence in before.sequences if sequence}
        if created := [sequence for sequence in self.held() if sequence.sequence_id not in kept]:
            self.kv.free(created)
        for sequence, length in zip(before.sequences, before.lengths, strict=True):
            # After an interrupted append the daemon's sequence may be longer than the client's object says.
            if sequence:
                self.kv.truncate(sequence, length)
        self.sequences[:] = before.sequences

    def select(self, parents: list[int]) -> None:
        """Replace row i by the previous row `parents[i]`. Its first copy is the sequence itself, all others are
        forks."""
        rows: list[Sequence | None] = []
        forked: list[int] = []
        for row, parent in enumerate(parents):
            if parent in parents[:row] and self.sequences[parent]:
                forked.append(row)
            rows.append(self.sequences[parent])
        if forked:
            children = self.kv.fork_batch([self._sequence(parents[row]) for row in forked])
            for row, child in zip(forked, children, strict=True):
                rows[row] = child
        if dropped := [sequence for row, sequence in enumerate(self.sequences) if sequence and row not in parents]:
            self.kv.free(dropped)
        self.sequences[:] = rows

    def fork(self) -> Rows:
        """Return new rows that share every block with these."""
        copy = Rows(self.kv)
        children = iter(self.kv.fork_batch(held) if (held := self.held()) else [])
        copy.sequences[:] = [sequence and next(children) for sequence in self.sequences]
        return copy

    def take_back(self, num_tokens: list[int]) -> None:
        """Truncate each row by its last `num_tokens[row]` tokens."""
        for sequence, count in zip(self.sequences, num_tokens, strict=True):
            if sequence and count:
                self.kv.truncate(sequence, sequence.length - count)

    def free(self) -> None:
        if held := self.held():
            self.kv.free(held)
        self.sequences.clear()


def _abandon(kv: Session, sequences: list[Sequence | None]) -> None:
    """Schedule the sequences to be freed. The garbage collector may run this during a call of the session, so it makes
    no call itself."""
    kv.free_later(sequence for sequence in sequences if sequence is not None)


_NO_PASS = (
    "a KVServiceCache works with a model that was install()ed, called as a whole: model(...) or model.generate(...). "
    "Here it was not: install(model) first, do not call a part of the model, and use another cache for other models"
)
# Inputs on which K/V do not depend, or only in the way that has_plain_positions checks.
_PLAIN_INPUTS = {
    "attention_mask",
    "input_ids",
    "labels",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    *CACHE_NAMES,
    "position_ids",
    "return_dict",
    "use_cache",
}


def _unchanged(output: Any) -> Any:
    return output


# Computes a pass with the model's own forward, and returns the output that the caller of the model gets.
PassCall = Callable[[Callable[..., Any]], Any]


class KVServiceCache(Cache):
    """`cache`, or `past_key_values` before version 5.24 of the library, of an installed model. Each row of the batch is
    a sequence of the session.

    Padding columns of the attention mask, on either side, are not tokens of a sequence; they are neither stored nor
    attended to. If the caller needs only the last logits, as `generate` does, a prompt is computed without its padding
    and without tokens that are in the prefix cache, or, where the model does not allow that (see `unpadded`), without
    columns that no row needs.

    Rows share prefixes, through the daemon's prefix cache, with all rows that the same model computed, in any process,
    under the same `extra_keys`: (token position, bytes) pairs for what K/V depend on besides the model and the tokens.
    Nothing is shared with `share=False`, or if the first pass of the cache has custom inputs or positions;
    `private_because` gives the reason.

    A cache belongs to one model. While its K/V are shared, passes of another model, or with changed weights, are
    refused. A failed pass leaves the cache unchanged. A cache is used by one thread at a time.

    With `graphs`, passes of one new token in each row are CUDA graphs where that is possible. The daemon learns of
    their tokens a few passes later, and when `sequences` is read. If it ends their step meanwhile, because the caller
    changes a sequence or it restarts, StaleStepError is raised, and the cache has the columns that the daemon knows.

    The end of its `with` block, or `reset()`, frees its sequences. The sequences of a garbage-collected cache are freed
    before the session's next allocation. `copy.deepcopy` makes a fork, which shares all blocks.
    """

    def __init__(
        self,
        kv: Session,
        *,
        extra_keys: Iterable[tuple[int, bytes]] = (),
        share: bool = True,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        if not isinstance(kv, Session):
            raise InvalidArgumentError(
                f"must be a session, KVServiceCache(client.session()), not {type(kv).__name__}", field="kv"
            )
        super().__init__(layers=_NoLayers())
        self.kv = kv
        self._extra_keys = _checked_keys(extra_keys)
        self._share = share
        if graphs is not None and not isinstance(graphs, DecodeGraphs):
            raise InvalidArgumentError(f"must be DecodeGraphs, not {type(graphs).__name__}", field="graphs")
        if graphs is not None and graphs.kv is not kv:
            raise InvalidArgumentError("are of another session", field="graphs")
        self._graphs = graphs
        self._begin_anew(Rows(kv))

    def _begin_anew(self, rows: Rows) -> None:
        self._rows = rows
        # True for the stored columns that are tokens, [rows, columns].
        self._mask: Mask | None = None
        # The model that computed the K/V; None before the first pass.
        self._identity: keys.ModelIdentity | None = None
        self._pass: ForwardPass | None = None
        self._num_skipped = 0

    @property
    def sequences(self) -> list[Sequence | None]:
        """The sequence of each row, or None while a row has only padding."""
        self._end_run()
        return list(self._rows.sequences)

    @property
    def private_because(self) -> str:
        """The reason why this cache shares nothing; empty if it shares, and before the first pass."""
        return self._identity.private_because if self._identity else ""

    @contextmanager
    def forward_pass(
        self, model: PreTrainedModel, inputs: dict[str, Any], *, every_output: bool, takes_position_ids: bool
    ) -> Iterator[PassCall]:
        """Open a step for a call of the model with the keyword arguments `inputs`. Yields how to compute it.

        `every_output` says that the caller needs outputs of every column besides the requested logits.
        """
        if attention.is_running():
            raise FailedPreconditionError("a forward pass is running already in this thread")
        if self._rows.run is not None and not self._rows.run.is_open:
            self._end_run()
        self._check_lengths()
        batch = arguments.read_batch(inputs, self._mask)
        arguments.refuse_padded_ends(inputs, batch)
        plain = arguments.has_plain_positions(inputs, batch, takes_position_ids)
        identity = self._check_identity(model, _unusual(inputs, plain), batch)
        run = self._run(model, inputs, batch, identity, every_output)
        output = None if run is None else self._computed(run, inputs, batch)
        if output is None:
            self._end_run()
            with self._step_pass(model, inputs, batch, identity, every_output) as call:
                yield call
        self._mask, self._identity = batch.mask, identity
        if output is not None:
            yield lambda _: output

    def _check_lengths(self) -> None:
        """Check that the sequences are as the last pass left them. In a run, the daemon checks it."""
        if self._mask is None or self._rows.run is not None:
            return
        for row, (sequence, count) in enumerate(zip(self._rows.sequences, self._mask.sum(1), strict=True)):
            length = 0 if sequence is None else sequence.length
            if length != count:
                raise FailedPreconditionError(
                    f"the sequence of row {row} has {length} tokens, and the cache {count}: it was changed elsewhere"
                )

    def _run(
        self, model: PreTrainedModel, inputs: dict[str, Any], batch: Batch, identity: keys.ModelIdentity, every: bool
    ) -> DecodeRun | None:
        """Return the run in which to compute a pass, or None if it must be computed layer by layer."""
        rows, graphs = self._rows, self._graphs
        if graphs is None or every or not graphs.takes(model, inputs, batch):
            return None
        if identity.private_because:
            graphs.explain(f"its K/V are not shared: {identity.private_because}")
            return None
        if rows.run is None and rows.sequences and None not in rows.sequences and not arguments.holed_span(batch.mask):
            rows.run = graphs.begin(rows.held())
        return rows.run

    def _computed(self, run: DecodeRun, inputs: dict[str, Any], batch: Batch) -> Any:
        """Return the output of a pass in a run, or None if the run cannot go on. Nothing was computed then."""
        try:
            return run.compute(inputs["input_ids"], batch.input_ids[:, 0].tolist(), self)
        except (ResourceExhaustedError, InvalidArgumentError):  # a single step needs fewer blocks
            return None
        except BaseException:
            with contextlib.suppress(StaleStepError):
                self._end_run()
            raise

    def _end_run(self) -> None:
        """End the run: the daemon knows all tokens then. Raises StaleStepError if it has lost some. The cache then has
        the columns before them."""
        if self._rows.run is None:
            return
        try:
            self._rows.end_run()
        finally:
            num_lost = self._follow_rows()
        if num_lost:
            raise StaleStepError(
                f"the last {num_lost} columns of the cache are lost: their step ended before the daemon knew them"
            )

    def _follow_rows(self) -> int:
        """Let columns and sequences end at the same token. Returns how many columns the cache has lost."""
        assert self._mask is not None, "a run follows another pass"
        more = [sequence.length for sequence in self._rows.held()] - self._mask.sum(1)
        if more.max() > 0:  # of a pass that was interrupted
            self._rows.take_back(more.clip(min=0).tolist())
        num_lost = max(0, -int(more.min()))
        self._mask = self._mask[:, : self._mask.shape[1] - num_lost]
        return num_lost

    @contextmanager
    def _step_pass(
        self, model: PreTrainedModel, inputs: dict[str, Any], batch: Batch, identity: keys.ModelIdentity, every: bool
    ) -> Iterator[PassCall]:
        """Open a step, and compute it layer by layer."""
        num_wanted = arguments.num_wanted_columns(inputs, every or bool(identity.private_because))
        before = self._rows.snapshot()
        try:
            token_ids = batch.token_ids()
            step, num_cached = self._rows.open_step(token_ids, num_wanted, self._row_keys(identity, batch.num_rows))
            pending = arguments.pending_mask(batch.tokens, num_cached)
            restore: Callable[[Any], Any] = _unchanged
            if arguments.has_padding_to_skip(model, inputs, pending):
                self._pass, restore = ForwardPass(step, None, batch.mask), arguments.with_rows
                inputs = arguments.without_padding(inputs, pending, batch.num_past)
            else:
                self._num_skipped = arguments.num_unneeded_columns(pending, num_wanted)
                computed = pending[:, self._num_skipped :]
                self._pass = ForwardPass(step, None if computed.all() else torch.from_numpy(computed), batch.mask)
                inputs = arguments.without_first(inputs, self._num_skipped)
            with attention.running(self._pass):
                yield lambda inner: restore(inner(**inputs))
            self._pass.check_complete(self.kv.info.num_layers)
        except BaseException:
            self._rows.roll_back(before)
            raise
        finally:
            self._pass, self._num_skipped = None, 0

    def _check_identity(self, model: PreTrainedModel, unusual: str, batch: Batch) -> keys.ModelIdentity:
        """Return the identity of the cache from this pass on.

        Raises FailedPreconditionError if the pass would put K/V into the prefix cache under a wrong key.
        """
        if self._identity and self._identity.private_because:
            return self._identity
        if not self._share:
            return keys.ModelIdentity(b"", "share=False")
        prompt = batch.num_columns > 1 or None in self._rows.sequences or not self._rows.sequences
        current = keys.identify(model, thorough=prompt)
        if unusual and not current.private_because:
            current = keys.ModelIdentity(b"", unusual)
        if self._identity and current != self._identity:
            raise FailedPreconditionError(
                f"{current.private_because or 'this is another model, or its weights have changed'}, while K/V that "
                "the cache holds are shared as the model's own: reset() the cache, or make it with share=False"
            )
        return current

    def _row_keys(self, identity: keys.ModelIdentity, num_rows: int) -> list[ExtraKeys]:
        if identity.private_because:
            return [keys.private_keys() + self._extra_keys for _ in range(num_rows)]
        return [keys.shared_keys(identity) + self._extra_keys] * num_rows

    def _select(self, parents: list[int]) -> None:
        self._end_run()
        self._rows.select(parents)
        if self._mask is not None:
            self._mask = self._mask[parents]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()

    def fork(self) -> KVServiceCache:
        """Return a new cache that shares every block with this one (copy-on-write)."""
        self._end_run()
        child = KVServiceCache(self.kv, extra_keys=self._extra_keys, share=self._share, graphs=self._graphs)
        child._rows, child._mask, child._identity = self._rows.fork(), self._mask, self._identity
        return child

    def __copy__(self) -> KVServiceCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVServiceCache:
        return self.fork()

    # The library's cache interface.

    def __bool__(self) -> bool:
        """Return True, as the library's caches do. Some models treat a cache without layers as a missing one."""
        return True

    @override
    @attention.not_compiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new K/V unchanged. They are sent to the daemon together with the queries.

        Raises FailedPreconditionError if attention does not run in the daemon: outside of a pass, or if the previous
        layers did not attend there.
        """
        if self._pass is None:
            raise FailedPreconditionError(_NO_PASS)
        self._pass.expect_attention()
        return key_states, value_states

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return (0 if self._mask is None else self._mask.shape[1]) + self._num_skipped

    @override
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self._pass is None:
            raise FailedPreconditionError(_NO_PASS)
        return self.get_seq_length() + query_length, 0

    @override
    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    @override
    def is_linear(self) -> list[bool]:
        """Return one False: the model attends to what is stored. `generate` takes a cache without layers for one of
        linear attention, which holds no columns."""
        return [False]

    @property
    def batch_size(self) -> int:
        return len(self._rows.sequences) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self._rows.sequences)

    @override
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns (rejected candidates of assisted generation)."""
        self._end_run()
        count, stored = -tokens_to_remove, self.get_seq_length()
        if not 0 <= count <= stored:
            raise InvalidArgumentError(
                f"must be from -{stored} to 0: minus the number of columns to remove", field="tokens_to_remove"
            )
        if self._mask is not None:
            self._rows.take_back(self._mask[:, stored - count :].sum(1).tolist())
            self._mask = self._mask[:, : stored - count]

    @override
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i by the previous row `beam_idx[i]` (beam search). It forks sequences, so no bytes move."""
        self._select(beam_idx.tolist())

    @override
    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._rows.sequences)) for _ in range(repeats)])

    @override
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(torch.arange(len(self._rows.sequences))[indices.cpu()].tolist())

    @override
    def reset(self) -> None:
        """Free the sequences. The cache can then be used for another batch or another model."""
        with contextlib.suppress(StaleStepError):
            self._end_run()
        self._rows.free()
        self._begin_anew(self._rows)


class _NoLayers(list[Any]):
    """The layers of the cache. It has none, and models that access them are not supported."""

    def __getitem__(self, _: object) -> NoReturn:
        raise FailedPreconditionError(_NO_PASS)


def _checked_keys(extra_keys: Iterable[tuple[int, bytes]]) -> ExtraKeys:
    pairs = list(extra_keys)
    for pair in pairs:
        if not (isinstance(pair, tuple) and list(map(type, pair)) == [int, bytes]):
            raise InvalidArgumentError(f"must hold (token position, bytes), not {pair!r}", field="extra_keys")
    return pairs


def _unusual(inputs: dict[str, Any], plain_positions: bool) -> str:
    """Return the reason why the K/V of a pass depend on more than the model and its tokens, or an empty string."""
    if not plain_positions:
        return "positions are not 0, 1, 2, ... of each row's tokens (with padding, give position_ids)"
    given = [name for name, value in inputs.items() if value is not None and value is not False]
    return next((f"K/V may depend on the input {name}" for name in given if name not in _PLAIN_INPUTS), "")
