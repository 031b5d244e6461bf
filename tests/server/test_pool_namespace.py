"""The namespace of the pool in the tiers below: which daemons and callers share its blocks."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from daemon_lives import Life, caller
from kept_files import HeldFiles
from spill_rig import TOKENS, Start, cached, computed, forget, run, save_all

from kvservice.config import ServeConfig
from kvservice.config_sources import load_config
from kvservice.errors import InvalidArgumentError
from kvservice.server.pool_namespace import pool_identity
from kvservice.server.store_calls import identity_of
from kvservice.store.namespaces import POOL_KEYS
from kvservice.v1 import store_pb2


def test_every_option_that_the_bytes_depend_on_is_in_the_identity(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text('{"k_scale": 0.5, "v_scale": 0.5}')
    base: dict[str, Any] = {"weights": "w", "store_gib": 1}
    changes: list[dict[str, Any]] = [
        {}, {"weights": "v"}, {"num_layers": 31}, {"num_kv_heads": 4}, {"head_size": 64}, {"dtype": "float16"},
        {"block_size": 32}, {"device": "cuda", "kv_cache_dtype": "fp8_e4m3"},
        {"device": "cuda", "kv_cache_dtype": "fp8_e5m2"},
        {"device": "cuda", "kv_cache_dtype": "fp8_e5m2", "kv_scales": str(scales)}, {"weights": ""},
    ]  # fmt: skip
    identities = [pool_identity(ServeConfig(**base | change)) for change in changes]
    assert len(set(identities)) == len(changes)
    assert [one.outlives_daemon for one in identities] == [True] * (len(changes) - 1) + [False]
    assert pool_identity(ServeConfig(**base | {"pool_gib": 3, "max_sequences": 3})) == identities[0]
    assert all(
        value
        for name, value in dataclasses.asdict(identities[0]).items()
        if name not in ("tenant", "tp_rank", "pp_rank")
    )


def test_a_snapshot_directory_names_the_weights(tmp_path: Path) -> None:
    directory = tmp_path / "models--org--small-model" / "snapshots" / "0123abc"
    directory.mkdir(parents=True)
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}
    (directory / "config.json").write_text(str(config).replace("'", '"'))
    for path in (directory, directory / "config.json"):
        loaded = load_config({"model": str(path)}, {})
        assert loaded.weights == "org/small-model@0123abc"
        assert pool_identity(loaded).model == "org/small-model"
    assert load_config({"model": str(directory), "weights": "mine"}, {}).weights == "mine"
    other = tmp_path / "plain"
    other.mkdir()
    (other / "config.json").write_text((directory / "config.json").read_text())
    loaded = load_config({"model": str(other)}, {})
    assert loaded.weights == ""
    assert pool_identity(loaded).model == "plain"


def test_clients_cannot_open_the_namespace_of_the_pool() -> None:
    message = store_pb2.StoreNamespace(model="m", block_bytes=4096, key_algorithm=POOL_KEYS)
    with pytest.raises(InvalidArgumentError, match="daemon's own") as caught:
        identity_of(message, "")
    assert caught.value.field == "namespace.key_algorithm"


def test_sessions_of_all_callers_share_as_the_pool_does(start_spilling: Start) -> None:
    life = start_spilling()

    async def scenario() -> None:
        with caller("a"):
            session = life.open("a", tenant="a")
            await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        with caller("b"):
            other = life.open("b", tenant="b")
            assert await cached(life, other, TOKENS, 2) == 40

    run(scenario())


@pytest.mark.parametrize(
    ("options", "is_said"),
    [({}, True), ({"weights": "w"}, False), ({"spill": False}, False), ({"disk_gib": 0.0}, False)],
)
def test_the_log_says_that_blocks_without_a_name_stay_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_said: bool
) -> None:
    async def scenario() -> None:
        disk: dict[str, Any] = {"disk": str(tmp_path / "disk"), "store_gib": 0.25, "disk_gib": 0.25}
        life = Life(HeldFiles(), **disk | options)
        store = life.core.store
        if store is not None and store.chain is not None:
            await store.chain.close()
        life.kill()

    asyncio.run(scenario())
    assert ("go to no tier below: weights has no name" in caplog.text) == is_said
