"""A daemon whose block manager is corrupted by SIGUSR1. Its configuration is in its environment."""

from __future__ import annotations

import signal
from typing import Any

from kvservice.blocks import BlockManager
from kvservice.cli import main


class Corruptible(BlockManager):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        signal.signal(signal.SIGUSR1, lambda *_: self.device.ref_count.__setitem__(0, 7))


if __name__ == "__main__":
    import kvservice.engine

    kvservice.engine.BlockManager = Corruptible  # type: ignore[attr-defined]
    main(["serve"])
