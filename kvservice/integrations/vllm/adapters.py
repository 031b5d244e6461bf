"""The identity of adapters (LoRA), which vLLM's hashes know by name and path only."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kvservice.integrations.common.identity import files_identity

logger = logging.getLogger(__name__)


class AdapterIdentities:
    """The identities of the adapters of the requests that run. The files are looked at when a request begins.

    vLLM reads the files whenever it likes. So an adapter whose files have changed since its first request here has no
    identity: nobody knows which weights vLLM has in memory."""

    def __init__(self) -> None:
        self._first: dict[str, bytes | None] = {}
        self._of_request: dict[str, bytes | None] = {}

    def of(self, request: Any) -> bytes | None:
        """Return what distinguishes the weights of a request's adapter, b"" without one; None: its blocks can not be
        shared."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return b""
        if request.request_id not in self._of_request:
            self._of_request[request.request_id] = self._look(adapter.lora_path)
        return self._of_request[request.request_id]

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)

    def _look(self, path: str) -> bytes | None:
        identity = _identity(Path(path))
        first = self._first.setdefault(path, identity)
        if first is not None and first != identity:
            logger.warning("the files in %s have changed: blocks of this adapter are not shared until a restart", path)
            self._first[path] = None
        return self._first[path]


def _identity(directory: Path) -> bytes | None:
    try:
        return files_identity(directory).encode() if directory.is_dir() else None
    except OSError:
        return None
