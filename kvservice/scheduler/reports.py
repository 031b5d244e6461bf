"""Reports of the tokens that an engine sampled in a step, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import counts_for, int32_array, int64_array, refuse
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

    `num_tokens` int32[m] are the tokens of each sampled sequence, or None for one each. A sequence with k proposals in
    the batch has from 1 to k + 1: the proposals that are right, then the token sampled after them. `proposals` int32[p]
    are proposed to follow these tokens, `num_proposed` int32[m] for each sampled sequence, at most the scheduler's
    lookahead. They are forgotten where a sequence cannot use them in its next step.
    """

    batch: int
    token_ids: npt.ArrayLike = field(default_factory=lambda: _NO_TOKENS)
    num_tokens: npt.ArrayLike | None = None
    parents: npt.ArrayLike | None = None
    finished: Sequence[int] | npt.NDArray[np.int64] = ()
    proposals: npt.ArrayLike | None = None
    num_proposed: npt.ArrayLike | None = None


class Expected(NamedTuple):
    """Limits of the report of a batch, whose tokens are of the sequences `sampled` int64[m]. If the batch has
    proposals, `most` int64[m] are the most tokens of each sequence, and row i of `proposals` int32[d, lookahead] has
    the proposals of decode i."""

    sampled: Int64Array
    lookahead: int
    most: Int64Array | None = None
    proposals: Int32Array | None = None


class CheckedReport(NamedTuple):
    """A valid report: the tokens int32[t], `counts` int64[m] for each sampled sequence (None: one each), the ids of
    those that are finished, `parents` by the ids of the beams that continue others, and `proposals` int32[p] with their
    number for each sampled sequence, `proposed` int64[m], or None if there are none."""

    tokens: Int32Array
    counts: Int64Array | None
    finished: set[int]
    parents: dict[int, int]
    proposals: Int32Array = _NO_TOKENS
    proposed: Int64Array | None = None


def check_report(queues: EngineQueues, expected: Expected, report: Report) -> CheckedReport:
    """Validate a report. Raises InvalidArgumentError naming the field."""
    num_sampled, tokens = len(expected.sampled), _NO_TOKENS
    if num_sampled or np.size(report.token_ids):
        tokens = int32_array(report.token_ids, "token_ids")
    counts: Int64Array | None = None
    if report.num_tokens is not None and num_sampled:
        counts = _checked_counts(expected, report.num_tokens)
    num_tokens = num_sampled if counts is None else int(counts.sum())
    if len(tokens) != num_tokens:
        raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {num_tokens}", field="token_ids")
    if counts is not None and num_tokens > num_sampled:
        _check_accepted(expected, tokens, counts)
    parents = dict[int, int]()
    if report.parents is not None:
        parents = _check_parents(queues, expected.sampled.tolist(), report.parents)
    finished = set[int]()
    if len(report.finished):
        finished = set(int64_array(report.finished, "finished").tolist())
        unknown = finished.difference(expected.sampled.tolist())
        if unknown:
            raise InvalidArgumentError(f"sequence {min(unknown)} got no token in this batch", field="finished")
    if report.proposals is None and report.num_proposed is None:
        return CheckedReport(tokens, counts, finished, parents)
    return CheckedReport(tokens, counts, finished, parents, *_checked_proposals(expected, report))


def _checked_counts(expected: Expected, num_tokens: npt.ArrayLike) -> Int64Array:
    counts = counts_for(num_tokens, "num_tokens", len(expected.sampled))
    outside = (counts < 1) | (counts > (1 if expected.most is None else expected.most))
    if np.count_nonzero(outside):
        refuse("num_tokens", outside, "must be from 1 to 1 more than the proposals of the sequence in this batch")
    return counts


def _check_accepted(expected: Expected, tokens: Int32Array, counts: Int64Array) -> None:
    """Check that all tokens of a sequence except the last are its proposals, whose K/V are computed."""
    assert expected.proposals is not None, "only proposals allow more than one token"
    ends = np.cumsum(counts)
    for i in np.flatnonzero(counts > 1).tolist():
        count, first = int(counts[i]), int(ends[i] - counts[i])
        differ = tokens[first : first + count - 1] != expected.proposals[i, : count - 1]
        if np.count_nonzero(differ):
            at = first + int(differ.argmax())
            raise InvalidArgumentError("is not the token that was proposed and computed", field=f"token_ids[{at}]")


def _checked_proposals(expected: Expected, report: Report) -> tuple[Int32Array, Int64Array | None]:
    """Return (proposals int32[p], how many of them each sampled sequence has, int64[m])."""
    proposals = _NO_TOKENS
    if report.proposals is not None and np.size(report.proposals):
        proposals = int32_array(report.proposals, "proposals")
    if not len(expected.sampled) and (report.num_proposed is None or not np.size(report.num_proposed)):
        proposed: Int64Array | None = None
    else:
        none = np.zeros(len(expected.sampled), np.int64)
        proposed = none if report.num_proposed is None else counts_for(report.num_proposed, "num_proposed", len(none))
        if np.count_nonzero(proposed > expected.lookahead):
            limit = f"must be at most lookahead = {expected.lookahead}"
            refuse("num_proposed", proposed > expected.lookahead, limit)
    total = 0 if proposed is None else int(proposed.sum())
    if len(proposals) != total:
        raise InvalidArgumentError(f"has {len(proposals)} tokens, expected {total}", field="proposals")
    return proposals, proposed


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
