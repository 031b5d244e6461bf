"""Bearer tokens, and the token file that lists their hashes.

Each line of the file is a name and the SHA-256 of its token in hexadecimal. Empty lines and lines that begin with # are
ignored. A token has 256 random bits, so a plain hash cannot be inverted and the duration of a lookup reveals nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvservice.auth.reloading import open_regular
from kvservice.errors import InvalidArgumentError, UnauthenticatedError

# ---- identity of the caller of an RPC


@dataclass(frozen=True)
class Identity:
    """A caller that the daemon knows. Two identities are equal if their names are equal.

    `credential` is the SHA-256 of the token that the caller presented; b"" if it presented none.
    """

    name: str
    credential: bytes = field(default=b"", compare=False, repr=False)


# The identity of a caller on the unix socket, or over TCP if the daemon requires no authentication.
UNNAMED: Final = Identity("")

# The caller of the current RPC. gRPC runs each RPC in a separate task, so each RPC has its own value.
CALLER: Final[ContextVar[Identity]] = ContextVar("kvservice_caller", default=UNNAMED)


# ---- tokens


_PREFIX: Final = "kvs_"
_TOKEN: Final = re.compile(r"kvs_[A-Za-z0-9_-]{43}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES: Final = 1 << 20
_FIELD: Final = "auth_tokens"

MISSING, MALFORMED, UNKNOWN = CAUSES = ("missing", "malformed", "unknown")


class Tokens:
    """The identities of a token file."""

    def __init__(self, identities: Mapping[bytes, Identity]) -> None:
        """`identities` maps the SHA-256 of each token to its identity."""
        self._identities = identities

    @classmethod
    def read(cls, file: Path) -> Tokens:
        """Read a token file. Raises InvalidArgumentError that names the file, and the line if one line is invalid."""
        text = load(file, owners=(0, os.geteuid()))
        return cls({identity.credential: identity for identity in parse(text, file)})

    def __len__(self) -> int:
        return len(self._identities)

    def identify(self, token: str | None) -> Identity:
        """Return the identity of a token. Raises UnauthenticatedError with one of CAUSES in `metadata`."""
        if token is None:
            raise UnauthenticatedError(
                "the daemon requires a token and the call has none: "
                "pass token= to the client, or KVSERVICE_TOKEN or --token-file to a command",
                cause=MISSING,
            )
        # The pattern bounds the length before the hash is computed.
        if not _TOKEN.fullmatch(token):
            raise UnauthenticatedError(
                f"the token is malformed, or it was cut short: a token is {_PREFIX} and 43 characters",
                cause=MALFORMED,
            )
        identity = self._identities.get(digest(token))
        if identity is None:
            raise UnauthenticatedError(
                "the daemon does not know the token: it was removed, replaced, or made for another daemon",
                cause=UNKNOWN,
            )
        return identity

    def has(self, identity: Identity) -> bool:
        """Return whether the token that the identity presented is still in the file."""
        return identity.credential in self._identities


def new_token() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def check_name(name: str) -> None:
    """Raise InvalidArgumentError if `name` is not a valid identity name."""
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError("must be 1 to 64 letters, digits, and . _ @ - after the first", field="name")


def load(file: Path, owners: Collection[int] = ()) -> str:
    """Return the text of a token file. `owners` are the user ids that may own the file; empty means any user.

    Raises InvalidArgumentError if the file cannot be read, belongs to another user, or is writable by users other than
    its owner.
    """
    try:
        with open_regular(file) as stream:
            _check_owner_and_mode(os.fstat(stream.fileno()), owners, file)
            data = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{file}: {error.strerror or error}", field=_FIELD) from None
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidArgumentError(f"{file} has more than {_MAX_FILE_BYTES} bytes", field=_FIELD)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{file} is not UTF-8 text", field=_FIELD) from None


def parse(text: str, file: Path) -> Iterator[Identity]:
    """Yield the identities in the text of a token file. Raises InvalidArgumentError that names the line."""
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{file}, line {number}"
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _HASH.fullmatch(words[1]):
            raise InvalidArgumentError(f"{where}: must be a name and 64 hexadecimal digits", field=_FIELD)
        for word in words:
            if word in seen:
                raise InvalidArgumentError(f"{where}: {word} is in line {seen[word]} already", field=_FIELD)
            seen[word] = number
        yield Identity(words[0], bytes.fromhex(words[1]))


def _check_owner_and_mode(status: os.stat_result, owners: Collection[int], file: Path) -> None:
    if owners and status.st_uid not in owners:
        raise InvalidArgumentError(
            f"{file} belongs to user {status.st_uid}, who could add tokens: it must belong to this user or root",
            field=_FIELD,
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise InvalidArgumentError(
            f"{file} has mode {mode:04o}: its group must not write and others must have no access; chmod 0600",
            field=_FIELD,
        )


# ---- atomic updates of a token file: a reader sees the complete old file or the complete new one


def add_token(file: Path, name: str) -> str:
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


def remove_token(file: Path, name: str) -> None:
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
