"""Entries that an operator may leave in a folder where the daemon expects its files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

ODD_ENTRIES = ("pipe", "directory", "socket", "link", "dangling link")


def make_odd_entry(path: Path, kind: str) -> Path:
    """Make an entry that is not a regular file. Returns the file that a link names, or would name."""
    target = path.parent.parent / "target"
    target.write_bytes(b"of somebody else")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "link":
        path.symlink_to(target)
    else:
        path.symlink_to("nothing")
    return target
