"""Every transport raises the same errors as inline messages, with type and field, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from small_daemons import TRANSPORTS, OpenDaemon

from kvservice.client import KVClient, Session
from kvservice.errors import (
    InvalidArgumentError,
    KVServiceError,
    LayerWrittenError,
    StaleStepError,
    UnknownStepError,
)

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 2, 4, 2, 32
NUM_TOKENS = 45  # enough for the region transport to use regions


def tensors(num_tokens: int = NUM_TOKENS, heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = ((num_tokens, count, HEAD_SIZE) for count in (heads, kv_heads, kv_heads))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def changed(place: int, change: Callable[[np.ndarray], Any]) -> list[Any]:
    return [change(one) if n == place else one for n, one in enumerate(tensors())]


def wrong_calls(step: Any, written: Any) -> Iterator[tuple[str, Callable[[], Any], type[KVServiceError], str]]:
    """Invalid attention calls. `step` has NUM_TOKENS tokens of one sequence; layer 0 of `written` is written."""
    good = tensors()
    for layer in (-1, LAYERS, 2**31 - 1):
        yield f"layer {layer}", partial(step.extend, layer, *good), InvalidArgumentError, "layer"
    yield "a layer again", partial(written.extend, 0, *tensors(5)), LayerWrittenError, "layer"
    yield "decode", partial(step.decode, 0, *good), InvalidArgumentError, "step_id"
    for place, name in enumerate(("query", "key", "value")):
        wrong: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
            "a token less": (lambda one: one[1:], "shape"),
            "no tokens": (lambda one: one[:0], "shape"),
            "a head less": (lambda one: one[:, 1:], "shape"),
            "no heads": (lambda one: one[:, :0], "shape"),
            "half a head": (lambda one: one[:, :, ::2], "shape"),
            "flat": (lambda one: one.reshape(-1), "shape"),
            "half precision": (lambda one: one.astype(np.float16), "data_type"),
        }
        for what, (change, field) in wrong.items():
            call = partial(step.extend, 0, *changed(place, change))
            yield f"{name}: {what}", call, InvalidArgumentError, f"{name}.{field}"
    options: dict[str, list[Any]] = {
        "scale": [0.0, math.nan, math.inf],
        "sliding_window": [-1, -(2**31)],
        "logits_soft_cap": [-1.0, math.nan, math.inf],
        "alibi_slopes": [
            [1.0],
            [1.0] * 5,
            [1.0, 1.0, 1.0, math.nan],
            [1.0, 1.0, 1.0, math.inf],
            [1.0, 1.0, 1.0, 1e300],
        ],
    }
    for name, values in options.items():
        for value in values:
            yield (
                f"{name} {value}",
                partial(step.extend, 0, *good, **{name: value}),
                InvalidArgumentError,
                f"options.{name}",
            )


def wrong_writes(step: Any, written: Any) -> Iterator[tuple[str, Callable[[], Any], type[KVServiceError], str]]:
    """Invalid calls of `write`, with the same arguments as `wrong_calls`."""
    one = tensors()[1:]
    every = [np.stack([part] * LAYERS) for part in one]
    few = [np.stack([part] * LAYERS) for part in tensors(5)[1:]]
    for layer in (-1, LAYERS):
        yield f"layer {layer}", partial(step.write, *one, layer), InvalidArgumentError, "layer"
    yield "a layer again", partial(written.write, *tensors(5)[1:], 0), LayerWrittenError, "layer"
    yield "all after one", partial(written.write, *few), LayerWrittenError, "layer"
    for place, name in enumerate(("key", "value")):
        wrong: dict[str, tuple[list[np.ndarray], int | None, Any, str]] = {
            "all as one": (one, 0, lambda _, part=every[place]: part, "shape"),
            "one as all": (every, None, lambda _, part=one[place]: part, "shape"),
            "a layer less": (every, None, lambda part: part[1:], "shape"),
            "a layer more": (every, None, lambda part: np.concatenate([part, part[:1]]), "shape"),
            "a token less": (one, 0, lambda part: part[1:], "shape"),
            "a token less of all": (every, None, lambda part: part[:, 1:], "shape"),
            "a head less": (one, 1, lambda part: part[:, 1:], "shape"),
            "half precision": (one, 0, lambda part: part.astype(np.float16), "data_type"),
            "half precision of all": (every, None, lambda part: part.astype(np.float16), "data_type"),
        }
        for what, (good, number, change, field) in wrong.items():
            parts = [change(part) if n == place else part for n, part in enumerate(good)]
            call = partial(step.write, *parts, number)
            yield f"{name}: {what}", call, InvalidArgumentError, f"{name}.{field}"


@pytest.fixture(params=["inline", *TRANSPORTS])
def kv(open_daemon: OpenDaemon, request: pytest.FixtureRequest) -> Iterator[Session]:
    transport, share_pool = TRANSPORTS.get(request.param, ("inline", "write"))
    with (
        KVClient(open_daemon("float32", share_pool).address, transport=transport) as client,
        client.session() as session,
    ):
        yield session
        session.reset_prefix_cache()


@pytest.mark.parametrize("wrong", [wrong_calls, wrong_writes])
def test_what_is_wrong_is_refused_and_changes_nothing(kv: Session, wrong: Callable[..., Iterator[Any]]) -> None:
    step = kv.open_step([kv.allocate(range(NUM_TOKENS))])
    written = kv.open_step([kv.allocate(range(500, 505))])
    written.extend(0, *tensors(5))
    found = []
    for name, call, kind, field in wrong(step, written):
        try:
            call()
        except KVServiceError as error:
            if (type(error), error.field) != (kind, field):
                found.append(f"{name}: {type(error).__name__} of {error.field!r}, not {kind.__name__} of {field!r}")
        else:
            found.append(f"{name}: was done")
    assert not found, "\n".join(found)
    # The step accepts its layers as if there had been no errors.
    fresh = kv.open_step([kv.allocate(range(900, 900 + NUM_TOKENS))])
    for layer in range(LAYERS):
        np.testing.assert_array_equal(step.extend(layer, *tensors()), fresh.extend(layer, *tensors()))
    written.extend(1, *tensors(5))
    assert [one.num_computed_tokens for one in kv.describe()] == [NUM_TOKENS, 5, NUM_TOKENS]


END_A_STEP: dict[str, Callable[[Session, Any], Any]] = {
    "append": lambda kv, one: kv.append([one], [1]),
    "open_step": lambda kv, one: kv.open_step([one]),
    "truncate": lambda kv, one: kv.truncate(one, 40),
    "free": lambda kv, one: kv.free([one]),
    "swap_out": lambda kv, one: kv.swap_out([one]),
}


def test_a_step_that_has_ended_is_stale(kv: Session) -> None:
    query, key, value = tensors()
    with each_row() as row:
        for name, end in END_A_STEP.items():
            for begun in (False, True):
                sequence = kv.allocate(range(NUM_TOKENS))
                with row(f"{name}, {'begun' if begun else 'not begun'}"):
                    stale = kv.open_step([sequence])
                    if begun:
                        stale.extend(0, query, key, value)
                    end(kv, sequence)
                    for call in (
                        lambda: stale.extend(1, query, key, value),  # noqa: B023
                        lambda: stale.write(key, value, 1),  # noqa: B023
                    ):
                        with pytest.raises(StaleStepError) as caught:
                            call()
                        assert caught.value.field == "step_id"
                if name != "free":
                    kv.free([sequence])


def test_a_step_that_never_was(kv: Session) -> None:
    step = kv.open_step([kv.allocate(range(NUM_TOKENS))])
    step.info = replace(step.info, step_id=step.step_id + 1000)
    with pytest.raises((UnknownStepError, StaleStepError)) as caught:
        step.extend(0, *tensors())
    assert caught.value.field == "step_id"
