"""The figures of schedulers, in the metrics and in snapshots, compared with what an engine did."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import grpc
import numpy as np
from scraping import Samples, by_label, scrape, value

from kvservice.client import BatchReport, KVClient, ScheduledRequest, Session
from kvservice.launch import Daemon
from kvservice.v1 import inspect_pb2, inspect_pb2_grpc

PREFIX = "kvservice_scheduler"


class Engine:
    """Computes the requests of a session's scheduler, with the same token for all, and counts what happens."""

    def __init__(self, kv: Session, **settings: Any) -> None:
        self.kv = kv
        self.scheduler = kv.open_scheduler(**settings)
        self.counts: Counter[str] = Counter()

    def add(self, request_id: int, num_tokens: int, max_tokens: int, first: int) -> None:
        """Add a request whose prompt are the numbers from `first` on."""
        self.scheduler.add([ScheduledRequest(request_id, range(first, first + num_tokens), max_tokens)])
        self.counts["added"] += 1
        self.counts["prompt_tokens"] += num_tokens

    def step(self, reports: list[BatchReport]) -> list[BatchReport]:
        """Report the last batch, and compute the next one. Returns its report."""
        batch = self.scheduler.schedule(reports)
        self.counts["finished"] += len(batch.finished)
        self.counts["stalls"] += batch.num_stalled
        for one in batch.preempted:
            self.counts["swap" if one.swapped else "recompute"] += 1
        self.batch = batch
        if batch.step is None:
            return []
        shape = (2, batch.step.num_tokens, 1, 32)
        batch.step.write(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        self.counts["steps"] += 1
        self.counts["computed"] += batch.step.num_tokens
        self.counts["generated_tokens"] += len(batch.sampled)
        return [BatchReport(batch.number, [7] * len(batch.sampled))]

    def run(self) -> None:
        reports = self.step([])
        while reports:
            reports = self.step(reports)


def total(samples: Samples, name: str) -> float:
    return value(samples, f"{PREFIX}_{name}_total")


def snapshot_of(daemon: Daemon) -> inspect_pb2.Snapshot:
    with grpc.insecure_channel(daemon.address) as channel:
        stub: Any = inspect_pb2_grpc.InspectServiceStub(channel)
        found: inspect_pb2.Snapshot = stub.GetSnapshot(inspect_pb2.GetSnapshotRequest())
        return found


def check(samples: Samples, counts: Counter[str]) -> None:
    for name in ("steps", "stalls", "prompt_tokens", "generated_tokens"):
        assert total(samples, name) == counts[name], name
    assert total(samples, "requests_added") == counts["added"]
    preempted = by_label(samples, f"{PREFIX}_preemptions_total", "kind")
    assert preempted == {"recompute": counts["recompute"], "swap": counts["swap"]}
    computed = counts["prompt_tokens"] - total(samples, "cached_tokens") + total(samples, "recomputed_tokens")
    decoded = counts["generated_tokens"] - value(samples, f"{PREFIX}_first_token_seconds_count")
    assert computed + decoded == counts["computed"]


def test_an_engine_under_pressure(running: tuple[Daemon, int]) -> None:
    """Two requests that grow beyond the pool of eight blocks, one of them with a prefix that is cached."""
    daemon, port = running
    with KVClient(daemon.address) as client, client.session("chat") as kv, client.session("idle") as idle:
        idle.open_scheduler()
        engine = Engine(kv, preemption="recompute", reserve_steps=0, max_stalled_fraction=0.0)
        engine.add(1, 9, 1, first=0)
        engine.run()
        engine.add(2, 10, 12, first=0)
        engine.add(3, 10, 12, first=100)
        engine.add(4, 20, 2, first=200)
        reports = engine.step([])
        gauges = by_label(scrape(port), f"{PREFIX}_requests", "state")
        assert gauges == {"waiting": 1, "running": 2, "swapped": 0, "stalled": 0}
        assert (engine.batch.waiting, engine.batch.running) == (1, 2)
        session = next(session for session in snapshot_of(daemon).sessions if session.name == "chat")
        assert (session.scheduler.waiting, session.scheduler.running, session.scheduler.cached_tokens) == (1, 2, 8)
        while reports:
            reports = engine.step(reports)
        assert engine.counts["recompute"] > 0
        samples = scrape(port)
        check(samples, engine.counts)
        assert value(samples, "kvservice_schedulers") == 2
        assert by_label(samples, f"{PREFIX}_requests_ended_total", "reason") == {"finished": 4, "aborted": 0}
        assert value(samples, f"{PREFIX}_first_token_seconds_count") == 4
        assert value(samples, f"{PREFIX}_between_tokens_seconds_count") == engine.counts["generated_tokens"] - 4
        assert value(samples, f"{PREFIX}_first_token_seconds_sum") > 0
        assert by_label(samples, "kvservice_session_waiting_requests", "session") == {"chat": 0, "idle": 0}
        found = snapshot_of(daemon)
        schedulers = {session.name: session.scheduler for session in found.sessions if session.HasField("scheduler")}
        assert schedulers["chat"] == found.scheduling.totals
        assert schedulers["idle"] == inspect_pb2.SchedulerSnapshot()
        assert schedulers["chat"].recompute_preemptions == engine.counts["recompute"]
    check(scrape(port), engine.counts)
    assert value(scrape(port), "kvservice_schedulers") == 0, "the counters outlive the session"


def test_requests_that_never_run(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with KVClient(daemon.address) as client, client.session() as kv:
        engine = Engine(kv)
        for number in range(3):
            engine.add(number, 4, 2, first=10 * number)
        engine.scheduler.abort([1])
        samples = scrape(port)
        assert by_label(samples, f"{PREFIX}_requests", "state")["waiting"] == 2
        assert by_label(samples, f"{PREFIX}_requests_ended_total", "reason") == {"finished": 0, "aborted": 1}
        assert total(samples, "prompt_tokens") == 0, "they count when they are admitted"
    ended = by_label(scrape(port), f"{PREFIX}_requests_ended_total", "reason")
    assert ended == {"finished": 0, "aborted": 3}, "requests end with their session"


def test_preemptions_by_swap(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with KVClient(daemon.address) as client, client.session() as kv:
        engine = Engine(kv, preemption="swap", reserve_steps=0, max_stalled_fraction=0.0)
        for number in range(2):
            engine.add(number, 10, 12, first=100 * number)
        engine.run()
        assert engine.counts["swap"] > 0
        check(scrape(port), engine.counts)


def test_proposals_and_how_many_were_right(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    with KVClient(daemon.address) as client, client.session() as kv:
        engine = Engine(kv, lookahead=2)
        engine.add(1, 4, 6, first=0)
        (first,) = engine.step([])
        engine.step([dataclasses.replace(first, proposals=[7, 8], num_proposed=[2])])
        assert engine.batch.step is not None
        assert engine.batch.step.num_tokens == 3
        engine.step([BatchReport(engine.batch.number, [7, 9], num_tokens=[2])])
        samples = scrape(port)
        assert (total(samples, "proposed_tokens"), total(samples, "accepted_tokens")) == (2, 1)
        assert total(samples, "generated_tokens") == 3
        assert value(samples, f"{PREFIX}_between_tokens_seconds_count") == 1
