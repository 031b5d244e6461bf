"""The process that holds the daemon's file descriptors and starts it again, and the daemon's side of the protocol.

The protocol is systemd's (sd_notify, the file descriptor store), so that systemd can be the keeper as well. The modules
use the standard library only: a keeper is small, and has little that could crash.

    Keeper, with Ending, KeeperSettings, Log, Notification      its decisions, its settings and inputs
    become_keeper, control_path, door_path                      a process becomes a keeper; where its sockets are
    ask, ControlSocketError                                     a command for a keeper
    Notifier, Standby, taken_descriptors                        the daemon's side
    refuse_descriptors                          a unix socket gets no descriptors
    why_unusable                                what to do about a path that cannot be used
    report_version, report_failure                              what a process that starts says of itself
"""

from kvservice.keeper.control import ControlSocketError, ask
from kvservice.keeper.keeper import Keeper, KeeperSettings, Log, become_keeper
from kvservice.keeper.notify import (
    HANDOVER,
    MANAGER_VARIABLES,
    READY,
    Notification,
    Notifier,
    Standby,
    report_failure,
    report_version,
    taken_descriptors,
)
from kvservice.keeper.private_paths import (
    MAX_SOCKET_PATH_BYTES,
    control_path,
    door_path,
    refuse_descriptors,
    why_unusable,
)
from kvservice.keeper.processes import Ending, Processes

__all__ = [
    "HANDOVER",
    "MANAGER_VARIABLES",
    "MAX_SOCKET_PATH_BYTES",
    "READY",
    "ControlSocketError",
    "Ending",
    "Keeper",
    "KeeperSettings",
    "Log",
    "Notification",
    "Notifier",
    "Processes",
    "Standby",
    "ask",
    "become_keeper",
    "control_path",
    "door_path",
    "refuse_descriptors",
    "report_failure",
    "report_version",
    "taken_descriptors",
    "why_unusable",
]
