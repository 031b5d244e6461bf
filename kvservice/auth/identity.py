"""Identity of the caller of an RPC."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Identity:
    """A caller that the daemon knows. Two identities are equal if their names are equal.

    `credential` is the SHA-256 of the token that the caller presented; b"" if it presented none.
    """

    name: str
    credential: bytes = field(default=b"", compare=False, repr=False)


# The identity of a caller on the unix socket, or over TCP if the daemon requires no authentication.
UNNAMED: Final = Identity("")

# The caller of the current RPC. gRPC runs each RPC in a separate task, so each RPC has its own value.
CALLER: Final[ContextVar[Identity]] = ContextVar("kvservice_caller", default=UNNAMED)
