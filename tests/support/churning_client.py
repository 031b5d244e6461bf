"""Clients that come, work and go, each in a thread, until they are killed: `churning_client.py ADDRESS SEED COUNT`."""

from __future__ import annotations

import random
import sys
import threading

import doomed_client

from kvservice.client import KVClient

TRANSPORTS = ("lane", "mapped", "region", "inline")
KINDS = [kind for kind in doomed_client.KINDS.values() if kind is not doomed_client.messages]


def churn(address: str, seed: int) -> None:
    choose = random.Random(seed)
    while True:
        with (
            KVClient(address, transport=choose.choice(TRANSPORTS)) as client,
            client.session(detachable=choose.random() < 0.2) as kv,
        ):
            for _ in range(choose.randrange(1, 4)):
                choose.choice(KINDS)(kv)
            if choose.random() < 0.3:
                kv.detach()  # it goes without a word


def main() -> None:
    address, seed, num_clients = sys.argv[1:]
    threads = [
        threading.Thread(target=churn, args=(address, 1000 * int(seed) + n), daemon=True)
        for n in range(int(num_clients))
    ]
    for thread in threads:
        thread.start()
    print("works", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
