"""A client that works until it is killed: `doomed_client.py ADDRESS KIND SEED`. The seed selects the transport. The
client prints a line when it has started to work.

K and V of a token depend only on its id and the layer, so that sequences of different clients can share blocks and any
reader knows the expected content of a block. A client never has more than 6 blocks of the pool at the same time.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvservice.client import KVClient, PoolInfo, Session, Step

PREFIX = list(range(1, 9))  # two full blocks that all clients share


def content(info: PoolInfo, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the content of tokens, for K or V: `[num_layers, num_tokens, num_kv_heads, head_size]`."""
    values = np.asarray(token_ids, np.float32) + np.arange(info.num_layers, dtype=np.float32)[:, None] / 4
    shape = (*values.shape, info.num_kv_heads, info.head_size)
    return np.broadcast_to(values[:, :, None, None], shape).astype(info.dtype)


def fill(step: Step, info: PoolInfo, token_ids: Sequence[int]) -> None:
    """Write all layers of a step over one sequence with these tokens in one call."""
    stop = int(step.context_lens[0])
    kv = content(info, token_ids[stop - step.num_tokens : stop])
    step.write(kv, -kv)


def by_layer(step: Step, info: PoolInfo, token_ids: Sequence[int], heads_per_kv_head: int = 1) -> None:
    stop = int(step.context_lens[0])
    kv = content(info, token_ids[stop - step.num_tokens : stop])
    for layer in range(info.num_layers):
        step.extend(layer, np.tile(kv[layer], (1, heads_per_kv_head, 1)), kv[layer], -kv[layer])


def new_tokens(count: int) -> list[int]:
    return [random.randrange(1000, 1 << 20) for _ in range(count)]


def layers(kv: Session) -> None:
    token_ids = PREFIX + new_tokens(5)
    sequence = kv.allocate(token_ids)
    by_layer(kv.open_step([sequence]), kv.info, token_ids)
    for token_id in new_tokens(6):
        token_ids.append(token_id)
        by_layer(kv.append([sequence], [token_id]), kv.info, token_ids)
    kv.free([sequence])


def forks(kv: Session) -> None:
    token_ids = PREFIX + new_tokens(2)
    parent = kv.allocate(token_ids)
    fill(kv.open_step([parent]), kv.info, token_ids)
    children = kv.fork_batch([parent, parent])
    for child in children:
        token_id = new_tokens(1)
        fill(kv.append([child], token_id), kv.info, token_ids + token_id)
    kv.truncate(parent, 7)
    kv.free([parent, *children])


def swaps(kv: Session) -> None:
    token_ids = PREFIX + new_tokens(8)
    sequence = kv.allocate(token_ids)
    fill(kv.open_step([sequence]), kv.info, token_ids)
    for _ in range(3):
        kv.swap_out([sequence])
        kv.swap_in([sequence])
    kv.swap_out([sequence])
    kv.free([sequence])


def messages(kv: Session) -> None:
    """Send and receive megabytes, so that many kills come in the middle of a message."""
    token_ids = new_tokens(16)
    sequence = kv.allocate(token_ids)
    by_layer(kv.open_step([sequence]), kv.info, token_ids, heads_per_kv_head=800)
    kv.free([sequence])


def pins(kv: Session) -> None:
    token_ids = new_tokens(9)
    sequence = kv.allocate(token_ids)
    fill(kv.open_step([sequence]), kv.info, token_ids)
    kv.pin(token_ids, ttl_s=600)


def regions(kv: Session) -> None:
    """Use shared memory for every tensor. The region is unregistered during a call, or left until the session ends."""
    memory = kv.create_region(1 << 20)
    token_ids = PREFIX + new_tokens(5)
    sequence = kv.allocate(token_ids)
    step = kv.open_step([sequence])
    stop = int(step.context_lens[0])
    kv_content = content(kv.info, token_ids[stop - step.num_tokens : stop])
    shape = kv_content.shape[1:]
    query, key, value, out = (memory.array(shape, kv.info.dtype, at << 18) for at in range(4))
    for layer in range(kv.info.num_layers):
        query[:] = key[:] = kv_content[layer]
        value[:] = -kv_content[layer]
        step.extend(layer, query, key, value, out=out)
    kv.free([sequence])
    kv.unregister_region(memory)


KINDS: dict[str, Callable[[Session], None]] = {
    kind.__name__: kind for kind in (layers, forks, swaps, messages, pins, regions)
}


def sessions(client: KVClient, kind: Callable[[Session], None]) -> Iterator[Session]:
    """Yield one session for all rounds, but a new one each time for `pins`, which frees nothing before its session
    ends."""
    while True:
        with client.session(kind.__name__) as kv:
            yield kv
            while kind is not pins:
                yield kv


def main() -> None:
    address, kind, seed = sys.argv[1:]
    random.seed(seed)
    with KVClient(address, transport=random.choice(("lane", "mapped", "region", "inline"))) as client:
        work = sessions(client, KINDS[kind])
        for kv, lap in zip(work, itertools.count()):
            KINDS[kind](kv)
            if lap == 0:
                print("works", flush=True)


if __name__ == "__main__":
    main()
