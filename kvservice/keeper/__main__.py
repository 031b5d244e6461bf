"""The keeper's process. `kvservice serve` executes it with its settings as the only argument."""

from __future__ import annotations

import sys

from kvservice.keeper.control import ControlSocketError
from kvservice.keeper.keeper import KeeperSettings, Loop


def main() -> int:
    try:
        return Loop(KeeperSettings.from_json(sys.argv[1])).run()
    except ControlSocketError as error:
        print(f"Error: unix_socket: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
