"""A daemon with a store of 8 slabs, 2 of which are there: the host seems to have no more memory until it gets SIGUSR1.
Its configuration is in its environment."""

from __future__ import annotations

import signal

from kvservice.cli import main

SLAB_BYTES = (4 << 20) + 4096

if __name__ == "__main__":
    import kvservice.server.tiering.store as module

    constants = {"WHOLE_BYTES": 1 << 20, "FIRST_BYTES": 2 * SLAB_BYTES, "ROUND_BYTES": SLAB_BYTES, "AGAIN_S": 0.05}
    vars(module).update(constants, available_bytes=lambda: 0)
    signal.signal(signal.SIGUSR1, lambda *_: vars(module).update(available_bytes=lambda: 1 << 40))
    main(["serve"])
