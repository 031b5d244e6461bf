"""Batches whose sequences begin with the same blocks."""

from __future__ import annotations

from attention_reference import Batch


def share_prefix(batch: Batch, num_common: int) -> None:
    """Gives all sequences that have queries the first blocks of the first of them."""
    with_queries = [seq for seq, query_len in enumerate(batch.case.query_lens) if query_len]
    first, num_positions = with_queries[0], num_common * batch.case.block_size
    for seq in with_queries[1:]:
        batch.block_tables[seq, :num_common] = batch.block_tables[first, :num_common]
        for side in (batch.keys, batch.values):
            side[seq] = side[seq].copy()
            side[seq][:num_positions] = side[first][:num_positions]
