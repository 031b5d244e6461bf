"""The file that says what the other files of a state mean, and how the process that wrote them ended."""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from kvservice import plain_json
from kvservice.kept.errors import KeptStateError

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
