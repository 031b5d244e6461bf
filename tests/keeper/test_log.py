"""The keeper's lines."""

from __future__ import annotations

import json
import re

from kvservice.keeper import Log


def lines_of(log_level: str, log_format: str) -> list[str]:
    """Return what a log writes for one line of each level."""
    written: list[bytes] = []
    log = Log(log_level, log_format, written.append)
    log.info("first")
    log.warning("second\nline")
    log.error("third")
    return [line.decode() for line in written]


def test_lines_have_the_form_of_the_daemons() -> None:
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    lines = lines_of("info", "text")
    assert re.fullmatch(f"{stamp} INFO kvservice.keeper: first\n", lines[0])
    assert re.fullmatch(f"{stamp} WARNING kvservice.keeper: second\nline\n", lines[1])


def test_json_is_one_object_a_line() -> None:
    entry = json.loads(lines_of("info", "json")[1])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert entry == {"level": "WARNING", "logger": "kvservice.keeper", "message": "second\nline"}


def test_lower_levels_are_left_out() -> None:
    counts = {"debug": 3, "info": 3, "warning": 2, "error": 1}
    assert {level: len(lines_of(level, "text")) for level in counts} == counts


def test_a_closed_stderr_ends_nothing() -> None:
    """The log raises nothing."""

    def closed(_: bytes) -> None:
        raise OSError(5, "Input/output error")

    Log("info", "text", closed).warning("nobody reads this")
