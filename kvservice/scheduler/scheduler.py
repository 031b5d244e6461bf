"""The schedulers of all engines that share one pool, and the checks of their invariants."""

from __future__ import annotations

from dataclasses import replace

from kvservice.blocks import BlockManager, SessionNamespace, Slices
from kvservice.blocks.slices import SLICE_SEQUENCES, finish
from kvservice.errors import InternalError, InvalidArgumentError, QuotaExceededError, UnknownSequenceError
from kvservice.scheduler.config import SchedulerConfig
from kvservice.scheduler.engine import MAX_WEIGHT, MIN_WEIGHT, EngineScheduler, PoolShares
from kvservice.scheduler.queues import EngineQueues
from kvservice.scheduler.requests import RUNNING, Phase, RequestGroup, RequestState
from kvservice.scheduler.stats import Latencies, SchedulerFigures


class Scheduler:
    """Engines with queues of their own over one pool. Their tenants have equal shares of it, and the engines of a
    tenant share by weight. `latencies` cover all engines since the start."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._shares = PoolShares(manager.config.num_blocks)
        self._engines: dict[SessionNamespace, EngineScheduler] = {}
        self._closed = SchedulerFigures()
        self.latencies = Latencies()

    def open_engine(
        self, namespace: SessionNamespace, config: SchedulerConfig | None = None, weight: float = 1.0
    ) -> EngineScheduler:
        """Open the scheduler of one engine, whose sequences are in this namespace. Raises InvalidArgumentError, and
        QuotaExceededError if a step could exceed a limit of the block manager."""
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise InvalidArgumentError(f"must be a number from {MIN_WEIGHT} to {MAX_WEIGHT}", field="weight")
        if namespace in self._engines:
            raise InvalidArgumentError("has a scheduler already", field="namespace")
        config = config or SchedulerConfig()
        self._check_limits(config)
        engine = EngineScheduler(self._manager, namespace, config, self._shares, weight, self.latencies)
        self._engines[namespace] = engine
        return engine

    def _check_limits(self, config: SchedulerConfig) -> None:
        """Check that a step of these budgets is within the limits of one operation."""
        blocks = self._manager.config
        most = blocks.max_request_blocks // (2 + blocks.num_blocks_for(config.lookahead)) - 1
        for field, limit, value, highest in (
            ("max_step_tokens", "max_request_tokens", config.max_step_tokens, blocks.max_request_tokens),
            ("max_running", "max_request_blocks", config.max_running, most),
        ):
            if value > highest:
                raise QuotaExceededError(
                    f"{value} is above {highest}, which {limit} allows", field=field, limit=limit, value=highest
                )

    def close_engine(self, namespace: SessionNamespace) -> None:
        """Forget the requests of an engine, when its namespace is closed."""
        engine = self._engines.pop(namespace)
        engine.close()
        self._closed.add(engine.queues.counters)

    def check_in_slices(self) -> Slices[None]:
        """Check the invariants of all engines, see `check_in_slices` below. Raises InternalError."""
        for engine in list(self._engines.values()):
            yield from check_in_slices(engine)
            yield

    def figures(self) -> dict[int, SchedulerFigures]:
        """Return the figures of each engine by the number of its namespace."""
        return {namespace.number: engine.figures() for namespace, engine in self._engines.items()}

    def totals(self) -> SchedulerFigures:
        """Return the sums over all engines, with the counters of closed ones."""
        totals = replace(self._closed)
        for figures in self.figures().values():
            totals.add(figures)
        return totals


# ---- Checks of the invariants of queues, for tests, simulations and the daemon


def check_integrity(engine: EngineScheduler) -> None:
    """Compare an engine's queues with each other and with the block manager. The namespace has no other sequences.
    Raises InternalError."""
    finish(check_in_slices(engine))
    queues = engine.queues
    num_ended = sum(len(flight.ended) for flight in queues.flight)
    _require(
        len(queues.namespace) == len(queues.states) - queues.waiting.num_samples + num_ended, "the sequences differ"
    )


def check_in_slices(engine: EngineScheduler) -> Slices[None]:
    """Do as `check_integrity` in slices, for a namespace that may have other sequences. Other operations may run
    between the slices. While a batch is not reported, the progress of its sequences is not compared."""
    queues = engine.queues
    waiting = iter(list(queues.states))
    num_left = len(queues.states)
    while num_left > 0 and engine.queues is queues:
        _check_counts(engine)
        for _, sequence_id in zip(range(SLICE_SEQUENCES), waiting, strict=False):
            state = queues.states.get(sequence_id)
            if state is not None:
                _check_place(queues, state)
                _check_table(queues, state, reported=not engine.unreported)
        num_left -= SLICE_SEQUENCES
        if num_left > 0:
            yield


def _check_counts(engine: EngineScheduler) -> None:
    queues = engine.queues
    num_placed = queues.waiting.num_samples + len(queues.prefilling) + len(queues.decodes) + queues.swapped.num_samples
    _require(num_placed == len(queues.states), "a sample is in two queues, or in none")
    _require(queues.num_running <= engine.config.max_running, "more requests run than may")
    _check_flight(engine)


def _check_flight(engine: EngineScheduler) -> None:
    """Compare the batches in flight with the decode set, which changes while they are."""
    queues = engine.queues
    _require(len(queues.flight) <= 2, "too many batches are in flight")
    _require(bool(queues.flight) or not queues.aborted, "an aborted request remains")
    for flight in queues.flight:
        ids, ended = flight.step.sequence_ids[: flight.batch.num_decodes].tolist(), set(flight.ended)
        left = [sequence_id for sequence_id in ids if sequence_id not in ended]
        _require(queues.decodes.ids[flight.draft.which].tolist() == left, "a batch in flight has other decodes")
        _require(not ended & queues.states.keys(), "an ended sequence is in a queue")


def _check_place(queues: EngineQueues, state: RequestState) -> None:
    """Check that a sample is in the queue of its phase, and that its request knows it."""
    placed = {
        Phase.WAITING: lambda: state.unit[0] in queues.waiting,
        Phase.PREFILLING: lambda: queues.prefilling.get(state.sequence_id) is state,
        Phase.DECODING: lambda: state.sequence_id in queues.decodes.ids,
        Phase.SWAPPED: lambda: state.unit[0] in queues.swapped,
    }
    _require(placed[state.phase](), "a sample is not at its place in the queue of its phase")
    group = state.group
    _require(queues.requests.get(group.request_id) is group, "a sample has no request")
    _require(any(member is state for member in group.members), "a request does not know its sample")
    _require(all(queues.reserved.get(name) is group for name in group.reserved_ids), "an id is not reserved")
    if group.request.beams and state is state.unit[0]:
        _check_beams(queues, group)


def _check_beams(queues: EngineQueues, group: RequestGroup) -> None:
    """Check that the beams of a request run in lock-step."""
    phases = {state.phase for state in group.members}
    _require(len(phases) == 1 or phases == set(RUNNING), "some beams run and others wait")
    if phases == {Phase.DECODING}:
        decodes = queues.decodes
        lengths = {int(decodes.lengths[decodes.index(state.sequence_id)]) for state in group.members}
        _require(len(lengths) == 1, "beams differ in length")


def _check_table(queues: EngineQueues, state: RequestState, *, reported: bool) -> None:
    """Compare the length, progress and table of a sample with the block manager."""
    if state.phase is Phase.WAITING:
        _require(state.sequence_id not in queues.namespace, "a waiting sample has a sequence")
        return
    try:
        (one,) = queues.manager.describe(queues.namespace, [state.sequence_id])
    except UnknownSequenceError:
        raise InternalError("a running sample has no sequence") from None
    _require(one.swapped == (state.phase is Phase.SWAPPED), "a swapped sequence differs")
    if not reported:
        return
    if state.phase is Phase.PREFILLING:
        _require(one.length - one.num_computed == state.pending > 0, "the progress of a prefill differs")
    if state.phase is Phase.DECODING:
        at = queues.decodes.index(state.sequence_id)
        _require(one.length == one.num_computed == queues.decodes.lengths[at], "a length differs")
        _require(one.num_blocks == queues.decodes.blocks[at], "a table differs")
        _require(queues.decodes.generated[at] < queues.decodes.limits[at], "a finished request runs")


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InternalError(broken)
