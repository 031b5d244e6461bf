"""The transport of clients on other hosts: Transfer Engines carry K and V of sequences, and messages the rest. K and V
go through the staging region of the session:

    write   copy to the region, with checksums ─▶ Write: the daemon transfers, compares and writes them
    read    Read: the daemon transfers them to the region ─▶ copy from it, and compare checksums

Parts use the halves of the region by turns. While the daemon executes the call of one part, a thread here copies the
next one to the region, or the one before from it. What does not arrive so is left to messages, and nothing has changed.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, takewhile
from typing import Any, Final

import numpy as np

from kvservice import _ext
from kvservice.client.messages import fits
from kvservice.client.remote import Context, RemoteRegion, RemoteRegions
from kvservice.client.step import AttentionCall, AttentionResult, Transport, TransportName, WriteCall
from kvservice.client.transports.inline import InlineTransport, Places
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

# Threads that copy K and V, one for each.
_NUM_THREADS: Final = 2
# The dimensions of a tensor of all layers; one of a single layer has one less.
_ALL_LAYERS: Final = 4


@dataclass(frozen=True, eq=False)
class KVPart:
    """K and V of one call. `send` makes the call, with their places or, for None, with K and V in messages. The layers
    of arrays that are read are contiguous."""

    key: Array
    value: Array
    send: Callable[[Places | None], Awaitable[Any]]

    def can_travel(self, context: Context) -> bool:
        """Return whether the part should be transferred, and fits. Tensors of wrong shapes may not."""
        if self.key.shape != self.value.shape or self.key.dtype != self.value.dtype:
            return False
        num_bytes, remote = self.key.nbytes + self.value.nbytes, context.remote
        return remote.is_worth_it(num_bytes) and fits(num_bytes, remote.part_bytes(context.info))


async def write(context: Context, parts: Iterable[KVPart]) -> None:
    """Write all parts, in order. Raises the errors of the calls."""
    await _move(context, deque(parts), _write)


async def read(context: Context, parts: Iterable[KVPart]) -> None:
    """Read all parts. Raises the errors of the calls."""
    await _move(context, deque(parts), _read)


@dataclass(frozen=True, eq=False)
class _Placed:
    """A part whose K and V lie one after the other in the region, from `begin` on."""

    part: KVPart
    region: RemoteRegion
    begin: int

    def copy_in(self) -> list[int]:
        """Returns the checksums of K and V."""
        key, value = np.ascontiguousarray(self.part.key), np.ascontiguousarray(self.part.value)
        sums = _ext.store_copy_in(self.region.address, *self._copied(key, value), _NUM_THREADS)
        return [int(one) for one in np.frombuffer(sums, np.uint64)]

    def copy_out(self, response: attention_pb2.ReadResponse) -> None:
        """Raises TransferFailedError for bytes with other checksums than the daemon's."""
        key, value = self.part.key, self.part.value
        sums = [_checksum(tensor, key.nbytes) for tensor in (response.key, response.value)]
        expected = np.array(sums, np.uint64).tobytes()
        if _ext.store_copy_out(self.region.address, *self._copied(key, value), expected, _NUM_THREADS) != b"\3":
            raise TransferFailedError("K and V have arrived with other checksums")

    def _copied(self, key: Array, value: Array) -> tuple[bytes, int, int, bytes, bytes]:
        """Return what the copies need: the offsets in the region, the bytes of a tensor, and where the layers of K and
        V are."""
        layers = [
            [layer.ctypes.data for layer in (one if one.ndim == _ALL_LAYERS else one[None])] for one in (key, value)
        ]
        addresses = np.array(layers, np.uint64)
        offsets = np.array([self.begin, self.begin + key.nbytes], np.uint64)
        sizes = np.full(len(layers[0]), key.nbytes // len(layers[0]), np.uint64)
        places = addresses - addresses.min()
        return offsets.tobytes(), key.nbytes, int(addresses.min()), places.tobytes(), sizes.tobytes()

    def places(self, checksums: Sequence[int] = ()) -> Places:
        num_bytes = self.part.key.nbytes
        key, value = (
            tensor_pb2.SharedMemoryPlace(region=self.region.name, offset=offset, byte_size=num_bytes)
            for offset in (self.begin, self.begin + num_bytes)
        )
        for place, checksum in zip((key, value), checksums, strict=False):
            place.checksum = checksum
        return key, value


@dataclass(frozen=True, eq=False)
class _Way:
    """The way of parts through a region. Parts that have arrived are removed from `left`, whose first ones are
    `placed`. One thread `beside` copies."""

    remote: RemoteRegions
    placed: list[_Placed]
    left: deque[KVPart]
    beside: Executor


async def _write(way: _Way) -> None:
    copies = [way.beside.submit(one.copy_in) for one in way.placed[:1]]
    for number, one in enumerate(way.placed, 1):
        checksums = await way.remote.run(copies.pop().result)
        copies += [way.beside.submit(following.copy_in) for following in way.placed[number : number + 1]]
        await one.part.send(one.places(checksums))
        way.left.popleft()


async def _read(way: _Way) -> None:
    copies: deque[Future[None]] = deque()
    for one in way.placed:
        response = await one.part.send(one.places())
        await _arrived(way, copies)
        copies.append(way.beside.submit(one.copy_out, response))
    await _arrived(way, copies)


async def _arrived(way: _Way, copies: deque[Future[None]]) -> None:
    """Wait until the part that is copied has arrived."""
    if copies:
        await way.remote.run(copies.popleft().result)
        way.left.popleft()


async def _move(context: Context, left: deque[KVPart], move: Callable[[_Way], Awaitable[None]]) -> None:
    """Move all parts. One that does not travel through the region goes in messages, and those after it are tried
    again."""
    while left:
        if left[0].can_travel(context):
            await _through_region(context, left, move)
        if left:
            await left[0].send(None)
            left.popleft()


async def _through_region(context: Context, left: deque[KVPart], move: Callable[[_Way], Awaitable[None]]) -> None:
    """Move the first parts through the region, as many as there are that can travel, until a failure."""
    remote = context.remote
    async with remote.lock:
        region = remote.staging()
        if region is None:
            return
        parts = takewhile(lambda part: part.can_travel(context), left)
        halves = cycle((0, region.num_bytes // 2))
        placed = [_Placed(part, region, begin) for part, begin in zip(parts, halves, strict=False)]
        # The thread has ended before the region is given up, or another call uses it.
        with _given_up_on_failure(remote), ThreadPoolExecutor(1, thread_name_prefix="kvservice-copies") as beside:
            await move(_Way(remote, placed, left, beside))


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


def _checksum(tensor: tensor_pb2.Tensor, num_bytes: int) -> int:
    place = tensor.shared_memory
    if not place.HasField("checksum") or place.byte_size != num_bytes:
        raise InternalError(f"the daemon has transferred {place.byte_size} bytes in place of {num_bytes}")
    return int(place.checksum)


class TransferTransport(Transport):
    """See Transport. Messages carry K and V, too, when they are small, and when the engine is not there or fails."""

    name: TransportName = "transfer"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._inline = InlineTransport(context)

    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        return await self._inline.attend_prepared(call)

    async def write_prepared(self, call: WriteCall) -> None:
        context, inline = self.context, self._inline
        calls = inline.parts_of(call, context.remote.part_bytes(context.info))
        parts = [KVPart(one.key, one.value, functools.partial(inline.send_part, one)) for one in calls]
        await write(context, parts)
