"""Schedulers outlive their clients' connections and processes, lost answers repeat nothing, and a daemon drains."""

from __future__ import annotations

import asyncio
import functools
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scheduling_client
from both_faces import Awaitable
from cutting_proxy import CuttingProxy
from small_pool import SMALL_POOL
from toy_engine import ToyEngine, content
from waiting import PATIENCE_S, until

from kvservice.client import BatchReport, KVClient, ScheduledRequest, Session
from kvservice.errors import DrainingError
from kvservice.launch import Daemon


def engine_of(kv: Session, **settings: Any) -> ToyEngine:
    return ToyEngine(Awaitable(kv), Awaitable(kv.open_scheduler(**settings)))


def test_a_schedule_whose_answer_was_lost_is_done_once(daemon: Daemon, client: KVClient, tmp_path: Path) -> None:
    """The call is sent again over a new stream, and gets the batch that was made the first time."""
    with (
        CuttingProxy(tmp_path, daemon.address) as proxy,
        KVClient(proxy.address, transport="inline") as far,
        far.session() as kv,
        ThreadPoolExecutor(1) as pool,
    ):
        engine = engine_of(kv)
        asyncio.run(engine.add(1, range(9), max_tokens=3))
        asyncio.run(engine.add(2, range(20, 25), max_tokens=3))
        batch = asyncio.run(engine.schedule())
        while batch.number:
            asyncio.run(engine.compute(batch))
            report, before = engine.sample(batch), client.stats()
            proxy.lose_replies()
            answer = pool.submit(asyncio.run, engine.schedule(report))
            until(functools.partial(lambda before: client.stats() != before, before))
            proxy.cut()
            batch = answer.result(PATIENCE_S)
        assert sorted(engine.finished) == [1, 2]
        assert [one.number for one in engine.batches] == [1, 2, 3, 0]
        engine.check_outputs()
        kv.reset_prefix_cache()


def test_a_killed_engine_is_followed_by_another_one(daemon: Daemon, client: KVClient) -> None:
    """The second engine knows from the daemon what was generated, and computes nothing of it again."""
    command = [sys.executable, scheduling_client.__file__, daemon.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        token = bytes.fromhex(process.stdout.readline())
        process.kill()

    async def scenario(kv: Session) -> None:
        engine = engine_of(kv, **scheduling_client.SETTINGS)
        for info in await engine.scheduler.describe(token_ids=True):
            (one,) = info.sequences
            prompt = list(scheduling_client.PROMPTS[info.request_id])
            assert one.token_ids[: len(prompt)] == tuple(prompt)
            assert one.num_generated == len(one.token_ids) - len(prompt)
            assert info.extra_keys == ((0, b"key %d" % info.request_id),)
            engine.prompts[info.request_id] = prompt
            engine.outputs[info.request_id] = list(one.token_ids[len(prompt) :])
            engine.firsts[info.request_id] = info.request_id
        assert [len(output) for output in engine.outputs.values()] == [1, 0, 0]
        batch = await engine.schedule(retry=True)
        assert batch.sequence_ids.tolist() == [1, 10, 20]
        assert batch.step.query_lens.tolist() == [1, 1, 14]
        await engine.run(batch)
        assert sorted(engine.finished) == [1, 10, 20]
        engine.check_outputs()

    with client.resume(token) as kv:
        asyncio.run(scenario(kv))
        kv.reset_prefix_cache()


def test_a_draining_daemon_finishes_a_step_and_makes_no_batch() -> None:
    with (
        Daemon(**SMALL_POOL | {"drain_stall_s": 60, "store_gib": 0}) as daemon,
        KVClient(daemon.address) as client,
        client.session() as kv,
    ):
        scheduler = kv.open_scheduler()
        engine = ToyEngine(Awaitable(kv), Awaitable(scheduler))
        asyncio.run(engine.add(1, range(9)))
        batch = asyncio.run(engine.schedule())
        asyncio.run(engine.compute(batch, num_layers=1))
        daemon.process.send_signal(signal.SIGTERM)

        def drains() -> bool:
            try:
                scheduler.add([ScheduledRequest(2, [1, 2], 3)])
            except DrainingError:
                return True
            scheduler.abort([2])
            return False

        until(drains)
        with pytest.raises(DrainingError):
            kv.open_scheduler()
        with pytest.raises(DrainingError):
            asyncio.run(engine.schedule(BatchReport(batch.number, [1])))
        assert [info.phase for info in asyncio.run(engine.scheduler.describe())] == ["prefilling"]
        assert daemon.process.poll() is None
        key = content(kv.info, list(range(9)))
        asyncio.run(batch.step.attend(1, key[1], key[1], -key[1]))
        assert daemon.process.wait(PATIENCE_S) == 0


def test_engines_share_the_pool_by_weight_beside_a_session_without_a_scheduler(client: KVClient) -> None:
    """Two engines have more requests than fit. The third session has blocks of its own, which nobody takes."""

    async def scenario(first: ToyEngine, second: ToyEngine, kv: Session) -> None:
        own = kv.allocate(range(9000, 9040))
        kv.open_step([own]).write(*2 * (np.ones((2, 40, 2, 32), np.float32),))
        for number in range(8):
            for engine, start in ((first, 0), (second, 2000)):
                await engine.add(number, range(start + 100 * number, start + 100 * number + 40), max_tokens=12)
        batches = {0: await first.schedule(), 1: await second.schedule()}
        held = []
        while any(batch.number for batch in batches.values()):
            for number, engine in enumerate((first, second)):
                batch = batches[number]
                if batch.number:
                    await engine.compute(batch)
                    await engine.check(batch)
                    batches[number] = await engine.schedule(engine.sample(batch))
                elif batch.waiting:
                    batches[number] = await engine.schedule()
            held.append([batch.running for batch in batches.values()])
            assert len(held) < 1000, "an engine starves"
        for engine in (first, second):
            assert sorted(engine.finished) == list(range(8))
            engine.check_outputs()
        both = [running for running in held if min(running)]
        assert sum(one for one, _ in both) > sum(other for _, other in both)
        key, _ = kv.read(own, 0, 40)
        np.testing.assert_array_equal(key, np.ones((2, 40, 2, 32), np.float32))

    with client.session() as one, client.session() as two, client.session() as three:
        asyncio.run(scenario(engine_of(one, weight=3.0), engine_of(two, weight=1.0), three))
        three.reset_prefix_cache()
