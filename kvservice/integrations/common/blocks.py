"""An engine's blocks in host memory, and the store that keeps them."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.client import KVClient, PutStatus, Scatter, StoreNamespace
from kvservice.errors import KVServiceError
from kvservice.integrations.common.identity import session_name
from kvservice.integrations.common.options import ConnectorOptions
from kvservice.integrations.common.waiting import ComputeTime, find_blocks

logger = logging.getLogger(__name__)

Flags = npt.NDArray[np.bool_]
Addresses = npt.NDArray[np.int64]
# The most bytes of blocks in one call, to which the time limit of a transfer applies.
CALL_BYTES = 16 << 20
# A load whose time has passed gets this limit, because 0 would stand for no limit.
_OVER_S = 1e-6


def places(addresses: Addresses, piece_bytes: Sequence[int]) -> Scatter:
    """Return the places of blocks `[num_blocks, num_pieces]` by the addresses of their pieces in this process. The
    caller guarantees that the memory is valid as long as the result is used."""
    first = int(addresses.min())
    last = int((addresses + np.asarray(piece_bytes, np.int64)).max())
    # Only the pieces are accessed, not what lies between them.
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))
    return Scatter(memory, addresses - first, piece_bytes)


class EngineBlocks:
    """The blocks of an engine in a namespace of the store. Threads may share it.

    No method raises KVServiceError, and none waits for a daemon that is away: what fails is a miss.
    """

    def __init__(self, options: ConnectorOptions, namespace: StoreNamespace, name: str, block_size: int) -> None:
        """The daemon may start later. `name` and the rank are the name of the session, `block_size` is in tokens.
        Raises the errors of KVClient.store, for example StoreOffError."""
        self._client = KVClient(options.address, token=options.token, connect_timeout_s=None)
        self._lookup_timeout_s, self._verify = options.lookup_timeout_s, options.verify
        self._transfer_timeout_s = options.transfer_timeout_s
        self._block_bytes = namespace.block_bytes
        self._compute = ComputeTime.of(options.prefill_tokens_per_s, block_size, namespace.block_bytes)
        try:
            self._store = self._client.store(
                namespace,
                tenant=options.tenant,
                name=session_name(name, namespace),
                timeout_s=options.transfer_timeout_s,
            )
        except BaseException:
            self._client.close()
            raise
        self._blocks_per_call = max(1, CALL_BYTES // namespace.block_bytes)
        logger.info("blocks of %d bytes are kept in %s", namespace.block_bytes, namespace)

    @property
    def reachable(self) -> bool:
        return self._store.reachable

    def num_leading(self, keys: Sequence[bytes], *, counted: bool = True) -> int:
        """Return how many blocks before the first missing one are there, and come in less time than computing them
        takes. `counted`: as a look-up of a request."""
        try:
            found = find_blocks(self._store, keys, self._compute, counted=counted, timeout_s=self._lookup_timeout_s)
            return found.num_leading
        except KVServiceError as error:
            logger.warning("blocks could not be looked up: %s", error)
            return 0

    def load(self, keys: Sequence[bytes], addresses: Addresses, piece_bytes: Sequence[int]) -> Flags:
        """Copy blocks to their addresses, up to the first missing one or little further. It waits for blocks below the
        daemon's memory as long as computing them all would take. Returns which are right; the memory of the others is
        undefined."""
        self._check(piece_bytes)
        found: Flags = np.zeros(len(keys), np.bool_)
        until = time.monotonic() + self._compute.wait_s(len(keys))
        for part in self._parts(len(keys)):
            wait_s = max(until - time.monotonic(), _OVER_S)
            try:
                found[part] = self._store.get(
                    keys[part],
                    places(addresses[part], piece_bytes),
                    verify=self._verify,
                    max_wait_s=wait_s,
                    timeout_s=self._transfer_timeout_s + 2 * wait_s,
                )
            except KVServiceError as error:
                logger.warning("blocks could not be loaded: %s", error)
            if not found[part].all():
                break
        return found

    def save(self, keys: Sequence[bytes], addresses: Addresses, piece_bytes: Sequence[int]) -> Flags:
        """Store the blocks that the store does not have. Returns which are there now, or soon: another process is
        writing them."""
        self._check(piece_bytes)
        stored: Flags = np.zeros(len(keys), np.bool_)
        for part in self._parts(len(keys)):
            try:
                stored[part] = self._save_part(keys[part], addresses[part], piece_bytes)
            except KVServiceError as error:
                logger.warning("blocks could not be saved: %s", error)
                break
        return stored

    def remove(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks were there."""
        try:
            return self._store.remove(keys)
        except KVServiceError as error:
            logger.warning("blocks could not be removed: %s", error)
            return 0

    def clear(self) -> bool:
        """Remove all blocks of the namespace. Returns whether the daemon has done so."""
        try:
            self._store.clear()
        except KVServiceError as error:
            logger.warning("the blocks could not be removed: %s", error)
            return False
        return self._store.reachable

    def close(self) -> None:
        self._store.close()
        self._client.close()

    def _save_part(self, keys: Sequence[bytes], addresses: Addresses, piece_bytes: Sequence[int]) -> Flags:
        stored: Flags = self._store.lookup(keys, counted=False, timeout_s=self._lookup_timeout_s).found
        # The last block first: then the first, without which the others are useless, is the last to be evicted.
        missing = np.flatnonzero(~stored)[::-1]
        if len(missing):
            statuses: Any = self._store.put([keys[n] for n in missing], places(addresses[missing], piece_bytes))
            stored[missing] = ~np.isin(statuses, (PutStatus.NO_ROOM, PutStatus.UNREACHABLE))
        return stored

    def _parts(self, count: int) -> list[slice]:
        return [slice(n, n + self._blocks_per_call) for n in range(0, count, self._blocks_per_call)]

    def _check(self, piece_bytes: Sequence[int]) -> None:
        assert sum(piece_bytes) == self._block_bytes, f"{sum(piece_bytes)} bytes are not a block"
