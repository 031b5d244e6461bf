"""The vLLM connector's checks at the start, and the identity of weights."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvservice.client import StoreNamespace
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.common.identity import short
from kvservice.integrations.common.options import ConnectorOptions
from kvservice.integrations.vllm.checks import check_supported
from kvservice.integrations.vllm.identity import weights_identity, worker_namespace
from kvservice.integrations.vllm.layout import block_layout


class FullAttentionSpec: ...


class MLAAttentionSpec: ...


class SlidingWindowSpec: ...


class MambaSpec: ...


class PrefixLMSpec(FullAttentionSpec):
    non_causal = True


PrefixLMSpec.__name__ = "FullAttentionSpec"


def config(**changes: Any) -> Any:
    values = {"algorithm": "sha256", "scales": False, "dcp": 1, "speculative": None, "caching": True} | changes
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=values["algorithm"],
            calculate_kv_scales=values["scales"],
            enable_prefix_caching=values["caching"],
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=values["dcp"], prefill_context_parallel_size=1),
        speculative_config=values["speculative"],
    )


def caches(*specs: object) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


SEVERAL = SimpleNamespace(kv_cache_specs={"layer.0": FullAttentionSpec(), "layer.1": MLAAttentionSpec()})


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm": "sha256_cbor"}, {"speculative": SimpleNamespace(method="ngram")}]
)
@pytest.mark.parametrize("spec", [FullAttentionSpec(), MLAAttentionSpec(), SEVERAL])
def test_what_is_supported(changes: dict[str, Any], spec: object) -> None:
    """It raises nothing."""
    check_supported(config(**changes), caches(spec), fixed_seed=True)


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"algorithm": "xxhash"}, "prefix_caching_hash_algo", "--prefix-caching-hash-algo sha256_cbor"),
        ({"algorithm": "xxhash_cbor"}, "prefix_caching_hash_algo", "--prefix-caching-hash-algo sha256_cbor"),
        ({"scales": True}, "calculate_kv_scales", "a checkpoint"),
        ({"dcp": 2}, "decode_context_parallel_size", "not supported"),
        ({"caching": False}, "enable_prefix_caching", "is off"),
        ({"speculative": SimpleNamespace(method="eagle")}, "speculative_config", "not supported"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(InvalidArgumentError, match=remedy) as caught:
        check_supported(config(**changes), caches(FullAttentionSpec()), fixed_seed=True)
    assert caught.value.field == field


def test_random_seeds_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="set PYTHONHASHSEED"):
        check_supported(config(), caches(FullAttentionSpec()), fixed_seed=False)


@pytest.mark.parametrize(
    "specs",
    [
        (FullAttentionSpec(), SlidingWindowSpec()),
        (SlidingWindowSpec(),),
        (MambaSpec(),),
        (PrefixLMSpec(),),
        (),
        (SimpleNamespace(kv_cache_specs={"layer.0": FullAttentionSpec(), "layer.1": SlidingWindowSpec()}),),
    ],
)
def test_models_whose_requests_do_not_keep_their_blocks_are_refused(specs: tuple[object, ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        check_supported(config(), caches(*specs), fixed_seed=True)


def model(path: Path | str, **changes: Any) -> Any:
    settings = {"text": "{}", "commit": None, "revision": None, "quantization": None, "seed": 0, "length": 8} | changes
    settings.setdefault("multimodal", None)
    hf_config = SimpleNamespace(to_json_string=lambda use_diff: settings["text"], _commit_hash=settings["commit"])
    return SimpleNamespace(
        model=str(path),
        hf_config=hf_config,
        revision=settings["revision"],
        quantization=settings["quantization"],
        seed=settings["seed"],
        max_model_len=settings["length"],
        multimodal_config=settings["multimodal"],
    )


FILES = SimpleNamespace(load_format="auto")
DUMMY = SimpleNamespace(load_format="dummy")


def test_weights_are_told_apart(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    os.utime(weights, ns=(0, 0))
    found = [weights_identity(model(tmp_path), FILES)]
    assert weights_identity(model(tmp_path, seed=1), FILES) == found[0]
    os.utime(weights, ns=(1, 1))
    found.append(weights_identity(model(tmp_path), FILES))
    weights.write_bytes(b"22")
    os.utime(weights, ns=(1, 1))
    found += [
        weights_identity(model(tmp_path), FILES),
        weights_identity(model(tmp_path, text='{"rope": 1}'), FILES),
        weights_identity(model(tmp_path, quantization="fp8"), FILES),
        weights_identity(model(tmp_path, multimodal=SimpleNamespace(mm_processor_kwargs={"max_pixels": 9})), FILES),
        weights_identity(model(tmp_path), DUMMY),
        weights_identity(model(tmp_path, seed=1), DUMMY),
        weights_identity(model("org/name", revision="main"), FILES),
        weights_identity(model("org/name", revision="main", commit="1234"), FILES),
    ]
    assert len(set(found)) == len(found)


def test_the_length_of_requests_matters_with_longrope_only(tmp_path: Path) -> None:
    def identities(text: str) -> set[str]:
        return {weights_identity(model(tmp_path, text=text, length=length), FILES) for length in (8, 9)}

    assert len(identities('{"rope_type": "longrope"}')) == 2
    assert len(identities('{"rope_type": "yarn"}')) == 1


def test_weights_without_an_identity_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match='set "weights"'):
        weights_identity(model("org/name"), FILES)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 64},
        {"cache_dtype": "fp8"},
        {"dtype": "torch.bfloat16"},
        {"algorithm": "sha256_cbor"},
        {"layers": ["layer.1", "layer.2"]},
        {"engine": "another"},
        {"rank": 1},
        {"size": 3},
        {"weights": "mine"},
        {"seed": "1"},
        {"shape": (2, 4, 8)},
        {"shape": (4, 2, 4)},
    ],
)
def test_workers_share_blocks_only_if_everything_is_equal(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def namespace(**some: Any) -> StoreNamespace:
        values: dict[str, Any] = {
            "block_size": 32,
            "cache_dtype": "auto",
            "dtype": "torch.float16",
            "algorithm": "sha256",
            "layers": ["layer.0", "layer.1"],
            "engine": "one",
            "rank": 0,
            "size": 2,
            "weights": "",
            "seed": "0",
            "shape": (2, 2, 4),
        } | some
        monkeypatch.setenv("PYTHONHASHSEED", values["seed"])
        cache = SimpleNamespace(
            block_size=values["block_size"],
            cache_dtype=values["cache_dtype"],
            prefix_caching_hash_algo=values["algorithm"],
        )
        made = model(tmp_path)
        made.dtype = values["dtype"]
        return worker_namespace(
            SimpleNamespace(model_config=made, cache_config=cache, load_config=FILES),
            block_layout({"layer": torch.zeros(values["shape"])}, 2),
            engine=values["engine"],
            layers=values["layers"],
            weights=values["weights"],
            tensor_parallel=SimpleNamespace(rank_in_group=0, world_size=1),
            pipeline_parallel=SimpleNamespace(rank_in_group=values["rank"], world_size=values["size"]),
        )

    assert namespace() == namespace()
    assert namespace(**changes) != namespace()


def test_long_texts_stay_different() -> None:
    texts = [short("x" * length + "y" * 200) for length in (50, 56, 57, 100)]
    assert len(set(texts)) == 4
    assert max(map(len, texts)) <= 256
    assert texts[1] == "x" * 56 + "y" * 200


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "address"),
        ({"address": ""}, "address"),
        ({"address": 1}, "address"),
        ({"address": "unix:///a", "adress": "x"}, "adress"),
        ({"address": "unix:///a", "lookup_timeout_s": "1"}, "lookup_timeout_s"),
        ({"address": "unix:///a", "transfer_timeout_s": 0}, "transfer_timeout_s"),
        ({"address": "unix:///a", "weights": None}, "weights"),
        ({"address": "unix:///a", "prefill_tokens_per_s": -1}, "prefill_tokens_per_s"),
        ({"address": "unix:///a", "prefill_tokens_per_s": 1e9}, "prefill_tokens_per_s"),
        ({"address": "unix:///a", "verify": 1}, "verify"),
        ({"address": "unix:///a", "lookup_timeout_s": True}, "lookup_timeout_s"),
    ],
)
def test_bad_options_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ConnectorOptions.of(given)
    assert caught.value.field == field


def test_options() -> None:
    options = ConnectorOptions.of({"address": "unix:///a", "transfer_timeout_s": 2, "prefill_tokens_per_s": 5e4})
    assert (options.address, options.transfer_timeout_s, options.lookup_timeout_s) == ("unix:///a", 2, 0.25)
    assert options.prefill_tokens_per_s == 50_000
