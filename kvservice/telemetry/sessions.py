"""Shared tables of open sessions and of tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Zeros
from kvservice.blocks.state import NUM_COUNTERS

# Columns of a session row, after the token counters of its namespace.
SESSION_ID, ATTACHED, OPENED_MS, REGIONS, REGION_BYTES, LANE, TENANT = range(NUM_COUNTERS, NUM_COUNTERS + 7)
NUM_COLUMNS = NUM_COUNTERS + 7
# Column of a tenant row, after its token counters.
IN_USE = NUM_COUNTERS
# Names are UTF-8, have at most 64 characters, and are padded with zeros.
NAME_BYTES = 256
OTHER_TENANTS = "other"


class SessionTable:
    """Shared arrays of sessions and tenants.

    sessions int64[max_sessions, columns], with SESSION_ID 0 in free rows; session_names uint8[max_sessions, 256].
    Tenants get rows in the order of their first session. After `max_tenants` of them, all others share the last row.
    tenant_names uint8[max_tenants + 1, 256]; tenants int64[max_tenants + 1, 4]: the tokens of their closed sessions,
    and whether the row is in use. sessions_version int64[1] is odd while tokens move from a session to its tenant.
    """

    def __init__(self, max_sessions: int, max_tenants: int, zeros: Zeros) -> None:
        """`zeros` allocates the arrays. They may have the rows of an earlier process, see `recover`."""
        self._rows: npt.NDArray[np.int64] = zeros("sessions", (max_sessions, NUM_COLUMNS), np.int64)
        self._names: npt.NDArray[np.uint8] = zeros("session_names", (max_sessions, NAME_BYTES), np.uint8)
        self._tenant_names: npt.NDArray[np.uint8] = zeros("tenant_names", (max_tenants + 1, NAME_BYTES), np.uint8)
        self._tenants: npt.NDArray[np.int64] = zeros("tenants", (max_tenants + 1, NUM_COUNTERS + 1), np.int64)
        self._version: npt.NDArray[np.int64] = zeros("sessions_version", (1,), np.int64)
        self._free = list(range(max_sessions - 1, -1, -1))
        self._numbers: dict[str, int] = {}
        self._max_tenants = max_tenants

    def open(self, session_id: int, name: str, tenant: str, opened_ms: int) -> SessionRow:
        number = self._free.pop()
        row = self._rows[number]
        _put_name(self._names[number], name)
        row[:] = 0
        row[OPENED_MS], row[TENANT] = opened_ms, self._tenant(tenant)
        row[SESSION_ID] = session_id  # set last, because it marks the row as used
        return SessionRow(number, row)

    def recover(self, sessions: Mapping[int, tuple[int, str, str]]) -> dict[int, SessionRow]:
        """Resume the sessions of an earlier process: (session id, name, tenant) by row number. The earlier process did
        not end all others that have rows; they end now. Returns the rows of the sessions, which keep their tokens."""
        self._version[0] += self._version[0] & 1
        used = np.flatnonzero(self._tenants[: self._max_tenants, IN_USE]).tolist()
        self._numbers = {get_name(self._tenant_names[number]): number for number in used}
        for number in set(np.flatnonzero(self._rows[:, SESSION_ID]).tolist()).difference(sessions):
            self._end(self._rows[number])
        for number, (session_id, name, tenant) in sessions.items():
            row = self._rows[number]
            _put_name(self._names[number], name)
            row[[ATTACHED, REGIONS, REGION_BYTES, LANE]] = 0
            row[TENANT] = self._tenant(tenant)
            row[SESSION_ID] = session_id
        self._free = [number for number in reversed(range(len(self._rows))) if number not in sessions]
        return {number: SessionRow(number, self._rows[number]) for number in sessions}

    def close(self, row: SessionRow) -> None:
        columns = self._rows[row.number]
        row.leave()
        self._end(columns)
        self._free.append(row.number)

    def _end(self, columns: npt.NDArray[np.int64]) -> None:
        """Move the tokens of a session to its tenant, and clear the session's row."""
        self._version[0] += 1
        self._tenants[columns[TENANT], :NUM_COUNTERS] += columns[:NUM_COUNTERS]
        columns[:] = 0
        self._version[0] += 1

    def _tenant(self, name: str) -> int:
        number = self._numbers.get(name, len(self._numbers))
        if number == self._max_tenants or name == OTHER_TENANTS:
            number, name = self._max_tenants, OTHER_TENANTS
        else:
            self._numbers[name] = number
        _put_name(self._tenant_names[number], name)
        self._tenants[number, IN_USE] = 1
        return number


class SessionRow:
    """The row of one session. `counters` are the counters of its namespace; other columns are set when they change."""

    def __init__(self, number: int, columns: npt.NDArray[np.int64]) -> None:
        self.number = number
        # Updating an element of a memoryview takes a quarter of NumPy's time.
        self._columns: Any = columns.data
        self.counters: Any = self._columns[:NUM_COUNTERS]

    def set(self, column: int, value: int) -> None:
        self._columns[column] = value

    def leave(self) -> None:
        """Detach from the row, which another session may reuse. Later changes have no effect on the shared row."""
        self._columns = [0] * NUM_COLUMNS


def _put_name(place: npt.NDArray[np.uint8], name: str) -> None:
    place[:] = np.frombuffer(name.encode().ljust(NAME_BYTES, b"\0"), np.uint8)


def get_name(place: npt.NDArray[np.uint8]) -> str:
    """Return a name from `SessionTable`. During a concurrent change, bytes that cannot be decoded are replaced."""
    return place.tobytes().rstrip(b"\0").decode(errors="replace")
