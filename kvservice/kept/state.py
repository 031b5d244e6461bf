"""The daemon's state: taken over from an earlier process, or new."""

from __future__ import annotations

import json
import mmap
import os
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvservice import plain_json
from kvservice.kept.table import KeptDict, KeptStateError, KeptTable, Section
from kvservice.pool.sealed import SealedMemory
from kvservice.telemetry.arrays import Manifest, SharedArrays

# ---- the descriptors that a keeper holds for the daemon, by name


class FileKeeper(Protocol):
    """The process that keeps descriptors: systemd, or the parent that `kvservice serve` puts in its place."""

    def store(self, name: str, fd: int, /) -> None:
        """Keep a duplicate of the descriptor, in place of one that it keeps under this name."""

    def remove(self, name: str, /) -> None:
        """Close the descriptor of this name."""

    def barrier(self) -> None:
        """Return when everything above has been done."""


class KeptFiles:
    """The descriptors taken from the keeper, and the keeper. Without a keeper nothing outlives this process."""

    def __init__(self, taken: Mapping[str, int], keeper: FileKeeper | None) -> None:
        """`taken` is owned by this object, and each descriptor by the caller of `take`."""
        self._taken = dict(taken)
        self._keeper = keeper

    @property
    def is_kept(self) -> bool:
        return self._keeper is not None

    def names(self) -> set[str]:
        """Return the names of the descriptors that nobody has taken."""
        return set(self._taken)

    def take(self, name: str) -> int | None:
        """Return the descriptor of this name, which the caller owns from now on, or None."""
        return self._taken.pop(name, None)

    def peek(self, name: str) -> int | None:
        """Return the descriptor of this name, which stays here, or None."""
        return self._taken.get(name)

    def put(self, name: str, fd: int) -> None:
        """Let the keeper keep a duplicate."""
        if self._keeper is not None:
            self._keeper.store(name, fd)

    def discard(self, names: Iterable[str]) -> None:
        """Close descriptors here, if they were not taken, and in the keeper. Their memory is free when this returns,
        unless this process uses it."""
        names = list(names)
        for name in names:
            if (fd := self._taken.pop(name, None)) is not None:
                os.close(fd)
            if self._keeper is not None:
                self._keeper.remove(name)
        if names and self._keeper is not None:
            self._keeper.barrier()


# ---- arrays of the daemon in two memory files: one that the observer reads, and a private one


class KeptArrays:
    """Implements kvservice.blocks.ArrayMemory."""

    def __init__(self, shared: SharedArrays, private: SharedArrays) -> None:
        self.shared = shared
        self.private = private
        self._kept: dict[str, npt.NDArray[Any]] = {}

    @property
    def manifest(self) -> Manifest:
        """The arrays that the observer reads."""
        return self.shared.manifest

    def read_only(self) -> int:
        """Return a read-only descriptor of the observer's file. The caller closes it."""
        return self.shared.read_only()

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array that is zero at every start of the daemon. Raises MemoryError."""
        return self.shared.zeros(name, shape, dtype)

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, private: bool = False
    ) -> npt.NDArray[Any]:
        """Return an array that keeps its content over restarts, and is zero at first. The same name returns the same
        array. Raises MemoryError, and ValueError if it has another shape or dtype."""
        array = self._kept.get(name)
        if array is None:
            array = self._kept[name] = (self.private if private else self.shared).kept(name, shape, dtype)
        if array.shape != shape or array.dtype != np.dtype(dtype):
            raise ValueError(f"{name} has shape {list(array.shape)} and dtype {array.dtype}")
        return array


# ---- the file that says what the other files of a state mean, and how the process that wrote them ended


# The version increases with every change of the meaning of any kept bytes.
STATE_VERSION: Final = 1
_MAGIC: Final = int.from_bytes(b"KVSTATE\0", "little")
_NUM_BYTES: Final = 64 << 10
_TEXT_AT: Final = 4096
# Words of the first page. The magic and the version have these places in all versions.
_MAGIC_AT, _VERSION_AT, _READY, _CLEAN, _FAULTED, _ATTEMPTS, _TEXT_BYTES, _NUM_WORDS = range(8)
# Take-overs of a state that may fail by themselves before it is given up.
MAX_ATTEMPTS: Final = 5


class StateHeader:
    """The header of a state. Each of its flags is stored in one piece."""

    def __init__(self, fd: int) -> None:
        """Map a header, and own the descriptor. Raises KeptStateError if it is none."""
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        if os.fstat(fd).st_size != _NUM_BYTES:
            raise KeptStateError("its header has another size")
        self._memory = mmap.mmap(fd, _NUM_BYTES)
        self._words = np.frombuffer(self._memory, np.uint64, _NUM_WORDS)

    @classmethod
    def create(cls, identity: Mapping[str, Any]) -> StateHeader:
        """Write a new header. `identity` has values of JSON by name."""
        text = plain_json.dumps(dict(identity)).encode()
        assert len(text) <= _NUM_BYTES - _TEXT_AT, "the identity has a few dozen items"
        fd = os.memfd_create("kvservice-state", os.MFD_CLOEXEC)
        os.ftruncate(fd, _NUM_BYTES)
        header = cls(fd)
        header._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
        header._words[_TEXT_BYTES], header._words[_VERSION_AT] = len(text), STATE_VERSION
        header._words[_MAGIC_AT] = _MAGIC
        return header

    def refusal(self, identity: Mapping[str, Any]) -> str:
        """Return why a state with this header cannot be taken over, or an empty text."""
        if int(self._words[_MAGIC_AT]) != _MAGIC:
            return "its header is unknown"
        if (version := int(self._words[_VERSION_AT])) != STATE_VERSION:
            return f"its version is {version}, this daemon's {STATE_VERSION}"
        if self._words[_FAULTED]:
            return "the device failed"
        if self._words[_ATTEMPTS] >= MAX_ATTEMPTS:
            return f"the take-over failed {MAX_ATTEMPTS} times"
        try:
            before = dict(json.loads(self._memory[_TEXT_AT : _TEXT_AT + int(self._words[_TEXT_BYTES])]))
        except (TypeError, ValueError, RecursionError):
            return "its identity is unreadable"
        now = json.loads(plain_json.dumps(dict(identity)))
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return "; ".join(f"{name} was {before.get(name)}, is {now.get(name)}" for name in names)

    @property
    def is_damaged(self) -> bool:
        """Whether the header itself is damaged, or the state has ended each process that took it over."""
        if int(self._words[_MAGIC_AT]) != _MAGIC:
            return True
        return int(self._words[_VERSION_AT]) == STATE_VERSION and bool(self._words[_ATTEMPTS] >= MAX_ATTEMPTS)

    @property
    def is_ready(self) -> bool:
        """Whether the state was complete once."""
        return bool(self._words[_READY])

    @property
    def is_clean(self) -> bool:
        """Whether the process that wrote the state ended in order."""
        return bool(self._words[_CLEAN])

    def begin(self, *, was_killed: bool) -> None:
        """Count a take-over that has not ended. With `was_killed` the one before does not count: it did not fail by
        itself."""
        counted = int(self._words[_ATTEMPTS])
        self._words[_ATTEMPTS] = counted + 1 - min(was_killed, counted)

    def ready(self) -> None:
        """Say that the state is complete, and belongs to a running process."""
        self._words[_CLEAN] = 0
        self._words[_READY] = 1
        self._words[_ATTEMPTS] = 0

    def end_attempt(self) -> None:
        """Say that the state is whole, or is not the reason why the take-over failed."""
        self._words[_ATTEMPTS] = 0

    def mark_clean(self) -> None:
        self._words[_CLEAN] = 1

    def mark_faulted(self) -> None:
        self._words[_FAULTED] = 1


# ---- the state


# Names of descriptors at the keeper begin so.
PREFIX: Final = "kvservice.state."
_HEADER, _TABLE, _SHARED, _PRIVATE = "header", "table", "arrays", "private"
# The size of a descriptor that is no memory file.
_NO_SIZE: Final = -1
# Names of descriptors of a damaged state, which is set aside.
ASIDE: Final = "kvservice.damaged."
# The limit on the memory of what is set aside: its largest files, the K/V themselves, are let go of.
ASIDE_BYTES: Final = 256 << 20


class Facts(MutableMapping[str, Any]):
    """Values of JSON that one process decided and later ones must know. They are stored together."""

    def __init__(self, section: KeptDict) -> None:
        self._section = section
        self._values: dict[str, Any] = json.loads(section.get(0, b"{}"))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._replace({**self._values, name: value})

    def __delitem__(self, name: str) -> None:
        values = dict(self._values)
        del values[name]
        self._replace(values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _replace(self, values: dict[str, Any]) -> None:
        self._section[0] = plain_json.dumps(values).encode()
        self._values = values


class KeptState:
    """All that outlives the daemon's process. It has the same parts whether it was taken over or is new."""

    taken: bool
    """Whether the state is an earlier process's."""
    refused: str
    """Why an earlier process's state was not taken over, or empty."""
    clean: bool
    """Whether the earlier process ended in order."""

    def __init__(self, files: KeptFiles, header: StateHeader, table: KeptTable, earlier: Mapping[str, Any]) -> None:
        """`earlier` is the earlier process's record of its files, empty for a new state."""
        self._files = files
        self._header = header
        self.taken = bool(earlier)
        self.refused = ""
        self.clean = self.taken and header.is_clean
        self.table = table
        self.facts = Facts(table.section(Section.FACTS))
        self._earlier: dict[str, int] = dict(earlier.get("sizes", {}))
        # Sizes of the files of this state, and descriptors that the keeper does not have yet.
        self._sizes: dict[str, int] = {_HEADER: _NO_SIZE, _TABLE: _NO_SIZE, _SHARED: _NO_SIZE, _PRIVATE: _NO_SIZE}
        shared, private = (
            SharedArrays(f"kvservice-{name}", files.take(PREFIX + name), earlier.get(name, ()))
            for name in (_SHARED, _PRIVATE)
        )
        self.arrays = KeptArrays(shared, private)
        own = {_HEADER: header.fd, _TABLE: table.fd, _SHARED: shared.fd, _PRIVATE: private.fd}
        self._new: dict[str, int] = {} if self.taken else own
        self._aside = _Aside({})
        self._is_ready = False

    @classmethod
    def open(cls, files: KeptFiles, identity: Mapping[str, Any], *, was_killed: bool = False) -> KeptState:
        """Take over the state in `files`, or create one. `identity` has values of JSON by name, all that decides the
        meaning of the bytes: a state with another identity is refused and dropped, and `refused` names the differences.
        A damaged one is refused too, and set aside. `was_killed`: the process before was killed, if it never served.

        Raises OSError and MemoryError, which are no fault of the state: it stays for the next start.
        """
        for name in files.names():
            if name.startswith(ASIDE):  # for a person, not for this process
                os.close(files.take(name) or -1)
        names = _names(files)
        refused = ""
        aside = _Aside.of(files, names)
        try:
            header = _header(files.take(PREFIX + _HEADER))
            if header is not None and not (refused := header.refusal(identity)):
                header.begin(was_killed=was_killed)
                try:
                    table = KeptTable(_required(files.take(PREFIX + _TABLE), _TABLE))
                    state = cls(files, header, table, _record(files, table))
                except (OSError, MemoryError):
                    header.end_attempt()
                    raise
                state._aside = aside
                return state
            is_damaged = header is not None and header.is_damaged
        except (OSError, MemoryError):
            aside.close()
            raise
        except Exception as error:  # damage may break anything
            is_damaged, refused = True, str(error) or type(error).__name__
        files.discard(names)
        if is_damaged:
            aside.put(files)
        aside.close()
        state = cls(files, StateHeader.create(identity), KeptTable(), {})
        state.refused = refused
        return state

    @classmethod
    def fresh(cls) -> KeptState:
        """Create a state that ends with this process."""
        return cls.open(KeptFiles({}, None), {})

    @staticmethod
    def check(files: KeptFiles, identity: Mapping[str, Any]) -> str:
        """Return why `open` would not take over the state of a process that still runs, or an empty text."""
        fd = files.peek(PREFIX + _HEADER)
        try:
            header = _header(None if fd is None else os.dup(fd))
        except (KeptStateError, OSError) as error:
            return str(error)
        return "there is none" if header is None else header.refusal(identity)

    def memory(
        self,
        name: str,
        num_bytes: int,
        *,
        read_only: bool,
        sparse: bool = False,
        children_write: bool = False,
        first_bytes: int | None = None,
    ) -> SealedMemory:
        """Return the earlier process's memory of this name, or new zeroed memory. The pages of `sparse` memory are
        allocated on first use; of other new memory only the `first_bytes`, if they are given. With `children_write`,
        processes that get `fd` can write, also if it is read-only for all others. Raises OSError if the host does not
        have enough, and KeptStateError if the earlier one has another size."""
        fd = self._take(name, num_bytes)
        if fd is not None:
            return SealedMemory.reopen(fd, num_bytes, read_only=read_only)
        if sparse:
            memory = SealedMemory.sparse(f"kvservice-{name}", num_bytes)
        else:
            kept = self._files.is_kept or children_write
            memory = SealedMemory(
                f"kvservice-{name}", num_bytes, read_only=read_only, kept=kept, first_bytes=first_bytes
            )
        self._add(name, num_bytes, os.dup(memory.fd))
        return memory

    def descriptor(self, name: str) -> int | None:
        """Return the descriptor that the earlier process put here, which the caller then owns, or None."""
        return self._take(name, _NO_SIZE)

    def put_descriptor(self, name: str, fd: int) -> None:
        """Keep a descriptor that is no memory file. This object owns it from now on."""
        self._add(name, _NO_SIZE, fd)

    def ready(self) -> None:
        """Hand the files to the keeper. From now on the next process takes the state over."""
        self._is_ready = True
        for name in list(self._new):
            self._hand_over(name)
        self._record_files()
        self._header.ready()
        self._aside.close()
        self._files.discard(_names(self._files))

    def end_attempt(self) -> None:
        """Say that the state is not at fault if this process ends before it is ready."""
        self._header.end_attempt()

    def mark_clean(self) -> None:
        """Say that this process ends in order: no operation is in progress."""
        self._header.mark_clean()

    def mark_faulted(self) -> None:
        """Say that the device failed, so that no process takes the state over. Any thread may call this."""
        self._header.mark_faulted()

    def discard(self) -> None:
        """Let the keeper drop all files of a damaged state, but set aside what tells of the damage."""
        self._files.discard({PREFIX + name for name in (*self._sizes, *self._earlier)})
        self._aside.put(self._files)
        self._aside.close()

    def _take(self, name: str, num_bytes: int) -> int | None:
        fd = self._files.take(PREFIX + name)
        if fd is None:
            return None
        if name not in self._earlier:  # put by a process that was killed before it recorded that
            os.close(fd)
            self._files.discard([PREFIX + name])
            return None
        if self._earlier[name] != num_bytes:
            os.close(fd)
            raise KeptStateError(f"{name} had {self._earlier[name]} bytes, has {num_bytes}")
        self._sizes[name] = num_bytes
        return fd

    def _add(self, name: str, num_bytes: int, fd: int) -> None:
        assert name not in self._sizes, "each name stands for one file"
        if not self._files.is_kept:
            os.close(fd)
            return
        self._sizes[name], self._new[name] = num_bytes, fd
        if self._is_ready:
            self._hand_over(name)
            self._record_files()

    def _hand_over(self, name: str) -> None:
        fd = self._new.pop(name)
        self._files.put(PREFIX + name, fd)
        if name not in (_HEADER, _TABLE, _SHARED, _PRIVATE):  # their objects own them
            os.close(fd)

    def _record_files(self) -> None:
        arrays = {_SHARED: self.arrays.shared.manifest, _PRIVATE: self.arrays.private.manifest}
        self.table.section(Section.FILES)[0] = plain_json.dumps({"sizes": self._sizes, **arrays}).encode()


class _Aside:
    """The small files of a state, for whoever looks for the damage. It owns its descriptors."""

    def __init__(self, descriptors: dict[str, int]) -> None:
        self._descriptors = descriptors

    @classmethod
    def of(cls, files: KeptFiles, names: Iterable[str]) -> _Aside:
        sizes = {}
        for name in names:
            fd = files.peek(name)
            if fd is not None and stat.S_ISREG((found := os.fstat(fd)).st_mode):
                sizes[name] = found.st_blocks * 512
        kept, room = {}, ASIDE_BYTES
        for name, num_bytes in sorted(sizes.items(), key=lambda one: one[1]):
            if (room := room - num_bytes) >= 0:
                kept[name] = os.dup(files.peek(name) or -1)
        return cls(kept)

    def put(self, files: KeptFiles) -> None:
        """Have the keeper keep the files, in place of those of an earlier damaged state."""
        files.discard([ASIDE + name.removeprefix(PREFIX) for name in self._descriptors])
        for name, fd in self._descriptors.items():
            files.put(ASIDE + name.removeprefix(PREFIX), fd)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _names(files: KeptFiles) -> list[str]:
    return [name for name in files.names() if name.startswith(PREFIX)]


def _header(fd: int | None) -> StateHeader | None:
    """Return the header of a complete state, or None. Raises KeptStateError."""
    header = None if fd is None else StateHeader(fd)
    return header if header is not None and header.is_ready else None


def _record(files: KeptFiles, table: KeptTable) -> dict[str, Any]:
    """Return the earlier process's record of its files. Raises KeptStateError if one of them is missing or is cut."""
    record: dict[str, Any] = json.loads(table.section(Section.FILES).get(0, b"{}"))
    if not record:
        raise KeptStateError("its files are not listed")
    for name in record["sizes"].keys() - {_HEADER, _TABLE}:
        fd, num_bytes = _required(files.peek(PREFIX + name), name), record["sizes"][name]
        if num_bytes != _NO_SIZE and os.fstat(fd).st_size != num_bytes:
            raise KeptStateError(f"its {name} has {os.fstat(fd).st_size} bytes instead of {num_bytes}")
    return record


def _required(fd: int | None, name: str) -> int:
    if fd is None:
        raise KeptStateError(f"its {name} is missing")
    return fd
