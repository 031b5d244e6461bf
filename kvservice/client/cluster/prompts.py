"""A caller's prompt as placement sees it: with the chain hashes that the daemons compute for it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvservice.chain_hash import block_hash, encoded_extra_keys, root_hash
from kvservice.client.cluster.placement import HashedPrompt
from kvservice.client.requests import int_list, whole
from kvservice.client.sequences import ExtraKeys
from kvservice.errors import InvalidArgumentError


def to_prompt(token_ids: Iterable[int], extra_keys: ExtraKeys, block_size: int) -> HashedPrompt:
    """Compute the hashes of a prompt's full blocks. Raises InvalidArgumentError naming token_ids or extra_keys."""
    listed = int_list(token_ids, "token_ids")
    try:
        tokens = np.asarray(listed) if listed else np.zeros(0, np.int32)
    except ValueError as error:  # lists of several lengths
        raise InvalidArgumentError(str(error), field="token_ids") from None
    whole_numbers = tokens.ndim == 1 and tokens.dtype.kind in "iu"
    if not whole_numbers or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31):
        raise InvalidArgumentError("must be whole numbers from 0 to below 2**31", field="token_ids")
    data = tokens.astype("<i4").tobytes()
    pairs = [(whole(position, "extra_keys"), bytes(key)) for position, key in extra_keys]
    if any(position < 0 for position, _ in pairs):
        raise InvalidArgumentError("a position is negative", field="extra_keys")
    extra = encoded_extra_keys(pairs, block_size)
    size, parent = 4 * block_size, root_hash(block_size)
    hashes: list[bytes] = []
    for start in range(0, len(data) - size + 1, size):
        parent = block_hash(parent, data[start : start + size], extra.get(start // size, b""))
        hashes.append(parent)
    return HashedPrompt(len(tokens), block_size, hashes)
