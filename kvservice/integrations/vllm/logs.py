"""The client's log lines appear in the log of vLLM."""

from __future__ import annotations

import logging


def log_with_vllm(vllm_name: str = "vllm", own_name: str = "kvservice") -> None:
    """Write what this package logs where vLLM writes its own lines. vLLM's logger does not use the root logger, so
    lines of the client below a warning would not appear. Does nothing if the application has set handlers up."""
    own, engine = logging.getLogger(own_name), logging.getLogger(vllm_name)
    if own.handlers or not engine.handlers or logging.getLogger().handlers:
        return
    for handler in engine.handlers:
        own.addHandler(handler)
    own.setLevel(engine.getEffectiveLevel())
    own.propagate = False
