"""K and V of sequences that travel by a Transfer Engine, through the staging region of the session:

    write   copy to the region, with checksums ─▶ Write: the daemon transfers, compares and writes them
    read    Read: the daemon transfers them to the region ─▶ copy from it, and compare checksums

What does not arrive so is left to messages, and nothing has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from kvservice import _ext
from kvservice.client.batches import fits
from kvservice.client.context import Context
from kvservice.client.remote import RemoteRegion, RemoteRegions
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    InternalError,
    KVServiceError,
    RegionsNotAllowedError,
    TransferFailedError,
    UnknownRegionError,
)
from kvservice.v1 import attention_pb2, tensor_pb2
from kvservice.wire.tensors import Array

# The places of K and V.
Places: TypeAlias = tuple[tensor_pb2.SharedMemoryPlace, tensor_pb2.SharedMemoryPlace]
# Threads that copy K and V, one for each.
_NUM_THREADS: Final = 2
# The dimensions of a tensor of all layers; one of a single layer has one less.
_ALL_LAYERS: Final = 4


async def write(context: Context, key: Array, value: Array, send: Callable[[Places], Awaitable[Any]]) -> bool:
    """Copy K and V to the region, and make the call. Returns whether the daemon has written them. Raises the errors of
    the call."""
    remote = context.remote
    if key.shape != value.shape or key.dtype != value.dtype or not _can_carry(context, 2 * key.nbytes):
        return False
    async with remote.lock:
        region = remote.staging()
        if region is None:
            return False
        with _given_up_on_failure(remote):
            key, value = np.ascontiguousarray(key), np.ascontiguousarray(value)
            checksums = await remote.run(_copy_in, region, key, value)
            await send(_places(region, key.nbytes, checksums))
            return True
    return False


async def read(
    context: Context, key: Array, value: Array, ask: Callable[[Places], Awaitable[attention_pb2.ReadResponse]]
) -> bool:
    """Make the call, and copy K and V from the region to these arrays, whose layers are contiguous. Returns whether
    they have arrived. Raises the errors of the call."""
    remote, num_bytes = context.remote, key.nbytes
    if not _can_carry(context, 2 * num_bytes):
        return False
    async with remote.lock:
        region = remote.staging()
        if region is None:
            return False
        with _given_up_on_failure(remote):
            response = await ask(_places(region, num_bytes, ()))
            checksums = [_checksum(tensor, num_bytes) for tensor in (response.key, response.value)]
            if not await remote.run(_copy_out, region, key, value, checksums):
                raise TransferFailedError("K and V have arrived with other checksums")
            return True
    return False


def _can_carry(context: Context, num_bytes: int) -> bool:
    """Return whether so many bytes should be transferred, and fit. Tensors of wrong shapes may not."""
    return context.remote.is_worth_it(num_bytes) and fits(num_bytes, context.remote.part_bytes(context.info))


@contextlib.contextmanager
def _given_up_on_failure(remote: RemoteRegions) -> Iterator[None]:
    """Give the region up after a failure, which ends here, and after a call without an answer, which may still be
    executed."""
    try:
        yield
    except UnknownRegionError:  # of another process of the daemon
        remote.drop(None)
    except (TransferFailedError, RegionsNotAllowedError) as error:
        remote.fail(error)
    except BaseException as error:
        if isinstance(error, CallTimeoutError | ConnectionLostError) or not isinstance(error, KVServiceError):
            remote.drop(None)
        raise


def _places(region: RemoteRegion, num_bytes: int, checksums: Array | tuple[()]) -> Places:
    key, value = (
        tensor_pb2.SharedMemoryPlace(region=region.name, offset=offset, byte_size=num_bytes)
        for offset in (0, num_bytes)
    )
    for place, checksum in zip((key, value), checksums, strict=False):
        place.checksum = int(checksum)
    return key, value


def _checksum(tensor: tensor_pb2.Tensor, num_bytes: int) -> int:
    place = tensor.shared_memory
    if not place.HasField("checksum") or place.byte_size != num_bytes:
        raise InternalError(f"the daemon has transferred {place.byte_size} bytes in place of {num_bytes}")
    return int(place.checksum)


def _copy_in(region: RemoteRegion, key: Array, value: Array) -> Array:
    """Returns the checksums, uint64 `[2]`."""
    sums = _ext.store_copy_in(region.address, *_copied(key, value), _NUM_THREADS)
    return np.frombuffer(sums, np.uint64)


def _copy_out(region: RemoteRegion, key: Array, value: Array, checksums: list[int]) -> bool:
    """Returns whether both have these checksums."""
    expected = np.array(checksums, np.uint64).tobytes()
    return _ext.store_copy_out(region.address, *_copied(key, value), expected, _NUM_THREADS) == b"\3"


def _copied(key: Array, value: Array) -> tuple[bytes, int, int, bytes, bytes]:
    """Return what the copies need: the offsets in the region, the bytes of a tensor, and where the layers of K and V
    are."""
    layers = [[layer.ctypes.data for layer in (one if one.ndim == _ALL_LAYERS else one[None])] for one in (key, value)]
    addresses = np.array(layers, np.uint64)
    offsets = np.array([0, key.nbytes], np.uint64)
    sizes = np.full(len(layers[0]), key.nbytes // len(layers[0]), np.uint64)
    places = addresses - addresses.min()
    return offsets.tobytes(), key.nbytes, int(addresses.min()), places.tobytes(), sizes.tobytes()
