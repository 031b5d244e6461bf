"""The client's lines appear in vLLM's log. The loggers have other names here."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kvservice.integrations.vllm.logs import log_with_vllm

ENGINE, OWN = "an engine", "a client"


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The output of the engine's logger."""
    text = io.StringIO()
    engine, own = logging.getLogger(ENGINE), logging.getLogger(OWN)
    engine.addHandler(logging.StreamHandler(text))
    engine.setLevel(logging.INFO)
    yield text
    for logger in (engine, own):
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def test_lines_of_the_client_appear_once(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root logger has no handlers, as in vLLM."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger(f"{OWN}.store").info("is not shown")
    for _ in range(2):
        log_with_vllm(ENGINE, OWN)
    logging.getLogger(f"{OWN}.store").info("is back")
    logging.getLogger(f"{OWN}.store").debug("a detail")
    assert written.getvalue() == "is back\n"


def test_handlers_of_the_application_stay_alone(written: io.StringIO) -> None:
    assert logging.getLogger().handlers, "those of pytest"
    log_with_vllm(ENGINE, OWN)
    logging.getLogger(f"{OWN}.store").warning("away")
    assert written.getvalue() == ""
