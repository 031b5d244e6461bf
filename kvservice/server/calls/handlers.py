"""The types of RPC handlers. A handler checks the request, calls the engine once and translates the result.

There is one handler per RPC, named like the RPC and like the field of a stream's `Call`. The same handler serves unary
RPCs and calls on a session's stream. Handlers are of three kinds:

    sync     def f(session, request) -> Response | After  has finished when it returns
    sliced   def f(session, request) -> Slices | Waits    runs its first slice, then a task runs the others
    async    async def f(session, request) -> Response    moves bytes, and ends with its caller
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from kvservice.blocks.slices import Slices, Waits
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError
from kvservice.server.loop import Answer, Finished
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tenants import ENGINES, Roles
from kvservice.wire.tensors import Encoded

# Bytes reserved for the fields of a message besides its tensors.
_MESSAGE_OVERHEAD = 4096

# Responses with tensors are encoded by the handler. Bytes are a response that the observer has serialized.
Response: TypeAlias = Message | Encoded | bytes
RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Response)
# A response; slices; a response that has to wait; a task that completes even if its caller goes away; or the coroutine
# of an async handler.
Started: TypeAlias = (
    Answer[ResponseT]
    | Finished[ResponseT]
    | Slices[ResponseT]
    | Waits[Finished[ResponseT]]
    | Coroutine[Any, Any, ResponseT]
)

# A call after its first slice: a response, a task that completes even if its caller goes away, or the coroutine of an
# async handler.
Begun: TypeAlias = Response | asyncio.Task[Response] | Coroutine[Any, Any, Response]


class WhileDraining(enum.Enum):
    """Whether a call is allowed while the daemon drains."""

    ALLOWED = enum.auto()
    REFUSED = enum.auto()
    # Allowed for steps that have begun; the request has a step_id.
    FOR_BEGUN_STEPS = enum.auto()


@dataclass(frozen=True, slots=True)
class SessionHandler(Generic[RequestT, ResponseT]):
    """The handler of a call within a session."""

    method: str
    request_type: type[RequestT]
    start: Callable[[ServerSession, RequestT], Started[ResponseT]]
    while_draining: WhileDraining = WhileDraining.ALLOWED
    roles: Roles = ENGINES


@dataclass(frozen=True, slots=True)
class OpenHandler(Generic[RequestT, ResponseT]):
    """The handler of a call that needs no session."""

    method: str
    request_type: type[RequestT]
    start: Callable[[RequestT], Started[ResponseT]]
    while_draining: WhileDraining = WhileDraining.ALLOWED
    roles: Roles = ENGINES


Handler: TypeAlias = SessionHandler[Any, Any] | OpenHandler[Any, Any]


def max_response_bytes(config: ServeConfig) -> int:
    """Return the limit on the tensors and lists of a response."""
    return config.max_message_bytes - _MESSAGE_OVERHEAD


def response_too_large(num_bytes: int, limit: int, field: str) -> InvalidArgumentError:
    """Return the error for a request whose response would exceed a message. It is raised before the work is done."""
    return InvalidArgumentError(f"the answer would take {num_bytes} bytes, a message may have {limit}", field=field)
