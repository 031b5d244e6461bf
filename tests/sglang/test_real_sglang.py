"""SGLang's own cache controller, with host pools of SGLang, over a daemon's store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_pool import SMALL_POOL
from waiting import until

from kvservice.errors import InvalidArgumentError
from kvservice.launch import Daemon

# SGLang warns about devices at import.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

TOKENS = list(range(100, 112))
LAYOUTS = [(mla, layout) for mla in (False, True) for layout in ("layer_first", "page_first", "page_first_direct")]


@pytest.fixture(scope="module")
def rig() -> Any:
    import sglang_rig

    return sglang_rig


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Daemon(**SMALL_POOL | {"store_gib": 1 / 64}) as daemon:
        yield daemon.address


@pytest.mark.parametrize(("mla", "layout"), [*LAYOUTS, (False, "page_head")])
def test_another_controller_loads_the_pages(rig: Any, address: str, mla: bool, layout: str) -> None:
    with rig.engine(address, layout, mla=mla) as writer, rig.engine(address, layout, mla=mla) as reader:
        written = writer.back_up(TOKENS)
        loaded = reader.prefetch(TOKENS)
        assert len(written) == len(loaded) == len(TOKENS) // rig.PAGE_SIZE
        assert all(torch.equal(one, other) for one, other in zip(written, loaded, strict=True))
        assert not torch.equal(written[0], written[1])
        # They share the prefix alone.
        assert len(reader.prefetch([*TOKENS[:8], 7, 7, 7, 7])) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "page_first"},
        {"mla": True},
        {"dtype": torch.float16},
        {"weights": "others"},
        {"model": "other"},
        {"rank": (1, 2)},
        {"start_layer": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_makes_other_bytes_is_a_miss(rig: Any, address: str, change: dict[str, Any]) -> None:
    options = {"layout": "layer_first", "weights": f"of {change}"}
    with rig.engine(address, **options) as writer, rig.engine(address, **options | change) as reader:
        writer.back_up(TOKENS)
        assert reader.prefetch(TOKENS) == []


def test_ranks_with_mla_share_pages(rig: Any, address: str) -> None:
    with (
        rig.engine(address, "page_first", mla=True, weights="ranks") as writer,
        rig.engine(address, "page_first", mla=True, weights="ranks", rank=(1, 2)) as reader,
    ):
        writer.back_up(TOKENS)
        assert len(reader.prefetch(TOKENS)) == 3


def test_without_the_daemon_nothing_is_found(rig: Any) -> None:
    with Daemon(**SMALL_POOL | {"store_gib": 1 / 64}) as daemon, rig.engine(daemon.address, "page_first") as engine:
        engine.back_up(TOKENS)
        assert len(engine.prefetch(TOKENS)) == 3
        daemon.process.kill()
        daemon.process.wait()
        # Its memory is mapped until the client has noticed.
        until(lambda: engine.prefetch(TOKENS) == [])
        assert engine.backend.batch_set_v1(["0" * 64], torch.arange(rig.PAGE_SIZE)) == [False]
        assert engine.backend.clear() is False


def test_a_clear_removes_the_pages(rig: Any, address: str) -> None:
    with rig.engine(address, "page_first", weights="cleared") as engine:
        engine.back_up(TOKENS)
        assert engine.backend.clear() is True
        assert engine.prefetch(TOKENS) == []


def test_a_wrong_number_of_tokens_is_refused(rig: Any, address: str) -> None:
    with rig.engine(address, "page_first") as engine:
        for indices in (torch.arange(rig.PAGE_SIZE - 1), torch.arange(1, rig.PAGE_SIZE + 1)):
            with pytest.raises(InvalidArgumentError) as caught:
                engine.backend.batch_set_v1(["0" * 64], indices)
            assert caught.value.field == "host_indices"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"kvservice": {}}, "address"),
        ({"kvservice": {"address": "unix:///none", "switch_interval_s": 1}}, "switch_interval_s"),
        ({"weights": ""}, "weights"),
    ],
)
def test_bad_options_are_refused(rig: Any, address: str, change: dict[str, Any], field: str) -> None:
    weights = change.pop("weights", "some")
    with (
        pytest.raises(InvalidArgumentError) as caught,
        rig.engine(address, "page_first", weights=weights, extra=change),
    ):
        pass
    assert caught.value.field == field


def test_the_interpreter_lock_is_passed_on_sooner(rig: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    intervals = list[float]()
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.005)
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    for options in ({}, {"switch_interval_s": 0}, {"switch_interval_s": 0.002}, {"switch_interval_s": 0.5}):
        with rig.engine(address, "page_first", extra={"kvservice": {"address": address, "weights": "some", **options}}):
            pass
    assert intervals == [0.0005, 0.002, 0.005]


def test_pools_beside_k_and_v_are_refused(rig: Any, address: str) -> None:
    with rig.engine(address, "page_first") as engine, pytest.raises(InvalidArgumentError):
        engine.backend.register_mem_host_pool_v2(engine.pool, "mamba")
