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

    @property
    def region(self) -> SharedRegion | None:
        """The region, which `reserve` and `drop` replace."""
        return self._region

    async def reserve(self, num_bytes: int, deadline: float | None) -> None:
        """Start a call that stages `num_bytes` in total, including `ALIGNMENT` bytes of padding for each tensor. The
        daemon is done with the previous call, or `drop` was called."""
        self._used = 0
        region = self._region
        if region is None or region.num_bytes < num_bytes or not self._regions.has(region):
            self.drop()
            size = max(1 << 20, 1 << (num_bytes - 1).bit_length())
            self._region = await self._regions.create_until(deadline, size, self._device)

    def drop(self) -> None:
        """Do not use the region again. The daemon may still execute a call whose answer did not come, with the bytes
        that it then finds in the region."""
        if self._region is not None:
            self._regions.drop(self._region)
            self._region = None

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
