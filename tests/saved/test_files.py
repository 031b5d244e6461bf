"""The folder of saved sessions: what in it is the daemon's, and what is not."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from odd_entries import ODD_ENTRIES, make_odd_entry
from saved_rig import TOKENS, Reboot
from sleeping import detach, resume

from kvservice.errors import DiskFailedError
from kvservice.saved import SavedFiles

TOKEN = b"t" * 16


def hash_of(token: bytes) -> str:
    return hashlib.sha256(b"kvservice session " + token).hexdigest()


SESSION, SWAPPED = f"{hash_of(TOKEN)}.session", f"{hash_of(TOKEN)}.{'0' * 16}.swapped"
PART = f"{SESSION}.{'0' * 16}.part"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture
def written(reboot: Reboot, tmp_path: Path) -> tuple[Path, list[str]]:
    """A folder with the files of two sessions, which no daemon uses any more, and their names."""

    async def scenario() -> None:
        life = reboot()
        for _ in range(2):
            await detach(life, life.open())
        life.core.saved.close()

    asyncio.run(scenario())
    folder = tmp_path / "disk" / "sessions"
    return folder, sorted(path.name for path in folder.glob("*.session"))


def test_what_is_not_a_regular_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with each_row() as row:
        for name in (SESSION, SWAPPED, PART):
            for kind in ODD_ENTRIES:
                with row((name[64:], kind)):
                    folder = tmp_path / kind / name[64:] / "sessions"
                    folder.mkdir(parents=True)
                    target = make_odd_entry(folder / name, kind)
                    before = target.read_bytes(), os.lstat(folder / name)
                    files = SavedFiles(folder, 1 << 20)
                    assert files.used_bytes == 0
                    assert f"{folder / name} is left alone" in caplog.text
                    files.close()
                    assert (target.read_bytes(), os.lstat(folder / name)) == before


def test_files_with_other_names_are_left_alone(folder: Path) -> None:
    folder.mkdir()
    names = ("notes.session", "x.part", "old.swapped", "README", f"{SESSION}.part")
    for name in names:
        (folder / name).write_bytes(b"of somebody else")
    files = SavedFiles(folder, 1 << 20)
    assert files.used_bytes == 0
    files.close()
    assert {name: (folder / name).read_bytes() for name in names} == dict.fromkeys(names, b"of somebody else")


def test_a_lock_that_is_not_a_regular_file_is_named(tmp_path: Path) -> None:
    with each_row() as row:
        for kind in ODD_ENTRIES:
            with row(kind):
                folder = tmp_path / kind / "sessions"
                folder.mkdir(parents=True)
                make_odd_entry(folder / "lock", kind)
                with pytest.raises(OSError, match="not a regular file") as raised:
                    SavedFiles(folder, 1 << 20)
                assert raised.value.filename == str(folder / "lock")


def test_own_files_are_found_and_those_in_progress_removed(written: tuple[Path, list[str]]) -> None:
    folder, names = written
    swapped = f"{names[0].partition('.')[0]}.{'0' * 16}.swapped"
    (folder / swapped).write_bytes((folder / names[1]).read_bytes())
    (folder / PART).write_bytes(b"half of it")
    files = SavedFiles(folder, 1 << 20)
    assert {path.name for path in folder.iterdir()} == {*names, swapped, "lock"}
    assert set(files) == {*names, swapped}
    assert files.num_sessions == 2
    assert files.used_bytes == sum((folder / name).stat().st_size for name in (*names, swapped))
    files.close()


def test_a_file_that_cannot_be_read_stays_and_the_daemon_starts(
    written: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = written
    read = os.preadv

    def failing(fd: int, *rest: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(names[0]):
            raise OSError(5, "Input/output error")
        return read(fd, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        files = SavedFiles(folder, 1 << 20)
    assert (files.num_sessions, files.num_errors) == (1, 1)
    files.close()
    files = SavedFiles(folder, 1 << 20)
    assert (files.num_sessions, files.num_errors) == (2, 0)
    files.close()


def test_sessions_are_restored_from_a_read_only_disk(
    reboot: Reboot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon starts there, says what does not work, and works again when it can write."""
    folder = tmp_path / "disk" / "sessions"
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).startswith(str(folder)) and flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *rest, **more)

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    async def scenario() -> None:
        life = reboot()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS)
        await detach(life, session)
        part = folder / f"{'0' * 64}.session.{'0' * 16}.part"
        part.write_bytes(b"")
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", read_only)
            patch.setattr(os, "unlink", refuse)
            patch.setattr(os, "access", lambda *_: False)
            life = reboot()
            for _ in range(2):
                assert str(tmp_path / "disk") in life.core.saved.note
                await life.core.saved.expire()
            back = await resume(life, session.token)
            assert np.array_equal(await life.read(back, 1, len(TOKENS)), kv)
            with pytest.raises(DiskFailedError, match="Read-only file system"):
                await detach(life, life.open())
            with pytest.raises(BlockingIOError):
                SavedFiles(folder, 1 << 20)
        assert life.core.saved.note
        await life.core.saved.expire()
        assert life.core.saved.note == ""
        await detach(life, life.open())

    asyncio.run(scenario())


def test_a_read_only_disk_without_a_lock_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *_: Any, **__: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="Read-only"):
        SavedFiles(folder, 1 << 20)


def test_a_removed_lock_is_taken_again(reboot: Reboot, tmp_path: Path) -> None:
    """`rm sessions/*` takes the lock too. What is saved later is there, and no other daemon gets the folder."""

    async def scenario() -> None:
        life = reboot()
        await detach(life, life.open())
        for path in (tmp_path / "disk" / "sessions").iterdir():
            path.unlink()
        session = life.open()
        await detach(life, session)
        with pytest.raises(BlockingIOError):
            SavedFiles(tmp_path / "disk" / "sessions", 1 << 20)
        await resume(life, session.token)

    asyncio.run(scenario())


def test_a_lock_that_another_process_took_meanwhile_is_its_own(folder: Path) -> None:
    first = SavedFiles(folder, 1 << 20)
    (folder / "lock").unlink()
    second = SavedFiles(folder, 1 << 20)
    with pytest.raises(OSError, match="another process has locked it"):
        first.check_folder()
    second.check_folder()
    first.close()
    second.close()
