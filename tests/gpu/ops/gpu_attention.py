"""Runs one or many cases of `attention_reference` on the device and compares the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from attention_reference import ERROR_BOUND, Array, Batch, Case, compare, make_batch, reference
from gpu_memory import GpuMemory

from kvservice.attention_options import BlockSparse
from kvservice.errors import InvalidArgumentError
from kvservice.ops import cuda
from kvservice.ops.cuda import DeviceArray, Kernel

# Tensor-core kernels round the softmax weights to the query's dtype (float16 with FP8 pools). The rounding errors have
# random signs and add up to about the rounding error of the result. The log-sum-exp uses the fast exponential
# instruction.
ROUNDED_WEIGHTS_BOUND = {"float16": 1.5 * 2.0**-11, "bfloat16": 1.5 * 2.0**-8}
ROUNDED_WEIGHTS_LSE_BOUND = 1e-4


def make_trapped(case: Case, trap: int | None = None) -> Batch:
    """Return a batch with a trap in all table entries that must not be read: a block full of NaN, or the id `trap`."""
    batch = make_batch(case)
    held = set(batch.block_tables[batch.block_tables >= 0].tolist())
    if trap is None:
        trap = next(block for block in range(len(batch.pool)) if block not in held)
    batch.block_tables[batch.block_tables < 0] = trap
    if case.sliding_window:
        for seq, (query_len, context_len) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
            first = max(0, context_len - query_len - case.sliding_window + 1)
            batch.block_tables[seq, : first // case.block_size] = trap
    return batch


class OnDevice:
    """A batch's arrays on the device."""

    def __init__(self, memory: GpuMemory, batch: Batch) -> None:
        self.memory, self.batch, self.case = memory, batch, batch.case
        names = ("pool", "query", "query_lens", "block_tables", "context_lens")
        self.arrays = {name: memory.upload(getattr(batch, name)) for name in names}
        self.scales = {name: self._optional(getattr(batch, name)) for name in ("k_scale", "v_scale")}

    def attend(
        self,
        *,
        kernel: Kernel = "auto",
        batch_invariant: bool = False,
        max_query_len: int | None = None,
        **changed: Any,
    ) -> tuple[Array, Array]:
        """Return output and log-sum-exp. `changed` replaces arguments of the batch by NumPy arrays and numbers."""
        case, memory = self.case, self.memory
        out = memory.poisoned(self.batch.query.shape, case.dtype)
        lse = memory.poisoned(self.batch.query.shape[:2], "float32")
        options = {**self.batch.options, "block_sparse": case.sparse and BlockSparse(*case.sparse), **changed}
        options["alibi_slopes"] = self._optional(options["alibi_slopes"])
        scales = {name: self._optional(changed[name]) if name in changed else self.scales[name] for name in self.scales}
        arrays = dict(self.arrays)
        for name in arrays.keys() & changed.keys():
            arrays[name] = memory.upload(options.pop(name))
        layer = options.pop("layer", case.layer)
        cuda.attention(
            arrays["pool"],
            layer,
            arrays["query"],
            arrays["query_lens"],
            arrays["block_tables"],
            arrays["context_lens"],
            max_query_len=max(case.query_lens, default=0) if max_query_len is None else max_query_len,
            out=out,
            lse=lse,
            workspace=memory.workspace,
            stream=memory.stream,
            kernel=kernel,
            batch_invariant=batch_invariant,
            **{**options, **scales},
        )
        return memory.download(out), memory.download(lse)

    def _optional(self, array: Array | None) -> DeviceArray | None:
        return None if array is None else self.memory.upload(array)


def bounds(case: Case, kernel: Kernel) -> dict[str, float]:
    if kernel == "reference" or case.dtype == "float32":
        return {"bound": ERROR_BOUND[case.dtype]}
    return {"bound": ROUNDED_WEIGHTS_BOUND[case.dtype], "lse_bound": ROUNDED_WEIGHTS_LSE_BOUND}


def run_case(
    case: Case,
    kernel: Kernel,
    *,
    batch_invariant: bool = False,
    spare_query_len: int = 0,
    trap: int | None = None,
) -> None:
    """Raise AssertionError unless the kernel's result matches the reference and nothing else was written."""
    batch = make_trapped(case, trap)
    with GpuMemory() as memory:
        max_query_len = max(case.query_lens, default=0) + spare_query_len
        out, lse = OnDevice(memory, batch).attend(
            kernel=kernel, batch_invariant=batch_invariant, max_query_len=max_query_len
        )
        memory.check_guards()
    compare(case, reference(batch), out, lse, **bounds(case, kernel))


def run_cases(cases: Sequence[Case], kernel: Kernel, **options: Any) -> None:
    """Run all cases. The failure reports the number of failed cases, by axis, and the first few in full."""
    from kvservice import _cuda

    failures: list[tuple[Case, str]] = []
    for case in cases:
        try:
            run_case(case, kernel, **options)
        except (AssertionError, InvalidArgumentError) as error:
            failures.append((case, f"{type(error).__name__}: {error}"))
        except _cuda.CudaError as error:  # no other case can run after it
            raise AssertionError(f"{error} in {case}") from error
    if failures:
        messages = [message[:600] for _, message in failures[:6]]
        raise AssertionError(
            "\n".join([f"{len(failures)} of {len(cases)} failed", by_axis(cases, failures), *messages])
        )


def by_axis(cases: Sequence[Case], failures: Sequence[tuple[Case, str]]) -> str:
    """Return failed and total counts for each value of each axis with more than one value."""
    lines = []
    for name in (field.name for field in fields(Case) if field.name not in ("seed", "query_lens", "context_lens")):
        tried = Counter(getattr(case, name) for case in cases)
        failed = Counter(getattr(case, name) for case, _ in failures)
        if len(tried) > 1:
            counts = (f"{value}: {failed[value]}/{tried[value]}" for value in tried if failed[value])
            lines.append(f"  {name}: {', '.join(counts)}")
    return "\n".join(lines)
