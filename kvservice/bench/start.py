"""Measures how long a daemon with a block store takes until it serves, until all memory of the store is there, and how
long calls wait meanwhile.

A client pings from the moment the daemon serves. The daemon has a small pool, so that the store is what counts.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from kvservice.auth.client import NO_CREDENTIALS
from kvservice.bench.harness import seconds_of, table
from kvservice.bench.pinger import Pinger
from kvservice.health import ask
from kvservice.launch import Daemon, StartError
from kvservice.pool.sealed import num_processors

POOL: dict[str, Any] = {"num_blocks": 32, "swap_space_gib": 0.0}
START_TIMEOUT_S, ASK_S = 600.0, 5.0
# Between two looks at how much memory is there, and the time of the pings with which those before are compared.
LOOK_S, AFTER_S = 0.1, 2.0


@dataclass(frozen=True)
class StartOptions:
    store_gib: float = 4.0


def start_once(store_gib: float) -> dict[str, Any]:
    """Start a daemon. Returns the seconds until it serves and until its memory is complete, and the longest pings, None
    if none ended in that time."""
    pinger, began_s = Pinger(), time.monotonic()
    with Daemon(start_timeout_s=START_TIMEOUT_S, store_gib=store_gib, **POOL) as daemon:
        serving_s = time.monotonic()
        with pinger.pinging(daemon.address):
            while (answer := ask(daemon.address, ASK_S, NO_CREDENTIALS)).note:
                if answer.reason or time.monotonic() > began_s + START_TIMEOUT_S:
                    raise StartError(f"the memory of the store does not come: {answer.reason or answer.note}")
                time.sleep(LOOK_S)
            complete_s = time.monotonic()
            time.sleep(AFTER_S)
        ended = pinger.pings[:, 1]
        taken = pinger.pings[:, 1] - pinger.pings[:, 0]
        stop_s = seconds_of(daemon.stop)
    return {
        "serving_s": serving_s - began_s,
        "complete_s": complete_s - began_s,
        "ping_growing_max_s": _longest(taken[ended <= complete_s]),
        "ping_max_s": _longest(taken[ended > complete_s]),
        "stop_s": stop_s,
    }


def _longest(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return float(seconds.max()) if len(seconds) else None


def run(options: StartOptions) -> dict[str, Any]:
    """Return the figures of `start_once`, and `empty_serving_s`, those of a daemon without a store."""
    empty = start_once(0.0)
    return (
        asdict(options)
        | {"num_processors": num_processors(), "empty_serving_s": empty["serving_s"]}
        | start_once(options.store_gib)
    )


LABELS = {
    "empty_serving_s": "start until it serves, without a store",
    "serving_s": "start until it serves",
    "complete_s": "start until all memory is there",
    "ping_growing_max_s": "longest ping until then",
    "ping_max_s": "longest ping afterwards",
    "stop_s": "end",
}


def render(results: dict[str, Any], console: Console) -> None:
    size, processors = results["store_gib"], results["num_processors"]
    rows = table(f"Start of a daemon with a block store of {size:g} GiB, {processors} processors", ("what",), ("s",))
    for name, label in LABELS.items():
        rows.add_row(label, "" if results[name] is None else f"{results[name]:.3g}")
    console.print(rows)
