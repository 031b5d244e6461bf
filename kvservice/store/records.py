"""Records that outlive the daemon's process beside the index: namespaces, and what sessions have in the store.

A record is there whole or not at all. It is written after the index has reserved or leased the blocks, and removed
before the index frees them, so the blocks of a record are always those that it means.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvservice import plain_json
from kvservice.store.namespaces import NamespaceIdentity

# The number of this opening is the last id.
_LAST_OPENING = 0
_OPENING = struct.Struct("<QQ")
_LEASE = struct.Struct("<Qd")
_RESERVATION = struct.Struct("<QII")
_WRITER = struct.Struct("<qq")


class NamespaceRecord(NamedTuple):
    """A namespace, by its number."""

    identity: NamespaceIdentity
    quota_bytes: int

    def pack(self) -> bytes:
        return plain_json.dumps([asdict(self.identity), self.quota_bytes]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> NamespaceRecord:
        identity, quota_bytes = json.loads(data)
        return cls(NamespaceIdentity(**identity), quota_bytes)


class OpeningRecord(NamedTuple):
    """A namespace that a session has open, by the id that the session has for it."""

    session_id: int
    number: int

    def pack(self) -> bytes:
        return _OPENING.pack(self.session_id, self.number)

    @classmethod
    def unpack(cls, data: bytes) -> OpeningRecord:
        return cls(*_OPENING.unpack(data))


class LeaseRecord(NamedTuple):
    """A lease, by its id. `deadline` is a time of the store's clock, which does not stop between processes."""

    session_id: int
    deadline: float
    slots: bytes

    def pack(self) -> bytes:
        return _LEASE.pack(self.session_id, self.deadline) + self.slots

    @classmethod
    def unpack(cls, data: bytes) -> LeaseRecord:
        session_id, deadline = _LEASE.unpack_from(data)
        return cls(session_id, deadline, data[_LEASE.size :])


class ReservationRecord(NamedTuple):
    """A reservation, by its id. Without a session (0) it is in quarantine, until `writers` have ended."""

    session_id: int
    number: int
    writers: tuple[int, ...]
    slots: bytes

    def pack(self) -> bytes:
        head = _RESERVATION.pack(self.session_id, self.number, len(self.writers))
        return head + struct.pack(f"<{len(self.writers)}Q", *self.writers) + self.slots

    @classmethod
    def unpack(cls, data: bytes) -> ReservationRecord:
        session_id, number, num_writers = _RESERVATION.unpack_from(data)
        end = _RESERVATION.size + 8 * num_writers
        return cls(session_id, number, struct.unpack(f"<{num_writers}Q", data[_RESERVATION.size : end]), data[end:])


class WriterRecord(NamedTuple):
    """A process that can write to memory, by its name for the quarantine. `start` is its start time in ticks since the
    boot of the host: with it the pid names one process."""

    pid: int
    start: int

    def pack(self) -> bytes:
        return _WRITER.pack(self.pid, self.start)

    @classmethod
    def unpack(cls, data: bytes) -> WriterRecord:
        return cls(*_WRITER.unpack(data))


class NameList(NamedTuple):
    """The names of the writers of a session, by its id."""

    names: frozenset[int]

    def pack(self) -> bytes:
        return struct.pack(f"<{len(self.names)}Q", *sorted(self.names))

    @classmethod
    def unpack(cls, data: bytes) -> NameList:
        return cls(frozenset(struct.unpack(f"<{len(data) // 8}Q", data)))


class Record(Protocol):
    def pack(self) -> bytes: ...


R = TypeVar("R", bound=Record)


class Records(Generic[R]):
    """The records of one kind, by id."""

    def __init__(self, values: MutableMapping[int, bytes], unpack: Callable[[bytes], R]) -> None:
        self._values, self._unpack = values, unpack

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, key: int, record: R) -> None:
        self._values[key] = record.pack()

    def discard(self, key: int) -> None:
        """Remove a record, if it is there."""
        if key in self._values:
            del self._values[key]

    def items(self) -> list[tuple[int, R]]:
        """Return all ids and records. A later change does not change the list."""
        return [(key, self._unpack(data)) for key, data in self._values.items()]


@dataclass(frozen=True)
class StoreSections:
    """The dicts that hold the records. They outlive the process, or are ordinary ones."""

    namespaces: MutableMapping[int, bytes] = field(default_factory=dict)
    openings: MutableMapping[int, bytes] = field(default_factory=dict)
    leases: MutableMapping[int, bytes] = field(default_factory=dict)
    reservations: MutableMapping[int, bytes] = field(default_factory=dict)
    writers: MutableMapping[int, bytes] = field(default_factory=dict)
    session_writers: MutableMapping[int, bytes] = field(default_factory=dict)


class StoreRecords:
    """All records of the store."""

    def __init__(self, sections: StoreSections | None = None) -> None:
        """Without sections, the records end with the process."""
        sections = sections or StoreSections()
        self.namespaces = Records(sections.namespaces, NamespaceRecord.unpack)
        self.openings = Records(sections.openings, OpeningRecord.unpack)
        self.leases = Records(sections.leases, LeaseRecord.unpack)
        self.reservations = Records(sections.reservations, ReservationRecord.unpack)
        self.writers = Records(sections.writers, WriterRecord.unpack)
        self.session_writers = Records(sections.session_writers, NameList.unpack)
        self._openings = sections.openings

    def new_opening(self, session_id: int, number: int) -> int:
        """Record that a session opens a namespace. Returns an id that no opening had, in any process."""
        last = self._openings.get(_LAST_OPENING)
        namespace_id = (0 if last is None else OpeningRecord.unpack(last).number) + 1
        self.openings[_LAST_OPENING] = OpeningRecord(0, namespace_id)
        self.openings[namespace_id] = OpeningRecord(session_id, number)
        return namespace_id
