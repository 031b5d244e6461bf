"""A detachable session whose stream is broken for longer than the grace period, so that it loses its shared memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from cutting_proxy import CuttingProxy
from each_row import each_row
from small_pool import SMALL_POOL

from kvservice.client import KVClient, Session
from kvservice.launch import Daemon

GRACE_S = 0.2
PROMPT = list(range(900, 960))
# Where the tensors of calls lie, and which calls come after the outage.
KINDS = ("anywhere", "in a region", "written")
Walk = Generator[None, None, list[np.ndarray]]


def inputs(num_tokens: int) -> list[np.ndarray]:
    random = np.random.default_rng(num_tokens)
    return [random.standard_normal((num_tokens, heads, 32), np.float32) for heads in (4, 2, 2)]


def walk(kv: Session, kind: str, name: str) -> Walk:
    """Prefill in two halves, between which the walk yields, then decode. Returns outputs, and K/V of all tokens."""
    memory, used = kv.create_region(1 << 20), 0

    def place(array: np.ndarray) -> np.ndarray:
        nonlocal used
        if kind != "in a region":
            return array
        inside = memory.array(array.shape, "float32", used)
        inside[...] = array
        used += -(-array.nbytes // 64) * 64
        return inside

    sequence = kv.allocate(PROMPT, extra_keys=[(0, f"{kind} {name}".encode())])
    results = []
    for number, count in enumerate((30, 30)):
        if number == 1:
            yield
        step = kv.open_step([sequence], count)
        for layer in range(2):
            arrays = [place(array) for array in inputs(count)]
            if number == 1 and kind == "written":
                _, key, value = arrays
                step.write(key, value, layer)
            else:
                results.append(step.extend(layer, *arrays, out=place(np.zeros_like(arrays[0]))).copy())
    step = kv.append([sequence], [7])
    for layer in range(2):
        results.append(step.decode(layer, *inputs(1)))
    results += kv.read(sequence, 0, sequence.length)
    # Memory from before the outage is still valid for the caller, and new regions are shared.
    memory.array(4)[...] = 1
    assert kv.create_region(4096).number is not None
    kv.free([sequence])
    return results


def end(walked: Walk) -> list[np.ndarray]:
    with pytest.raises(StopIteration) as ended:
        next(walked)
    results: list[np.ndarray] = ended.value.value
    return results


@pytest.mark.parametrize(
    ("share_pool", "transports"), [("write", ("inline", "region", "lane", "mapped")), ("read", ("mapped",))]
)
def test_it_goes_on(tmp_path: Path, share_pool: str, transports: tuple[str, ...]) -> None:
    options = SMALL_POOL | {"num_blocks": 512, "share_pool": share_pool, "session_grace_s": GRACE_S}
    expected = {}
    with Daemon(**options) as daemon, contextlib.ExitStack() as opened:
        for kind in KINDS:
            with KVClient(daemon.address, transport="inline") as client, client.session() as kv:
                plain = walk(kv, kind, "expected")
                next(plain)
                expected[kind] = end(plain)
        proxy = opened.enter_context(CuttingProxy(tmp_path, daemon.address, handover=True))
        walks: dict[tuple[str, str], tuple[Session, Walk]] = {}
        for transport in transports:
            client = opened.enter_context(KVClient(proxy.address, transport=transport, reconnect_wait_s=60))
            for kind in KINDS:
                kv = opened.enter_context(client.session(detachable=True))
                walks[transport, kind] = kv, walk(kv, kind, transport)
                next(walks[transport, kind][1])
        proxy.cut(stay_down=True)
        time.sleep(2 * GRACE_S + 0.5)  # the daemon has released the shared memory by then
        proxy.up()
        with each_row() as row:
            for (transport, kind), (kv, walked) in walks.items():
                with row(f"{transport}, {kind}"):
                    for found, wanted in zip(end(walked), expected[kind], strict=True):
                        np.testing.assert_array_equal(found, wanted)
                    assert kv.transport == transport
