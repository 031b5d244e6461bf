"""Sessions. A session is a client's lease on its sequences.

open ── attach ──▶ attached ── its stream ends ──▶ waiting ── attach in time ──▶ attached
 │                                                    ├── grace passed ──▶ its regions and its lane are closed
 └── ATTACH_S or grace passed ──▶ closed              └── grace or detach_ttl passed ──▶ closed: everything freed

A session that Detach has saved leaves memory with the end of its stream, and comes back with the next one: see
saved.py. All open sessions survive a restart of the daemon. They then wait for their streams, as after the end of a
stream.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from kvservice.auth import CALLER, UNNAMED, Identity
from kvservice.blocks import BlockManager, Recovery, SessionNamespace, Slices, TenantQuota
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    PermissionDeniedError,
    QuotaExceededError,
    SessionTakenError,
    UnauthenticatedError,
    UnknownSessionError,
)
from kvservice.logs import LogBudget
from kvservice.saved import SessionValues
from kvservice.server.loop import Clock, SystemClock, in_slices
from kvservice.server.memory.budget import Budget
from kvservice.server.memory.fd_passing import FdServer, Peer, Trust, Writers
from kvservice.server.memory.host import Lanes, PoolMappings, SharedWithClient, Sharing
from kvservice.server.memory.region import RegionTotals
from kvservice.server.memory.regions import Regions
from kvservice.server.memory.remote import Transfers
from kvservice.server.sessions.replies import Replies
from kvservice.server.sessions.session import ServerSession, SessionMemory, SessionRecord
from kvservice.server.tenants import Role, Tenant, TenantRules, Tenants, chosen_tenant
from kvservice.store import BlockStore, Records, SessionStore, WriterRecord
from kvservice.telemetry.link import ShownPart
from kvservice.telemetry.tables import ATTACHED, NO_LIMIT, TENANT_LIMITS, QuotaUse, SessionRow

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
MAX_NAME_LENGTH = 64
# The minimum time in seconds that a new session waits for its first stream, even with a shorter grace time.
ATTACH_S = 5.0
# The end of a session that leaves memory and stays on the disk.
ASLEEP = "asleep"


@dataclass
class TenantUse:
    """Counts what the sessions of one tenant have together. `sessions` counts those that are still being freed, too."""

    regions: RegionTotals
    # None if the daemon has one tenant.
    quota: TenantQuota | None
    sessions: int = 0


class SessionRegistry:
    """All sessions by token. A token is a secret, so the tokens of unknown sessions, of closed ones and of another
    identity's get the same error."""

    def __init__(
        self,
        config: ServeConfig,
        manager: BlockManager,
        device: Device,
        memory: SessionMemory,
        clock: Clock | None = None,
        store: BlockStore | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        """`tenants` is None if the daemon has one tenant, whatever sessions call it."""
        self._tenants = tenants
        # This text goes to clients whose sessions this daemon does not know. It is empty if it took sessions over.
        self.began = ""
        self._clock = clock or SystemClock()
        self._config = config
        self._manager = manager
        self._device = device
        self._memory = memory
        self._store = store
        trust = Trust.of(config)
        self.fd_server = FdServer(trust.shm_uids | trust.pool_uids | trust.store_uids, self._introduce, self._clock)
        self.lanes = Lanes(len(device.lane_buckets_s) + 1, device.finished_steps)
        self.budget = Budget(config.max_shared_mib)
        self.transfers = Transfers(config, self._clock.time)
        self.writers = Writers("the pool", Records(memory.writers, WriterRecord.unpack), self._writer_ended)
        self._sharing = Sharing(
            trust, self.budget, self.fd_server, self.lanes, PoolMappings(), self._clock, self.transfers, self.writers,
            LogBudget(logger),
        )  # fmt: skip
        self._sessions: dict[bytes, ServerSession] = {}
        # Identifies this process for clients, see AttachResponse. Never 0.
        self.daemon_start = secrets.randbits(63) + 1
        self.num_opened = self.num_closed = self.num_lost = 0
        # The number of closed sessions whose sequences are still being freed.
        self._num_closing = 0
        # Sessions by token that nobody finds yet. A token is here or among the open sessions, and once.
        self._hidden: dict[bytes, ServerSession] = {}
        # Called with a session that is closed and does not come back.
        self.on_close: Callable[[ServerSession], object] = lambda _: None
        # Returns what restores the session with this token, or None if it is not on the disk.
        self.restoring: Callable[[bytes], Awaitable[None] | None] = lambda _: None
        # Returns the bytes that tenants have on the disk.
        self.disk_bytes: Callable[[], Counter[str]] = Counter
        # The number of calls with the token of another identity's session.
        self.num_foreign = 0
        self._foreign_log, self._opened_log, self._closed_log = LogBudget(logger), LogBudget(logger), LogBudget(logger)
        self._refused_log = LogBudget(logger)
        self.region_totals = RegionTotals()
        self._uses: dict[str, TenantUse] = {}
        if tenants is not None:
            tenants.set_sizes(manager.config.num_blocks, 0 if store is None else store.config.slab_capacity_bytes)
            self._set_shares(tenants.rules)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ServerSession]:
        return iter(self._sessions.values())

    def layers_in_progress(self) -> dict[int, int]:
        """Return the number of layers written in partly written steps, by the id of each attached session that has such
        steps."""
        attached = (session for session in self if session.end_stream is not None)
        counts = {session.session_id: session.namespace.layers_in_progress() for session in attached}
        return {session_id: count for session_id, count in counts.items() if count}

    def open(self, name: str, tenant: str, detachable: bool, detach_ttl_s: float, token: bytes = b"") -> ServerSession:
        """Open a session, with this token if the client has chosen one. If the session is open, this is a repeated
        request, and returns it."""
        if token and len(token) != TOKEN_BYTES:
            raise InvalidArgumentError(f"has {len(token)} bytes, not {TOKEN_BYTES}", field="session_token")
        if token in self._sessions:
            return self.get(token)
        _check_name(name, "name")
        _check_name(tenant, "tenant")
        tenant = chosen_tenant(self._tenants, tenant)
        limit = self._config.max_detach_ttl_s
        if not (math.isfinite(detach_ttl_s) and 0 <= detach_ttl_s <= limit):
            raise InvalidArgumentError(
                f"{detach_ttl_s} is not between 0 and {limit}: see max_detach_ttl_s", field="detach_ttl_s"
            )
        wait_s = (detach_ttl_s or limit) if detachable else self._config.session_grace_s
        session = self.begin(token or secrets.token_bytes(TOKEN_BYTES), name, tenant, CALLER.get(), wait_s)
        self.show(session, "opened")
        return session

    def begin(self, token: bytes, name: str, tenant: str, owner: Identity, wait_s: float) -> ServerSession:
        """Make a session that nobody finds, and that a restart ends, until `show`. `close_in_slices` ends it, too.
        Raises InvalidArgumentError if another session has the token, and QuotaExceededError."""
        if token in self._sessions or token in self._hidden:
            raise InvalidArgumentError("is that of another session", field="session_token")
        if len(self._sessions) + len(self._hidden) + self._num_closing >= self._config.max_sessions:
            value = self._config.max_sessions
            self._refused_log.write(logging.WARNING, "a session was refused: %d are open, see max_sessions", value)
            raise QuotaExceededError(f"{value} sessions are open: see max_sessions", limit="max_sessions", value=value)
        tenancy = self._tenancy(tenant)
        use = self._uses.get(tenant)
        tenancy.check("max_sessions", 0 if use is None else use.sessions)
        self._check_detached(tenancy, wait_s)
        record = SessionRecord(
            session_id=self._memory.new_session_id(),
            token=token,
            name=name,
            tenant=tenant,
            owner=owner.name,
            credential=owner.credential,
            wait_s=wait_s,
            holder=None,
            waits_until=None,
            hashed_with=tenancy.hashed_with,
        )
        row = self._memory.table.open(record.session_id, name, tenant, int(self._clock.time() * 1000))
        self._memory.replies.clear(row.number)
        session = self._make(record, row, self._manager.open_namespace(row.number + 1, row.counters))
        self.num_opened += 1
        self._hidden[token] = session
        return session

    def show(self, session: ServerSession, event: str) -> None:
        """Let clients find a session from `begin`. It waits for its first stream. `event` is for the log. Closes the
        session if its record cannot be kept."""
        wait_s = max(self._config.session_grace_s, ATTACH_S)
        assert not self.hashes_otherwise(session), "its sequences could find what is not its tenant's"
        try:
            self._save(session, self._clock.time() + wait_s)
        except BaseException as error:
            in_slices(self.close_in_slices(session, f"refused: not kept, {type(error).__name__}"))
            raise
        del self._hidden[session.token]
        self._sessions[session.token] = session
        self._lose_after(session, wait_s)
        self._opened_log.write(
            logging.INFO,
            "session %d %s (%s)%s",
            session.session_id,
            event,
            session.name or "no name",
            f" by {session.owner.name}" if session.owner.name else "",
            extra={"session_id": session.session_id},
        )

    def check_detach(self, session: ServerSession, wait_s: float) -> None:
        """Raise QuotaExceededError if the session's tenant may not have one more session that waits for so long. The
        caller begins the wait, or the Detach that ends in it, at once."""
        if session.wait_s <= self._config.session_grace_s:
            self._check_detached(session.tenancy, wait_s)

    def _check_detached(self, tenancy: Tenant, wait_s: float) -> None:
        if wait_s > self._config.session_grace_s and tenancy.quotas.max_detached_sessions is not None:
            tenancy.check("max_detached_sessions", self._num_detached()[tenancy.name])

    def _num_detached(self) -> Counter[str]:
        """Return how many sessions of each tenant wait for longer than the grace time, those included that are being
        saved or restored."""
        grace = self._config.session_grace_s
        return Counter(one.tenant for one in (*self, *self._hidden.values()) if one.longest_wait_s > grace)

    def check_disk_bytes(self, tenant: str, used: int, more: int) -> None:
        """Raise QuotaExceededError if a tenant with so many bytes on the disk may not have more."""
        self._tenancy(tenant).check("max_disk_bytes", used, more)

    def keep_for(self, session: ServerSession, wait_s: float) -> None:
        """Let a session wait for so many seconds when its stream ends, from now on if it has none."""
        session.wait_s = wait_s
        if session.end_stream is None:
            _cancel_timers(session)
            self._wait(session, wait_s)
        else:
            self._save(session, None)

    def recover(self, *, with_steps: bool) -> Recovery:
        """Resume the sessions of an earlier process, with their sequences. They wait for their streams: those that had
        one as after its end, the others as long as before, but for the grace time at least. `with_steps`: see
        BlockManager.recover."""
        self._memory.replies.recover(undone=self._manager.intents.read()[0] != 0)
        records = self._memory.kept_records()
        rows = self._memory.table.recover({row: (one.session_id, one.name, one.tenant) for row, one in records.items()})
        counters = {number + 1: row.counters for number, row in rows.items()}
        recovery = self._manager.recover(counters, with_steps=with_steps, living=self.writers.recover())
        quarantine = self._manager.quarantine
        if quarantine.num_blocks:
            pids = ", ".join(map(str, self.writers.pids(quarantine.waited_for())))
            logger.warning("%d blocks are in quarantine until process %s ends", quarantine.num_blocks, pids)
        now, grace = self._clock.time(), self._config.session_grace_s
        for number, record in records.items():
            session = self._make(record, rows[number], recovery.namespaces[number + 1])
            self._sessions[session.token] = session
            session.holder = record.holder
            self._manager.add_on_disk(session.namespace, session.recall(record.on_disk))
            if lost := session.namespace.lost & session.namespace.on_disk.keys():
                self._manager.forget_lost(session.namespace, lost)
            wait_s = record.wait_s if record.waits_until is None else max(record.waits_until - now, grace)
            self._wait(session, wait_s)
        if self._tenants is not None:
            self._set_shares(self._tenants.rules)
        return recovery

    def _set_shares(self, rules: TenantRules) -> None:
        """Give the tenants their shares of the pool and of the store."""
        self._manager.set_tenants(rules.guaranteed(), {name: one.domain for name, one in rules.tenants.items()})
        if self._store is not None:
            limits = [rules.store_limits(of) for of in ("max_store_bytes", "max_store_namespaces")]
            self._store.limit_tenants(*limits)

    def _make(self, record: SessionRecord, row: SessionRow, namespace: SessionNamespace) -> ServerSession:
        """Return a session that no stream holds."""
        tenancy = self._tenancy(record.tenant)
        if (use := self._uses.get(record.tenant)) is None:
            quota = TenantQuota(record.tenant, *_limits(tenancy)) if self._tenants else None
            use = self._uses[record.tenant] = TenantUse(RegionTotals(whole=self.region_totals), quota)
        use.sessions += 1
        if use.quota is not None:
            use.quota.namespaces.add(namespace)
            namespace.quota = use.quota

        def check_regions() -> None:
            self._tenancy(record.tenant).check("max_regions", use.regions.count, field="name")

        sharing, session_id = self._sharing, record.session_id
        shared = SharedWithClient(self._config, self._device, self._manager, namespace, sharing, row, session_id)
        return ServerSession(
            session_id=record.session_id,
            token=record.token,
            name=record.name,
            tenant=record.tenant,
            tenancy=tenancy,
            hashed_with=record.hashed_with,
            owner=Identity(record.owner, record.credential),
            namespace=namespace,
            shared=shared,
            regions=Regions(self._config, RegionTotals(whole=use.regions, row=row), shared, check_regions),
            row=row,
            store=None if self._store is None else SessionStore(self._store, tenancy.domain, record.session_id),
            replies=Replies(self._memory.replies.ring(row.number)),
            wait_s=record.wait_s,
        )

    def find(self, token: bytes) -> ServerSession | None:
        """Return the session of this token, or None if there is none or it belongs to another identity."""
        session = self._sessions.get(token)
        if session is None or session.owner != CALLER.get():
            return None
        return session if self._tenants is None or self._tenants.has(session.tenant) else None

    def is_of_caller(self, tenant: str) -> bool:
        """Return whether the caller may have sessions of this tenant."""
        return self._tenants is None or self._tenants.has(tenant)

    def shown_to_caller(self) -> ShownPart | None:
        """Return the caller's tenant with its sessions, or None if the caller may see all."""
        if self._tenants is None or Role.ADMIN in (caller := self._tenants.caller()).roles:
            return None
        name = caller.tenant.name
        return ShownPart(name, [one.session_id for one in self if one.tenant == name])

    def num_sessions(self, tenant: str) -> int:
        use = self._uses.get(tenant)
        return 0 if use is None else use.sessions

    def tenant_uses(self) -> dict[str, list[QuotaUse]]:
        """Return what each tenant uses of its quotas, in the order of TENANT_LIMITS. Empty without tenants."""
        if self._tenants is None:
            return {}
        detached, streams, disk_bytes = self._num_detached(), self._num_streams(), self.disk_bytes()
        store_bytes = Counter[str]() if self._store is None else self._store.bytes_by_tenant()
        namespaces = Counter[str]() if self._store is None else self._store.namespaces_by_tenant()
        found = {}
        for name, tenant in self._tenants.rules.tenants.items():
            use, quotas = self._uses.get(name), tenant.quotas
            quota, owners = None if use is None else use.quota, self._manager.device.owners
            used = (
                0 if use is None else use.sessions,
                detached[name],
                streams[name],
                0 if quota is None else quota.num_sequences,
                *[0 if owners is None else owners.num_held(name)] * 2,
                0 if quota is None else quota.num_pins,
                0 if use is None else use.regions.count,
                store_bytes[tenant.domain],
                namespaces[tenant.domain],
                disk_bytes[name],
                self._tenants.calls_lately(tenant),
            )
            limits = [quotas.limit(limit) for limit in TENANT_LIMITS]
            refused = self._tenants.refused[name]
            found[name] = [
                QuotaUse(one, NO_LIMIT if value is None else value, refused[limit])
                for limit, one, value in zip(TENANT_LIMITS, used, limits, strict=True)
            ]
        return found

    def _tenancy(self, tenant: str) -> Tenant:
        return Tenant(tenant, tenant) if self._tenants is None else self._tenants.tenant(tenant)

    def apply_tenants(self) -> None:
        """Follow new rules for tenants. Sessions whose tenant shares with others than before are closed, also if they
        are of a process before; one that is being restored is refused when it is shown. Streams whose callers belong to
        another tenant end."""
        if self._tenants is None:
            return
        self._set_shares(self._tenants.rules)
        for name, use in self._uses.items():
            if use.quota is not None:
                use.quota.set_limits(*_limits(self._tenancy(name)))
        for session in [*self, *self._hidden.values()]:
            if self.hashes_otherwise(session):
                if session.token not in self._hidden:
                    in_slices(self.close_in_slices(session, "ended: its tenant shares with others than before"))
                continue
            session.tenancy = self._tenancy(session.tenant)
            if session.end_stream is not None and not self._tenants.rules.has(session.owner, session.tenant):
                session.end_stream(PermissionDeniedError("the session is another tenant's now", tenant=session.tenant))

    def hashes_otherwise(self, session: ServerSession | SessionValues) -> bool:
        """Return whether the chain hashes of a session's sequences were made for other tenants than those with whom
        its tenant shares now. Such sequences must neither find blocks nor be found."""
        return session.hashed_with != self._tenancy(session.tenant).hashed_with

    def get(self, token: bytes) -> ServerSession:
        session = self.find(token)
        if session is None:
            self._note_foreign(token)
            raise self.unknown()
        return session

    def unknown(self) -> UnknownSessionError:
        """Return the error for a token without a session."""
        return UnknownSessionError(
            "no such session: it was closed, was lost without a stream, or was never opened"
            + (f"; {self.began}" if self.began else ""),
            field="session_token",
        )

    def _note_foreign(self, token: bytes) -> None:
        if (session := self._sessions.get(token)) is not None:
            self.note_foreign(f"session {session.session_id}")

    def note_foreign(self, what: str) -> None:
        """Count and log a call with the token of another identity's session."""
        self.num_foreign += 1
        who = CALLER.get().name or "a client without a name"
        self._foreign_log.write(logging.WARNING, "%s refused to %s: not theirs", what, who)

    def attach(
        self, token: bytes, holder: int, reconnects: bool, end_stream: Callable[[KVServiceError], None]
    ) -> ServerSession:
        """Give the lease to a holder's stream, and end the stream that had it.

        Unless the holder reconnects, the memory that the session shared with its former client is closed, and the new
        client sets up its own. Raises UnknownSessionError, SessionTakenError if the holder reconnects and another
        one has taken the session over, and QuotaExceededError if the tenant has too many streams.
        """
        session = self.get(token)
        if reconnects:
            _check_holder(session, holder)
        if session.end_stream is None:
            self._check_streams(session.tenancy)
        _cancel_timers(session)
        session.end_saving(_taken())
        session.asleep = False
        before, session.end_stream = session.end_stream, end_stream
        try:
            if before is not None:
                before(_taken())
            if session.holder is not None and not reconnects:
                session.unshare()
                session.shared.user.forget()
            session.holder = holder
            session.owner = CALLER.get()  # the same identity, perhaps with a newer token
            session.row.set(ATTACHED, 1)
            self._save(session, None)
        except BaseException:
            with contextlib.suppress(Exception):  # perhaps the same error again; the timers run
                self.detach(session, end_stream)
            raise
        return session

    def _check_streams(self, tenancy: Tenant) -> None:
        if tenancy.quotas.max_streams is not None:
            tenancy.check("max_streams", self._num_streams()[tenancy.name])

    def _num_streams(self) -> Counter[str]:
        """Return how many streams of sessions and of events each tenant has."""
        assert self._tenants is not None, "there are quotas of streams"
        return Counter(one.tenant for one in self if one.end_stream is not None) + self._tenants.event_streams

    @contextlib.contextmanager
    def event_stream(self) -> Iterator[None]:
        """Count a stream of events of the caller's tenant. Raises QuotaExceededError."""
        if self._tenants is None:
            yield
            return
        tenancy = self._tenants.caller().tenant
        self._check_streams(tenancy)
        self._tenants.event_streams[tenancy.name] += 1
        try:
            yield
        finally:
            self._tenants.event_streams[tenancy.name] -= 1

    def detach(self, session: ServerSession, end_stream: Callable[[KVServiceError], None]) -> None:
        """Release the lease of a stream that has ended. Unless another stream holds it now, the session waits for the
        next one. Shared memory is closed after the grace time at the latest, because it is of no use without its
        client."""
        if session.end_stream == end_stream and self._sessions.get(session.token) is session:
            session.end_stream = None
            session.row.set(ATTACHED, 0)
            try:
                if session.scheduler is not None:
                    session.scheduler.pause()
            finally:
                if session.asleep:
                    in_slices(self.close_in_slices(session, ASLEEP))
                else:
                    self._wait(session, session.wait_s)

    def _wait(self, session: ServerSession, wait_s: float) -> None:
        """Let a session wait for a stream. It does so also if its record cannot be kept."""
        self._lose_after(session, wait_s)
        self._call_later(session, self._config.session_grace_s, session.unshare)
        self._save(session, self._clock.time() + wait_s)

    def _save(self, session: ServerSession, waits_until: float | None) -> None:
        session.waits_until = waits_until
        self.save(session)

    def save(self, session: ServerSession) -> None:
        """Keep the record of an open session."""
        self._memory.records[session.row.number] = session.record().to_bytes()

    def end_streams_of(self, check: Callable[[Identity], None]) -> None:
        """End the streams of owners for whom `check` raises UnauthenticatedError. Their sessions then wait as after any
        end of a stream."""
        for session in self:
            try:
                check(session.owner)
            except UnauthenticatedError as error:
                if session.end_stream is not None:
                    session.end_stream(error)

    def end_streams(self, error: KVServiceError) -> None:
        """End all streams. The sessions then wait as after any end of a stream."""
        for session in self:
            if session.end_stream is not None:
                session.end_stream(error)

    def close_for_in_slices(self, token: bytes, holder: int) -> Slices[None]:
        """Close a session if `holder` still holds it; holder 0 closes it in any case. The holder of its stream promises
        with this that it has stopped to write to the pool and to the store. Raises the errors of `attach`."""
        session = self.get(token)
        if holder:
            _check_holder(session, holder)
        yield from self.close_in_slices(session, writers_done=0 != holder == session.holder)

    def _writer_ended(self, writer: int) -> None:
        if num_blocks := self._manager.writer_ended(writer):
            logger.info(
                "%d blocks have left the quarantine: the process that might have written them is gone", num_blocks
            )

    def _introduce(self, token: bytes, peer: Peer) -> bytes | None:
        session = self._sessions.get(token)
        if session is None or session.owner != UNNAMED:
            return None
        return session.shared.user.introduce(peer)

    def _lose_after(self, session: ServerSession, wait_s: float) -> None:
        """Close a session if no stream attaches to it in time."""

        def lose() -> None:
            if session.asleep:  # restored for a client that did not wait
                in_slices(self.close_in_slices(session, ASLEEP))
                return
            self.num_lost += 1
            in_slices(self.close_in_slices(session, f"lost: no stream attached to it for {wait_s:g} s"))

        self._call_later(session, wait_s, lose)

    def close_in_slices(
        self, session: ServerSession, end: str = "closed", *, writers_done: bool = False
    ) -> Slices[None]:
        """Close an open session in the first slice, and free its sequences. `end` says for the log how it ended; its
        first word is the reason, as in the metrics. Unless it is ASLEEP, the session's file goes too. `writers_done`:
        see ServerSession.unshare."""
        is_hidden = session.token in self._hidden
        sessions = self._hidden if is_hidden else self._sessions
        assert sessions.get(session.token) is session, "it is closed already"
        del sessions[session.token]
        if not is_hidden and end != ASLEEP:
            self.on_close(session)
        self._num_closing += 1
        self.num_closed += 1
        _cancel_timers(session)
        ended, scheduled = "", None
        try:  # the session leaves, whatever of this fails
            self._memory.records.pop(session.row.number, None)
            session.end_saving(UnknownSessionError("the session was closed while it was saved"))
            if session.end_stream is not None:
                session.end_stream(FailedPreconditionError("the session was closed"))
            session.unshare(writers_done=writers_done)
            ended = "" if session.store is None else f", {session.store.ended}"
        finally:
            try:
                if session.scheduler is not None:
                    ended += f", {len(session.scheduler)} unfinished requests dropped"
                    scheduled = session.scheduler.close()
                freed = yield from self._manager.close_namespace_in_slices(session.namespace)
                if scheduled is not None:
                    yield from scheduled
            finally:
                self._leave(session)
        number = session.session_id
        fields = {"session_id": number, "reason": end.partition(":")[0]}
        self._closed_log.write(
            logging.INFO, "session %d %s, %d sequences freed%s", number, end, freed, ended, extra=fields
        )

    def _leave(self, session: ServerSession) -> None:
        """Count a session no longer, whose sequences are freed."""
        self._num_closing -= 1
        use = self._uses[session.tenant]
        use.sessions -= 1
        if use.quota is not None:
            use.quota.namespaces.discard(session.namespace)
        if not use.sessions:
            del self._uses[session.tenant]
        self._memory.table.close(session.row)

    def _call_later(self, session: ServerSession, seconds: float, call: Callable[[], None]) -> None:
        session.timers.append(self._clock.call_later(seconds, call))


def _limits(tenancy: Tenant) -> tuple[int | None, int | None, int | None]:
    """Return the limits of a TenantQuota."""
    return tenancy.quotas.max_blocks, tenancy.quotas.max_sequences, tenancy.quotas.max_pins


def _check_name(name: str, field: str) -> None:
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidArgumentError(f"more than {MAX_NAME_LENGTH} characters, or unprintable ones", field=field)


def _taken() -> SessionTakenError:
    return SessionTakenError("another client has taken the session over")


def _check_holder(session: ServerSession, holder: int) -> None:
    if session.holder not in (None, holder):
        raise _taken()


def _cancel_timers(session: ServerSession) -> None:
    while session.timers:
        session.timers.pop().cancel()
