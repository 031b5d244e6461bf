"""The connected user as reported by the kernel, and the files that this user may open."""

from __future__ import annotations

import os
import socket

import pytest

from kvservice.server.peers import Peer, peer_of

OWNER, MEMBER, STRANGER = Peer(1, frozenset({10})), Peer(2, frozenset({20, 30})), Peer(3, frozenset({40}))


def found(mode: int, uid: int = 1, gid: int = 30) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


def test_the_kernel_says_who_the_peer_is() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_of(one) == Peer(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))


@pytest.mark.parametrize(
    ("mode", "allowed"),
    [
        (0o600, [OWNER]),
        (0o644, [OWNER]),
        (0o640, [OWNER]),
        (0o620, [OWNER]),
        (0o660, [OWNER, MEMBER]),
        (0o666, [OWNER, MEMBER, STRANGER]),
        (0o606, [OWNER, STRANGER]),  # the first matching class decides
        (0o066, [MEMBER, STRANGER]),
        (0o400, []),
        (0o777, [OWNER, MEMBER, STRANGER]),
        (0o000, []),
    ],
    ids=lambda part: oct(part) if isinstance(part, int) else "",
)
def test_as_if_the_peer_had_opened_it(mode: int, allowed: list[Peer]) -> None:
    assert [peer for peer in (OWNER, MEMBER, STRANGER) if peer.may_read_and_write(found(mode))] == allowed


def test_root_gets_no_more_than_others() -> None:
    assert not Peer(0, frozenset({0})).may_read_and_write(found(0o600))
