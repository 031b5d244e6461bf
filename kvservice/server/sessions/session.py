"""A session of the daemon, and what of it survives the daemon's process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Final

from kvservice import plain_json
from kvservice.auth import Identity
from kvservice.blocks import DiskSequence, SessionNamespace
from kvservice.blocks.plans import ArrayMemory
from kvservice.config import ServeConfig
from kvservice.errors import KVServiceError, ResourceExhaustedError, SessionBusyError
from kvservice.server.memory.host import SharedWithClient
from kvservice.server.memory.regions import Regions
from kvservice.server.sessions.replies import KeptReplies, Replies
from kvservice.server.sessions.scheduler import SessionScheduler
from kvservice.server.tenants import Tenant
from kvservice.store import SessionStore
from kvservice.telemetry.tables import SessionRow, SessionTable

# The key of the last session id among the records.
_LAST_ID: Final = -1


@dataclass(frozen=True)
class SessionRecord:
    """The values that a later process needs to resume a session, besides its row, its replies and its sequences.

    `credential` is Identity.credential. `hashed_with` is Tenant.hashed_with when the session began; records of versions
    that did not write it have an empty one. `waits_until` is the time when the session is lost if no stream attaches to
    it until then, in seconds of the machine's monotonic clock; it is None while a stream holds the session. `on_disk`
    is ServerSession.on_disk as values of JSON.
    """

    session_id: int
    token: bytes = field(repr=False)
    name: str
    tenant: str
    owner: str
    credential: bytes = field(repr=False)
    wait_s: float
    holder: int | None
    waits_until: float | None
    hashed_with: str = ""
    on_disk: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        values = asdict(self) | {"token": self.token.hex(), "credential": self.credential.hex()}
        return plain_json.dumps(values).encode()

    @staticmethod
    def from_bytes(data: bytes) -> SessionRecord:
        values = json.loads(data)
        token, credential = bytes.fromhex(values.pop("token")), bytes.fromhex(values.pop("credential"))
        return SessionRecord(token=token, credential=credential, **values)


@dataclass(frozen=True)
class SessionMemory:
    """The memory of all sessions: shared rows, replies, records by row number, and records of the processes that
    fetched the pool for writing."""

    table: SessionTable
    replies: KeptReplies
    records: MutableMapping[int, bytes]
    writers: MutableMapping[int, bytes]

    @staticmethod
    def of(
        config: ServeConfig,
        memory: ArrayMemory,
        records: MutableMapping[int, bytes],
        writers: MutableMapping[int, bytes],
    ) -> SessionMemory:
        """Raises ResourceExhaustedError."""
        try:
            table = SessionTable(config.max_sessions, config.max_labels, memory.kept)
            return SessionMemory(table, KeptReplies(config.max_sessions, memory), records, writers)
        except MemoryError as error:
            raise ResourceExhaustedError(
                f"no memory for {config.max_sessions} sessions: {error}", field="max_sessions"
            ) from None

    def new_session_id(self) -> int:
        """Return an id that no session had, in this process or an earlier one."""
        session_id = int(self.records.get(_LAST_ID, b"0")) + 1
        self.records[_LAST_ID] = b"%d" % session_id
        return session_id

    def kept_records(self) -> dict[int, SessionRecord]:
        """Return the records of an earlier process by row number."""
        return {row: SessionRecord.from_bytes(data) for row, data in self.records.items() if row != _LAST_ID}


@dataclass(eq=False)
class SaveInProgress:
    """A Detach that writes the file of a session, which then waits for `wait_s`, or a swap to the disk or back.
    `failure` is set when others may use the session's blocks."""

    wait_s: float = 0.0
    failure: KVServiceError | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass(eq=False)
class ServerSession:
    session_id: int
    token: bytes = field(repr=False)
    name: str
    tenant: str
    # The tenant as the daemon's configuration describes it now.
    tenancy: Tenant
    # Tenant.hashed_with of all sequences that the session has ever had.
    hashed_with: str
    owner: Identity
    namespace: SessionNamespace
    shared: SharedWithClient
    regions: Regions
    row: SessionRow
    # None if the daemon has no store.
    store: SessionStore | None
    replies: Replies
    wait_s: float
    # None until the client opens it.
    scheduler: SessionScheduler | None = None
    # The holder whose stream attached last, see AttachRequest; None before the first attach.
    holder: int | None = None
    # Ends the stream that holds the lease, with an error; None if no stream holds it.
    end_stream: Callable[[KVServiceError], None] | None = None
    # The timers of a session that no stream holds.
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    saving: SaveInProgress | None = None
    # The sequences that are swapped out to the disk, by id, by the names of their files.
    on_disk: dict[str, dict[int, DiskSequence]] = field(default_factory=dict)
    # See SessionRecord.
    waits_until: float | None = None
    # Whether the session leaves memory when no stream holds it, because its file has it as it is.
    asleep: bool = False

    # The ids of sequences that an Allocate in slices is about to create.
    allocated_soon: set[int] = field(default_factory=set)

    def record(self) -> SessionRecord:
        return SessionRecord(
            session_id=self.session_id,
            token=self.token,
            name=self.name,
            tenant=self.tenant,
            owner=self.owner.name,
            credential=self.owner.credential,
            wait_s=self.wait_s,
            holder=self.holder,
            waits_until=self.waits_until,
            hashed_with=self.hashed_with,
            on_disk={
                name: {str(sequence_id): list(one) for sequence_id, one in sequences.items()}
                for name, sequences in self.on_disk.items()
            },
        )

    def recall(self, on_disk: dict[str, dict[str, list[int]]]) -> dict[int, DiskSequence]:
        """Remember which files have which sequences, from a record. Returns the sequences for the namespace. Those with
        a row are not on the disk any more."""
        recalled: dict[int, DiskSequence] = {}
        for name, sequences in on_disk.items():
            found = {int(number): DiskSequence(*one) for number, one in sequences.items()}
            self.on_disk[name] = {number: one for number, one in found.items() if number not in self.namespace.rows}
            recalled.update(self.on_disk[name])
        return recalled

    def begin_call(self) -> None:
        """Begin a call that may change the session, so that its file does not have it as it is any more. Raises
        SessionBusyError."""
        if self.saving is not None:
            raise SessionBusyError("the session is being saved by Detach")
        self.asleep = False

    @property
    def longest_wait_s(self) -> float:
        """How long the session waits for a stream, now or after the Detach in progress."""
        return self.wait_s if self.saving is None else max(self.wait_s, self.saving.wait_s)

    def end_saving(self, error: KVServiceError) -> None:
        """Let a Detach in progress fail, because others may use the session's blocks from now on."""
        if self.saving is not None:
            self.saving.failure, self.saving = error, None

    def unshare(self, *, writers_done: bool = False) -> None:
        """Close what is of no use without the session's client: the lane, mappings, regions, and its namespaces, leases
        and reservations in the store. `writers_done`: the client has promised that it writes no more; else what it may
        still write, in the pool and in the store, waits for its end."""
        self.shared.close(writers_done=writers_done)
        self.regions.close()
        if self.store is not None:
            self.store.close(writers_done=writers_done)
