"""A daemon whose event loop is held by SIGUSR1 until it reads a byte. Its configuration is in its environment."""

from __future__ import annotations

import os
import signal

from kvservice.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: os.read(0, 1))
    main(["serve"])
