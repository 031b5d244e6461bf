"""Folders whose content the daemon trusts: it writes to the files that it finds there, and clients get their bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Create a folder that only the daemon's user can change, or check one that is there.

    Raises OSError for a link, for the folder of another user, and for one that others can write to: they could have
    put links or forged files there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no directory", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}, not to the daemon's", str(path))
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "other users can write to it", str(path))
    return path
