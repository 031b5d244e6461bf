"""Benchmarks of the command `kvservice bench`, and the parts that all of them share: contenders that take turns,
quantiles, random tensors, tables, attention in float64, and processes of other programs."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from kvservice.environment import prepare_grpc
from kvservice.errors import KVServiceError
from kvservice.owned import OwnedProcess
from kvservice.pool.layout import DTYPES

prepare_grpc()  # before a module of this package imports gRPC

Array = npt.NDArray[Any]
# Larger arrays repeat this many random numbers. The count is odd, so that no two sequences or heads are equal.
RANDOM_NUMBERS = (1 << 22) + 7


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call by the host's clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def take_turns(contenders: Mapping[str, Callable[[], float]], rounds: int, warm_ups: int = 0) -> dict[str, list[float]]:
    """Return the seconds of every round by contender. A contender returns the seconds of its own work.

    The contenders run one after the other in each round, so that a slow machine affects all of them. The first
    `warm_ups` rounds do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_ups + rounds):
        for name, contender in contenders.items():
            taken = contender()
            if number >= warm_ups:
                seconds[name].append(taken)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def quantiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Return the figures `<name>_p50_s` and `<name>_p99_s`."""
    return {f"{name}_p50_s": statistics.median(seconds), f"{name}_p99_s": statistics.quantiles(seconds, n=100)[98]}


def normal(*shape: int, dtype: str = "bfloat16", rng: np.random.Generator | None = None) -> Array:
    """Return samples of N(0, 1), the same in every run if no generator is given."""
    array = np.empty(int(np.prod(shape)), DTYPES[dtype])
    numbers = (rng or np.random.default_rng(0)).standard_normal(min(array.size, RANDOM_NUMBERS), np.float32)
    some = numbers.astype(array.dtype)
    for start in range(0, array.size, some.size):
        array[start : start + some.size] = some[: array.size - start]
    return array.reshape(shape)


def table(title: str, labels: Iterable[str], figures: Iterable[str]) -> Table:
    """Return an empty table with columns of labels, aligned to the left, and of figures, aligned to the right."""
    made = Table(title=title, title_justify="left")
    for heading in labels:
        made.add_column(heading)
    for heading in figures:
        made.add_column(heading, justify="right")
    return made


# ---- attention in float64, which the outputs of kernels are compared with, on arrays of NumPy or of torch


def attention_rows(xp: ModuleType, query: Any, keys: Any, values: Any, hidden: Any, scale: float) -> Any:
    """Return the attention of some tokens of one sequence, float64 `[num_rows, num_heads, head_size]`.

    `xp` is numpy or torch. `query` float64 `[num_rows, num_heads, head_size]`, `keys` and `values` float64
    `[num_kv_heads, context, head_size]`, `hidden` bool `[num_rows, context]`: the keys that a row
    does not attend to.
    """
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = len(keys)
    grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    out = xp.empty_like(grouped)
    for head in range(num_kv_heads):
        logits = xp.where(hidden[:, None], -xp.inf, grouped[:, head] @ keys[head].T * scale)
        weights = xp.exp(logits - xp.amax(logits, -1)[..., None])
        out[:, head] = weights @ values[head] / weights.sum(-1)[..., None]
    return out.reshape(query.shape)


def largest_error(got: Any, expected: Any) -> float:
    """Return the largest |got - expected| / |expected| over all heads, float64 `[..., head_size]`."""
    square = ((got - expected) ** 2).sum(-1) / (expected**2).sum(-1)
    return math.sqrt(square.max())


def sampled(count: int, samples: int, extra: Sequence[int] = ()) -> list[int]:
    """Return about `samples` of `range(count)` at equal distances, with the last one, and those in `extra`."""
    return sorted({*range(0, count, max(1, -(-count // samples))), count - 1, *extra})


# ---- processes that a bench compares the daemon with

# A busy machine needs long to start a process.
START_S = 60.0


class PeerMissingError(KVServiceError):
    """The peer is not installed here, or does not start."""


@contextlib.contextmanager
def running(
    command: Sequence[str],
    ping: Callable[[], object],
    errors: tuple[type[Exception], ...],
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run a process, with more variables in its environment. It is ready when `ping` raises none of `errors`. Raises
    PeerMissingError."""
    try:
        added = os.environ | dict(environment or {})
        process = OwnedProcess(command, env=added, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise PeerMissingError(f"It does not start: {error}") from None
    try:
        await_answer(ping, errors)
        yield
    finally:
        process.terminate()
        process.wait()


def await_answer(ping: Callable[[], object], errors: tuple[type[Exception], ...]) -> None:
    """Repeat `ping` until it raises none of `errors`. Raises PeerMissingError after START_S."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            ping()
            return
        except errors as error:
            if time.monotonic() > deadline:
                raise PeerMissingError(f"It does not start: {error}") from None
            time.sleep(0.02)


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def connect(*ports: int) -> None:
    """Raises ConnectionRefusedError unless processes listen on these ports of the loopback interface."""
    for port in ports:
        socket.create_connection(("127.0.0.1", port)).close()
