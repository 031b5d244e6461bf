"""A state is taken over whole, or refused with the reason; and then it is gone."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from kept_files import HeldFiles, at_every_line, collected_garbage
from open_files import num_open_files

from kvservice.kept import KeptState, KeptStateError, Section

IDENTITY = {"num_layers": 4, "block_size": 16, "dtype": "bfloat16"}
NUM_BYTES = 3 * mmap.PAGESIZE
# What the names of the state's descriptors begin with, and how many take-overs may fail.
PREFIX, MAX_ATTEMPTS = "kvservice.state.", 5


@pytest.fixture
def keeper() -> Iterator[HeldFiles]:
    keeper = HeldFiles()
    yield keeper
    keeper.close()


def started(keeper: HeldFiles, **changes: Any) -> KeptState:
    return KeptState.open(keeper.start(), IDENTITY | changes)


def serving(keeper: HeldFiles, **changes: Any) -> KeptState:
    """Return the state of a process that serves, with something of every kind in it."""
    state = started(keeper, **changes)
    state.memory("pool", NUM_BYTES, read_only=True).map[:4] = b"pool"
    state.memory("index", NUM_BYTES, read_only=False, sparse=True).map[:5] = b"index"
    state.arrays.kept("lengths", (5,), np.int64)[:] = 7
    state.arrays.kept("hashes", (2, 32), np.uint8, private=True)[:] = 8
    state.arrays.zeros("calls", (3,), np.int64)[:] = 9
    state.table.section(Section.PINS)[1] = b"pin"
    state.facts["num_blocks"] = 12
    state.ready()
    return state


def assert_taken_over(state: KeptState) -> None:
    assert (state.taken, state.refused) == (True, "")
    assert state.memory("pool", NUM_BYTES, read_only=True).map[:4] == b"pool"
    assert state.memory("index", NUM_BYTES, read_only=False, sparse=True).map[:5] == b"index"
    assert state.arrays.kept("lengths", (5,), np.int64).tolist() == [7] * 5
    assert (state.arrays.kept("hashes", (2, 32), np.uint8, private=True) == 8).all()
    assert state.arrays.zeros("calls", (3,), np.int64).tolist() == [0] * 3
    assert dict(state.table.section(Section.PINS)) == {1: b"pin"}
    assert dict(state.facts) == {"num_blocks": 12}


def assert_new(state: KeptState, keeper: HeldFiles, refused: str = "") -> None:
    assert (state.taken, state.clean, state.refused) == (False, False, refused)
    assert not any(name.startswith(PREFIX) for name in keeper.held)
    assert not state.memory("pool", NUM_BYTES, read_only=True).map[:4].strip(b"\0")
    assert not state.arrays.kept("lengths", (5,), np.int64).any()
    assert not state.table.section(Section.PINS)
    assert not state.facts


def test_the_next_process_has_it_all(keeper: HeldFiles) -> None:
    serving(keeper)
    for _ in range(3):
        state = started(keeper)
        assert_taken_over(state)
        assert not state.clean
        state.ready()
    assert sorted(keeper.held) == [PREFIX + name for name in ("arrays", "header", "index", "pool", "private", "table")]


def test_a_process_that_was_killed_before_it_served_leaves_nothing(keeper: HeldFiles) -> None:
    state = started(keeper)
    state.memory("pool", NUM_BYTES, read_only=True).map[:4] = b"pool"
    assert not keeper.held


def test_a_taken_over_state_can_be_taken_over_before_its_process_serves(keeper: HeldFiles) -> None:
    serving(keeper)
    assert_taken_over(started(keeper))
    assert_taken_over(started(keeper))


OF_A_START = ("kept/", "pool/sealed.py", "telemetry/arrays.py")


def test_a_first_start_that_is_killed_at_any_line_leaves_all_or_nothing(keeper: HeldFiles) -> None:
    moments = set()
    with at_every_line(OF_A_START, lambda: moments.add(keeper.content())):
        serving(keeper)
    outcomes = []
    for moment in moments:
        copy = HeldFiles.of(moment)
        state = started(copy)
        outcomes.append(state.taken)
        if state.taken:
            assert_taken_over(state)
        else:
            assert_new(state, copy)
        copy.close()
    assert {True, False} == set(outcomes)


def test_a_take_over_that_is_killed_at_any_line_leaves_all(keeper: HeldFiles) -> None:
    serving(keeper).mark_clean()
    moments = set()
    with at_every_line(OF_A_START, lambda: moments.add(keeper.content())):
        state = started(keeper)
        assert_taken_over(state)
        state.arrays.zeros("calls of another size", (9000,), np.int64)
        state.ready()
        state.facts["num_blocks"] = 12
    assert len(moments) > 5
    for moment in moments:
        copy = HeldFiles.of(moment)
        assert_taken_over(started(copy))
        copy.close()


def test_after_five_take_overs_that_failed_it_is_given_up(keeper: HeldFiles) -> None:
    """Starts that fail for another reason do not count, and a take-over that succeeds begins the count again."""
    serving(keeper)
    for _ in range(MAX_ATTEMPTS + 2):
        state = started(keeper)
        assert state.taken
        state.end_attempt()
    for _ in range(MAX_ATTEMPTS + 2):
        started(keeper)
        state = started(keeper)
        assert_taken_over(state)
        state.ready()
    for _ in range(MAX_ATTEMPTS):
        assert started(keeper).taken
    assert_new(started(keeper), keeper, "the take-over failed 5 times")


def test_take_overs_that_were_killed_do_not_count(keeper: HeldFiles) -> None:
    """They were killed from outside. One that is not known to have been killed counts."""
    serving(keeper)
    for _ in range(3 * MAX_ATTEMPTS):
        assert KeptState.open(keeper.start(), IDENTITY, was_killed=True).taken
    for _ in range(MAX_ATTEMPTS - 1):
        assert started(keeper).taken
    assert not started(keeper).taken


def test_a_start_without_memory_does_not_count_either(keeper: HeldFiles) -> None:
    serving(keeper)
    failing = OSError(errno.ENOMEM, "no memory")
    for _ in range(2 * MAX_ATTEMPTS):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("kvservice.kept.state.KeptTable", Raising(failing))
            with pytest.raises(OSError, match="no memory"):
                started(keeper)
    assert_taken_over(started(keeper))


class Raising:
    """Raises an error when it is called."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object) -> None:
        raise self.error


def test_a_damaged_state_is_set_aside_until_the_next_one(keeper: HeldFiles) -> None:
    """Its bytes are there for whoever looks for the damage. One of another configuration is not damaged."""
    aside = ["arrays", "header", "index", "pool", "private", "table"]
    for damage in (b"first", b"other"):
        serving(keeper)
        os.pwrite(keeper.held[f"{PREFIX}table"], damage, 0)
        assert_new(started(keeper), keeper, "the table has another format")
        assert sorted(keeper.held) == [f"kvservice.damaged.{name}" for name in aside]
        assert os.pread(keeper.held["kvservice.damaged.table"], 5, 0) == damage
    for fd in keeper.held.values():
        os.close(fd)
    keeper.held.clear()
    serving(keeper)
    started(keeper, num_layers=3)
    assert not keeper.held


def test_another_identity_is_refused_naming_each_item(keeper: HeldFiles) -> None:
    serving(keeper, num_layers=8, extra=1)
    state = started(keeper, dtype="float32")
    assert_new(
        state, keeper, "num_layers was 8, is 4; dtype was bfloat16, is float32; extra was 1, is None"
    )  # fmt: skip
    state.ready()
    assert started(keeper, dtype="float32").taken


def test_the_end_in_order_is_seen_once(keeper: HeldFiles) -> None:
    serving(keeper).mark_clean()
    assert started(keeper).clean
    state = started(keeper)
    assert state.clean
    assert_taken_over(state)
    state.ready()
    assert not started(keeper).clean


def test_a_discarded_state_is_gone(keeper: HeldFiles) -> None:
    state = serving(keeper)
    keeper.store("kvservice.http", state.table.fd)
    state.discard()
    assert list(keeper.held) == ["kvservice.http"]
    assert_new(started(keeper), keeper)


# What is done to the files of a state, and why it is refused then. A header can be checked without a take-over.
BAD_HEADERS: dict[str, tuple[Callable[[int], object], str]] = {
    "cut": (lambda fd: os.truncate(fd, 100), "its header has another size"),
    "other magic": (lambda fd: os.pwrite(fd, b"x", 0), "its header is unknown"),
    "no JSON": (lambda fd: os.pwrite(fd, b"x", 4096), "its identity is unreadable"),
    "too long a text": (lambda fd: os.pwrite(fd, b"\xff" * 8, 48), "its identity is unreadable"),
    "no object": (lambda fd: os.pwrite(fd, b"[" + b" " * 10 + b"]", 4096), "its identity is unreadable"),
    "all ones": (lambda fd: os.pwrite(fd, b"\xff" * (64 << 10), 0), "its header is unknown"),
    "another version": (lambda fd: os.pwrite(fd, b"\2", 8), "its version is 2, this daemon's 1"),
}
BAD_FILES: dict[str, tuple[Callable[[HeldFiles], object], str]] = {
    "no table": (lambda keeper: keeper.remove(PREFIX + "table"), "its table is missing"),
    "no arrays": (lambda keeper: keeper.remove(PREFIX + "arrays"), "its arrays is missing"),
    "no private": (lambda keeper: keeper.remove(PREFIX + "private"), "its private is missing"),
    "no pool": (lambda keeper: keeper.remove(PREFIX + "pool"), "its pool is missing"),
    "another table": (
        lambda keeper: os.pwrite(keeper.held[PREFIX + "table"], b"\xff" * 4096, 0),
        "the table has another format",
    ),
}


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    with each_row() as row:
        for name, (spoil, reason) in BAD_HEADERS.items():
            with row(name), contextlib.closing(HeldFiles()) as keeper:
                serving(keeper)
                spoil(keeper.held[PREFIX + "header"])
                assert KeptState.check(keeper.start(), IDENTITY) == reason
                assert_new(started(keeper), keeper, reason)
        for name, (change, reason) in BAD_FILES.items():
            with row(name), contextlib.closing(HeldFiles()) as keeper:
                serving(keeper)
                change(keeper)
                assert_new(started(keeper), keeper, reason)
        with row("a list of files that is none"), contextlib.closing(HeldFiles()) as keeper:
            serving(keeper).table.section(Section.FILES)[0] = b"{}"
            assert_new(started(keeper), keeper, "its files are not listed")
        with row("a fault of the device"), contextlib.closing(HeldFiles()) as keeper:
            serving(keeper).mark_faulted()
            assert_new(started(keeper), keeper, "the device failed")


def test_a_memory_of_another_size_is_refused(keeper: HeldFiles) -> None:
    serving(keeper)
    with pytest.raises(KeptStateError, match="pool had"):
        started(keeper).memory("pool", 2 * NUM_BYTES, read_only=True)
    keeper.remove(PREFIX + "pool")
    other = os.memfd_create("other")
    keeper.store(PREFIX + "pool", other)
    os.close(other)
    assert_new(started(keeper), keeper, f"its pool has 0 bytes instead of {NUM_BYTES}")


def test_files_that_the_next_process_does_not_use_are_dropped(keeper: HeldFiles) -> None:
    serving(keeper)
    started(keeper).ready()
    assert PREFIX + "pool" not in keeper.held
    state = started(keeper)
    assert state.taken
    assert state.memory("pool", NUM_BYTES, read_only=True).map[:4] == bytes(4)


def test_memory_can_be_added_while_serving(keeper: HeldFiles) -> None:
    state = serving(keeper)
    state.memory("replies", NUM_BYTES, read_only=False).map[:2] = b"ok"
    state = started(keeper)
    assert_taken_over(state)
    assert state.memory("replies", NUM_BYTES, read_only=False).map[:2] == b"ok"


def test_a_file_that_was_not_recorded_any_more_is_dropped(keeper: HeldFiles) -> None:
    state = serving(keeper)
    keeper.store(PREFIX + "replies", state.table.fd)
    state = started(keeper)
    assert state.memory("replies", NUM_BYTES, read_only=False).map[:2] == bytes(2)
    assert PREFIX + "replies" not in keeper.held
    state.ready()
    assert PREFIX + "replies" in keeper.held


def test_descriptors_of_other_memory_are_kept(keeper: HeldFiles) -> None:
    state = serving(keeper)
    fd = os.memfd_create("gpu")
    os.write(fd, b"gpu")
    state.put_descriptor("gpu", fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    for _ in range(2):
        state = started(keeper)
        assert_taken_over(state)
        taken = state.descriptor("gpu")
        assert taken is not None
        assert os.pread(taken, 3, 0) == b"gpu"
        assert state.descriptor("gpu") is None
        os.close(taken)
        state.ready()


def test_a_check_changes_nothing(keeper: HeldFiles) -> None:
    assert KeptState.check(keeper.start(), IDENTITY) == "there is none"
    serving(keeper)
    keeper.calls.clear()
    for _ in range(MAX_ATTEMPTS + 1):
        assert KeptState.check(keeper.start(), IDENTITY) == ""
    assert KeptState.check(keeper.start(), IDENTITY | {"block_size": 32}) == "block_size was 16, is 32"
    assert not keeper.calls
    assert_taken_over(started(keeper))


def test_refused_files_are_free_before_new_ones_are_taken(keeper: HeldFiles) -> None:
    serving(keeper)
    keeper.calls.clear()
    state = started(keeper, block_size=32)
    assert keeper.calls[-1] == ("barrier", "")
    assert {call for call, _ in keeper.calls[:-1]} == {"remove"}
    state.ready()


def test_without_a_keeper_it_is_the_same_and_ends_with_the_process() -> None:
    state = KeptState.fresh()
    assert (state.taken, state.refused, state.clean) == (False, "", False)
    state.memory("pool", NUM_BYTES, read_only=True)
    state.arrays.kept("lengths", (5,), np.int64)
    state.put_descriptor("gpu", os.memfd_create("gpu"))
    state.facts["num_blocks"] = 1
    state.ready()
    state.mark_clean()
    state.discard()
    assert dict(state.facts) == {"num_blocks": 1}


def test_without_a_keeper_others_can_never_map_the_pool_for_writing() -> None:
    memory = KeptState.fresh().memory("pool", NUM_BYTES, read_only=True)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.shared_fd, NUM_BYTES)


def test_no_descriptor_is_left_open() -> None:
    with collected_garbage() as collect:
        before = num_open_files()
        keeper = HeldFiles()
        serving(keeper)
        serving(keeper, block_size=32)
        started(keeper, block_size=32).ready()
        keeper.close()
        collect()
        assert num_open_files() == before


def test_without_a_keeper_memory_is_free_when_its_user_is_done() -> None:
    def use() -> None:
        state = KeptState.fresh()
        state.memory("pool", NUM_BYTES, read_only=True).close()
        state.put_descriptor("gpu", os.memfd_create("gpu"))

    with collected_garbage() as collect:
        before = num_open_files()
        use()
        collect()
        assert num_open_files() == before


def test_facts_are_values_of_json(keeper: HeldFiles) -> None:
    state = serving(keeper)
    state.facts["scales"] = [1.5, 2]
    del state.facts["num_blocks"]
    with pytest.raises(KeyError):
        del state.facts["num_blocks"]
    with pytest.raises(TypeError):
        state.facts["object"] = object()
    assert dict(started(keeper).facts) == {"scales": [1.5, 2]}
