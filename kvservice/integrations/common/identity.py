"""Texts that identify weights, layouts and other things on which the bytes of a block depend."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvservice.client import StoreNamespace

MAX_TEXT = 256


def files_identity(directory: Path) -> str:
    """Return a digest of the names, sizes and times of change of the files in a directory."""
    parts = []
    for path in sorted(directory.iterdir()):
        if path.is_file():
            status = path.stat()
            parts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return digest(*parts)


def session_name(part: str, namespace: StoreNamespace) -> str:
    """Return the name of a session, which operators see: the part of the engine and its rank, "vllm worker tp0"."""
    pipeline = f" pp{namespace.pp_rank}" if namespace.pp_size > 1 else ""
    return f"{part} tp{namespace.tp_rank}{pipeline}"


def short(text: str) -> str:
    """Return a text that a namespace can hold: the end of a longer one with a digest of all of it."""
    return text if len(text) <= MAX_TEXT else f"{digest(text)} {text[-128:]}"


def digest(*parts: str) -> str:
    """Return the SHA-256 of texts as 64 hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()
