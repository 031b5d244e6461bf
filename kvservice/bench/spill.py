"""A prompt of 1,024 tokens whose blocks have left the pool: loading them, from the store's memory or from the disk,
against computing them.

A daemon and one client on a unix socket; the time is that of Allocate. Between two measurements other prompts push the
blocks out of the pool, and for the disk out of the store's memory too. Computing is one forward pass of the model by
transformers alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console

from kvservice.bench import medians, seconds_of, table, take_turns
from kvservice.bench.serve_inputs import build_model, shape_of
from kvservice.client import KVClient, Session
from kvservice.errors import InternalError
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder

NUM_TOKENS: Final = 1024
BLOCK_SIZE: Final = 16
ROUNDS, QUICK_ROUNDS = 9, 1
DTYPES: Final = {"cpu": "float32", "cuda": "bfloat16"}
ITEM_BYTES: Final = {"cpu": 4, "cuda": 2}
# Prompts that fit into the pool, and into the memory of the store where there is a disk.
POOL_PROMPTS, STORE_PROMPTS = 3, 6
# The time in which blocks that were evicted are saved; nobody waits for that in a daemon.
SAVE_S, LIMIT_S = 0.3, 60.0


class EvictedPrompt:
    """A daemon whose pool has lost a prompt at each `measure`."""

    def __init__(self, session: Session, num_others: int) -> None:
        """`num_others` prompts push one out of where it is not to be found."""
        info = session.info
        self._session, self._num_others = session, num_others
        self._kv_shape = (info.num_layers, NUM_TOKENS + 1, info.num_kv_heads, info.head_size)
        self._dtype = info.dtype
        self._numbers = itertools.count(1)
        self._prompt = self._new_prompt()
        self._fill(self._prompt)

    def _new_prompt(self) -> list[int]:
        rng = np.random.default_rng(next(self._numbers))
        tokens: list[int] = rng.integers(0, 1 << 30, NUM_TOKENS + 1).tolist()
        return tokens

    def _fill(self, prompt: list[int]) -> None:
        sequence = self._session.allocate(prompt)
        step = self._session.open_step([sequence])
        key = np.zeros((self._kv_shape[0], step.num_tokens, *self._kv_shape[2:]), self._dtype)
        step.write(key, key)
        self._session.free([sequence])
        time.sleep(SAVE_S)

    def measure(self) -> float:
        """Return the seconds of an Allocate that loads the whole prompt."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            for _ in range(self._num_others):
                self._fill(self._new_prompt())
            assert self._session.match_prefix(self._prompt) < NUM_TOKENS, "the pool has room for fewer prompts"
            start = time.perf_counter()
            sequence = self._session.allocate(self._prompt)
            seconds = time.perf_counter() - start
            num_cached = sequence.num_cached_tokens
            self._session.free([sequence])
            if num_cached == NUM_TOKENS:
                return seconds
            self._fill(self._prompt)
        raise InternalError("the blocks of the prompt did not come back")


def options_of(device: str, disk: str) -> dict[str, Any]:
    shape = shape_of(device)
    heads, size = shape["num_key_value_heads"], shape["hidden_size"] // shape["num_attention_heads"]
    prompt_bytes = NUM_TOKENS * shape["num_hidden_layers"] * 2 * heads * size * ITEM_BYTES[device]
    with_disk = {
        "store_gib": max(STORE_PROMPTS * prompt_bytes / 2**30, 1 / 64), "disk": disk, "disk_gib": 4.0,
        "disk_admission": "all", "weights": "bench",
    }  # fmt: skip
    return {
        "device": device,
        "num_layers": shape["num_hidden_layers"],
        "num_kv_heads": heads,
        "head_size": size,
        "dtype": DTYPES[device],
        "block_size": BLOCK_SIZE,
        "num_blocks": POOL_PROMPTS * NUM_TOKENS // BLOCK_SIZE,
        "max_sequence_tokens": 2 * NUM_TOKENS,
        "swap_space_gib": 0.0,
        "prefill_tokens_per_s": 1.0,  # loads whatever it takes
    } | (with_disk if disk else {"store_gib": max(64 * prompt_bytes / 2**30, 1 / 64)})


def memcpy(num_bytes: int) -> Callable[[], float]:
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return lambda: seconds_of(lambda: np.copyto(target, source))


def forward(device: str) -> Callable[[], float]:
    """Return a forward pass over the prompt."""
    model = build_model(DTYPES[device], device)
    tokens = torch.arange(NUM_TOKENS, device=device)[None] % model.config.vocab_size

    def once() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False, logits_to_keep=1)
        if device == "cuda":
            torch.cuda.synchronize()

    return lambda: seconds_of(once)


def run(device: str = "cpu", quick: bool = False, directory: str | None = None) -> dict[str, Any]:
    """Return `num_bytes` of the blocks, and the median seconds of `memory`, `disk`, `memcpy` and `compute`."""
    with OwnedFolder("kvservice-spill-", directory) as disk:
        (disk / "kv").mkdir()
        from_memory, from_disk = options_of(device, ""), options_of(device, str(disk / "kv"))
        with (
            Daemon(**from_memory) as first, KVClient(first.address) as client, client.session() as session,
            Daemon(**from_disk) as second, KVClient(second.address) as other, other.session() as second_session,
        ):  # fmt: skip
            info = session.info
            token_bytes = info.num_layers * 2 * info.num_kv_heads * info.head_size * ITEM_BYTES[device]
            num_bytes = NUM_TOKENS * token_bytes
            contenders = {
                "memory": EvictedPrompt(session, POOL_PROMPTS + 1).measure,
                "disk": EvictedPrompt(second_session, POOL_PROMPTS + STORE_PROMPTS + 2).measure,
                "memcpy": memcpy(num_bytes),
                "compute": forward(device),
            }
            rounds = QUICK_ROUNDS if quick else ROUNDS
            return {"num_bytes": num_bytes} | medians(take_turns(contenders, rounds, warm_ups=1))


def rows_of(results: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for name, label in (
        ("compute", "computed by the model"), ("disk", "loaded from the disk"), ("memory", "loaded from the store"),
        ("memcpy", "copied by memcpy"),
    ):  # fmt: skip
        seconds = results[name]
        speed = "" if name == "compute" else f"{results['num_bytes'] / seconds / 1e9:.2f}"
        yield label, f"{seconds * 1e3:.2f}", speed, f"{results['compute'] / seconds:.1f}"


def render(results: dict[str, Any], console: Console) -> None:
    title = f"A prompt of {NUM_TOKENS} tokens, {results['num_bytes'] / 2**20:.0f} MiB of K/V"
    rows = table(title, ("its blocks are",), ("ms", "GB/s", "times as fast as computing"))
    for row in rows_of(results):
        rows.add_row(*row)
    console.print(rows)
