"""The kept table: whatever moment its process is killed at, the file holds all values before the change or after it."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from each_row import each_row
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kept_files import at_every_line, collected_garbage, content_of, copied_file, without_memory
from open_files import num_open_files

from kvservice.errors import ResourceExhaustedError
from kvservice.kept import KeptDict, KeptStateError, KeptTable

# The size of a new range of the file, and of the longest value.
MIN_CAPACITY, MAX_VALUE_BYTES = 64 << 10, 16 << 20
Content = dict[int, dict[int, bytes]]
SECTIONS = (1, 2, 7)


def content(table: KeptTable) -> Content:
    return {number: dict(table.section(number)) for number in SECTIONS}


def reopened(data: bytes) -> Content:
    return content(KeptTable(copied_file(data)))


@contextmanager
def killed_at_every_moment(table: KeptTable) -> Iterator[list[bytes]]:
    """Collect the file at every line of the table's code, and the states in which a store of bytes that do not count
    yet has come to one of its quarters. A store of at most a word is made in one piece."""
    moments: list[bytes] = []

    def note() -> None:
        now = content_of(table.fd)
        if moments and len(now) == len(moments[-1]):
            moments.extend(parts_of_a_store(moments[-1], now))
        moments.append(now)

    with at_every_line(["kept/table.py"], note):
        yield moments


def parts_of_a_store(before: bytes, after: bytes) -> list[bytes]:
    """Return the files in which the store that made `after` of `before` has come to some of its bytes."""
    changed = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    if not len(changed) or changed[0] < mmap.PAGESIZE:  # words of the first page
        return []
    begin, end = int(changed[0]), int(changed[-1]) + 1
    cuts = range(begin, end, max(1, (end - begin) // 4))
    return [after[:at] + before[at:] for at in cuts]


def change(rng: random.Random, section: KeptDict, longest: int) -> None:
    if section and rng.random() < 0.3:
        del section[rng.choice(list(section))]
    else:
        section[rng.randrange(-4, 12)] = rng.randbytes(rng.randrange(longest))


@pytest.mark.parametrize("longest", [40, MIN_CAPACITY // 3], ids=["small values", "growth and compaction"])
def test_at_every_moment_all_values_are_those_before_the_change_or_after_it(longest: int) -> None:
    rng = random.Random(longest)
    table = KeptTable()
    sizes = set()
    for _ in range(30):
        before = content(table)
        with killed_at_every_moment(table) as moments:
            change(rng, table.section(rng.choice(SECTIONS)), longest)
        after = content(table)
        seen = [reopened(data) for data in dict.fromkeys(moments)]
        assert len(seen) >= 3
        assert all(found in (before, after) for found in seen)
        sizes.add(os.fstat(table.fd).st_size)
    assert reopened(content_of(table.fd)) == content(table)
    assert (len(sizes) > 1) == (longest > 40), "the table moves to a range with more room"


def test_a_process_that_takes_a_table_over_goes_on_with_it() -> None:
    table = KeptTable()
    table.section(1)[5] = b"five"
    for round_number in range(10):
        table = KeptTable(copied_file(content_of(table.fd)))
        table.section(2)[round_number] = bytes(MIN_CAPACITY // 4)
    assert content(table)[1] == {5: b"five"}
    assert list(content(table)[2]) == list(range(10))


def test_repeated_changes_take_no_more_memory() -> None:
    table = KeptTable()
    section = table.section(1)
    for number in range(2000):
        section[number % 8] = number.to_bytes(1000, "little")
    assert os.fstat(table.fd).st_size <= mmap.PAGESIZE + 3 * MIN_CAPACITY


def test_the_memory_of_large_values_is_given_back() -> None:
    table = KeptTable()
    section = table.section(1)
    for _ in range(2):
        section[1] = bytes(64 * MIN_CAPACITY)
        del section[1]
        for number in range(300):
            section[2] = number.to_bytes(64 * MIN_CAPACITY // 100, "little")
    del section[2]
    for number in range(100):
        section[2] = number.to_bytes(MIN_CAPACITY // 4, "little")
    assert os.fstat(table.fd).st_blocks * 512 <= 16 * MIN_CAPACITY


def test_a_change_that_fails_changes_nothing() -> None:
    table = KeptTable()
    section = table.section(1)
    section[1] = b"one"
    with pytest.raises(ResourceExhaustedError, match="longer than"):
        section[1] = bytes(MAX_VALUE_BYTES + 1)
    with pytest.raises(KeyError):
        del section[2]
    assert dict(section) == {1: b"one"} == reopened(content_of(table.fd))[1]


def test_a_table_that_finds_no_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = KeptTable()
    section = table.section(1)
    section[1] = b"one"
    with without_memory(monkeypatch), pytest.raises(ResourceExhaustedError, match="takes"):
        section[2] = bytes(MIN_CAPACITY)
    assert dict(section) == {1: b"one"} == reopened(content_of(table.fd))[1]
    section[2] = bytes(MIN_CAPACITY)
    assert len(section) == 2


BAD: dict[str, Callable[[bytearray], object]] = {
    "empty": lambda data: data.clear(),
    "cut page": lambda data: data.__delitem__(slice(100, None)),
    "other format": lambda data: struct.pack_into("<Q", data, 0, 7),
    "unknown range": lambda data: struct.pack_into("<Q", data, 8, 2),
    "range over page 0": lambda data: struct.pack_into("<Q", data, 16, 0),
    "range after the file": lambda data: struct.pack_into("<Q", data, 24, 1 << 40),
    "end after the range": lambda data: struct.pack_into("<Q", data, 32, MIN_CAPACITY + 8),
    "half a record": lambda data: struct.pack_into("<Q", data, 32, 8),
    "a record longer than the log": lambda data: struct.pack_into("<I", data, mmap.PAGESIZE + 8, 1000),
    "all ones": lambda data: data.__setitem__(slice(None), b"\xff" * len(data)),
}


def test_what_is_no_table_is_refused() -> None:
    table = KeptTable()
    table.section(1)[5] = b"five"
    with each_row() as row:
        for name, spoil in BAD.items():
            with row(name):
                data = bytearray(content_of(table.fd))
                spoil(data)
                with pytest.raises(KeptStateError):
                    KeptTable(copied_file(bytes(data)))


def test_its_descriptors_are_closed_with_it() -> None:
    def open_and_drop() -> None:
        KeptTable().section(1)[1] = bytes(2 * MIN_CAPACITY)
        with pytest.raises(KeptStateError):
            KeptTable(copied_file(b""))

    open_and_drop()
    with collected_garbage() as collect:
        before = num_open_files()
        open_and_drop()
        collect()
        assert num_open_files() == before


class AsDicts(RuleBasedStateMachine):
    """The table against dicts, with a new process now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.table = KeptTable()
        self.model: Content = {number: {} for number in SECTIONS}

    @rule(number=st.sampled_from(SECTIONS), key=st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3))
    def remove(self, number: int, key: int) -> None:
        assert self.table.section(number).pop(key, None) == self.model[number].pop(key, None)

    @rule(number=st.sampled_from(SECTIONS), key=st.integers(0, 3) | st.just(-(2**63)), value=st.binary(max_size=70))
    def put(self, number: int, key: int, value: bytes) -> None:
        self.table.section(number)[key] = self.model[number][key] = value

    @rule(number=st.sampled_from(SECTIONS), key=st.integers(0, 3), size=st.integers(0, MIN_CAPACITY))
    def put_long(self, number: int, key: int, size: int) -> None:
        self.put(number, key, bytes(size))

    @rule()
    def take_over(self) -> None:
        self.table = KeptTable(os.dup(self.table.fd))

    @invariant()
    def they_are_equal(self) -> None:
        assert content(self.table) == self.model


TestAsDicts = AsDicts.TestCase
TestAsDicts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_long_value_is_kept_once() -> None:
    table = KeptTable()
    section, other = table.section(1), table.section(2)
    value = bytes(range(256)) * 1024
    for key in range(1000):
        section[key] = bytes(value)
    other[5] = value
    assert os.fstat(table.fd).st_size < 16 * len(value)
    del section[0]
    section[1] = b"short"
    section[2000] = bytes(value)
    after = reopened(content_of(table.fd))
    assert after == content(table)
    assert after[1][999] == after[1][2000] == after[2][5] == value
    table = KeptTable(copied_file(content_of(table.fd)))
    for number in range(10):
        table.section(7)[number] = number.to_bytes(MIN_CAPACITY, "little")
    assert {key: dict(table.section(key)) for key in (1, 2)} == {1: after[1], 2: after[2]}
    assert reopened(content_of(table.fd)) == content(table)


def test_values_end_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    table = KeptTable()
    section = table.section(1)

    def fill() -> None:
        for number in range(MIN_CAPACITY):
            section[number] = bytes(number % 9)

    with without_memory(monkeypatch):
        with pytest.raises(ResourceExhaustedError):
            fill()
        for key in list(section):
            del section[key]
    assert not section
    assert reopened(content_of(table.fd))[1] == {}


def test_reserved_values_are_put_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    table = KeptTable()
    section = table.section(1)
    table.reserve(10 * 9000, 10)
    with without_memory(monkeypatch):
        for key in range(10):
            section[key] = bytes([key]) * 9000
        with pytest.raises(ResourceExhaustedError):
            table.reserve(1 << 20, 1)
    assert len(reopened(content_of(table.fd))[1]) == 10
