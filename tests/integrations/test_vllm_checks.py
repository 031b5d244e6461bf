"""What the vLLM connector refuses at the start, and which workers share blocks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from each_row import each_row
from fake_store import FakeStore
from vllm_connector import FullAttentionSpec, MambaSpec, SlidingWindowSpec, cache_config, connector_config, stores_of
from vllm_requests import BLOCK_SIZE
from vllm_stub import Role

from kvservice.client import StoreNamespace
from kvservice.errors import InvalidArgumentError


class MLAAttentionSpec: ...


class EncoderSpec: ...


class PrefixLMSpec(FullAttentionSpec):
    non_causal = True


PrefixLMSpec.__name__ = "FullAttentionSpec"


@pytest.fixture(autouse=True)
def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def several(*specs: object) -> Any:
    return SimpleNamespace(kv_cache_specs={f"layer.{n}": spec for n, spec in enumerate(specs)})


def start(connector: Any, *specs: object, **changes: Any) -> None:
    """Start an engine, and end it."""
    connector(connector_config(**changes), Role.SCHEDULER, cache_config(*specs)).shutdown()


def test_what_is_supported(vllm_connector: Any) -> None:
    """It raises nothing."""
    rows: list[dict[str, Any]] = [{}, {"algorithm": "sha256"}, {"speculative": SimpleNamespace(method="ngram")}]
    rows.append({"match_unit": BLOCK_SIZE})
    with each_row() as row:
        for changes in rows:
            for spec in (FullAttentionSpec(), MLAAttentionSpec(), several(FullAttentionSpec(), MLAAttentionSpec())):
                with row((changes, spec)):
                    start(vllm_connector, spec, **changes)


def test_configurations_that_are_refused(vllm_connector: Any) -> None:
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"algorithm": "xxhash"}, "prefix_caching_hash_algo", "--prefix-caching-hash-algo sha256_cbor"),
        ({"algorithm": "xxhash_cbor"}, "prefix_caching_hash_algo", "--prefix-caching-hash-algo sha256_cbor"),
        ({"scales": True}, "calculate_kv_scales", "a checkpoint"),
        ({"dcp": 2}, "decode_context_parallel_size", "not supported"),
        ({"caching": False}, "enable_prefix_caching", "is off"),
        ({"speculative": SimpleNamespace(method="eagle")}, "speculative_config", "not supported"),
        ({"match_unit": BLOCK_SIZE // 2}, "prefix_match_unit", f"with blocks of {BLOCK_SIZE}"),
    ]
    with each_row() as row:
        for changes, field, remedy in rows:
            with row(changes):
                with pytest.raises(InvalidArgumentError, match=remedy) as caught:
                    start(vllm_connector, **changes)
                assert caught.value.field == field


def test_random_seeds_are_refused_unless_vllm_has_a_seed_of_its_own(
    vllm_connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = sys.modules["vllm.v1.core.kv_cache_utils"]
    monkeypatch.delenv("PYTHONHASHSEED")
    start(vllm_connector)
    monkeypatch.delattr(hashes, "DEFAULT_NONE_HASH_SEED")
    with pytest.raises(InvalidArgumentError, match="set PYTHONHASHSEED"):
        start(vllm_connector)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    start(vllm_connector)


def test_models_whose_blocks_are_not_the_kv_of_their_tokens_are_refused(vllm_connector: Any) -> None:
    rows: list[tuple[object, ...]] = [
        (FullAttentionSpec(), MambaSpec("none")),
        (FullAttentionSpec(), MambaSpec(num_speculative_blocks=1)),
        (FullAttentionSpec(), EncoderSpec()),
        (PrefixLMSpec(),),
        (several(FullAttentionSpec(), SlidingWindowSpec(8)),),
        (several(SlidingWindowSpec(4), SlidingWindowSpec(8)),),
        (FullAttentionSpec(), SlidingWindowSpec(8, block_size=2 * BLOCK_SIZE)),
    ]
    with each_row() as row:
        for specs in rows:
            with row(specs), pytest.raises(InvalidArgumentError):
                start(vllm_connector, *specs)
        groups = SimpleNamespace(kv_cache_groups=[], num_blocks=8)
        with row("no groups"), pytest.raises(InvalidArgumentError):
            vllm_connector(connector_config(), Role.SCHEDULER, groups)


def test_a_role_that_fails_requests_is_warned_of(vllm_connector: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = connector_config()
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    vllm_connector(config, Role.WORKER, cache_config()).shutdown()
    assert caplog.text == ""
    vllm_connector(config, Role.SCHEDULER, cache_config()).shutdown()
    assert 'kv_load_failure_policy is "fail"' in caplog.text


def namespace(
    connector: Any, layers: tuple[str, ...] = ("layer",), shape: tuple[int, ...] = (8, 2, 4), **changes: Any
) -> StoreNamespace:
    """Return where a worker keeps its blocks."""
    worker = connector(connector_config(**changes), Role.WORKER, cache_config())
    try:
        with stores_of(lambda _: FakeStore()):
            worker.register_kv_caches({layer: torch.zeros(shape) for layer in layers})
        found: StoreNamespace = worker.get_handshake_metadata().namespace
    finally:
        worker.shutdown()
    return found


def test_weights_are_told_apart(vllm_connector: Any, tmp_path: Path) -> None:
    def weights(model: object = tmp_path, **changes: Any) -> str:
        given: dict[str, Any] = {"model": model, "revision": None} | changes
        return namespace(vllm_connector, **given).weights

    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    os.utime(file, ns=(0, 0))
    found = [weights()]
    assert weights(seed=1) == found[0]
    os.utime(file, ns=(1, 1))
    found.append(weights())
    file.write_bytes(b"22")
    os.utime(file, ns=(1, 1))
    found += [
        weights(),
        weights(text='{"rope": 1}'),
        weights(quantization="fp8"),
        weights(multimodal=SimpleNamespace(mm_processor_kwargs={"max_pixels": 9})),
        weights(load_format="dummy"),
        weights(load_format="dummy", seed=1),
        weights("org/name", revision="main"),
        weights("org/name", revision="main", commit="1234"),
    ]
    assert len(set(found)) == len(found)
    with pytest.raises(InvalidArgumentError, match='set "weights"'):
        weights("org/name")


def test_the_length_of_requests_matters_with_longrope_only(vllm_connector: Any) -> None:
    for rope, count in (("longrope", 2), ("yarn", 1)):
        text = f'{{"rope_type": "{rope}"}}'
        assert len({namespace(vllm_connector, text=text, length=length).weights for length in (8, 9)}) == count


def test_workers_share_blocks_only_if_everything_is_equal(vllm_connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, backend = vllm_connector.groups, vllm_connector.backend
    expected = namespace(vllm_connector)
    assert namespace(vllm_connector) == expected
    rows: list[dict[str, Any]] = [
        {"block_size": 64},
        {"cache_dtype": "fp8"},
        {"dtype": "torch.bfloat16"},
        {"algorithm": "sha256"},
        {"layers": ("other",)},
        {"layers": ("layer", "layer.1")},
        {"extra": {"weights": "mine"}},
        {"shape": (8, 4, 2)},
        {"shape": (8, 2, 8)},
    ]
    with each_row() as row:
        for changes in rows:
            with row(changes):
                assert namespace(vllm_connector, **changes) != expected
        for where, name, value in (
            (groups.tensor, "rank_in_group", 1),
            (groups.pipeline, "rank_in_group", 1),
            (groups.pipeline, "world_size", 3),
            (backend, "name", "another"),
        ):
            with row((name, value)), monkeypatch.context() as patch:
                patch.setattr(groups.tensor, "world_size", 2)
                patch.setattr(groups.pipeline, "world_size", 2)
                other = namespace(vllm_connector)
                patch.setattr(where, name, value)
                assert namespace(vllm_connector) != other
        with row("seed"), monkeypatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", "1")
            assert namespace(vllm_connector) != expected


def test_long_texts_stay_different(vllm_connector: Any) -> None:
    texts = [
        namespace(vllm_connector, extra={"weights": "x" * length + "y" * 200}).weights for length in (50, 56, 57, 100)
    ]
    assert len(set(texts)) == 4
    assert max(map(len, texts)) <= 256
    assert texts[1] == "x" * 56 + "y" * 200


def test_bad_options_are_named(vllm_connector: Any) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"address": ""}, "address"),
        ({"address": 1}, "address"),
        ({"adress": "x"}, "adress"),
        ({"lookup_timeout_s": "1"}, "lookup_timeout_s"),
        ({"transfer_timeout_s": 0}, "transfer_timeout_s"),
        ({"weights": None}, "weights"),
        ({"prefill_tokens_per_s": -1}, "prefill_tokens_per_s"),
        ({"prefill_tokens_per_s": 1e9}, "prefill_tokens_per_s"),
        ({"verify": 1}, "verify"),
        ({"lookup_timeout_s": True}, "lookup_timeout_s"),
    ]
    with each_row() as row:
        for given, field in rows:
            with row(given):
                with pytest.raises(InvalidArgumentError) as caught:
                    start(vllm_connector, extra=given)
                assert caught.value.field == field
        with row("no address"):
            config = connector_config()
            del config.kv_transfer_config.kv_connector_extra_config["address"]
            with pytest.raises(InvalidArgumentError) as caught:
                vllm_connector(config, Role.SCHEDULER, cache_config())
            assert caught.value.field == "address"
    start(vllm_connector, extra={"transfer_timeout_s": 2, "prefill_tokens_per_s": 5e4, "verify": True})
