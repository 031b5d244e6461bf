"""Rows of logits for tests of the choice of tokens."""

from __future__ import annotations

from kvservice.engines.params import SamplingParams
from kvservice.engines.processors import own_processors
from kvservice.engines.samples import Row, Sample
from kvservice.engines.sampling import stream_of

PROMPT = [3, 4, 5, 4]


def make_row(
    params: SamplingParams, generated: tuple[int, ...] = (), following: tuple[int, ...] = (), *, index: int = 0
) -> Row:
    """Return the row of a sample of PROMPT with these generated tokens. Token 1 ends a sequence."""
    stream = stream_of(params.seed or 0, index)
    processors = own_processors(params.logits_processors)
    sample = Sample(index, index, PROMPT, params, 1000, [1], stream, None, processors)
    sample.token_ids += generated
    return Row(sample, following)
