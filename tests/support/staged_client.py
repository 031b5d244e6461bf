"""A client that proceeds to a stage, prints that, and waits there: `staged_client.py ADDRESS STAGE`."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lane_ring import CAPACITY, COMPLETED, SUBMITTED
from raw_store import present
from raw_wire import Refusal, Wire

from kvservice import _ext, ops
from kvservice.client import KVClient, Session
from kvservice.errors import FailedPreconditionError
from kvservice.v1 import host_pb2, regions_pb2

NUM_TOKENS, MANY_HEADS = 200, 1024
NO_STEP = 1 << 40


ADDRESSES: dict[bytes, str] = {}


def kv_address(kv: Session) -> str:
    """Return the address of a session's daemon, which whoever opened the session has noted."""
    return ADDRESSES[kv.token]


def call(kv: Session, name: str, request: Any) -> Any:
    """Make a unary call of the session, which the client library knows nothing of."""
    request.session_token = kv.token
    wire = Wire(kv_address(kv))
    answer = wire.unary(name, request)
    wire.close()
    if isinstance(answer, Refusal):
        raise FailedPreconditionError(answer.message)
    return answer


def region_made(kv: Session) -> Any:
    """The region's descriptor is not fetched."""
    return call(kv, "create_region", regions_pb2.CreateRegionRequest(name="r", byte_size=1 << 20))


def region_fetched(kv: Session) -> Any:
    return kv.create_region(1 << 20)


def region_registered(kv: Session) -> Any:
    path = Path("/dev/shm", f"kvservice-{os.getpid()}-staged")
    path.write_bytes(bytes(1 << 20))
    try:
        return kv.open_region(path.name, 1 << 20)
    finally:
        path.unlink()


def lane_made(kv: Session) -> Any:
    """The lane's descriptor is not fetched."""
    return call(kv, "open_lane", host_pb2.OpenLaneRequest())


def lane_fetched(kv: Session) -> mmap.mmap:
    _, (descriptor,) = present(kv_address(kv), lane_made(kv).handover_token)
    try:
        return mmap.mmap(descriptor, _ext.LANE_BYTES)
    finally:
        os.close(descriptor)  # the daemon keeps the memory as long as a client has a descriptor of it


def index(lane: mmap.mmap, which: int) -> int:
    number: int = struct.unpack_from("<Q", lane, which)[0]
    return number


def submit(kv: Session, client: Any, step_id: int, layer: int, num_heads: int) -> int:
    """Submit a call with tensors of zeros."""
    memory = kv.create_region(64 << 20)
    assert memory.number is not None
    places = [(memory.number, n << 20) for n in (0, 50, 55, 25)]
    number: int = client.submit(step_id, layer, False, num_heads, *places, None)
    return number


def lane_computing(kv: Session) -> Any:
    """A call of some hundred milliseconds is in flight."""
    lane = lane_fetched(kv)
    client = _ext.LaneClient(lane, 0.0)
    step = kv.open_step([kv.allocate(range(NUM_TOKENS))])
    submit(kv, client, step.step_id, 0, MANY_HEADS)
    assert index(lane, COMPLETED) == 0
    return lane, client


def answer_unread(kv: Session) -> Any:
    lane = lane_fetched(kv)
    client = _ext.LaneClient(lane, 0.0)
    step = kv.open_step([kv.allocate(range(NUM_TOKENS))])
    submit(kv, client, step.step_id, 0, 4)
    while index(lane, COMPLETED) < 1:
        time.sleep(0.001)
    return lane, client


def ring_full(kv: Session) -> Any:
    """The ring of answers is full of unread answers, and the ring of calls is full of waiting calls."""
    lane = lane_fetched(kv)
    client = _ext.LaneClient(lane, 0.0)
    for _ in range(CAPACITY):
        submit_nothing(client)
    while index(lane, COMPLETED) < CAPACITY:
        time.sleep(0.001)
    struct.pack_into("<Q", lane, SUBMITTED, 2 * CAPACITY)
    return lane, client


def submit_nothing(client: Any) -> None:
    client.submit(NO_STEP, 0, False, 4, (0, 0), (0, 0), (0, 0), (0, 0), None)


def pool_offered(kv: Session) -> Any:
    """The pool's descriptors are not fetched."""
    return call(kv, "map_pool", host_pb2.MapPoolRequest(writable=True))


def pool_mapped(kv: Session) -> Any:
    return kv.map_pool(writable=True)


def written(kv: Session) -> Any:
    """All layers are written to the pool but not committed."""
    pool = pool_mapped(kv)
    step = kv.open_step([kv.allocate(range(NUM_TOKENS))])
    mapped = pool.step(step)
    ones = np.ones((NUM_TOKENS, kv.info.num_kv_heads, kv.info.head_size), np.float32)
    for layer in range(kv.info.num_layers):
        ops.write_kv(pool.pool, layer, mapped.slot_mapping, ones, ones)
    return pool


STAGES: dict[str, Callable[[Session], Any]] = {
    stage.__name__: stage
    for stage in (
        region_made, region_fetched, region_registered, lane_made, lane_fetched, lane_computing, answer_unread,
        ring_full, pool_offered, pool_mapped, written,
    )
}  # fmt: skip


def main() -> None:
    address, stage = sys.argv[1:]
    with KVClient(address, transport="inline") as client, client.session(stage) as kv:
        ADDRESSES[kv.token] = address
        held = STAGES[stage](kv)
        print(stage, flush=True)
        while held is not None:
            signal.pause()


if __name__ == "__main__":
    main()
