"""An inference engine without a model: what an engine asks of the daemon, with random numbers for its tensors.

ADDRESS is unix:///path/of.sock or host:port. For a daemon with TLS the environment names its CA's certificate,
KVSERVICE_TLS_CA, and holds a token, KVSERVICE_TOKEN.

Two tenants send requests. Those of a tenant begin alike, so part of each prompt is in the prefix cache; some are
answered twice, by a fork. In a small pool they are more than it holds, so that the youngest wait in the swap tier.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import deque

import ml_dtypes  # noqa: F401  gives NumPy the type that bfloat16 names
import numpy as np

from kvservice.client import KVClient, Sequence, Session
from kvservice.errors import (
    ConnectionLostError,
    DrainingError,
    OutOfBlocksError,
    SequenceLostError,
    StaleStepError,
    UnknownSessionError,
)

VOCABULARY = 32_000
TENANTS = ("chat", "search")
STEP_INTERVAL_S = 0.5
# Of a tenant, at one time.
MAX_REQUESTS = 20
MAX_PROMPT_TOKENS = 512
MAX_ANSWER_TOKENS = 64


class Engine:
    """Continuous batching: each step admits what fits, and gives every running sequence a token."""

    def __init__(self, kv: Session, seed: int) -> None:
        self.kv = kv
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.prompt_tokens = min(MAX_PROMPT_TOKENS, kv.info.num_blocks * kv.info.block_size // 8)
        self.system_prompt = self.tokens(self.prompt_tokens // 4)
        # Running sequences, the oldest first, with the lengths at which they are complete; and those in the swap tier.
        self.running: deque[tuple[Sequence, int]] = deque()
        self.swapped: deque[tuple[Sequence, int]] = deque()

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(VOCABULARY), k=count)

    def tensors(self, num_tokens: int) -> np.ndarray:
        """Query, key and value of one layer: `[3, num_tokens, heads, head_size]`."""
        shape = (3, num_tokens, self.kv.info.num_kv_heads, self.kv.info.head_size)
        return self.numbers.standard_normal(shape, dtype=np.float32).astype(self.kv.info.dtype)

    def step(self) -> None:
        self.resume()
        if len(self.running) + len(self.swapped) < MAX_REQUESTS:
            self.admit()
        self.decode()
        done = [entry for entry in self.running if entry[0].length >= entry[1]]
        if done:
            self.kv.free([sequence for sequence, _ in done])
        self.running = deque(entry for entry in self.running if entry not in done)

    def admit(self) -> None:
        """Start a request: its prompt is computed, but for what the prefix cache has."""
        prompt = self.system_prompt + self.tokens(self.random.randint(1, self.prompt_tokens))
        try:
            sequence = self.kv.allocate(prompt)
        except OutOfBlocksError:
            return  # it comes again with the next step
        prefill = self.kv.open_step([sequence])
        for layer in range(self.kv.info.num_layers):
            prefill.extend(layer, *self.tensors(prefill.num_tokens))
        complete = len(prompt) + self.random.randint(1, MAX_ANSWER_TOKENS)
        self.running.append((sequence, complete))
        if self.random.random() < 0.3:
            self.running.append((self.kv.fork(sequence), complete))

    def decode(self) -> None:
        """One more token for each running sequence; if there are no blocks for them, without the youngest."""
        while self.running:
            sequences = [sequence for sequence, _ in self.running]
            try:
                step = self.kv.append(sequences, self.tokens(len(sequences)))
            except OutOfBlocksError:
                self.preempt()
                continue
            for layer in range(self.kv.info.num_layers):
                step.decode(layer, *self.tensors(step.num_tokens))
            return

    def preempt(self) -> None:
        entry = self.running.pop()
        try:
            self.kv.swap_out([entry[0]])
            self.swapped.append(entry)
        except OutOfBlocksError:
            self.kv.free([entry[0]])  # the swap tier is full as well: the request is given up

    def resume(self) -> None:
        """Bring back the sequence that has waited longest, if there is room."""
        if self.swapped:
            try:
                self.kv.swap_in([self.swapped[0][0]])
            except OutOfBlocksError:
                return
            self.running.append(self.swapped.popleft())


def work(address: str) -> None:
    ca, token = os.environ.get("KVSERVICE_TLS_CA"), os.environ.get("KVSERVICE_TOKEN", "")
    with KVClient(address, tls=ca, token=token, connect_timeout_s=60) as client:
        engines = [Engine(client.session(tenant, tenant=tenant), seed) for seed, tenant in enumerate(TENANTS)]
        print(f"{len(engines)} sessions over {engines[0].kv.transport}", flush=True)
        try:
            while True:
                for engine in engines:
                    engine.step()
                time.sleep(STEP_INTERVAL_S)
        finally:
            for engine in engines:
                engine.kv.close()


def main(address: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # sessions are closed on the way out, not lost
    while True:
        try:
            work(address)
        except (ConnectionLostError, DrainingError, SequenceLostError, StaleStepError, UnknownSessionError) as error:
            # The daemon has ended in the middle of a step, or its K/V with it. An engine that goes on with the
            # sequences that are left is kvservice.engines.
            print(f"starting anew: {error}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", metavar="ADDRESS", help="[%(default)s]")
    main(parser.parse_args().address)
