"""An engine that is killed in the middle of a step: `scheduling_client.py ADDRESS`. It prints its session's token."""

from __future__ import annotations

import asyncio
import sys
import time

from both_faces import Awaitable
from toy_engine import ToyEngine

from kvservice.client import KVClient

SETTINGS = {"max_step_tokens": 16, "max_running": 4}
PROMPTS = {1: range(5), 10: range(50, 62), 20: range(100, 140)}
MAX_TOKENS = 6


async def work(engine: ToyEngine) -> None:
    """Compute a step, and the first layer of the next one."""
    for request_id, prompt in PROMPTS.items():
        await engine.add(request_id, prompt, MAX_TOKENS, extra_keys=[(0, b"key %d" % request_id)])
    batch = await engine.schedule()
    await engine.compute(batch)
    await engine.compute(await engine.schedule(engine.sample(batch)), num_layers=1)


def main(address: str) -> None:
    with KVClient(address) as client, client.session(detachable=True) as kv:
        session = Awaitable(kv)
        asyncio.run(work(ToyEngine(session, Awaitable(kv.open_scheduler(**SETTINGS)))))  # type: ignore[arg-type]
        print(kv.token.hex(), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
