"""The keeper: which process serves, which descriptors it has given, and what follows when it ends.

`Keeper` is a state machine: `Loop` tells it about notifications, ends of processes, requests and the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from kvservice.keeper.control import ControlSocket, ControlSocketError, Report, Upgrade, Upgraded, UpgradePhase
from kvservice.keeper.notify import (
    HANDOVER,
    READY,
    STANDBY_READY,
    STANDBY_SAYS,
    VERSION,
    BadNotificationError,
    Notification,
    NotifySocket,
    is_name,
    send_go,
)
from kvservice.keeper.processes import CrashLoopError, Ending, Processes, Restarts

# ---- the settings that `kvservice serve` passes to the keeper, which it executes in its own place


@dataclass(frozen=True)
class KeeperSettings:
    """`command` starts the daemon. `control_path` is the path of the control socket, or empty for none.

    `drain_s` is how long a daemon that hands over may drain. `log_level` and `log_format` are those of
    the daemon.
    """

    command: Sequence[str]
    control_path: str
    drain_s: float
    log_level: str
    log_format: str

    @classmethod
    def from_json(cls, text: str) -> KeeperSettings:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)


def become_keeper(settings: KeeperSettings, environ: Mapping[str, str]) -> NoReturn:
    """Execute the keeper in place of this process. Its daemon gets the variables `environ`."""
    # -P keeps a checkout in the working directory from shadowing the installed package.
    arguments = [sys.executable, "-P", "-m", "kvservice.keeper", settings.to_json()]
    os.execve(sys.executable, arguments, dict(environ))


# ---- the keeper's lines on stderr, which the daemon's log goes to as well


# The limit on lines about messages that the keeper ignores: anyone on the host can send them.
_LINES_PER_WINDOW = 10
_WINDOW_S = 60.0
_LEVELS = ("debug", "info", "warning", "error")


class Log:
    def __init__(
        self,
        log_level: str,
        log_format: str,
        write: Callable[[bytes], object] = lambda line: os.write(sys.stderr.fileno(), line),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log_level` is debug, info, warning or error, and `log_format` is text or json, as for the daemon."""
        self._lowest = _LEVELS.index(log_level)
        self._as_json = log_format == "json"
        self._write, self._clock = write, clock
        self._window_end, self._lines = 0.0, 0

    def warning(self, message: str) -> None:
        self._line("warning", message)

    def error(self, message: str) -> None:
        self._line("error", message)

    def info(self, message: str) -> None:
        self._line("info", message)

    def ignored(self, message: str) -> None:
        """Log that something was ignored, at most 10 times a minute."""
        if self._clock() >= self._window_end:
            self._window_end, self._lines = self._clock() + _WINDOW_S, 0
        self._lines += 1
        if self._lines <= _LINES_PER_WINDOW:
            self.warning(message)

    def _line(self, level: str, message: str) -> None:
        if _LEVELS.index(level) < self._lowest:
            return
        now = time.time()
        milliseconds = int(now % 1 * 1000)
        if self._as_json:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
            entry = {"time": f"{stamp}.{milliseconds:03}Z", "level": level.upper()}
            text = json.dumps(entry | {"logger": "kvservice.keeper", "message": message}, allow_nan=False)
        else:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            text = f"{stamp},{milliseconds:03} {level.upper()} kvservice.keeper: {message}"
        try:
            self._write(f"{text}\n".encode())
        except OSError:
            # Nobody reads stderr any more. The daemon must live on without the line.
            return


# ---- the descriptors that the keeper holds for the daemon, by name


# A daemon stores about fifteen: the memory files, the pool of a GPU, and its listening sockets.
MAX_DESCRIPTORS = 64


class DescriptorStore:
    """Owns the descriptors that are put into it."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}

    @property
    def kept(self) -> Mapping[str, int]:
        """The descriptors by name."""
        return self._kept

    def put(self, name: str, descriptor: int) -> bool:
        """Keep the descriptor in place of the one of this name. Closes it and returns False if the store is full."""
        if name not in self._kept and len(self._kept) >= MAX_DESCRIPTORS:
            os.close(descriptor)
            return False
        self.remove(name)
        self._kept[name] = descriptor
        return True

    def remove(self, name: str) -> None:
        """Close the descriptor of this name, if there is one."""
        if (descriptor := self._kept.pop(name, None)) is not None:
            os.close(descriptor)

    @property
    def has_state(self) -> bool:
        """Whether there is more than listening sockets."""
        return any(not _is_socket(descriptor) for descriptor in self._kept.values())

    def discard_state(self) -> None:
        """Close all descriptors but those of sockets: an address that is let go of can be taken by others."""
        for name, descriptor in [*self._kept.items()]:
            if not _is_socket(descriptor):
                self.remove(name)


def _is_socket(descriptor: int) -> bool:
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)


# ---- the keeper


# Exit statuses of the daemon. After a device fault the content of the pool is lost.
DEVICE_FAULT = 70
# The daemon exits with this if its command line has an unknown option, as it would again. A keeper that holds state
# waits until that is mended.
USAGE_ERROR = 2
# The time that a draining daemon may take beyond its own limit before it is killed.
DRAIN_MARGIN_S = 10.0
# The same for one that is asked to stop, which also closes its disk.
STOP_MARGIN_S = 60.0
# The time until the next attempt to start a process for which there was no memory.
RETRY_S = 1.0
# The time between attempts once the daemon has failed too often, while the keeper holds its state.
HELD_RETRY_S = 10.0
MAX_VERSION_CHARACTERS = 64
MAX_STATUS_CHARACTERS = 500
# How many of the latest processes that never served are reported to the next one.
MAX_ENDED_EARLY = 100


@dataclass
class _Daemon:
    pid: int
    ready_at: float | None = None
    version: str = "unknown"
    # The status that the process last reported.
    status: str = ""
    hands_over: bool = False

    def served_s(self, now: float) -> float | None:
        return None if self.ready_at is None else now - self.ready_at


class Keeper:
    """`exit_status` is set once the keeper has to exit."""

    def __init__(
        self,
        settings: KeeperSettings,
        processes: Processes,
        environ: Mapping[str, str],
        clock: Callable[[], float],
        log: Log,
    ) -> None:
        """`environ` are the variables of the daemon, among them NOTIFY_SOCKET."""
        self._settings, self._processes, self._environ = settings, processes, environ
        self._clock, self._log = clock, log
        self._store = DescriptorStore()
        self._restarts = Restarts()
        self._daemon: _Daemon | None = None
        self._standby: _Daemon | None = None
        self._upgrade: Upgrade | None = None
        self._start_at: float | None = None
        self._num_starts = 0
        self._has_served = False
        self._stopping = self._resetting = False
        # When a daemon that is asked to stop is killed.
        self._kill_at: float | None = None
        # The last status of the last process.
        self._last_status = ""
        # The end of the last process that served: how and when it was.
        self._ended: dict[str, str] = {}
        # The ends of processes that never served, since the last one that did.
        self._ended_early: list[str] = []
        self.exit_status: int | None = None

    # ---- what the loop tells it

    def start(self) -> None:
        """Start the daemon. If there is no memory for the process, try again after a second."""
        try:
            self._daemon = _Daemon(self._started(None))
        except OSError as error:
            self._log.warning(f"the daemon cannot be started: {error}; the keeper tries again in {RETRY_S:g} s")
            self._start_at = self._clock() + RETRY_S
            return
        self._start_at = None
        self._num_starts += 1

    def notified(self, notification: Notification) -> None:
        """Obey a notification of the daemon or of the standby process, and ignore those of others. Takes over its
        descriptors."""
        for process in (self._daemon, self._standby):
            if process is not None and process.pid == notification.pid:
                self._obey(process, notification)
                return
        notification.close()
        self._log.ignored(f"a notification of process {notification.pid} is ignored")

    def ended(self, pid: int, ending: Ending) -> None:
        """A child process has ended. Processes that the keeper has not started are ignored."""
        if self._standby is not None and pid == self._standby.pid:
            said = f", {self._standby.status}" if self._standby.status else ""
            self._standby = None
            self._fail(f"the new process ended: {ending}{said}")
        elif self._daemon is not None and pid == self._daemon.pid:
            daemon, self._daemon = self._daemon, None
            self._daemon_ended(daemon, ending)

    def stop(self) -> None:
        """Ask the daemon to stop, and exit when it has. One that hangs is killed after its time to drain."""
        self._stopping = True
        self._fail("the daemon is asked to stop")
        if self._daemon is None:
            self.exit_status = 0
        else:
            self._processes.signal(self._daemon.pid, signal.SIGTERM)
            if self._kill_at is None:
                self._kill_at = self._clock() + self._settings.drain_s + STOP_MARGIN_S

    def reset(self) -> str:
        """Let go of the state, and start the daemon empty. Its process, if there is one, is killed. Returns what
        happens, in words."""
        if self._stopping:
            return "the daemon is stopping"
        self._log.warning("reset: the state is let go of, all sessions and K/V are lost")
        self._fail("the daemon is reset")
        if self._daemon is None:
            self._begin_anew()
            return "the daemon starts empty"
        self._resetting = True
        self._processes.signal(self._daemon.pid, signal.SIGKILL)
        return "the daemon's process is killed, and the next one starts empty"

    def upgrade(self, report: Report) -> None:
        """Have a new process take over from the daemon. `report` gets the progress and the result."""
        reason = self._no_upgrade()
        if reason:
            report(Upgraded(False, reason).to_json())
            return
        assert self._daemon is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                self._standby = _Daemon(self._started(theirs.fileno()))
            except OSError as error:
                ours.close()
                report(Upgraded(False, f"the new process cannot be started: {error}").to_json())
                return
        self._log.info(f"upgrade: process {self._standby.pid} starts")
        self._upgrade = Upgrade(self._standby.pid, ours, self._daemon.version, self._clock(), report)

    def status(self) -> dict[str, Any]:
        """Return what the control socket reports."""
        return {
            "pid": None if self._daemon is None else self._daemon.pid,
            "ready": self._daemon is not None and self._daemon.ready_at is not None,
            "status": self._last_status if self._daemon is None else self._daemon.status,
            "starts_in_s": None if self._start_at is None else max(0.0, self._start_at - self._clock()),
            "version": None if self._daemon is None else self._daemon.version,
            "restarts": max(0, self._num_starts - 1),
            "descriptors": sorted(self._store.kept),
            "upgrade": None if self._upgrade is None else self._upgrade.phase.value,
        }

    @property
    def descriptors(self) -> Mapping[str, int]:
        """The kept descriptors by name."""
        return self._store.kept

    def wait_s(self) -> float | None:
        """Return in how many seconds `on_time` has something to do, or None if only an event can bring that."""
        times = [self._start_at, self._kill_at, None if self._upgrade is None else self._upgrade.deadline]
        due = [time for time in times if time is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def on_time(self) -> None:
        """Do what is due."""
        now = self._clock()
        if self._start_at is not None and now >= self._start_at:
            self.start()
        if self._kill_at is not None and now >= self._kill_at and self._daemon is not None:
            self._kill_at = None
            self._log.error(f"the daemon (process {self._daemon.pid}) does not stop in time and is killed")
            self._processes.signal(self._daemon.pid, signal.SIGKILL)
        upgrade = self._upgrade
        if upgrade is not None and upgrade.deadline is not None and now >= upgrade.deadline:
            if upgrade.phase is UpgradePhase.PREPARING:
                self._fail("the new process was not ready in time")
            elif self._daemon is not None:
                upgrade.deadline = None
                upgrade.disorder = "the old process did not hand over in time and was killed"
                self._processes.signal(self._daemon.pid, signal.SIGKILL)

    # ---- notifications

    def _obey(self, process: _Daemon, notification: Notification) -> None:
        values, descriptors = notification.values, notification.descriptors
        if notification.says("FDSTORE=1") and process is self._daemon:
            self._keep(values.get("FDNAME", ""), descriptors)
            return
        # After a barrier, too, this is the answer.
        notification.close()
        if version := values.get(VERSION):
            process.version = version[:MAX_VERSION_CHARACTERS]
        process.status = values.get("STATUS", process.status)[:MAX_STATUS_CHARACTERS]
        if process is self._standby:
            if STANDBY_SAYS in values:
                self._standby_says(values[STANDBY_SAYS])
            return
        if notification.says("FDSTOREREMOVE=1"):
            self._store.remove(values.get("FDNAME", ""))
        if notification.says(HANDOVER):
            process.hands_over = True
        if notification.says(READY) and process.ready_at is None:
            self._ready(process)

    def _keep(self, name: str, descriptors: tuple[int, ...]) -> None:
        if len(descriptors) != 1 or not is_name(name):
            self._log.ignored(f"FDSTORE with {len(descriptors)} descriptors, named {name!r}, is ignored")
            for descriptor in descriptors:
                os.close(descriptor)
        elif not self._store.put(name, descriptors[0]):
            self._log.ignored(f"{name} is not kept: there are {MAX_DESCRIPTORS} descriptors")

    def _ready(self, daemon: _Daemon) -> None:
        daemon.ready_at = self._clock()
        self._has_served = True
        self._ended_early.clear()
        if self._upgrade is not None and self._upgrade.phase is UpgradePhase.TAKING_OVER:
            result = self._upgrade.served(daemon.ready_at, daemon.version)
            self._upgrade = None
            self._log.info(result.message)

    # ---- ends

    def _daemon_ended(self, daemon: _Daemon, ending: Ending) -> None:
        self._last_status = daemon.status
        if ending.exit_status == DEVICE_FAULT:
            self._store.discard_state()
        if self._stopping:
            self.exit_status = ending.exit_status
            return
        in_order = ending.exit_status == 0 and daemon.hands_over
        how = "upgrade" if in_order else str(ending)
        if daemon.ready_at is None:
            self._ended_early.append(how)
            del self._ended_early[:-MAX_ENDED_EARLY]
        else:
            self._ended = {"KVSERVICE_ENDED": how, "KVSERVICE_ENDED_AT": repr(self._clock())}
        if self._resetting:
            self._begin_anew()
            return
        if self._upgrade is not None and self._upgrade.phase is UpgradePhase.DRAINING:
            self._go(self._upgrade, ending, in_order)
            return
        taking_over = self._upgrade is not None and self._upgrade.phase is UpgradePhase.TAKING_OVER
        self._fail(f"the {'new process' if taking_over else 'daemon'} ended before it was complete: {ending}")
        if in_order:
            self._start_at = self._clock()
        elif self._is_final(ending):
            self.exit_status = ending.exit_status
        else:
            self._restart(daemon, ending)

    def _is_final(self, ending: Ending) -> bool:
        """Return whether the daemon ended because it was asked to, or because it cannot run as it is configured."""
        if ending.exit_status == 0:
            return True
        at_first_start = not self._has_served and not ending.signal and ending.exit_status != DEVICE_FAULT
        return at_first_start or (ending.exit_status == USAGE_ERROR and not self._store.has_state)

    def _restart(self, daemon: _Daemon, ending: Ending) -> None:
        now = self._clock()
        try:
            delay_s = self._restarts.delay_s(ending, daemon.served_s(now))
        except CrashLoopError as error:
            if not self._store.has_state:
                self._log.error(f"gives up: {error}")
                self.exit_status = ending.exit_status
                return
            delay_s = HELD_RETRY_S
            self._log.error(
                f"{error}; its state stays held. `kvservice reset` lets go of it, and starts an empty daemon"
            )
        lost = "; the device failed, so nothing is kept" if ending.exit_status == DEVICE_FAULT else ""
        when = f"in {delay_s:g} s" if delay_s else "now"
        self._log.warning(f"the daemon (process {daemon.pid}) ended: {ending}{lost}; it starts again {when}")
        self._start_at = now + delay_s

    def _begin_anew(self) -> None:
        """Start the daemon without the state of the one before."""
        self._resetting = False
        self._store.discard_state()
        self._restarts = Restarts()
        self._start_at = self._clock()

    # ---- upgrades

    def _no_upgrade(self) -> str:
        """Return why an upgrade cannot begin, or an empty string."""
        if self._upgrade is not None:
            return f"an upgrade is in progress: {self._upgrade.phase.value}"
        if self._stopping:
            return "the daemon is stopping"
        if self._resetting:
            return "the daemon is being reset"
        if self._daemon is None or self._daemon.ready_at is None:
            return "the daemon is starting"
        return ""

    def _standby_says(self, text: str) -> None:
        """The new process is ready to take over, or says why it cannot."""
        upgrade = self._upgrade
        if upgrade is None or upgrade.phase is not UpgradePhase.PREPARING or self._daemon is None:
            return
        if text != STANDBY_READY:
            upgrade.refusal = f"the new process cannot take over: {text}"
            self._fail(upgrade.refusal)
            return
        upgrade.drain(self._clock(), self._settings.drain_s + DRAIN_MARGIN_S)
        self._processes.signal(self._daemon.pid, signal.SIGUSR1)

    def _go(self, upgrade: Upgrade, ending: Ending, in_order: bool) -> None:
        """The old daemon has ended: the new process takes over."""
        assert self._standby is not None
        if not in_order and not upgrade.disorder:
            upgrade.disorder = f"the old process ended: {ending}"
        try:
            send_go(upgrade.channel, self._store.kept, self._about_the_end())
        except OSError as error:
            self._fail(f"the new process does not answer: {error}")
            self._start_at = self._clock()
            return
        self._num_starts += 1
        self._daemon, self._standby = self._standby, None
        upgrade.take_over()

    def _fail(self, reason: str) -> None:
        """End the upgrade, if there is one. A process that waits for its turn is killed."""
        if self._standby is not None:
            self._processes.signal(self._standby.pid, signal.SIGKILL)
            self._standby = None
        if self._upgrade is not None:
            upgrade, self._upgrade = self._upgrade, None
            self._log.warning(f"upgrade: {upgrade.failed(reason).message}")

    # ---- processes

    def _started(self, standby: int | None) -> int:
        """Start a process with duplicates of all descriptors, and return its id."""
        environ = {**self._environ, **self._about_the_end()}
        return self._processes.start(self._settings.command, environ, self._store.kept, standby)

    def _about_the_end(self) -> dict[str, str]:
        early = {"KVSERVICE_ENDED_EARLY": ",".join(self._ended_early)} if self._ended_early else {}
        return {**self._ended, **early, "KVSERVICE_RESTARTS": str(self._num_starts)}


# ---- the keeper's event loop: signals, notifications, ends of processes, control requests and the time


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
UPGRADING = signal.SIGHUP
# These signals must not end the keeper.
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
# More messages than these can only be a flood. The kernel queues fewer.
MAX_MESSAGES_AT_ONCE = 1000


class Loop:
    def __init__(self, settings: KeeperSettings) -> None:
        """Raises ControlSocketError."""
        self._log = Log(settings.log_level, settings.log_format)
        self._selector = selectors.DefaultSelector()
        self._signals = _SignalPipe()
        self._selector.register(self._signals, selectors.EVENT_READ, self._take_signals)
        # A container may have no other folders that can be written to.
        folder = os.path.dirname(settings.control_path) or "/dev/shm"
        try:
            self._notifications = NotifySocket(folder)
        except OSError as error:
            raise ControlSocketError(f"cannot make a socket in {folder}: {error.strerror}") from None
        self._selector.register(self._notifications, selectors.EVENT_READ, lambda: None)
        self._processes = Processes()
        environ = os.environ | {"NOTIFY_SOCKET": self._notifications.address, "FDSTORE": str(MAX_DESCRIPTORS)}
        self._keeper = Keeper(settings, self._processes, environ, time.monotonic, self._log)
        self._control: ControlSocket | None = None
        if settings.control_path:
            keeper = self._keeper
            self._control = ControlSocket(
                settings.control_path, self._selector, keeper.status, keeper.upgrade, keeper.reset
            )

    def run(self) -> int:
        """Run until the keeper has to exit. Returns the exit status."""
        with contextlib.ExitStack() as cleanup:
            if self._control is not None:
                cleanup.callback(self._control.close)
            self._keeper.start()
            while self._keeper.exit_status is None:
                for key, _ in self._selector.select(self._keeper.wait_s()):
                    key.data()
                self._take_ends()
                self._keeper.on_time()
            return self._keeper.exit_status

    def _take_signals(self) -> None:
        for number in self._signals.received():
            if number in STOPPING:
                self._keeper.stop()
            elif number == UPGRADING:
                self._keeper.upgrade(self._log_answer)

    def _log_answer(self, answer: dict[str, Any]) -> None:
        """Log a refusal. The keeper itself logs the result of an upgrade that has begun."""
        if answer["event"] == "result" and answer["pause_s"] is None:
            self._log.warning(f"SIGHUP: {answer['message']}")

    def _take_ends(self) -> None:
        """Read the notifications, then reap. What a process has sent before its end is known when its end is."""
        ended = self._processes.reap()
        for _ in range(MAX_MESSAGES_AT_ONCE):
            try:
                notification = self._notifications.receive()
            except BadNotificationError as error:
                self._log.ignored(f"{error}: ignored")
                continue
            if notification is None:
                break
            self._keeper.notified(notification)
        for pid, ending in ended:
            self._keeper.ended(pid, ending)


class _SignalPipe:
    """Turns signals into bytes to read."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        for number in (*STOPPING, UPGRADING, *IGNORED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        return self._reading.fileno()

    def received(self) -> bytes:
        """Return the numbers of the signals that have arrived."""
        try:
            return self._reading.recv(4096)
        except BlockingIOError:
            return b""
