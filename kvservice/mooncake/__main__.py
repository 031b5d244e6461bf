"""Entry point of the daemon's Mooncake client. The daemon passes the descriptors of a link and of the store's memory,
the size of the memory, and options."""

from __future__ import annotations

import os
import socket
import sys

from kvservice.mooncake.library import MooncakeError, begin, join
from kvservice.mooncake.listening import NOWHERE, ListeningError
from kvservice.mooncake.messages import MooncakeReply, Status
from kvservice.mooncake.options import MooncakeOptions
from kvservice.mooncake.paths import SharedMemory
from kvservice.mooncake.serving import Client, serve_all


def main() -> None:
    link_fd, memory_fd, num_bytes = map(int, sys.argv[2:5])  # after --link
    options = MooncakeOptions.from_json(sys.argv[5])
    begin()
    # The library must not take another node of this host for this process, and copy to its addresses here.
    os.environ["MC_STORE_MEMCPY"] = "0"
    link = socket.socket(fileno=link_fd)
    try:
        store = join(options, NOWHERE, 0)
        client = Client(store, SharedMemory(memory_fd, num_bytes))
    except (MooncakeError, ListeningError, OSError) as error:
        link.sendall(MooncakeReply(0, Status.FAILED, str(error).encode()).encode())
        sys.exit(1)
    link.sendall(MooncakeReply(0, Status.OK).encode())
    serve_all(link, client)


main()
