"""Reports: what an engine found out in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import int32_array, int64_array
from kvservice.blocks.plans import Int32Array, Int64Array
from kvservice.errors import InvalidArgumentError
from kvservice.scheduler.state import EngineQueues

_NO_TOKENS = np.zeros(0, np.int32)
_NO_TOKENS.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The tokens that an engine sampled after a batch.

    `batch` is the number of the batch. `token_ids` is int32[t], the tokens of the batch's m `sampled` sequences in
    their order (may be empty if m is 0). `finished` int64[f] are sequences of them that the engine found finished.
    `parents` int64[m] says of each which sequence it continues with its token: a beam another beam of its request in
    this batch, or itself, and other sequences themselves. None means that each continues itself.

    Not supported yet, and refused: `num_tokens` int32[m], the tokens of each sampled sequence (None: one each);
    `proposals` int32[p] and `num_proposed`
    int32[m], draft tokens for the next step.
    """

    batch: int
    token_ids: npt.ArrayLike = field(default_factory=lambda: _NO_TOKENS)
    num_tokens: npt.ArrayLike | None = None
    parents: npt.ArrayLike | None = None
    finished: Sequence[int] | npt.NDArray[np.int64] = ()
    proposals: npt.ArrayLike | None = None
    num_proposed: npt.ArrayLike | None = None


class CheckedReport(NamedTuple):
    """A valid report: int32[m] tokens of the sampled sequences, the ids of those that are finished, and for each beam
    that continues another one that one's id."""

    tokens: Int32Array
    finished: set[int]
    parents: dict[int, int]


def check_report(queues: EngineQueues, sampled: Int64Array, report: Report) -> CheckedReport:
    """Validate a report with the tokens of the sequences `sampled` int64[m]. Raises InvalidArgumentError naming the
    field."""
    for name in ("num_tokens", "proposals", "num_proposed"):
        if getattr(report, name) is not None:
            raise InvalidArgumentError("is not supported", field=name)
    num_sampled, tokens = len(sampled), _NO_TOKENS
    if num_sampled or np.size(report.token_ids):
        tokens = int32_array(report.token_ids, "token_ids")
    if len(tokens) != num_sampled:
        raise InvalidArgumentError(f"has {len(tokens)} tokens for {num_sampled} sequences", field="token_ids")
    parents = {} if report.parents is None else _check_parents(queues, sampled.tolist(), report.parents)
    if not len(report.finished):
        return CheckedReport(tokens, set(), parents)
    finished = set(int64_array(report.finished, "finished").tolist())
    unknown = finished.difference(sampled.tolist())
    if unknown:
        raise InvalidArgumentError(f"sequence {min(unknown)} got no token in this batch", field="finished")
    return CheckedReport(tokens, finished, parents)


def _check_parents(queues: EngineQueues, sampled: list[int], value: npt.ArrayLike) -> dict[int, int]:
    """Return the parents of the beams that continue others. Raises InvalidArgumentError."""
    parents = int64_array(value, "parents").tolist() if np.size(value) else []
    if len(parents) != len(sampled):
        raise InvalidArgumentError(f"has {len(parents)} elements for {len(sampled)} sequences", field="parents")
    known, moved = set(sampled), dict[int, int]()
    for i, (sequence_id, parent) in enumerate(zip(sampled, parents, strict=True)):
        if parent == sequence_id:
            continue
        group = queues.owner(sequence_id)
        if not group.request.beams or parent not in known or queues.owner(parent) is not group:
            raise InvalidArgumentError(
                f"sequence {sequence_id} cannot continue sequence {parent}", field=f"parents[{i}]"
            )
        if group.forked:  # before, all beams continue the prompt
            moved[sequence_id] = parent
    return moved
