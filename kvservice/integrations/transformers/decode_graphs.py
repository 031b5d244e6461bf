"""Decode passes of an installed model as CUDA graphs.

A graph is the pass of one new token in each row of a batch, from the token ids to the logits, for one number of rows.
It computes the rows as `packed.forward` does: as one row of the model, with given positions and without a cache.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence as List
from typing import Any

import torch
from transformers import PreTrainedModel

from kvservice.client import Sequence, Session
from kvservice.client.decode_graph import DecodeGraph
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    ResourceExhaustedError,
    StaleStepError,
)
from kvservice.integrations.transformers import attention, keys
from kvservice.integrations.transformers.arguments import CACHE, GENERATE_INPUTS, Batch, library_model
from kvservice.integrations.transformers.attention import ATTENTION_NAME
from kvservice.integrations.transformers.probe import first_position

_logger = logging.getLogger(__name__)


class DecodeGraphs:
    """The graphs of a model and a session, for caches of the session: `KVServiceCache(kv, graphs=DecodeGraphs(...))`.

    A graph is captured when a batch with a new number of rows is decoded; it takes about as long as five passes. Its
    sequences may have up to `max_tokens` tokens. The daemon learns of tokens after `num_steps` passes, or when the
    cache needs that. Slots are reserved for twice as many.

    What cannot be captured is computed layer by layer as ever, and the log says why. So are batches that do not fit,
    passes with other inputs than those of `generate`, and models whose K/V are never shared. With a model and a pool in
    host memory there is no graph, but passes need no call of the daemon.

    Caches may take turns. A graph is at the sequences of one of them at a time, and two calls are made when it changes.
    """

    def __init__(self, model: torch.nn.Module, kv: Session, *, max_tokens: int, num_steps: int = 16) -> None:
        model = library_model(model)
        for name, value in {"max_tokens": max_tokens, "num_steps": num_steps}.items():
            if not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(f"{value} is not a whole number from 1 on", field=name)
        if model.config._attn_implementation != ATTENTION_NAME:
            raise FailedPreconditionError("the model computes its attention itself: install() it first")
        self.model, self.kv = model, kv
        self._max_tokens, self._num_steps = min(max_tokens, kv.info.max_sequence_tokens), num_steps
        self._identity: keys.ModelIdentity | None = None
        # The graphs by number of rows; None: the pass cannot be captured.
        self._graphs: dict[int, _ModelGraph | None] = {}
        self._said: set[str] = set()

    def explain(self, reason: str) -> None:
        """Log once why passes are computed layer by layer."""
        if reason not in self._said:
            self._said.add(reason)
            _logger.warning("decode passes of %s are computed layer by layer: %s", type(self.model).__name__, reason)

    def takes(self, model: PreTrainedModel, inputs: dict[str, Any], batch: Batch) -> bool:
        """Return whether a pass may be one of a run: it has one token in each row, plain inputs, and needs no
        gradients. Its positions must be plain, too."""
        if model is not self.model:
            self.explain(f"the graphs are of another model than {type(model).__name__}")
            return False
        given = {name for name, value in inputs.items() if value is not None and value is not False}
        num_logits = inputs.get("logits_to_keep") or 0
        return (
            batch.num_columns == 1
            and bool(batch.tokens.all())
            and given <= GENERATE_INPUTS
            and isinstance(num_logits, int)
            and num_logits <= 1
            and inputs.get("return_dict") is True
            and not torch.is_grad_enabled()
        )

    def begin(self, sequences: List[Sequence]) -> DecodeRun | None:
        """Return a run of decode passes for these sequences, or None if there is none."""
        if max(sequence.length for sequence in sequences) >= self._max_tokens:
            return None
        graph = self._graph(len(sequences))
        if graph is None:
            return None
        graph.leave()
        try:
            graph.decode.begin(sequences, self._num_steps)
        except (ResourceExhaustedError, FailedPreconditionError, InvalidArgumentError) as error:
            if isinstance(error, StaleStepError):  # the daemon was restarted: the next pass captures another graph
                self._graphs.clear()
            else:
                self.explain(str(error))
            return None
        return DecodeRun(graph)

    def _graph(self, num_rows: int) -> _ModelGraph | None:
        identity = keys.identify(self.model, thorough=False)
        if identity.private_because:
            return None
        if identity != self._identity:  # the weights may lie elsewhere
            self._graphs.clear()
            self._identity = identity
        if num_rows not in self._graphs:
            self._graphs[num_rows] = self._captured(num_rows)
        return self._graphs[num_rows]

    def _captured(self, num_rows: int) -> _ModelGraph | None:
        try:
            # Tensors made in inference mode could not be changed outside of it.
            with torch.inference_mode(False):
                return _ModelGraph(self.model, DecodeGraph(self.kv, num_rows, self._max_tokens))
        except Exception as error:  # any error of the model's own code
            name = type(self.model).__name__
            _logger.warning("decode passes of %s with %d rows are not captured: %s", name, num_rows, error)
            return None


class DecodeRun:
    """Passes of one token for each of the same sequences. It ends with `end`, or when another one begins."""

    def __init__(self, graph: _ModelGraph) -> None:
        self._graph, self._steps = graph, graph.decode.steps

    @property
    def is_open(self) -> bool:
        return self._steps is not None and self._graph.decode.steps is self._steps

    def compute(self, input_ids: torch.Tensor, token_ids: list[int], cache: Any) -> Any:
        """Compute the tokens int64[rows, 1], which are `token_ids` too. Returns the model's output with logits
        [rows, 1, vocabulary] and the cache. Raises the errors of DecodeGraph.replay and DecodeGraph.written."""
        return self._graph.compute(input_ids, token_ids, cache)

    def end(self) -> None:
        """Commit all tokens, if it is open. Raises the errors of DecodeGraph.end."""
        if self.is_open:
            self._graph.decode.end()


class _ModelGraph:
    """The captured pass of a model for a number of rows."""

    def __init__(self, model: PreTrainedModel, decode: DecodeGraph) -> None:
        if model.device != decode.device:
            raise FailedPreconditionError(f"the model is on {model.device}, the pool on {decode.device}")
        self.decode = decode
        self._ids = torch.zeros((1, decode.max_sequences), dtype=torch.long, device=decode.device)
        first = first_position(model)
        # With a mask of ones the library does not derive sequences from the positions.
        inputs: dict[str, Any] = {"input_ids": self._ids, "attention_mask": torch.ones_like(self._ids)}
        slopes: dict[tuple[float, ...], torch.Tensor] = {}

        def step() -> Any:
            positions = {} if first is None else {"position_ids": (decode.positions + first)[None]}
            with attention.running(_GraphPass(decode, slopes)):
                # Not the model itself: its hooks run for each pass, and not once for the graph.
                return model.forward(**inputs, **positions, use_cache=False, return_dict=True)

        decode.capture(step)

    def leave(self) -> None:
        """End the run of another cache. That cache notices by the lengths of its sequences if tokens are lost."""
        try:
            self.decode.end()
        except StaleStepError:
            pass  # the other cache raises it, unless it was dropped, and its sequences with it
        except KVServiceError as error:
            _logger.warning("tokens of another cache were not committed: %s", error)

    def compute(self, input_ids: torch.Tensor, token_ids: list[int], cache: Any) -> Any:
        self.decode.check()  # waits for the last commit, which may fail: nothing is computed then
        self._ids.copy_(input_ids.reshape(1, -1))
        captured = self.decode.replay()
        self.decode.written(token_ids)
        # The next replay overwrites the logits, and callers may keep theirs.
        logits = captured["logits"].transpose(0, 1).clone()
        has_cache = CACHE in {field.name for field in dataclasses.fields(captured)}
        return type(captured)(logits=logits, **({CACHE: cache} if has_cache else {}))


class _GraphPass:
    """A forward pass in a DecodeGraph. See attention.Pass."""

    def __init__(self, decode: DecodeGraph, slopes: dict[tuple[float, ...], torch.Tensor]) -> None:
        """`slopes` keeps the ALiBi slopes on the device: nothing can be copied there in a capture."""
        self._decode, self._slopes = decode, slopes
        self.num_attended_layers = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        attention.refuse_gradients(query, key, value)
        query, key, value = (states.detach()[0].transpose(0, 1).contiguous() for states in (query, key, value))
        if options["alibi_slopes"] is not None:
            options["alibi_slopes"] = self._on_device(tuple(options["alibi_slopes"]))
        output = self._decode.attend(layer, query, key, value, **options)
        self.num_attended_layers += 1
        return output[None]

    def _on_device(self, slopes: tuple[float, ...]) -> torch.Tensor:
        if slopes not in self._slopes:
            self._slopes[slopes] = torch.tensor(slopes, dtype=torch.float32, device=self._decode.device)
        return self._slopes[slopes]
