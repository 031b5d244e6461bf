"""What can go wrong, as one tree. Every class carries the gRPC status that it travels under.

    KVServiceError
    ├── InvalidArgumentError        INVALID_ARGUMENT     a field of the request is wrong, whatever the state
    ├── NotFoundError               NOT_FOUND
    │   ├── UnknownSequenceError                         never allocated, freed, or another session's
    │   ├── UnknownStepError
    │   ├── UnknownPinError
    │   ├── UnknownRegionError                           never registered, unregistered, or another session's
    │   └── UnknownSessionError
    ├── DuplicateSequenceError      ALREADY_EXISTS
    ├── DuplicateRegionError        ALREADY_EXISTS
    ├── FailedPreconditionError     FAILED_PRECONDITION  the request is well formed, the state is not right for it
    │   ├── LengthMismatchError                          the sequence is not as long as the caller expects
    │   ├── SequenceSwappedError                         its blocks are in the swap tier
    │   ├── SequenceNotSwappedError
    │   ├── NotComputedError                             its K/V are not written yet
    │   ├── StaleStepError                               a newer operation replaced the step
    │   ├── LayerWrittenError                            the layer was already sent in this step
    │   ├── ReplyForgottenError                          the request was done before; its reply is not known any more
    │   ├── SessionTakenError                            another client has taken the session over
    │   ├── RegionsNotAllowedError                       the daemon takes none, or none over this connection
    │   ├── PoolNotSharedError                           the daemon does not let clients map its pool, or not to write
    │   ├── EventsOffError                               the daemon records no block events
    │   └── RegionShrunkError                            the client has truncated its shared-memory object
    ├── ResourceExhaustedError      RESOURCE_EXHAUSTED
    │   ├── OutOfBlocksError                             carries the counts; may succeed later
    │   ├── QuotaExceededError                           carries the limit's name and value
    │   └── MessageTooLargeError
    ├── DrainingError               UNAVAILABLE          the daemon is shutting down
    ├── ObserverUnavailableError    UNAVAILABLE          the process that computes the answer is starting
    ├── ConnectionLostError         UNAVAILABLE          raised by clients only
    │   ├── DaemonAwayError                              known from an earlier call: raised at once, nothing was sent
    │   └── TLSHandshakeError                            client and daemon do not agree on TLS or on certificates
    ├── CallTimeoutError            DEADLINE_EXCEEDED    raised by clients only: no answer within the call's timeout_s
    ├── UnauthenticatedError        UNAUTHENTICATED      the daemon does not know the caller's token
    ├── RegionNotOpenedError        INTERNAL             no such shared-memory object; the status is Triton's
    └── InternalError               INTERNAL             a bug of ours, or a device that failed

Nothing is changed by an operation that raises one of these, but for two cases. A client truncates its shared-memory
object while a call that puts its output there is under way: then the layer is written and the output lost. Or an answer
is lost on its way, which the client sees as ConnectionLostError or CallTimeoutError: then the call may have been done;
as ReplyForgottenError: then it was.
"""

from __future__ import annotations

from typing import ClassVar


class KVServiceError(Exception):
    """Base of the tree. `reason` is the stable machine-readable name, `status` the gRPC status code's name."""

    status: ClassVar[str] = "UNKNOWN"
    reason: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, field: str = "", **metadata: str | int) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidArgumentError(KVServiceError):
    status = "INVALID_ARGUMENT"
    reason = "INVALID_ARGUMENT"


class NotFoundError(KVServiceError):
    status = "NOT_FOUND"
    reason = "NOT_FOUND"


class UnknownSequenceError(NotFoundError):
    reason = "UNKNOWN_SEQUENCE"


class UnknownStepError(NotFoundError):
    reason = "UNKNOWN_STEP"


class UnknownPinError(NotFoundError):
    reason = "UNKNOWN_PIN"


class UnknownRegionError(NotFoundError):
    reason = "UNKNOWN_REGION"


class UnknownSessionError(NotFoundError):
    reason = "UNKNOWN_SESSION"


class DuplicateSequenceError(KVServiceError):
    status = "ALREADY_EXISTS"
    reason = "DUPLICATE_SEQUENCE"


class DuplicateRegionError(KVServiceError):
    status = "ALREADY_EXISTS"
    reason = "DUPLICATE_REGION"


class FailedPreconditionError(KVServiceError):
    status = "FAILED_PRECONDITION"
    reason = "FAILED_PRECONDITION"


class LengthMismatchError(FailedPreconditionError):
    reason = "LENGTH_MISMATCH"


class SequenceSwappedError(FailedPreconditionError):
    reason = "SEQUENCE_SWAPPED"


class SequenceNotSwappedError(FailedPreconditionError):
    reason = "SEQUENCE_NOT_SWAPPED"


class NotComputedError(FailedPreconditionError):
    reason = "NOT_COMPUTED"


class StaleStepError(FailedPreconditionError):
    reason = "STALE_STEP"


class LayerWrittenError(FailedPreconditionError):
    reason = "LAYER_WRITTEN"


class ReplyForgottenError(FailedPreconditionError):
    reason = "REPLY_FORGOTTEN"


class SessionTakenError(FailedPreconditionError):
    reason = "SESSION_TAKEN"


class RegionsNotAllowedError(FailedPreconditionError):
    reason = "REGIONS_NOT_ALLOWED"


class PoolNotSharedError(FailedPreconditionError):
    reason = "POOL_NOT_SHARED"


class EventsOffError(FailedPreconditionError):
    reason = "EVENTS_OFF"


class RegionShrunkError(FailedPreconditionError):
    reason = "REGION_SHRUNK"


class ResourceExhaustedError(KVServiceError):
    status = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"


class OutOfBlocksError(ResourceExhaustedError):
    """`metadata` carries `tier` (device or swap), `required`, `free` and `total` blocks.

    `never` says that no freeing of blocks can help: the pool is too small for the request.
    """

    reason = "OUT_OF_BLOCKS"

    def __init__(
        self, message: str, *, tier: str, required: int, free: int, total: int, never: bool = False, field: str = ""
    ) -> None:
        super().__init__(
            message, field=field, tier=tier, required=required, free=free, total=total, never=str(never).lower()
        )
        self.tier, self.required, self.free, self.total, self.never = tier, required, free, total, never


class QuotaExceededError(ResourceExhaustedError):
    """`metadata` carries `limit`, the configuration field that set the bound, and its `value`."""

    reason = "QUOTA_EXCEEDED"


class MessageTooLargeError(ResourceExhaustedError):
    reason = "MESSAGE_TOO_LARGE"


class DrainingError(KVServiceError):
    status = "UNAVAILABLE"
    reason = "DRAINING"


class ObserverUnavailableError(KVServiceError):
    status = "UNAVAILABLE"
    reason = "OBSERVER_UNAVAILABLE"


class ConnectionLostError(KVServiceError):
    status = "UNAVAILABLE"
    reason = "CONNECTION_LOST"


class DaemonAwayError(ConnectionLostError):
    reason = "DAEMON_AWAY"


class CallTimeoutError(KVServiceError):
    status = "DEADLINE_EXCEEDED"
    reason = "CALL_TIMEOUT"


class TLSHandshakeError(ConnectionLostError):
    reason = "TLS_HANDSHAKE"


class UnauthenticatedError(KVServiceError):
    """`metadata` carries `cause`: missing, malformed or unknown."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class RegionNotOpenedError(KVServiceError):
    status = "INTERNAL"
    reason = "REGION_NOT_OPENED"


class InternalError(KVServiceError):
    status = "INTERNAL"
    reason = "INTERNAL"
