"""Sends, as another user, a descriptor whose last close() waits as long as that user likes: of a TCP connection with
SO_LINGER and unsent data, whose peer does not read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Prints how the sending has ended, and keeps the peer of the connection until its input ends.
_SEND = """
import os, socket, struct, sys, threading
uid, address, kind = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with socket.create_server(("127.0.0.1", 0)) as listening:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow = socket.create_connection(listening.getsockname())
    peer, _ = listening.accept()
slow.setblocking(False)
try:
    while True:
        slow.send(bytes(1 << 16))
except BlockingIOError:
    pass
slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
# Not before: the imports and encodings of Python may be root's alone.
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
sending = socket.socket(socket.AF_UNIX, socket.SocketKind(kind))
outcome = "sent"
try:
    sending.connect(address)
    socket.send_fds(sending, [b"x" * 16], [slow.fileno()])
except OSError as error:
    outcome = type(error).__name__
# While the message is under way this is not the last close.
threading.Thread(target=slow.close, daemon=True).start()
print(outcome, flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def sent_as(uid: int, address: str, kind: int, *passed: int) -> Iterator[str]:
    """Send the descriptor to a unix socket, and yield "sent" or the name of the error. Until the context ends nobody
    reads from the connection. The process inherits the descriptors `passed`. Only root can do this."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _SEND, str(uid), address, str(int(kind))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=passed,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()
