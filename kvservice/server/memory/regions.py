"""The regions of a session: memory shared with its client, which carries tensors in place of messages."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kvservice.blocks import Slices
from kvservice.config import ServeConfig
from kvservice.errors import (
    DuplicateRegionError,
    FailedPreconditionError,
    InvalidArgumentError,
    QuotaExceededError,
    RegionShrunkError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    UnknownRegionError,
)
from kvservice.server.loop import in_slices
from kvservice.server.memory.budget import BudgetedMemory, unmap
from kvservice.server.memory.host import SharedWithClient
from kvservice.server.memory.region import Array, Place, Region, RegionTotals, ShmObject
from kvservice.server.memory.remote import RemoteMemory

MAX_NAME_LENGTH = 256
# The addresses of processes end below.
MAX_ADDRESS = 1 << 57


class Target:
    """The place in a region where an output is written. The region stays in use while the target exists."""

    def __init__(self, region: Region, place: Place, field: str) -> None:
        self._region = region
        self._place = place
        self._field = field

    def check_size(self, num_bytes: int) -> None:
        if num_bytes > self._place.byte_size:
            raise InvalidArgumentError(
                f"{self._place.byte_size} bytes, the output takes {num_bytes}", field=f"{self._field}.byte_size"
            )

    def view_for(self, query: Array, *others: Array) -> Array | None:
        """Return the place as an array with the shape and dtype of `query`, to write the result in place.

        Returns None if that is not possible: the memory has no view, is not aligned, or overlaps one of the inputs.
        """
        view = self._region.memory.view(self._place.offset, query.nbytes)
        if view is None:
            return None
        array: Array = view.view(query.dtype).reshape(query.shape)
        shared = any(np.may_share_memory(array, other) for other in (query, *others))
        return array if array.flags.aligned and not shared else None

    def put(self, array: Array) -> Place:
        """Write the array to the place and return the range that it uses. An array that is a view of the place is not
        copied."""
        self.check_size(array.nbytes)
        view = self._region.memory.view(self._place.offset, array.nbytes)
        if view is None or array.ctypes.data != view.ctypes.data:
            with _named(f"{self._field}.byte_size"):
                self._region.write(self._place.offset, array)
        return Place(self._place.region, self._place.offset, array.nbytes)


class Regions:
    """The regions of one session by name: in host memory, in GPU memory, and remote ones."""

    def __init__(
        self, config: ServeConfig, totals: RegionTotals, shared: SharedWithClient, check_more: Callable[[], None]
    ) -> None:
        """`check_more` raises QuotaExceededError if the session's tenant may have no more regions."""
        self._check_more = check_more
        self._config = config
        self._totals = totals
        self._shared = shared
        self._regions: dict[str, Region] = {}
        # The bytes of regions that are being created, and the number of calls of `close`.
        self._making_bytes = self._num_closings = 0
        # The remote regions that are being created: each event is set at the end.
        self._making: dict[str, asyncio.Event] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int, token: bytes = b"") -> None:
        """Register `byte_size` bytes at `offset` of the shared memory object `key`, a name for shm_open. The object is
        opened with the permissions of the user who received `token` from the fd-passing socket.

        Raises RegionsNotAllowedError, DuplicateRegionError, QuotaExceededError, RegionNotOpenedError, and
        InvalidArgumentError naming name, key, offset, byte_size or handover_token.
        """
        self._check_new(name)
        memory = ShmObject(key, offset, byte_size, self._shared.user.opening_peer(token), self._shared.budget)
        self._regions[name] = Region(memory, byte_size, self._totals, key=key, offset=offset)

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> int:
        """Register the first `byte_size` bytes of an allocation on the daemon's GPU. Returns its number for lanes.

        Raises RegionsNotAllowedError, DuplicateRegionError, QuotaExceededError, RegionNotOpenedError, and
        InvalidArgumentError naming name, raw_handle, device_id or byte_size.
        """
        self._check_new(name)
        memory = self._shared.open_cuda_region(raw_handle, device_id, byte_size)
        self._regions[name] = Region(memory, byte_size, self._totals, device_id=device_id)
        return memory.number

    def create_in_slices(self, name: str, byte_size: int) -> Slices[tuple[bytes, int]]:
        """Create a region of at least `byte_size` bytes. Returns its handover token and its number for lanes.

        Raises RegionsNotAllowedError, DuplicateRegionError, QuotaExceededError, ResourceExhaustedError,
        InvalidArgumentError naming name or byte_size, and FailedPreconditionError if the regions of the session are
        closed in the meantime.
        """
        self._shared.user.check_may_share()
        self._check_name(name)
        byte_size = self._rounded(byte_size)
        memory = yield from self._make(name, byte_size)
        self._regions[name] = Region(memory, byte_size, self._totals)
        return memory.token, memory.number

    async def create_remote(self, name: str, byte_size: int, reach: int, ports: Sequence[int], address: int) -> None:
        """Create a region for `reach` bytes at `address` in engines at these ports of the client of this call, on
        another host. At least `byte_size` bytes of the daemon carry them. Must not be cancelled.

        Raises TransferOffError, TransferFailedError, FailedPreconditionError naming ports, and the errors of
        `create_in_slices` except RegionsNotAllowedError.
        """
        num_closings = self._num_closings
        while (other := self._making.get(name)) is not None:
            await other.wait()
            self._check_open_since(num_closings)
        self._making[name] = asyncio.Event()
        try:
            await self._create_remote(name, byte_size, reach, ports, address, num_closings)
        finally:
            self._making.pop(name).set()

    async def _create_remote(
        self, name: str, byte_size: int, reach: int, ports: Sequence[int], address: int, num_closings: int
    ) -> None:
        if self.is_remote(name):
            return  # the call is repeated
        if not ports or not all(0 < port < 65536 for port in ports):
            raise InvalidArgumentError(f"{list(ports)} are not ports", field="ports")
        if not 0 < reach <= MAX_ADDRESS or not 0 < address <= MAX_ADDRESS - reach:
            raise InvalidArgumentError(f"{reach} bytes at {address} are not memory", field="remote_bytes")
        transfers = self._shared.transfers
        transfers.check()
        self._check_name(name)
        byte_size = self._rounded(byte_size)
        self._making_bytes += byte_size
        try:
            made = in_slices(self._shared.make_memory("kvservice-remote", byte_size, "byte_size"))
            memory = await made if isinstance(made, asyncio.Task) else made
            try:
                self._check_open_since(num_closings)
                remote = await transfers.open(memory, ports, address)
            except BaseException:
                memory.close()
                raise
        finally:
            self._making_bytes -= byte_size
        try:
            self._check_open_since(num_closings)
            self._check_name(name)
        except BaseException:
            remote.close()
            raise
        self._regions[name] = Region(remote, byte_size, self._totals, reach=reach)

    def _rounded(self, byte_size: int) -> int:
        """Return the size of a region to be made, in whole pages. Raises InvalidArgumentError, QuotaExceededError."""
        if byte_size == 0:
            raise InvalidArgumentError("is 0", field="byte_size")
        byte_size = -(-byte_size // mmap.PAGESIZE) * mmap.PAGESIZE
        limit = self._config.max_region_mib
        made = self._making_bytes + sum(
            region.byte_size
            for region in self._regions.values()
            if isinstance(region.memory, MadeMemory | RemoteMemory)
        )
        if made + byte_size > limit << 20:
            raise QuotaExceededError(
                f"{byte_size} bytes, the session has {made} of {limit} MiB", field="byte_size", limit="max_region_mib",
                value=limit,
            )  # fmt: skip
        return byte_size

    def _make(self, name: str, byte_size: int) -> Slices[MadeMemory]:
        num_closings = self._num_closings
        self._making_bytes += byte_size
        try:
            memory = yield from self._shared.make_memory("kvservice-region", byte_size, "byte_size")
        finally:
            self._making_bytes -= byte_size
        try:
            self._check_open_since(num_closings)
            self._check_new(name)
            return MadeMemory(memory, self._shared)
        except BaseException:
            memory.close()
            raise

    def _check_open_since(self, num_closings: int) -> None:
        if self._num_closings != num_closings:
            raise FailedPreconditionError("the session's regions were closed meanwhile")

    def _check_new(self, name: str) -> None:
        self._shared.user.check_may_share()
        self._check_name(name)

    def _check_name(self, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise InvalidArgumentError(f"has {len(name)} characters, not 1 to {MAX_NAME_LENGTH}", field="name")
        if name in self._regions:
            raise DuplicateRegionError(f"shared memory region {name!r} is registered already", field="name")
        limit = self._config.max_regions
        if len(self._regions) >= limit:
            raise QuotaExceededError(f"the session has {limit} regions", field="name", limit="max_regions", value=limit)
        self._check_more()

    def unregister(self, name: str) -> None:
        """Remove a region of this host, or all of them if `name` is empty. Other names are ignored."""
        of_host = self.of_host()
        for one in of_host if name == "" else of_host.keys() & {name}:
            _give_up(self._regions.pop(one))

    def remove_remote(self, name: str) -> None:
        """Remove a remote region. Other names are ignored."""
        if self.is_remote(name):
            _give_up(self._regions.pop(name))

    def of_host(self) -> dict[str, Region]:
        """Return the regions that are not remote, by name, in the order in which they were made."""
        self.check_allowed()
        return {name: region for name, region in self._regions.items() if not region.is_remote}

    def read(self, place: Place, field: str) -> Array:
        """Return the bytes at a place, uint8 `[byte_size]`. Errors name `field`: UnknownRegionError, RegionShrunkError,
        InvalidArgumentError."""
        region = self._find(place, field)
        with _named(f"{field}.byte_size"):
            return region.memory.read(place.offset, place.byte_size)

    @contextmanager
    def target(self, place: Place, field: str) -> Iterator[Target]:
        """Yield the target of an output for the duration of a call. Raises the errors of `read`."""
        with self._find(place, field).in_use() as region:
            with _named(f"{field}.byte_size"):
                region.memory.check(place.offset + place.byte_size)
            yield Target(region, place, field)

    @contextmanager
    def host_region(self, name: str, field: str) -> Iterator[Region]:
        """Yield a region of host memory, which stays open meanwhile. Errors name `field`: RegionsNotAllowedError,
        UnknownRegionError, InvalidArgumentError for memory of a GPU."""
        self._check_named()
        region = self._get(name, field)
        if region.device_id is not None:
            raise InvalidArgumentError("is memory of a GPU, and this call needs host memory", field=field)
        with region.in_use():
            yield region

    @contextmanager
    def remote(self, places: Mapping[str, Place], used_bytes: int | None = None) -> Iterator[RemoteMemory]:
        """Yield the memory of the remote region that has these places, by field. It stays open meanwhile. The call
        uses `used_bytes` of each place, or all. Errors name the field and its part: RegionsNotAllowedError,
        UnknownRegionError, InvalidArgumentError."""
        self._check_named()
        region: Region | None = None
        total = 0
        for field, place in places.items():
            found = self._get(place.region, f"{field}.region")
            if not found.is_remote or found is not (region or found):
                raise InvalidArgumentError("K and V are not in one remote region", field=f"{field}.region")
            region = found
            if not place.byte_size:
                raise InvalidArgumentError("is 0", field=f"{field}.byte_size")
            _check_inside(place, region.reach, field)
            total += place.byte_size if used_bytes is None else used_bytes
            if total > region.byte_size:
                raise InvalidArgumentError(
                    f"{total} bytes in all, the region carries {region.byte_size}", field=f"{field}.byte_size"
                )
        assert region is not None, "there is a place"
        memory = region.memory
        assert isinstance(memory, RemoteMemory), "only such regions are remote"
        with region.in_use():
            yield memory

    def is_remote(self, name: str) -> bool:
        """Return whether there is a remote region of this name."""
        return (region := self._regions.get(name)) is not None and region.is_remote

    def close(self) -> None:
        """Remove all regions. A region that a call uses is closed when the call ends, which fails on a remote one."""
        self._num_closings += 1
        while self._regions:
            _give_up(self._regions.popitem()[1])

    def check_allowed(self) -> None:
        if not self._config.shares_memory:
            raise RegionsNotAllowedError(f"the daemon runs with --allow-client-shm {self._config.allow_client_shm}")

    def are_remote(self, names: Iterable[str]) -> bool:
        """Return whether a client on another host may name these regions: they are for such clients, or are unknown."""
        if not self._config.transfer_address:
            return False
        return all(region.is_remote for name in names if (region := self._regions.get(name)) is not None)

    def _check_named(self) -> None:
        """Raise RegionsNotAllowedError if no session can have a region."""
        if not self._config.transfer_address:
            self.check_allowed()

    def _find(self, place: Place, field: str) -> Region:
        self._check_named()
        region = self._get(place.region, f"{field}.region")
        if region.is_remote:
            raise InvalidArgumentError("is a remote region, which this call does not use", field=f"{field}.region")
        _check_inside(place, region.byte_size, field)
        return region

    def _get(self, name: str, field: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise UnknownRegionError(f"no shared memory region {name!r}", field=field)
        return region


def _give_up(region: Region) -> None:
    """Drop the session's reference. The engine of a remote region ends at once, whoever waits for it."""
    if isinstance(region.memory, RemoteMemory):
        region.memory.interrupt()
    region.release()


def _check_inside(place: Place, num_bytes: int, field: str) -> None:
    """Raise InvalidArgumentError unless a place is inside a region of so many bytes."""
    if place.offset >= num_bytes:
        raise InvalidArgumentError(
            f"{place.offset} is not below the region's {num_bytes} bytes", field=f"{field}.offset"
        )
    if place.offset + place.byte_size > num_bytes:
        raise InvalidArgumentError(
            f"{place.byte_size} bytes from {place.offset} on, the region has {num_bytes}", field=f"{field}.byte_size"
        )


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Set the field of errors about a region's memory."""
    try:
        yield
    except (RegionShrunkError, ResourceExhaustedError) as error:
        error.field = field
        raise


class MadeMemory:
    """Implements `Memory` with memory that the daemon allocated. No client can shrink it, so calls access it in place.

    `number` identifies the region in lane entries. `token` is the handover token of its file
    descriptor."""

    def __init__(self, memory: BudgetedMemory, shared: SharedWithClient) -> None:
        """Raises QuotaExceededError and ResourceExhaustedError; the caller then still owns the memory."""
        self._shared = shared
        self._memory = memory
        self.token = shared.hand_over(memory)
        self._bytes: Array = np.frombuffer(memory.sealed.map, np.uint8)
        self.number = shared.add_region(memory.sealed.address, memory.sealed.num_bytes)

    def check(self, end: int) -> None:
        """Do nothing: the memory cannot shrink."""

    def read(self, begin: int, num_bytes: int) -> Array:
        return self.view(begin, num_bytes)

    def write(self, begin: int, data: Array) -> None:
        self._bytes[begin : begin + len(data)] = data

    def view(self, begin: int, num_bytes: int) -> Array:
        return self._bytes[begin : begin + num_bytes]

    def close(self) -> None:
        self._shared.remove_region(self.number)
        self._shared.withdraw(self.token)
        unmap(self._memory.sealed)
        self._memory.close()
