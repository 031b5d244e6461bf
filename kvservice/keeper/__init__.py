"""The process that holds the daemon's file descriptors and starts it again, and the daemon's side of the protocol.

The protocol is systemd's (sd_notify, the file descriptor store), so that systemd can be the keeper as well. The modules
use the standard library only: a keeper is small, and has little that could crash.
"""
