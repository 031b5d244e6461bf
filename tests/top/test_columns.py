"""The order of rows, and the format of figures."""

from __future__ import annotations

import asyncio
import itertools
import re

from each_row import each_row
from inspected_pool import Inspected
from top_screen import screen, shown_names, top

from kvservice.top import SORT_KEYS
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


def orders(inspected: Inspected, sort_key: str, table: str = "sessions") -> tuple[list[str], list[str]]:
    """Return the second column of a table that is sorted by this key, and after the key that reverses it."""

    async def scene() -> tuple[list[str], list[str]]:
        async with screen(inspected, sort_key=sort_key) as (app, pilot):
            before = shown_names(app, table)
            await pilot.press("r")
            return before, shown_names(app, table)

    return asyncio.run(scene())


def test_numbers_fall_texts_rise_and_rows_without_a_value_are_last(inspected: Inspected) -> None:
    inspected.snapshot = SNAPSHOT
    assert tuple(map("".join, orders(inspected, "hits"))) == ("cba", "bca")
    sessions = {key: lines_of(inspected, "--sort", key)[-7:-4] for key in ("blocks", "name", "sequence")}
    order = {key: "".join(line.split()[1] for line in lines) for key, lines in sessions.items()}
    assert order == dict.fromkeys(sessions, "abc"), "a key of another table leaves the order by blocks"


def test_rows_with_the_same_value_keep_their_order_however_they_come(inspected: Inspected) -> None:
    rows = [inspect_pb2.SessionSnapshot(session_id=n, name=f"{n}", blocks=n % 2) for n in (3, 1, 4, 2)]
    inspected.snapshot = inspect_pb2.Snapshot(sessions=rows)
    assert orders(inspected, "blocks") == (["1", "3", "2", "4"], ["2", "4", "1", "3"])
    inspected.snapshot = inspect_pb2.Snapshot(sessions=rows[::-1])
    lines = [line.split() for line in lines_of(inspected)]
    assert [line[0] for line in lines if len(line) > 6 and line[0] in "1234"] == ["1", "3", "2", "4"]


def lines_of(inspected: Inspected, *arguments: str) -> list[str]:
    done = top("--once", "--address", inspected.address, *arguments)
    assert done.exit_code == 0, done.output
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_a_method_that_was_not_called_lately_has_no_latency(inspected: Inspected) -> None:
    inspected.snapshot = SNAPSHOT
    lines = lines_of(inspected, "--sort", "p99")
    at = next(number for number, line in enumerate(lines) if line.startswith("fork"))
    assert lines[at : at + 3] == ["fork 1.0 - 500.0 ms 0 0", "append 3.0 - 100.0 ms 0 0", "pin 0 - - 0 0"]


def test_every_column_can_be_sorted_by(inspected: Inspected) -> None:
    assert len(set(SORT_KEYS)) == len(SORT_KEYS) > 20
    with each_row() as row:
        for key in SORT_KEYS:
            with row(key):
                assert sum(line.count("chat") for line in lines_of(inspected, "--sort", key)) == 3


def test_figures(inspected: Inspected) -> None:
    """The first line of a test has a value, the other ones what is shown for it."""
    tokens = {0: "0", 999_999: "999,999", 1_000_000: "1.00M", 2_500_000_000_000: "2.50T"}
    sizes = {1023: "1023 B", 1536: "1.5 KiB", 3 << 40: "3.0 TiB"}
    ages = {59.9: "0:59", 3725: "1:02:05", 200_000: "2d 07h"}
    shares = {(0, 0): "-", (1, 1): "100 %", (100_000, 99_999): "99.9 %", (1_000_000_000, 1): "0.1 %"}
    names = {"naïve 模型": "naïve 模型", "a\x1b[2J\r\n\u202eb": "a�[2J���b"}
    snapshot = inspect_pb2.Snapshot()
    expected: list[str] = []
    rows = itertools.zip_longest(tokens, sizes, ages, shares, names)
    for number, (count, size, age_s, share, name) in enumerate(rows, start=1):
        query_tokens, hit_tokens = share or (0, 0)
        snapshot.sessions.add(
            session_id=number,
            name=name or "",
            tokens=count,
            region_bytes=size or 0,
            age_s=age_s or 0,
            query_tokens=query_tokens,
            hit_tokens=hit_tokens,
            attached=True,
        )
        shown = (names.get(name, ""), "0", tokens[count], "0", "0", shares[query_tokens, hit_tokens], "0")
        expected.append(
            " ".join(" ".join((str(number), *shown, sizes.get(size, "0 B"), ages.get(age_s, "0:00"))).split())
        )
    rates = {0.0: "0", 0.25: "0.2", 12.5: "12"}
    latencies = {None: "-", 120e-6: "120 µs", 0.0042: "4.2 ms", 2.5: "2.50 s"}
    for number, (rate, latency_s) in enumerate(itertools.zip_longest(rates, latencies, fillvalue=0.0)):
        snapshot.calls.add(method=f"m{number}", calls_per_s=rate or 0.0, p99_s=latency_s)
        expected.append(f"m{number} {rates[rate or 0.0]} - {latencies[latency_s]} 0 0")
    inspected.snapshot = snapshot
    lines = lines_of(inspected)
    assert [line for line in expected if line not in lines] == [], lines


def test_a_bar_is_as_wide_as_there_is_room(inspected: Inspected) -> None:
    """The width is shared out by the sums from the left, rounded down."""
    counts = {(5, 5): 0.5, (1, 999): 0.001, (999, 1): 0.999, (3, 0): 1.0}
    with each_row() as row:
        for (active, free), part in counts.items():
            with row((active, free)):
                pool = inspect_pb2.PoolSnapshot(num_blocks=active + free, active_blocks=active, free_blocks=free)
                inspected.snapshot = inspect_pb2.Snapshot(pool=pool)
                (bar,) = re.findall(r"Pool ([█·]+) ", "\n".join(lines_of(inspected)))
                width = int(len(bar) * part)
                assert len(bar) > 80
                assert bar == "█" * width + "·" * (len(bar) - width)
    inspected.snapshot = inspect_pb2.Snapshot()
    assert any(line.startswith("Pool 0 of 0 blocks") for line in lines_of(inspected))
