"""Tokens: identification of callers, refused tokens, and the token file."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from pathlib import Path

import pytest
from each_row import each_row

from kvservice.auth import UNNAMED, ClientCredentials, Identity, Tokens, add_token, new_token, remove_token
from kvservice.errors import InvalidArgumentError, UnauthenticatedError

HASH = hashlib.sha256(b"x").hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def written(file: Path, text: str | bytes, mode: int = 0o600) -> Path:
    file.unlink(missing_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return file


def test_a_token_identifies_its_name_and_no_other(file: Path) -> None:
    tokens = {name: add_token(file, name) for name in ("alice", "bob@host", "c.d_e-1")}
    known = Tokens.read(file)
    assert len(known) == 3
    for name, token in tokens.items():
        assert known.identify(token).name == name
        assert token not in file.read_text()
    with pytest.raises(UnauthenticatedError, match="does not know") as caught:
        known.identify(new_token())
    assert caught.value.metadata == {"cause": "unknown"}


def test_tokens_are_256_random_bits() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(re.fullmatch(r"kvs_[A-Za-z0-9_-]{43}", token) for token in tokens)


def test_a_missing_token_is_distinguished_from_a_wrong_one() -> None:
    with pytest.raises(UnauthenticatedError, match="token=") as caught:
        Tokens({}).identify(None)
    assert caught.value.metadata == {"cause": "missing"}


def test_what_is_cut_short_is_no_token(file: Path) -> None:
    token = add_token(file, "alice")
    known = Tokens.read(file)
    with each_row() as row:
        for wrong in (token[:-1], token + "A", "", token[4:], token * 999):
            with row(wrong[:100]):
                with pytest.raises(UnauthenticatedError, match="cut short") as caught:
                    known.identify(wrong)
                assert caught.value.metadata == {"cause": "malformed"}


def test_a_name_is_known_by_its_present_token_only(file: Path) -> None:
    old = add_token(file, "alice")
    before = Tokens.read(file).identify(old)
    remove_token(file, "alice")
    new = add_token(file, "alice")
    known = Tokens.read(file)
    after = known.identify(new)
    assert before == after, "sessions belong to names"
    assert known.has(after)
    assert not known.has(before)
    assert not known.has(UNNAMED)


def test_comments_and_empty_lines_are_left_out(file: Path) -> None:
    written(file, f"# of the cluster\n\n  \nalice {HASH}\n")
    assert len(Tokens.read(file)) == 1


def test_a_wrong_line_is_named(file: Path) -> None:
    wrong: list[tuple[str | bytes, str]] = [
        (f"alice {HASH}\nbob\n", "line 2: must be a name and 64"),
        (f"alice {HASH[:-1]}\n", "line 1: must be"),
        (f"alice {HASH.upper()}\n", "line 1: must be"),
        (f"alice {HASH} engine\n", "line 1: must be"),
        (f"-alice {HASH}\n", "line 1: must be"),
        (f"{'a' * 65} {HASH}\n", "line 1: must be"),
        (f"alice {HASH}\n\nalice {HASH[::-1]}\n", "line 3: alice is in line 1 already"),
        (f"alice {HASH}\nbob {HASH}\n", f"line 2: {HASH} is in line 1 already"),
        (b"\xff\xfe\n", "is not UTF-8 text"),
        ("#" * (1 << 20) + "\n", "more than 1048576 bytes"),
    ]
    with each_row() as row:
        for text, message in wrong:
            with row(message):
                with pytest.raises(InvalidArgumentError, match=message) as caught:
                    Tokens.read(written(file, text))
                assert caught.value.field == "auth_tokens"
                assert str(file) in str(caught.value)


def test_the_group_may_read_and_others_may_not_use_the_file(file: Path) -> None:
    with each_row() as row:
        for mode in (0o604, 0o602, 0o601, 0o620, 0o666):
            with row(oct(mode)), pytest.raises(InvalidArgumentError, match=f"mode {mode:04o}.*chmod 0600"):
                Tokens.read(written(file, f"alice {HASH}\n", mode))
        for mode in (0o400, 0o600, 0o440, 0o640):
            with row(oct(mode)):
                assert len(Tokens.read(written(file, f"alice {HASH}\n", mode))) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    written(file, f"alice {HASH}\n")
    os.chown(file, 12345, -1)
    with pytest.raises(InvalidArgumentError, match="belongs to user 12345"):
        Tokens.read(file)


def test_what_is_no_file_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="No such file"):
        Tokens.read(file)
    with pytest.raises(InvalidArgumentError, match="directory"):
        Tokens.read(tmp_path)


def test_a_name_that_the_file_cannot_hold_is_refused(file: Path) -> None:
    with each_row() as row:
        for name in ("", "a b", "a\nb", "#a", "é", "a" * 65):
            with row(name):
                with pytest.raises(InvalidArgumentError, match="name:"):
                    add_token(file, name)
                assert not file.exists()


def test_a_second_token_of_a_name_is_refused(file: Path) -> None:
    add_token(file, "alice")
    before = file.read_text()
    with pytest.raises(InvalidArgumentError, match="remove that one first"):
        add_token(file, "alice")
    assert file.read_text() == before


def test_a_file_is_made_for_its_owner_alone_and_keeps_its_mode(file: Path) -> None:
    umask = os.umask(0)
    try:
        add_token(file, "alice")
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o640)
        add_token(file, "bob")
        assert file.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(umask)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_root_leaves_the_file_to_its_owner(file: Path) -> None:
    add_token(file, "alice")
    os.chown(file, 10001, 10001)
    remove_token(file, "alice")
    assert (file.stat().st_uid, file.stat().st_gid) == (10001, 10001)


def test_removing_leaves_the_rest_as_it_is(file: Path) -> None:
    written(file, f"# alice is first\nalice {HASH}\nbob {HASH[::-1]}")
    remove_token(file, "alice")
    assert file.read_text() == f"# alice is first\nbob {HASH[::-1]}"
    add_token(file, "carol")
    assert [line.split()[0] for line in file.read_text().splitlines()] == ["#", "bob", "carol"]
    with pytest.raises(InvalidArgumentError, match="alice has no token"):
        remove_token(file, "alice")


def test_a_file_that_is_wrong_is_not_changed(file: Path) -> None:
    written(file, "nonsense\n")
    for change in (add_token, remove_token):
        with pytest.raises(InvalidArgumentError, match="line 1"):
            change(file, "alice")
    assert file.read_text() == "nonsense\n"


def test_a_link_stays_one(tmp_path: Path, file: Path) -> None:
    target = tmp_path / "real"
    file.symlink_to(target)
    add_token(file, "alice")
    assert file.is_symlink()
    assert len(Tokens.read(target)) == 1


def test_no_change_is_lost_when_two_are_made_at_once(file: Path) -> None:
    adding = [threading.Thread(target=add_token, args=(file, f"engine-{n}")) for n in range(16)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert len(Tokens.read(file)) == 16
    assert [path.name for path in file.parent.iterdir()] == [file.name], "nothing is left behind"


def test_an_identity_shows_no_credential() -> None:
    assert "secret" not in repr(Identity("alice", b"secret"))


def test_credentials_do_not_show_their_token() -> None:
    assert "secret" not in repr(ClientCredentials(None, "secret"))
