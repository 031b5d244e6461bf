"""A process with the preloaded library listens where it was told, or nowhere."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from each_row import each_row
from mooncake_rig import MooncakeCluster, Process, mooncake_cluster, programs
from waiting import until

from kvservice.mooncake import NOWHERE, PRELOADED, ListeningError, check_listening, listening_environment

# Binds a socket to a host, listens, says where, and accepts a connection if there is one.
LISTENER = """
import socket, sys
family, host = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, sys.argv[1]
listening = socket.socket(family)
if family == socket.AF_INET6:
    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
listening.bind((host, 0))
listening.listen()
listening.setblocking(False)
try:
    listening.accept()
except BlockingIOError:
    print(*listening.getsockname()[:2], flush=True)
from kvservice.mooncake import check_listening
check_listening(sys.argv[2])
listening.setblocking(True)
listening.settimeout(None)
sys.stdin.read()
"""


def listener(host: str, told: str, checked: str | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", LISTENER, host, checked or told],
        env=os.environ | listening_environment(told),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def address_of(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stdout is not None
    host, port = process.stdout.readline().split()
    return host, int(port)


def can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


# Where a process binds, what it was told, and where it listens then.
REPLACED = [
    ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
    ("0.0.0.0", "127.0.0.2", "127.0.0.2"),
    ("::", "127.0.0.1", "::ffff:127.0.0.1"),
    ("::", "::1", "::1"),
]


def test_the_wildcard_is_replaced_by_the_address() -> None:
    with each_row() as row:
        for host, told, bound in REPLACED:
            with row((host, told)), listener(host, told) as process:
                found, port = address_of(process)
                assert found == bound
                assert can_connect(told, port)
                process.communicate()
                assert process.returncode == 0


def test_nowhere_reserves_a_port_that_cannot_be_reached() -> None:
    with each_row() as row:
        for host in ("0.0.0.0", "::"):
            with row(host), listener(host, NOWHERE) as process:
                found, port = address_of(process)
                assert found == host
                assert not can_connect("127.0.0.1", port)
                with pytest.raises(OSError, match="Address already in use"), socket.socket() as another:
                    another.bind(("127.0.0.2", port))
                process.communicate()
                assert process.returncode == 0


def test_a_listener_of_the_other_family_is_noticed() -> None:
    with listener("0.0.0.0", "::1") as process:
        assert address_of(process)[0] == "127.0.0.1"
        _, errors = process.communicate()
        assert "ListeningError: Mooncake listens on 127.0.0.1 port" in errors


def test_what_is_no_address_fails() -> None:
    with listener("0.0.0.0", "everywhere") as process:
        _, errors = process.communicate()
        assert "Cannot assign requested address" in errors


def test_other_addresses_are_left_alone_and_noticed() -> None:
    with listener("127.0.0.3", "127.0.0.2") as process:
        assert address_of(process)[0] == "127.0.0.3"
        _, errors = process.communicate()
        assert "ListeningError: Mooncake listens on 127.0.0.3 port" in errors


def test_the_check_finds_the_wildcard() -> None:
    with socket.create_server(("0.0.0.0", 0)), pytest.raises(ListeningError, match=r"on 0\.0\.0\.0 port"):
        check_listening("127.0.0.1")


def test_the_check_notices_any_listener_if_there_should_be_none() -> None:
    check_listening(NOWHERE)
    with socket.create_server(("127.0.0.1", 0)), pytest.raises(ListeningError, match=r"on 127\.0\.0\.1 port"):
        check_listening(NOWHERE)
    check_listening(NOWHERE)


def test_another_preloaded_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert listening_environment("::1") == {
        "LD_PRELOAD": f"{PRELOADED}:libother.so",
        "KVSERVICE_LISTEN_ADDRESS": "::1",
        "MC_USE_IPV6": "1",
    }


def listeners_of(pid: int) -> list[str]:
    """Return the local addresses, as the kernel prints them, on which a process listens."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets]


# Starts an engine with every setting of Mooncake at the loopback interface, without memory, says so, and waits.
ALONE = """
import sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
print("started", engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), flush=True)
sys.stdin.read()
"""


def test_mooncake_alone_listens_on_all_interfaces() -> None:
    """That is what the preloaded library is for. A Mooncake with which this fails may need it no longer."""
    programs()
    environment = os.environ | {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    command = [sys.executable, "-P", "-c", ALONE]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line == "started 0\n" for line in process.stdout)
            assert set(listeners_of(process.pid)) == {"00000000", "0" * 32}
        finally:
            process.kill()


def test_a_node_listens_on_its_address_only(tmp_path: Path) -> None:
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    with mooncake_cluster(tmp_path) as cluster:
        found = listeners_of(cluster.node.pid)
        assert len(found) >= 2
        assert set(found) <= loopback


def test_a_node_on_ipv6(tmp_path: Path) -> None:
    with mooncake_cluster(tmp_path) as cluster:
        ready = tmp_path / "ready"
        node = node_of(cluster, "::1", ready)
        node.start()
        try:
            until(lambda: ready.exists() or not node.runs)
            assert set(listeners_of(node.pid)) == {"00000000000000000000000001000000"}
        finally:
            node.kill()


def test_a_node_says_what_is_wrong(tmp_path: Path) -> None:
    with mooncake_cluster(tmp_path) as cluster:
        command = node_of(cluster, "no-such-host.invalid", tmp_path / "ready").command
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "--address no-such-host.invalid: " in done.stderr


def test_a_node_waits_for_its_master(tmp_path: Path) -> None:
    cluster = MooncakeCluster(tmp_path)
    ready = tmp_path / "ready"
    command = node_of(cluster, "127.0.0.1", ready).command
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as node:
        try:
            assert node.stderr is not None
            line = node.stderr.readline()
            assert line.startswith(f"the master {cluster.address} cannot be reached: ")
            assert line.endswith("; waiting for it\n")
            cluster.start_master()
            until(lambda: ready.exists() or node.poll() is not None)
            assert node.poll() is None
        finally:
            cluster.stop()
            node.kill()


def test_a_node_that_waits_ends_with_a_signal(tmp_path: Path) -> None:
    command = node_of(MooncakeCluster(tmp_path), "127.0.0.1", tmp_path / "ready").command
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as node:
        assert node.stderr is not None
        assert "waiting for it" in node.stderr.readline()
        node.terminate()
        assert (node.wait(), node.stderr.read()) == (0, "")


def node_of(cluster: MooncakeCluster, address: str, ready_file: Path) -> Process:
    return Process(
        *(sys.executable, "-P", "-m", "kvservice.mooncake.node", "--master", cluster.address),
        *("--address", address, "--segment-gib", "0.0625", "--ready-file", str(ready_file)),
    )
