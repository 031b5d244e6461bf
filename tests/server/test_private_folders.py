"""The daemon trusts no folder that other users could have filled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvservice.server.private_folders import private_folder


@pytest.mark.parametrize("parent", [".", "a/b"])
def test_a_new_folder_is_for_the_daemon_alone(tmp_path: Path, parent: str) -> None:
    path = private_folder(tmp_path / parent / "values")
    assert path.stat().st_mode & 0o777 == 0o700
    assert private_folder(path) == path


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "values"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(PermissionError, match="other users can write to it"):
        private_folder(path)


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_that_others_can_only_read_is_taken(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "values"
    path.mkdir()
    path.chmod(mode)
    assert private_folder(path) == path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.mkdir()
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to user 65534"):
        private_folder(path)


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "file").touch()
    for name in ("link", "dangling", "file"):
        with pytest.raises(NotADirectoryError, match="it is no directory"):
            private_folder(tmp_path / name)
