"""A gRPC server that answers like a daemon, with snapshots that the test sets."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
from grpc_status import rpc_status

from kvservice.errors import KVServiceError
from kvservice.v1 import inspect_pb2, inspect_pb2_grpc
from kvservice.wire.status import to_status


class Inspected(inspect_pb2_grpc.InspectServiceServicer):
    """`snapshot` is filtered by session name according to the request. `errors` are raised first."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.snapshot = pool_in_use()
        self.errors: list[KVServiceError] = []
        self.requests: list[inspect_pb2.GetSnapshotRequest] = []
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        inspect_pb2_grpc.add_InspectServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def GetSnapshot(self, request: inspect_pb2.GetSnapshotRequest, context: Any) -> inspect_pb2.Snapshot:  # noqa: N802
        self.requests.append(request)
        if self.errors:
            context.abort_with_status(rpc_status.to_status(to_status(self.errors.pop(0))))
        answer = inspect_pb2.Snapshot()
        answer.CopyFrom(self.snapshot)
        del answer.sessions[:], answer.sequences[:]
        answer.sessions.extend(row for row in self.snapshot.sessions if request.search in row.name)
        answer.sequences.extend(row for row in self.snapshot.sequences if request.search in row.session_name)
        return answer


def pool_in_use() -> inspect_pb2.Snapshot:
    """Return three sessions with five sequences, one swapped out, on a pool of 100 blocks."""
    snapshot = inspect_pb2.Snapshot(time_s=1.75e9, uptime_s=3725.0, num_sessions=3, num_sequences=5)
    snapshot.pool.MergeFrom(
        inspect_pb2.PoolSnapshot(
            num_blocks=100,
            free_blocks=30,
            active_blocks=40,
            shared_blocks=10,
            cached_blocks=15,
            pinned_blocks=5,
            num_swap_blocks=20,
            used_swap_blocks=5,
            sequences=5,
            swapped_sequences=1,
            tokens=1_234_567,
            sessions=3,
            lanes=1,
            regions=2,
            region_bytes=3 << 20,
        )
    )
    snapshot.store.MergeFrom(
        inspect_pb2.StoreSnapshot(
            num_bytes=4 << 30,
            used_bytes=1 << 30,
            blocks=512,
            leased=3,
            hits=30,
            misses=10,
            evicted_misses=3,
            never_stored_misses=1200,
        )
    )
    snapshot.rates.MergeFrom(
        inspect_pb2.Rates(
            window_s=5, computed_tokens=4321, query_tokens=1000, hit_tokens=250, hit_share=0.25, calls=8.5, errors=0.2
        )
    )
    snapshot.calls.add(method="allocate", calls=12, errors=1, calls_per_s=2.5, p50_s=310e-6, p99_s=0.0042)
    snapshot.calls.add(method="append", calls=900, calls_per_s=6, p50_s=120e-6, p99_s=180e-6)
    snapshot.calls.add(method="pin", calls=3)
    for number, (name, tenant, blocks, age_s) in enumerate(
        [("chat", "acme", 30, 4000.0), ("batch", "", 12, 90.0), ("[red]evil\x1b[2J", "zeta", 8, 200_000.0)], start=1
    ):
        snapshot.sessions.add(
            session_id=number,
            name=name,
            tenant=tenant,
            attached=number != 2,
            age_s=age_s,
            sequences=number,
            tokens=1000 * number,
            blocks=blocks,
            query_tokens=0 if number == 2 else 100,
            hit_tokens=0 if number == 2 else 10 * number,
            lane=number == 1,
        )
    for place, (session_id, blocks) in enumerate([(1, 20), (1, 10), (2, 12), (3, 5), (3, 3)]):
        snapshot.sequences.add(
            session_id=session_id,
            session_name=snapshot.sessions[session_id - 1].name,
            sequence_id=(1 << 62) + place,
            length=100 - place,
            computed=90 - place,
            blocks=blocks,
            swapped=place == 3,
        )
    return snapshot


def add_tiers(snapshot: inspect_pb2.Snapshot) -> None:
    """Add a disk in good health, and a distributed store that is suspended."""
    disk = {"num_values": 600_000, "used_bytes": 1200 << 30, "capacity_bytes": 2000 << 30, "latency_s": 310e-6}
    rates = {"up_bytes_per_s": 1 << 30, "down_bytes_per_s": 300 << 20, "hit_share": 0.634}
    snapshot.tiers.add(name="disk", state="open", **disk, **rates)
    snapshot.tiers.add(name="mooncake", state="suspended", errors=12, suspensions=3)
    spill = inspect_pb2.SpillSnapshot(saved_blocks=900, loaded_blocks=80, hit_tokens=1280, down_bytes_per_s=3 << 20)
    snapshot.spill.CopyFrom(spill)
    snapshot.saved.CopyFrom(inspect_pb2.SavedSnapshot(num_sessions=3, used_bytes=5 << 30, capacity_bytes=16 << 30))


def add_transfers(snapshot: inspect_pb2.Snapshot) -> None:
    """Add two engines, one of which has failed."""
    figures: dict[str, Any] = {
        "engines": 1,
        "regions": 2,
        "region_bytes": 48 << 20,
        "done_in": 40,
        "done_out": 60,
        "running_out": 1,
    }
    rates: dict[str, Any] = {
        "in_bytes_per_s": 300 << 20,
        "out_bytes_per_s": 1 << 30,
        "fallback_bytes_per_s": 5 << 20,
        "p50_s": 0.02,
    }
    snapshot.transfers.CopyFrom(inspect_pb2.TransferSnapshot(failed_out=3, **figures, **rates))


def add_scheduler(snapshot: inspect_pb2.Snapshot) -> None:
    """Give the first session a scheduler."""
    figures = {"waiting": 70, "running": 25, "swapped": 4, "stalled": 3, "finished": 1234, "recomputed_tokens": 640}
    tokens = {"prompt_tokens": 1000, "cached_tokens": 750, "proposed_tokens": 10, "accepted_tokens": 9}
    preemptions = {"recompute_preemptions": 8, "swap_preemptions": 5}
    scheduler = inspect_pb2.SchedulerSnapshot(generated_tokens=56_789, **figures, **tokens, **preemptions)
    snapshot.sessions[0].scheduler.CopyFrom(scheduler)
    rates = {"generated_tokens_per_s": 2500, "preemptions_per_s": 0.5, "accepted_share": 0.625}
    latencies = {"first_token_p50_s": 0.2, "first_token_p99_s": 1.5, "between_tokens_p50_s": 0.03}
    snapshot.scheduling.CopyFrom(inspect_pb2.SchedulingSnapshot(totals=scheduler, **rates, **latencies))
