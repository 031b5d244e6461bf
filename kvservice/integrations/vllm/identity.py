"""The identity of a model and its weights, which keeps K/V of different models in different namespaces of the store."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from kvservice.errors import InvalidArgumentError

MAX_TEXT = 256


def weights_identity(model_config: Any, load_config: Any) -> str:
    """Return a text that differs if weights or anything that changes their meaning differ: revision, configuration,
    quantization. Raises InvalidArgumentError if the source of the weights has no identity."""
    path = Path(model_config.model)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if path.is_dir():
        source = files_identity(path)
    elif commit or model_config.revision:
        source = str(commit or model_config.revision)
    else:
        raise InvalidArgumentError(
            f'{model_config.model} is neither a directory nor has it a known revision; set "weights" in '
            "kv_connector_extra_config to a text that changes with the weights",
            field="weights",
        )
    # Dummy weights are random numbers.
    seed = model_config.seed if load_config.load_format == "dummy" else ""
    parts = (
        source,
        model_config.hf_config.to_json_string(use_diff=False),
        str(model_config.quantization),
        str(load_config.load_format),
        str(seed),
    )
    return digest(*parts)


def files_identity(directory: Path) -> str:
    """Return a digest of the names, sizes and times of change of the files in a directory."""
    parts = []
    for path in sorted(directory.iterdir()):
        if path.is_file():
            status = path.stat()
            parts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return digest(*parts)


def key_algorithm(algorithm: str) -> str:
    """Return the algorithm and seed of vLLM's block hashes."""
    return f"{algorithm} seed {os.environ.get('PYTHONHASHSEED', 'default')}"[:MAX_TEXT]


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
