"""The order of rows, and the format of figures."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvservice.top import format as fmt
from kvservice.top.columns import CALLS, SESSIONS, TABLES
from kvservice.top.summary import Bar
from kvservice.v1 import inspect_pb2

SNAPSHOT = inspect_pb2.Snapshot(
    calls=[
        inspect_pb2.CallSnapshot(method="fork", calls_per_s=1, p99_s=0.5),
        inspect_pb2.CallSnapshot(method="append", calls_per_s=3, p99_s=0.1),
        inspect_pb2.CallSnapshot(method="pin"),
    ],
    sessions=[
        inspect_pb2.SessionSnapshot(session_id=1, name="b", blocks=5, query_tokens=100, hit_tokens=10),
        inspect_pb2.SessionSnapshot(session_id=2, name="a", blocks=7),
        inspect_pb2.SessionSnapshot(session_id=3, name="c", blocks=1, query_tokens=10, hit_tokens=9),
    ],
)


@pytest.mark.parametrize(
    ("key", "reverse", "names"),
    [
        ("blocks", False, "abc"),
        ("blocks", True, "cba"),
        ("name", False, "abc"),
        ("name", True, "cba"),
        ("hits", False, "cba"),
        ("hits", True, "bca"),
        ("a key of another table", False, "abc"),
    ],
)
def test_numbers_fall_texts_rise_and_rows_without_a_value_are_last(key: str, reverse: bool, names: str) -> None:
    assert "".join(row.name for row in SESSIONS.ordered(SNAPSHOT, key, reverse)) == names


def test_rows_with_the_same_value_keep_their_order_however_they_come() -> None:
    rows = [inspect_pb2.SessionSnapshot(session_id=number, blocks=number % 2) for number in (3, 1, 4, 2)]
    for reverse, numbers in ((False, [1, 3, 2, 4]), (True, [2, 4, 1, 3])):
        for order in (rows, rows[::-1]):
            found = SESSIONS.ordered(inspect_pb2.Snapshot(sessions=order), "blocks", reverse)
            assert [row.session_id for row in found] == numbers


def test_a_method_that_was_not_called_lately_has_no_latency() -> None:
    assert [row.method for row in CALLS.ordered(SNAPSHOT, "p99", reverse=True)] == ["append", "fork", "pin"]
    assert [CALLS.column("p99").shown(row) for row in SNAPSHOT.calls] == ["500.0 ms", "100.0 ms", "-"]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_column_can_be_sorted_by(table) -> None:
    keys = [column.key for column in table.columns]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert len(table.ordered(SNAPSHOT, key, reverse=False)) == len(table.rows(SNAPSHOT))


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (fmt.count(0), "0"),
        (fmt.count(999_999), "999,999"),
        (fmt.count(1_000_000), "1.00M"),
        (fmt.count(2.5e12), "2.50T"),
        (fmt.rate(0), "0"),
        (fmt.rate(0.25), "0.2"),
        (fmt.rate(12.5), "12"),
        (fmt.size(1023), "1023 B"),
        (fmt.size(1536), "1.5 KiB"),
        (fmt.size(3 << 40), "3.0 TiB"),
        (fmt.latency(None), "-"),
        (fmt.latency(120e-6), "120 µs"),
        (fmt.latency(0.0042), "4.2 ms"),
        (fmt.latency(2.5), "2.50 s"),
        (fmt.age(59.9), "0:59"),
        (fmt.age(3725), "1:02:05"),
        (fmt.age(200_000), "2d 07h"),
        (fmt.share(None), "-"),
        (fmt.share(1.0), "100 %"),
        (fmt.share(0.99999), "99.9 %"),
        (fmt.share(1e-9), "0.1 %"),
        (fmt.printable("naïve 模型"), "naïve 模型"),
        (fmt.printable("a\x1b[2J\r\n\u202eb"), "a�[2J���b"),
    ],
)
def test_figures(shown: str, text: str) -> None:
    assert shown == text


@pytest.mark.parametrize(
    ("counts", "drawn"),
    [((5, 5), "aaaaabbbbb"), ((1, 999), "bbbbbbbbbb"), ((999, 1), "aaaaaaaaab"), ((3, 0), "aaaaaaaaaa"), ((0, 0), "")],
)
def test_a_bar_is_as_wide_as_there_is_room(counts: tuple[int, int], drawn: str) -> None:
    console = Console(width=10)
    with console.capture() as captured:
        console.print(Bar([(counts[0], "a", "red"), (counts[1], "b", "blue")]))
    assert captured.get().strip() == drawn
