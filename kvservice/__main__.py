"""The entry of the command. An interrupt while it is imported ends it without a word, as it ends a native program."""

import os
import signal
import sys


def run() -> None:
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["serve"] and "NOTIFY_SOCKET" in os.environ:
        from kvservice.environment import missing_of_daemon

        # Before the imports, which take long, and not after them: clients may wait.
        if missing := missing_of_daemon(os.environ):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | missing)
    from kvservice.cli import main

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    run()
