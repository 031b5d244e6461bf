"""A node that gives memory to a Mooncake Store, and listens on one address only.

`python -m kvservice.mooncake.node --master HOST:PORT --address HOST --segment-gib N` waits for the master, then
runs until SIGTERM. Whoever reaches its ports can read and write the values in its memory. MC_MIN_RPC_PORT and
MC_MAX_RPC_PORT, variables of the library, limit the ports that it chooses from.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final

from kvservice.mooncake import (
    PEER_TO_PEER,
    VARIABLE,
    ListeningError,
    MooncakeOptions,
    MooncakeReply,
    Status,
    listening_environment,
    numeric_address,
)
from kvservice.mooncake.library import MooncakeError, NoMasterError, begin, join

GIB: Final = 1 << 30
# The pause in seconds between attempts to reach the master.
_PAUSE_S: Final = 1.0


def main() -> None:
    arguments = _arguments()
    try:
        address = numeric_address(arguments.address)
    except OSError as error:
        sys.exit(f"--address {arguments.address}: {error}")
    if os.environ.get(VARIABLE) != address:  # only a new image of this process preloads a library
        again = [sys.executable, "-P", "-m", "kvservice.mooncake.node", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | listening_environment(address))
    options = MooncakeOptions(arguments.master, address, arguments.metadata, arguments.protocol, arguments.device)
    if arguments.link is not None:
        _serve_daemon(options, int(arguments.segment_gib * GIB), socket.socket(fileno=arguments.link))
    _serve(options, int(arguments.segment_gib * GIB), arguments.ready_file)


def _serve(options: MooncakeOptions, segment_bytes: int, ready_file: Path | None) -> None:
    # Blocked before the library starts threads, so that sigwait gets them.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        store = _join_when_it_runs(options, segment_bytes, ends)
    except (MooncakeError, ListeningError) as error:
        sys.exit(str(error))
    print(f"{segment_bytes} bytes at {options.address} for the store of {options.master}", flush=True)
    if ready_file is not None:
        ready_file.touch()
    signal.sigwait(ends)
    store.close()
    os._exit(0)  # threads of the library may still run


def _join_when_it_runs(options: MooncakeOptions, segment_bytes: int, ends: set[signal.Signals]) -> Any:
    """Wait for the master, then join its store. Ends the process with one of the signals. Raises MooncakeError,
    ListeningError."""
    said = ""
    while True:
        try:
            return join(options, options.address, segment_bytes)
        except NoMasterError as error:
            if str(error) != said:
                said = str(error)
                print(f"{said}; waiting for it", file=sys.stderr, flush=True)
        if signal.sigtimedwait(ends, _PAUSE_S) is not None:
            sys.exit(0)


def _serve_daemon(options: MooncakeOptions, segment_bytes: int, link: socket.socket) -> None:
    """Run until the daemon closes the link."""
    begin()
    try:
        store = join(options, options.address, segment_bytes)
    except (MooncakeError, ListeningError) as error:
        link.sendall(MooncakeReply(0, Status.FAILED, str(error).encode()).encode())
        sys.exit(1)
    link.sendall(MooncakeReply(0, Status.OK).encode())
    link.recv(1)
    store.close()
    os._exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvservice.mooncake.node", description=__doc__)
    parser.add_argument("--master", required=True, help="HOST:PORT of the master")
    parser.add_argument("--address", default="127.0.0.1", help="address of this host that the node listens on")
    parser.add_argument("--segment-gib", type=float, required=True, help="memory in GiB")
    parser.add_argument("--metadata", default=PEER_TO_PEER, help="URL of a metadata server; by default there is none")
    parser.add_argument("--protocol", choices=("tcp", "rdma"), default="tcp")
    parser.add_argument("--device", default="", help="RDMA devices, separated by commas")
    parser.add_argument("--ready-file", type=Path, help="file that is made when the memory can be used")
    parser.add_argument("--link", type=int, help=argparse.SUPPRESS)  # a daemon's, if it runs this process
    return parser.parse_args()


if __name__ == "__main__":
    main()
