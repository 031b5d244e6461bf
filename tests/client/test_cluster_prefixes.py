"""What a router knows of a daemon's cache."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvservice.client.cluster import Placement, PlacementSettings


def known_prefixes(max_blocks: int) -> Any:
    """Return what a router knows of a daemon of which it knows nothing yet."""
    return Placement(["a"], lambda: 0.0, PlacementSettings(max_blocks=max_blocks)).prefixes("a")


def test_a_prefix_is_matched_up_to_the_first_block_that_is_missing() -> None:
    prefixes = known_prefixes(100)
    prefixes.store("abcd")
    assert prefixes.match("abcd") == (4, 4)
    assert prefixes.match("abxd") == (2, 2)
    assert prefixes.match("x") == prefixes.match("") == (0, 0)
    prefixes.remove("b")
    assert prefixes.match("abcd") == (1, 1)
    prefixes.clear()
    assert prefixes.match("abcd") == (0, 0)


def test_expected_blocks_become_cached_or_expire() -> None:
    prefixes = known_prefixes(100)
    prefixes.store("a")
    prefixes.expect("abcd", until=10.0, placement=1)
    assert (prefixes.match("abcd"), prefixes.num_expected) == ((1, 4), 3)
    prefixes.store("b")
    assert (prefixes.match("abcd"), prefixes.num_expected) == ((2, 4), 2)
    prefixes.expire(9.9)
    assert prefixes.num_expected == 2
    prefixes.expire(10.0)
    assert (prefixes.match("abcd"), prefixes.num_expected) == ((2, 2), 0)


def test_a_placement_that_ends_takes_back_what_it_alone_expects() -> None:
    prefixes = known_prefixes(100)
    prefixes.expect("ab", until=10.0, placement=1)
    prefixes.expect("ac", until=11.0, placement=2)
    prefixes.give_up("ab", 1)
    assert prefixes.match("ac") == (0, 2)
    assert prefixes.match("ab") == (0, 1)


def test_an_answer_of_the_daemon_corrects_what_is_known() -> None:
    prefixes = known_prefixes(100)
    prefixes.store("abcd")
    prefixes.learn("abcd", 2)
    assert prefixes.match("abcd") == (2, 2)
    prefixes.learn("abcd", 4)
    assert prefixes.match("abcd") == (4, 4)


def test_a_daemon_that_began_empty_is_known_by_one_answer() -> None:
    prefixes = known_prefixes(100)
    prefixes.store("abcd")
    prefixes.store("xy")
    prefixes.doubt()
    prefixes.store("mn")
    prefixes.learn("abcd", 0)
    assert [prefixes.match(chain).num_cached for chain in ("abcd", "xy", "mn")] == [0, 0, 2]


def test_after_lost_events_the_rest_stays_if_the_daemon_still_has_some() -> None:
    prefixes = known_prefixes(100)
    prefixes.store("abcd")
    prefixes.store("xy")
    prefixes.doubt()
    prefixes.learn("abcd", 1)
    assert [prefixes.match(chain).num_cached for chain in ("abcd", "xy")] == [1, 2]


def test_after_lost_events_more_may_be_cached_than_is_known() -> None:
    prefixes = known_prefixes(100)
    prefixes.store("ab")
    assert not prefixes.misses_some("abc")
    prefixes.doubt()
    assert prefixes.misses_some("abc")
    assert not prefixes.misses_some("ab")
    prefixes.clear()
    assert not prefixes.misses_some("abc")


def test_the_memory_is_bounded_and_used_prefixes_stay() -> None:
    prefixes = known_prefixes(4)
    prefixes.store("ab")
    prefixes.store("xy")
    prefixes.expect("ab", until=10.0, placement=1)  # uses them
    prefixes.store("mn")
    assert len(prefixes) == 4
    assert [prefixes.match(chain).num_cached for chain in ("ab", "xy", "mn")] == [2, 0, 2]
    prefixes.expect("123456", until=10.0, placement=2)
    assert prefixes.num_expected == 4


BLOCKS = st.lists(st.integers(0, 12), max_size=8, unique=True)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["store", "remove", "clear", "learn"]), BLOCKS, st.integers(0, 8)))


@given(OPERATIONS, BLOCKS)
def test_it_is_a_set_of_blocks(operations: list[tuple[str, list[int], int]], chain: list[int]) -> None:
    prefixes, model = known_prefixes(100), set[int]()
    for name, blocks, number in operations:
        if name == "store":
            prefixes.store(blocks)
            model.update(blocks)
        elif name == "remove":
            prefixes.remove(blocks)
            model.difference_update(blocks)
        elif name == "clear":
            prefixes.clear()
            model.clear()
        else:
            prefixes.learn(blocks, min(number, len(blocks)))
            claimed = next((n for n, block in enumerate(blocks) if block not in model), len(blocks))
            model.difference_update(blocks[number:claimed])
            model.update(blocks[:number])
        leading = next((n for n, block in enumerate(chain) if block not in model), len(chain))
        assert prefixes.match(chain) == (leading, leading)
        assert len(prefixes) == len(model)
