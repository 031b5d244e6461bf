"""The descriptors that the keeper holds for the daemon, by name."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

# A daemon stores about fifteen: the memory files, the pool of a GPU, and its listening sockets.
MAX_DESCRIPTORS = 64


class DescriptorStore:
    """Owns the descriptors that are put into it."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}

    @property
    def kept(self) -> Mapping[str, int]:
        """The descriptors by name."""
        return self._kept

    def put(self, name: str, descriptor: int) -> bool:
        """Keep the descriptor in place of the one of this name. Closes it and returns False if the store is full."""
        if name not in self._kept and len(self._kept) >= MAX_DESCRIPTORS:
            os.close(descriptor)
            return False
        self.remove(name)
        self._kept[name] = descriptor
        return True

    def remove(self, name: str) -> None:
        """Close the descriptor of this name, if there is one."""
        if (descriptor := self._kept.pop(name, None)) is not None:
            os.close(descriptor)

    @property
    def has_state(self) -> bool:
        """Whether there is more than listening sockets."""
        return any(not _is_socket(descriptor) for descriptor in self._kept.values())

    def discard_state(self) -> None:
        """Close all descriptors but those of sockets: an address that is let go of can be taken by others."""
        for name, descriptor in [*self._kept.items()]:
            if not _is_socket(descriptor):
                self.remove(name)


def _is_socket(descriptor: int) -> bool:
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
