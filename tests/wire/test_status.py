"""Errors on the wire: every class of the tree survives a round trip, with the details of google.rpc."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from each_row import each_row
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from kvservice import errors
from kvservice.errors import KVServiceError, OutOfBlocksError, QuotaExceededError
from kvservice.wire import from_status, to_status


def tree(kind: type[KVServiceError] = KVServiceError) -> Iterator[type[KVServiceError]]:
    for child in kind.__subclasses__():
        if child.__module__ == "kvservice.errors":
            yield child
            yield from tree(child)


def make(kind: type[KVServiceError], field: str = "a.b[3]") -> KVServiceError:
    if kind is OutOfBlocksError:
        return OutOfBlocksError("why", tier="swap", required=5, free=3, total=4, never=True, field=field)
    return kind("why", field=field, sequence_id=7)


def test_there_and_back() -> None:
    kinds = list(tree())
    assert len(kinds) > 40
    with each_row() as row:
        for kind in kinds:
            for field in ("", "a.b[3]"):
                with row(f"{kind.__name__} {field}"):
                    error = make(kind, field)
                    back = from_status(status_pb2.Status.FromString(to_status(error).SerializeToString()))
                    assert type(back) is kind
                    assert (back.message, back.field, back.metadata) == (error.message, field, error.metadata)
                    assert str(back) == str(error)
                    assert to_status(error).code == grpc.StatusCode[kind.status].value[0]


def test_reasons_are_distinct() -> None:
    reasons = [kind.reason for kind in tree()]
    assert len(reasons) == len(set(reasons))


def details(error: KVServiceError) -> dict[str, AnyMessage]:
    return {detail.TypeName().removeprefix("google.rpc."): detail for detail in to_status(error).details}


def test_out_of_blocks_says_when_to_try_again_unless_never() -> None:
    later = OutOfBlocksError("why", tier="device", required=2, free=1, total=4)
    never = OutOfBlocksError("why", tier="device", required=5, free=1, total=4, never=True)
    assert (str(later), str(never)) == ("why; it may fit later", "why; it can never fit")
    assert set(details(never)) == {"ErrorInfo"}
    assert set(details(later)) == {"ErrorInfo", "RetryInfo"}
    retry = error_details_pb2.RetryInfo()
    assert details(later)["RetryInfo"].Unpack(retry)
    assert 0 < retry.retry_delay.ToMilliseconds() < 1000


def test_out_of_blocks_keeps_its_counts() -> None:
    back = from_status(to_status(make(OutOfBlocksError)))
    assert isinstance(back, OutOfBlocksError)
    assert (back.tier, back.required, back.free, back.total, back.never) == ("swap", 5, 3, 4, True)


def test_quota_names_the_limit() -> None:
    error = QuotaExceededError("full", field="sequences", limit="max_sequences", value=8)
    failure = error_details_pb2.QuotaFailure()
    assert details(error)["QuotaFailure"].Unpack(failure)
    assert failure.violations[0].subject == "max_sequences"


def test_error_info_is_ours() -> None:
    info = error_details_pb2.ErrorInfo()
    assert details(make(errors.StaleStepError))["ErrorInfo"].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == ("kvservice", "STALE_STEP", {"sequence_id": "7"})


def test_a_status_that_is_not_ours_is_the_nearest() -> None:
    nearest = {
        "INVALID_ARGUMENT": errors.InvalidArgumentError,
        "NOT_FOUND": errors.NotFoundError,
        "FAILED_PRECONDITION": errors.FailedPreconditionError,
        "RESOURCE_EXHAUSTED": errors.ResourceExhaustedError,
        "UNAVAILABLE": errors.ConnectionLostError,
        "DATA_LOSS": errors.InternalError,
    }
    with each_row() as row:
        for code, kind in nearest.items():
            with row(code):
                status = status_pb2.Status(code=grpc.StatusCode[code].value[0], message="what")
                stranger = AnyMessage()
                stranger.Pack(error_details_pb2.ErrorInfo(domain="another", reason="STALE_STEP"))
                status.details.append(stranger)
                back = from_status(status)
                assert type(back) is kind
                assert back.message == "what"


def test_a_rate_over_quota_says_when_to_come_again() -> None:
    error = QuotaExceededError("too many", tenant="red", limit="calls_per_s", value="2", retry_ms=250)
    status = to_status(error)
    assert set(details(error)) == {"ErrorInfo", "QuotaFailure", "RetryInfo"}
    retry = error_details_pb2.RetryInfo()
    assert details(error)["RetryInfo"].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 250
    assert from_status(status).metadata == error.metadata
