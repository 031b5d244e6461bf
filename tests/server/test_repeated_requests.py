"""Requests that are repeated with their request id are answered again and not executed again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from each_row import each_row
from raw_wire import SESSION_CALLS, request_of

from kvservice.v1 import attention_pb2, blocks_pb2, host_pb2, regions_pb2, scheduler_pb2

OBJECT = f"kvservice-repeated-{os.getpid()}"
ALL_REGIONS = regions_pb2.ListRegionsRequest()


def allocate(sequence_id: int, request_id: int = 0, num_tokens: int = 5) -> blocks_pb2.AllocateRequest:
    one = blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=range(num_tokens))
    return blocks_pb2.AllocateRequest(request_id=request_id, sequences=[one])


def scheduled(scheduled_id: int, request_id: int = 0) -> scheduler_pb2.AddRequestsRequest:
    one = scheduler_pb2.ScheduledRequest(request_id=scheduled_id, token_ids=range(3), max_tokens=2, width=1)
    return scheduler_pb2.AddRequestsRequest(request_id=request_id, requests=[one])


def register(name: str, request_id: int = 0) -> regions_pb2.RegisterRegionRequest:
    return regions_pb2.RegisterRegionRequest(request_id=request_id, name=name, key=OBJECT, byte_size=64)


REPEATABLE: dict[str, Callable[[int], Any]] = {
    "allocate": lambda n: allocate(11, n),
    "append": lambda n: blocks_pb2.AppendRequest(
        request_id=n, sequence_ids=[1], token_ids=[9], return_slot_mapping=True
    ),
    "open_step": lambda n: blocks_pb2.OpenStepRequest(request_id=n, sequence_ids=[2]),
    "open_ahead": lambda n: blocks_pb2.OpenAheadRequest(request_id=n, sequence_ids=[4], num_steps=2),
    "commit_ahead": lambda n: blocks_pb2.CommitAheadRequest(request_id=n, step_id=5, token_ids=[7, 8], num_steps=1),
    "truncate": lambda n: blocks_pb2.TruncateRequest(request_id=n, sequence_ids=[1], lengths=[2]),
    "fork": lambda n: blocks_pb2.ForkRequest(request_id=n, parent_ids=[1], child_ids=[11]),
    "swap_out": lambda n: blocks_pb2.SwapOutRequest(request_id=n, sequence_ids=[1]),
    "swap_in": lambda n: blocks_pb2.SwapInRequest(request_id=n, sequence_ids=[3]),
    "free": lambda n: blocks_pb2.FreeRequest(request_id=n, sequence_ids=[1]),
    "pin": lambda n: blocks_pb2.PinRequest(request_id=n, token_ids=range(4), ttl_s=60),
    "unpin": lambda n: blocks_pb2.UnpinRequest(request_id=n, pin_id=1),
    "reset_prefix_cache": lambda n: blocks_pb2.ResetPrefixCacheRequest(request_id=n),
    "register_region": lambda n: register("new", n),
    "unregister_region": lambda n: regions_pb2.UnregisterRegionRequest(request_id=n, name="old"),
    "create_region": lambda n: regions_pb2.CreateRegionRequest(request_id=n, name="new", byte_size=1),
    "open_lane": lambda n: host_pb2.OpenLaneRequest(request_id=n),
    "close_lane": lambda n: host_pb2.CloseLaneRequest(request_id=n),
    "map_pool": lambda n: host_pb2.MapPoolRequest(request_id=n),
    "unmap_pool": lambda n: host_pb2.UnmapPoolRequest(request_id=n),
    "commit": lambda n: host_pb2.CommitRequest(request_id=n, step_id=3),
    "open_scheduler": lambda n: scheduler_pb2.OpenSchedulerRequest(request_id=n),
    "add_requests": lambda n: scheduled(12, n),
    "abort_requests": lambda n: scheduler_pb2.AbortRequestsRequest(request_id=n, request_ids=[13]),
    "schedule": lambda n: scheduler_pb2.ScheduleRequest(request_id=n),
}
# A daemon without a GPU refuses the first. test_store_calls.py and test_store_regions.py repeat those of the store.
REFUSED = {
    "register_cuda_region",
    *(
        name
        for name in SESSION_CALLS
        if "request_id" in request_of(name).DESCRIPTOR.fields_by_name and "store_" in name
    ),
}


@contextmanager
def new_session(wire: Any, raw: Any) -> Iterator[Any]:
    """Open a session with sequences 1 (computed), 2 (pending, in step 3), 3 (swapped out), 4 (in step 5, ahead), pin 1,
    region "old", the pool mapped, and a scheduler with request 13."""
    session = raw.RawSession(wire)
    path = Path("/dev/shm", OBJECT)
    path.write_bytes(bytes(64))
    session.ok("register_region", register("old"))
    shape = (2, 5, 2, 32)
    for sequence_id in (1, 3):
        session.ok("allocate", allocate(sequence_id))
        step = session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id]))
        if step.query_lens[0] == 5:
            request = attention_pb2.WriteRequest(step_id=step.step_id, key=raw.tensor(*shape), value=raw.tensor(*shape))
            session.ok("write", request)
    session.ok("map_pool", host_pb2.MapPoolRequest(writable=True))
    session.ok("allocate", allocate(2))
    assert session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[2])).step_id == 3
    session.ok("allocate", allocate(4))
    assert session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[4])).step_id == 4
    session.ok("commit", host_pb2.CommitRequest(step_id=4))
    ahead = blocks_pb2.OpenAheadRequest(sequence_ids=[4], num_steps=3)
    assert session.ok("open_ahead", ahead).step_id == 5
    session.ok("swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[3]))
    session.ok("pin", blocks_pb2.PinRequest(token_ids=range(4), ttl_s=60))
    session.ok("open_scheduler", scheduler_pb2.OpenSchedulerRequest())
    session.ok("add_requests", scheduled(13))
    try:
        yield session
    finally:
        session.ok("reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        session.close()
        path.unlink()


@pytest.fixture
def prepared(wire: Any, raw: Any) -> Iterator[Any]:
    raw.await_no_sessions(wire)
    with new_session(wire, raw) as session:
        yield session


def test_a_repeated_request_is_answered_again_and_not_executed_again(wire: Any, raw: Any) -> None:
    """Whether it comes first in a call of its own or over the stream, and whichever way it is repeated."""
    raw.await_no_sessions(wire)
    with each_row() as row:
        for name, made in REPEATABLE.items():
            for way in ("unary", "stream"):
                with row((name, way)), new_session(wire, raw) as session:
                    first = session.call(name, made(77), way)
                    assert not isinstance(first, raw.Refusal)
                    after = wire.stats(), session.describe(), session.ok("list_regions", ALL_REGIONS)
                    for again in ("unary", "stream"):
                        assert session.call(name, made(77), again) == first
                        now = wire.stats(), session.describe(), session.ok("list_regions", ALL_REGIONS)
                        assert now == after


def test_every_repeatable_call_is_tried() -> None:
    fields = {name: request_of(name).DESCRIPTOR.fields_by_name for name in SESSION_CALLS}
    assert set(REPEATABLE) | REFUSED == {name for name, known in fields.items() if "request_id" in known}


def test_a_request_id_belongs_to_its_call(prepared: Any) -> None:
    prepared.ok("free", blocks_pb2.FreeRequest(request_id=5, sequence_ids=[1]))
    answer = prepared.call("swap_out", blocks_pb2.SwapOutRequest(request_id=5, sequence_ids=[2]))
    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", "request_id")


def test_a_request_id_belongs_to_its_session(prepared: Any, raw: Any, wire: Any) -> None:
    prepared.ok("allocate", allocate(20, 6))
    other = raw.RawSession(wire)
    other.ok("allocate", allocate(21, 6))
    assert [info.sequence_id for info in other.describe().sequences] == [21]
    other.close()


def test_a_refused_request_may_be_sent_again(prepared: Any, raw: Any) -> None:
    request = blocks_pb2.FreeRequest(request_id=8, sequence_ids=[50])
    assert isinstance(prepared.call("free", request), raw.Refusal)
    prepared.ok("allocate", allocate(50))
    prepared.ok("free", request)


def test_without_a_request_id_a_request_is_executed_again(prepared: Any) -> None:
    request = blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[9])
    first, second = prepared.ok("append", request), prepared.ok("append", request)
    assert second.step_id > first.step_id
