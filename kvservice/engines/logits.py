"""Changes of logits before the choice: biases, penalties, least lengths, and the library's logits processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import LogitsProcessor

from kvservice.engines.processors import is_shared
from kvservice.engines.samples import Row, Sample
from kvservice.errors import InternalError


def change_logits(logits: torch.Tensor, rows: Sequence[Row], errors: dict[int, Exception]) -> torch.Tensor:
    """Return the logits float32 `[m, vocabulary]` with the changes that the rows' parameters ask for.

    The order is: bias, penalties, least length, processors. Exceptions of processors go to `errors`, by row. The
    argument is not changed.
    """
    changed = [row for row, (sample, _) in enumerate(rows) if sample.params.changes_logits]
    if not changed:
        return logits
    logits = logits.clone()
    for row in changed:
        _change_row(logits[row], *rows[row])
    _process(logits, [row for row in changed if rows[row].sample.processors], rows, errors)
    return logits


def _change_row(scores: torch.Tensor, sample: Sample, following: tuple[int, ...]) -> None:
    """Change the scores `[vocabulary]` of one row in place."""
    params = sample.params
    if params.logit_bias:
        scores[_index(list(params.logit_bias), scores)] += torch.tensor(
            list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device
        )
    if params.repetition_penalty != 1:
        seen = _index(np.unique([*sample.token_ids, *following]), scores)
        values = scores[seen]
        scores[seen] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        generated = [*sample.generated_ids, *following]
        if generated:
            tokens, counts = np.unique(generated, return_counts=True)
            penalties = params.presence_penalty + params.frequency_penalty * counts
            scores[_index(tokens, scores)] -= torch.from_numpy(penalties).to(scores)
    if sample.num_generated + len(following) < params.min_tokens and sample.ending_ids:
        scores[_index(list(sample.ending_ids), scores)] = -torch.inf


def _index(tokens: object, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.asarray(tokens, np.int64), device=like.device)


def _process(logits: torch.Tensor, rows_with: list[int], rows: Sequence[Row], errors: dict[int, Exception]) -> None:
    """Run the processors of the rows, in place. Rows at the same processor of scores only are one call."""
    num_left = dict.fromkeys(rows_with, 0)
    while True:
        pending = [row for row, at in num_left.items() if row not in errors and at < len(rows[row].sample.processors)]
        if not pending:
            return
        for processor, group in _groups(pending, num_left, rows):
            for row in group:
                num_left[row] += 1
            tokens = None if len(group) > 1 else [*rows[group[0]].sample.token_ids, *rows[group[0]].following]
            try:
                logits[group] = _call(processor, tokens, logits[group])
            except Exception as error:  # foreign code: its failure is the request's, not the batch's
                errors.update(dict.fromkeys(group, error))
            except SystemExit as error:
                errors.update(dict.fromkeys(group, InternalError(f"{type(processor).__name__} raised {error!r}")))


def _groups(pending: list[int], at: dict[int, int], rows: Sequence[Row]) -> list[tuple[LogitsProcessor, list[int]]]:
    groups: dict[int, tuple[LogitsProcessor, list[int]]] = {}
    for row in pending:
        processor = rows[row].sample.processors[at[row]]
        key = id(processor) if is_shared(processor) else -1 - row
        groups.setdefault(key, (processor, []))[1].append(row)
    return list(groups.values())


def _call(processor: Callable[..., torch.Tensor], tokens: list[int] | None, scores: torch.Tensor) -> torch.Tensor:
    """Call a processor with scores `[rows, vocabulary]`. `tokens` are those of its only row, None of several rows."""
    shape = (len(scores), 0) if tokens is None else (1, len(tokens))
    ids = torch.tensor(tokens or [], dtype=torch.long, device=scores.device).reshape(shape)
    processed = processor(ids, scores)
    if not isinstance(processed, torch.Tensor) or processed.shape != scores.shape:
        raise InternalError(f"{type(processor).__name__} did not return scores of shape {tuple(scores.shape)}")
    return processed
