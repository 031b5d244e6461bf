"""A session's regions: shared-memory objects of its client, in which tensors lie instead of in messages.

Calls and their errors are those of Triton Inference Server's shared-memory extension (its
docs/protocol/extension_shared_memory.md and src/shared_memory_manager.cc). Unlike there, a region belongs to a session,
and its name is free again as soon as it is unregistered.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvservice.config import ServeConfig
from kvservice.errors import (
    DuplicateRegionError,
    InvalidArgumentError,
    QuotaExceededError,
    RegionShrunkError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    UnknownRegionError,
)
from kvservice.server.region import Array, Place, Region, RegionTotals, check_extent, open_object, path_of

MAX_NAME_LENGTH = 256


class Target:
    """A place that an output will be put into; its region is in use."""

    def __init__(self, region: Region, place: Place, field: str) -> None:
        self._region = region
        self._place = place
        self._field = field

    def check_size(self, num_bytes: int) -> None:
        if num_bytes > self._place.byte_size:
            raise InvalidArgumentError(
                f"{self._place.byte_size} bytes, the output takes {num_bytes}", field=f"{self._field}.byte_size"
            )

    def put(self, array: Array) -> Place:
        """Returns what of the place it takes."""
        self.check_size(array.nbytes)
        with _named(f"{self._field}.byte_size"):
            self._region.write(self._place.offset, array)
        return Place(self._place.region, self._place.offset, array.nbytes)


class Regions:
    """What one session has registered."""

    def __init__(self, config: ServeConfig, totals: RegionTotals) -> None:
        self._config = config
        self._totals = totals
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open `byte_size` bytes from `offset` on of the object `key`, a name as for shm_open.

        Raises RegionsNotAllowedError, DuplicateRegionError, QuotaExceededError, RegionNotOpenedError, and
        InvalidArgumentError naming name, key, offset or byte_size.
        """
        self.check_allowed()
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise InvalidArgumentError(f"has {len(name)} characters, not 1 to {MAX_NAME_LENGTH}", field="name")
        path = path_of(key)
        if name in self._regions:
            raise DuplicateRegionError(f"shared memory region {name!r} is registered already", field="name")
        limit = self._config.max_regions
        if len(self._regions) >= limit:
            raise QuotaExceededError(f"the session has {limit} regions", field="name", limit="max_regions", value=limit)
        descriptor = open_object(path)
        try:
            check_extent(descriptor, offset, byte_size)
        except BaseException:
            os.close(descriptor)
            raise
        self._regions[name] = Region(key, offset, byte_size, descriptor, self._totals)

    def unregister(self, name: str) -> None:
        """Of an unknown name, nothing; of the empty one, all."""
        self.check_allowed()
        for one in [*self._regions] if name == "" else [name]:
            if (region := self._regions.pop(one, None)) is not None:
                region.release()

    def status(self, name: str) -> dict[str, Region]:
        """The region of that name, or for the empty one all. Raises UnknownRegionError."""
        self.check_allowed()
        return dict(self._regions) if name == "" else {name: self._get(name, "name")}

    def read(self, place: Place, field: str) -> Array:
        """A copy of what is there, uint8. `field` is the place's, for errors: UnknownRegionError, RegionShrunkError,
        InvalidArgumentError."""
        region = self._find(place, field)
        with _named(f"{field}.byte_size"):
            return region.read(place.offset, place.byte_size)

    @contextmanager
    def target(self, place: Place, field: str) -> Iterator[Target]:
        """For the time of a call. Raises as `read` does."""
        with self._find(place, field).in_use() as region:
            with _named(f"{field}.byte_size"):
                region.check_object(place.offset + place.byte_size)
            yield Target(region, place, field)

    def close(self) -> None:
        """Give up all; what a call still uses is closed after it."""
        while self._regions:
            self._regions.popitem()[1].release()

    def check_allowed(self) -> None:
        if not self._config.allow_client_shm:
            raise RegionsNotAllowedError("the daemon takes no shared-memory regions: it needs --allow-client-shm")

    def _find(self, place: Place, field: str) -> Region:
        self.check_allowed()
        region = self._get(place.region, f"{field}.region")
        if place.offset >= region.byte_size:
            raise InvalidArgumentError(
                f"{place.offset} is not below the region's {region.byte_size} bytes", field=f"{field}.offset"
            )
        if place.offset + place.byte_size > region.byte_size:
            raise InvalidArgumentError(
                f"{place.byte_size} bytes from {place.offset} on, the region has {region.byte_size}",
                field=f"{field}.byte_size",
            )
        return region

    def _get(self, name: str, field: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise UnknownRegionError(f"no shared memory region {name!r}", field=field)
        return region


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Errors of a region say which field named it."""
    try:
        yield
    except (RegionShrunkError, ResourceExhaustedError) as error:
        error.field = field
        raise
