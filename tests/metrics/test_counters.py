"""Counters never decrease while sessions come and go, and they agree with the clients."""

from __future__ import annotations

import random
import threading
from collections import Counter

import numpy as np
import pytest
from scraping import POOL, Samples, by_label, counters, scrape, value

from kvservice.client import KVClient, Sequence, Session
from kvservice.errors import OutOfBlocksError
from kvservice.launch import Daemon

TENANTS = ("", "acme", "beta", "gamma", "other")
MAX_LABELS = 3


class Traffic:
    """Sessions open, work and close at random. `told` are the counts as the clients know them."""

    def __init__(self, client: KVClient, seed: int) -> None:
        self._client = client
        self._random = random.Random(seed)
        self._open: list[tuple[Session, str, list[Sequence]]] = []
        self.told: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()

    def step(self) -> None:
        work = self._random.choice((self._come, self._go, self._compute, self._compute, self._compute, self._swap))
        work()

    def _come(self) -> None:
        if len(self._open) < 6:
            tenant = self._random.choice(TENANTS)
            name = f"{self._random.randrange(8)}"
            self._open.append((self._client.session(name, tenant=tenant), tenant, []))
            self.told["sessions_opened"] += 1

    def _go(self) -> None:
        if self._open:
            session, _, _ = self._open.pop(self._random.randrange(len(self._open)))
            session.close()
            self.told["sessions_closed"] += 1

    def _compute(self) -> None:
        if not self._open:
            return
        session, tenant, sequences = self._random.choice(self._open)
        try:
            sequence = session.allocate([self._random.randrange(2)] * self._random.randrange(1, 12))
        except OutOfBlocksError:
            self.told["out_of_blocks"] += 1
            if sequences:
                session.free([sequences.pop()])
            return
        sequences.append(sequence)
        step = session.open_step([sequence])
        step.write(*(np.zeros((2, step.num_tokens, 1, 32), np.float32),) * 2)
        self.computed[tenant] += step.num_tokens

    def _swap(self) -> None:
        if not self._open:
            return
        session, _, sequences = self._random.choice(self._open)
        if sequences:
            try:
                session.swap_out([sequences[-1]])
            except OutOfBlocksError:
                self.told["out_of_blocks"] += 1
                return
            self.told["swapped_sequences"] += 1
            session.free([sequences.pop()])

    def end(self) -> None:
        while self._open:
            self._go()


@pytest.mark.parametrize(
    ("least_steps", "least_scrapes"), [(150, 5), pytest.param(600, 20, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_counters_never_go_back_while_sessions_come_and_go(
    free_port: int, least_steps: int, least_scrapes: int
) -> None:
    options = POOL | {"num_blocks": 16, "http_address": f"127.0.0.1:{free_port}", "max_labels": MAX_LABELS}
    with Daemon(**options) as daemon, KVClient(daemon.address, transport="inline") as client:
        scrapes: list[Samples] = []
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                scrapes.append(counters(scrape(free_port)))

        looking = threading.Thread(target=look)
        looking.start()
        traffic = Traffic(client, seed=20)
        try:
            steps = 0
            while looking.is_alive() and (steps < least_steps or len(scrapes) < least_scrapes):
                traffic.step()
                steps += 1
            traffic.end()
        finally:
            done.set()
            looking.join(30)
        assert len(scrapes) >= least_scrapes
        last = scrape(free_port)
        for before, after in zip(scrapes, [*scrapes[1:], counters(last)], strict=True):
            assert {
                key: (found, after.get(key)) for key, found in before.items() if not after.get(key, -1) >= found
            } == {}
        assert_told(last, traffic)


def assert_told(samples: Samples, traffic: Traffic) -> None:
    told = traffic.told
    assert min(told[name] for name in ("sessions_closed", "out_of_blocks", "swapped_sequences")) > 0
    assert value(samples, "kvservice_sessions_opened_total") == told["sessions_opened"]
    assert by_label(samples, "kvservice_sessions_closed_total", "reason") == {
        "closed": told["sessions_closed"],
        "lost": 0,
    }
    assert value(samples, "kvservice_out_of_blocks_total") == told["out_of_blocks"]
    assert value(samples, "kvservice_swapped_sequences_total", direction="out") == told["swapped_sequences"]
    assert value(samples, "kvservice_computed_tokens_total") == traffic.computed.total()
    computed = by_label(samples, "kvservice_tenant_computed_tokens_total", "tenant")
    assert sum(computed.values()) == traffic.computed.total()
    alone = {tenant: tokens for tenant, tokens in computed.items() if tenant != "other"}
    assert len(alone) == MAX_LABELS
    assert alone == {tenant: traffic.computed[tenant] for tenant in alone}
