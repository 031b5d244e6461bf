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

import contextlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Batch
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvservice.client.blocking import Session, Step
from kvservice.client.connection import UNANSWERED
from kvservice.client.mapped import ALIGNMENT, MappedPool, MappedStep
from kvservice.client.messages import int_list
from kvservice.client.tensors import current_stream, extension, pool_device
from kvservice.client.values import Sequence
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    PoolNotSharedError,
    StaleStepError,
)
from kvservice.ops import torch_cuda, torch_ops
from kvservice.wire.tensors import Array

# Makes any slot negative. Kernels write nothing to negative slots.
_NOWHERE = -(1 << 48)


class DecodeTables:
    """The next token of each sequence, as `kvservice.ops` takes it. Sequence i is in row i.

    block_tables  int32[max_sequences, max_blocks]
    context_lens  int32[max_sequences]
    query_lens    int32[max_sequences], all 1
    slot_mapping  int64[max_sequences]
    positions     int64[max_sequences], the position of the token in its sequence, from 0

    Rows without a sequence write nowhere, and attend to one token of block 0. Their results mean nothing.
    """

    def __init__(self, max_sequences: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        # Everything that the host writes is in one piece of memory, and is copied at once: positions, how much they
        # grow in a step, what is added to slots, and the block tables.
        self._shape = max_sequences, max_blocks
        self._begin = -(-24 * max_sequences // ALIGNMENT) * ALIGNMENT  # of the block tables
        num_bytes = self._begin + 4 * max_sequences * max_blocks
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.positions, self._growth, self._shift, self.block_tables = self._parts(self._memory)
        self.query_lens = torch.ones(max_sequences, dtype=torch.int32, device=device)
        self.context_lens = self.query_lens.clone()
        self.slot_mapping = torch.full((max_sequences,), -1, dtype=torch.int64, device=device)
        self.clear()

    def _parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, max_blocks = self._shape
        numbers = memory[: 24 * rows].view(torch.int64).view(3, rows)
        positions, growth, shift = numbers
        return positions, growth, shift, memory[self._begin :].view(torch.int32).view(rows, max_blocks)

    def load(self, block_tables: Array, lengths: Array) -> None:
        """Set the sequences: block_tables int32[n, blocks], and the tokens before the next one, lengths int64[n]. The
        copies run on the current stream. Raises InvalidArgumentError."""
        memory, parts = self._host_copy(block_tables)
        positions, growth, shift, _ = parts
        num_seqs = len(lengths)
        positions.zero_()
        positions[:num_seqs] = torch.from_numpy(np.asarray(lengths, np.int64)) - 1  # `advance` adds 1
        growth.zero_()
        growth[:num_seqs] = 1
        shift.fill_(_NOWHERE)
        shift[:num_seqs] = 0
        self._memory.copy_(memory, non_blocking=True)

    def clear(self) -> None:
        """Set no sequences: `advance` moves nothing on, and its slots are nowhere."""
        self.load(np.zeros((0, 0), np.int32), np.zeros(0, np.int64))

    def load_blocks(self, block_tables: Array) -> None:
        """Set the block tables only, int32[n, blocks]. Raises InvalidArgumentError."""
        _, (*_, tables) = self._host_copy(block_tables)
        self.block_tables.copy_(tables, non_blocking=True)

    def _host_copy(self, block_tables: Array) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return memory to copy from, with the block tables in it, and its parts. It is new each time, because copies
        from the last one may still be queued; torch keeps pinned memory until they are done."""
        num_seqs, num_blocks = block_tables.shape
        if num_seqs > self._shape[0] or num_blocks > self._shape[1]:
            raise InvalidArgumentError(
                f"are {num_seqs} with up to {num_blocks} blocks, more than {self._shape[0]} with {self._shape[1]}",
                field="sequences",
            )
        memory = torch.empty(self._memory.shape, dtype=torch.uint8, pin_memory=self._memory.is_cuda)
        parts = self._parts(memory)
        parts[-1].zero_()
        parts[-1][:num_seqs, :num_blocks] = torch.from_numpy(np.ascontiguousarray(block_tables))
        return memory, parts

    def advance(self) -> None:
        """Go to the next token of each sequence. Can be captured. The slot is looked up here, and not a step before, so
        that block tables that were loaded in between have it."""
        if self._memory.is_cuda:
            self._advance_on_gpu()
            return
        self.positions.add_(self._growth)
        torch.add(self.positions, 1, out=self.context_lens)
        blocks = self.block_tables.gather(1, (self.positions // self._block_size)[:, None])[:, 0]
        torch.add(self.positions % self._block_size, blocks, alpha=self._block_size, out=self.slot_mapping)
        self.slot_mapping.add_(self._shift)

    def _advance_on_gpu(self) -> None:
        """The same in one kernel: the seven above take longer to start than to run."""
        device = self._memory.device
        arrays = self.positions, self._growth, self._shift, self.block_tables, self.context_lens, self.slot_mapping
        addresses = (array.data_ptr() for array in arrays)
        with torch.cuda.device(device):
            extension().advance_tables(*addresses, *self._shape, self._block_size, current_stream(device.index))


# ---- steps ahead


MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class _Commit:
    """A commit of the oldest `num_steps` known steps. Made again, with the same id, it is executed once."""

    request_id: int
    step: Step
    num_steps: int
    token_ids: list[int]
    room: int  # tokens of each sequence in the next step; 0 opens none


class StepsAhead:
    """One run of decode steps of the same sequences, each of which gets one token in each step.

    There are slots for twice `num_steps` tokens. When `num_steps` of them are known, and another step is taken or none
    can be, a thread commits them, and the answer brings slots for the next ones. So `take` waits only if the commit
    takes longer than `num_steps` steps, and the end of a run is one call, not two.

    Raises the errors of `Session.open_ahead`, InvalidArgumentError if a sequence would have more than `max_tokens`
    tokens, and StaleStepError if the daemon was restarted since the pool was mapped.
    """

    def __init__(
        self,
        session: Session,
        pool: MappedPool,
        commits: ThreadPoolExecutor,
        sequences: Batch[Sequence],
        num_steps: int,
        max_tokens: int,
    ) -> None:
        if not isinstance(num_steps, int) or num_steps < 1:
            raise InvalidArgumentError(f"{num_steps} is not a whole number from 1 on", field="num_steps")
        self.sequences = tuple(sequences)
        self._session, self._pool, self._commits = session, pool, commits
        self._num_steps, self._max_tokens = num_steps, max_tokens
        # Steps since the last commit: how many were taken, and the tokens of those of them that are known.
        self._num_taken = 0
        self._tokens: list[list[int]] = []
        # The commit whose outcome is not known, and its call if it is on its way.
        self._unanswered: _Commit | None = None
        self._pending: Future[Step | None] | None = None
        # A step failed: nobody knows which of its layers were written.
        self._has_failed = False
        room = self._room(0)
        if room <= 0:
            raise InvalidArgumentError(
                f"one has {max_tokens} tokens or more, the most of this graph", field="sequences"
            )
        self._use(self._asked(session.open_ahead, sequences, room))
        self._changed = False  # whoever begins has these tables

    def _use(self, step: Step) -> None:
        self._step, self._changed = step, True
        self.tables: MappedStep = self._pool.step(step)

    def _room(self, num_known: int) -> int:
        """Return for how many tokens to open slots after `num_known` more of each sequence."""
        longest = max((sequence.length for sequence in self.sequences), default=0)
        return min(2 * self._num_steps, self._max_tokens - longest - num_known)

    @property
    def num_slots(self) -> int:
        """The number of steps since the last commit that have slots."""
        return self.tables.max_query_len

    def take(self) -> bool:
        """Take the slots of the next step. Returns whether the tables are others than for the step before.

        Raises StaleStepError and ConnectionLostError as `MappedStep.check`; InvalidArgumentError at `max_tokens`;
        FailedPreconditionError if the tokens of too many steps are unknown; and the error of a commit that failed. Then
        nothing has changed, and the commit is made again with the next call that needs it.
        """
        if self._has_failed:
            raise FailedPreconditionError("an earlier step failed: end this run, and begin another")
        self._check_open()
        self._adopt(wait=False)
        if len(self._tokens) >= self._num_steps or self._num_taken == self.num_slots:
            self._commit_known()
        if self._num_taken == self.num_slots:
            self._adopt(wait=True)
        if self._num_taken == self.num_slots:
            if self._tokens:
                raise InvalidArgumentError(f"one would have more than {self._max_tokens} tokens", field="sequences")
            raise FailedPreconditionError(f"the tokens of {self._num_taken} steps are not known: call written()")
        self._check_now()
        self._num_taken += 1
        changed, self._changed = self._changed, False
        return changed

    def fail(self) -> None:
        """Say that the step that was taken last failed. Its tokens are not committed, and no other step is taken."""
        self._num_taken -= 1
        self._has_failed = True

    def written(self, token_ids: Iterable[int]) -> None:
        """Say which tokens the oldest step wrote whose tokens are not known yet: one of each sequence. Raises
        InvalidArgumentError, and the errors of `take`."""
        self._check_open()
        if not isinstance(token_ids, Iterable):
            raise InvalidArgumentError(f"is {type(token_ids).__name__}, must be a list", field="token_ids")
        tokens = int_list(np.array(token_ids if isinstance(token_ids, np.ndarray) else list(token_ids)), "token_ids")
        if any(not 0 <= token <= MAX_TOKEN_ID for token in tokens):
            raise InvalidArgumentError(f"has tokens that are not from 0 to {MAX_TOKEN_ID}", field="token_ids")
        if len(tokens) != len(self.sequences):
            raise InvalidArgumentError(
                f"has {len(tokens)} tokens for {len(self.sequences)} sequences", field="token_ids"
            )
        if len(self._tokens) == self._num_taken:
            raise FailedPreconditionError("all steps have their tokens already")
        self._check_now()
        self._tokens.append(tokens)
        if len(self._tokens) >= self._num_steps and self._num_taken == self.num_slots:
            self._commit_known()

    def _check_open(self) -> None:
        if self._unanswered is not None and self._unanswered.room == 0:
            raise FailedPreconditionError("the end of this run is not answered yet: call end() again")

    def _check_now(self) -> None:
        """Check the step. A commit ends it before its answer is here: the answer is waited for then."""
        try:
            self.tables.check()
        except StaleStepError:
            if self._unanswered is None:
                raise
            self.check()

    def check(self) -> None:
        """Raise StaleStepError or ConnectionLostError if the results of the steps until now may be wrong. Waits for a
        commit that is on its way, and raises its error."""
        self._adopt(wait=True)
        self.tables.check()

    def close(self) -> None:
        """Commit the tokens that are known, and end the step. Raises StaleStepError, and the errors of
        `Session.commit_ahead`. After a CallTimeoutError call it again."""
        if self._unanswered is None or self._unanswered.room > 0:
            self._await_commit()
            # Without a connection the commit waits for one, and the daemon knows whether the step has ended.
            with contextlib.suppress(ConnectionLostError):
                self.tables.check()
            self._unanswered = self._commit_of(len(self._tokens), 0)
        self._adopt(wait=True)

    def _await_commit(self) -> None:
        """Wait for a commit whose outcome is not known. Raises CallTimeoutError and ConnectionLostError; the commit at
        the end raises other errors again, if they still hold."""
        try:
            try:
                self._adopt(wait=True)
            except ConnectionLostError:
                self._adopt(wait=True)  # once more, because it waits for a connection
        except UNANSWERED:
            raise
        except KVServiceError:
            pass

    def _commit_known(self) -> None:
        """Begin to commit the known tokens, unless a commit is on its way or no sequence can grow after them."""
        if self._pending is not None:
            return
        if self._unanswered is None:
            count = len(self._tokens)
            room = self._room(count)
            if count == 0 or room <= 0:
                return
            self.tables.check()
            # All tokens with slots in flight have them after the commit too: `room` is at least as many.
            self._unanswered = self._commit_of(count, room)
        self._send(self._unanswered)

    def _commit_of(self, num_steps: int, room: int) -> _Commit:
        tokens = self._by_sequence(num_steps)
        return _Commit(self._session.next_request_id(), self._step, num_steps, tokens, room)

    def _send(self, commit: _Commit) -> None:
        self._pending = self._commits.submit(
            self._asked,
            self._session.commit_ahead,
            commit.step,
            commit.token_ids,
            num_steps=commit.room,
            request_id=commit.request_id,
        )

    @staticmethod
    def _asked(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make a call of the session, which had mapped the pool."""
        try:
            return call(*args, **options)
        except PoolNotSharedError as error:
            raise StaleStepError("the daemon was restarted, and its pool is another", field="step_id") from error

    def wait(self) -> None:
        """Wait for a commit that is on its way, also if it fails. It changes the lengths of the sequences."""
        self._commits.submit(int).result()

    def _by_sequence(self, count: int) -> list[int]:
        return np.array(self._tokens[:count], np.int64).reshape(count, len(self.sequences)).T.ravel().tolist()

    def _adopt(self, *, wait: bool) -> None:
        """Go on with the step that a commit has opened, if there was one and its answer is here."""
        if wait and self._unanswered is not None and self._pending is None:
            self._send(self._unanswered)  # again
        pending, commit = self._pending, self._unanswered
        if pending is None or commit is None or not (wait or pending.done()):
            return
        try:
            step = pending.result()
        except KVServiceError as error:
            self._pending = None
            if not isinstance(error, UNANSWERED):
                self._unanswered = None  # it was not executed
            raise
        # After an interrupt the call is still on its way, and is not made again: its tokens would count twice.
        self._pending = self._unanswered = None
        self._num_taken -= commit.num_steps
        del self._tokens[: commit.num_steps]
        if step is not None:
            self._use(step)


# ---- the graph


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
        session._core.context.connection.kernels.add(self._mapped.kernels)
        number, pool = pool_device(info), self._mapped.pool
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
        is the next token of `sequences[i]`. The daemon learns of tokens after `num_steps` steps, and slots are
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
