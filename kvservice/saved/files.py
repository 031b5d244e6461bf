"""The folder with the files of saved sessions: names, sizes, expiry, and the limit on their bytes.

A file has its name, the SHA-256 of the session's token, only while it is whole. Files in progress have another one, and
are removed when the daemon starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvservice.errors import QuotaExceededError
from kvservice.logs import LogBudget
from kvservice.saved.format import SECTOR_BYTES, DamagedFileError, FileHeader, rounded_up

# ---- reading and writing of files in large pieces, past the page cache where the filesystem allows it


# The descriptor of a file that was refused: O_DIRECT is not supported.
_NOT_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned_memory(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that files can be read into and written from directly."""
    return mmap.mmap(-1, max(rounded_up(num_bytes), SECTOR_BYTES))


class NotRegularError(OSError):
    """Something else than a regular file has the name."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EPERM, "it is not a regular file", str(path))


class DirectFile:
    """An open file. Several threads may use it. Offsets, sizes and memory are multiples of SECTOR_BYTES."""

    def __init__(self, path: Path, flags: int) -> None:
        """Raises OSError."""
        self.path = path
        self._fd = _open_direct(path, flags)
        self._uses = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def _using(self) -> Iterator[int]:
        """Keep the descriptor open. A call of another thread with a closed one could reach another file."""
        with self._changed:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the file is closed", str(self.path))
            self._uses += 1
        try:
            yield self._fd
        finally:
            with self._changed:
                self._uses -= 1
                self._changed.notify_all()

    def write(self, data: memoryview, offset: int) -> None:
        """Raises OSError."""
        with self._using() as fd:
            while data:
                written = os.pwritev(fd, [data], offset)
                data, offset = data[written:], offset + written

    def read(self, data: memoryview, offset: int) -> None:
        """Fill the memory. Raises DamagedFileError if the file ends before that, and OSError."""
        with self._using() as fd:
            while data:
                count = os.preadv(fd, [data], offset)
                if not count:
                    raise DamagedFileError("it is too short")
                data, offset = data[count:], offset + count

    def size(self) -> int:
        with self._using() as fd:
            return os.fstat(fd).st_size

    def sync(self) -> None:
        """Return when all that was written is on the disk. Raises OSError."""
        with self._using() as fd:
            os.fsync(fd)

    def close(self) -> None:
        """Close the file after the calls in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._uses)
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file, and nothing else: what a link names is not opened, and a pipe is not waited for. Raises
    NotRegularError and OSError."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotRegularError(path) from None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise NotRegularError(path)


def _open_direct(path: Path, flags: int) -> int:
    try:
        return open_regular(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
    return open_regular(path, flags & ~os.O_EXCL)  # the refused call may have created the file


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


logger = logging.getLogger(__name__)

_WHOLE: Final = ".session"
_SWAPPED: Final = ".swapped"
_PART: Final = ".part"
# The names of all files that are made here. Others are not the daemon's: they are neither read nor removed.
_NAMES: Final = re.compile(r"[0-9a-f]{64}(\.session|\.[0-9a-f]{16}\.swapped)(\.[0-9a-f]{16}\.part)?")
# Files with swapped sequences end with their session, see SavedFiles.orphans.
NEVER: Final = 1e300
# A file that does not say when it expires stays so long, in seconds from the start of the daemon.
DAMAGED_S: Final = 86400.0


def name_of(token: bytes) -> str:
    """Return the name of a session's file. It does not reveal the token."""
    return _hash_of(token) + _WHOLE


def swapped_name(token: bytes) -> str:
    """Return a new name of a file with sequences that a session swaps out."""
    return f"{_hash_of(token)}.{secrets.token_hex(8)}{_SWAPPED}"


def _hash_of(token: bytes) -> str:
    return hashlib.sha256(b"kvservice session " + token).hexdigest()


@dataclass(frozen=True)
class FileEntry:
    """A whole file, of a session of `tenant`, which is empty if that is unknown. `expires_at` is a time of
    SavedFiles.now.
    `swapped` are the names of the files with swapped sequences that the session in it needs; it is None until they are
    known."""

    num_bytes: int
    expires_at: float
    swapped: frozenset[str] | None = None
    tenant: str = ""


class NewFile:
    """A file in progress. `commit` or `discard` ends it. All methods block."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises OSError."""
        self.name = name
        self._folder = folder
        self._part = folder / f"{name}.{secrets.token_hex(8)}{_PART}"
        self.file = DirectFile(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def commit(self, header: FileHeader) -> None:
        """Give the file its name. All its other bytes are written. Raises OSError."""
        sector = aligned_memory(SECTOR_BYTES)
        sector[:] = header.to_bytes()
        self.file.write(memoryview(sector), 0)
        self.file.sync()
        self.file.close()
        os.rename(self._part, self._folder / self.name)
        sync_folder(self._folder)

    def discard(self) -> None:
        self.file.close()
        with contextlib.suppress(FileNotFoundError):
            self._part.unlink()


class SavedFiles:
    """The files of one daemon's saved sessions. One thread uses it."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the folder if there is none, and find the files in it. `wall` returns seconds since 1970, which jump
        when the system's clock is set, and `clock` seconds that do not. Raises OSError, and BlockingIOError if another
        daemon uses the folder."""
        self.folder, self.capacity_bytes = folder, capacity_bytes
        self.num_damaged = self.num_errors = 0
        # Why the last use of the disk failed, empty if it did not.
        self.fault = ""
        self._clock, self._clock_zero = clock, wall() - clock()
        self._log = LogBudget(logger)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._found = os.stat(folder)
        self._locking = threading.Lock()
        self._lock_folder()
        self._entries: dict[str, FileEntry] = {}
        # Files that were not there at the last look.
        self._missing: Set[str] = frozenset()
        # Bytes of files in progress by tenant.
        self._reserved: Counter[str] = Counter()
        # Called with a tenant, the bytes of its files, and how many more it needs. Raises QuotaExceededError if these
        # are too many.
        self.check_tenant: Callable[[str, int, int], object] = lambda *_: None
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not (_NAMES.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
                if entry.name != "lock":
                    self._log.write(logging.WARNING, "%s is left alone: it is no file of a session", entry.path)
            elif entry.name.endswith(_PART):
                try:
                    os.unlink(entry.path)
                except OSError as error:
                    self.report_failure(error)
            else:
                self._find(Path(entry.path))

    def now(self) -> float:
        """Return the seconds since 1970, counted from what the system's clock said when this object was made. So a
        clock that is set ahead, perhaps wrongly, removes no file."""
        return self._clock_zero + self._clock()

    @property
    def num_sessions(self) -> int:
        """The number of saved sessions."""
        return sum(name.endswith(_WHOLE) for name in self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those in progress included, without those that others have removed."""
        return self.bytes_by_tenant().total()

    def bytes_by_tenant(self) -> Counter[str]:
        """Return `used_bytes` of each tenant. Those of files whose tenant is unknown are of the tenant ""."""
        found = Counter(self._reserved)
        for name, entry in self._entries.items():
            if name not in self._missing:
                found[entry.tenant] += entry.num_bytes
        return found

    def names(self) -> set[str]:
        """Return the names of all entries of the folder. This may take long. Raises OSError as `check_folder`, and if
        nothing can be written there."""
        self.check_folder()
        if not os.access(self.folder, os.W_OK):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self.folder))
        return set(os.listdir(self.folder))

    def note_missing(self, names: Set[str]) -> None:
        """Note which of the known files are not there. They stay known, because they may come back."""
        if new := names - self._missing:
            self._log.write(logging.WARNING, "files of saved sessions that are gone from %s: %d", self.folder, len(new))
        self._missing = names

    def _find(self, path: Path) -> None:
        """Add a file of an earlier process. One without a valid header stays for DAMAGED_S, so that its owner
        learns of it. One that cannot be read stays for a later process, which may be able to."""
        try:
            with contextlib.closing(DirectFile(path, os.O_RDONLY)) as file:
                header = read_header(file)
        except DamagedFileError as error:
            self.report_damaged(path.name, error)
            expires_at = NEVER if path.name.endswith(_SWAPPED) else self.now() + DAMAGED_S
            self._entries[path.name] = FileEntry(path.stat().st_size, expires_at, frozenset())
            return
        except OSError as error:
            self.report_failure(error)
            return
        self._entries[path.name] = FileEntry(header.num_bytes, header.expires_at, tenant=header.tenant)

    def report_damaged(self, name: str, error: DamagedFileError) -> None:
        """Count a damaged file, and log it."""
        self.num_damaged += 1
        self._log.write(logging.WARNING, "the saved session in %s is refused: %s", self.folder / name, error)

    def report_failure(self, error: OSError) -> None:
        """Count a failure of the disk, and log it."""
        self.num_errors += 1
        self.fault = str(error)
        self._log.write(logging.WARNING, "the disk with the saved sessions in %s failed: %s", self.folder, error)

    def check_folder(self) -> None:
        """Raise OSError if the folder is not there, or is not the one that this daemon has locked: its disk was taken
        away, or something else is in its place. A lock that was removed with the files is taken again."""
        if not os.path.samestat(os.stat(self.folder), self._found):
            reason = "not the folder that the daemon found at its start; kvservice upgrade takes it"
            raise OSError(errno.ESTALE, reason, str(self.folder))
        with self._locking:
            try:
                there = os.stat(self.folder / "lock")
            except FileNotFoundError:
                self.close()
                self._lock_folder()
                return
        if not os.path.samestat(there, self._lock):
            raise OSError(errno.ESTALE, "another process has locked it", str(self.folder))

    def _lock_folder(self) -> None:
        """Keep other daemons out of the folder. Only the daemon's user can open the lock. Raises OSError.

        A file system that has become read-only, as some do after an error, keeps no daemon from starting: sessions can
        be restored from there.
        """
        path = self.folder / "lock"
        try:
            lock = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno != errno.EROFS or not path.exists():
                raise
            lock = open_regular(path, os.O_RDONLY)
            self.report_failure(error)
        # It can be called twice: a closed descriptor may already be that of another file.
        self.close = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise
        self._lock = os.fstat(lock)

    def reserve(self, num_bytes: int, tenant: str) -> None:
        """Reserve room for a file in progress of a tenant. Raises QuotaExceededError."""
        self.check_tenant(tenant, self.bytes_by_tenant()[tenant], num_bytes)
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise QuotaExceededError(
                f"{num_bytes} bytes needed; {self.used_bytes} of {self.capacity_bytes} are in use",
                limit="disk_sessions_gib", value=self.capacity_bytes,
            )  # fmt: skip
        self._reserved[tenant] += num_bytes

    def release(self, num_bytes: int, tenant: str) -> None:
        """Undo `reserve`."""
        self._reserved[tenant] -= num_bytes
        if not self._reserved[tenant]:
            del self._reserved[tenant]

    def add(self, name: str, entry: FileEntry) -> None:
        """Add a file that was committed, in place of an older one of the same name."""
        self._entries[name] = entry
        self._missing -= {name}

    def entry(self, name: str) -> FileEntry | None:
        """Return a file that has not expired."""
        entry = self._entries.get(name)
        return None if entry is None or entry.expires_at <= self.now() else entry

    def find(self, name: str) -> Path | None:
        """Return the path of a file that has not expired."""
        return None if self.entry(name) is None else self.folder / name

    def forget(self, name: str) -> FileEntry | None:
        """Forget a file that will be removed. Returns what was known of it, or None if there is no such file."""
        return self._entries.pop(name, None)

    def unlink(self, name: str) -> None:
        """Remove a forgotten file, which may take long. Raises OSError."""
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            self.check_folder()

    def swapped_of(self, token: bytes) -> list[str]:
        """Return the names of the files with swapped sequences of a session."""
        return [name for name in self._entries if name.startswith(_hash_of(token)) and name.endswith(_SWAPPED)]

    def orphans(self, tokens: Iterable[bytes]) -> list[str]:
        """Return the names of the files with swapped sequences whose sessions are neither open, with these tokens, nor
        saved."""
        owners = {_hash_of(token) for token in tokens}
        owners |= {name.removesuffix(_WHOLE) for name in self._entries if name.endswith(_WHOLE)}
        return [name for name in self._entries if name.endswith(_SWAPPED) and name.partition(".")[0] not in owners]

    def expired(self) -> list[str]:
        """Return the names of the files whose time is over."""
        now = self.now()
        return [name for name, entry in self._entries.items() if entry.expires_at <= now]


def read_header(file: DirectFile) -> FileHeader:
    """Read the header of a file. Raises DamagedFileError, also if the file has another size than it says, and
    OSError."""
    sector = aligned_memory(SECTOR_BYTES)
    file.read(memoryview(sector), 0)
    header = FileHeader.from_bytes(sector[:])
    if file.size() != header.num_bytes:
        raise DamagedFileError(f"it has {file.size()} bytes, not {header.num_bytes}")
    return header
