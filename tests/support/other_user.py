"""Runs code as another user. Imports run as root, because the other user may not read the test environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BEGIN = """
import json, os, socket, sys
sys.path.insert(0, {support!r})
import numpy as np
import kvservice.client
from kvservice.client import KVClient
from kvservice.errors import KVServiceError
import fd_socket, raw_wire
os.setgroups({groups!r})
os.setgid({uid})
os.setuid({uid})
"""


def run_as(uid: int, code: str, *arguments: str, groups: tuple[int, ...] = ()) -> str:
    """Return the output of the code. Its arguments are in sys.argv[1:]."""
    with as_user(uid, code, *arguments, groups=groups) as process:
        printed, failure = process.communicate(timeout=120)
        assert process.returncode == 0, failure
        return printed


@contextmanager
def as_user(uid: int, code: str, *arguments: str, groups: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Return the running process, with pipes."""
    begin = _BEGIN.format(support=str(Path(__file__).parent), uid=uid, groups=list(groups))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", begin + code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
