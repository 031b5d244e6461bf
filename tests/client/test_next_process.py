"""A session opens its memory again when another process has taken it over; after an upgrade, its steps go on.

The daemon of these tests stays the same; the client is told that it was another process that attached the session.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cutting_proxy import CuttingProxy
from each_row import each_row
from waiting import until

from kvservice.client import KVClient, Session, Step
from kvservice.client.threads import finish
from kvservice.errors import ConnectionLostError, RegionsNotAllowedError, StaleStepError
from kvservice.launch import Daemon
from kvservice.v1 import host_pb2, regions_pb2

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 32
PROMPT = list(range(900, 911))
SHAPES = ((len(PROMPT), 4, HEAD_SIZE), (len(PROMPT), KV_HEADS, HEAD_SIZE), (len(PROMPT), KV_HEADS, HEAD_SIZE))


@pytest.fixture(params=["inline", "region", "lane", "mapped"])
def kv(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Session]:
    with KVClient(daemon.address, transport=request.param) as client, client.session() as session:
        assert session.transport == request.param
        session.reset_prefix_cache()
        yield session


def taken_over(kv: Session) -> None:
    """Close what the daemon shares with a session, and tell the client that it is another process."""
    connection = kv._core.context.connection
    for name, request in (
        ("close_lane", host_pb2.CloseLaneRequest()),
        ("unmap_pool", host_pb2.UnmapPoolRequest()),
        ("unregister_region", regions_pb2.UnregisterRegionRequest()),
    ):
        with contextlib.suppress(RegionsNotAllowedError):  # the session has shown no user
            finish(connection.call(name, request))
    connection.num_restarts += 1


def tensors(layer: int) -> list[np.ndarray]:
    rng = np.random.default_rng(layer)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def expected(daemon: Daemon) -> list[np.ndarray]:
    with KVClient(daemon.address, transport="inline") as client, client.session() as plain:
        step = plain.open_step([plain.allocate([token + 2000 for token in PROMPT])])
        return [step.extend(layer, *tensors(layer)) for layer in range(LAYERS)]


def check_contents(kv: Session, step: Step) -> None:
    (sequence,) = step.sequences
    assert [one.num_computed_tokens for one in kv.describe()] == [len(PROMPT)]
    keys, values = kv.read(sequence, 0, len(PROMPT))
    for layer in range(LAYERS):
        np.testing.assert_array_equal(keys[layer], tensors(layer)[1])
        np.testing.assert_array_equal(values[layer], tensors(layer)[2])


def test_a_step_goes_on_with_the_next_process(kv: Session, daemon: Daemon) -> None:
    """`before`: how many layers are written when the process changes."""
    outputs = expected(daemon)
    with each_row() as row:
        for before in (0, 1):
            for attends in (True, False):
                step = kv.open_step([kv.allocate(PROMPT)])
                with row(f"before layer {before}, attends: {attends}"):
                    for layer in range(LAYERS):
                        query, key, value = tensors(layer)
                        if layer == before:
                            taken_over(kv)
                        if attends:
                            output = step.extend(layer, query, key, value)
                            np.testing.assert_allclose(output, outputs[layer], rtol=1e-4, atol=1e-5)
                        else:
                            step.write(key, value, layer)
                    check_contents(kv, step)
                kv.free(step.sequences)
                kv.reset_prefix_cache()


def test_a_step_after_the_change_is_written_as_before(kv: Session, daemon: Daemon) -> None:
    outputs = expected(daemon)
    first = kv.allocate(PROMPT[:3])
    kv.open_step([first]).extend(0, *(tensor[:3] for tensor in tensors(0)))
    transport = kv._core.calls.transport
    taken_over(kv)
    kv.free([first])
    for _ in range(2):
        sequence = kv.allocate(PROMPT)
        step = kv.open_step([sequence])
        for layer in range(LAYERS):
            np.testing.assert_allclose(step.extend(layer, *tensors(layer)), outputs[layer], rtol=1e-4, atol=1e-5)
        check_contents(kv, step)
        kv.free([sequence])
        kv.reset_prefix_cache()
    assert kv._core.calls.transport is transport


def test_a_region_that_was_made_before_is_memory_like_any_other(daemon: Daemon) -> None:
    with KVClient(daemon.address, transport="region") as client, client.session() as kv:
        kv.reset_prefix_cache()
        region = kv.create_region(1 << 20)
        out = region.array(SHAPES[0], "float32")
        taken_over(kv)
        step = kv.open_step([kv.allocate(PROMPT)])
        for layer, output in enumerate(expected(daemon)):
            assert step.extend(layer, *tensors(layer), out=out) is out
            np.testing.assert_allclose(out, output, rtol=1e-4, atol=1e-5)
        again = kv.create_region(1 << 20)
        assert again.name in {one.name for one in kv.regions()}


def test_tables_of_an_earlier_process_are_refused(daemon: Daemon) -> None:
    """Nobody keeps them current any more."""
    with KVClient(daemon.address, transport="inline") as client, client.session() as kv:
        mapped = kv.map_pool(writable=True)
        step = kv.open_step([kv.allocate(PROMPT)])
        tables = mapped.step(step)
        tables.check()
        taken_over(kv)
        for use in (tables.check, lambda: mapped.step(step)):
            with pytest.raises(StaleStepError):
                use()
        (sequence,) = step.sequences
        next_step = kv.open_step([sequence])
        with pytest.raises(StaleStepError, match="earlier process"):
            mapped.step(next_step)
        mapped = kv.map_pool(writable=True)
        mapped.step(kv.open_step([sequence])).check()


def test_tables_are_not_trusted_without_a_connection(tmp_path: Path, daemon: Daemon) -> None:
    with (
        CuttingProxy(tmp_path, daemon.address, handover=True) as proxy,
        KVClient(proxy.address, transport="inline", reconnect_wait_s=60) as client,
        client.session(detachable=True) as kv,
    ):
        mapped = kv.map_pool(writable=True)
        tables = mapped.step(kv.open_step([kv.allocate(PROMPT)]))
        tables.check()
        proxy.cut(stay_down=True)
        refusals = (ConnectionLostError, StaleStepError)  # the daemon may end the mapping meanwhile

        def is_refused() -> bool:
            try:
                tables.check()
            except refusals:
                return True
            return False

        until(is_refused)
        proxy.up()
        assert len(kv.describe()) == 1


def test_a_session_is_resumed_while_the_daemon_is_away(tmp_path: Path, daemon: Daemon) -> None:
    with CuttingProxy(tmp_path, daemon.address) as proxy, KVClient(proxy.address, reconnect_wait_s=60) as client:
        token = client.session(detachable=True).detach()
        proxy.cut(stay_down=True)
        up = threading.Timer(0.3, proxy.up)
        up.start()
        with client.resume(token) as kv:
            assert kv.describe() == []
        up.join()
