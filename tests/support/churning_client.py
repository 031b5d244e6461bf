"""Short-lived clients, one after the other in each thread, until killed: `churning_client.py ADDRESS SEED COUNT`."""

from __future__ import annotations

import random
import sys
import threading

import doomed_client

from kvservice.client import KVClient, Session

TRANSPORTS = ("lane", "mapped", "region", "inline")
KINDS = [kind for kind in doomed_client.KINDS.values() if kind is not doomed_client.messages]


def gpu_regions(kv: Session) -> None:
    """Use tensors in memory of this process on the daemon's GPU. The memory is unregistered, or left until the session
    ends."""
    import torch

    memory = kv.create_region(8 << 20, device=0)
    token_ids = doomed_client.PREFIX + doomed_client.new_tokens(5)
    sequence = kv.allocate(token_ids)
    step = kv.open_step([sequence])
    stop = int(step.context_lens[0])
    content = doomed_client.content(kv.info, token_ids[stop - step.num_tokens : stop])
    query, key, value, out = (memory.array(content.shape[1:], kv.info.dtype, at << 20) for at in range(4))
    for layer in range(kv.info.num_layers):
        for tensor in (query, key, value):
            tensor[...] = torch.from_numpy(content[layer])
        step.extend(layer, query, key, -value, out=out)
    kv.free([sequence])
    if random.random() < 0.5:
        kv.unregister_region(memory)


def churn(address: str, seed: int) -> None:
    choose = random.Random(seed)
    while True:
        with (
            KVClient(address, transport=choose.choice(TRANSPORTS)) as client,
            client.session(detachable=choose.random() < 0.2) as kv,
        ):
            kinds = KINDS if kv.info.device == "cpu" else [*KINDS, gpu_regions, gpu_regions]
            for _ in range(choose.randrange(1, 4)):
                choose.choice(kinds)(kv)
            if choose.random() < 0.3:
                kv.detach()  # the client leaves without closing the session


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
