"""Small values by section and key in one memory file, which a process can take over from one that was killed.

The file is a log of records in one of two ranges. A record counts from the moment when the end of the log is stored,
which is one store of eight bytes. A full log is compacted: its live records are written to the other range, and one
store makes that range the current one. The kernel keeps the stores of a killed process in program order, so there is
always a whole log.

    page 0      magic, number of the current range, and offset, capacity and end of each range: uint64 each
    range       records
    record      int64 key, uint32 length or DELETED or SAME, uint32 section, the value, padding to eight bytes

After SAME stands, in place of the value, the int64 key of a value of the section that is the same at that moment: long
values are written once, and kept once. The log always has room for the deletion of each value, so that whoever gives
memory back needs none.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterator, MutableMapping
from enum import IntEnum
from typing import Final

import numpy as np

from kvservice.errors import ResourceExhaustedError
from kvservice.pool.sealed import available_bytes


class KeptStateError(Exception):
    """State of an earlier process that cannot be taken over."""


# ---- numbers of the sections of the kept table
#
# A number is never used again for other values.


class Section(IntEnum):
    """The sections, each with its content and its keys."""

    SESSIONS = 1
    """Sessions by their row number."""
    LOST_SEQUENCES = 2
    """Sequences that did not survive a restart, by namespace number."""
    EXTRA_KEYS = 3
    """Extra keys of block hashes by row."""
    PINS = 4
    STEPS = 5
    """Live steps at the end of a process that ended in order."""
    STORE_NAMESPACES = 6
    STORE_LEASES = 7
    STORE_RESERVATIONS = 8
    FACTS = 9
    REPLIES = 10
    """Geometry of the reply memory by session."""
    RESTARTS = 11
    FILES = 12
    """Names, sizes and arrays of the kept files."""
    STORE_OPENINGS = 13
    """Namespaces of the block store that sessions have open, by the id that the session has for them."""
    STORE_WRITERS = 14
    """Processes that can write to the memory of the block store."""
    STORE_SESSION_WRITERS = 15
    """The names of such processes by session."""
    POOL_WRITERS = 16
    """Processes that can write to the memory of the pool."""
    SESSION_WRITERS = 17
    """The names of such processes by namespace number."""
    QUARANTINE = 18
    """Blocks of the pool that wait for the end of such processes."""


# ---- the table


_MAGIC: Final = int.from_bytes(b"KVTABLE1", "little")
_RECORD: Final = struct.Struct("=qII")
_DELETED: Final = 0xFFFFFFFF
_SAME: Final = 0xFFFFFFFE
_SOURCE: Final = struct.Struct("=q")
# Most bytes that a value takes besides its own: of its record, of the padding, and of the record of its end.
_MOST_BESIDES: Final = 2 * _RECORD.size + 8
# Values from this length on are written once.
_SHARED_BYTES: Final = 64
# Words of page 0.
_MAGIC_AT, _CURRENT_AT, _RANGES_AT, _NUM_WORDS = 0, 1, 2, 8
_OFFSET, _CAPACITY, _END = 0, 1, 2
MIN_CAPACITY: Final = 64 << 10
# A range that is not the current one keeps at most so much memory.
_SPARE_BYTES: Final = 256 << 10
MAX_VALUE_BYTES: Final = 16 << 20
MAX_FILE_BYTES: Final = 4 << 30


class KeptTable:
    """The values of all sections, with a copy of each in this process's memory. Used by one thread."""

    def __init__(self, fd: int | None = None) -> None:
        """Create a table, or take over the one in the file `fd`, which the table then owns. Raises KeptStateError if
        the file is not a whole table."""
        self._values: dict[int, dict[int, bytes]] = {}
        self._num_values = 0
        # The key of one of the values that are the same, by section and value.
        self._sources: dict[int, dict[bytes, int]] = {}
        self.fd = os.memfd_create("kvservice-table", os.MFD_CLOEXEC) if fd is None else fd
        self.close = weakref.finalize(self, os.close, self.fd)
        if fd is None:
            self._create()
        else:
            self._load()

    def section(self, number: int) -> KeptDict:
        """Return the values of a section by key."""
        return KeptDict(self, number, self._values.setdefault(number, {}))

    def reserve(self, num_bytes: int, num_values: int) -> None:
        """Make room for so many values with so many bytes together, so that to put them does not fail. Raises
        ResourceExhaustedError."""
        self._require(num_bytes + num_values * _MOST_BESIDES)

    def put(self, section: int, key: int, value: bytes) -> None:
        """Record a value. Raises ResourceExhaustedError, and changes nothing, if it is too long or memory is short."""
        if len(value) > MAX_VALUE_BYTES:
            raise ResourceExhaustedError(f"a value of {len(value)} bytes is longer than {MAX_VALUE_BYTES}")
        values, sources = self._values[section], self._sources.setdefault(section, {})
        source = sources.get(value) if len(value) >= _SHARED_BYTES else None
        if source is not None and source != key:
            value = values[source]
            record = _RECORD.pack(key, _SAME, section) + _SOURCE.pack(source)
        else:
            record = _RECORD.pack(key, len(value), section) + value + bytes(-len(value) % 8)
        self._require(len(record))
        if source is not None and source != key and sources.get(value) != source:  # the log was compacted
            record = _RECORD.pack(key, _SAME, section) + _SOURCE.pack(sources[value])
        self._append(record)
        self._forget_source(section, key)
        self._num_values += key not in values
        values[key] = value
        if len(value) >= _SHARED_BYTES:
            sources.setdefault(value, key)

    def delete(self, section: int, key: int) -> None:
        """Record the end of a value, for which there is always room. Raises KeyError."""
        values = self._values[section]
        if key not in values:
            raise KeyError(key)
        if self._end + _RECORD.size > self._capacity:  # of a version that did not leave this room
            self._require(_RECORD.size)
        self._append(_RECORD.pack(key, _DELETED, section))
        self._forget_source(section, key)
        self._num_values -= 1
        del values[key]

    def _forget_source(self, section: int, key: int) -> None:
        """Name the value of this key, if there is one, no longer as the source of others."""
        value = self._values[section].get(key, b"")
        if len(value) >= _SHARED_BYTES and self._sources[section].get(value) == key:
            del self._sources[section][value]

    def _require(self, num_bytes: int) -> None:
        """Have room for so many bytes of records of values, and for the ends of all values."""
        if self._end + num_bytes + (self._num_values + 1) * _RECORD.size > self._capacity:
            try:
                self._compact(num_bytes)
            except MemoryError as error:
                raise ResourceExhaustedError(str(error)) from None

    def _append(self, record: bytes) -> None:
        self._write(self._offset + self._end, record)
        self._end += len(record)
        self._store(_RANGES_AT + 3 * self._current + _END, self._end)

    def _create(self) -> None:
        self._resize(mmap.PAGESIZE + MIN_CAPACITY)
        self._current, self._offset, self._capacity, self._end = 0, mmap.PAGESIZE, MIN_CAPACITY, 0
        self._words[_RANGES_AT : _RANGES_AT + 3] = self._offset, self._capacity, 0
        self._store(_MAGIC_AT, _MAGIC)

    def _load(self) -> None:
        num_bytes = os.fstat(self.fd).st_size
        if num_bytes < mmap.PAGESIZE:
            raise KeptStateError(f"the table has {num_bytes} bytes")
        self._map(num_bytes)
        if int(self._words[_MAGIC_AT]) != _MAGIC:
            raise KeptStateError("the table has another format")
        self._current = int(self._words[_CURRENT_AT])
        if self._current > 1:
            raise KeptStateError("the table's current range is unknown")
        first = _RANGES_AT + 3 * self._current
        self._offset, self._capacity, self._end = map(int, self._words[first : first + 3])
        if self._offset < mmap.PAGESIZE or self._offset + self._capacity > num_bytes or self._end > self._capacity:
            raise KeptStateError("the table's range is not in its file")
        self._replay(self._memory[self._offset : self._offset + self._end])

    def _replay(self, log: bytes) -> None:
        at = 0
        while at < len(log):
            if at + _RECORD.size > len(log):
                raise KeptStateError("the table's last record is cut")
            key, length, section = _RECORD.unpack_from(log, at)
            at += _RECORD.size
            values = self._values.setdefault(section, {})
            if length == _DELETED:
                values.pop(key, None)
                continue
            size = _SOURCE.size if length == _SAME else length
            if at + size > len(log):
                raise KeptStateError("the table's last record is cut")
            if length == _SAME:
                (source,) = _SOURCE.unpack_from(log, at)
                if source not in values:
                    raise KeptStateError("a value of the table is not there")
                values[key] = values[source]
            else:
                values[key] = log[at : at + length]
            at += -(-size // 8) * 8
        self._num_values = sum(map(len, self._values.values()))
        for section, values in self._values.items():
            self._sources[section] = _sources(values)

    def _compact(self, wanted: int) -> None:
        """Write the live records to the other range, with room for as many again and for `wanted` bytes."""
        records: list[bytes] = []
        all_sources: dict[int, dict[bytes, int]] = {}
        for section, values in self._values.items():
            sources = all_sources[section] = _sources(values)
            for key, value in values.items():
                source = sources.get(value, key)
                if source != key:
                    records.append(_RECORD.pack(key, _SAME, section) + _SOURCE.pack(source))
                else:
                    records += (_RECORD.pack(key, len(value), section), value, bytes(-len(value) % 8))
        log = b"".join(records)
        capacity = max(MIN_CAPACITY, _page_aligned(2 * len(log) + 2 * wanted))
        old_offset, old_capacity = self._offset, self._capacity
        before = old_offset - mmap.PAGESIZE
        offset = mmap.PAGESIZE if capacity <= before else old_offset + old_capacity
        if offset + capacity > len(self._memory):
            self._resize(offset + capacity)
        self._write(offset, log)
        other = 1 - self._current
        first = _RANGES_AT + 3 * other
        self._words[first : first + 3] = offset, capacity, len(log)
        self._store(_CURRENT_AT, other)
        self._current, self._offset, self._capacity, self._end = other, offset, capacity, len(log)
        for section, sources in all_sources.items():
            self._sources.setdefault(section, {}).clear()
            self._sources[section].update(sources)
        if old_capacity > _SPARE_BYTES:  # a small range is soon used again
            self._memory.madvise(mmap.MADV_REMOVE, old_offset, old_capacity)

    def _resize(self, num_bytes: int) -> None:
        if num_bytes > MAX_FILE_BYTES or num_bytes > available_bytes():
            raise MemoryError(f"the table of kept values takes {num_bytes} bytes")
        os.ftruncate(self.fd, num_bytes)
        self._map(num_bytes)

    def _map(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(self.fd, num_bytes)
        self._words = np.frombuffer(self._memory, np.uint64, _NUM_WORDS)

    def _write(self, offset: int, data: bytes) -> None:
        """Store bytes that do not count yet."""
        self._memory[offset : offset + len(data)] = data

    def _store(self, word: int, value: int) -> None:
        """Store a word of page 0 in one piece."""
        self._words[word] = value


class KeptDict(MutableMapping[int, bytes]):
    """The values of one section. A change is in the file when the operation returns."""

    def __init__(self, table: KeptTable, number: int, values: dict[int, bytes]) -> None:
        self._table = table
        self._number = number
        self._values = values

    def __getitem__(self, key: int) -> bytes:
        return self._values[key]

    def __setitem__(self, key: int, value: bytes) -> None:
        """Raises ResourceExhaustedError if the value is longer than MAX_VALUE_BYTES, or if memory is short. Nothing is
        changed then."""
        self._table.put(self._number, key, value)

    def __delitem__(self, key: int) -> None:
        self._table.delete(self._number, key)

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _sources(values: dict[int, bytes]) -> dict[bytes, int]:
    """Return the first key of each of the long values."""
    sources: dict[bytes, int] = {}
    for key, value in values.items():
        if len(value) >= _SHARED_BYTES:
            sources.setdefault(value, key)
    return sources


def _page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
