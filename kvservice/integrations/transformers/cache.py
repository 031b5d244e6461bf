"""A cache object of the library whose K/V lie in the daemon, for the library's own generation loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from transformers import Cache, PreTrainedModel
from typing_extensions import override

from kvservice.client import Sequence, Session
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import attention, columns, keys
from kvservice.integrations.transformers.attention import ForwardPass
from kvservice.integrations.transformers.columns import Batch
from kvservice.integrations.transformers.keys import ExtraKeys
from kvservice.integrations.transformers.rows import Rows

_NO_PASS = (
    "a KVServiceCache works with a model that was install()ed, called as a whole: model(...) or model.generate(...). "
    "Here it was not: install(model) first, do not call a part of the model, and use another cache for other models"
)
# Inputs on which K/V do not depend, or only as has_plain_positions knows.
_PLAIN_INPUTS = {
    "attention_mask",
    "input_ids",
    "labels",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
}


class KVServiceCache(Cache):
    """`past_key_values` of a model that was `install`ed: each row of the batch is a sequence of the session.

    Columns that the attention mask marks as padding are no tokens of a sequence: they are neither stored nor attended,
    on whichever side they stand. Where the caller asks for the last logits only, as `generate` does, columns that no
    row needs are left out of the pass.

    Rows share prefixes, through the daemon's prefix cache, with all rows that the same model computed, here or
    elsewhere, under the same `extra_keys`: (token position, bytes) of what K/V depend on besides the model and its
    tokens. Nothing is shared with `share=False`, and none of what goes through a cache whose first pass has inputs or
    positions of the caller's own; `private_because` says why.

    A cache belongs to a model: passes of another one, or with other weights than before, are refused while its K/V are
    shared. A pass that fails leaves the cache as it was before. A cache is used by one thread at a time.

    Leaving it as a context manager, or `reset()`, frees its sequences; so does dropping it, before the session's next
    allocation. `copy.deepcopy` makes a fork, which shares all blocks.
    """

    def __init__(self, kv: Session, *, extra_keys: Iterable[tuple[int, bytes]] = (), share: bool = True) -> None:
        if not isinstance(kv, Session):
            raise InvalidArgumentError(
                f"is to be a session, KVServiceCache(client.session()), not {type(kv).__name__}", field="kv"
            )
        super().__init__(layers=_NoLayers())
        self.kv = kv
        self._extra_keys = _checked_keys(extra_keys)
        self._share = share
        self._begin_anew(Rows(kv))

    def _begin_anew(self, rows: Rows) -> None:
        self._rows = rows
        # bool [rows, columns]: which columns are tokens, of those that are stored.
        self._mask: torch.Tensor | None = None
        # Which model K/V were computed by; None before the first pass.
        self._identity: keys.Identity | None = None
        self._pass: ForwardPass | None = None
        self._num_skipped = 0

    @property
    def sequences(self) -> list[Sequence | None]:
        """The sequence of each row; None while a row has had padding only."""
        return list(self._rows.sequences)

    @property
    def private_because(self) -> str:
        """Why nothing of this cache is shared; empty if it is, or before the first pass."""
        return self._identity.private_because if self._identity else ""

    @contextmanager
    def forward_pass(
        self, model: PreTrainedModel, inputs: dict[str, Any], *, every_output: bool, takes_position_ids: bool
    ) -> Iterator[dict[str, Any]]:
        """A step for a call of the model with the keyword arguments `inputs`. Yields those to call it with.

        `every_output`: the caller wants outputs of every column besides the logits it names.
        """
        if attention.is_running():
            raise FailedPreconditionError("a forward pass is running already in this thread")
        batch = columns.read_batch(inputs, self._mask)
        plain = columns.has_plain_positions(inputs, batch, takes_position_ids)
        identity = self._check_identity(model, _unusual(inputs, plain), batch)
        num_wanted = columns.num_wanted_columns(inputs, every_output or bool(identity.private_because))
        before = self._rows.snapshot()
        try:
            token_ids = batch.token_ids()
            step, num_cached = self._rows.open_step(token_ids, num_wanted, self._row_keys(identity, batch.num_rows))
            pending = columns.pending_mask(batch.tokens, num_cached)
            self._num_skipped = columns.num_unneeded_columns(pending, num_wanted)
            computed = pending[:, self._num_skipped :]
            self._pass = ForwardPass(step, None if computed.all() else computed, batch.mask)
            with attention.running(self._pass):
                yield columns.without_first(inputs, self._num_skipped)
            self._pass.check_complete(self.kv.info.num_layers)
        except BaseException:
            self._rows.roll_back(before)
            raise
        finally:
            self._pass, self._num_skipped = None, 0
        self._mask, self._identity = batch.mask, identity

    def _check_identity(self, model: PreTrainedModel, unusual: str, batch: Batch) -> keys.Identity:
        """The identity that the cache has from this pass on.

        Raises FailedPreconditionError for passes that would put K/V into the prefix cache under a wrong key.
        """
        if self._identity and self._identity.private_because:
            return self._identity
        if not self._share:
            return keys.Identity(b"", "share=False")
        prompt = batch.num_columns > 1 or None in self._rows.sequences or not self._rows.sequences
        current = keys.identify(model, thorough=prompt)
        if unusual and not current.private_because:
            current = keys.Identity(b"", unusual)
        if self._identity and current != self._identity:
            raise FailedPreconditionError(
                f"{current.private_because or 'this is another model, or its weights have changed'}, while K/V that "
                "the cache holds are shared as the model's own: reset() the cache, or make it with share=False"
            )
        return current

    def _row_keys(self, identity: keys.Identity, num_rows: int) -> list[ExtraKeys]:
        if identity.private_because:
            return [keys.private_keys() + self._extra_keys for _ in range(num_rows)]
        return [keys.shared_keys(identity) + self._extra_keys] * num_rows

    def _select(self, parents: list[int]) -> None:
        self._rows.select(parents)
        if self._mask is not None:
            self._mask = self._mask[parents]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()

    def fork(self) -> KVServiceCache:
        """A cache of its own that shares every block with this one; whoever writes into a shared block gets a copy."""
        child = KVServiceCache(self.kv, extra_keys=self._extra_keys, share=self._share)
        child._rows, child._mask, child._identity = self._rows.fork(), self._mask, self._identity
        return child

    def __copy__(self) -> KVServiceCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVServiceCache:
        return self.fork()

    # What the library asks of a cache, and does to it.

    def __bool__(self) -> bool:
        """True, as of the library's caches; some models' code takes a cache without layers for none."""
        return True

    @override
    @attention.not_compiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands the new K/V back: they travel to the daemon together with the queries.

        Raises FailedPreconditionError if attention does not go to the daemon: outside of a pass, or when the layers
        before did not.
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
    def batch_size(self) -> int:
        return len(self._rows.sequences) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self._rows.sequences)

    @override
    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last `-tokens_to_remove` columns back (rejected candidates of assisted generation)."""
        count, stored = -tokens_to_remove, self.get_seq_length()
        if not 0 <= count <= stored:
            raise InvalidArgumentError(
                f"is to be from -{stored} to 0: the columns to remove, of those stored", field="tokens_to_remove"
            )
        if self._mask is not None:
            self._rows.take_back(self._mask[:, stored - count :].sum(1).tolist())
            self._mask = self._mask[:, : stored - count]

    @override
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: row i becomes what row `beam_idx[i]` was. Forks, so that no bytes move."""
        self._select(beam_idx.tolist())

    @override
    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._rows.sequences)) for _ in range(repeats)])

    @override
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(torch.arange(len(self._rows.sequences))[indices.cpu()].tolist())

    @override
    def reset(self) -> None:
        """Frees the sequences. The cache can then be used for another batch, by another model."""
        self._rows.free()
        self._begin_anew(self._rows)


class _NoLayers(list[Any]):
    """The layers of a cache that has none here; models that look into them cannot use it."""

    def __getitem__(self, _: object) -> NoReturn:
        raise FailedPreconditionError(_NO_PASS)


def _checked_keys(extra_keys: Iterable[tuple[int, bytes]]) -> ExtraKeys:
    pairs = list(extra_keys)
    for pair in pairs:
        if not (isinstance(pair, tuple) and list(map(type, pair)) == [int, bytes]):
            raise InvalidArgumentError(f"is to hold (token position, bytes), not {pair!r}", field="extra_keys")
    return pairs


def _unusual(inputs: dict[str, Any], plain_positions: bool) -> str:
    """What of a pass makes its K/V depend on more than the model and its tokens; empty if nothing."""
    if not plain_positions:
        return "positions are not 0, 1, 2, ... of each row's tokens (with padding, give position_ids)"
    given = [name for name, value in inputs.items() if value is not None and value is not False]
    return next((f"K/V may depend on the input {name}" for name in given if name not in _PLAIN_INPUTS), "")
