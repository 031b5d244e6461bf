"""The table of RPC handlers. A handler checks the request, calls the engine or the block manager, and translates
the result.

There is one handler per RPC, named like the RPC and like the field of a stream's `Call`. The same handler serves unary
RPCs and calls on a session's stream. The table says what a handler is:

    Kind.PLAIN    def f(session, request) -> Response           has finished when it returns
    Kind.SLICED   def f(session, request) -> Slices | Waits     runs its first slice, then a task runs the others, which
                                                                completes even if its caller goes away
    Kind.ASYNC    async def f(session, request) -> Response     moves bytes, and ends with its caller
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from kvservice.blocks.slices import Waits
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tenants import ENGINES, Roles
from kvservice.wire.tensors import Encoded

# Bytes reserved for the fields of a message besides its tensors.
_MESSAGE_OVERHEAD = 4096

# Responses with tensors are encoded by the handler. Bytes are a response that the observer has serialized.
Response: TypeAlias = Message | Encoded | bytes
RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Response)
# A handler that publishes steps to lanes returns this: its response, and what its caller has to wait for, if anything.
Published: TypeAlias = tuple[ResponseT, Awaitable[None] | None]
Returned: TypeAlias = ResponseT | Published[ResponseT]
Started: TypeAlias = Returned[ResponseT] | Waits[Returned[ResponseT]] | Coroutine[Any, Any, ResponseT]


class Kind(enum.Enum):
    PLAIN = enum.auto()
    SLICED = enum.auto()
    ASYNC = enum.auto()

    @staticmethod
    def of(start: Callable[..., object]) -> Kind:
        if inspect.iscoroutinefunction(start):
            return Kind.ASYNC
        return Kind.SLICED if inspect.isgeneratorfunction(start) else Kind.PLAIN


class WhileDraining(enum.Enum):
    """Whether a call is allowed while the daemon drains."""

    ALLOWED = enum.auto()
    REFUSED = enum.auto()
    # Allowed for steps that have begun; the request has a step_id.
    FOR_BEGUN_STEPS = enum.auto()


@dataclass(frozen=True, slots=True)
class Handler(Generic[RequestT, ResponseT]):
    """One row of the table: the handler of a call within a session, `start(session, request)`, or of one that needs no
    session, `start(request)`.

    A handler that `publishes` returns a pair, see Published. A request that is `repeatable` may have a request id, with
    which a client repeats it; its handler changes bookkeeping only.
    """

    method: str
    request_type: type[RequestT]
    start: Callable[..., Started[ResponseT]]
    while_draining: WhileDraining
    roles: Roles
    in_session: bool
    publishes: bool
    kind: Kind = field(init=False)
    repeatable: bool = field(init=False)

    def __post_init__(self) -> None:
        named = "request_id" in self.request_type.DESCRIPTOR.fields_by_name
        object.__setattr__(self, "kind", Kind.of(self.start))
        object.__setattr__(self, "repeatable", self.in_session and named)
        assert not (self.repeatable and self.kind is Kind.ASYNC), (
            f"{self.method} is repeatable, and ends with its caller"
        )


AnyHandler: TypeAlias = Handler[Any, Any]


def in_session(
    method: str,
    request_type: type[RequestT],
    start: Callable[[ServerSession, RequestT], Started[ResponseT]],
    while_draining: WhileDraining = WhileDraining.ALLOWED,
    roles: Roles = ENGINES,
    *,
    publishes: bool = False,
) -> Handler[RequestT, ResponseT]:
    """Return the handler of a call within a session."""
    return Handler(method, request_type, start, while_draining, roles, in_session=True, publishes=publishes)


def without_session(
    method: str,
    request_type: type[RequestT],
    start: Callable[[RequestT], Started[ResponseT]],
    while_draining: WhileDraining = WhileDraining.ALLOWED,
    roles: Roles = ENGINES,
) -> Handler[RequestT, ResponseT]:
    """Return the handler of a call that needs no session."""
    return Handler(method, request_type, start, while_draining, roles, in_session=False, publishes=False)


def max_response_bytes(config: ServeConfig) -> int:
    """Return the limit on the tensors and lists of a response."""
    return config.max_message_bytes - _MESSAGE_OVERHEAD


def response_too_large(num_bytes: int, limit: int, field: str) -> InvalidArgumentError:
    """Return the error for a request whose response would exceed a message. It is raised before the work is done."""
    return InvalidArgumentError(f"the answer would take {num_bytes} bytes, a message may have {limit}", field=field)
