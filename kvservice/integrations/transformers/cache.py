"""A cache object of the library whose K/V lie in the daemon, for the library's own generation loops."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel
from typing_extensions import override

from kvservice.client import Sequence, Session, Step
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import attention, columns
from kvservice.integrations.transformers.attention import ForwardPass


@dataclass(frozen=True)
class _Snapshot:
    """The rows before a pass, to go back to if it fails."""

    rows: tuple[Sequence | None, ...]
    lengths: tuple[int, ...]
    num_columns: int


@dataclass(frozen=True)
class _Running:
    forward_pass: ForwardPass
    before: _Snapshot
    tokens: torch.Tensor


class KVServiceCache(Cache):
    """`past_key_values` of a model that was `install`ed: each row of the batch is a sequence of the session.

    Columns that the attention mask marks as padding are no tokens of a sequence: they are neither stored nor attended,
    on whichever side they stand. Prompts share what the daemon's prefix cache has, and where the caller asks for the
    last logits only, as `generate` does, the columns that no row needs are left out of the pass.

    A pass that fails leaves the cache as it was before. A cache is used by one thread at a time.
    """

    def __init__(self, kv: Session) -> None:
        super().__init__(layers=[])
        self.kv = kv
        self._rows: list[Sequence | None] = []
        self._num_columns = 0
        # Latest columns that are tokens in every row: what crop can take back.
        self._num_full_columns = 0
        self._running: _Running | None = None

    @property
    def sequences(self) -> list[Sequence | None]:
        """The sequence of each row; None while a row has had padding only."""
        return list(self._rows)

    def begin(self, inputs: dict[str, Any], every_output: bool) -> dict[str, Any]:
        """Opens a step for a call of the model with the keyword arguments `inputs`. Returns those to call it with.

        `every_output`: the caller wants outputs of every column besides the logits it names.
        """
        tokens = columns.token_mask(inputs)
        if self._rows and len(self._rows) != len(tokens):
            raise InvalidArgumentError(f"has {len(tokens)} rows, the cache {len(self._rows)}", field="input_ids")
        num_wanted = columns.num_wanted_columns(inputs, every_output)
        before = self._snapshot()
        try:
            step, token_ids = self._open_step(inputs["input_ids"].cpu(), tokens, num_wanted)
            query_lens = iter(step.query_lens.tolist())
            pending = columns.pending_mask(tokens, [len(ids) - next(query_lens) if ids else 0 for ids in token_ids])
            num_skipped = columns.num_unneeded_columns(pending, num_wanted)
            computed = pending[:, num_skipped:]
            forward_pass = ForwardPass(step, None if computed.all() else computed)
            attention.start(forward_pass)
        except Exception:
            self._roll_back(before)
            raise
        self._running = _Running(forward_pass, before, tokens)
        self._num_columns += num_skipped
        return columns.without_first(inputs, num_skipped)

    def end(self, succeeded: bool) -> None:
        """Ends the pass that `begin` opened. Raises FailedPreconditionError if the model left layers out."""
        if self._running is None:
            return
        attention.stop()
        running, self._running = self._running, None
        complete = running.forward_pass.num_attended_layers == self.kv.info.num_layers
        if not succeeded or not complete:
            self._roll_back(running.before)
        if succeeded:
            running.forward_pass.check_complete(self.kv.info.num_layers)
            self._count_columns(running)

    def _count_columns(self, running: _Running) -> None:
        num_columns, num_full = running.tokens.shape[1], columns.num_full_columns(running.tokens)
        self._num_columns = running.before.num_columns + num_columns
        self._num_full_columns = num_full + (self._num_full_columns if num_full == num_columns else 0)

    def _open_step(
        self, input_ids: torch.Tensor, tokens: torch.Tensor, num_wanted: int
    ) -> tuple[Step, list[list[int]]]:
        """Gives the rows their new tokens and opens a step over them. Returns it with the new token ids of each row.

        Only what is allocated can be found in the prefix cache, appended tokens are always pending. So the last
        `num_wanted` tokens of a new row, whose outputs the caller wants, are left to be computed.
        """
        self._rows = self._rows or [None] * len(tokens)
        token_ids = [row[is_token].tolist() for row, is_token in zip(input_ids, tokens, strict=True)]
        active = [row for row, ids in enumerate(token_ids) if ids]
        num_allocated = self._allocate(
            {
                row: token_ids[row][: max(1, len(token_ids[row]) - num_wanted + 1)]
                for row in active
                if not self._rows[row]
            }
        )
        rest = {row: token_ids[row][num_allocated.get(row, 0) :] for row in active}
        appended = [row for row in active if rest[row]]
        if appended:
            step = self.kv.append(
                [self._sequence(row) for row in appended],
                [token_id for row in appended for token_id in rest[row]],
                num_tokens=[len(rest[row]) for row in appended],
            )
        if appended != active:
            step = self.kv.open_step([self._sequence(row) for row in active])
        return step, token_ids

    def _allocate(self, prompts: dict[int, list[int]]) -> dict[int, int]:
        """Creates the sequences of rows, given their tokens. Returns how many tokens each row has got."""
        if prompts:
            sequences = self.kv.allocate_batch(list(prompts.values()))
            for row, sequence in zip(prompts, sequences, strict=True):
                self._rows[row] = sequence
        return {row: len(ids) for row, ids in prompts.items()}

    def _sequence(self, row: int) -> Sequence:
        sequence = self._rows[row]
        assert sequence is not None, f"row {row} has no tokens yet"
        return sequence

    def _held(self) -> list[Sequence]:
        return [sequence for sequence in self._rows if sequence is not None]

    def _snapshot(self) -> _Snapshot:
        lengths = tuple(sequence.length if sequence else 0 for sequence in self._rows)
        return _Snapshot(tuple(self._rows), lengths, self._num_columns)

    def _roll_back(self, before: _Snapshot) -> None:
        kept = {sequence.sequence_id for sequence in before.rows if sequence}
        if created := [sequence for sequence in self._held() if sequence.sequence_id not in kept]:
            self.kv.free(created)
        for sequence, length in zip(before.rows, before.lengths, strict=True):
            if sequence and sequence.length > length:
                self.kv.truncate(sequence, length)
        self._rows, self._num_columns = list(before.rows), before.num_columns

    def _select(self, parents: list[int]) -> None:
        """Makes row i what row `parents[i]` was: its first copy is the sequence itself, every further one a fork."""
        rows: list[Sequence | None] = []
        forked: list[int] = []
        for row, parent in enumerate(parents):
            if parent in parents[:row] and self._rows[parent]:
                forked.append(row)
            rows.append(self._rows[parent])
        if forked:
            children = self.kv.fork_batch([self._sequence(parents[row]) for row in forked])
            for row, child in zip(forked, children, strict=True):
                rows[row] = child
        if dropped := [sequence for row, sequence in enumerate(self._rows) if sequence and row not in parents]:
            self.kv.free(dropped)
        self._rows = rows

    # What the library asks of a cache, and does to it.

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands the new K/V back: they travel to the daemon together with the queries."""
        return key_states, value_states

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_columns

    @override
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._num_columns + query_length, 0

    @override
    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self._rows)

    @override
    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last `-tokens_to_remove` columns back (rejected candidates of assisted generation)."""
        count = -tokens_to_remove
        if count < 0:
            raise InvalidArgumentError("is to be negative: columns to remove", field="tokens_to_remove")
        if count > self._num_full_columns:
            raise FailedPreconditionError(f"only the last {self._num_full_columns} columns are tokens in every row")
        if count == 0:
            return
        for sequence in self._held():
            self.kv.truncate(sequence, sequence.length - count)
        self._num_columns -= count
        self._num_full_columns -= count

    @override
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: row i becomes what row `beam_idx[i]` was. Forks, so that no bytes move."""
        self._select(beam_idx.tolist())

    @override
    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    @override
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(torch.arange(len(self._rows))[indices.cpu()].tolist())

    @override
    def reset(self) -> None:
        """Frees the sequences. The cache can then be used for another batch."""
        if held := self._held():
            self.kv.free(held)
        self._rows, self._num_columns, self._num_full_columns = [], 0, 0


def track_passes(model: PreTrainedModel) -> tuple[RemovableHandle, RemovableHandle]:
    """Makes calls of the model with a KVServiceCache begin and end a pass of that cache."""
    signature = inspect.signature(model.forward)

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, KVServiceCache):
            return None
        inputs = signature.bind_partial(*args).arguments | kwargs
        if inputs.get("output_attentions"):
            raise InvalidArgumentError("attention weights stay in the daemon", field="output_attentions")
        every_output = bool(inputs.get("output_hidden_states") or model.config.output_hidden_states)
        return (), cache.begin(inputs, every_output or inputs.get("labels") is not None)

    def after(_: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, KVServiceCache):
            cache.end(succeeded=output is not None)

    return (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    )
