"""The schedulers of all engines that share one pool."""

from __future__ import annotations

import math

from kvservice.blocks import BlockManager, SessionNamespace, Slices
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.scheduler.config import SchedulerConfig
from kvservice.scheduler.engine import EngineScheduler
from kvservice.scheduler.integrity import check_in_slices
from kvservice.scheduler.shares import PoolShares
from kvservice.scheduler.stats import Latencies, SchedulerCounters, SchedulerFigures


class Scheduler:
    """Engines with queues of their own over one pool, which is shared between them by weight. `latencies` cover
    all engines since the start."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._shares = PoolShares(manager.config.num_blocks)
        self._engines: dict[SessionNamespace, EngineScheduler] = {}
        self._closed = SchedulerCounters()
        self.latencies = Latencies()

    def open_engine(
        self, namespace: SessionNamespace, config: SchedulerConfig | None = None, weight: float = 1.0
    ) -> EngineScheduler:
        """Open the scheduler of one engine, whose sequences are in this namespace. Raises InvalidArgumentError, and
        QuotaExceededError if a step could exceed a limit of the block manager."""
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise InvalidArgumentError("must be a positive number", field="weight")
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
        """Check the invariants of all engines, see integrity.py. Raises InternalError."""
        for engine in list(self._engines.values()):
            yield from check_in_slices(engine)
            yield

    def figures(self) -> dict[int, SchedulerFigures]:
        """Return the figures of each engine by the number of its namespace."""
        return {namespace.number: engine.figures() for namespace, engine in self._engines.items()}

    def totals(self) -> SchedulerFigures:
        """Return the sums over all engines, with the counters of closed ones."""
        closed = SchedulerFigures.of(0, 0, 0, 0, self._closed)
        return SchedulerFigures(*map(sum, zip(closed, *self.figures().values(), strict=True)))
