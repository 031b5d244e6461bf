"""The figures of the schedulers, from the shared arrays to the metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from no_schedulers import NO_SCHEDULERS
from observed_pool import ObservedPool, OpenSession

from kvservice.metrics.holders import holder_metrics
from kvservice.metrics.scheduling import scheduler_metrics
from kvservice.scheduler import EngineScheduler, Latencies, Report, Request, SchedulerFigures
from kvservice.telemetry.reading import Reading
from kvservice.telemetry.scheduling import SchedulerTable, read_schedulers

FIGURES = SchedulerFigures(*range(100, 100 + len(SchedulerFigures._fields)))


def test_the_shared_arrays_have_every_figure() -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}

    def zeros(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        arrays[name] = np.zeros(shape, dtype)
        return arrays[name]

    table, latencies = SchedulerTable(4, zeros), Latencies()
    latencies.first_token.observe(0.003, 2)
    latencies.between_tokens.observe(300.0, 5)
    other = SchedulerFigures(*range(500, 500 + len(FIGURES)))
    table.write({2: FIGURES, 3: other}, other, latencies)
    by_row, schedulers = read_schedulers(arrays)
    assert by_row == {2: FIGURES, 3: other}
    assert (schedulers.num_open, schedulers.totals) == (2, other)
    assert (schedulers.token_counts[0, 2], schedulers.token_counts[1, -1]) == (2, 5)
    assert schedulers.token_counts.sum() == 7
    assert schedulers.token_seconds.tolist() == [0.006, 1500.0]
    table.write({3: FIGURES}, other, latencies)
    assert read_schedulers(arrays)[0] == {3: FIGURES}, "the scheduler of the other session is closed"


def play(engine: EngineScheduler, pool: ObservedPool, session: OpenSession) -> None:
    """Compute the requests that wait, up to their first token, which is reported after three seconds."""
    batch = engine.schedule(1.0)
    assert batch.step is not None
    pool.manager.mark_all_layers(session.space, batch.step.step_id)
    engine.update(Report(batch.number, [7] * len(batch.sampled)), 4.0)


def test_a_reading_has_the_schedulers_of_the_sessions() -> None:
    pool = ObservedPool()
    pool.open("without")
    sessions = [pool.open("chat"), pool.open("batch")]
    engines = [pool.schedulers.open_engine(session.space) for session in sessions]
    for count, engine in enumerate(engines, start=1):
        for number in range(count):
            engine.add(Request(number, [number] * 6, max_tokens=5), 1.0)
    play(engines[1], pool, sessions[1])
    engines[1].add(Request(9, [9] * 3, max_tokens=5), 4.0)
    pool.read()
    reading = pool.history.latest
    found = {session.name: session.scheduler for session in reading.sessions}
    assert found == {"without": None, "chat": engines[0].figures(), "batch": engines[1].figures()}
    assert (engines[1].figures().waiting, engines[1].figures().running) == (1, 2)
    assert by_name(list(holder_metrics(reading, 8, 0, 0)), "session_waiting_requests") == {"chat": 1, "batch": 1}
    assert by_name(list(holder_metrics(reading, 8, 0, 0)), "session_running_requests") == {"chat": 0, "batch": 2}
    shown = list(scheduler_metrics(reading))
    assert by_name(shown, "scheduler_requests") == {"waiting": 2, "running": 2, "swapped": 0, "stalled": 0}
    assert by_name(shown, "schedulers") == {"": 2}
    assert bucket_counts(shown, "scheduler_first_token_seconds") == {"2.0": 0, "5.0": 2, "+Inf": 2}

    pool.schedulers.close_engine(sessions[1].space)
    pool.close(sessions[1])
    pool.read()
    after = pool.history.latest.schedulers
    assert (after.num_open, after.totals.running, after.totals.generated_tokens, after.totals.added) == (1, 0, 2, 4)


def by_name(metrics: list[Any], name: str) -> dict[str, float]:
    """Return the values of a family by their label."""
    (family,) = [metric for metric in metrics if metric.name == f"kvservice_{name}"]
    return {"".join(sample.labels.values()): sample.value for sample in family.samples}


def bucket_counts(metrics: list[Any], name: str) -> dict[str, float]:
    (family,) = [metric for metric in metrics if metric.name == f"kvservice_{name}"]
    counts = {sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels}
    return {le: counts[le] for le in ("2.0", "5.0", "+Inf")}


def samples(totals: SchedulerFigures) -> list[Any]:
    pool = ObservedPool()
    pool.read()
    schedulers = NO_SCHEDULERS._replace(totals=totals)
    reading: Reading = dataclasses.replace(pool.history.latest, schedulers=schedulers)
    return [sample for family in scheduler_metrics(reading) for sample in family.samples]


@pytest.mark.parametrize("name", SchedulerFigures._fields)
def test_the_metrics_show_every_figure(name: str) -> None:
    before, after = samples(FIGURES), samples(FIGURES._replace(**{name: 999}))
    (changed,) = [now for now, then in zip(after, before, strict=True) if now != then]
    assert changed.value == 999
