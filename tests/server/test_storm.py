"""A daemon that is killed and upgraded under load serves no wrong byte, loses what it reports, and leaks nothing.

The long run is `python -m storm --kills 300` in tests/support.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kv_model import POOL
from storm import run
from storm_sequences import SequenceStorm
from storm_store import StoreStorm

from kvservice.client import KVClient, Sequence
from kvservice.launch import Daemon


@pytest.mark.slow
@pytest.mark.third
def test_kills_under_load_of_all_transports() -> None:
    report = run(12, seed=20, num_at_start=1, num_upgrades=1, num_threads=1)
    assert report.failures == [], report.text()
    assert report.kills >= 12
    assert report.upgrades == 1
    counts = report.counts
    assert counts["comparisons"] >= 12, "every client has compared its sequences after the restarts"
    for name in ("bytes read", "cached tokens", "swap_in", "fork", "unpin", "store hits"):
        assert counts[name], name
    assert counts["lost"] <= report.kills, "a kill costs the sequences of one operation at most"


@pytest.fixture
def clean(daemon: Daemon) -> Iterator[KVClient]:
    with KVClient(daemon.address) as client:
        yield client
        with client.session() as kv:
            kv.reset_prefix_cache()


def test_the_storm_finds_wrong_bytes(clean: KVClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with clean.session() as kv:
        storm = SequenceStorm(kv, 1)
        storm.allocate()
        storm.compare()
        assert storm.failures == []
        read = kv.read

        def wrong(*arguments: object) -> tuple[np.ndarray, np.ndarray]:
            keys, values = read(*arguments)  # type: ignore[arg-type]
            values.flat[-1] += 1
            return keys, values

        monkeypatch.setattr(kv, "read", wrong)
        storm.compare()
        assert [failure.partition(" in layer")[0] for failure in storm.failures] == ["sequence 0 has wrong K/V"]


def test_the_storm_finds_changed_sequences(clean: KVClient) -> None:
    with clean.session() as kv:
        storm = SequenceStorm(kv, 2)
        for _ in range(3):
            storm.allocate()
        first, second, third = storm.live.values()
        kv.free([first.handle])
        kv.truncate(Sequence(second.handle.sequence_id, second.handle.length), 1)
        kv.swap_out([third.handle])
        storm.compare()
        assert [failure[:30] for failure in storm.failures] == [
            "sequence 0 is gone, and was no",
            "sequence 1 has 1 tokens, not i",
            "sequence 2 is in the wrong tie",
        ]
        storm.finish()


def test_the_storm_finds_wrong_blocks_of_the_store(clean: KVClient) -> None:
    storm = StoreStorm(clean, 3)
    out = np.zeros((2, 2048), np.uint8)
    storm.check("get", [4, 5], np.array([False, False]), out)
    assert storm.failures == []
    storm.check("get", [4, 5], np.array([False, True]), out)
    assert storm.failures == ["get: block 5 of the store has wrong bytes"]
    storm.store.clear()
    storm.finish()


def test_the_storm_runs_on_a_full_pool() -> None:
    with Daemon(**POOL) as daemon, KVClient(daemon.address) as client, client.session() as kv:
        storm = SequenceStorm(kv, 4)
        for _ in range(150):
            storm.run_one()
        storm.finish()
        assert storm.failures == []
        assert storm.counts["no room"]
