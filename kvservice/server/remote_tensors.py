"""K and V of Write and Read that lie in the memory of a client on another host.

write: transfer K and V ─▶ compare their checksums ─▶ write them to the pool
read:  read K and V of the pool ─▶ transfer them ─▶ reply with their checksums

K and V lie one after the other in the daemon's memory of the region, which a call has for itself. Checksums are
computed while bytes travel: of K while V still arrives, and of both while they leave.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from kvservice import _ext
from kvservice.errors import InvalidArgumentError, TransferFailedError
from kvservice.server.codec import place_of
from kvservice.server.memory.region import Array, Place
from kvservice.server.memory.remote import RemoteMemory
from kvservice.v1 import attention_pb2, tensor_pb2
from kvservice.wire.tensors import Array as Tensor
from kvservice.wire.tensors import put_type, to_array

# Reads K and V of the pool to uint8 arrays, and returns them with their shapes.
Read: TypeAlias = "Callable[[tuple[Array, Array]], Awaitable[tuple[Tensor, Tensor]]]"

_ONE_BLOCK = bytes(8)


def checksum_of(data: Array) -> int:
    """Return the checksum of uint8 `[num_bytes]`, of at least one byte."""
    return int.from_bytes(_ext.store_checksums(data.ctypes.data, _ONE_BLOCK, data.nbytes, 1), "little")


def source_places(request: attention_pb2.WriteRequest) -> dict[str, Place]:
    """Return the places of K and V by field. Raises InvalidArgumentError for a place without a checksum."""
    places = {"key.shared_memory": request.key.shared_memory, "value.shared_memory": request.value.shared_memory}
    for field, place in places.items():
        if not place.HasField("checksum"):
            raise InvalidArgumentError("is not set, and the region is a remote one", field=f"{field}.checksum")
    return {field: place_of(place) for field, place in places.items()}


async def pull(
    memory: RemoteMemory,
    request: attention_pb2.WriteRequest,
    places: dict[str, Place],
    arrived_damaged: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Transfer K and V to the daemon. The caller holds the memory's lock while it uses them. Raises
    TransferFailedError, after `arrived_damaged` was told how many have other checksums, and InvalidArgumentError for
    bytes that do not fit the shapes."""
    sums = await memory.run_alone(lambda: memory.pull_ranges(list(places.values()), checksum_of))
    expected = request.key.shared_memory.checksum, request.value.shared_memory.checksum
    if wrong := sum(one != other for one, other in zip(sums, expected, strict=True)):
        arrived_damaged(wrong)
        raise TransferFailedError("K and V have arrived with other checksums")
    arrived = dict(zip(places, memory.packed(list(places.values())), strict=True))
    key, value = (
        to_array(tensor, field, lambda _, place_field: arrived[place_field])
        for tensor, field in ((request.key, "key"), (request.value, "value"))
    )
    return key, value


def target_places(request: attention_pb2.ReadRequest, tensor_bytes: int) -> dict[str, Place]:
    """Return the places for K and V by field. Raises InvalidArgumentError for tensors that do not fit there."""
    places = {"key_place": request.key_place, "value_place": request.value_place}
    for field, place in places.items():
        if place.byte_size < tensor_bytes:
            raise InvalidArgumentError(
                f"{place.byte_size} bytes, the tensor takes {tensor_bytes}", field=f"{field}.byte_size"
            )
    key, value = places.values()
    if key.region == value.region and abs(key.offset - value.offset) < tensor_bytes:
        raise InvalidArgumentError(
            f"{value.offset}: V would overlap K, which takes {tensor_bytes} bytes from {key.offset} on",
            field="value_place.offset",
        )
    return {field: place_of(place) for field, place in places.items()}


async def push(
    memory: RemoteMemory, places: dict[str, Place], read: Read, tensor_bytes: int
) -> attention_pb2.ReadResponse:
    """Read K and V, and transfer them to the beginnings of their places in the client's memory. The caller holds the
    memory's lock. Raises TransferFailedError, and the errors of `read`."""
    used = [Place(place.region, place.offset, tensor_bytes) for place in places.values()]
    key, value = memory.packed(used)
    arrays = await read((key, value))
    sums = await memory.run_alone(lambda: memory.push_ranges(used, checksum_of))
    response = attention_pb2.ReadResponse()
    results = zip((response.key, response.value), arrays, used, sums, strict=True)
    for message, array, place, checksum in results:
        put_type(array, message)
        message.shared_memory.CopyFrom(
            tensor_pb2.SharedMemoryPlace(
                region=place.region, offset=place.offset, byte_size=place.byte_size, checksum=checksum
            )
        )
    return response
