"""The report of a start: what it found of the process before, for the log, the page, `top` and the metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from kvservice import plain_json

FIRST_START: Final = "first start"
TAKEN_OVER: Final = "taken over"
REFUSED: Final = "refused"
OUTCOMES: Final = (FIRST_START, TAKEN_OVER, REFUSED)

SIGNAL: Final = "signal"
STATUS: Final = "status"
DEVICE_FAULT: Final = "device_fault"
UPGRADE: Final = "upgrade"
CAUSES: Final = (SIGNAL, STATUS, DEVICE_FAULT, UPGRADE)

# The key of the totals in their section.
_TOTALS: Final = 0
_FAULT_STATUS: Final = "status 70"


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """Numbers of what a take-over found whole. Pins are blocks under a pin, store blocks are values of the store."""

    sessions: int = 0
    sequences: int = 0
    steps: int = 0
    cached_blocks: int = 0
    pins: int = 0
    store_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LostCounts:
    """Numbers of what a take-over found torn, or of what cannot be kept."""

    sequences: int = 0
    steps: int = 0
    schedulers: int = 0


@dataclass(frozen=True, slots=True)
class RestartTotals:
    """Counts over all processes that had the state: restarts by cause, and lost sequences. A refused state takes its
    counts along."""

    signal: int = 0
    status: int = 0
    device_fault: int = 0
    upgrade: int = 0
    lost_sequences: int = 0

    @property
    def by_cause(self) -> dict[str, int]:
        return {cause: getattr(self, cause) for cause in CAUSES}


@dataclass(frozen=True, slots=True)
class RestartReport:
    """The beginning of this process of the daemon.

    `is_kept`: whether a keeper or systemd keeps the memory. `ended`: how the process before ended ("signal 9",
    "status 1", "upgrade"), empty if that is unknown or this is the first process. `reason`: why the state was refused.
    `down_s`: seconds from that end to the start of serving. `take_over_s`: the part of it that opened and checked the
    state. `missing`: the addresses that could not be opened, and why.
    """

    outcome: str = FIRST_START
    is_kept: bool = False
    ended: str = ""
    reason: str = ""
    num_restarts: int = 0
    down_s: float = 0.0
    take_over_s: float = 0.0
    kept: KeptCounts = field(default_factory=KeptCounts)
    lost: LostCounts = field(default_factory=LostCounts)
    totals: RestartTotals = field(default_factory=RestartTotals)
    missing: str = ""

    @property
    def cause(self) -> str:
        """The cause of the restart, one of CAUSES. Empty for the first process."""
        return _cause_of(self.ended) if self.ended or self.outcome != FIRST_START else ""

    @property
    def summary(self) -> str:
        """The cause of the restart and what became of the state, in words."""
        if not self.cause:
            return "" if self.is_kept else "nothing is kept: the memory ends with the process of the daemon"
        missing = f"; not open at the start: {self.missing}" if self.missing else ""
        return f"after {self.ended or 'a crash'}: {self._take_over}{missing}"

    @property
    def _take_over(self) -> str:
        if self.outcome == REFUSED:
            return f"started empty, as the kept state was refused: {self.reason}"
        if self.outcome == FIRST_START:
            return f"started empty, as nothing was kept; down {self.down_s:.1f} s"
        lost = _listed(asdict(self.lost)) or "nothing"
        kept = _listed(asdict(self.kept)) or "an empty pool"
        return f"took over {kept} in {self.take_over_s:.2f} s, down {self.down_s:.1f} s; lost {lost}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RestartReport:
        parts = {
            "kept": KeptCounts(**values["kept"]),
            "lost": LostCounts(**values["lost"]),
            "totals": RestartTotals(**values["totals"]),
        }
        return cls(**{**values, **parts})


def _cause_of(ended: str) -> str:
    if ended == UPGRADE:
        return UPGRADE
    if ended.startswith("status"):
        return DEVICE_FAULT if ended == _FAULT_STATUS else STATUS
    return SIGNAL


def count_restart(
    section: MutableMapping[int, bytes], report: RestartReport, ended_early: Sequence[str] = ()
) -> RestartReport:
    """Add this start to the totals in `section`, and those of processes before that ended before they served. Returns
    the report with them. `num_restarts` becomes the larger of the totals and of what the keeper counted, which also
    counts restarts whose state was not kept."""
    totals = _read_totals(section.get(_TOTALS, b"{}"))
    causes = [*map(_cause_of, ended_early), *filter(None, [report.cause])]
    added = {cause: getattr(totals, cause) + causes.count(cause) for cause in causes}
    totals = replace(totals, **added, lost_sequences=totals.lost_sequences + report.lost.sequences)
    section[_TOTALS] = plain_json.dumps(asdict(totals)).encode()
    restarts = max(report.num_restarts, sum(totals.by_cause.values()))
    return replace(report, totals=totals, num_restarts=restarts)


def _read_totals(stored: bytes) -> RestartTotals:
    """Return the stored totals. Counts that another version did not store, or that are damaged, are 0."""
    try:
        counts = dict(json.loads(stored))
    except (TypeError, ValueError, RecursionError):
        counts = {}
    numbers = {name: counts.get(name, 0) for name in asdict(RestartTotals())}
    return RestartTotals(**{name: number if isinstance(number, int) else 0 for name, number in numbers.items()})


def _listed(counts: Mapping[str, int]) -> str:
    """Return the counts that are not 0, such as "12 sessions, 1 cached block"."""
    words = ((name.replace("_", " "), number) for name, number in counts.items() if number)
    return ", ".join(f"{number:,} {name.removesuffix('s') if number == 1 else name}" for name, number in words)
