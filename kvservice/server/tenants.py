"""Tenants: to which of them a caller belongs, what the caller may do, and what of the tenant others can use.

    token, certificate or socket ─▶ Tenants.caller ─▶ tenant and roles ─▶ the session's tenant ─▶ salt, store, quotas

The file `tenants` has a table for each tenant. Without the file there is one tenant, and sessions have the tenant that
their clients name.

    [tenant.chat]
    engines = ["engine-1", "engine-2"]   # names of tokens, or of client certificates if there are no tokens
    observers = ["grafana"]
    shares_with = ["search"]
"""

from __future__ import annotations

import enum
import hashlib
import math
import os
import re
import stat
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvservice.auth import CALLER, Identity, Reloading, open_regular
from kvservice.blocks import TenantSalt, quota_exceeded
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError, PermissionDeniedError, QuotaExceededError, reason_of

ExtraKeys: TypeAlias = tuple[tuple[int, bytes], ...]

MAX_TENANTS: Final = 1024
# The limit on tenants that share with each other. The names of all are part of what they share.
MAX_SHARING: Final = 16
# The first bytes of the extra keys that keep tenants apart. Clients cannot use them.
SALT_PREFIX: Final = b"kvservice tenant "
MIN_CALLS_PER_S: Final = 8.0
_MAX_FILE_BYTES: Final = 1 << 20
_Count: TypeAlias = Annotated[int | None, Field(ge=0, le=1 << 40)]
_Bytes: TypeAlias = Annotated[int | None, Field(ge=0, le=1 << 60)]
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELD: Final = "tenants"


class Role(enum.Enum):
    """What a caller may do. An admin may do everything."""

    ENGINE = "engine"
    OBSERVER = "observer"
    ADMIN = "admin"


Roles: TypeAlias = frozenset[Role]
EVERYONE: Final[Roles] = frozenset(Role)
ENGINES: Final[Roles] = frozenset((Role.ENGINE,))
OBSERVERS: Final[Roles] = frozenset((Role.OBSERVER, Role.ADMIN))
ADMINS: Final[Roles] = frozenset((Role.ADMIN,))


class Door(enum.Enum):
    """How a caller reached the daemon."""

    OWN = "the operator's door"
    UNIX = "the unix socket"
    TCP = "TCP"


# The door of the current RPC.
DOOR: Final[ContextVar[Door]] = ContextVar("kvservice_door", default=Door.TCP)


class Quotas(BaseModel):
    """The most that a tenant may have at one time, and the calls that it may make. None: no less than the daemon."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_sessions: _Count = None
    # Sessions that wait for longer than session_grace_s when their streams end.
    max_detached_sessions: _Count = None
    # Streams of sessions and of events.
    max_streams: _Count = None
    # Sequences of sessions in memory, also those that are swapped out to the disk.
    max_sequences: _Count = None
    # Blocks of the pool that sequences and pins hold. Those that can be evicted do not count.
    max_blocks: _Count = None
    # Blocks of the pool that sequences and pins may always hold, max_blocks at most. Others get them only as cached
    # blocks. A block that the tenant had first counts for it while any of those who share hold it.
    guaranteed_blocks: _Count = None
    # Pins of prefixes. Their blocks count in max_blocks, each once.
    max_pins: _Count = None
    max_regions: _Count = None
    # Bytes of the slabs of the block store in which the tenant, and those with whom it shares, have blocks.
    max_store_bytes: _Bytes = None
    # Namespaces of the block store, those without users included, of the tenant and of those with whom it shares.
    max_store_namespaces: _Count = None
    # Bytes of the files with saved sessions and swapped sequences, those in progress included.
    max_disk_bytes: _Bytes = None
    # A client makes its first calls at once, six for a store that it maps. With fewer a second it would never be open.
    calls_per_s: Annotated[float | None, Field(ge=MIN_CALLS_PER_S, le=1e9)] = None

    def limit(self, of: str) -> float | None:
        """Return the quota of sessions, sequences and so on, by its name without max_."""
        found: float | None = getattr(self, of if of in Quotas.model_fields else f"max_{of}")
        return found


NO_QUOTAS: Final = Quotas()


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant of a session.

    Sessions find each other's blocks, in the pool and in the store, if their tenants have the same `domain`. `salt` are
    the extra keys of each of its sequences. `map_pool` and `map_store` say whether its clients may map the memory of
    the pool and of the store, which hold the blocks of all tenants.
    """

    name: str
    domain: str
    salt: ExtraKeys = ()
    map_pool: bool = True
    map_store: bool = True
    quotas: Quotas = NO_QUOTAS

    @property
    def hashed_with(self) -> str:
        """The salt in hexadecimal digits. Sessions keep it, because all chain hashes of their sequences depend on it,
        and the tenants with whom theirs shares may be others later."""
        return b"".join(key for _, key in self.salt).hex()

    def check(self, limit: str, used: int, more: int = 1, field: str = "") -> None:
        """Raise QuotaExceededError if the tenant, which uses so much, would use more than the quota of this name."""
        value = getattr(self.quotas, limit)
        if value is not None and used + more > value:
            raise quota_exceeded(self.name, limit, value, used, more, field)


OPERATOR: Final = Tenant("", "")


@dataclass(frozen=True, slots=True)
class TenantCaller:
    tenant: Tenant
    roles: Roles


_AT_OWN_DOOR: Final = TenantCaller(OPERATOR, EVERYONE)


# ---- the file

_Identity = Annotated[str, Field(min_length=1, max_length=256)]


class _Settings(Quotas):
    """The table of one tenant."""

    engines: list[_Identity] = []
    observers: list[_Identity] = []
    admins: list[_Identity] = []
    unix_socket: Annotated[Role | None, Field(strict=False)] = None
    shares_with: list[str] = []
    map_pool: bool = False
    map_store: bool = False

    def names(self) -> dict[Role, list[str]]:
        return {Role.ENGINE: self.engines, Role.OBSERVER: self.observers, Role.ADMIN: self.admins}


class TenantRules:
    """The tenants of a file: `tenants` by name, `callers` by the names of their tokens or certificates. `local` are the
    callers on the unix socket, None if they have no tenant."""

    def __init__(self, tables: Mapping[str, _Settings]) -> None:
        """Raises InvalidArgumentError naming the key that contradicts another one."""
        self.callers: dict[str, TenantCaller] = {}
        self.local: TenantCaller | None = None
        self.tenants = {name: _tenant(name, one, tables) for name, one in tables.items()}
        for name, settings in tables.items():
            roles: dict[str, Roles] = {}
            for role, names in settings.names().items():
                for identity in names:
                    if identity in self.callers or role in roles.get(identity, ()):
                        raise _wrong(f"{name}.{role.value}s", f"{identity!r} is named twice")
                    roles[identity] = roles.get(identity, frozenset()) | _with_lower(role)
            self.callers |= {identity: TenantCaller(self.tenants[name], found) for identity, found in roles.items()}
            if settings.unix_socket is not None:
                if self.local is not None:
                    raise _wrong(f"{name}.unix_socket", f"is {self.local.tenant.name}'s already")
                self.local = TenantCaller(self.tenants[name], _with_lower(settings.unix_socket))

    @staticmethod
    def read(file: Path) -> TenantRules:
        """Raises InvalidArgumentError naming the file and the key that is wrong."""
        try:
            with open_regular(file) as stream:
                _check_owner_and_mode(os.fstat(stream.fileno()))
                data = stream.read(_MAX_FILE_BYTES + 1)
            if len(data) > _MAX_FILE_BYTES:
                raise InvalidArgumentError(f"has more than {_MAX_FILE_BYTES} bytes")
            return TenantRules(_tables(tomllib.loads(data.decode())))
        except (OSError, ValueError, RecursionError, InvalidArgumentError) as error:
            # tomllib raises ValueError for what is no TOML, and for very long numbers.
            raise InvalidArgumentError(f"{file}: {reason_of(error)}", field=_FIELD) from None

    def has(self, owner: Identity, tenant: str) -> bool:
        """Return whether sessions of this tenant can be this owner's."""
        unnamed = self.local if tenant else _AT_OWN_DOOR
        caller = self.callers.get(owner.name) if owner.name else unnamed
        return caller is not None and caller.tenant.name == tenant

    def guaranteed(self) -> dict[str, int]:
        """Return the blocks that each tenant has guaranteed."""
        return {name: tenant.quotas.guaranteed_blocks or 0 for name, tenant in self.tenants.items()}

    def store_limits(self, of: str) -> dict[str, int]:
        """Return the quotas of this name, max_store_bytes or max_store_namespaces, by the tenants' domains."""
        limits = {tenant.domain: getattr(tenant.quotas, of) for tenant in self.tenants.values()}
        return {domain: limit for domain, limit in limits.items() if limit is not None}

    def check_sizes(self, num_blocks: int, slab_bytes: int) -> None:
        """Raise InvalidArgumentError if a pool of this size cannot hold what is guaranteed, or if a tenant may have
        some bytes of the store, but not one of its slabs."""
        for name, tenant in self.tenants.items():
            if 0 < (tenant.quotas.max_store_bytes or 0) < slab_bytes:
                raise _wrong(f"{name}.max_store_bytes", f"must be 0, or at least {slab_bytes}: a slab of the store")
        total = 0
        for name, number in self.guaranteed().items():
            total += number
            if total > num_blocks:
                message = f"with those before it, {total} blocks are guaranteed, and the pool has {num_blocks}"
                raise _wrong(f"{name}.guaranteed_blocks", message)


def _tables(found: dict[str, Any]) -> dict[str, _Settings]:
    """Raises InvalidArgumentError naming the key."""
    for key in found:
        if key != "tenant":
            raise InvalidArgumentError("unknown key: the file has tables [tenant.NAME]", field=key)
    tables = found.get("tenant", {})
    if not isinstance(tables, dict):
        raise InvalidArgumentError("must be tables [tenant.NAME]", field="tenant")
    if not tables:  # perhaps it is being written
        raise InvalidArgumentError("has no tenant", field="tenant")
    if len(tables) > MAX_TENANTS:
        raise InvalidArgumentError(f"has more than {MAX_TENANTS} tenants", field="tenant")
    return {name: _settings(name, table) for name, table in tables.items()}


def _settings(name: str, table: object) -> _Settings:
    if not _NAME.fullmatch(name):
        raise _wrong(repr(name), "a name has 1 to 64 letters, digits, and . _ - after the first")
    if isinstance(table, dict) and "uid" in table:
        raise _wrong(f"{name}.uid", "gRPC does not tell the user of a connection: use tokens, or unix_socket")
    try:
        return _Settings.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, (name, *first["loc"])))
        raise _wrong(key, "unknown key" if first["type"] == "extra_forbidden" else first["msg"]) from None


def _tenant(name: str, settings: _Settings, tables: Mapping[str, _Settings]) -> Tenant:
    sharing = {name, *settings.shares_with}
    field = f"{name}.shares_with"
    if len(sharing) != 1 + len(settings.shares_with):
        raise _wrong(field, "names a tenant twice, or its own")
    if len(sharing) > MAX_SHARING:
        raise _wrong(field, f"more than {MAX_SHARING} tenants share")
    for other in settings.shares_with:
        if other not in tables:
            raise _wrong(field, f"{other!r} is no tenant")
        if {other, *tables[other].shares_with} != sharing:
            raise _wrong(field, f"{other!r} must name the same tenants: who shares, shares with all of them")
        for limit in ("max_store_bytes", "max_store_namespaces"):
            if getattr(tables[other], limit) != getattr(settings, limit):
                raise _wrong(f"{name}.{limit}", f"must be {other}'s, because they share the store")
    if settings.max_blocks is not None and (settings.guaranteed_blocks or 0) > settings.max_blocks:
        message = f"is more than max_blocks = {settings.max_blocks}, so nobody could use the rest"
        raise _wrong(f"{name}.guaranteed_blocks", message)
    domain = ",".join(sorted(sharing))
    quotas = Quotas(**{key: getattr(settings, key) for key in Quotas.model_fields})
    return Tenant(name, domain, TenantSalt(_salt(domain)), settings.map_pool, settings.map_store, quotas)


def _salt(domain: str) -> bytes:
    return SALT_PREFIX + hashlib.sha256(domain.encode()).digest()


def _with_lower(role: Role) -> Roles:
    return EVERYONE if role is Role.ADMIN else frozenset((role,))


def _wrong(key: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, field=f"tenant.{key}")


def _check_owner_and_mode(status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidArgumentError("others than root and the daemon's user may write it")


# ---- the callers of a running daemon


class Tenants:
    """The tenants of the daemon, as its file says now."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidArgumentError naming the file and the key that is wrong."""
        self._clock = clock
        # How many of the calls that may come at once each tenant has used, and the time of its last one; the same of
        # the streams that attach.
        self._calls_used: dict[str, tuple[float, float]] = {}
        self._attaches_used: dict[str, tuple[float, float]] = {}
        # Open streams of events by tenant.
        self.event_streams: Counter[str] = Counter()
        # Calls over a quota, by tenant and by the quota's name without max_.
        self.refused: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._file = file
        # The number of blocks of the pool, and the size of a slab of the store, when they are known.
        self._sizes: tuple[int, int] | None = None
        self._rules = Reloading([file], self._read, "the daemon")

    @staticmethod
    def of(config: ServeConfig) -> Tenants | None:
        """Return None if the daemon has no such file. Raises InvalidArgumentError."""
        if not config.tenants:
            return None
        tenants = Tenants(Path(config.tenants))
        if tenants.rules.callers and not (config.auth_tokens or config.tls_client_ca):
            raise InvalidArgumentError(
                f"{config.tenants} names tokens or certificates, but the daemon asks for none: set auth_tokens or "
                "tls_client_ca",
                field=_FIELD,
            )
        return tenants

    def _read(self) -> TenantRules:
        rules = TenantRules.read(self._file)
        self._check_sizes(rules)
        return rules

    def _check_sizes(self, rules: TenantRules) -> None:
        try:
            if self._sizes is not None:
                rules.check_sizes(*self._sizes)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._file}: {error}", field=_FIELD) from None

    def set_sizes(self, num_blocks: int, slab_bytes: int) -> None:
        """Check now, and whenever the file is read, that a pool of this size can hold what is guaranteed, and that
        quotas of the store are at least a slab, which has `slab_bytes` for blocks (0: there is no store). Raises
        InvalidArgumentError naming the file and the key that is wrong."""
        self._sizes = num_blocks, slab_bytes
        self._check_sizes(self.rules)

    @property
    def rules(self) -> TenantRules:
        return self._rules.value

    @property
    def note(self) -> str:
        """Say that the file has changed and cannot be used, or return an empty string."""
        return self._rules.fault

    def reload(self) -> bool:
        """Read the file again if it has changed. Returns whether there are new rules."""
        return self._rules.reload()

    def tenant(self, name: str) -> Tenant:
        """Return the tenant of this name. One that is not in the file any more has no callers."""
        if not name:
            return OPERATOR
        found = self.rules.tenants.get(name)
        return Tenant(name, name, TenantSalt(_salt(name)), map_pool=False, map_store=False) if found is None else found

    def caller(self) -> TenantCaller:
        """Return who calls. Raises PermissionDeniedError if the caller has no tenant."""
        door = DOOR.get()
        found = self._of(door)
        if found is None:
            who = CALLER.get().name or f"a client without a name, over {door.value},"
            raise PermissionDeniedError(f"{who} belongs to no tenant of the daemon")
        return found

    def _of(self, door: Door) -> TenantCaller | None:
        if door is Door.OWN:
            return _AT_OWN_DOOR
        return self.rules.local if door is Door.UNIX else self.rules.callers.get(CALLER.get().name)

    def admit(self, roles: Roles, tenant: str | None) -> None:
        """Do as `check`, for a call that counts, as all but repeated ones do. Raises QuotaExceededError, too, if the
        caller's tenant makes more calls a second than it may. It may make those of one second at once."""
        caller = self._of(DOOR.get())
        if caller is None or caller.roles.isdisjoint(roles) or tenant not in (None, caller.tenant.name):
            self.check(roles, tenant)
        elif (rate := caller.tenant.quotas.calls_per_s) is not None:
            self._count(self._calls_used, caller.tenant.name, rate, rate)

    def admit_attach(self, num_sessions: Callable[[str], int]) -> None:
        """Raise PermissionDeniedError unless the caller is an engine, and QuotaExceededError if streams of its tenant
        attach more than calls_per_s times a second.

        They count apart from calls, and as many as the tenant has sessions (`num_sessions`) may come at once. So all
        sessions come back when the daemon has restarted, which their clients cannot spread over time."""
        self.check(ENGINES)
        tenant = self.caller().tenant
        if (rate := tenant.quotas.calls_per_s) is not None:
            self._count(self._attaches_used, tenant.name, rate, max(rate, num_sessions(tenant.name)))

    def check(self, roles: Roles, tenant: str | None = None) -> None:
        """Raise PermissionDeniedError unless the caller has one of these roles, and belongs to `tenant` if that is
        given."""
        caller = self.caller()
        if caller.roles.isdisjoint(roles):
            allowed = " or ".join(sorted(role.value for role in roles))
            raise PermissionDeniedError(f"the call is for callers with the role {allowed}", tenant=caller.tenant.name)
        if tenant is not None and tenant != caller.tenant.name:
            raise PermissionDeniedError("the session is another tenant's now", tenant=caller.tenant.name)

    def _count(self, used: dict[str, tuple[float, float]], tenant: str, rate: float, most: float) -> None:
        """Count one more in `used`, of which `most` may come at once, and `rate` in each second after."""
        now = self._clock()
        count = self._used_lately(used, tenant, rate) + 1
        if count > most:
            retry_ms = math.ceil((count - most) / rate * 1000)
            raise QuotaExceededError(
                f"tenant {tenant} makes more than calls_per_s {rate:g}; the next one is in {retry_ms} ms",
                tenant=tenant, limit="calls_per_s", value=f"{rate:g}", retry_ms=retry_ms,
            )  # fmt: skip
        used[tenant] = count, now

    def _used_lately(self, used: Mapping[str, tuple[float, float]], tenant: str, rate: float) -> float:
        count, before = used.get(tenant, (0.0, 0.0))
        return max(0.0, count - (self._clock() - before) * rate)

    def calls_lately(self, tenant: Tenant) -> float:
        """Return how many of the calls of a second the tenant has made, 0 if it may make any number."""
        rate = tenant.quotas.calls_per_s
        return 0.0 if rate is None else self._used_lately(self._calls_used, tenant.name, rate)

    def note_refusal(self, error: QuotaExceededError) -> None:
        """Count a call that was refused, if it was over a tenant's quota, or over that of tenants who share."""
        for tenant in filter(None, error.metadata.get("tenant", "").split(",")):
            self.refused[tenant][error.metadata["limit"].removeprefix("max_")] += 1

    def event_domain(self) -> str | None:
        """Return the domain whose events the caller may see, None for those of all. Raises PermissionDeniedError."""
        caller = self.caller()
        return None if Role.ADMIN in caller.roles else caller.tenant.domain

    def has(self, tenant: str) -> bool:
        """Return whether the caller belongs to this tenant."""
        found = self._of(DOOR.get())
        return found is not None and found.tenant.name == tenant


def chosen_tenant(tenants: Tenants | None, named: str) -> str:
    """Return the tenant of a new session whose request names one. Raises PermissionDeniedError."""
    if tenants is None:
        return named
    own = tenants.caller().tenant.name
    if named not in ("", own):
        raise PermissionDeniedError("is not the caller's tenant", field="tenant", tenant=own)
    return own


def names_salt(keys: Collection[tuple[int, bytes]]) -> int | None:
    """Return the index of an extra key that only the daemon may use, or None."""
    return next((i for i, (_, key) in enumerate(keys) if key.startswith(SALT_PREFIX)), None)
