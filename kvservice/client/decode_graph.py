"""A model's decode step as one CUDA graph over the mapped pool.

    graph = DecodeGraph(kv, max_sequences=8, max_tokens=4096)
    graph.capture(step)                 step() computes one token of each row, and calls graph.attend for each layer
    graph.begin(sequences)
    logits = graph.replay()             what step() returned, for the next token of each sequence
    graph.written(token_ids)            the tokens that this replay computed
    graph.end()                         the daemon knows all tokens now

Between two replays nobody waits for the daemon. Tables, lengths and slots are at fixed addresses, where the graph moves
them on by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Batch
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from kvservice.client.blocking import Session
from kvservice.client.cuda import device_of
from kvservice.client.pools.decode import DecodeTables
from kvservice.client.steps_ahead import StepsAhead
from kvservice.client.values import Sequence
from kvservice.errors import CallTimeoutError, FailedPreconditionError, InvalidArgumentError
from kvservice.ops import torch_cuda, torch_ops

NUM_WARM_UPS: Final = 3


class DecodeGraph:
    """The decode step of up to `max_sequences` sequences with up to `max_tokens` tokens each.

    The session maps the pool for writing; others get PoolNotSharedError. With a pool in host memory there is no graph:
    a replay calls the step. Everything else is the same. FP8 pools are refused, because only the daemon knows their
    scales.

    All methods are for one thread at a time. Kernels and copies run on its current stream, which must be the same for
    all calls from `begin` to `end`. Calls of the session wait for replays, as they wait for kernels of its transport.
    After a restart or an upgrade of the daemon a graph is of no use: `begin` raises StaleStepError, and another must be
    made.
    """

    def __init__(self, session: Session, max_sequences: int, max_tokens: int) -> None:
        info = session.info
        if info.kv_cache_dtype != info.dtype:
            raise FailedPreconditionError("the scales of an FP8 pool are known only to the daemon")
        for name, value in {"max_sequences": max_sequences, "max_tokens": max_tokens}.items():
            if not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(f"{value} is not a whole number from 1 on", field=name)
        if max_tokens > info.max_sequence_tokens:
            raise InvalidArgumentError(
                f"{max_tokens} is more than the {info.max_sequence_tokens} tokens of the daemon's longest sequence",
                field="max_tokens",
            )
        self.session, self.max_sequences, self.max_tokens = session, max_sequences, max_tokens
        self._mapped = session.map_pool(writable=True)
        session._core.calls.watch(self._mapped.kernels)
        number, pool = device_of(info), self._mapped.pool
        self.device = torch.device("cpu" if number is None else f"cuda:{number}")
        self._on_gpu = number is not None
        self._pool: torch.Tensor = pool if self._on_gpu else torch_ops.as_tensor(pool, getattr(torch, info.dtype))
        self._tables = DecodeTables(max_sequences, -(-max_tokens // info.block_size), info.block_size, self.device)
        # One workspace for all layers of the graph, because replays are in order. Its address must not change.
        self._workspace = torch_cuda.TensorWorkspace(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._step: Callable[[], Any] | None = None
        self._output: Any = None
        self._attended: list[int] | None = None  # layers, while the step runs
        self._commits = ThreadPoolExecutor(1, "kvservice-commits")
        self._commits.submit(int)  # starts the thread, which takes longer than a step
        self.steps: StepsAhead | None = None
        """The steps since `begin`; None after `end`."""

    @property
    def positions(self) -> torch.Tensor:
        """int64[max_sequences]: the position of each row's token in its sequence, from 0. The step may read it."""
        return self._tables.positions

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        scale: float | None = None,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the K/V of a layer and attend, for one token of each row. Only for the step of `capture`.

        query, out: [max_sequences, num_heads, head_size]; key, value: [max_sequences, num_kv_heads, head_size], in the
        pool's dtype and on its device. The options are those of `kvservice.ops.attention`; alibi_slopes: float32
        [num_heads], on the pool's device. Returns `out` if given, else a new tensor.
        """
        if self._attended is None:
            raise FailedPreconditionError("only the step of capture() attends in a graph")
        self._check_tensors(query, key, value, out)
        tables = self._tables
        self._attended.append(layer)
        options: dict[str, Any] = {
            "scale": scale,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "alibi_slopes": alibi_slopes,
            "batch_invariant": self.session.info.batch_invariant,
        }
        lengths = tables.query_lens, tables.block_tables, tables.context_lens
        if not self._on_gpu:
            used = tables.slot_mapping >= 0  # the kernel for host memory refuses other slots
            slots = tables.slot_mapping[used]
            torch.ops.kvservice.write_kv(self._pool, layer, slots, key[used], value[used])
            found: torch.Tensor = torch.ops.kvservice.attention(self._pool, layer, query, *lengths, **options)
            return found if out is None else out.copy_(found)
        torch_cuda.write_kv(self._pool, layer, tables.slot_mapping, key, value)
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        torch_cuda.attend(
            out, None, self._pool, layer, query, *lengths, **options, max_query_len=1, scratch=self._workspace
        )
        return out

    def capture(self, step: Callable[[], Any]) -> None:
        """Capture a step, which computes one token of each row and attends in each layer of the pool. It is called a
        few times before, without sequences. What it reads must be at fixed addresses, and what it returns is what
        `replay` returns.

        Raises FailedPreconditionError between `begin` and `end`, or if the step does not attend in each layer once and
        in order; and what torch raises for a step that cannot be captured. There is no step then.
        """
        if self.steps is not None:
            raise FailedPreconditionError("its sequences are in use: end() first")
        self._step = self._graph = self._output = None
        self._tables.clear()
        # Tensors made in inference mode could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if self._on_gpu:
                self._capture(step)
            else:
                self._run(step)
        self._step = step

    def _capture(self, step: Callable[[], Any]) -> None:
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(NUM_WARM_UPS):
                    self._run(step)
            current.wait_stream(stream)
            workspace = self._workspace.reserve(0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self._run(step)
        if self._workspace.reserve(0) != workspace:
            raise FailedPreconditionError("the step needs more workspace in its capture than before")
        self._graph, self._output = graph, output

    def _run(self, step: Callable[[], Any]) -> Any:
        num_layers = self.session.info.num_layers
        attended = self._attended = []
        try:
            self._tables.advance()
            output = step()
        finally:
            self._attended = None
        if attended != list(range(num_layers)):
            raise FailedPreconditionError(
                f"the step attends in layers {attended}, must in each of 0 to {num_layers - 1}, once and in order"
            )
        return output

    def _check_tensors(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        info, rows = self.session.info, self.max_sequences
        of_kv = rows, info.num_kv_heads, info.head_size
        dtype = self._pool.dtype
        for name, tensor in {"query": query, "key": key, "value": value, "out": out}.items():
            if tensor is None and name == "out":
                continue
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgumentError(f"is not a tensor but {type(tensor).__name__}", field=name)
            shape = tuple(tensor.shape)
            heads = shape[1] if len(shape) == 3 else 0
            wanted = of_kv if name in ("key", "value") else (rows, heads, info.head_size)
            if shape != wanted or heads == 0 or heads % info.num_kv_heads:
                raise InvalidArgumentError(
                    f"has shape {list(shape)}, must be [{rows}, heads, {info.head_size}], "
                    f"with {info.num_kv_heads} heads of keys and values, and a multiple of that of queries",
                    field=name,
                )
            if tensor.dtype != dtype or tensor.device != self.device:
                raise InvalidArgumentError(
                    f"is {tensor.dtype} on {tensor.device}, must be {dtype} on {self.device}", field=name
                )
        if out is not None and out.shape != query.shape:
            raise InvalidArgumentError(f"has shape {list(out.shape)}, query has {list(query.shape)}", field="out")

    def begin(self, sequences: Batch[Sequence], num_steps: int = 16) -> None:
        """Take other sequences, after an `end` of the last ones. All their tokens must be computed. Row i of the graph
        is the next token of `sequences[i]`. The daemon is told about tokens after `num_steps` steps, and slots are
        reserved for twice as many.

        Raises InvalidArgumentError for more sequences or tokens than the graph has; StaleStepError if the daemon was
        restarted since the graph was made; and the errors of `Session.open_ahead`, after which nothing has changed.
        """
        if self._step is None:
            raise FailedPreconditionError("there is no step: capture() one")
        if len(sequences) > self.max_sequences:
            raise InvalidArgumentError(f"are {len(sequences)}, more than {self.max_sequences}", field="sequences")
        self.end()
        steps = StepsAhead(self.session, self._mapped, self._commits, sequences, num_steps, self.max_tokens)
        lengths = np.array([sequence.length for sequence in sequences], np.int64)
        self._tables.load(steps.tables.block_tables, lengths)
        self.steps = steps

    def replay(self) -> Any:
        """Compute the next token of each sequence. Returns the step's output, which the next replay overwrites. Before
        it is believed, `written` or `check` must not raise.

        Raises the errors of `StepsAhead.take`: then nothing was computed. After an error of the step itself, the
        sequences have the tokens before it, and must be begun again.
        """
        steps = self._begun()
        if steps.take():
            self._tables.load_blocks(steps.tables.block_tables)
        try:
            if self._graph is not None:
                self._graph.replay()
            else:
                assert self._step is not None, "begin has checked it"
                with torch.no_grad():
                    self._output = self._run(self._step)
        except BaseException:
            steps.fail()
            raise
        finally:
            self._mapped.kernels.mark_launch()
        return self._output

    def written(self, token_ids: Iterable[int]) -> None:
        """Say which tokens a replay computed, the oldest one of which they are not known: one of each sequence, the
        inputs of the step. Raises the errors of `StepsAhead.written`."""
        self._begun().written(token_ids)

    def check(self) -> None:
        """Raise StaleStepError or ConnectionLostError if results since `begin` may be wrong."""
        self._begun().check()

    def end(self) -> None:
        """Commit the tokens that are known, after the replays. The daemon forgets those of other replays. Does nothing
        without sequences. Raises the errors of `StepsAhead.close`: after a CallTimeoutError call it again; after other
        errors the run has ended, and the sequences' lengths say what was committed."""
        steps = self.steps
        if steps is None:
            return
        try:
            steps.close()
        except CallTimeoutError:
            raise
        except BaseException:
            self.steps = None
            steps.wait()
            raise
        self.steps = None

    def _begun(self) -> StepsAhead:
        if self.steps is None:
            raise FailedPreconditionError("there are no sequences: begin() with some")
        return self.steps
