"""The folder of saved sessions: what in it is the daemon's, and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from odd_entries import ODD_ENTRIES, make_odd_entry

from kvservice.saved.file_io import DirectFile
from kvservice.saved.files import NEVER, NewFile, SavedFiles, name_of, swapped_name
from kvservice.saved.format import SECTOR_BYTES, FileHeader

TOKEN = b"t" * 16
PART = f"{name_of(TOKEN)}.{'0' * 16}.part"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


def write(folder: Path, name: str, expires_at: float = NEVER) -> None:
    """Write a file without a manifest."""
    NewFile(folder, name).commit(FileHeader(expires_at, SECTOR_BYTES, 0, b""))


@pytest.mark.parametrize("name", [name_of(TOKEN), swapped_name(TOKEN), PART], ids=["session", "swapped", "part"])
@pytest.mark.parametrize("kind", ODD_ENTRIES)
def test_what_is_not_a_regular_file_is_left_alone(
    folder: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    target = make_odd_entry(folder / name, kind)
    before = target.read_bytes(), os.lstat(folder / name)
    files = SavedFiles(folder, 1 << 20)
    assert files.used_bytes == 0
    assert f"{folder / name} is left alone" in caplog.text
    files.close()
    assert (target.read_bytes(), os.lstat(folder / name)) == before


@pytest.mark.parametrize("name", ["notes.session", "x.part", "old.swapped", "README", name_of(TOKEN) + ".part"])
def test_files_with_other_names_are_left_alone(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / name).write_bytes(b"of somebody else")
    files = SavedFiles(folder, 1 << 20)
    assert files.used_bytes == 0
    files.close()
    assert (folder / name).read_bytes() == b"of somebody else"


@pytest.mark.parametrize("kind", ODD_ENTRIES)
def test_a_lock_that_is_not_a_regular_file_is_named(folder: Path, kind: str) -> None:
    folder.mkdir()
    make_odd_entry(folder / "lock", kind)
    with pytest.raises(OSError, match="not a regular file") as raised:
        SavedFiles(folder, 1 << 20)
    assert raised.value.filename == str(folder / "lock")


@pytest.mark.parametrize("kind", ODD_ENTRIES)
def test_a_file_that_became_something_else_is_not_opened(folder: Path, kind: str) -> None:
    files = SavedFiles(folder, 1 << 20)
    write(folder, name_of(TOKEN))
    (folder / name_of(TOKEN)).unlink()
    make_odd_entry(folder / name_of(TOKEN), kind)
    with pytest.raises(OSError, match="not a regular file"):
        DirectFile(folder / name_of(TOKEN), os.O_RDONLY)
    files.close()


def test_own_files_are_found_and_those_in_progress_removed(folder: Path) -> None:
    files = SavedFiles(folder, 1 << 20)
    names = {name_of(TOKEN), swapped_name(TOKEN)}
    for name in names:
        write(folder, name)
    (folder / PART).write_bytes(b"half of it")
    files.close()
    files = SavedFiles(folder, 1 << 20)
    assert {path.name for path in folder.iterdir()} == names | {"lock"}
    assert all(name in files for name in names)
    assert (files.num_sessions, files.used_bytes) == (1, 2 * SECTOR_BYTES)
    files.close()


def test_a_file_that_cannot_be_read_stays_and_the_daemon_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SavedFiles(folder, 1 << 20)
    other = b"u" * 16
    for token in (TOKEN, other):
        write(folder, name_of(token))
    files.close()
    read = os.preadv

    def failing(fd: int, *rest: object) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(name_of(TOKEN)):
            raise OSError(5, "Input/output error")
        return read(fd, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("kvservice.saved.file_io.os.preadv", failing)
        files = SavedFiles(folder, 1 << 20)
    assert (files.num_sessions, files.num_errors) == (1, 1)
    files.close()
    files = SavedFiles(folder, 1 << 20)
    assert (files.num_sessions, files.num_errors) == (2, 0)
    files.close()
