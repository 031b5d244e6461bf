"""Atomic updates of a token file: a reader sees the complete old file or the complete new one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvservice.auth.tokens import check_name, digest, load, new_token, parse
from kvservice.errors import InvalidArgumentError


def add(file: Path, name: str) -> str:
    """Create a token for a name and add its hash to the file. A missing file is created with mode 0600. Returns the
    token, which is not stored. Raises InvalidArgumentError if the name is taken or invalid, or if the file cannot be
    used."""
    check_name(name)
    with _locked(file) as path:
        text = load(path) if path.exists() else ""
        if any(identity.name == name for identity in parse(text, path)):
            raise InvalidArgumentError(f"{name} has a token already: remove that one first", field="name")
        token = new_token()
        if text and not text.endswith("\n"):
            text += "\n"
        _replace(path, f"{text}{name} {digest(token).hex()}\n")
        return token


def remove(file: Path, name: str) -> None:
    """Remove a name and its token. Raises InvalidArgumentError if the name is unknown."""
    with _locked(file) as path:
        text = load(path)
        if all(identity.name != name for identity in parse(text, path)):
            raise InvalidArgumentError(f"{name} has no token", field="name")
        _replace(path, "".join(line for line in text.splitlines(keepends=True) if line.split()[:1] != [name]))


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[Path]:
    """Lock the token file against other processes and yield its resolved path."""
    path = file.resolve()
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # The lock is on the directory, because the file itself is replaced.
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(directory)
    except OSError as error:
        raise InvalidArgumentError(f"{file}: {error.strerror or error}", field="file") from None


def _replace(path: Path, text: str) -> None:
    """Replace the text of the file. Owner and mode stay the same."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            if path.exists():
                old = path.stat()
                os.fchmod(descriptor, old.st_mode & 0o777)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, old.st_uid, old.st_gid)
            stream.write(text)
            stream.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
