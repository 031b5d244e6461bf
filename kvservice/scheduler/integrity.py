"""Checks of all invariants of an engine's queues, for tests and simulations."""

from __future__ import annotations

from kvservice.errors import InternalError
from kvservice.scheduler.engine import EngineScheduler
from kvservice.scheduler.requests import Phase


def check_integrity(engine: EngineScheduler) -> None:
    """Compare an engine's queues with each other and with the block manager. Raises InternalError."""
    queues = engine.queues
    places = {
        Phase.WAITING: [state.sequence_id for state in queues.waiting],
        Phase.PREFILLING: list(queues.prefilling),
        Phase.DECODING: queues.decodes.ids.tolist(),
        Phase.SWAPPED: [state.sequence_id for state in queues.swapped],
    }
    placed = [sequence_id for ids in places.values() for sequence_id in ids]
    _require(len(placed) == len(set(placed)), "a sample is in two queues")
    _require(set(placed) == queues.states.keys(), "a sample is in no queue")
    for phase, ids in places.items():
        _require(all(queues.states[sequence_id].phase is phase for sequence_id in ids), "a phase is wrong")
    ranks = [state.rank for state in queues.waiting]
    _require(ranks == sorted(ranks), "the queue is not in order")
    _require(queues.num_running <= engine.config.max_running, "more requests run than may")
    _check_tables(engine, places)


def _check_tables(engine: EngineScheduler, places: dict[Phase, list[int]]) -> None:
    """Compare lengths, progress and tables of the sequences with the block manager."""
    queues = engine.queues
    manager, namespace = queues.manager, queues.namespace
    described = {one.sequence_id: one for one in manager.describe(namespace)}
    _require(described.keys() == queues.states.keys() - set(places[Phase.WAITING]), "the sequences differ")
    for sequence_id, one in described.items():
        state = queues.states[sequence_id]
        _require(one.swapped == (state.phase is Phase.SWAPPED), "a swapped sequence differs")
        if state.phase is Phase.PREFILLING:
            _require(one.length - one.num_computed == state.pending > 0, "the progress of a prefill differs")
        if state.phase is Phase.DECODING:
            at = queues.decodes.index(sequence_id)
            _require(one.length == one.num_computed == queues.decodes.lengths[at], "a length differs")
            _require(one.num_blocks == queues.decodes.blocks[at], "a table differs")
            _require(queues.decodes.generated[at] < queues.decodes.limits[at], "a finished request runs")


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InternalError(broken)
