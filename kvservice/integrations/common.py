"""What the connectors of inference engines share: options, identities, keys, and an engine's blocks in the store."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvservice.client import KVClient, PutStatus, Scatter, StoreNamespace
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.values import (
    KEY_BYTES,
    MAX_MISSING,
    Keys,
    SharedUses,
    chosen_keys,
    distinct_keys,
    key_bytes,
    num_keys,
    num_leading,
    some_keys,
)
from kvservice.errors import InvalidArgumentError, KVServiceError

# ---- the options of a connector, which are part of the engine's configuration


@dataclass(frozen=True)
class ConnectorOptions:
    """The address of the daemon is required. A connector with more options inherits from this."""

    # The numbers that are not limited to above 0 and below 3600: the largest value is below the second. A first of -1
    # allows 0.
    LIMITS: ClassVar[dict[str, tuple[float, float]]] = {"prefill_tokens_per_s": (0, 1e9)}

    address: str
    """The address of the daemon, the same for all processes of the engine."""
    token: str = dataclasses.field(default="", repr=False)
    """A file with the client's token."""
    tenant: str = ""
    """The tenant of the sessions. Tenants share no blocks."""
    weights: str = ""
    """The identity of the weights, if the connector cannot find it or finds it too narrow."""
    verify: bool = False
    """Compare checksums when blocks are loaded. A damaged block counts as missing."""
    lookup_timeout_s: float = 0.25
    """The time limit in seconds of a look-up. One that takes longer counts as a miss."""
    transfer_timeout_s: float = 1.0
    """The time limit in seconds of a call that saves or loads."""
    prefill_tokens_per_s: float = 0.0
    """Tokens of prompts that the engine computes in a second: blocks below the daemon's memory are loaded only if that
    is faster. 0: an estimate."""

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """Raises InvalidArgumentError naming the option."""
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        kinds["address"] = str
        for name, value in extra_config.items():
            if name not in kinds:
                raise InvalidArgumentError(f"is not one of {', '.join(kinds)}", field=name)
            least, most = cls.LIMITS.get(name, (0, 3600))
            is_number = type(value) in (int, float) and (0 <= value < most if least < 0 else least < value < most)
            if kinds[name] is float and not is_number:
                what = f"above {least:g}" if least >= 0 else "from 0"
                raise InvalidArgumentError(f"{value!r} is not a number {what} and below {most:g}", field=name)
            if kinds[name] is bool and not isinstance(value, bool):
                raise InvalidArgumentError(f"{value!r} is neither true nor false", field=name)
            if kinds[name] is str and not isinstance(value, str):
                raise InvalidArgumentError(f"{value!r} is not a text", field=name)
        if not extra_config.get("address"):
            raise InvalidArgumentError("the address of the daemon is missing", field="address")
        return cls(**extra_config)


# ---- texts that identify weights, layouts and other things on which the bytes of a block depend


MAX_TEXT = 256


def files_identity(directory: Path) -> str:
    """Return a digest of the names, sizes and times of change of the files in a directory."""
    parts = []
    for path in sorted(directory.iterdir()):
        if path.is_file():
            status = path.stat()
            parts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return digest(*parts)


def session_name(part: str, namespace: StoreNamespace) -> str:
    """Return the name of a session, which operators see: the part of the engine and its rank, "vllm worker tp0"."""
    pipeline = f" pp{namespace.pp_rank}" if namespace.pp_size > 1 else ""
    return f"{part} tp{namespace.tp_rank}{pipeline}"


def short(text: str) -> str:
    """Return a text that a namespace can hold: the end of a longer one with a digest of all of it."""
    return text if len(text) <= MAX_TEXT else f"{digest(text)} {text[-128:]}"


def digest(*parts: str) -> str:
    """Return the SHA-256 of texts as 64 hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


# ---- keys of the store from keys of an engine


def digest_key(engine: str, *parts: object) -> bytes:
    """Return a key of 32 bytes: the SHA-256 of the engine's name and of the parts of its key, each with its length."""
    state = hashlib.sha256()
    for part in (f"kvservice key of {engine}", *parts):
        data = str(part).encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def hexadecimal_key(engine: str, key: str) -> bytes:
    """Return the bytes of a key that is 64 lower-case hexadecimal digits, and the digest of any other."""
    try:
        data = bytes.fromhex(key)
    except ValueError:
        data = b""
    return data if len(data) == KEY_BYTES and data.hex() == key else digest_key(engine, key)


# ---- blocks in the tiers below the daemon's memory: which of them are worth waiting for
#
# A look-up finds them by the daemon's measured speeds of its tiers. Blocks that come later than the engine would have
# computed them are no hits.


# Estimates of an engine that nobody has measured, rather fast than slow: tokens of prompts, and bytes of K/V that it
# computes in a second.
_TOKENS_PER_S = 50_000
_BYTES_PER_S = 4e9
# The longest wait for blocks, however long computing them would take.
MAX_WAIT_S = 10.0


class FoundBlocks(NamedTuple):
    """How many blocks are worth loading before the first that is not, and how many are in memory before the first that
    is not."""

    num_leading: int
    num_in_memory: int


@dataclass(frozen=True)
class ComputeTime:
    """How long the engine takes to compute blocks: the most that waiting for them is worth."""

    block_s: float

    @staticmethod
    def of(prefill_tokens_per_s: float, block_size: int, block_bytes: int, num_ranks: int = 1) -> ComputeTime:
        """`block_size` in tokens, `block_bytes` of one of `num_ranks` parts of a block that come one after the other:
        each has its share of the time. A speed of 0 stands for an estimate."""
        if prefill_tokens_per_s:
            return ComputeTime(block_size / prefill_tokens_per_s / num_ranks)
        return ComputeTime(max(block_size / _TOKENS_PER_S / num_ranks, block_bytes / _BYTES_PER_S))

    def wait_s(self, num_blocks: int) -> float:
        return min(num_blocks * self.block_s, MAX_WAIT_S)


def find_blocks(
    store: Any,
    keys: Keys,
    compute: ComputeTime,
    *,
    counted: bool = True,
    explained: bool = True,
    timeout_s: float | None = None,
) -> FoundBlocks:
    """Look up the first blocks of a prompt in a store of the client. Raises its errors."""
    keys = key_bytes(keys)
    wait_s = compute.wait_s(num_keys(keys))
    found = store.lookup(keys, counted=counted, explained=explained, max_wait_s=wait_s, timeout_s=timeout_s)
    num_leading, num_in_memory = int(found.num_leading), int(found.num_in_memory)
    if 0 < num_leading - num_in_memory < num_keys(keys):
        # That is less to compute than was assumed: is it still worth it?
        wait_s = compute.wait_s(num_leading - num_in_memory)
        leading = some_keys(keys, slice(0, num_leading))
        again = store.lookup(leading, counted=False, max_wait_s=wait_s, timeout_s=timeout_s)
        if again.num_leading < num_leading:
            num_leading = num_in_memory
    return FoundBlocks(num_leading, num_in_memory)


# ---- an engine's blocks in host memory, and the store that keeps them


logger = logging.getLogger(__name__)

Flags = npt.NDArray[np.bool_]
Addresses = npt.NDArray[np.int64]
# The most bytes of blocks in one call, to which the time limit of a transfer applies. In mapped memory that is the time
# of the daemon's answers alone, and each call costs as much as copying a block or two: where a thread of the engine
# holds the interpreter lock, a call waits several times for the lock, up to 5 ms each time.
CALL_BYTES, MAPPED_CALL_BYTES = 16 << 20, 1 << 30
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


# How often a store is looked at whose daemon is away, or still allocates its memory, and how often the daemon is told
# what was done in its memory without it, at most for so many blocks.
_LOOK_S, _REPORT_S = 5.0, 1.0
_MAX_REPORTED = 16384


class EngineBlocks:
    """The blocks of an engine in a namespace of the store. Threads may share it.

    No method raises KVServiceError, and none waits for a daemon that is away: what fails is a miss.

    Blocks that the mapped memory shows are found and copied there, without a call: a call waits several times for the
    interpreter lock, up to 5 ms each time if the engine computes in Python. The daemon is asked for the others.
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
        # These count and name the blocks that were used in the mapped memory since the last report.
        self._uses, self._used, self._uses_lock = SharedUses(), list[bytes](), threading.Lock()
        self._closed = threading.Event()
        self._beside = threading.Thread(target=self._run_beside, name="kvservice-blocks", daemon=True)
        self._beside.start()
        logger.info("blocks of %d bytes are kept in %s", namespace.block_bytes, namespace)

    @property
    def reachable(self) -> bool:
        return self._store.reachable

    def num_leading(self, keys: Sequence[bytes], *, counted: bool = True) -> int:
        """Return how many blocks before the first missing one are there, and come in less time than computing them
        takes. `counted`: as a look-up of a request."""
        memory, packed = self._store.memory, key_bytes(keys)
        if memory is not None and (num_blocks := _num_seen(memory, packed)) is not None:
            if counted:
                found, missing = packed[: KEY_BYTES * num_blocks], packed[KEY_BYTES * num_blocks :][:KEY_BYTES]
                self._note(found, hits=num_blocks, misses=len(keys) - num_blocks, missing=missing)
            return num_blocks
        try:
            limit_s = self._lookup_timeout_s
            return find_blocks(self._store, keys, self._compute, counted=counted, timeout_s=limit_s).num_leading
        except KVServiceError as error:
            logger.warning("blocks could not be looked up: %s", error)
            return 0

    def load(self, keys: Sequence[bytes], addresses: Addresses, piece_bytes: Sequence[int]) -> Flags:
        """Copy blocks to their addresses, up to the first missing one or further. It waits for blocks below the
        daemon's memory as long as computing them all would take. Returns which are right; the memory of the others is
        undefined."""
        self._check(piece_bytes)
        found: Flags = np.zeros(len(keys), np.bool_)
        memory = self._store.memory
        if memory is not None and not self._verify:
            found = self._load_shared(memory, key_bytes(keys), addresses, piece_bytes)
        others = np.flatnonzero(~found)
        until = time.monotonic() + self._compute.wait_s(len(others))
        for part in self._parts(len(others), writes=False):
            wait_s, some = max(until - time.monotonic(), _OVER_S), others[part]
            try:
                found[some] = self._store.get(
                    [keys[number] for number in some],
                    places(addresses[some], piece_bytes),
                    verify=self._verify,
                    max_wait_s=wait_s,
                    timeout_s=self._transfer_timeout_s + 2 * wait_s,
                )
            except KVServiceError as error:
                logger.warning("blocks could not be loaded: %s", error)
            if not found[some].all():
                break
        return found

    def save(self, keys: Sequence[bytes], addresses: Addresses, piece_bytes: Sequence[int]) -> Flags:
        """Store the blocks that the store does not have. Returns which are there now, or soon: another process is
        writing them."""
        self._check(piece_bytes)
        stored: Flags = np.zeros(len(keys), np.bool_)
        for part in self._parts(len(keys), writes=True):
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
        self._closed.set()
        self._beside.join()
        self._report()
        self._store.close()
        self._client.close()

    def _load_shared(self, memory: MappedStore, keys: bytes, addresses: Addresses, piece_bytes: Sequence[int]) -> Flags:
        """Copy the blocks that the mapped memory shows. Returns which are right."""
        found: Flags = np.zeros(num_keys(keys), np.bool_)
        lease = memory.lease(keys)
        if lease is not None and lease.num_blocks:
            try:
                seen = lease.found
                found[seen] = memory.read(lease.offsets, lease.versions, places(addresses[seen], piece_bytes))
            except KVServiceError as error:
                logger.warning("blocks could not be loaded: %s", error)
            finally:
                lease.release()
            self._note(chosen_keys(keys, found), read=int(found.sum()))
        return found

    def _note(self, keys: bytes, *, hits: int = 0, misses: int = 0, missing: bytes = b"", read: int = 0) -> None:
        """Note the use of blocks, and the first one that was missing, for the next report."""
        with self._uses_lock:
            uses = self._uses
            uses.hits += hits
            uses.misses += misses
            uses.read += read
            if missing and len(uses.missing) < MAX_MISSING:
                uses.missing.append(missing)
            if keys:
                self._used.append(keys)

    def _report(self) -> None:
        """Tell the daemon what was used, so that it counts this, and the blocks are the last to be evicted."""
        with self._uses_lock:
            uses, used, self._uses, self._used = self._uses, self._used, SharedUses(), []
        if used or uses != SharedUses():
            try:
                self._store.touch(distinct_keys(reversed(used), _MAX_REPORTED), uses=uses)
            except KVServiceError as error:
                logger.warning("the use of blocks could not be reported: %s", error)

    def _run_beside(self) -> None:
        """With low priority, report, and let the kernel map all memory of the store: the first touch of a page
        takes several times as long as to copy it."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        memory, slab, pause_s, reported_s = None, 0, 0.0, time.monotonic()
        while not self._closed.wait(min(pause_s, _REPORT_S)):
            if (now := time.monotonic()) >= reported_s + _REPORT_S:
                reported_s = now
                self._report()
            pause_s = _LOOK_S
            if self._store.memory is not memory:  # that of another process of the daemon
                memory, slab = self._store.memory, 0
            if memory is not None and memory.writable and slab < memory.num_slabs and memory.has_slab(slab):
                slab, pause_s = (slab + 1, 0.0) if memory.map_slab(slab) else (memory.num_slabs, _LOOK_S)

    def _save_part(self, keys: Sequence[bytes], addresses: Addresses, piece_bytes: Sequence[int]) -> Flags:
        memory = self._store.memory
        stored: Flags | None = None if memory is None else memory.find(key_bytes(keys))
        # A put into the mapped memory copies nothing that is there.
        if stored is None or not (stored.all() or (memory is not None and memory.tells_all and memory.writable)):
            stored = self._store.lookup(keys, counted=False, timeout_s=self._lookup_timeout_s).found
        # The last block first: then the first, without which the others are useless, is the last to be evicted.
        missing = np.flatnonzero(~stored)[::-1]
        if len(missing):
            statuses: Any = self._store.put([keys[n] for n in missing], places(addresses[missing], piece_bytes))
            stored[missing] = ~np.isin(statuses, (PutStatus.NO_ROOM, PutStatus.UNREACHABLE))
        return stored

    def _parts(self, count: int, *, writes: bool) -> list[slice]:
        memory = self._store.memory
        is_mapped = memory is not None and (memory.writable or not writes)
        most = max(1, (MAPPED_CALL_BYTES if is_mapped else CALL_BYTES) // self._block_bytes)
        return [slice(n, n + most) for n in range(0, count, most)]

    def _check(self, piece_bytes: Sequence[int]) -> None:
        assert sum(piece_bytes) == self._block_bytes, f"{sum(piece_bytes)} bytes are not a block"


def _num_seen(memory: MappedStore, keys: bytes) -> int | None:
    """Return how many blocks before the first missing one are in mapped memory; None: ask the daemon."""
    seen = memory.find(keys)
    if seen is not None and not seen.all():
        seen = memory.find(keys, max_age_s=0.0) if memory.tells_now else None
    return None if seen is None else num_leading(seen)
