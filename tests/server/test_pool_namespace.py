"""The namespace of the pool in the tiers below: which daemons and callers share its blocks."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from daemon_lives import Life, caller
from each_row import each_row
from spill_rig import TOKENS, Start, cached, computed, forget, run, save_all

from kvservice.config import ServeConfig
from kvservice.config_sources import load_config
from kvservice.errors import InvalidArgumentError
from kvservice.server.tiering.pool_tier import pool_identity


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


def test_the_log_says_that_blocks_without_a_name_stay_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk: dict[str, Any] = {"disk": str(tmp_path / "disk"), "store_gib": 0.25, "disk_gib": 0.25}

    async def scenario(options: dict[str, Any]) -> None:
        life = Life(**disk | options)
        store = life.core.store
        if store is not None and store.chain is not None:
            await store.chain.close()
        life.kill()

    rows: list[tuple[dict[str, Any], bool]] = [
        ({}, True), ({"weights": "w"}, False), ({"spill": False}, False), ({"disk_gib": 0.0}, False),
    ]  # fmt: skip
    for options, is_said in rows:
        caplog.clear()
        asyncio.run(scenario(options))
        assert ("go to no tier below: weights has no name" in caplog.text) == is_said, options


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    """A new one is for the daemon alone. Others may only read one that is there."""
    opened = private_sessions(tmp_path / "a" / "b")
    assert opened.stat().st_mode & 0o777 == 0o700
    assert private_sessions(tmp_path / "a" / "b") == opened
    with each_row() as row:
        for mode in (0o700, 0o755, 0o720, 0o702, 0o777, 0o1777):
            with row(oct(mode)):
                folder = tmp_path / oct(mode) / "sessions"
                folder.mkdir(parents=True)
                folder.chmod(mode)
                if mode & 0o022:
                    with pytest.raises(InvalidArgumentError, match="other users can write to it"):
                        private_sessions(folder.parent)
                else:
                    private_sessions(folder.parent)
        for name in ("link", "dangling", "file"):
            with row(name):
                folder = tmp_path / name / "sessions"
                folder.parent.mkdir()
                (folder.parent / "real").mkdir()
                if name == "file":
                    folder.touch()
                else:
                    folder.symlink_to(folder.parent / ("real" if name == "link" else "none"))
                with pytest.raises(InvalidArgumentError, match="there is no directory at this path"):
                    private_sessions(folder.parent)
        if os.geteuid() == 0:  # only root can give a folder away
            with row("another user"):
                folder = tmp_path / "given" / "sessions"
                folder.mkdir(parents=True)
                os.chown(folder, 65534, 65534)
                with pytest.raises(InvalidArgumentError, match="belongs to user 65534"):
                    private_sessions(folder.parent)


def private_sessions(disk: Path) -> Path:
    """Start a daemon with this disk. Returns its folder of saved sessions."""
    Life(disk=str(disk), store_gib=0.0, share_store="off").kill()
    return disk / "sessions"
