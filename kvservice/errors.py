"""The error tree. Every class names the gRPC status that it maps to.

    KVServiceError
    ├── InvalidArgumentError        INVALID_ARGUMENT     a field of the request is wrong in any state
    ├── NotFoundError               NOT_FOUND
    │   ├── UnknownSequenceError                         never allocated, freed, or of another session
    │   │   └── SequenceLostError                        it did not survive a restart of the daemon
    │   ├── UnknownStepError
    │   ├── UnknownPinError
    │   ├── UnknownRegionError                           never registered, unregistered, or of another session
    │   ├── UnknownSessionError
    │   ├── UnknownNamespaceError                        of the store; the session has not opened it
    │   ├── UnknownLeaseError                            it has ended, or is another session's
    │   └── UnknownReservationError                      it has ended, or is another session's
    ├── DuplicateSequenceError      ALREADY_EXISTS
    ├── DuplicateRegionError        ALREADY_EXISTS
    ├── FailedPreconditionError     FAILED_PRECONDITION  the request is valid, but not in this state
    │   ├── LengthMismatchError                          the sequence does not have the expected length
    │   ├── SequenceSwappedError                         its blocks are in the swap tier
    │   ├── SequenceNotSwappedError
    │   ├── SequenceScheduledError                       it belongs to the session's scheduler, which alone changes it
    │   ├── NotComputedError                             its K/V are not written yet
    │   ├── StaleStepError                               a newer operation replaced the step
    │   ├── LayerWrittenError                            the layer was already sent in this step
    │   ├── ReplyForgottenError                          the request was executed before; its reply is no longer stored
    │   ├── SessionTakenError                            another client has taken the session over
    │   ├── RegionsNotAllowedError                       the daemon accepts no regions, or none over this connection
    │   ├── PoolNotSharedError                           clients may not map the pool, or not for writing
    │   ├── StoreOffError                                the daemon has no store
    │   ├── StoreNotSharedError                          clients may not map the store, or not for writing
    │   ├── EventsOffError                               the daemon records no block events
    │   ├── SavedSessionsOffError                        the daemon has no disk for sessions
    │   ├── SessionBusyError                             the session is being saved
    │   ├── SessionNotRestoredError                      it does not fit this daemon, or its file is damaged
    │   ├── RegionShrunkError                            the client has truncated its shared-memory object
    │   ├── RegionNotOpenedError                         no memory of the client that daemon and client may open
    │   └── TransferOffError                             the daemon has no transfer engine
    ├── ResourceExhaustedError      RESOURCE_EXHAUSTED
    │   ├── OutOfBlocksError                             carries the counts; may succeed later
    │   ├── QuotaExceededError                           carries the limit's name and value
    │   ├── MessageTooLargeError
    │   └── DiskFullError                                no space is left for a session
    ├── DrainingError               UNAVAILABLE          the daemon is shutting down
    │   └── RestartingError                              a new process takes over; the call was not executed
    ├── ObserverUnavailableError    UNAVAILABLE          the process that computes the answer is starting
    ├── TransferFailedError         UNAVAILABLE          a transfer engine did not start, or did not move the bytes
    ├── ConnectionLostError         UNAVAILABLE          raised by clients only
    │   ├── DaemonAwayError                              the connection is known to be down; nothing was sent
    │   ├── NoDaemonError                                no daemon of a cluster can be used
    │   └── TLSHandshakeError                            client and daemon do not agree on TLS or on certificates
    ├── CallTimeoutError            DEADLINE_EXCEEDED    raised by clients only: no answer within the call's timeout_s
    ├── UnauthenticatedError        UNAUTHENTICATED      the daemon does not know the caller's token
    ├── PermissionDeniedError       PERMISSION_DENIED    the caller's tenant or role may not do this
    ├── DiskFailedError             INTERNAL             the disk with the saved sessions cannot be read or written
    └── InternalError               INTERNAL             a bug in the daemon, or a device failure

An operation that raises one of these errors changes nothing, with two exceptions. First, if a client truncates its
shared-memory object while a call writes its output there, the layer is written and the output is lost. Second, a reply
may be lost in transit. The client then gets ConnectionLostError or CallTimeoutError, and the call may have been
executed; or it gets ReplyForgottenError, and the call was executed.
"""

from __future__ import annotations

from typing import ClassVar


class KVServiceError(Exception):
    """Base class. `reason` is the stable machine-readable name, `status` the name of the gRPC status code."""

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


class SequenceLostError(UnknownSequenceError):
    """The sequence did not survive a restart of the daemon: an operation on it was in progress, or its K/V were being
    copied. Freeing the sequence, or creating one with its id, ends this state."""

    reason = "SEQUENCE_LOST"


class UnknownStepError(NotFoundError):
    reason = "UNKNOWN_STEP"


class UnknownPinError(NotFoundError):
    reason = "UNKNOWN_PIN"


class UnknownRegionError(NotFoundError):
    reason = "UNKNOWN_REGION"


class UnknownSessionError(NotFoundError):
    reason = "UNKNOWN_SESSION"


class UnknownNamespaceError(NotFoundError):
    reason = "UNKNOWN_NAMESPACE"


class UnknownLeaseError(NotFoundError):
    reason = "UNKNOWN_LEASE"


class UnknownReservationError(NotFoundError):
    reason = "UNKNOWN_RESERVATION"


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


class SequenceScheduledError(FailedPreconditionError):
    reason = "SEQUENCE_SCHEDULED"


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


class StoreOffError(FailedPreconditionError):
    reason = "STORE_OFF"


class StoreNotSharedError(FailedPreconditionError):
    reason = "STORE_NOT_SHARED"


class EventsOffError(FailedPreconditionError):
    reason = "EVENTS_OFF"


class SavedSessionsOffError(FailedPreconditionError):
    reason = "SAVED_SESSIONS_OFF"


class SessionBusyError(FailedPreconditionError):
    reason = "SESSION_BUSY"


class SessionNotRestoredError(FailedPreconditionError):
    """A saved session cannot come back here. `metadata` holds `cause`: another_model, sharing, limits or damaged. The
    file stays until it expires."""

    reason = "SESSION_NOT_RESTORED"


class RegionShrunkError(FailedPreconditionError):
    reason = "REGION_SHRUNK"


class RegionNotOpenedError(FailedPreconditionError):
    reason = "REGION_NOT_OPENED"


class TransferOffError(FailedPreconditionError):
    reason = "TRANSFER_OFF"


class ResourceExhaustedError(KVServiceError):
    status = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"


class OutOfBlocksError(ResourceExhaustedError):
    """A tier has too few free blocks. `metadata` holds `tier` (device or swap), `required`, `free` and `total` blocks.

    `never` says that the request can never succeed, because the pool is too small for it. The text ends with that.
    """

    reason = "OUT_OF_BLOCKS"

    def __init__(
        self, message: str, *, tier: str, required: int, free: int, total: int, never: bool = False, field: str = ""
    ) -> None:
        ending = "; it can never fit" if never else "; it may fit later"
        text = message.removesuffix(ending) + ending  # one that was received has it
        super().__init__(
            text, field=field, tier=tier, required=required, free=free, total=total, never=str(never).lower()
        )
        self.tier, self.required, self.free, self.total, self.never = tier, required, free, total, never


class QuotaExceededError(ResourceExhaustedError):
    """A limit is exceeded. `metadata` holds `limit`, the name of the configuration field, and its `value`. If it is the
    limit of a tenant, it also holds `tenant`, and `used` and `required`, or for a rate `retry_ms`."""

    reason = "QUOTA_EXCEEDED"


class MessageTooLargeError(ResourceExhaustedError):
    reason = "MESSAGE_TOO_LARGE"


class DiskFullError(ResourceExhaustedError):
    reason = "DISK_FULL"


class DiskFailedError(KVServiceError):
    status = "INTERNAL"
    reason = "DISK_FAILED"


class DrainingError(KVServiceError):
    status = "UNAVAILABLE"
    reason = "DRAINING"


class RestartingError(DrainingError):
    """The daemon is being replaced by a new process with the same K/V. The call was not executed."""

    reason = "RESTARTING"


class ObserverUnavailableError(KVServiceError):
    status = "UNAVAILABLE"
    reason = "OBSERVER_UNAVAILABLE"


class TransferFailedError(KVServiceError):
    """The transfer engine could not be started, or could not move bytes. Messages still can."""

    status = "UNAVAILABLE"
    reason = "TRANSFER_FAILED"


class ConnectionLostError(KVServiceError):
    status = "UNAVAILABLE"
    reason = "CONNECTION_LOST"


class DaemonAwayError(ConnectionLostError):
    reason = "DAEMON_AWAY"


class NoDaemonError(ConnectionLostError):
    """No daemon of a cluster can be used now. The message has the reason for each."""

    reason = "NO_DAEMON"


class CallTimeoutError(KVServiceError):
    status = "DEADLINE_EXCEEDED"
    reason = "CALL_TIMEOUT"


class TLSHandshakeError(ConnectionLostError):
    reason = "TLS_HANDSHAKE"


class UnauthenticatedError(KVServiceError):
    """The caller is not authenticated. `metadata` holds `cause`: missing, malformed or unknown."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(KVServiceError):
    """The caller is known, and may not do this. `metadata` holds `tenant`, that of the caller, if it has one."""

    status = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class InternalError(KVServiceError):
    status = "INTERNAL"
    reason = "INTERNAL"


def reason_of(error: Exception) -> str:
    """Return what an error says, for a message that names the file itself: an OSError would name it again."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
