"""Arbitrary bytes at every socket of a daemon with TLS, for KVSERVICE_FUZZ_SECONDS. A client beside them reads what it
has written, and nothing of them is left."""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import fd_socket
import numpy as np
import pytest
from http2_requests import PREFACE, request
from secure_daemon import Secured, secured
from waiting import until

from kvservice.client import KVClient

pytestmark = pytest.mark.slow

SECONDS = int(os.environ.get("KVSERVICE_FUZZ_SECONDS", "10"))
PING = "/kvservice.v1.PoolService/Ping"
# The bytes of a TLS client until it has sent a call are less.
MOST_TLS_BYTES = 4096


def frame(source: random.Random) -> bytes:
    """Return an HTTP/2 frame of any type with random flags, a low stream and a random payload."""
    payload = source.randbytes(source.choice((0, 1, 4, 5, 6, 8, 9, 300)))
    length = source.choice((len(payload), len(payload), len(payload), source.randrange(1 << 24)))
    head = bytes((source.randrange(12), source.randrange(256)))
    return length.to_bytes(3, "big") + head + source.choice((0, 1, 2, 3, 1 << 31)).to_bytes(4, "big") + payload


def mutated(data: bytes, source: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(source.randint(0, 4)):
        at = source.randrange(len(changed))
        changed[at : at + source.randint(0, 2)] = source.randbytes(source.randint(0, 2))
    return bytes(changed)


def end(client: socket.socket, source: random.Random) -> None:
    """Close the connection, or reset it, and perhaps read a little of the answer before."""
    with client, contextlib.suppress(OSError):
        if source.random() < 0.3:
            client.settimeout(0.05)
            client.recv(4096)
        if source.random() < 0.3:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


class Attacks:
    """Each attack is a connection with bytes of its own. `num_tried` counts them by name."""

    def __init__(self, daemon: Secured, source: random.Random) -> None:
        self._daemon, self._source = daemon, source
        self._path = daemon.daemon.address.removeprefix("unix://")
        self._cut = 0
        self.trust = ssl.create_default_context(cadata=daemon.authority.cert.decode())
        self.trust.set_alpn_protocols(["h2"])
        self.all: dict[str, Callable[[], None]] = {
            "tls": self.tls, "http2": self.http2, "door": self.door, "fds": self.fds, "http": self.http,
        }  # fmt: skip
        self.num_tried = dict.fromkeys(self.all, 0)

    def try_one(self, name: str) -> None:
        state = self._source.getstate()
        try:
            self.all[name]()
        except OSError as error:
            self._source.setstate(state)
            daemon = self._daemon.daemon
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.process.wait(10)
            said = f"{name} {error!r}, status {daemon.process.poll()}\n{daemon.log.read_text(errors='replace')}"
            raise AssertionError(said) from error
        self.num_tried[name] += 1

    def tls(self) -> None:
        """A handshake and a call that end after so many bytes, the next time after one more; or with a wrong byte
        there."""
        with socket.create_connection(("127.0.0.1", self._daemon.port), 20) as client:
            sent = self._cut_handshake(client, self._cut, damaged=self.num_tried["tls"] % 2 == 1)
            self._cut = self._cut + 1 if sent > self._cut else 0
            end(client, self._source)

    def _cut_handshake(self, client: socket.socket, cut: int, *, damaged: bool) -> int:
        """Return the number of bytes of the whole handshake so far."""
        arriving, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self.trust.wrap_bio(arriving, leaving, server_hostname="localhost")
        sent, done = 0, False
        while sent < MOST_TLS_BYTES:
            with contextlib.suppress(ssl.SSLWantReadError):
                if done:
                    return sent
                tls.do_handshake()
                tls.write(PREFACE + request(PING, 1))
                done = True
            data = leaving.read()
            if sent + len(data) > cut:
                if damaged:
                    at = cut - sent
                    data = data[:at] + bytes((data[at] ^ (1 << self._source.randrange(8)),)) + data[at + 1 :]
                else:
                    data = data[: cut - sent]
                client.sendall(data)
                return cut + 1
            client.sendall(data)
            sent += len(data)
            if not done:
                try:
                    arrived = client.recv(1 << 16)
                except ConnectionResetError:
                    return sent
                if not arrived:
                    return sent
                arriving.write(arrived)
        return sent

    def http2(self) -> None:
        self._frames(self._path)

    def door(self) -> None:
        self._frames(f"{self._path}.own")

    def _frames(self, path: str) -> None:
        source = self._source
        sent = PREFACE + b"\0\0\0\4\0\0\0\0\0" + request(PING, 1)
        sent += b"".join(frame(source) for _ in range(source.randint(0, 30)))
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(path)
            with contextlib.suppress(OSError):
                client.sendall(mutated(sent, source) if source.random() < 0.8 else source.randbytes(500))
            end(client, source)

    def fds(self) -> None:
        """Bytes in some pieces, at times with descriptors."""
        source = self._source
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(fd_socket.path_of(self._path))
            with contextlib.suppress(OSError):
                for _ in range(source.randint(0, 3)):
                    data = source.randbytes(source.choice((1, 7, 15, 16, 17, 3000)))
                    passed = [client.fileno()] * source.choice((0, 0, 1, 5))
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
                    client.sendmsg([data], rights)
            end(client, source)

    def http(self) -> None:
        source = self._source
        whole = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self._daemon.http_port), 20) as client:
            with contextlib.suppress(OSError, ssl.SSLError):
                if source.random() < 0.5:
                    client.sendall(mutated(whole, source))
                else:
                    trust = ssl.create_default_context(cadata=self._daemon.authority.cert.decode())
                    with trust.wrap_socket(client, server_hostname="localhost") as tls:
                        tls.sendall(mutated(whole, source))
                    return
            end(client, source)


def num_files(daemon: Secured) -> int:
    return len(os.listdir(f"/proc/{daemon.daemon.process.pid}/fd"))


@pytest.mark.timeout(300 + SECONDS)
def test_whatever_comes_a_client_beside_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSERVICE_FUZZ_SECONDS", raising=False)  # it is no option of the daemon
    seed = random.SystemRandom().randrange(2**32)
    source = random.Random(seed)
    values = np.random.default_rng(seed).standard_normal((2, 6, 2, 32), np.float32)
    with secured(tmp_path) as daemon, KVClient(daemon.daemon.address) as client, client.session() as kv:
        sequence = kv.allocate(range(6))
        kv.open_step([sequence]).write(np.stack([values[0]] * 2), np.stack([values[1]] * 2))
        attacks = Attacks(daemon, source)
        for name in attacks.all:  # what the first connections open stays open
            attacks.try_one(name)
        before = num_files(daemon)
        stop = time.monotonic() + SECONDS
        while time.monotonic() < stop:
            for name in attacks.all:
                for _ in range(20):
                    attacks.try_one(name)
            assert client.ping(b"still here") == b"still here"
            key, value = kv.read(sequence, 0, 6)
            assert all(np.array_equal(np.stack([key[layer], value[layer]]), values) for layer in range(2)), seed
        said = daemon.daemon.log.read_text(errors="replace")
        assert "Traceback" not in said, (seed, said)
        until(lambda: num_files(daemon) <= before + 2)
        print(f"seed {seed}", attacks.num_tried)
