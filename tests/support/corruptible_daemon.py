"""A daemon whose block manager is corrupted by SIGUSR1. Its argument is its configuration as a JSON object."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from kvservice import logs
from kvservice.config import ServeConfig
from kvservice.kept import KeptFiles
from kvservice.server.daemon import KVServer


async def serve(config: ServeConfig) -> int:
    daemon = KVServer(config, KeptFiles({}, None))
    ref_count = daemon.engine.manager.state.device.ref_count
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, ref_count.__setitem__, 0, 7)
    return await daemon.serve()


if __name__ == "__main__":
    logs.configure("warning", "text")
    sys.exit(asyncio.run(serve(ServeConfig(**json.loads(sys.argv[1])))))
