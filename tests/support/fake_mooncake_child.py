"""A child process as kvservice.tiers.mooncake starts it, which behaves as its last argument says.

serve: answers each request with the bytes of its keys. hang: is ready, and answers nothing. silent: is never ready.
refuse: says why it cannot start. die: ends at once. long: sends a frame that is too long. crash: ends at a request.
"""

from __future__ import annotations

import socket
import sys
import time

from kvservice.mooncake import FRAME_BYTES, LENGTH, MooncakeReply, MooncakeRequest, Status


def main() -> None:
    link, behaviour = socket.socket(fileno=int(sys.argv[2])), sys.argv[3]
    if behaviour == "die":
        return
    if behaviour == "refuse":
        link.sendall(MooncakeReply(0, Status.FAILED, b"it has no wish to").encode())
        return
    if behaviour == "silent":
        time.sleep(600)
    link.sendall(MooncakeReply(0, Status.OK).encode())
    stream = link.makefile("rb")
    while head := stream.read(LENGTH.size):
        request = MooncakeRequest.decode(stream.read(LENGTH.unpack(head)[0]))
        if behaviour == "crash":
            return
        if behaviour == "long":
            link.sendall(LENGTH.pack(FRAME_BYTES + 1))
        if behaviour == "serve":
            link.sendall(MooncakeReply(request.request_id, Status.OK, request.keys).encode())


main()
