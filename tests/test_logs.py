"""Log output, as read from stderr."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvservice import logs

logger = logging.getLogger("kvservice.test_logs")


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # basicConfig closes the handlers that it removes, and pytest needs its own again.
    root.handlers[:] = []
    yield
    root.handlers[:], root.level = handlers, level


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_is_an_object(capsys) -> None:
    before = datetime.datetime.now(datetime.UTC)
    logs.configure("info", "json")
    logger.info("serving %d blocks", 64)
    (line,) = logged(capsys)
    time = datetime.datetime.fromisoformat(line.pop("time"))
    assert before <= time <= datetime.datetime.now(datetime.UTC)
    assert time.utcoffset() == datetime.timedelta(0)
    assert line == {"level": "INFO", "logger": "kvservice.test_logs", "message": "serving 64 blocks"}


def test_fields_that_are_given_are_fields(capsys) -> None:
    logs.configure("info", "json")
    given: dict[str, Any] = {"session_id": 17, "request_id": 1 << 63, "method": "append", "status": "NOT_FOUND"}
    logger.warning("refused", extra=given | {"color_message": "\x1b[1mrefused\x1b[0m"})
    (line,) = logged(capsys)
    assert {name: line[name] for name in given} == given
    assert set(line) == {"time", "level", "logger", "message", *given}


def test_a_message_stays_in_its_line(capsys) -> None:
    logs.configure("info", "json")
    logger.error('two\nlines and a "quote" \x1b[2J', extra={"method": "\n{}"})
    (line,) = logged(capsys)
    assert line["message"] == 'two\nlines and a "quote" \x1b[2J'


def test_an_exception_is_a_field(capsys) -> None:
    logs.configure("info", "json")
    try:
        raise ValueError("of the test")
    except ValueError:
        logger.exception("append failed", extra={"method": "append"})
    (line,) = logged(capsys)
    assert line["message"] == "append failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: of the test")


def test_a_client_that_goes_away_or_sends_nonsense_is_no_error(capsys) -> None:
    """Log errors as gRPC does, each with a traceback."""
    logs.configure("info", "json")
    grpc = logging.getLogger("grpc._cython.cygrpc")
    grpc.error("ExecuteBatchError raised in core by servicer method [/a/b]")
    nonsense = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    for error in (asyncio.CancelledError(), nonsense, ValueError("of the daemon")):
        try:
            raise error
        except BaseException:
            grpc.exception("Exception not handled by _handle_exceptions in servicer method [/a/b]")
    (line,) = logged(capsys)
    assert line["exception"].endswith("ValueError: of the daemon")


@pytest.mark.parametrize("format_", ["text", "json"])
def test_what_is_below_the_level_is_not_logged(capsys, format_: str) -> None:
    logs.configure("warning", format_)
    logger.info("little")
    logger.warning("much")
    said = capsys.readouterr().err
    assert "much" in said
    assert "little" not in said


def test_text_is_for_people(capsys) -> None:
    logs.configure("info", "text")
    logger.info("serving", extra={"method": "append"})
    assert capsys.readouterr().err.endswith(" INFO kvservice.test_logs: serving\n")


def test_the_last_configuration_holds_alone(capsys) -> None:
    logs.configure("info", "text")
    logs.configure("info", "json")
    logger.info("once")
    assert [line["message"] for line in logged(capsys)] == ["once"]
