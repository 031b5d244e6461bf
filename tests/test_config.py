"""One configuration from options, environment and file. Errors name the field and its source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from each_row import each_row

from kvservice.config import ServeConfig
from kvservice.config_sources import load_config
from kvservice.errors import InvalidArgumentError


def test_an_option_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvservice.toml"
    file.write_text('block_size = 8\nnum_layers = 3\ndtype = "float32"\n')
    environ = {"KVSERVICE_NUM_LAYERS": "4", "KVSERVICE_BLOCK_SIZE": "16", "HOME": "/"}

    config = load_config({"block_size": 32}, environ, file)

    assert (config.block_size, config.num_layers, config.dtype) == (32, 4, "float32")
    assert config.num_kv_heads == ServeConfig.model_fields["num_kv_heads"].default


# Options, environment, text of the file; the field that is named, and where it was read.
WRONG: list[tuple[dict[str, Any], dict[str, str], str, str, str]] = [
    ({}, {"KVSERVICE_BLOK_SIZE": "16"}, "", "blok_size", "environment"),
    ({}, {}, "blok_size = 16", "blok_size", "kvservice.toml"),
    ({"blok_size": 16}, {}, "", "blok_size", "option"),
    ({}, {"KVSERVICE_BLOCK_SIZE": "twelve"}, "", "block_size", "environment"),
    ({}, {}, "block_size = 12", "block_size", "kvservice.toml"),
    ({}, {}, f"block_size = {'1' * 5000}", "config", "kvservice.toml"),
    ({}, {}, f"block_size = {'[' * 5000}{']' * 5000}", "config", "kvservice.toml"),
    ({}, {}, 'block_size = "4"', "block_size", "must be a whole number, not '4' ({file})"),
    ({}, {}, "block_size = 16.0", "block_size", "must be a whole number, not 16.0 ({file})"),
    ({}, {}, "num_blocks = true", "num_blocks", "must be a whole number, not true ({file})"),
    ({}, {}, 'pool_gib = "1"', "pool_gib", "must be a number, not '1' ({file})"),
    ({}, {}, "spill = 1", "spill", "must be true or false, not 1 ({file})"),
    ({}, {}, 'spill = "no"', "spill", "must be true or false, not 'no' ({file})"),
    ({}, {}, "device = 0", "device", "must be a text, not 0 ({file})"),
    ({}, {}, "dtype = [1]", "dtype", "must be a text, not [1] ({file})"),
    ({"block_size": 512}, {}, "", "block_size", "option"),
    ({"dtype": "int8"}, {}, "", "dtype", "option"),
    ({"head_size": 36}, {}, "", "head_size", "option"),
    ({"num_blocks": 0}, {}, "", "num_blocks", "option"),
    ({"watermark": 1.0}, {}, "", "watermark", "option"),
    ({"http_token": "too-short"}, {}, "", "http_token", "option"),
    ({}, {"KVSERVICE_HTTP_TOKEN": "with a space in it"}, "", "http_token", "environment"),
    ({"event_window": -1}, {}, "", "event_window", "option"),
    ({"pool_gib": "nan"}, {}, "", "pool_gib", "option"),
    ({"session_grace_s": -1}, {}, "", "session_grace_s", "option"),
    ({"tcp_address": "localhost"}, {}, "", "tcp_address", "option"),
    ({"http_address": "localhost:99999"}, {}, "", "http_address", "option"),
    ({"unix_socket_mode": "rw"}, {}, "", "unix_socket_mode", "option"),
    ({"device": "gpu"}, {}, "", "device", "option"),
    ({"device": "cuda:"}, {}, "", "device", "option"),
    ({"gpu_memory_utilization": 0}, {}, "", "gpu_memory_utilization", "option"),
    ({"gpu_memory_utilization": 1.1}, {}, "", "gpu_memory_utilization", "option"),
    ({"kv_cache_dtype": "int4"}, {}, "", "kv_cache_dtype", "option"),
    ({"kv_cache_dtype": "fp8", "head_size": 40}, {}, "", "kv_cache_dtype", "option"),
    ({"kv_scales": "scales.json"}, {}, "", "kv_scales", "option"),
    ({"share_pool": "all"}, {}, "", "share_pool", "option"),
    ({"max_lanes": -1}, {}, "", "max_lanes", "option"),
    ({"store_gib": 0.01}, {}, "", "store_gib", "option"),
    ({"store_gib": "nan"}, {}, "", "store_gib", "option"),
    ({"store_gib": 4, "store_quota_gib": 5}, {}, "", "store_quota_gib", "4"),
    ({"share_store": "on"}, {}, "", "share_store", "option"),
    ({"max_lease_s": 0}, {}, "", "max_lease_s", "option"),
    ({"lane_spin_us": "nan"}, {}, "", "lane_spin_us", "option"),
    ({"max_region_mib": 0}, {}, "", "max_region_mib", "option"),
    ({}, {"KVSERVICE_TRUSTED_UIDS": "root"}, "", "trusted_uids", "environment"),
    ({"trusted_uids": "1,,2"}, {}, "", "trusted_uids", "option"),
]


def test_what_is_wrong_is_named_with_where_it_was_read(tmp_path: Path) -> None:
    file = tmp_path / "kvservice.toml"
    with each_row() as row:
        for options, environ, text, field, origin in WRONG:
            with row((options, environ, text)):
                file.write_text(text)
                with pytest.raises(InvalidArgumentError) as caught:
                    load_config(options, environ, file)
                assert caught.value.field == field
                assert origin.format(file=file) in caught.value.message


# Environment, text of the file; a part of the error.
SAID: list[tuple[dict[str, str], str, str]] = [
    ({}, "store_gib = true", "must be a number, not true"),
    ({}, "max_sessions = false", "must be a whole number, not false"),
    ({}, "gpu_memory_utilization = 0.5", "the pool is on the device cpu, which is no GPU"),
    ({}, 'device = "cuda"\ngpu_memory_utilization = 0.5\npool_gib = 2.0', "pool_gib says how large the pool is"),
    ({}, "otel_sample_ratio = 0.5", "has no effect without otel_endpoint"),
    ({"KVSERVICE_DISK_THREADS": "4"}, "", "has no effect without disk"),
    ({}, "event_token_ids = true\nevent_window = 0", "has no effect without event_window"),
    ({}, 'transfer_protocol = "rdma"', "has no effect without transfer_address"),
    ({}, 'mooncake_device = "mlx5_0"', "has no effect without mooncake"),
    ({}, "store_gib = nan", "finite number"),
    ({}, "pool_gib = inf", "finite number"),
    ({"KVSERVICE_STORE_GIB": ""}, "", "is empty"),
    ({"KVSERVICE_SHARE_STORE": ""}, "", "is empty"),
    ({}, "store-gib = 4", "unknown option, did you mean store_gib?"),
    ({"KVSERVICE_STORE_GB": "4"}, "", "unknown option, did you mean store_gib?"),
    ({}, "zzz = 4", "unknown option ("),
    ({"KVSERVICE_TLS_KEY": "/absent.key"}, "", "a certificate and its key go together"),
    ({"KVSERVICE_HTTP_TOKEN": "short"}, "", "must be 16 to 256 printable characters"),
]


def test_the_text_of_an_error_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "kvservice.toml"
    with each_row() as row:
        for environ, text, said in SAID:
            with row((environ, text)):
                file.write_text(text)
                with pytest.raises(InvalidArgumentError) as caught:
                    load_config({}, environ, file)
                assert said in caught.value.message


def test_texts_may_be_empty_and_a_quota_is_idle_without_a_store() -> None:
    environ = {"KVSERVICE_TCP_ADDRESS": "", "KVSERVICE_STORE_QUOTA_GIB": "5", "KVSERVICE_ENABLE_PREFIX_CACHING": "true"}
    config = load_config({"insecure": True}, environ)
    assert (config.tcp_address, config.store_quota_gib, config.insecure) == ("", 5.0, True)


def test_files_that_cannot_be_read_or_parsed(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="config"):
        load_config({}, {}, tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("block_size = = 4")
    with pytest.raises(InvalidArgumentError, match="config"):
        load_config({}, {}, tmp_path / "broken.toml")


def test_a_pool_too_small_for_one_block_says_how_large_a_block_is() -> None:
    with pytest.raises(InvalidArgumentError, match="2097152 bytes") as caught:
        load_config({"pool_gib": 0.001}, {})
    assert caught.value.field == "pool_gib"


def test_blocks_are_counted_from_sizes() -> None:
    config = load_config({"pool_gib": 1.0, "swap_space_gib": 0.5}, {})
    assert config.layout.block_bytes == 32 * 2 * 8 * 128 * 16 * 2
    assert (config.pool_blocks, config.swap_blocks) == (512, 256)
    assert load_config({"num_blocks": 7}, {}).pool_blocks == 7


def test_a_pool_on_a_gpu_has_its_size_from_the_memory_unless_one_is_given() -> None:
    assert load_config({"device": "cuda"}, {}).pool_blocks is None
    assert load_config({"device": "cuda:0", "pool_gib": 1.0}, {}).pool_blocks == 512
    assert load_config({"device": "cuda:0", "num_blocks": 7}, {}).pool_blocks == 7


def test_devices() -> None:
    for device, named, number in (("cpu", "cpu", None), ("cuda", "cuda:0", 0), ("cuda:3", "cuda:3", 3)):
        config = load_config({"device": device}, {})
        assert (config.device, config.cuda_device) == (named, number)


def test_what_is_stored() -> None:
    stored = {
        "auto": ("bfloat16", 2),
        "fp8": ("float8_e4m3fn", 1),
        "fp8_e4m3": ("float8_e4m3fn", 1),
        "fp8_e5m2": ("float8_e5m2", 1),
    }
    for name, (dtype, item_bytes) in stored.items():
        layout = load_config({"kv_cache_dtype": name, "dtype": "bfloat16"}, {}).layout
        assert (layout.dtype, layout.block_bytes) == (dtype, 32 * 2 * 8 * 128 * 16 * item_bytes), name


def test_the_configuration_cannot_be_changed() -> None:
    config = load_config({}, {})
    with pytest.raises(ValueError, match="frozen"):
        config.block_size = 4  # type: ignore[misc]


def test_kubernetes_service_links_are_not_taken_for_options() -> None:
    links = {"KVSERVICE_SERVICE_HOST": "10.0.0.1", "KVSERVICE_PORT": "tcp://10.0.0.1:1", "KVSERVICE_PORT_1_TCP": "x"}
    assert load_config({}, links) == load_config({}, {})


def test_variables_of_the_build_and_of_the_kernels_are_not_taken_for_options() -> None:
    others = {"KVSERVICE_CUDA": "off", "KVSERVICE_CPU_ISA": "portable"}
    assert load_config({}, others) == load_config({}, {})


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "kvservice.toml").write_bytes(b'dtype = "\xff"')
    with pytest.raises(InvalidArgumentError, match="config"):
        load_config({}, {}, tmp_path / "kvservice.toml")


def test_where_descriptors_are_handed_over() -> None:
    socket = {"unix_socket": "/run/kv.sock"}
    rows: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"allow_client_shm": "on"}, True),
        ({"allow_client_shm": "off"}, False),
        ({"allow_client_shm": "off", "share_pool": "read"}, True),
        ({"allow_client_shm": "off", "share_pool": "write"}, True),
        ({"share_pool": "write", "unix_socket": ""}, False),
        ({"allow_client_shm": "off", "store_gib": 1}, True),
        ({"allow_client_shm": "off", "store_gib": 1, "share_store": "off"}, False),
        ({"allow_client_shm": "off", "share_store": "write"}, False),
    ]
    for options, are_handed_over in rows:
        wanted = "/run/kv.sock.fds" if are_handed_over else ""
        assert load_config(socket | options, {}).fd_socket == wanted, options


def test_the_default_socket_is_where_no_other_user_can_be_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert ServeConfig().unix_socket == "/run/user/1000/kvservice.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert ServeConfig().unix_socket == "/home/user/.kvservice/kvservice.sock"


def test_a_text_of_the_wrong_form_is_told_what_is_right() -> None:
    wrong = {"device": "gpu", "unix_socket_mode": "rw", "trusted_uids": "root"}
    right = {"device": "cpu or cuda or cuda:1", "unix_socket_mode": "0600 or 0666", "trusted_uids": "1000 or 1000,1001"}
    for name, value in wrong.items():
        with pytest.raises(InvalidArgumentError) as refused:
            load_config({name: value}, {})
        assert str(refused.value) == f"{name}: {value!r} does not have the form of {right[name]} (option)"
        for example in ServeConfig.model_fields[name].examples or ():
            load_config({name: example}, {})
    patterns = {name for name, field in ServeConfig.model_fields.items() if "pattern=" in repr(field.metadata)}
    assert patterns == wrong.keys()


def test_who_can_connect_to_the_unix_socket() -> None:
    modes = {"0600": True, "644": True, "0700": True, "0660": False, "0602": False, "620": False}
    private = {mode: load_config({"unix_socket_mode": mode}, {}).unix_socket_is_private for mode in modes}
    assert private == modes


def test_memory_is_shared_over_the_unix_socket_only() -> None:
    assert load_config({}, {}).shares_memory
    assert not load_config({"unix_socket": ""}, {}).shares_memory
    assert not load_config({"allow_client_shm": "off"}, {}).shares_memory


def test_who_is_trusted() -> None:
    assert load_config({}, {}).trusted_uid_set == frozenset()
    assert load_config({"trusted_uids": "1000,0,65534"}, {}).trusted_uid_set == {0, 1000, 65534}
