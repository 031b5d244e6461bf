"""The guard of a folder, a small process that outlives the owner of it: `owned_guard.py LINK OWNER FOLDER SOCKET...`

The other end of the socket LINK is the owner's, and OWNER is a pidfd of it. When either is at its end, the guard
removes the folder, and the unix sockets at which nobody listens. `owned.py` runs this file alone, without its package:
it imports little, so that it starts in 20 ms.
"""

import contextlib
import os
import select
import signal
import sys
import time

# Processes that use the folder may still be ending, so the guard tries for some seconds.
REMOVING_S = 30.0
RETRY_S = 0.02


def main(link: int, owner: int, folder: str, *sockets: str) -> None:
    # The signals for a whole group of processes end the owner, and then the guard has work.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Two processes do the same, so that one is left when the other is killed.
    os.fork()
    poll = select.poll()
    poll.register(link, 0)  # the end of a socket is always told
    poll.register(owner, select.POLLIN)
    poll.poll()
    deadline = time.monotonic() + REMOVING_S
    # None is left out because of another.
    while not min([remove(folder), *map(remove_socket, sockets)]) and time.monotonic() < deadline:
        time.sleep(RETRY_S)


def remove(folder: str) -> bool:
    """Return whether the folder is gone."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def remove_socket(path: str) -> bool:
    """Return whether the path has no socket without a listener."""
    import socket

    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
        return False
    except ConnectionRefusedError:
        with contextlib.suppress(FileNotFoundError):  # the other guard was faster
            os.unlink(path)
    except OSError:
        pass
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
