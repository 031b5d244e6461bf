"""State of the daemon that outlives its process, in memory files whose descriptors a keeper holds.

A process can be killed at any machine instruction. Its stores up to there are in the files, in program order. A value
that counts by itself is therefore stored in one piece of at most eight bytes.

files       descriptors that the keeper handed over, and those it is to keep
state       KeptState: taken over from an earlier process, or new. It has a header (its version and identity, and how
            its process ended), arrays that keep their content, and arrays that do not
table       small values by section and key, crash-safe
report      what a restart kept and lost
"""

from kvservice.kept.report import KeptCounts, LostCounts, RestartReport, RestartTotals, count_restart
from kvservice.kept.state import Facts, KeptArrays, KeptFiles, KeptState
from kvservice.kept.table import KeptDict, KeptStateError, KeptTable, Section

__all__ = [
    "Facts",
    "KeptArrays",
    "KeptCounts",
    "KeptDict",
    "KeptFiles",
    "KeptState",
    "KeptStateError",
    "KeptTable",
    "LostCounts",
    "RestartReport",
    "RestartTotals",
    "Section",
    "count_restart",
]
