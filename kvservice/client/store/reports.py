"""Log lines about the store's link to the daemon."""

from __future__ import annotations

import logging

from kvservice.errors import KVServiceError

logger = logging.getLogger(__name__)


class LinkReports:
    """Logs a warning when the store gets out of reach and for another refusal of the daemon, and a line when it is
    back. The caller serializes calls. It keeps no error: the frames of its traceback keep the mapped memory of the lost
    link."""

    def __init__(self, address: str, model: str, *, raises: bool) -> None:
        self._store = f"the block store at {address} for {model or 'a model without a name'}"
        self._answer = "errors" if raises else "misses"
        self._kind: type[KVServiceError] | None = None

    def away(self, error: KVServiceError, *, refused: bool = False) -> None:
        """Report why there is no link. Only the first time, unless the daemon has `refused` for a new reason."""
        if self._kind is None or (refused and type(error) is not self._kind):
            logger.warning(
                "%s is out of reach: %s; calls are %s until it is back", self._store, str(error), self._answer
            )
        self._kind = type(error)

    def back(self) -> None:
        """Report that calls are answered again, unless it was never away."""
        if self._kind is not None:
            logger.info("%s is back", self._store)
        self._kind = None
