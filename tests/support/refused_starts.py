"""Daemons whose configuration is refused."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from small_pool import SMALL_POOL
from waiting import PATIENCE_S


def refusals_to_serve(*options: dict[str, object]) -> list[str]:
    """Return the errors of daemons that must not start. They are tried side by side."""
    defaults: dict[str, object] = {"unix_socket": "", "tcp_address": "", "http_address": ""}
    command = [sys.executable, "-P", "-m", "kvservice", "serve"]
    errors = []
    with contextlib.ExitStack() as stack:
        tried = []
        for given in options:
            environ = {
                f"KVSERVICE_{name.upper()}": str(value) for name, value in (SMALL_POOL | defaults | given).items()
            }
            process = subprocess.Popen(command, env=os.environ | environ, stderr=subprocess.PIPE, text=True)
            tried.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in tried:
            errors.append(process.communicate(timeout=PATIENCE_S)[1])
            assert process.returncode == 1, errors
    return errors
