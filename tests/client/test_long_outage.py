"""A detachable session whose stream is broken for longer than the grace period, so that it loses its shared memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cutting_proxy import CuttingProxy
from small_daemons import TRANSPORTS, OpenDaemon
from small_pool import SMALL_POOL

from kvservice.client import KVClient, Session

PROMPT = list(range(900, 960))


def inputs(num_tokens: int) -> list[np.ndarray]:
    random = np.random.default_rng(num_tokens)
    return [random.standard_normal((num_tokens, heads, 32), np.float32) for heads in (4, 2, 2)]


def break_line(proxy: CuttingProxy) -> None:
    proxy.cut(stay_down=True)
    time.sleep(2 * SMALL_POOL["session_grace_s"] + 0.5)  # the daemon has released the shared memory by then
    proxy.up()


def walk(kv: Session, proxy: CuttingProxy | None, place: Any = lambda array: array) -> list[np.ndarray]:
    """Prefill in two halves, then decode. With a proxy, the connection breaks between the halves."""
    sequence = kv.allocate(PROMPT)
    results = []
    for number, count in enumerate((30, 30)):
        if proxy is not None and number == 1:
            break_line(proxy)
        step = kv.open_step([sequence], count)
        for layer in range(2):
            arrays = [place(array) for array in inputs(count)]
            results.append(step.extend(layer, *arrays, out=place(np.zeros_like(arrays[0]))).copy())
    step = kv.append([sequence], [7])
    for layer in range(2):
        results.append(step.decode(layer, *inputs(1)))
    kv.free([sequence])
    kv.reset_prefix_cache()
    return results


@pytest.mark.parametrize("in_region", [False, True])
@pytest.mark.parametrize("name", ["inline", *TRANSPORTS])
def test_it_goes_on(open_daemon: OpenDaemon, tmp_path: Path, name: str, in_region: bool) -> None:
    transport, share_pool = TRANSPORTS.get(name, ("inline", "write"))
    daemon = open_daemon("float32", share_pool)
    with KVClient(daemon.address, transport="inline") as client, client.session() as kv:
        expected = walk(kv, None)
    with (
        CuttingProxy(tmp_path, daemon.address, handover=True) as proxy,
        KVClient(proxy.address, transport=transport, reconnect_wait_s=60) as client,
        client.session(detachable=True) as kv,
    ):
        memory = kv.create_region(1 << 20)
        lane = getattr(kv._core.calls.transport, "_lane", None)
        used = 0

        def place(array: np.ndarray) -> np.ndarray:
            nonlocal used
            inside = memory.array(array.shape, "float32", used)
            inside[...] = array
            used += -(-array.nbytes // 64) * 64
            return inside

        found = walk(kv, proxy, place) if in_region else walk(kv, proxy)
        assert kv.transport == transport
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        # Memory from before the outage is still valid for the caller, and new regions are shared.
        memory.array(4)[...] = 1
        assert kv.create_region(4096).number is not None
        assert lane is None or getattr(kv._core.calls.transport, "_lane", None) is not lane
