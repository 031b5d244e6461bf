"""Conversion between the error tree and google.rpc.Status with its standard details. It loses no information."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvservice import errors
from kvservice.errors import KVServiceError, OutOfBlocksError, QuotaExceededError

DOMAIN = "kvservice"
# RetryInfo's delay after which blocks may be free again: about the time of a few decode steps.
RETRY_DELAY_MS = 50
# Key of the trailing metadata in which a health check says why the daemon does not serve.
HEALTH_REASON = "kvservice-reason"
# Key of the trailing metadata in which a health check says what does not keep the daemon from serving.
HEALTH_NOTE = "kvservice-note"


def to_status(error: KVServiceError) -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=str(error))
    for detail in _details(error):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _details(error: KVServiceError) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, OutOfBlocksError) and not error.never:
        yield error_details_pb2.RetryInfo(retry_delay=Duration(nanos=RETRY_DELAY_MS * 1_000_000))
    if isinstance(error, QuotaExceededError):
        if retry_ms := error.metadata.get("retry_ms"):
            delay = Duration()
            delay.FromMilliseconds(int(retry_ms))
            yield error_details_pb2.RetryInfo(retry_delay=delay)
        quota = error_details_pb2.QuotaFailure.Violation(
            subject=error.metadata.get("limit", ""), description=str(error)
        )
        yield error_details_pb2.QuotaFailure(violations=[quota])


def from_status(status: status_pb2.Status) -> KVServiceError:
    """Return an error of the class that the daemon raised. For a status from another source, return the nearest
    class."""
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.BadRequest()
    for detail in status.details:
        _ = detail.Unpack(info) or detail.Unpack(request)
    field, message = "", status.message
    if request.field_violations:
        field, message = request.field_violations[0].field, request.field_violations[0].description
    metadata = dict(info.metadata)
    if info.domain == DOMAIN and info.reason == OutOfBlocksError.reason:
        return OutOfBlocksError(
            message,
            field=field,
            tier=metadata["tier"],
            required=int(metadata["required"]),
            free=int(metadata["free"]),
            total=int(metadata["total"]),
            never=metadata["never"] == "true",
        )
    kind = _BY_REASON.get(info.reason) if info.domain == DOMAIN else None
    if kind is None:
        kind = _BY_STATUS.get(code_pb2.Code.Name(status.code), errors.InternalError)
    return kind(message, field=field, **metadata)


def from_reason(reason: str, message: str, field: str) -> KVServiceError:
    """Return an error of the class with this reason, or InternalError if a later version introduced the reason."""
    return _BY_REASON.get(reason, errors.InternalError)(message, field=field)


def _subclasses(kind: type[KVServiceError]) -> Iterator[type[KVServiceError]]:
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:  # other packages may subclass an error without a reason of its own
            yield child
            yield from _subclasses(child)


_BY_REASON = {kind.reason: kind for kind in _subclasses(KVServiceError)}
_BY_STATUS = {
    "INVALID_ARGUMENT": errors.InvalidArgumentError,
    "NOT_FOUND": errors.NotFoundError,
    "ALREADY_EXISTS": errors.DuplicateSequenceError,
    "FAILED_PRECONDITION": errors.FailedPreconditionError,
    "RESOURCE_EXHAUSTED": errors.ResourceExhaustedError,
    "UNAVAILABLE": errors.ConnectionLostError,
    "DEADLINE_EXCEEDED": errors.CallTimeoutError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
}
