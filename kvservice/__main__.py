"""The entry of the command. An interrupt while it is imported ends it without a word, as it ends a native program."""

import signal


def run() -> None:
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvservice.cli import main

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    run()
