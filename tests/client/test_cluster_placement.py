"""The rule of placement, and when a daemon is asked again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.client.cluster import HashedPrompt, Load, Placement, PlacementSettings
from kvservice.client.cluster.core import FIRST_PAUSE_S, MAX_PAUSE_S, Availability

DAEMONS = ("a", "b", "c", "d")
BLOCK = 16


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt_of(*blocks: int, tokens: int | None = None) -> HashedPrompt:
    return HashedPrompt(len(blocks) * BLOCK if tokens is None else tokens, BLOCK, blocks)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def placement(clock: Clock) -> Placement:
    return Placement(DAEMONS, clock, PlacementSettings(queue_weight=1.0))


def best(placement: Placement, prompt: HashedPrompt) -> str:
    return placement.rank(prompt, DAEMONS)[0].daemon


def test_a_prompt_goes_where_its_prefix_is(placement: Placement) -> None:
    placement.prefixes("c").store([1, 2, 3])
    placement.prefixes("b").store([1, 2])
    ranked = placement.rank(prompt_of(1, 2, 3, 4), DAEMONS)
    assert [(one.daemon, one.cost, one.num_cached_tokens) for one in ranked[:2]] == [("c", 16, 48), ("b", 32, 32)]


def test_a_queue_longer_than_the_prefix_sends_it_elsewhere(placement: Placement) -> None:
    placement.prefixes("c").store([1, 2])
    for number in range(4):
        assert (best(placement, prompt_of(1, 2, 3)) == "c") == (number <= 2), number
        placement.place(prompt_of(100 + number), "c")


def test_prompts_with_one_new_prefix_follow_each_other_before_any_event(placement: Placement) -> None:
    first = best(placement, prompt_of(*range(20)))
    placement.place(prompt_of(*range(20)), first)
    candidate = placement.rank(prompt_of(*range(20), 99), DAEMONS)[0]
    assert (candidate.daemon, candidate.num_cached_tokens, candidate.num_expected_tokens) == (first, 0, 20 * BLOCK)
    placement.prefixes(first).store(range(20))
    assert best(placement, prompt_of(*range(20), 99)) == first


def test_what_is_not_computed_in_time_is_no_queue(placement: Placement, clock: Clock) -> None:
    placement.prefixes("c").store([1, 2])
    placement.place(prompt_of(*range(100, 200)), "c")
    assert best(placement, prompt_of(1, 2, 3)) != "c"
    clock.now = PlacementSettings().expected_s
    assert best(placement, prompt_of(1, 2, 3)) == "c"


def test_a_session_that_ends_is_no_queue(placement: Placement) -> None:
    placed = placement.place(prompt_of(*range(100)), "a")
    assert placement.sessions("a") == 1
    placement.end(placed)
    assert placement.sessions("a") == 0
    assert [one.cost for one in placement.rank(prompt_of(7), ("a", "b"))] == [BLOCK, BLOCK]


def test_a_full_pool_costs_twice_an_empty_one(placement: Placement) -> None:
    for daemon, used in zip(DAEMONS, (100, 50, 10, 0), strict=True):
        placement.report(daemon, Load(100, used))
    assert [one.cost for one in placement.rank(prompt_of(1), ("a", "d"))] == [BLOCK, 2 * BLOCK]
    assert best(placement, prompt_of(1)) == "d"


def test_new_prefixes_spread_and_routers_agree(clock: Clock) -> None:
    chosen = [best(Placement(DAEMONS, clock), prompt_of(number, number + 1)) for number in range(200)]
    assert chosen == [best(Placement(reversed(DAEMONS), clock), prompt_of(n, n + 1)) for n in range(200)]
    assert min(Counter(chosen).values()) > 20


def test_a_prompt_without_a_full_block_goes_to_the_least_loaded(placement: Placement) -> None:
    for daemon in "abd":
        placement.place(prompt_of(tokens=3), daemon)
    assert best(placement, prompt_of(tokens=3)) == "c"


KEYS = st.lists(st.integers(0, 1 << 60), min_size=1, max_size=40, unique=True)


@given(KEYS, st.sampled_from(DAEMONS))
def test_without_one_daemon_only_its_prefixes_move(blocks: list[int], gone: str) -> None:
    placement = Placement(DAEMONS, Clock())
    left = [daemon for daemon in DAEMONS if daemon != gone]
    for block in blocks:
        before = best(placement, prompt_of(block))
        assert before == gone or placement.rank(prompt_of(block), left)[0].daemon == before


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Placement, list[str]]:
    """A placement with random caches, queues and loads, and some of its daemons."""
    made = Placement(DAEMONS, Clock())
    for daemon in DAEMONS:
        made.prefixes(daemon).store(draw(st.lists(st.integers(0, 9))))
        for placed in draw(st.lists(st.lists(st.integers(0, 19), unique=True), max_size=3)):
            made.place(prompt_of(*placed), daemon)
        made.report(daemon, Load(100, draw(st.integers(0, 100))))
    return made, draw(st.lists(st.sampled_from(DAEMONS), min_size=1, unique=True))


@given(clusters(), st.lists(st.integers(0, 9), unique=True), st.integers(0, 15))
def test_the_first_has_the_least_cost_and_each_is_named_once(
    cluster: tuple[Placement, list[str]], blocks: list[int], rest: int
) -> None:
    placement, among = cluster
    prompt = prompt_of(*blocks, tokens=len(blocks) * BLOCK + rest)
    ranked = placement.rank(prompt, among)
    assert sorted(one.daemon for one in ranked) == sorted(among)
    assert [one.cost for one in ranked] == sorted(one.cost for one in ranked)
    for one in ranked:
        assert 0 <= one.num_cached_tokens <= one.num_expected_tokens <= prompt.num_tokens
        assert one.cost >= max(1, prompt.num_tokens - one.num_expected_tokens)
    assert placement.rank(prompt, among) == ranked


@given(clusters(), st.lists(st.integers(0, 9), min_size=1, unique=True))
def test_more_cached_blocks_never_cost_more(cluster: tuple[Placement, list[str]], blocks: list[int]) -> None:
    placement, _ = cluster
    prompt = prompt_of(*blocks)
    before = {one.daemon: one.cost for one in placement.rank(prompt, DAEMONS)}
    placement.prefixes("a").store(blocks)
    after = {one.daemon: one.cost for one in placement.rank(prompt, DAEMONS)}
    assert after["a"] <= before["a"]
    assert {**after, "a": 0} == {**before, "a": 0}


# ---- availability


def test_pauses_double_up_to_a_limit_and_begin_anew(clock: Clock) -> None:
    availability = Availability(clock, lambda: 0.0)
    assert not availability.is_up
    assert availability.pause_s == 0
    pauses = []
    for number in range(12):
        availability.fail(f"failure {number}")
        pauses.append(availability.pause_s)
        clock.now += availability.pause_s
    assert pauses[:4] == pytest.approx([FIRST_PAUSE_S, 0.2, 0.4, 0.8])
    assert pauses[-1] == MAX_PAUSE_S
    assert availability.reason == "failure 11"
    availability.succeed(1.0)
    assert availability.is_up
    assert (availability.reason, availability.pause_s) == ("", 1.0)
    availability.fail("again")
    assert not availability.is_up
    assert availability.pause_s == pytest.approx(FIRST_PAUSE_S)


def test_pauses_are_shortened_at_random_by_up_to_half(clock: Clock) -> None:
    availability = Availability(clock, lambda: 0.999)
    availability.fail("")
    assert availability.pause_s == pytest.approx(FIRST_PAUSE_S / 2, rel=0.01)
