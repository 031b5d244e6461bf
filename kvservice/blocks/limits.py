"""Limits of one request, so that no operation takes long."""

from __future__ import annotations

import numpy as np

from kvservice.blocks.arguments import refuse
from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.plans import Int64Array
from kvservice.errors import QuotaExceededError


def check_request_tokens(config: BlocksConfig, num_tokens: int, field: str) -> None:
    """Raise QuotaExceededError if a request covers more than max_request_tokens tokens."""
    limit = config.max_request_tokens
    if num_tokens > limit:
        raise QuotaExceededError(
            f"covers {num_tokens} tokens, a request may cover at most max_request_tokens = {limit}",
            field=field, limit="max_request_tokens", value=limit,
        )  # fmt: skip


def check_request_blocks(config: BlocksConfig, num_blocks: int, field: str) -> None:
    """Raise QuotaExceededError if a request covers more than max_request_blocks table entries."""
    limit = config.max_request_blocks
    if num_blocks > limit:
        raise QuotaExceededError(
            f"covers {num_blocks} blocks, a request may cover at most max_request_blocks = {limit}",
            field=field, limit="max_request_blocks", value=limit,
        )  # fmt: skip


def check_sequence_lengths(config: BlocksConfig, lengths: Int64Array, lookahead: Int64Array | int) -> None:
    """Check that no sequence of these lengths int64[n], including its lookahead slots, exceeds max_sequence_tokens.
    Raises InvalidArgumentError."""
    limit = config.max_sequence_tokens
    if not np.count_nonzero(lengths + lookahead > limit):
        return
    if np.count_nonzero(lengths > limit):
        refuse("token_ids", lengths > limit, f"makes a sequence longer than max_sequence_tokens = {limit}")
    refuse("lookahead", lengths + lookahead > limit, f"reaches past max_sequence_tokens = {limit}")
