"""Staging regions, through which transports copy tensors that do not lie in a region."""

from __future__ import annotations

import math

from kvservice.client import tensors
from kvservice.client.calls import AttentionCall
from kvservice.client.region_memory import RegionRange, SharedRegion
from kvservice.client.regions import RegionTable
from kvservice.client.tensors import Tensor

ALIGNMENT = 256


class Staging:
    """A staging region. One call uses it at a time. It grows to the size of the largest call. `device` as in
    `create_region`."""

    def __init__(self, regions: RegionTable, device: int | None = None) -> None:
        self._regions = regions
        self._device = device
        self._region: SharedRegion | None = None
        self._used = 0

    async def reserve(self, num_bytes: int) -> None:
        """Start a call that stages `num_bytes` in total, including `ALIGNMENT` bytes of padding for each tensor."""
        self._used = 0
        if self._region is not None and not self._regions.has(self._region):
            self._region = None  # the session's regions were removed
        if self._region is None or self._region.num_bytes < num_bytes:
            if self._region is not None:
                await self._regions.unregister(self._region)
            self._region = None
            size = max(1 << 20, 1 << (num_bytes - 1).bit_length())
            self._region = await self._regions.create(size, device=self._device)

    def place(self, shape: tuple[int, ...], dtype: str) -> tuple[Tensor, RegionRange]:
        """Reserve room for an array. Returns the array and its place."""
        assert self._region is not None, "room was reserved"
        array = self._region.array(shape, dtype, self._used)
        place = RegionRange(self._region, self._used, array.nbytes)
        self._used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return array, place

    def put(self, tensor: Tensor) -> tuple[Tensor, RegionRange]:
        """Copy a tensor to the region. Returns the copy and its place."""
        copy, place = self.place(tuple(tensor.shape), tensors.dtype_name(tensor))
        tensors.copy(copy, tensor)
        return copy, place


def staging_bytes(call: AttentionCall) -> int:
    """Return the size in bytes that a call needs in the staging region if none of its tensors is in a region."""
    sizes: list[int] = [call.query.nbytes] * 2 + [
        call.key.nbytes,
        call.value.nbytes,
        4 * math.prod(call.lse_shape),
    ]
    return sum(sizes) + ALIGNMENT * len(sizes)
