"""The caller of an RPC."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Identity:
    """A caller that the daemon knows. Two identities are the same if their names are.

    `credential` is the SHA-256 of the token that the caller presented; b"" if it presented none.
    """

    name: str
    credential: bytes = field(default=b"", compare=False, repr=False)


# A caller on the unix socket, or over TCP where the daemon asks for no name.
UNNAMED: Final = Identity("")

# The caller of the RPC under way. gRPC runs each RPC in a task of its own, so each has its own value.
CALLER: Final[ContextVar[Identity]] = ContextVar("kvservice_caller", default=UNNAMED)
