"""Engines in processes of their own: what they move, what they refuse, and how they end."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from transfer_rig import LOOPBACK, LyingPeer, Side, frozen, is_gone, listening, sides
from waiting import until

from kvservice.errors import TransferFailedError
from kvservice.transfer import READ, WRITE, Endpoint, Range, TransferProcess

pytestmark = pytest.mark.usefixtures("transfer_engine")

NUM_BYTES = 4 << 20
# Starts an engine, prints the id of its process, and waits.
STARTER = """
import os, signal
from kvservice.transfer import Endpoint, TransferProcess
descriptor = os.memfd_create("side")
os.ftruncate(descriptor, 4096)
process = TransferProcess(descriptor, 4096, Endpoint("127.0.0.1"), shared=True)
print(process.pid, flush=True)
signal.pause()
"""
# Starts an engine, freezes its process before it has imported anything, and prints its id.
FREEZER = """
import os, signal
from kvservice import owned
from kvservice.transfer import Endpoint, TransferProcess
kill_at_close = owned.kill_at_close
def freeze(end, group):
    kill_at_close(end, group)
    os.killpg(-group, signal.SIGSTOP)
    print(-group, flush=True)
owned.kill_at_close = freeze
descriptor = os.memfd_create("side")
os.ftruncate(descriptor, 4096)
TransferProcess(descriptor, 4096, Endpoint("127.0.0.1"), shared=True)
"""
# How long a transfer may take that cannot end. The tests do not depend on it.
SHORT_S = 0.3
# How long tests wait for what happens at once.
LONG_S = 60.0


def filled(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, NUM_BYTES, np.uint8)


@pytest.mark.parametrize(
    ("seed", "num_engines"),
    [
        (0, (1, 1)),
        (3, (2, 2)),
        pytest.param(1, (2, 1), marks=pytest.mark.slow),
        pytest.param(2, (1, 3), marks=pytest.mark.slow),
        pytest.param(4, (3, 2), marks=pytest.mark.slow),
    ],
)
def test_random_ranges_arrive_and_nothing_else_changes(seed: int, num_engines: tuple[int, int]) -> None:
    choice = random.Random(seed)
    with sides(NUM_BYTES, num_engines) as (near, far):
        near.bytes[:], far.bytes[:] = filled(2 * seed), filled(2 * seed + 1)
        for operation in (WRITE, READ, WRITE):
            size = choice.choice((1, 7, 4096, 65537, 1 << 20))
            cuts = sorted(choice.sample(range(NUM_BYTES // size), min(5, NUM_BYTES // size)))
            places = choice.sample(range(NUM_BYTES // size), len(cuts))
            ranges = [Range(a * size, b * size, size) for a, b in zip(cuts, places, strict=True)]
            expected_near, expected_far = near.bytes.copy(), far.bytes.copy()
            for local, remote, n in ranges:
                if operation == WRITE:
                    expected_far[remote : remote + n] = near.bytes[local : local + n]
                else:
                    expected_near[local : local + n] = far.bytes[remote : remote + n]
            near.move(operation, far.process, *ranges)
            np.testing.assert_array_equal(near.bytes, expected_near)
            np.testing.assert_array_equal(far.bytes, expected_far)


def test_an_engine_of_a_process_with_many_open_files() -> None:
    """Its descriptors have the numbers that they have here: over 1,023, the most that `select` takes."""
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with sides(NUM_BYTES) as (near, far):
            near.bytes[:] = filled(1)
            near.move(WRITE, far.process, Range(0, 0, NUM_BYTES))
            np.testing.assert_array_equal(far.bytes, near.bytes)
    finally:
        for descriptor in many:
            os.close(descriptor)


def test_engines_listen_at_their_address_only_and_at_their_ports() -> None:
    descriptor = os.memfd_create("side")
    os.ftruncate(descriptor, 4096)
    endpoint = Endpoint("127.0.0.2", first_port=19000, last_port=19063, num_engines=2)
    process = TransferProcess(descriptor, 4096, endpoint, shared=True)
    try:
        found = listening(process.pid)
        assert {host for host, _ in found} == {"127.0.0.2"}
        assert len(found) == 4
        assert all(19000 <= port <= 19063 for _, port in found)
    finally:
        process.kill()
        os.close(descriptor)


def test_connections_from_other_addresses_are_refused() -> None:
    far, near = Side(4096, shared=True, peer="127.0.0.3"), Side(4096, shared=False)
    far.bytes[:] = 7
    try:
        with pytest.raises(TransferFailedError):
            near.move(READ, far.process, Range(0, 0, 4096))
        assert not near.bytes.any()
    finally:
        near.process.kill()
        far.process.kill()


def test_an_engine_connects_to_its_peer_only() -> None:
    far, near = Side(4096, shared=True), Side(4096, shared=False, peer="127.0.0.3")
    far.bytes[:] = 7
    try:
        with pytest.raises(TransferFailedError):
            near.move(READ, far.process, Range(0, 0, 4096))
        assert not near.bytes.any()
    finally:
        near.process.kill()
        far.process.kill()


@pytest.mark.parametrize("data_host", ["127.0.0.2", LOOPBACK])
def test_a_peer_cannot_send_an_engine_to_another_host(data_host: str) -> None:
    """An engine believes the lie about its peer's own host, so the lie is told well."""
    near = Side(4096, shared=False)
    with socket.create_server((data_host, 0)) as other:
        peer = LyingPeer(data_host, other.getsockname()[1], 4096)
        try:
            ticket = near.process.start(WRITE, peer.segments, peer.address, [Range(0, 0, 4096)])
            assert peer.answered.wait(LONG_S)
            if data_host == LOOPBACK:
                other.settimeout(LONG_S)
                other.accept()[0].close()
                return
            with pytest.raises(TransferFailedError):
                near.process.wait(ticket, LONG_S)
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.accept()
        finally:
            near.process.kill()
            peer.close()


def test_a_process_ends_with_the_one_that_started_it_even_if_it_is_frozen() -> None:
    started = subprocess.Popen([sys.executable, "-P", "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    engine = int(started.stdout.readline())
    os.kill(engine, signal.SIGSTOP)
    started.kill()
    started.wait()
    started.stdout.close()
    until(lambda: is_gone(engine))
    assert is_gone(engine)


def test_a_process_that_is_frozen_at_once_ends_with_the_one_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", FREEZER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()
    until(lambda: is_gone(pid))


def test_memory_that_is_not_registered_is_out_of_reach() -> None:
    with sides(NUM_BYTES) as (near, far):
        near.move(READ, far.process, Range(0, NUM_BYTES - 4096, 4096))
        for begin, size in ((NUM_BYTES, 4096), (NUM_BYTES - 4095, 4096), (-4096, 4096)):
            for operation in (READ, WRITE):
                with pytest.raises(TransferFailedError):
                    near.move(operation, far.process, Range(0, begin, size))
        # The client's engine does not listen.
        assert not listening(near.process.pid)
        with pytest.raises(TransferFailedError):
            far.move(READ, near.process, Range(0, 0, 4096))


def test_a_session_does_not_reach_the_memory_of_another() -> None:
    """The engine of one memory maps no other: its addresses mean nothing there."""
    with sides(NUM_BYTES) as (near, far), sides(NUM_BYTES) as (_, other):
        other.bytes[:] = 9
        near.move(READ, far.process, Range(0, 0, NUM_BYTES))
        for address in (other.process.address, other.process.address + NUM_BYTES // 2):
            if far.process.address <= address < far.process.address + NUM_BYTES:
                continue  # two processes have mapped their memories at the same address
            ticket = near.process.start(READ, far.process.segments, address, [Range(0, 0, 4096)])
            with pytest.raises(TransferFailedError):
                near.process.wait(ticket, 60.0)
        assert not (near.bytes == 9).any()


def test_a_range_outside_the_own_memory_ends_the_process() -> None:
    with sides(4096) as (near, far):
        near.process.start(WRITE, far.process.segments, far.process.address, [Range(1, 0, 4096)])
        until(lambda: not near.process.is_running)
        with pytest.raises(TransferFailedError, match="has ended"):
            near.move(WRITE, far.process, Range(0, 0, 1))


def test_transfers_fail_when_the_other_engine_is_killed() -> None:
    with sides(NUM_BYTES) as (near, far):
        near.move(WRITE, far.process, Range(0, 0, NUM_BYTES))
        far.process.kill()
        until(lambda: is_gone(far.process.pid))
        with pytest.raises(TransferFailedError):
            near.move(WRITE, far.process, Range(0, 0, NUM_BYTES))


@pytest.mark.parametrize("whose", ["own", "other"])
def test_transfers_with_a_frozen_engine_end_in_time(whose: str) -> None:
    with sides(NUM_BYTES) as (near, far):
        near.move(WRITE, far.process, Range(0, 0, NUM_BYTES))
        with frozen(near.process.pid if whose == "own" else far.process.pid), pytest.raises(TransferFailedError):
            near.move(WRITE, far.process, Range(0, 0, NUM_BYTES), timeout_s=SHORT_S)


def test_an_engine_is_ended_while_another_thread_waits_for_it() -> None:
    with sides(NUM_BYTES) as (near, far), ThreadPoolExecutor(1) as threads, frozen(far.process.pid):
        ticket = near.process.start(WRITE, far.process.segments, far.process.address, [Range(0, 0, NUM_BYTES)])
        waiting = threads.submit(near.process.wait, ticket, LONG_S)
        near.process.interrupt()
        with pytest.raises(TransferFailedError, match=r"the transfer engine has ended$"):
            waiting.result()
        with pytest.raises(TransferFailedError, match=r"the transfer engine has ended$"):
            near.move(WRITE, far.process, Range(0, 0, 1))


def test_an_engine_that_was_killed_has_ended() -> None:
    with sides(4096) as (near, far):
        ticket = near.process.start(WRITE, far.process.segments, far.process.address, [Range(0, 0, 1)])
        near.process.kill()
        for use in (
            lambda: near.process.wait(ticket, LONG_S),
            lambda: near.move(WRITE, far.process, Range(0, 0, 1)),
        ):
            with pytest.raises(TransferFailedError, match=r"the transfer engine has ended$"):
                use()


def test_a_late_transfer_has_no_target() -> None:
    """A frozen client that wakes up after its session has ended writes to a process that is gone."""
    with sides(NUM_BYTES) as (near, far):
        near.move(WRITE, far.process, Range(0, 0, NUM_BYTES))
        with frozen(near.process.pid):
            near.bytes[:] = 5
            late = near.process.start(WRITE, far.process.segments, far.process.address, [Range(0, 0, NUM_BYTES)])
            far.process.kill()
            until(lambda: is_gone(far.process.pid))
            with sides(NUM_BYTES) as (_, next_one):  # whoever gets memory now
                os.kill(near.process.pid, signal.SIGCONT)
                with pytest.raises(TransferFailedError):
                    near.process.wait(late, 60.0)
                assert not next_one.bytes.any()
        assert not far.bytes.any()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_hostile_bytes_reach_at_most_the_memory_of_the_engine(seed: int) -> None:
    """The engine may end, or drop the connection. What it maps is all that it can damage."""
    choice = random.Random(seed)
    with sides(4096) as (_, far), sides(4096) as (_, other):
        for host, port in listening(far.process.pid):
            for data in (
                choice.randbytes(1000),
                struct.pack("<QQB", 4096, other.process.address + (1 << 40), 0x81) + bytes(4096),
                struct.pack("<QQB", 1 << 63, far.process.address, 1),
                struct.pack("<QQB", 2**64 - 1, far.process.address, 0),
                struct.pack("<Q", 1 << 40) + b"{" * 1000,
                b"\0" * 8 + b"GET / HTTP/1.1\r\n\r\n",
            ):
                with socket.socket() as hostile:
                    hostile.settimeout(5)
                    try:
                        hostile.connect((host, port))
                        hostile.sendall(data)
                        hostile.shutdown(socket.SHUT_WR)
                        while hostile.recv(65536):
                            pass
                    except OSError:
                        continue  # it has dropped the connection, or has ended
        assert not other.bytes.any()
        assert other.process.is_running


def test_an_engine_that_cannot_start_says_why() -> None:
    descriptor = os.memfd_create("side")
    os.ftruncate(descriptor, 4096)
    try:
        with pytest.raises(TransferFailedError, match="transfer engine"):
            TransferProcess(descriptor, 4096, Endpoint("192.0.2.1"), shared=True)  # no address of this host
    finally:
        os.close(descriptor)


def test_addresses_are_numeric() -> None:
    for host, peer in (("localhost", ""), (LOOPBACK, "example.org"), ("", "x")):
        with pytest.raises(ValueError, match="address"):
            Endpoint(host, peer=peer)
