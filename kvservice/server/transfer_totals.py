"""Totals of the transfers between hosts. Threads count, the event loop reads."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.errors import TransferFailedError
from kvservice.logs import LogBudget
from kvservice.telemetry.calls import BUCKETS_S, WIDTH
from kvservice.telemetry.transfers import DIRECTIONS

Direction: TypeAlias = Literal["in", "out"]
IN: Final = "in"
OUT: Final = "out"


@dataclass
class Flow:
    """Transfers of one direction: in progress, ended well, failed; and the bytes of those that ended well."""

    running: int = 0
    done: int = 0
    failed: int = 0
    num_bytes: int = 0


class TransferTotals:
    """`durations` int64[2, buckets + 1] and `seconds` float64[2] are histograms in the order of `DIRECTIONS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._log = LogBudget(logging.getLogger(__name__))
        self._lock = threading.Lock()
        self.flows: dict[str, Flow] = {direction: Flow() for direction in DIRECTIONS}
        self.durations: npt.NDArray[np.int64] = np.zeros((len(DIRECTIONS), WIDTH), np.int64)
        self.seconds: npt.NDArray[np.float64] = np.zeros(len(DIRECTIONS), np.float64)
        self.engine_failures = 0
        self.damaged_blocks = 0
        self.fallbacks = 0
        self.fallback_bytes = 0

    @contextmanager
    def transfer(self, direction: Direction, num_bytes: int) -> Iterator[None]:
        """Count what happens inside as a transfer, which has failed if it raises."""
        flow = self.flows[direction]
        with self._lock:
            flow.running += 1
        begun = self._clock()
        try:
            yield
        except BaseException as error:
            with self._lock:
                flow.running -= 1
                flow.failed += 1
                if isinstance(error, TransferFailedError):
                    self._log.write(
                        logging.WARNING, "%d bytes could not be transferred %s: %s", num_bytes, direction, error
                    )
            raise
        seconds, row = self._clock() - begun, DIRECTIONS.index(direction)
        with self._lock:
            flow.running -= 1
            flow.done += 1
            flow.num_bytes += num_bytes
            self.durations[row, bisect_left(BUCKETS_S, seconds)] += 1
            self.seconds[row] += seconds

    def fell_back(self, num_bytes: int) -> None:
        """Count a call whose blocks came in messages. On the event loop."""
        self.fallbacks += 1
        self.fallback_bytes += num_bytes
