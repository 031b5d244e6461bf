"""A client that works while others are killed."""

from __future__ import annotations

import doomed_client
import numpy as np

from kvservice.client import Sequence, Session


class Survivor:
    """A client that shares blocks with the killed clients and checks all of its K/V in every round."""

    def __init__(self, session: Session) -> None:
        self._kv = session
        self._token_ids = [*doomed_client.PREFIX, 100, 101, 102, 103, 104, 105]
        self._sequence = session.allocate(self._token_ids)
        doomed_client.fill(session.open_step([self._sequence]), session.info, self._token_ids)

    def lap(self) -> None:
        child = self._kv.fork(self._sequence)
        token_ids = [*self._token_ids, 200]
        doomed_client.fill(self._kv.append([child], [200]), self._kv.info, token_ids)
        self._check(child, token_ids)
        self._kv.swap_out([child])
        self._check(self._sequence, self._token_ids)
        self._kv.swap_in([child])
        self._check(child, token_ids)
        self._kv.free([child])

    def _check(self, sequence: Sequence, token_ids: list[int]) -> None:
        expected = doomed_client.content(self._kv.info, token_ids)
        key, value = self._kv.read(sequence, 0, len(token_ids))
        np.testing.assert_array_equal(key, expected)
        np.testing.assert_array_equal(value, -expected)
